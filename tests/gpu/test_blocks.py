import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from callboard.gpu.blocks import BlockPool
from callboard.gpu.prefix import BlockHash, block_hashes
from callboard.messages.errors import OutOfBlocks


def test_a_new_pool_keeps_its_last_block_as_the_dummy() -> None:
    pool = BlockPool(10)

    assert (pool.dummy, pool.usable, pool.free, pool.held) == (9, 9, 9, 0)
    assert 9 not in pool.allocate(9)


def test_a_pool_without_a_block_to_hand_out_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 1, and must be at least 2"):
        BlockPool(1)


def test_the_freed_blocks_are_handed_out_again_first() -> None:
    pool = BlockPool(491)

    assert pool.allocate(4) == [486, 487, 488, 489]
    assert pool.free == 486
    pool.release([488, 489])
    assert pool.free == 488
    assert pool.allocate(1) == [489]


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(2)

    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.free == 2
    assert len(pool.allocate(2)) == 2


def test_nothing_may_be_asked_for() -> None:
    assert BlockPool(2).allocate(0) == []


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count is -1"):
        BlockPool(5).allocate(-1)


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(5)
    [block] = pool.allocate(1)
    pool.share([block])

    pool.release([block])
    assert (pool.free, pool.references(block)) == (3, 1)
    pool.release([block])
    assert (pool.free, pool.references(block)) == (4, 0)


def test_a_block_released_twice_is_refused_and_nothing_changes() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(2)
    pool.release(blocks[:1])

    with pytest.raises(ValueError, match="was released already"):
        pool.release([blocks[1], blocks[0]])
    assert pool.references(blocks[1]) == 1
    pool.audit()


def test_a_block_named_twice_in_one_release_needs_two_references() -> None:
    pool = BlockPool(5)
    [block] = pool.allocate(1)

    with pytest.raises(ValueError, match="1 references, 2 are needed"):
        pool.release([block, block])
    pool.share([block])
    pool.release([block, block])
    assert pool.free == 4


@pytest.mark.parametrize("block", [-1, 4, 5])
def test_the_dummy_and_foreign_ids_are_refused(block: int) -> None:
    pool = BlockPool(5)
    pool.allocate(4)

    with pytest.raises(ValueError, match=f"block {block} is not one of 0 to 3"):
        pool.release([block])
    with pytest.raises(ValueError, match=f"block {block} is not one of 0 to 3"):
        pool.share([block])


def test_a_block_nobody_holds_cannot_be_shared() -> None:
    pool = BlockPool(5)
    held = pool.allocate(1)

    with pytest.raises(ValueError, match="block 0 has 0 references"):
        pool.share([*held, 0])
    assert pool.references(held[0]) == 1


def test_reset_frees_everything_and_no_id_comes_twice() -> None:
    pool = BlockPool(9)
    first = pool.allocate(5)
    pool.release(first[2:4])
    pool.share(first[:1])

    pool.reset()

    assert sorted(pool.allocate(8)) == list(range(8))
    pool.audit()


def test_statistics_say_what_is_held_and_was_held_at_most() -> None:
    pool = BlockPool(9)
    blocks = pool.allocate(5)
    pool.share(blocks[:2])
    pool.release(blocks)

    statistics = pool.statistics()

    assert (statistics.usable, statistics.free, statistics.held) == (8, 6, 2)
    assert (statistics.references, statistics.high_water) == (2, 5)


def test_audit_notices_a_block_that_is_free_and_held() -> None:
    pool = BlockPool(5)
    [block] = pool.allocate(1)
    pool._free.append(block)

    with pytest.raises(AssertionError, match="both free and held"):
        pool.audit()


Operation = tuple[str, int]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60
)


@given(OPERATIONS)
@settings(derandomize=True, database=None, deadline=None, max_examples=100)
def test_blocks_are_conserved_whatever_is_done(operations: list[Operation]) -> None:
    pool = BlockPool(8)
    references: dict[int, int] = {}
    for name, number in operations:
        if name == "allocate" and number <= pool.free:
            blocks = pool.allocate(number)
            assert not references.keys() & set(blocks)
            references.update(dict.fromkeys(blocks, 1))
        elif name == "share" and number in references:
            pool.share([number])
            references[number] += 1
        elif name == "release" and number in references:
            pool.release([number])
            references[number] -= 1
            references = {block: count for block, count in references.items() if count}
        pool.audit()
        assert pool.held == len(references)
        assert pool.statistics().references == sum(references.values())


