"""A Llama-family decoder: Llama, Mistral, Qwen2, Qwen3 and their like.

Letters: T tokens of a step, D model width, N query heads, K key/value heads, H head size, R rows
of which logits are wanted, V vocabulary.

There is no batch dimension: the tokens of all requests stand one after another, and the attention
metadata says which is whose. Run it under `torch.inference_mode`. Knows nothing of text, sampling
or where weights come from.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from callboard.gpu.attention.base import AttentionBackend, AttentionMetadata, write_kv
from callboard.gpu.device import at_least_float32
from callboard.gpu.layers import HeadNorm, RMSNorm, RotaryEmbedding, Rotation, SwiGLU, rotate
from callboard.gpu.linear import Linear
from callboard.gpu.models.config import DecoderConfig

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer", "LayerCaches", "SelfAttention"]


class LayerCaches(Protocol):
    """What a decoder asks of a KV cache."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the layer's K and V caches, each [blocks, block_tokens, kv_heads, head_dim]."""


class SelfAttention:
    """Grouped-query attention over the paged cache, with rotary positions.

    Args:
        qkv: queries, keys and values as one product, [(N + 2 K) * H, D].
        output: the projection back to the model's width.
        qk_norm: a norm of each head of queries and keys, for models that have one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: HeadNorm | None = None,
    ) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._backend = backend
        self._qkv = qkv
        self._output = output
        self._qk_norm = qk_norm

    def __call__(
        self,
        x_TD: Tensor,
        rotation: Rotation,
        caches: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        q_TNH, k_TKH, v_TKH = self._project(x_TD, rotation)
        write_kv(k_TKH, v_TKH, *caches, metadata.slot_mapping)
        out_TNH = self._backend.attend(q_TNH, *caches, metadata, self._scale)
        return self._output(out_TNH.flatten(1))

    def _project(self, x_TD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, N, H] and k [T, K, H], normed and rotated together, and v [T, K, H]."""
        heads = self._qkv(x_TD).view(len(x_TD), -1, self._head_dim)
        qk, v_TKH = heads[:, : -self._num_kv_heads], heads[:, -self._num_kv_heads :]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        qk = rotate(qk, rotation)
        return qk[:, : self._num_heads], qk[:, self._num_heads :], v_TKH


class DecoderLayer:
    """Attention and MLP, each added to its own normalised input."""

    def __init__(
        self, attention_norm: RMSNorm, attention: SelfAttention, mlp_norm: RMSNorm, mlp: SwiGLU
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(
        self,
        hidden_TD: Tensor,
        rotation: Rotation,
        caches: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        attended_TD = self._attention(self._attention_norm(hidden_TD), rotation, caches, metadata)
        hidden_TD = hidden_TD + attended_TD
        return hidden_TD + self._mlp(self._mlp_norm(hidden_TD))


class Decoder:
    """The whole model: token ids in, logits out. `callboard.gpu.loading.load_model` makes one."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding_VD: Tensor,
        rotary: RotaryEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self._embedding_VD = embedding_VD
        self._rotary = rotary
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head

    def forward(
        self, input_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: LayerCaches
    ) -> Tensor:
        """Run the layers over a step's tokens, writing their keys and values; return hidden [T, D].

        `input_ids_T` is int32 or int64 on the model's device. Give rows to be sampled to `logits`.
        """
        hidden_TD = F.embedding(input_ids_T, self._embedding_VD)
        rotation = self._rotary.at(metadata.positions, hidden_TD.dtype)
        for index, layer in enumerate(self._layers):
            hidden_TD = layer(hidden_TD, rotation, kv_cache.layer(index), metadata)
        return hidden_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return logits [R, V] for rows of what `forward` returned; takes the final norm first.

        They are float32, or float64 where the model is.
        """
        logits_RV = self._head(self._final_norm(hidden_RD))
        return logits_RV.to(at_least_float32(logits_RV.dtype))
