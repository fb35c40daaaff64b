"""The context alone with a pool: sizes, room, eviction, sharing, and its numbers."""

import msgspec
import numpy as np
import pytest
import torch

from callboard.gpu.admission import Availability
from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, LayerKind, StateShape
from callboard.gpu.context import DynamicContext, UpdateOutcome
from callboard.gpu.memory import gib_to_bytes, plan_memory
from callboard.gpu.prefix import block_hashes
from callboard.messages.base import pack_ids
from callboard.messages.errors import ConfigError, OutOfBlocks, TokenOverflow
from callboard.messages.steps import Admit, Continue, RowSampling

HYBRID: tuple[LayerKind, ...] = ("state", "other", "attention", "other")
DENSE: tuple[LayerKind, ...] = ("attention",) * 4


def make_spec(layers: tuple[LayerKind, ...]) -> CacheSpec:
    state = StateShape(
        conv_shape=(544, 4),
        ssm_shape=(8, 64, 16),
        conv_dtype=torch.float32,
        ssm_dtype=torch.float32,
    )
    return CacheSpec(
        layers=layers,
        attention=KeyValueShape(num_kv_heads=2, head_dim=8),
        dtype=torch.float32,
        state=state if "state" in layers else None,
    )


def make_context(
    pool: BlockPool,
    *,
    max_rows: int = 8,
    max_tokens: int = 64,
    block_tokens: int = 4,
    paused_limit: int | None = None,
) -> DynamicContext:
    return DynamicContext(
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_model_len=512,
        block_tokens=block_tokens,
        num_blocks=pool.num_blocks,
        pool=pool,
        paused_limit=paused_limit,
    )


def make_sampling(*, max_tokens: int = 100, temperature: float = 0.0, seed: int = 0) -> RowSampling:
    return RowSampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=(),
    )


def add(context: DynamicContext, row: int, length: int) -> None:
    context.add_request(row, pack_ids(range(length)), make_sampling())


def update(context: DynamicContext, *, leaving: tuple[int, ...] = ()) -> UpdateOutcome:
    """Run a step of all rows, after which these leave."""
    context.begin_step()
    ids = context.row_ids[context.num_paused :]
    outcome = context.update_requests(
        np.array([row not in leaving for row in ids], dtype=np.bool_),
        np.ones(len(ids), dtype=np.int64),
    )
    context.check()
    return outcome


def counts(context: DynamicContext) -> dict[int, int]:
    rows = context.rows()
    return dict(zip(rows["id"].tolist(), rows["num_blocks"].tolist(), strict=True))


def stepped_with_nothing_free(
    pool: BlockPool, lengths: dict[int, int], *, paused_limit: int | None = None
) -> tuple[DynamicContext, UpdateOutcome]:
    """Run a step of these prompts, during which somebody else has the rest of the pool."""
    context = make_context(pool, paused_limit=paused_limit)
    for row, length in lengths.items():
        add(context, row, length)
    pool.allocate(pool.free)
    return context, update(context)


# Sizes


@pytest.mark.parametrize(
    ("layers", "num_blocks", "max_rows", "last_block"),
    [(DENSE, 491, 488, 489), (HYBRID, 556, 552, 554)],
    ids=["dense", "hybrid"],
)
def test_a_plan_for_0_03_gib_makes_a_context_that_holds_it(
    layers: tuple[LayerKind, ...], num_blocks: int, max_rows: int, last_block: int
) -> None:
    # Of rows the peer has 448 and 512: its rounder was forced to 64 there, ours stays at 4.
    spec = make_spec(layers)
    plan = plan_memory(
        budget_bytes=gib_to_bytes(0.03),
        bytes_per_block=spec.block_bytes(128),
        bytes_per_state=spec.state_bytes(),
        max_tokens=16384,
    )
    pool = BlockPool(plan.num_blocks)
    context = DynamicContext(
        max_rows=plan.max_requests,
        max_tokens=16384,
        max_model_len=512,
        block_tokens=128,
        num_blocks=plan.num_blocks,
        pool=pool,
        cache_spec=spec,
        num_states=4,  # all of them would take 20 MiB, for nothing here
    )

    context.add_request(0, pack_ids(range(144)), make_sampling())

    assert (plan.num_blocks, plan.max_requests) == (num_blocks, max_rows)
    inputs = context.begin_step()
    assert inputs is not None
    assert inputs.metadata.block_table.tolist() == [[last_block - 1, last_block]]
    assert context.rows()["last_offset"].tolist() == [15]
    assert inputs.metadata.positions.tolist() == list(range(144))


