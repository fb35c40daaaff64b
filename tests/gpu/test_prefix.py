import random
from array import array
from collections.abc import Callable
from itertools import permutations
from time import perf_counter

import pytest

from callboard.gpu.prefix import PrefixIndex, block_hashes, extend_hashes, root_hash

ROOT = root_hash(salt=b"", weights_version=1)


def hashes(tokens: list[int], *, salt: bytes = b"", weights_version: int = 1) -> list[bytes]:
    return block_hashes(tokens, 4, salt=salt, weights_version=weights_version)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (3, 0), (4, 1), (10, 2), (12, 3)])
def test_only_complete_blocks_have_a_hash(num_tokens: int, num_blocks: int) -> None:
    assert len(hashes(list(range(num_tokens)))) == num_blocks


def test_the_same_tokens_have_the_same_hashes_of_sixteen_bytes() -> None:
    first = hashes(list(range(8)))

    assert first == hashes(list(range(8)))
    assert [len(block_hash) for block_hash in first] == [16, 16]
    assert all(isinstance(block_hash, bytes) for block_hash in first)


def test_a_hash_is_the_same_in_every_process() -> None:
    [block_hash] = hashes([1, 2, 3, 4])

    assert block_hash.hex() == "4b32edf946ac07879b25d42d8dcea3ad"


def test_sequences_share_the_hashes_of_their_common_prefix_and_none_after_it() -> None:
    first = hashes([*range(8), 50, 51, 52, 53, 60, 61, 62, 63])
    second = hashes([*range(8), 50, 51, 52, 54, 60, 61, 62, 63])

    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False]


def test_the_same_block_at_two_places_has_two_hashes() -> None:
    assert len(set(hashes([7, 7, 7, 7] * 20))) == 20


def test_a_growing_sequence_gets_the_hashes_of_a_whole_one() -> None:
    tokens = list(range(100, 150))
    whole = hashes(tokens)

    grown = extend_hashes(ROOT, tokens[:9], 4)
    grown += extend_hashes(grown[-1], tokens[8:12], 4)
    grown += extend_hashes(grown[-1], tokens[12:], 4)

    assert grown == whole


def test_salts_and_weights_versions_share_no_hash() -> None:
    tokens = list(range(12))
    sets = [
        set(hashes(tokens, salt=salt, weights_version=version))
        for salt in (b"", b"a", b"b", b"\0", bytes(8))
        for version in (0, 1, 256)
    ]

    assert sum(map(len, sets)) == len(set().union(*sets)) == 15 * 3


def test_packed_lists_and_ranges_of_ids_have_the_same_hashes() -> None:
    expected = hashes(list(range(8)))

    assert block_hashes(array("i", range(8)), 4, salt=b"", weights_version=1) == expected
    assert block_hashes(range(8), 4, salt=b"", weights_version=1) == expected


def test_blocks_that_a_polynomial_hash_takes_for_one_do_not_collide() -> None:
    def polynomial(tokens: list[int]) -> int:
        total = sum(token * pow(31, place, 10_007) for place, token in enumerate(tokens))
        return total % 10_007

    rng = random.Random(1)
    buckets: dict[int, list[list[int]]] = {}
    for _ in range(5_000):
        tokens = [rng.randrange(50_000) for _ in range(4)]
        buckets.setdefault(polynomial(tokens), []).append(tokens)
    collisions = [tokens for bucket in buckets.values() if len(bucket) > 1 for tokens in bucket]

    assert len(collisions) > 1_000
    assert len({hashes(tokens)[0] for tokens in collisions}) == len(collisions)
    # Equal under token + 31 * next: one less here is made good by 31 more there.
    assert hashes([31, 0, 5, 5]) != hashes([0, 1, 5, 5])


def test_the_order_of_tokens_and_where_a_block_ends_count() -> None:
    by_order = {hashes(list(tokens))[0] for tokens in permutations((1, 2, 3, 4))}
    by_length = {block_hashes([0] * 64, size, salt=b"", weights_version=1)[0] for size in (1, 2, 4)}

    assert (len(by_order), len(by_length)) == (24, 3)


def test_a_token_id_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        hashes([2**31, 0, 0, 0])


def test_blocks_of_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens is 0, and must be at least 1"):
        block_hashes([1], 0, salt=b"", weights_version=1)


def test_a_prompt_of_two_thousand_tokens_is_hashed_in_well_under_a_millisecond() -> None:
    tokens = array("i", range(2_000))

    def seconds() -> float:
        start = perf_counter()
        block_hashes(tokens, 16, salt=b"tenant", weights_version=1)
        return perf_counter() - start

    assert min(seconds() for _ in range(20)) < 0.5e-3


def chained_index() -> PrefixIndex:
    """An index of blocks 0, 1 and 2, each the child of the one before, all held."""
    index = PrefixIndex()
    index.add(0, b"a", None)
    index.add(1, b"ab", b"a")
    index.add(2, b"abc", b"ab")
    return index


def test_hashes_that_are_no_chain_match_only_as_far_as_they_are_one() -> None:
    index = chained_index()

    assert index.match([b"a", b"ab", b"abc", b"abcd"]) == [0, 1, 2]
    assert index.match([b"a", b"abc"]) == [0]
    assert index.match([b"ab", b"abc"]) == []
    assert index.match([]) == []


def test_a_chain_falls_idle_from_its_end_however_its_holders_leave() -> None:
    index = chained_index()

    index.let_go(0)
    index.let_go(1)
    assert index.num_idle == 0
    index.let_go(2)

    assert [index.evict() for _ in range(3)] == [2, 1, 0]


def test_a_hold_on_the_end_of_a_chain_keeps_all_of_it() -> None:
    index = chained_index()
    for block in range(3):
        index.let_go(block)

    index.hold(2)

    assert (index.num_idle, index.count_idle([0, 1, 2])) == (0, 0)
    index.audit({2})


def swap_hashes(index: PrefixIndex) -> None:
    index._blocks[b"abc"] = 1


def close_a_circle(index: PrefixIndex) -> None:
    index._entries[0].parent = 2


def lose_a_parent(index: PrefixIndex) -> None:
    del index._blocks[b"ab"], index._entries[1]


def miscount_uses(index: PrefixIndex) -> None:
    index._entries[0].uses += 1


def put_a_parent_first(index: PrefixIndex) -> None:
    index.let_go(0)
    index._idle.move_to_end(1)
    index._idle.move_to_end(2)


def forget_the_idle(index: PrefixIndex) -> None:
    index._idle.clear()


@pytest.mark.parametrize(
    ("corrupt", "held", "complaint"),
    [
        (swap_hashes, {0}, "do not name each other"),
        (close_a_circle, {0}, "an orphan, or its own ancestor"),
        (lose_a_parent, {0}, "an orphan, or its own ancestor"),
        (miscount_uses, {0}, "counts other uses than it has"),
        (put_a_parent_first, set(), "block 0 would be evicted before its child 1"),
        (forget_the_idle, {0}, "not those that are not in use"),
    ],
)
def test_an_audit_notices_an_index_that_contradicts_itself(
    corrupt: Callable[[PrefixIndex], None], held: set[int], complaint: str
) -> None:
    index = chained_index()
    index.let_go(2)
    index.let_go(1)
    index.audit({0})

    corrupt(index)

    with pytest.raises(AssertionError, match=complaint):
        index.audit(held)