# With the prefix cache. A sequence is a string of which each letter fills a block.


def hashes_of(text: str) -> list[BlockHash]:
    return block_hashes([ord(letter) for letter in text], 1, salt=b"", weights_version=0)


def register(pool: BlockPool, text: str, blocks: list[int]) -> list[bool]:
    hashes = hashes_of(text)
    parents = [None, *hashes]
    return [pool.register(*each) for each in zip(blocks, hashes, parents, strict=False)]


def compute(pool: BlockPool, text: str) -> list[int]:
    """Hold the blocks of a sequence and register them, as a row does whose prompt was computed."""
    hashes = hashes_of(text)
    blocks = pool.acquire(hashes, len(text) - len(pool.match(hashes)))
    register(pool, text, blocks)
    return blocks


def cache(pool: BlockPool, text: str) -> list[int]:
    """Compute the blocks of a sequence and let go of them."""
    blocks = compute(pool, text)
    pool.release(blocks)
    return blocks


def cached(pool: BlockPool, text: str) -> str:
    """Return the part of a sequence that the pool has."""
    return text[: len(pool.match(hashes_of(text)))]


def test_a_new_pool_has_nothing_cached() -> None:
    pool = BlockPool(9)
    statistics = pool.statistics()

    assert cached(pool, "abc") == ""
    assert (statistics.cached, statistics.evictable) == (0, 0)
    assert (statistics.hits, statistics.misses, statistics.evictions) == (0, 0, 0)


def test_a_computed_block_is_found_once_it_is_registered_and_not_before() -> None:
    pool = BlockPool(9)
    blocks = pool.acquire(hashes_of("abc"), 3)
    assert cached(pool, "abc") == ""

    assert register(pool, "ab", blocks) == [True, True]

    assert pool.match(hashes_of("abc")) == blocks[:2]
    assert cached(pool, "abd") == "ab"
    assert cached(pool, "xab") == ""
    assert [pool.references(block) for block in blocks] == [1, 1, 1]


def test_matching_changes_nothing() -> None:
    pool = BlockPool(9)
    cache(pool, "abc")
    before = pool.statistics()

    pool.match(hashes_of("abcd"))

    assert pool.statistics() == before
    pool.allocate(6)
    assert cached(pool, "abc") == "ab"  # its end still goes first


def test_a_request_that_leaves_before_it_is_computed_leaves_nothing_in_the_cache() -> None:
    pool = BlockPool(9)

    pool.release(pool.acquire(hashes_of("abc"), 3))

    assert cached(pool, "abc") == ""
    assert (pool.free, pool.statistics().cached) == (8, 0)


def test_a_released_block_stays_cached_and_counts_as_free() -> None:
    pool = BlockPool(9)

    blocks = cache(pool, "abc")

    assert cached(pool, "abc") == "abc"
    assert (pool.free, pool.held, pool.statistics().evictable) == (8, 0, 3)
    assert pool.acquire(hashes_of("abc"), 0) == blocks
    assert (pool.free, pool.held, pool.statistics().evictable) == (5, 3, 0)
    pool.audit()


def test_a_second_equal_prompt_computes_only_its_tail() -> None:
    pool = BlockPool(20)
    first = compute(pool, "abcd") + pool.allocate(1)

    second = pool.acquire(hashes_of("abcd"), 1)

    assert second[:4] == first[:4]
    assert second[4] != first[4]
    assert pool.held == 4 + 2
    assert (pool.statistics().hits, pool.statistics().misses) == (4, 4)


def test_ten_sharers_hold_one_block_ten_times() -> None:
    pool = BlockPool(20)
    [block] = compute(pool, "a")
    for _ in range(9):
        compute(pool, "a")

    assert (pool.references(block), pool.held, pool.statistics().references) == (10, 1, 10)
    pool.release([block] * 9)
    assert (pool.references(block), pool.held, pool.free) == (1, 1, 18)
    pool.release([block])
    assert (pool.references(block), pool.held, pool.free) == (0, 0, 19)
    assert cached(pool, "a") == "a"
    with pytest.raises(ValueError, match="was released already"):
        pool.release([block])