def test_a_prompt_beyond_the_tokens_of_a_step_is_refused() -> None:
    pool = BlockPool(491)
    context = make_context(pool, max_tokens=200, block_tokens=128)

    with pytest.raises(TokenOverflow, match="is to get 225 more, and may have 200") as never:
        add(context, 1, 225)
    assert pool.held == 0
    add(context, 2, 150)
    with pytest.raises(TokenOverflow, match="is to get 51 more, and may have 200") as later:
        add(context, 3, 51)
    assert (never.value.transient, later.value.transient) == (False, True)


# Room


def test_availability_says_what_is_short() -> None:
    pool = BlockPool(11)
    context = make_context(pool, max_rows=2, max_tokens=30)

    assert context.check_availability(30).fits
    assert context.check_availability(31) == Availability(
        rows=True, tokens=False, blocks=True, states=True
    )
    pool.allocate(5)
    assert context.check_availability(20).blocks
    assert not context.check_availability(21).blocks
    add(context, 1, 1)
    add(context, 2, 1)
    assert not context.check_availability(1).rows
    assert not context.check_availability(1).fits
    context.reset()
    context.deallocate()
    assert not context.check_availability(1).states


@pytest.mark.parametrize("num_free", [10, 1, 0])
def test_blocks_are_available_up_to_the_last_one_and_no_further(num_free: int) -> None:
    pool = BlockPool(21)
    context = make_context(pool)
    pool.allocate(20 - num_free)

    assert context.check_availability(4 * num_free).fits
    assert not context.check_availability(4 * num_free + 1).blocks


def test_what_is_available_is_taken_in_and_what_is_not_is_refused() -> None:
    pool = BlockPool(4)
    context = make_context(pool)

    for row, length in enumerate([4, 4, 5, 4, 1]):
        if context.check_availability(length).fits:
            add(context, row, length)
        else:
            with pytest.raises(OutOfBlocks):
                add(context, row, length)

    assert context.row_ids == [0, 1, 3]


# Leaving


def test_rows_with_one_two_and_three_blocks_give_back_all_six() -> None:
    pool = BlockPool(20)
    context = make_context(pool)
    for row, length in ((1, 4), (2, 8), (3, 9)):
        add(context, row, length)
    assert pool.held == 6

    outcome = update(context, leaving=(1, 2, 3))

    assert outcome == UpdateOutcome(paused=[], evicted=[])
    assert (pool.held, context.num_rows) == (0, 0)


def test_two_of_five_rows_stay_and_stand_first() -> None:
    pool = BlockPool(20)
    context = make_context(pool)
    for row in range(5):
        add(context, row, 2)

    update(context, leaving=(0, 2, 4))

    assert context.row_ids == [3, 1]
    assert pool.held == 2


# Waiting and eviction


def test_a_row_that_waits_takes_the_last_block_there_is() -> None:
    pool = BlockPool(5)
    context, outcome = stepped_with_nothing_free(pool, {1: 5, 2: 4}, paused_limit=3)
    assert outcome == UpdateOutcome(paused=[2], evicted=[])

    pool.release([others_block(pool, context)])
    update(context)

    assert counts(context) == {1: 2, 2: 2}
    assert (context.paused_ids, pool.free) == ([], 0)


def others_block(pool: BlockPool, context: DynamicContext) -> int:
    """Return a block that is held by no row."""
    own = {block for line in context._rows.block_table.tolist() for block in line}
    return next(
        block for block in range(pool.usable) if block not in own and pool.references(block)
    )


def test_the_newest_row_that_waits_is_evicted_for_the_others() -> None:
    # Four rows of two full blocks and none free; the peer resumes the newest, 12 and 11, and lets
    # 10 wait: the longest wait may then last for ever. Here 12 waits.
    pool = BlockPool(9)
    context, outcome = stepped_with_nothing_free(pool, {10: 8, 11: 8, 12: 8, 13: 8}, paused_limit=2)

    assert outcome == UpdateOutcome(paused=[12], evicted=[13])
    assert counts(context) == {12: 2, 10: 3, 11: 3}
    assert pool.free == 0


def test_every_row_may_be_evicted() -> None:
    pool = BlockPool(2)
    context, outcome = stepped_with_nothing_free(pool, {10: 4}, paused_limit=0)

    assert outcome == UpdateOutcome(paused=[], evicted=[10])
    assert (context.num_rows, pool.free) == (0, 1)


