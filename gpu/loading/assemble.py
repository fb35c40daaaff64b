"""Builds a decoder out of a checkpoint, one weight at a time.

Each weight is read to where it is computed with, in the dtype to compute in, before the next: no
more than the model and a tensor or two are held at once, and nothing of the file stays in use.
"""

import torch
from torch import Tensor

from callboard.gpu.attention.base import AttentionBackend
from callboard.gpu.layers import HeadNorm, RMSNorm, RotaryEmbedding, SwiGLU
from callboard.gpu.linear import Linear
from callboard.gpu.loading.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Checkpoint,
    layer_tensor,
)
from callboard.gpu.models.config import DecoderConfig
from callboard.gpu.models.decoder import Decoder, DecoderLayer, SelfAttention
from callboard.gpu.models.rope import rope_frequencies


class Assembler:
    """Makes the parts of one decoder; the checkpoint has been checked (`check_tensors`)."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        backend: AttentionBackend,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._backend = backend
        self._device = device
        self._dtype = dtype
        self.weights_bytes = 0
        """What the weights made so far take on the device."""

    def decoder(self) -> Decoder:
        config = self._config
        embedding_VD = self._weight(EMBEDDING)
        frequencies, magnitude = rope_frequencies(config)
        return Decoder(
            config,
            embedding_VD=embedding_VD,
            rotary=RotaryEmbedding(frequencies.to(self._device), magnitude),
            layers=[self._layer(layer) for layer in range(config.num_layers)],
            final_norm=self._norm(FINAL_NORM),
            head=(
                Linear(embedding_VD, shared=True)
                if config.tie_word_embeddings
                else Linear(self._weight(HEAD))
            ),
        )

    def _layer(self, layer: int) -> DecoderLayer:
        return DecoderLayer(
            attention_norm=self._norm(layer_tensor(layer, "input_layernorm.weight")),
            attention=self._attention(layer),
            mlp_norm=self._norm(layer_tensor(layer, "post_attention_layernorm.weight")),
            mlp=self._mlp(layer),
        )

    def _attention(self, layer: int) -> SelfAttention:
        config = self._config
        return SelfAttention(
            config,
            self._backend,
            qkv=self._linear(
                layer,
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                bias=config.qkv_bias,
            ),
            output=self._linear(layer, ("self_attn.o_proj",), bias=config.output_bias),
            qk_norm=self._qk_norm(layer) if config.qk_norm else None,
        )

    def _mlp(self, layer: int) -> SwiGLU:
        bias = self._config.mlp_bias
        return SwiGLU(
            gate_up=self._linear(layer, ("mlp.gate_proj", "mlp.up_proj"), bias=bias),
            down=self._linear(layer, ("mlp.down_proj",), bias=bias),
        )

    def _linear(self, layer: int, parts: tuple[str, ...], *, bias: bool) -> Linear:
        weights = [layer_tensor(layer, f"{part}.weight") for part in parts]
        biases = [layer_tensor(layer, f"{part}.bias") for part in parts]
        return Linear(self._weight(*weights), self._weight(*biases) if bias else None)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._weight(name), self._config.rms_norm_eps)

    def _qk_norm(self, layer: int) -> HeadNorm:
        config = self._config
        q_H = self._weight(layer_tensor(layer, "self_attn.q_norm.weight"))
        k_H = self._weight(layer_tensor(layer, "self_attn.k_norm.weight"))
        weight_NH = torch.cat(
            (q_H.expand(config.num_heads, -1), k_H.expand(config.num_kv_heads, -1))
        )
        return HeadNorm(weight_NH, config.rms_norm_eps)

    def _weight(self, *names: str) -> Tensor:
        """Copy tensors, one below the other, into one of our own."""
        shapes = [self._checkpoint.tensors[name].shape for name in names]
        rows = [shape[0] for shape in shapes]
        weight = torch.empty((sum(rows), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, weight.split_with_sizes(rows), strict=True):
            self._checkpoint.read_into(name, part)
        self.weights_bytes += weight.nbytes
        return weight
