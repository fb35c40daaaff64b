"""The pool of KV blocks: which ids are free, how often each is held, and which are worth keeping.

Pure bookkeeping over integers; the bytes behind an id belong to the KV cache.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from callboard.gpu.prefix import BlockHash, PrefixIndex
from callboard.messages.errors import OutOfBlocks


class BlockPoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one moment: `free + held == usable`.

    The last three count since the pool was made or reset: blocks that `acquire` looked for and
    found or did not find, and cached blocks given up for new ones.
    """

    usable: int
    free: int  # can be allocated: holds nothing of worth, or evictable
    held: int
    references: int
    high_water: int  # most blocks ever held at once since the pool was made or reset
    cached: int  # in the index, held or not
    evictable: int  # of those, the ones in `free`
    hits: int
    misses: int
    evictions: int


class BlockPool:
    """Hands out block ids 0 to num_blocks - 2; the last id is a dummy that padding may write to.

    A block comes with one reference; `share` adds one, `release` takes one away, and the block is
    free again when none is left. Freed blocks are handed out first, since they are likely to be in
    a cache. Every operation takes constant time a block, and changes nothing when it raises.

    A complete block may be registered under the hash of its tokens once it is computed. Then
    `acquire` finds it for other sequences that begin the same, and it stays cached when nobody
    holds it, until `allocate` runs out of other blocks and evicts: the longest unused first, a
    block only after all that continue it, and none that is held or continued by a held one.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}, and must be at least 2: one is the dummy"
            )
        self.num_blocks = num_blocks
        self._free: list[int] = []
        self._references: list[int] = []
        self._index = PrefixIndex()
        self._outdated: set[int] = set()  # held, with content from before `forget_all`
        self._high_water = 0
        self._hits = 0
        self._misses = 0
        self._evictions = 0
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
        """How many blocks can be allocated now, evicting cached ones if need be."""
        return len(self._free) + self._index.num_idle

    @property
    def held(self) -> int:
        """How many blocks somebody holds, each counted once, and cached ones these continue."""
        return self.usable - self.free

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, all or none; raises OutOfBlocks when fewer are free."""
        self._check_room(count, self.free)
        self._evict(count - len(self._free))
        first = len(self._free) - count
        blocks = self._free[first:]
        del self._free[first:]
        for block in blocks:
            self._references[block] = 1
        self._high_water = max(self._high_water, self.held)
        return blocks

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the cached blocks of the longest prefix of a sequence; changes nothing."""
        return self._index.match(hashes)

    def acquire(self, hashes: Sequence[BlockHash], count: int) -> list[int]:
        """Take the blocks that `match` returns, and behind them `count` new ones, all or none.

        Matched blocks are not evicted for the new ones; raises OutOfBlocks when without them
        fewer than `count` are free.
        """
        cached = self.match(hashes)
        self._check_room(count, self.free - self._index.count_idle(cached))
        for block in cached:
            self._references[block] += 1
            if self._references[block] == 1:
                self._index.hold(block)
        self._hits += len(cached)
        self._misses += len(hashes) - len(cached)
        return cached + self.allocate(count)

    def register(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> bool:
        """Let others find a held block by its hash, now that all of it is computed.

        `parent` is the hash of the block before it, None for a first one. A hash keeps the block
        it was registered with first. False when nobody will find the hash, since the parent is
        not cached, nobody holds it (who registers has a copy of it, and is to keep no more blocks
        than it took), or the block is from before `forget_all`. Raises ValueError when nobody
        holds the block or it has another hash.
        """
        self._check_references({block: 1})
        if block in self._outdated:
            return False
        return self._index.add(block, block_hash, parent)

    def is_cached(self, block: int) -> bool:
        """Return whether this very block is what is found by the hash of its tokens."""
        return block in self._index

    def forget_all(self) -> None:
        """Empty the prefix cache, for weights or KV memory that are not what they were.

        Who holds blocks keeps them, but they cannot be registered any more.
        """
        self._free += [block for block in self._index if self._references[block] == 0]
        self._index = PrefixIndex()
        self._outdated = {block for block, count in enumerate(self._references) if count > 0}

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; raises ValueError when nobody holds one of them."""
        blocks = list(blocks)
        self._check_references(dict.fromkeys(blocks, 1))
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one reference from each block; raises ValueError when there is none to take."""
        self._check_references(Counter(blocks))
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._let_go(block)

    def reset(self) -> None:
        """Make every block free, whoever held it, and forget what was cached and counted."""
        self._free = list(range(self.usable))
        self._references = [0] * self.usable
        self._index = PrefixIndex()
        self._outdated = set()
        self._high_water = self._hits = self._misses = self._evictions = 0

    def references(self, block: int) -> int:
        """Return how often a block is held; raises ValueError for an id that is not the pool's."""
        self._check_id(block)
        return self._references[block]

    def audit(self) -> None:
        """Raise AssertionError unless every block is free once, held, or cached and unheld."""
        free = set(self._free)
        held = {block for block, count in enumerate(self._references) if count > 0}
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        if free & held:
            raise AssertionError(f"blocks {sorted(free & held)} are both free and held")
        if free & set(self._index):
            raise AssertionError(f"blocks {sorted(free & set(self._index))} are free and cached")
        unheld = set(self._index) - held
        if len(free) + len(held) + len(unheld) != self.usable:
            raise AssertionError(
                f"{len(free)} free + {len(held)} held + {len(unheld)} cached is not {self.usable}"
            )
        if self._outdated - held or self._outdated & set(self._index):
            raise AssertionError("an outdated block is cached, or nobody holds it")
        self._index.audit(held)

    def statistics(self) -> BlockPoolStatistics:
        """Return the pool's numbers now."""
        return BlockPoolStatistics(
            usable=self.usable,
            free=self.free,
            held=self.held,
            references=sum(self._references),
            high_water=self._high_water,
            cached=len(self._index),
            evictable=self._index.num_idle,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _let_go(self, block: int) -> None:
        if block in self._index:
            self._index.let_go(block)
        else:
            self._outdated.discard(block)
            self._free.append(block)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            self._free.append(self._index.evict())
            self._evictions += 1

    def _check_room(self, count: int, free: int) -> None:
        if count < 0:
            raise ValueError(f"count is {count}, and must not be negative")
        if count > free:
            raise OutOfBlocks(
                f"{count} blocks wanted, {free} of {self.usable} are free",
                transient=count <= self.usable,
            )

    def _check_references(self, wanted: Mapping[int, int]) -> None:
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