def test_no_row_is_evicted_while_those_that_wait_hold_no_more_than_they_may() -> None:
    pool = BlockPool(5)
    _, outcome = stepped_with_nothing_free(pool, {1: 4, 2: 4, 3: 4}, paused_limit=3)

    assert outcome == UpdateOutcome(paused=[1, 2, 3], evicted=[])


@pytest.mark.parametrize("paused_limit", [-1, 4])
def test_rows_that_wait_must_leave_a_block_to_those_that_run(paused_limit: int) -> None:
    with pytest.raises(ConfigError, match=f"paused_limit is {paused_limit}, and must be 0 to 3"):
        make_context(BlockPool(5), paused_limit=paused_limit)


def test_a_block_that_rows_share_counts_once_and_is_free_with_the_last_of_them() -> None:
    pool = BlockPool(6)
    context = make_context(pool, paused_limit=2)
    shared = pool.allocate(1)
    for row in (0, 1, 2):
        pool.share(shared)
        context.add_row(
            Admit(
                row=row,
                prompt=pack_ids(range(8)),
                num_tokens=4,
                blocks=(*shared, *pool.allocate(1)),
                sampling=make_sampling(),
                cached_tokens=4,
            )
        )
    pool.release(shared)  # as whoever computed it leaves
    pool.allocate(pool.free)
    assert pool.references(shared[0]) == 3

    outcome = update(context)

    # They hold 4 blocks. Row 2 frees one, with which row 0 goes on; row 1 then holds 2.
    assert outcome == UpdateOutcome(paused=[1], evicted=[2])
    assert pool.references(shared[0]) == 2
    assert counts(context) == {1: 2, 0: 3}


# A prompt in parts


def test_a_row_that_is_half_prefilled_keeps_its_blocks_while_all_others_come_and_go() -> None:
    pool = BlockPool(50)
    context = make_context(pool)
    for row in (10, 11):
        add(context, row, 2)
    context.add_request(999, pack_ids(range(30)), make_sampling(), num_tokens=10)
    update_sampling(context, leaving=(10,))
    before = blocks_of(context, 999)

    update_sampling(context, leaving=(11,))

    assert context.row_ids == [999]
    assert blocks_of(context, 999) == before
    assert pool.held == 3
    context.continue_row(Continue(row=999, num_tokens=20, blocks=tuple(pool.allocate(5))))
    inputs = context.begin_step()
    assert inputs is not None
    assert inputs.metadata.positions.tolist() == list(range(10, 30))


def update_sampling(context: DynamicContext, *, leaving: tuple[int, ...]) -> None:
    """Run a step in which all rows sample but the last, which is half prefilled."""
    context.begin_step()
    ids = context.row_ids[context.num_paused : -1]
    mask = np.array([row not in leaving for row in ids], dtype=np.bool_)
    context.update_requests(mask, np.ones(len(ids), dtype=np.int64))
    context.check()


def blocks_of(context: DynamicContext, row: int) -> list[int]:
    place = context.row_ids.index(row)
    return [block for block in context._rows.block_table[place].tolist() if block != context.dummy]


# Prefixes


def test_a_prompt_whose_first_blocks_are_cached_feeds_only_the_rest() -> None:
    pool = BlockPool(20)
    context = make_context(pool, block_tokens=16)
    tokens = list(range(35))
    hashes = block_hashes(tokens, 16, salt=b"", weights_version=0)
    first, second = pool.allocate(2)
    pool.register(first, hashes[0], None)
    pool.register(second, hashes[1], hashes[0])

    blocks = pool.acquire(hashes, 1)
    context.add_row(
        Admit(
            row=1,
            prompt=pack_ids(tokens),
            num_tokens=3,
            blocks=tuple(blocks),
            sampling=make_sampling(),
            cached_tokens=32,
        )
    )
    inputs = context.begin_step()

    assert blocks[:2] == [first, second]
    assert [pool.references(block) for block in blocks] == [2, 2, 1]
    assert context.rows()["last_offset"].tolist() == [2]
    assert inputs is not None
    assert inputs.metadata.positions.tolist() == [32, 33, 34]
    assert set(inputs.metadata.slot_mapping.tolist()) == {blocks[2] * 16 + i for i in range(3)}
    context.check()


# Its numbers


def test_rows_are_counted_by_what_they_do() -> None:
    pool = BlockPool(50)
    context = make_context(pool)
    assert (context.num_active, context.is_decode_only, context.has_unfinished) == (0, True, False)
    add(context, 1, 3)
    add(context, 2, 4)
    pool.allocate(pool.free)
    update(context)
    pool.release([others_block(pool, context)])

    add(context, 3, 2)

    assert context.paused_ids == [2]
    assert (context.num_active, context.num_decodes, context.num_prefills) == (2, 1, 1)
    assert (context.is_decode_only, context.has_unfinished) == (False, True)


