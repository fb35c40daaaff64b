"""All a model keeps between steps, layer by layer: keys and values, latent vectors, states.

Layers are numbered as the model numbers them; which of them keep what, `CacheSpec` says.
"""

import torch
from torch import Tensor

from callboard.gpu.cache_spec import CacheSpec, KeyValueShape
from callboard.gpu.kv_cache import KVCache, LatentCache
from callboard.gpu.state_slots import StateCache


class Caches:
    """The buffers of one rank, resident from when this is made until `free`.

    Asking a layer for what it does not keep raises IndexError, asking a freed one RuntimeError.

    Args:
        spec: what the layers keep.
        num_blocks: blocks, the dummy included.
        block_tokens: token slots in a block; 64 for latent vectors, or ConfigError is raised.
        num_states: rows that can have a state; the dummy comes on top.
        device: where the buffers are.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_blocks: int,
        block_tokens: int,
        num_states: int,
        device: torch.device | str,
    ) -> None:
        self._spec = spec
        self._tokens = _token_cache(spec, num_blocks, block_tokens, device)
        self._states = _state_cache(spec, num_states, device)

    @property
    def bytes(self) -> int:
        """The size of all buffers; 0 once they are freed."""
        return self._tokens.bytes + (self._states.bytes if self._states else 0)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """All there is, contiguous and on one device; none once they are freed."""
        return self._tokens.buffers + (self._states.buffers if self._states else ())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's K and V caches, each `[blocks, block_tokens, kv_heads, head_dim]`."""
        return self._key_values(index).layer(self._spec.number(index, "attention"))

    def latent(self, index: int) -> Tensor:
        """Return a layer's latent vectors, `[blocks, block_tokens, width]`."""
        return self._latents(index).layer(self._spec.number(index, "attention"))

    def states(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's conv and ssm states, `[slots + 1, ...]` each; the last is the dummy."""
        return self._all_states(index).layer(self._spec.number(index, "state"))

    def append(self, index: int, k_TKH: Tensor, v_TKH: Tensor, slot_mapping: Tensor) -> None:
        """Store a step's keys and values in the slots of the layer named for them, int64 [T]."""
        number = self._spec.number(index, "attention")
        self._key_values(index).append(number, k_TKH, v_TKH, slot_mapping)

    def append_latent(self, index: int, latent_TW: Tensor, slot_mapping: Tensor) -> None:
        """Store a step's latent vectors in the slots of the layer named for them, int64 [T]."""
        number = self._spec.number(index, "attention")
        self._latents(index).append(number, latent_TW, slot_mapping)

    def zero_states(self, slot: int) -> None:
        """Begin the states of a slot anew in every layer that has them."""
        if self._states is not None:
            self._states.zero(slot)

    def free(self) -> None:
        """Let the buffers go; the memory returns as soon as nobody else holds a part of them."""
        self._tokens.free()
        if self._states is not None:
            self._states.free()

    def _key_values(self, index: int) -> KVCache:
        if not isinstance(self._tokens, KVCache):
            raise IndexError(f"layer {index} keeps latent vectors, and no keys and values")
        return self._tokens

    def _latents(self, index: int) -> LatentCache:
        if not isinstance(self._tokens, LatentCache):
            raise IndexError(f"layer {index} keeps keys and values, and no latent vectors")
        return self._tokens

    def _all_states(self, index: int) -> StateCache:
        if self._states is None:
            raise IndexError(f"layer {index} keeps no recurrent state: no layer does")
        return self._states


def _token_cache(
    spec: CacheSpec, num_blocks: int, block_tokens: int, device: torch.device | str
) -> KVCache | LatentCache:
    spec.block_bytes(block_tokens)  # raises where the blocks cannot be so long
    num_layers = spec.layers.count("attention")
    if isinstance(spec.attention, KeyValueShape):
        return KVCache(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_kv_heads=spec.attention.num_kv_heads,
            head_dim=spec.attention.head_dim,
            dtype=spec.dtype,
            device=device,
        )
    return LatentCache(
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        width=spec.attention.width,
        dtype=spec.dtype,
        device=device,
    )


def _state_cache(spec: CacheSpec, num_states: int, device: torch.device | str) -> StateCache | None:
    if spec.state is None:
        return None
    return StateCache(
        spec.state,
        num_layers=spec.layers.count("state"),
        num_slots=num_states,
        device=device,
    )