def test_hits_and_misses_count_blocks_of_acquisitions_that_came_about() -> None:
    pool = BlockPool(5)
    cache(pool, "ab")

    pool.acquire(hashes_of("abcd"), 1)
    with pytest.raises(OutOfBlocks):
        pool.acquire(hashes_of("abcd"), 2)

    assert (pool.statistics().hits, pool.statistics().misses) == (2, 2 + 2)


def test_a_hash_keeps_the_block_it_was_registered_with_first() -> None:
    pool = BlockPool(9)
    first, second = pool.allocate(2), pool.allocate(2)
    register(pool, "ab", first)

    assert register(pool, "ab", second) == [True, True]

    assert pool.match(hashes_of("ab")) == first
    assert [pool.is_cached(block) for block in (*first, *second)] == [True, True, False, False]
    pool.release(second)
    assert (pool.statistics().cached, pool.free) == (2, 6)
    pool.audit()


def test_registering_again_changes_nothing() -> None:
    pool = BlockPool(5)
    blocks = compute(pool, "ab")

    assert register(pool, "ab", blocks) == [True, True]
    pool.release(blocks)

    assert pool.free == 4
    assert len(pool.allocate(4)) == 4
    pool.audit()


def test_of_several_blocks_only_those_not_yet_registered_are() -> None:
    pool = BlockPool(9)
    first = compute(pool, "ab")
    second = pool.allocate(4)

    assert register(pool, "abcd", second) == [True] * 4

    assert pool.match(hashes_of("abcd")) == first + second[2:]
    pool.audit()


def test_a_registered_block_cannot_get_another_hash() -> None:
    pool = BlockPool(5)
    blocks = compute(pool, "a")

    with pytest.raises(ValueError, match=r"block 3 is cached under a different hash, [0-9a-f]{32}"):
        register(pool, "x", blocks)
    assert (cached(pool, "a"), cached(pool, "x")) == ("a", "")


def test_an_evicted_block_gets_another_hash() -> None:
    pool = BlockPool(3)
    cache(pool, "ab")

    assert compute(pool, "x") == [1]

    assert (cached(pool, "ab"), cached(pool, "x")) == ("a", "x")


@pytest.mark.parametrize("block", [0, 3, 4])
def test_a_block_nobody_holds_cannot_be_registered(block: int) -> None:
    pool = BlockPool(5)
    cache(pool, "a")

    with pytest.raises(ValueError, match=f"block {block} "):
        register(pool, "a", [block])


def test_a_block_is_not_cached_without_its_parent() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    parent, child = hashes_of("ab")

    assert not pool.register(second, child, parent)
    assert pool.statistics().cached == 0

    assert pool.register(first, parent, None)
    assert pool.register(second, child, parent)
    assert cached(pool, "ab") == "ab"


# Eviction


def test_blocks_that_hold_nothing_are_taken_before_cached_ones() -> None:
    pool = BlockPool(6)
    cache(pool, "ab")

    pool.allocate(3)
    assert (cached(pool, "ab"), pool.statistics().evictions) == ("ab", 0)
    pool.allocate(1)
    assert (cached(pool, "ab"), pool.statistics().evictions) == ("a", 1)


def test_the_longest_unused_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    for text in "abc":
        cache(pool, text)
    cache(pool, "a")

    pool.allocate(2)

    assert [cached(pool, text) for text in "abc"] == ["a", "", ""]


def test_eviction_goes_up_a_sequence_from_its_end() -> None:
    pool = BlockPool(4)
    cache(pool, "abc")

    assert [cached(pool, "abc") for _ in range(3) if pool.allocate(1)] == ["ab", "a", ""]


def test_a_parent_stays_until_both_its_children_are_gone() -> None:
    pool = BlockPool(5)
    cache(pool, "ab")
    cache(pool, "ac")
    cache(pool, "d")

    pool.allocate(1)
    assert [cached(pool, text) for text in ("ab", "ac", "d")] == ["a", "ac", "d"]
    pool.allocate(1)
    assert [cached(pool, text) for text in ("ab", "ac", "d")] == ["a", "a", "d"]
    pool.allocate(1)
    assert [cached(pool, text) for text in ("ab", "ac", "d")] == ["", "", "d"]


def test_the_last_used_leaf_outlives_older_sequences_and_keeps_its_parent() -> None:
    pool = BlockPool(7)
    cache(pool, "ab")
    cache(pool, "cde")
    cache(pool, "ax")

    pool.allocate(1 + 3)

    assert [cached(pool, text) for text in ("ab", "cde", "ax")] == ["a", "", "ax"]