def test_lengths_count_the_coming_step_and_all_that_may_still_come() -> None:
    pool = BlockPool(50)
    context = make_context(pool)
    context.add_request(1, pack_ids(range(3)), make_sampling(max_tokens=5))
    update(context)
    context.add_request(2, pack_ids(range(9)), make_sampling(max_tokens=2), num_tokens=4)

    assert context.sequence_lengths().tolist() == [4, 4]
    assert context.max_sequence_lengths().tolist() == [8, 11]


def test_what_was_asked_for_a_row_is_read_back_and_moves_with_it() -> None:
    context = make_context(BlockPool(50))
    for row, temperature in ((1, 0.25), (2, 0.5), (3, 0.75)):
        context.add_request(
            row, pack_ids([1, 2]), make_sampling(temperature=temperature, seed=10 * row)
        )

    update(context, leaving=(1,))
    rows = context.rows()

    assert rows["id"].tolist() == [3, 2]
    assert rows["temperature"].tolist() == [0.75, 0.5]
    assert rows["seed"].tolist() == [30, 20]
    assert rows["position"].tolist() == [1, 1]


def test_statistics_count_rows_tokens_and_blocks() -> None:
    pool = BlockPool(11)
    context = make_context(pool)
    add(context, 1, 5)
    add(context, 2, 4)
    pool.allocate(pool.free)
    update(context)

    found = context.statistics()

    assert (found.rows, found.active_rows, found.paused_rows, found.max_rows) == (2, 1, 1, 8)
    assert (found.tokens, found.max_tokens) == (1, 64)
    assert (found.usable_blocks, found.free_blocks, found.held_blocks) == (10, 0, 10)
    assert found.active_blocks == 2
    assert (found.held_fraction, found.active_fraction) == (1.0, 0.2)


@pytest.mark.parametrize("lengths", [(1,), (4,), (5, 4, 9), (1, 2, 3, 12)])
def test_statistics_hold_as_many_blocks_as_the_tokens_need(lengths: tuple[int, ...]) -> None:
    pool = BlockPool(20)
    context = make_context(pool)
    for row, length in enumerate(lengths):
        add(context, row, length)

    found = context.statistics()

    assert found.held_blocks == found.active_blocks == sum(-(-length // 4) for length in lengths)
    assert found.held_blocks + found.free_blocks == found.usable_blocks == 19
    assert 0 < found.active_fraction <= found.held_fraction <= 1
    numbers = msgspec.structs.asdict(found)
    assert {name: type(number) for name, number in numbers.items()} == dict.fromkeys(numbers, int)


def test_statistics_of_an_empty_context_are_zeros() -> None:
    found = make_context(BlockPool(11)).statistics()

    assert (found.rows, found.tokens, found.held_blocks, found.active_blocks) == (0, 0, 0, 0)
    assert found.free_blocks == found.usable_blocks == 10
    assert found.held_fraction == found.active_fraction == 0.0


def test_without_a_pool_held_is_what_rows_hold_and_a_shared_block_counts_once() -> None:
    context = DynamicContext(
        max_rows=8, max_tokens=64, max_model_len=512, block_tokens=4, num_blocks=11
    )
    for row, own in ((1, 5), (2, 6)):
        context.add_row(
            Admit(
                row=row,
                prompt=pack_ids(range(6)),
                num_tokens=2,
                blocks=(3, own),
                sampling=make_sampling(),
                cached_tokens=4,
            )
        )

    found = context.statistics()

    assert (found.held_blocks, found.free_blocks, found.active_blocks) == (3, 7, 3)


# Nothing is left


def test_reset_leaves_nothing_of_any_row() -> None:
    pool = BlockPool(50)
    context = make_context(pool)
    empty = (context._rows.records.copy(), context._rows.block_table.copy())
    for row, length in ((1, 4), (2, 3), (3, 6)):
        context.add_request(row, pack_ids(range(length)), make_sampling(temperature=1.0, seed=4))
    update(context)
    context.add_request(4, pack_ids(range(9)), make_sampling(), num_tokens=4)

    context.reset()

    assert (context.num_rows, context.num_paused, context.num_tokens) == (0, 0, 0)
    assert (context.num_prefills, context.half_prefilled_id) == (0, None)
    assert (context._rows.records == empty[0]).all()
    assert (context._rows.block_table == empty[1]).all()
    assert pool.free == pool.usable
    assert context.begin_step() is None
