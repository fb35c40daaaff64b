"""Models in GGUF files, dequantised through the `gguf` package.

Supported are the architectures `llama` (which Mistral's files name too), `qwen2` and `qwen3`.
"""

import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from callboard.gpu.loading.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TensorInfo,
    layer_tensor,
)
from callboard.gpu.loading.config import ModelConfig
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.gguf_file import GgufFile, GgufTensor, read_gguf
from callboard.gpu.loading.weight_file import WeightFile
from callboard.gpu.models.config import (
    DecoderConfig,
    FrequencyFactors,
    LinearScaling,
    PositiveFloat,
    PositiveInt,
)

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType
    from torch import Tensor

# Whether the rows of q and k are stored for rotating neighbours instead of halves.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

_GLOBAL_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    HEAD: "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUR_GLOBAL_NAMES = {stored: ours for ours, stored in _GLOBAL_NAMES.items()}
_OUR_LAYER_NAMES = {stored: ours for ours, stored in _LAYER_NAMES.items()}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")
_FREQUENCY_FACTORS = "rope_freqs.weight"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_UNSUPPORTED_TYPES = ("I8", "I16", "I32", "I64", "F64")


class _Hyperparameters(msgspec.Struct, frozen=True):
    """The keys of an architecture that say its shape, less the architecture's name."""

    block_count: PositiveInt
    context_length: PositiveInt
    embedding_length: PositiveInt
    feed_forward_length: PositiveInt
    num_heads: PositiveInt = msgspec.field(name="attention.head_count")
    rms_norm_eps: float = msgspec.field(name="attention.layer_norm_rms_epsilon")
    num_kv_heads: PositiveInt | None = msgspec.field(name="attention.head_count_kv", default=None)
    key_length: PositiveInt | None = msgspec.field(name="attention.key_length", default=None)
    value_length: int | None = msgspec.field(name="attention.value_length", default=None)
    expert_count: int = 0
    sliding_window: PositiveInt | None = msgspec.field(
        name="attention.sliding_window", default=None
    )
    rotary_dim: int | None = msgspec.field(name="rope.dimension_count", default=None)
    rope_theta: float = msgspec.field(name="rope.freq_base", default=10000.0)
    rope_scaling: str = msgspec.field(name="rope.scaling.type", default="none")
    rope_factor: PositiveFloat = msgspec.field(name="rope.scaling.factor", default=1.0)


class GgufSource:
    """A GGUF file that holds a whole model."""

    def __init__(self, path: Path, source: str, files: ExitStack) -> None:
        self._file = read_gguf(files.enter_context(WeightFile(path)))
        architecture = _architecture(self._file)
        self.config = ModelConfig(
            source=source,
            format="gguf",
            architecture=architecture,
            decoder=_decoder_config(self._file, architecture),
            eos_token_ids=_eos_token_ids(self._file),
            bos_token_id=_token_id(self._file, "bos_token_id"),
        )

    def open(self) -> "GgufCheckpoint":
        permuted = _ARCHITECTURES[self.config.architecture]
        return GgufCheckpoint(self._file, self.config.decoder, permuted=permuted)