def test_a_held_parent_is_never_evicted_though_its_child_is() -> None:
    pool = BlockPool(3)
    parent, child = compute(pool, "ab")
    pool.release([child])

    assert pool.free == 1
    assert pool.allocate(1) == [child]
    assert pool.free == 0
    with pytest.raises(OutOfBlocks, match="1 blocks wanted, 0 of 2 are free"):
        pool.allocate(1)
    assert pool.references(parent) == 1
    pool.audit()


def test_an_unheld_parent_of_a_held_block_is_not_evicted() -> None:
    pool = BlockPool(4)
    first, copy = compute(pool, "a"), pool.allocate(2)
    register(pool, "ab", copy)  # its first block is one too many: the hash has a block already

    pool.release(first)
    assert (pool.free, pool.references(first[0])) == (0, 0)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.audit()

    pool.release(copy)
    assert (pool.free, cached(pool, "ab")) == (3, "ab")
    pool.audit()


def test_a_block_is_not_cached_behind_one_that_nobody_holds() -> None:
    pool = BlockPool(5)
    cache(pool, "a")
    copy = pool.allocate(2)
    free = pool.free

    assert register(pool, "ab", copy) == [True, False]

    assert (pool.free, cached(pool, "ab")) == (free, "a")  # as many as before: it asked for two
    pool.audit()


def test_asking_for_more_than_can_be_evicted_changes_nothing() -> None:
    pool = BlockPool(4)
    cache(pool, "ab")
    pool.allocate(1)
    before = pool.statistics()

    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert (pool.statistics(), cached(pool, "ab")) == (before, "ab")
    assert [cached(pool, "ab") for _ in range(2) if pool.allocate(1)] == ["a", ""]


def test_a_row_that_grows_takes_the_last_cached_block_of_others() -> None:
    pool = BlockPool(4)
    cache(pool, "x")
    compute(pool, "ab")

    assert [pool.allocate(count) for count in (0, 1)] == [[], [2]]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert (cached(pool, "x"), cached(pool, "ab")) == ("", "ab")


# Acquiring: what matches is held before anything is evicted


def test_matched_blocks_are_not_evicted_for_the_new_ones_of_the_same_request() -> None:
    pool = BlockPool(7)
    old = cache(pool, "abcdef")

    blocks = pool.acquire(hashes_of("abcxyz"), 3)

    assert blocks[:3] == old[:3]
    assert sorted(blocks) == sorted(old)
    assert (cached(pool, "abcdef"), pool.free) == ("abc", 0)
    pool.audit()


@pytest.mark.parametrize(
    ("text", "count", "fits"), [("", 2, True), ("a", 2, False), ("a", 1, True), ("ab", 1, False)]
)
def test_a_matched_block_nobody_holds_is_no_room_for_new_ones(
    text: str, count: int, fits: bool
) -> None:
    pool = BlockPool(4)
    cache(pool, "ab")
    pool.allocate(1)
    before = pool.statistics()

    if fits:
        assert len(pool.acquire(hashes_of(text), count)) == len(text) + count
    else:
        with pytest.raises(OutOfBlocks, match=f"{count} blocks wanted, {2 - len(text)} of 3"):
            pool.acquire(hashes_of(text), count)
        assert pool.statistics() == before
    pool.audit()


def test_matched_blocks_that_others_hold_cost_nothing() -> None:
    pool = BlockPool(6)
    blocks = compute(pool, "abc")

    assert pool.acquire(hashes_of("abc"), 2)[:3] == blocks
    assert [pool.references(block) for block in blocks] == [2, 2, 2]
    assert pool.free == 0


def test_a_negative_count_of_new_blocks_takes_none_of_the_matched_ones() -> None:
    pool = BlockPool(5)
    cache(pool, "ab")

    with pytest.raises(ValueError, match="count is -1"):
        pool.acquire(hashes_of("ab"), -1)
    assert pool.held == 0


# Forgetting


def test_after_forget_all_nothing_is_found_and_everything_unheld_is_free() -> None:
    pool = BlockPool(7)
    cache(pool, "abc")
    held = compute(pool, "ax")

    pool.forget_all()

    assert (cached(pool, "abc"), cached(pool, "ax")) == ("", "")
    assert (pool.free, pool.held, pool.statistics().cached) == (4, 2, 0)
    pool.audit()
    pool.release(held)
    assert sorted(pool.allocate(6)) == list(range(6))
    assert pool.statistics().evictions == 0


