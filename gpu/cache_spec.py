"""What a model keeps of every token and of every row: the shapes behind its caches, and their size.

Says which layers keep what and how many bytes that takes; `Caches` holds the tensors.
"""

from typing import Literal

import msgspec
import torch

from callboard.gpu.memory import block_bytes, latent_block_bytes, recurrent_state_bytes
from callboard.messages.errors import ConfigError

LATENT_BLOCK_TOKENS = 64
"""Token slots in a block of latent vectors: the kernels that read them know no other size."""

LayerKind = Literal["attention", "state", "other"]
"""What a layer keeps: keys and values of every token, a state of every row, or nothing."""


class KeyValueShape(msgspec.Struct, frozen=True, kw_only=True):
    """A key and a value a token, in each of the KV heads of this rank."""

    num_kv_heads: int
    head_dim: int


class LatentShape(msgspec.Struct, frozen=True, kw_only=True):
    """One vector a token that stands for the keys and values of all heads (MLA)."""

    kv_lora_rank: int
    rope_head_dim: int

    @property
    def width(self) -> int:
        """Elements of the vector."""
        return self.kv_lora_rank + self.rope_head_dim


class StateShape(msgspec.Struct, frozen=True, kw_only=True):
    """A row's recurrent state in one layer (Mamba): what a convolution and a state space keep."""

    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers of a model keep. Raises ConfigError where the parts do not fit together."""

    layers: tuple[LayerKind, ...]  # of this rank, first to last
    attention: KeyValueShape | LatentShape
    dtype: torch.dtype  # of keys, values and latent vectors
    state: StateShape | None = None

    def __post_init__(self) -> None:
        if "attention" not in self.layers:
            raise ConfigError(
                f"none of the {len(self.layers)} layers is one of attention, and one at least"
                " must be: rows are counted by their blocks"
            )
        if ("state" in self.layers) != (self.state is not None):
            raise ConfigError(
                f"{self.layers.count('state')} layers have a recurrent state, and its shape is"
                f" {self.state}"
            )

    def number(self, layer: int, kind: LayerKind) -> int:
        """Return which of the layers of its kind a layer is; raises IndexError where it is none."""
        if not (0 <= layer < len(self.layers) and self.layers[layer] == kind):
            raise IndexError(f"layer {layer} of {len(self.layers)} is no {kind} layer")
        return self.layers[:layer].count(kind)

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes of one block in all attention layers.

        Raises ConfigError for a block of latent vectors with another size than theirs.
        """
        num_layers = self.layers.count("attention")
        if isinstance(self.attention, LatentShape):
            _check_latent_block(block_tokens)
            return latent_block_bytes(
                num_layers=num_layers,
                block_tokens=block_tokens,
                kv_lora_rank=self.attention.kv_lora_rank,
                rope_head_dim=self.attention.rope_head_dim,
                itemsize=self.dtype.itemsize,
            )
        return block_bytes(
            num_layers=num_layers,
            block_tokens=block_tokens,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            itemsize=self.dtype.itemsize,
        )

    def state_bytes(self) -> int:
        """Return the bytes of one row's state in all layers that have one; 0 where none has."""
        if self.state is None:
            return 0
        return recurrent_state_bytes(
            num_layers=self.layers.count("state"),
            conv_shape=self.state.conv_shape,
            ssm_shape=self.state.ssm_shape,
            conv_itemsize=self.state.conv_dtype.itemsize,
            ssm_itemsize=self.state.ssm_dtype.itemsize,
        )


def _check_latent_block(block_tokens: int) -> None:
    if block_tokens != LATENT_BLOCK_TOKENS:
        raise ConfigError(
            f"block_tokens is {block_tokens}, and must be {LATENT_BLOCK_TOKENS} for a model that"
            " caches latent vectors"
        )