class GgufCheckpoint:
    """The tensors of a GGUF file; see `Checkpoint`.

    Args:
        permuted: whether q and k are stored for rotating neighbours, and are to be put back.
    """

    def __init__(self, file: GgufFile, config: DecoderConfig, *, permuted: bool) -> None:
        self.source = str(file.path)
        self._file = file
        self._config = config
        self._permuted = permuted
        self.tensors: Mapping[str, TensorInfo] = {
            _our_name(tensor.name): _describe(file, tensor)
            for tensor in file.tensors.values()
            if tensor.name != _FREQUENCY_FACTORS  # in the configuration already
        }

    def stored_name(self, name: str) -> str:
        return _stored_name(name)

    def read_into(self, name: str, weight: "Tensor") -> None:
        stored = _dequantize(self._file, self._file.tensors[_stored_name(name)])
        if self._permuted and ".self_attn.q_proj." in name:
            stored = _unpermute(stored, self._config.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            stored = _unpermute(stored, self._config.num_kv_heads)
        weight.copy_(stored)


def _unpermute(weight: "Tensor", num_heads: int) -> "Tensor":
    """Put a head's rows from the order (pair, half) back into (half, pair); weights and biases."""
    rows = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return rows.transpose(1, 2).flatten(0, 2)


def _stored_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    layer, part_and_kind = name.removeprefix("model.layers.").split(".", 1)
    part, kind = part_and_kind.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _our_name(stored_name: str) -> str:
    """Return Hugging Face's name for a stored one, or the stored one where there is none."""
    match = _LAYER_TENSOR.fullmatch(stored_name)
    if match is None or match[2] not in _OUR_LAYER_NAMES:
        return _OUR_GLOBAL_NAMES.get(stored_name, stored_name)
    return layer_tensor(int(match[1]), f"{_OUR_LAYER_NAMES[match[2]]}.{match[3]}")


def _architecture(file: GgufFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{file.path}: no model: it has no general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported; those in GGUF files are"
            f" {', '.join(_ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(f"{file.path}: part of a split model; merge the parts into one file first")
    return architecture


def _decoder_config(file: GgufFile, architecture: str) -> DecoderConfig:
    values = _hyperparameters(file, architecture)
    head_dim = values.key_length or values.embedding_length // values.num_heads
    _check_supported(file, values, head_dim)
    vocab_size = _vocab_size(file)
    rope_scaling = _rope_scaling(file, values, head_dim)
    try:
        return DecoderConfig(
            vocab_size=vocab_size,
            hidden_size=values.embedding_length,
            intermediate_size=values.feed_forward_length,
            num_layers=values.block_count,
            num_heads=values.num_heads,
            num_kv_heads=values.num_kv_heads or values.num_heads,
            head_dim=head_dim,
            # Within the window, sliding and full attention are the same.
            max_sequence_length=min(
                values.context_length, values.sliding_window or values.context_length
            ),
            rms_norm_eps=values.rms_norm_eps,
            rope_theta=values.rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_GLOBAL_NAMES[HEAD] not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        )
    except ValueError as error:
        raise ModelError(f"{file.path}: {error}") from error


def _hyperparameters(file: GgufFile, architecture: str) -> _Hyperparameters:
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    try:
        return msgspec.convert(values, _Hyperparameters)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file.path}: metadata {prefix}*: {error}") from error


def _check_supported(file: GgufFile, values: _Hyperparameters, head_dim: int) -> None:
    if values.expert_count:
        raise ModelError(f"{file.path}: mixtures of experts are not supported")
    for key, size in (
        ("attention.value_length", values.value_length),
        ("rope.dimension_count", values.rotary_dim),
    ):
        if size not in (None, head_dim):
            raise ModelError(f"{file.path}: {key} is {size}; it must be the head size, {head_dim}")


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get(_GLOBAL_NAMES[EMBEDDING])
    if embedding is None or not embedding.shape:
        raise ModelError(f"{file.path}: tensor {_GLOBAL_NAMES[EMBEDDING]!r} is missing")
    return embedding.shape[0]


def _rope_scaling(
    file: GgufFile, values: _Hyperparameters, head_dim: int
) -> LinearScaling | FrequencyFactors | None:
    factors = file.tensors.get(_FREQUENCY_FACTORS)
    match values.rope_scaling, factors:
        case "none", None:
            return None
        case "linear", None:
            return LinearScaling(factor=values.rope_factor)
        case "none", GgufTensor():
            if _describe(file, factors).shape != (head_dim // 2,):
                raise ModelError(
                    f"{file.path}: tensor {factors.name!r} has shape {factors.shape}, not"
                    f" {(head_dim // 2,)}"
                )
            return FrequencyFactors(factors=tuple(_dequantize(file, factors).tolist()))
        case scaling, _:
            raise ModelError(
                f"{file.path}: rope.scaling.type {scaling!r} is not supported; those in GGUF files"
                f" are none and linear, and {_FREQUENCY_FACTORS} with none"
            )


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    ids = {_token_id(file, key) for key in _EOS_KEYS}
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


def _token_id(file: GgufFile, key: str) -> int | None:
    """Return a special token's id; ids that no token has stand for none, and do in some files."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if isinstance(value, int) and 0 <= value < _vocab_size(file):
        return value
    return None


def _describe(file: GgufFile, tensor: GgufTensor) -> TensorInfo:
    """Check that the tensor lies within the file, and say what it is."""
    encoding = _encoding(file, tensor)
    if tensor.offset + _num_bytes(file, tensor) > file.num_bytes:
        raise ModelError(
            f"{file.path}: cut off: tensor {tensor.name!r} ends beyond the file's"
            f" {file.num_bytes} bytes"
        )
    return TensorInfo(
        file=str(file.path),
        name=tensor.name,
        shape=tensor.shape,
        dtype=encoding.name,
        is_supported=encoding.name not in _UNSUPPORTED_TYPES,
    )


def _encoding(file: GgufFile, tensor: GgufTensor) -> "GGMLQuantizationType":
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(tensor.ggml_type)
    except ValueError as error:
        raise ModelError(
            f"{file.path}: tensor {tensor.name!r} has the unknown encoding {tensor.ggml_type}"
        ) from error


def _num_bytes(file: GgufFile, tensor: GgufTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    encoding = _encoding(file, tensor)
    block_elements, block_bytes = GGML_QUANT_SIZES[encoding]
    if not tensor.shape or tensor.shape[-1] % block_elements:
        raise ModelError(
            f"{file.path}: tensor {tensor.name!r} has shape {tensor.shape}; {encoding.name} packs"
            f" rows of a multiple of {block_elements}"
        )
    return math.prod(tensor.shape) // block_elements * block_bytes


def _dequantize(file: GgufFile, tensor: GgufTensor) -> "Tensor":
    """Return the tensor in float32, as memory of its own."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    packed = np.empty(_num_bytes(file, tensor), np.uint8)
    file.contents.read_into(packed.data, tensor.offset, what=f"tensor {tensor.name!r}")
    try:
        values = dequantize(packed.reshape(tensor.shape[0], -1), _encoding(file, tensor))
    except NotImplementedError as error:
        raise ModelError(f"{file.path}: tensor {tensor.name!r}: {error}") from error
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"])).view(tensor.shape)
