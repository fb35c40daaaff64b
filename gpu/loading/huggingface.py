"""Models in Hugging Face folders: config.json and safetensors. Pickled weights are never read."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from callboard.gpu.loading.checkpoint import TensorInfo
from callboard.gpu.loading.config import ModelConfig
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.safetensors_file import SafetensorsTensor, read_safetensors
from callboard.gpu.loading.weight_file import WeightFile
from callboard.gpu.models.config import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    PositiveInt,
    YarnScaling,
)

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE_BYTES = 2**22
"""What is read at once: so little stays in the cache of the CPU until it is copied."""

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


T = TypeVar("T")


class _Config(msgspec.Struct, frozen=True):
    """The keys of config.json that matter, with the defaults that transformers gives them."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    architectures: list[str] | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """Both of the above in one, as transformers writes it since version 5."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    partial_rotary_factor: float = 1.0
    sliding_window: PositiveInt | None = 4096
    use_sliding_window: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, Any] | None = None


class _Rope(msgspec.Struct, frozen=True):
    """What every kind of rope_parameters or rope_scaling may say."""

    rope_theta: float | None = None
    rope_type: str | None = None
    old_rope_type: str | None = msgspec.field(name="type", default=None)


class _GenerationConfig(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class HuggingFaceSource:
    """A folder as `save_pretrained` writes it."""

    def __init__(self, folder: Path, source: str, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self.config = read_config_json(folder / _CONFIG, source)

    def open(self) -> "SafetensorsCheckpoint":
        paths = _weight_files(self._folder)
        files = [self._files.enter_context(WeightFile(path)) for path in paths]
        return SafetensorsCheckpoint(str(self._folder), files)


def read_config_json(path: Path, source: str) -> ModelConfig:
    """Read a config.json, and the generation_config.json beside it where there is one."""
    config = _decode(path, _Config)
    architecture, decoder = _decoder_config(path, config)
    generation_path = path.with_name(_GENERATION_CONFIG)
    generation = (
        _decode(generation_path, _GenerationConfig)
        if generation_path.exists()
        else _GenerationConfig()
    )
    eos_token_ids = {
        token_id
        for token_id in _as_list(config.eos_token_id) + _as_list(generation.eos_token_id)
        if 0 <= token_id < decoder.vocab_size  # some say -1 for none
    }
    return ModelConfig(
        source=source,
        format="huggingface",
        architecture=architecture,
        decoder=decoder,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        bos_token_id=config.bos_token_id,
    )


class SafetensorsCheckpoint:
    """The tensors of a folder's safetensors files; see `Checkpoint`."""

    def __init__(self, source: str, files: Iterable[WeightFile]) -> None:
        self.source = source
        self._stored = {
            name: (file, tensor)
            for file in files
            for name, tensor in read_safetensors(file).items()
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: _describe(file, tensor) for name, (file, tensor) in self._stored.items()
        }

    def stored_name(self, name: str) -> str:
        return name

    def read_into(self, name: str, weight: "Tensor") -> None:
        import torch

        file, stored = self._stored[name]
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[stored.dtype])
        as_stored = weight.dtype == dtype and weight.device.type == "cpu"
        elements, length = weight.view(-1), _PIECE_BYTES // dtype.itemsize
        piece = torch.empty(0 if as_stored else min(length, len(elements)), dtype=dtype)
        for start in range(0, len(elements), length):
            part = elements[start : start + length]
            content = part if as_stored else piece[: len(part)]
            offset = stored.offset + start * dtype.itemsize
            file.read_into(_bytes_of(content), offset, what=f"tensor {name!r}")
            part.copy_(content)  # does nothing where they are one


def _bytes_of(content: "Tensor") -> memoryview:
    import torch

    return content.view(torch.uint8).numpy().data


def _decoder_config(path: Path, config: _Config) -> tuple[str, DecoderConfig]:
    architecture = _architecture(path, config)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    _check_supported(path, config)
    rope = _convert(path, _rope_parameters(config), _Rope)
    rope_scaling = _rope_scaling(path, config, rope.rope_type or rope.old_rope_type)
    try:
        return architecture, DecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
            max_sequence_length=_max_sequence_length(architecture, config),
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=rope.rope_theta or config.rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=is_qwen2 or config.attention_bias,
            output_bias=config.attention_bias and not is_qwen2,
            mlp_bias=config.mlp_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
        )
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error


def _check_supported(path: Path, config: _Config) -> None:
    if config.hidden_act != "silu":
        raise ModelError(f"{path}: hidden_act {config.hidden_act!r} is not supported; silu is")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method")
        raise ModelError(f"{path}: weights quantised by {method!r} are not supported")
    rotated = _rope_parameters(config).get("partial_rotary_factor", config.partial_rotary_factor)
    if rotated != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor {rotated!r} is not supported; 1.0 is")


def _max_sequence_length(architecture: str, config: _Config) -> int:
    """Cut the length at a sliding window: up to there, sliding and full attention are the same."""
    slides = architecture == "MistralForCausalLM" or config.use_sliding_window
    if slides and config.sliding_window is not None:
        return min(config.max_position_embeddings, config.sliding_window)
    return config.max_position_embeddings


def _rope_parameters(config: _Config) -> dict[str, Any]:
    return config.rope_parameters or config.rope_scaling or {}


def _rope_scaling(
    path: Path, config: _Config, rope_type: str | None
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    parameters = {
        key: value
        for key, value in _rope_parameters(config).items()
        if key not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    match rope_type:
        case None | "default":
            return None
        case "linear":
            parameters.pop("original_max_position_embeddings", None)  # without effect
            return _convert(path, parameters, LinearScaling)
        case "llama3":
            return _convert(path, parameters, Llama3Scaling)
        case "yarn":
            parameters.setdefault(
                "original_max_position_embeddings", config.max_position_embeddings
            )
            return _convert(path, parameters, YarnScaling)
        case _:
            raise ModelError(
                f"{path}: rope scaling {rope_type!r} is not supported; default, linear, llama3 and"
                " yarn are"
            )


def _architecture(path: Path, config: _Config) -> str:
    architecture = (config.architectures or [""])[0]
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {architecture!r} is not supported; those in Hugging Face"
            f" folders are {', '.join(_ARCHITECTURES)}"
        )
    return architecture


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else ids


def _convert(path: Path, values: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: rope parameters: {error}") from error


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model."""
    if (folder / _INDEX).exists():
        index = _decode(folder / _INDEX, _Index)
        return [_beside(folder / _INDEX, name) for name in sorted(set(index.weight_map.values()))]
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    raise ModelError(
        f"{folder}: has neither {_SINGLE} nor {_INDEX}; other formats of weights are not read"
    )


def _beside(index: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ModelError(f"{index}: names the file {name!r}, which is not in the same folder")
    return index.with_name(name)


def _describe(file: WeightFile, tensor: SafetensorsTensor) -> TensorInfo:
    return TensorInfo(
        file=str(file.path),
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        is_supported=tensor.dtype in _TORCH_DTYPES,
    )
