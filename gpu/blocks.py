"""The pool of KV blocks: which ids are free, and how often each of the others is held.

Pure bookkeeping over integers; the bytes behind an id belong to the KV cache.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from callboard.messages.errors import OutOfBlocks


class BlockPoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one moment: `free + held == usable`, and `references >= held`."""

    usable: int
    free: int
    held: int
    references: int
    high_water: int  # most blocks ever held at once since the pool was made or reset


class BlockPool:
    """Hands out block ids 0 to num_blocks - 2; the last id is a dummy that padding may write to.

    A block comes with one reference; `share` adds one, `release` takes one away, and the block is
    free again when none is left. Freed blocks are handed out first, since they are likely to be in
    a cache. Every operation takes constant time a block, and changes nothing when it raises.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}, and must be at least 2: one is the dummy"
            )
        self.num_blocks = num_blocks
        self._free: list[int] = []
        self._references: list[int] = []
        self._high_water = 0
        self.reset()

    @property
    def dummy(self) -> int:
        """The id that is never handed out."""
        return self.num_blocks - 1

    @property
    def usable(self) -> int:
        """How many blocks there are to hand out."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._free)

    @property
    def held(self) -> int:
        """How many blocks somebody holds, each counted once."""
        return self.usable - self.free

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none; raises OutOfBlocks when fewer are free."""
        if count < 0:
            raise ValueError(f"count is {count}, and must not be negative")
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} of {self.usable} are free")
        first = self.free - count
        blocks = self._free[first:]
        del self._free[first:]
        for block in blocks:
            self._references[block] = 1
        self._high_water = max(self._high_water, self.held)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; raises ValueError when nobody holds one of them."""
        blocks = list(blocks)
        self._check_references(Counter(dict.fromkeys(blocks, 1)))
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block; raises ValueError when there is none to take."""
        self._check_references(Counter(blocks))
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def reset(self) -> None:
        """Make every block free, whoever held it."""
        self._free = list(range(self.usable))
        self._references = [0] * self.usable
        self._high_water = 0

    def references(self, block: int) -> int:
        """Return how often a block is held; raises ValueError for an id that is not the pool's."""
        self._check_id(block)
        return self._references[block]

    def audit(self) -> None:
        """Raise AssertionError unless every block is either free once or held."""
        free = set(self._free)
        held = {block for block, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        if free & held:
            raise AssertionError(f"blocks {sorted(free & held)} are both free and held")
        if len(free) + len(held) != self.usable:
            raise AssertionError(f"{len(free)} free + {len(held)} held is not {self.usable}")

    def statistics(self) -> BlockPoolStatistics:
        """Return the pool's numbers now."""
        return BlockPoolStatistics(
            usable=self.usable,
            free=self.free,
            held=self.held,
            references=sum(self._references),
            high_water=self._high_water,
        )

    def _check_references(self, wanted: Counter[int]) -> None:
        for block, count in wanted.items():
            self._check_id(block)
            if self._references[block] < count:
                raise ValueError(
                    f"block {block} has {self._references[block]} references, {count} are needed:"
                    " it was released already, or never allocated"
                )

    def _check_id(self, block: int) -> None:
        if not 0 <= block < self.usable:
            raise ValueError(f"block {block} is not one of 0 to {self.usable - 1}")
