"""What a decoder is assembled from, whatever the file format: named tensors, checked before read.

The names are Hugging Face's; readers of other formats translate. Letters: D model width, F inner
width of the MLP, NH and KH all query and all key heads' dimensions.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from callboard.gpu.loading.errors import ModelError
from callboard.gpu.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class TensorInfo(NamedTuple):
    """A stored tensor as its file's header describes it."""

    file: str
    name: str
    """In the file's own words."""
    shape: tuple[int, ...]
    dtype: str
    is_supported: bool
    """Whether weights can be read from that dtype: floating point, or quantised from it."""


class Checkpoint(Protocol):
    """Weights that can be read one at a time."""

    @property
    def source(self) -> str:
        """The file or folder, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What is stored, by Hugging Face's names."""

    def stored_name(self, name: str) -> str:
        """Return the file's own name for a tensor, whether it is there or not."""

    def read_into(self, name: str, weight: "Tensor") -> None:
        """Fill a contiguous tensor of the stored one's shape, whatever its device and dtype.

        Raises ModelError, naming file and tensor, where the file has changed since it was opened.
        """


def layer_tensor(layer: int, name: str) -> str:
    """Return the full name of a layer's tensor."""
    return f"model.layers.{layer}.{name}"


def expected_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every weight of a decoder.

    One at a time: a damaged configuration may ask for a billion layers.
    """
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    yield FINAL_NORM, (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, config.hidden_size)
    of_a_layer = _layer_shapes(config)
    for layer in range(config.num_layers):
        for name, shape in of_a_layer.items():
            yield layer_tensor(layer, name), shape


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    D, F = config.hidden_size, config.intermediate_size
    NH = config.num_heads * config.head_dim
    KH = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (NH, D),
        "self_attn.k_proj.weight": (KH, D),
        "self_attn.v_proj.weight": (KH, D),
        "self_attn.o_proj.weight": (D, NH),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    biased: list[str] = []
    if config.qkv_bias:
        biased += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if config.output_bias:
        biased += ["self_attn.o_proj"]
    if config.mlp_bias:
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    if config.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    return shapes


def check_tensors(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Raise ModelError unless every weight is there in the right shape and kind; read none yet.

    Returns the stored names of tensors that the decoder has no use for.
    """
    unused = set(checkpoint.tensors)
    for name, shape in expected_shapes(config):
        _check_tensor(checkpoint, name, shape)
        unused.remove(name)
    return tuple(sorted(checkpoint.tensors[name].name for name in unused))


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    info = checkpoint.tensors.get(name)
    if info is None:
        stored = checkpoint.stored_name(name)
        raise ModelError(f"{checkpoint.source}: tensor {stored!r} of shape {shape} is missing")
    if info.shape != shape:
        raise ModelError(
            f"{info.file}: tensor {info.name!r} has shape {info.shape}, but the model's"
            f" configuration asks for {shape}"
        )
    if not info.is_supported:
        raise ModelError(
            f"{info.file}: tensor {info.name!r} is stored as {info.dtype}, which weights are not"
            " read from"
        )
