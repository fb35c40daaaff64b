"""The memory that rows stand in: the caches, which can be given back, and the rows' state slots.

Knows nothing of which rows there are, only which slots are taken.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from callboard.gpu.cache_spec import CacheSpec
from callboard.gpu.caches import Caches
from callboard.gpu.context_check import check_state_slots
from callboard.gpu.device import wait_for
from callboard.gpu.offload import HostCopy, host_copies
from callboard.gpu.rows import NO_SLOT
from callboard.gpu.state_slots import RowSlots, StateSlots
from callboard.messages.errors import MemoryDeallocated


class ContextMemory:
    """What a model keeps of the rows of a context, not taken before `allocate`.

    Args:
        spec: what the model keeps; None where somebody else has the tensors.
        num_blocks: blocks, the dummy included.
        block_tokens: token slots in a block.
        num_states: rows that can have a recurrent state, where the model has any.
        device: where the caches are.
    """

    def __init__(
        self,
        spec: CacheSpec | None,
        *,
        num_blocks: int,
        block_tokens: int,
        num_states: int,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._num_states = num_states
        self._device = device
        self._caches: Caches | None = None
        self._copies: list[HostCopy] = []
        self._slots = StateSlots(num_states) if spec is not None and spec.state else None
        self.allocated = False

    @property
    def has_states(self) -> bool:
        """Whether rows have a recurrent state."""
        return self._slots is not None

    @property
    def bytes(self) -> int:
        """The size of the caches; 0 while they are freed or somebody else's."""
        return self._caches.bytes if self._caches else 0

    @property
    def caches(self) -> Caches:
        """The caches; raises MemoryDeallocated where they are not here."""
        if self._caches is None:
            raise MemoryDeallocated("there are no caches here: they are deallocated, or elsewhere")
        return self._caches

    @property
    def offloaded(self) -> bool:
        """Whether the caches are on the host."""
        return bool(self._copies)

    def allocate(self) -> None:
        """Take the memory, with what was offloaded in it; does nothing where it is taken.

        Raises what `Caches` raises.
        """
        if self.allocated:
            return
        if self._spec is not None:
            self._caches = Caches(
                self._spec,
                num_blocks=self._num_blocks,
                block_tokens=self._block_tokens,
                num_states=self._num_states,
                device=self._device,
            )
            self._bring_back(self._caches)
        self.allocated = True

    def offload(self) -> None:
        """Give the memory back and keep what is in it on the host, until `allocate`.

        Raises what `host_copies` raises, and changes nothing then.
        """
        if self._caches is not None:
            copies = host_copies(self._caches.buffers)
            self.free()
            self._copies = copies
        self.allocated = False

    def free(self) -> None:
        """Give the memory back; the slots of rows stay theirs, for what `offload` has kept."""
        if self._caches is not None:
            self._caches.free()
        self._caches = None
        self._copies = []
        self.allocated = False

    def check_room(self, num_rows: int) -> None:
        """Raise MemoryDeallocated or OutOfStateSlots unless so many rows more can stand here."""
        if not self.allocated:
            raise MemoryDeallocated("no row can be added: the context is deallocated")
        if self._slots is not None:
            self._slots.check_room(num_rows)

    @property
    def free_states(self) -> int | None:
        """Rows that can still get a state; None where they need none."""
        return None if self._slots is None else self._slots.free

    def begin_state(self) -> int:
        """Return the slot of a new row, its states zeroed; NO_SLOT where rows have none."""
        if self._slots is None:
            return NO_SLOT
        slot = self._slots.take()
        self.caches.zero_states(slot)
        return slot

    def end_states(self, slots: Sequence[int]) -> None:
        """Take the slots of rows that leave back."""
        if self._slots is not None:
            self._slots.give_back(slots)

    def row_slots(self, slots_R: npt.NDArray[np.int32]) -> RowSlots | None:
        """Return the slots of the rows of a step as its inputs want them."""
        return None if self._slots is None else RowSlots(slots_R, self._slots.dummy)

    def check(self, rows: npt.NDArray[np.void]) -> None:
        """Raise AssertionError unless exactly these rows have slots, each its own."""
        if self._slots is not None:
            num_slots = self._slots.num_slots
            check_state_slots(rows, num_slots - self._slots.free, num_slots)

    def _bring_back(self, caches: Caches) -> None:
        if self._copies:
            for copy, buffer in zip(self._copies, caches.buffers, strict=True):
                copy.write_to(buffer)
            wait_for(self._device)
            self._copies = []