def test_a_block_from_before_forget_all_is_not_registered_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.forget_all()

    assert register(pool, "ab", blocks) == [False, False]
    assert cached(pool, "ab") == ""
    pool.audit()

    pool.release(blocks)
    assert sorted(compute(pool, "ab")) == sorted(blocks)
    assert cached(pool, "ab") == "ab"


def test_forget_all_frees_the_unheld_parent_of_a_held_block() -> None:
    pool = BlockPool(4)
    first, copy = compute(pool, "a"), pool.allocate(2)
    register(pool, "ab", copy)
    pool.release(first)

    pool.forget_all()

    assert pool.allocate(1) == first
    pool.audit()


def test_forget_all_goes_on_counting_where_it_was() -> None:
    pool = BlockPool(5)
    cache(pool, "ab")
    cache(pool, "ab")
    pool.allocate(4)

    pool.forget_all()

    statistics = pool.statistics()
    assert (statistics.hits, statistics.misses, statistics.evictions) == (2, 2, 2)


def test_reset_forgets_what_was_cached_and_counted() -> None:
    pool = BlockPool(9)
    cache(pool, "abc")
    compute(pool, "abx")
    pool.forget_all()

    pool.reset()

    assert pool.statistics() == BlockPool(9).statistics()
    assert register(pool, "a", pool.allocate(1)) == [True]
    pool.audit()


def test_audit_notices_a_cached_block_that_is_free_or_lost() -> None:
    pool = BlockPool(5)
    [block] = cache(pool, "a")
    pool._free.append(block)
    with pytest.raises(AssertionError, match="blocks \\[3\\] are free and cached"):
        pool.audit()

    pool._free = [0, 1]
    with pytest.raises(AssertionError, match="2 free \\+ 0 held \\+ 1 cached is not 4"):
        pool.audit()


# Against slow models


def peel(used_at: Mapping[str, float], count: int) -> list[str]:
    """Evict the sequences longest unused first, never one that another begins with."""
    left, evicted = dict(used_at), []
    for _ in range(count):
        leaves = [text for text in left if not any(other[:-1] == text for other in left)]
        evicted.append(min(leaves, key=lambda text: left[text]))
        del left[evicted[-1]]
    return evicted


