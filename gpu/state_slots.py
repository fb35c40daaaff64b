"""Slots of recurrent states: who has which, what is in them, and where a step finds them.

A row of a hybrid model has one slot from its admission until it leaves, whatever place it moves to
and while it waits: only the number of the slot moves, never the state. One slot more than can be
somebody's is there for padding to read and write, the dummy: the last one.

Letters: D rows that decode, P rows that prefill, T tokens of these. Lengths include padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.cache_spec import StateShape
from callboard.gpu.padding import StepShape, extended
from callboard.messages.errors import OutOfStateSlots


class StateSlots:
    """Hands out the slots 0 to num_slots - 1, the one given back last first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many slots can be taken."""
        return len(self._free)

    @property
    def dummy(self) -> int:
        """The slot that is never handed out."""
        return self.num_slots

    def check_room(self, count: int) -> None:
        """Raise OutOfStateSlots unless `count` slots can be taken."""
        if count > len(self._free):
            raise OutOfStateSlots(
                f"{count} recurrent states wanted, {len(self._free)} of {self.num_slots} slots"
                " are free"
            )

    def take(self) -> int:
        """Take a slot; raises OutOfStateSlots when none is free."""
        self.check_room(1)
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def give_back(self, slots: Sequence[int]) -> None:
        """Make slots free again; raises ValueError, and changes nothing, where one is no row's."""
        leaving = set(slots)
        if len(leaving) < len(slots) or not leaving <= self._taken:
            raise ValueError(f"the slots {slots} are not taken, each by one row")
        self._taken -= leaving
        self._free += slots


class StateCache:
    """Every slot's state in every layer that has one: two buffers, resident at once.

    `[layers, slots + 1, *conv_shape]` and `[layers, slots + 1, *ssm_shape]`.
    """

    def __init__(
        self, shape: StateShape, *, num_layers: int, num_slots: int, device: torch.device | str
    ) -> None:
        places = (num_layers, num_slots + 1)
        conv = torch.zeros((*places, *shape.conv_shape), dtype=shape.conv_dtype, device=device)
        ssm = torch.zeros((*places, *shape.ssm_shape), dtype=shape.ssm_dtype, device=device)
        self.buffers: tuple[Tensor, ...] = (conv, ssm)

    @property
    def bytes(self) -> int:
        """The size of both buffers; 0 once they are freed."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the layer's states, `[slots + 1, *conv_shape]` and `[slots + 1, *ssm_shape]`.

        Raises RuntimeError once they are freed.
        """
        if not self.buffers:
            raise RuntimeError("the recurrent states are freed")
        conv, ssm = self.buffers
        return conv[index], ssm[index]

    def zero(self, slot: int) -> None:
        """Begin a slot's states anew in all layers."""
        for buffer in self.buffers:
            buffer[:, slot].zero_()

    def free(self) -> None:
        """Let the buffers go; see `KVCache.free`."""
        self.buffers = ()


class RowSlots(msgspec.Struct, frozen=True):
    """The slots of the rows of a step, and the one that padding names."""

    slots_R: npt.NDArray[np.int32]
    dummy: int


@dataclass(frozen=True, eq=False, slots=True)
class StateMetadata:
    """Which states a step reads and writes: those of its decodes first, then those of its prefills.

    Of the tokens, the first `num_decodes` are the decodes', one each, the others the prefills',
    counted from 0. Padding names the dummy slot and has no tokens. All of it is int32.
    """

    decode_slots_D: Tensor
    prefill_slots_P: Tensor
    prefill_cu_seqlens: Tensor
    """[P + 1]: prefill p has the prefills' tokens prefill_cu_seqlens[p] to [p + 1]."""
    prefill_T: Tensor
    """Which prefill each of the prefills' tokens is of; -1 for padding."""
    num_decodes: int
    """Without padding."""


def state_arrays(
    rows: RowSlots, query_lens_R: npt.NDArray[np.int32], shape: StepShape
) -> list[npt.NDArray[np.int32]]:
    """Return the four arrays of `StateMetadata`, in its order, for rows whose decodes are first."""
    padded, num_decodes = shape.padded, shape.num_decodes
    lens_P = query_lens_R[num_decodes:]
    row_T = np.repeat(np.arange(len(lens_P), dtype=np.int32), lens_P)
    cu_seqlens = np.zeros(len(lens_P) + 1, dtype=np.int32)
    np.cumsum(lens_P, out=cu_seqlens[1:])
    return [
        extended(rows.slots_R[:num_decodes], padded.decodes, rows.dummy),
        extended(rows.slots_R[num_decodes:], padded.prefills, rows.dummy),
        extended(cu_seqlens, padded.prefills + 1, cu_seqlens[-1]),
        extended(row_T, padded.tokens - num_decodes, -1),
    ]


def state_metadata(tensors: Sequence[Tensor], shape: StepShape) -> StateMetadata | None:
    """Return what `state_arrays` became on the device; None where there are no arrays."""
    if not tensors:
        return None
    decode_slots_D, prefill_slots_P, prefill_cu_seqlens, prefill_T = tensors
    return StateMetadata(
        decode_slots_D=decode_slots_D,
        prefill_slots_P=prefill_slots_P,
        prefill_cu_seqlens=prefill_cu_seqlens,
        prefill_T=prefill_T,
        num_decodes=shape.num_decodes,
    )
