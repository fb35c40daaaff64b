import pytest
from hypothesis import given, settings, strategies as st

from callboard.gpu.blocks import BlockPool
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