@pytest.mark.parametrize("seed", range(20))
def test_eviction_takes_the_leaves_an_exhaustive_search_would(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(60)
    used_at: dict[str, float] = {}
    for time in range(30):
        text = "".join(rng.choices("ab", k=rng.randint(1, 5)))
        cache(pool, text)
        for length in range(len(text), 0, -1):  # its end was used longest ago
            used_at[text[:length]] = time - length / 10
    pool.allocate(pool.free - len(used_at))

    while used_at:
        count = min(rng.randint(1, 4), len(used_at))
        pool.allocate(count)
        for text in peel(used_at, count):
            del used_at[text]
        left = {text for text in used_at if cached(pool, text) == text}
        assert left == used_at.keys()
        assert pool.statistics().cached == len(used_at)
        pool.audit()


class Row:
    """What a request holds: the blocks of `text`, letter by letter, and how many are registered."""

    def __init__(self, text: str, blocks: list[int], num_registered: int) -> None:
        self.text = text
        self.blocks = blocks
        self.num_registered = num_registered


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it that looks everything up and remembers nothing twice."""

    @initialize(usable=st.integers(2, 12))
    def start(self, usable: int) -> None:
        self.pool = BlockPool(usable + 1)
        self.free = set(range(usable))
        self.references: Counter[int] = Counter()
        self.index: dict[str, int] = {}  # the block of each cached sequence
        self.idle_since: dict[str, int] = {}
        self.outdated: set[int] = set()
        self.rows: list[Row] = []
        self.evictions = 0

    # The model

    def in_use(self, text: str) -> bool:
        return any(
            self.references[block] > 0
            for other, block in self.index.items()
            if other.startswith(text)
        )

    def match(self, text: str) -> list[int]:
        lengths = range(1, len(text) + 1)
        return [self.index[text[:length]] for length in lengths if text[:length] in self.index]

    def note_idle(self) -> None:
        """Note what fell idle, ends of sequences first, and forget what is in use again."""
        idle = {text for text in self.index if not self.in_use(text)}
        for text in sorted(idle - self.idle_since.keys(), key=len, reverse=True):
            self.idle_since[text] = max(self.idle_since.values(), default=0) + 1
        self.idle_since = {text: self.idle_since[text] for text in idle}

    def take(self, blocks: list[int]) -> None:
        """Follow an allocation: free blocks before cached ones, those in the order of the peel."""
        fresh, reused = set(blocks) & self.free, [b for b in blocks if b not in self.free]
        assert not reused or fresh == self.free
        evicted = peel(self.idle_since, len(reused))
        assert reused == [self.index.pop(text) for text in evicted]
        self.evictions += len(evicted)
        self.free -= fresh
        self.references.update(blocks)
        self.note_idle()

    def drop(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            self.outdated.discard(block)
            if block not in self.index.values():
                self.free.add(block)
        self.note_idle()

    # What can happen

    @rule(text=st.text("ab", min_size=1, max_size=5), tail=st.integers(0, 2))
    def admit(self, text: str, tail: int) -> None:
        matched = self.match(text)
        count = len(text) - len(matched) + tail
        idle = sum(self.index[cached] in matched for cached in self.idle_since)
        if count > len(self.free) + len(self.idle_since) - idle:
            with pytest.raises(OutOfBlocks):
                self.pool.acquire(hashes_of(text), count)
            return
        blocks = self.pool.acquire(hashes_of(text), count)
        assert blocks[: len(matched)] == matched
        self.references.update(matched)
        self.note_idle()
        self.take(blocks[len(matched) :])
        self.rows.append(Row(text, blocks, len(matched)))

    @rule(number=st.integers(0, 99), letter=st.sampled_from("ab"))
    def grow(self, number: int, letter: str) -> None:
        if not self.rows or self.pool.free == 0:
            return
        row = self.rows[number % len(self.rows)]
        if len(row.text) == len(row.blocks):
            blocks = self.pool.allocate(1)
            self.take(blocks)
            row.blocks += blocks
        row.text += letter

    @rule(number=st.integers(0, 99), count=st.integers(1, 4), again=st.booleans())
    def step(self, number: int, count: int, again: bool) -> None:
        """Register what a row has computed: the next few blocks, or once more all of them."""
        if not self.rows:
            return
        row = self.rows[number % len(self.rows)]
        hashes = hashes_of(row.text)
        stop = min(row.num_registered + count, len(row.text))
        for place in range(0 if again else row.num_registered, stop):
            block, text = row.blocks[place], row.text[: place + 1]
            parent = hashes[place - 1] if place else None
            fits = block not in self.outdated and (place == 0 or text[:-1] in self.index)
            assert self.pool.register(block, hashes[place], parent) == fits
            if fits:
                self.index.setdefault(text, block)
            self.note_idle()
        row.num_registered = stop

    @rule(number=st.integers(0, 99), order=st.randoms(use_true_random=False))
    def leave(self, number: int, order: random.Random) -> None:
        if not self.rows:
            return
        blocks = self.rows.pop(number % len(self.rows)).blocks
        order.shuffle(blocks)
        self.pool.release(blocks)
        for block in blocks:
            self.drop(block)

    @rule(number=st.integers(0, 99))
    def fork(self, number: int) -> None:
        if not self.rows:
            return
        row = self.rows[number % len(self.rows)]
        complete = row.blocks[: len(row.text)]
        self.pool.share(complete)
        self.references.update(complete)
        self.rows.append(Row(row.text, complete, row.num_registered))

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.free |= {block for block in self.index.values() if self.references[block] == 0}
        self.index.clear()
        self.idle_since.clear()
        self.outdated = {block for block, count in self.references.items() if count > 0}

    # What holds all the time

    @invariant()
    def pool_and_model_agree(self) -> None:
        statistics = self.pool.statistics()
        self.pool.audit()
        assert self.pool.free == len(self.free) + len(self.idle_since)
        assert statistics.cached == len(self.index)
        assert statistics.evictable == len(self.idle_since)
        assert statistics.evictions == self.evictions
        assert statistics.references == sum(len(row.blocks) for row in self.rows)
        for text, block in self.index.items():
            assert self.pool.match(hashes_of(text))[-1:] == [block]
            assert len(text) == 1 or text[:-1] in self.index


def test_the_pool_agrees_with_a_slow_model_whatever_is_done() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=60,
            stateful_step_count=40,
        ),
    )
