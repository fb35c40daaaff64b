"""Rows that stand in the dummy block: to capture graphs, to warm up, to keep others company."""

import numpy as np
import pytest
import torch

from callboard.gpu.admission import RowMismatch
from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, StateShape
from callboard.gpu.context import DynamicContext
from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list
from callboard.messages.base import pack_ids
from callboard.messages.errors import (
    MemoryDeallocated,
    OutOfStateSlots,
    RowOverflow,
    SequenceOverflow,
    TokenOverflow,
)
from callboard.messages.steps import Admit, RowSampling

HYBRID = CacheSpec(
    layers=("attention", "state"),
    attention=KeyValueShape(num_kv_heads=1, head_dim=2),
    dtype=torch.float32,
    state=StateShape(
        conv_shape=(3,), ssm_shape=(2,), conv_dtype=torch.float32, ssm_dtype=torch.float32
    ),
)
NUM_BLOCKS = 50
DUMMY = NUM_BLOCKS - 1


def make_context(
    *,
    max_rows: int = 8,
    max_tokens: int = 64,
    max_model_len: int = 100,
    pool: BlockPool | None = None,
    spec: CacheSpec | None = None,
    num_states: int | None = None,
    graphs: tuple[BatchDimensions, ...] | None = None,
) -> DynamicContext:
    return DynamicContext(
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        block_tokens=4,
        num_blocks=NUM_BLOCKS,
        pool=pool,
        cache_spec=spec,
        num_states=num_states,
        graphs=graphs,
    )


def dummy(
    row: int,
    length: int = 1,
    *,
    num_tokens: int | None = None,
    max_tokens: int = 1,
    stop_ids: tuple[int, ...] = (),
    blocks: tuple[int, ...] = (),
) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids(range(100, 100 + length)),
        num_tokens=length if num_tokens is None else num_tokens,
        blocks=blocks,
        sampling=RowSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=max_tokens,
            min_tokens=0,
            stop_token_ids=stop_ids,
        ),
    )


def test_many_rows_are_taken_in_at_once_and_their_blocks_are_all_the_dummy() -> None:
    pool = BlockPool(NUM_BLOCKS)
    context = make_context(pool=pool)

    context.add_dummy_requests(
        [
            dummy(7, 3, max_tokens=2, stop_ids=(7,)),
            dummy(8, 6, max_tokens=1, stop_ids=(8,)),
        ]
    )

    rows = context.rows()
    assert rows["id"].tolist() == [7, 8]
    assert rows["num_blocks"].tolist() == [1, 2]
    assert rows["last_offset"].tolist() == [2, 1]
    assert rows["kv_length"].tolist() == [0, 0]
    assert context.sequence_lengths().tolist() == [3, 6]
    assert context.max_sequence_lengths().tolist() == [5, 7]
    assert (context.num_prefills, context.num_decodes, context.is_decode_only) == (2, 0, False)
    assert pool.free == pool.usable
    inputs = context.begin_step()
    assert inputs is not None
    assert inputs.metadata.block_table.tolist() == [[DUMMY] * 2] * 2
    assert inputs.metadata.slot_mapping.tolist() == [
        DUMMY * 4 + offset for offset in [0, 1, 2, 0, 1, 2, 3, 0, 1]
    ]
    context.check()


def test_a_dummy_ends_like_other_rows_and_gives_no_block_back() -> None:
    pool = BlockPool(NUM_BLOCKS)
    context = make_context(pool=pool)
    context.add_dummy_requests([dummy(7, 3, stop_ids=(7,), max_tokens=2), dummy(8, 6)])
    context.begin_step()

    outcome = context.finish_step(np.array([7, 9]))

    assert outcome.stopped.tolist() == [7]
    assert outcome.full.tolist() == [8]
    assert context.num_rows == 0
    assert pool.free == pool.usable


def test_a_dummy_that_decodes_is_no_prefill_and_feeds_its_token() -> None:
    context = make_context()

    context.add_dummy_requests([dummy(row) for row in (1, 2, 3)], as_decodes=True)
    inputs = context.begin_step()

    assert (context.num_prefills, context.num_decodes, context.is_decode_only) == (0, 3, True)
    assert inputs is not None
    assert inputs.input_ids_T.tolist() == [100, 100, 100]
    assert inputs.metadata.positions.tolist() == [0, 0, 0]
    context.check()


def test_a_dummy_of_more_than_one_token_is_no_decode() -> None:
    # The peer counts its 3- and 6-token dummies as no prefills on request: their step would then
    # be sent to kernels that take one query a row.
    context = make_context()

    with pytest.raises(RowMismatch, match="feeds 3 of 3 tokens, and must feed all of 1 to 1"):
        context.add_dummy_requests([dummy(7, 3), dummy(8, 6)], as_decodes=True)
    assert context.num_rows == 0


def test_no_dummies_are_nothing() -> None:
    context = make_context()

    context.add_dummy_requests([])

    assert context.num_rows == 0


def test_rows_that_are_here_stay_where_they_are() -> None:
    context = make_context()
    context.add_row(dummy(1, 3, max_tokens=9, blocks=(4,)))
    context.begin_step()
    context.finish_step(np.array([5]))

    context.add_dummy_requests([dummy(2)], as_decodes=True)
    context.add_dummy_requests([dummy(3, 2)])
    inputs = context.begin_step()

    assert context.row_ids == [1, 2, 3]
    assert inputs is not None
    assert inputs.input_ids_T.tolist() == [5, 100, 100, 101]
    assert inputs.metadata.block_table[:, 0].tolist() == [4, DUMMY, DUMMY]
    context.check()


def test_more_dummies_than_places_are_refused_by_the_last_of_them() -> None:
    context = make_context(max_rows=3)
    context.add_row(dummy(1, 3, max_tokens=9, blocks=(4,)))

    with pytest.raises(RowOverflow, match="row 44: 1 of 3 rows are taken"):
        context.add_dummy_requests([dummy(row) for row in (42, 43, 44)])
    assert context.row_ids == [1]


def test_more_dummies_than_a_step_has_tokens_are_refused() -> None:
    context = make_context(max_tokens=16)

    with pytest.raises(TokenOverflow, match="is to get 17 more, and may have 16"):
        context.add_dummy_requests([dummy(1, 8), dummy(2, 9)])
    assert context.num_rows == 0


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (dummy(2, 0), "feeds 0 of 0 tokens, and must feed all of 1 to 100"),
        (dummy(2, 6, num_tokens=3), "feeds 3 of 6 tokens"),
        (dummy(2, blocks=(4,)), "brings blocks of its own"),
        (dummy(1), "here already, or named twice"),
    ],
    ids=["empty", "in part", "with a block", "twice"],
)
def test_a_dummy_that_cannot_be_is_refused_with_all_others(wrong: Admit, reason: str) -> None:
    context = make_context()

    with pytest.raises(RowMismatch, match=reason):
        context.add_dummy_requests([dummy(1, 2), wrong])
    assert context.num_rows == 0


def test_dummies_do_not_come_between_the_parts_of_a_prompt() -> None:
    context = make_context()
    context.add_row(dummy(1, 8, num_tokens=4, blocks=(4,)))

    with pytest.raises(RowMismatch, match="come behind all rows"):
        context.add_dummy_requests([dummy(2)])


def test_decodes_do_not_come_behind_a_prompt() -> None:
    context = make_context()
    context.add_dummy_requests([dummy(1, 8)])

    with pytest.raises(RowMismatch, match="decodes of them before any prompt"):
        context.add_dummy_requests([dummy(2)], as_decodes=True)


def test_each_dummy_of_a_hybrid_model_has_a_state_of_its_own_that_is_zero() -> None:
    context = make_context(spec=HYBRID)
    for part in context.caches.states(1):
        part.fill_(5)

    context.add_dummy_requests([dummy(1), dummy(2, 3)])

    slots = context.rows()["state_slot"].tolist()
    assert len(set(slots)) == 2
    assert not any(part[slots].any() for part in context.caches.states(1))
    context.check()


def test_dummies_for_which_no_state_or_no_memory_is_left_are_refused() -> None:
    context = make_context(spec=HYBRID, num_states=1)

    with pytest.raises(OutOfStateSlots, match="2 recurrent states wanted, 1 of 1 slots are free"):
        context.add_dummy_requests([dummy(1), dummy(2)])
    context.deallocate()
    with pytest.raises(MemoryDeallocated):
        context.add_dummy_requests([dummy(1)])
    assert context.num_rows == 0


# For a graph

LIMITS = BatchLimits(max_tokens=64, max_requests=8, max_model_len=20)
GRAPHS = graph_list(LIMITS)


@pytest.mark.parametrize("spec", [None, HYBRID], ids=["attention", "hybrid"])
def test_every_graph_is_filled_by_dummies_and_leaves_nothing_behind(spec: CacheSpec | None) -> None:
    pool = BlockPool(NUM_BLOCKS)
    context = make_context(max_model_len=20, pool=pool, spec=spec, graphs=GRAPHS)

    for graph in GRAPHS:
        context.add_dummy_requests_for(graph)
        inputs = context.begin_step(graph)
        context.check()
        assert inputs is not None
        assert inputs.shape.graph == inputs.shape.padded == graph
        assert len(inputs.input_ids_T) == graph.tokens
        assert inputs.num_tokens == graph.tokens  # all of it is dummies, and none padding
        assert inputs.metadata.num_decodes == graph.decodes
        assert inputs.metadata.block_table.shape == (graph.requests, 5)
        assert (inputs.metadata.block_table == DUMMY).all()
        context.reset()

    assert (context.num_rows, pool.free) == (0, pool.usable)


def test_dummies_for_a_graph_that_does_not_fit_beside_others_are_refused() -> None:
    context = make_context(max_rows=2)

    with pytest.raises(RowOverflow):
        context.add_dummy_requests_for(BatchDimensions(4, 1, 2))
    with pytest.raises(ValueError, match="no token for each"):
        context.add_dummy_requests_for(BatchDimensions(2, 1, 2))
    assert context.num_rows == 0


def test_a_dummy_may_be_as_long_as_a_sequence_though_it_samples_one_more() -> None:
    context = make_context(max_model_len=20)

    context.add_dummy_requests_for(BatchDimensions(20, 1, 0))

    assert context.num_tokens == 20
    with pytest.raises(SequenceOverflow):
        context.add_row(dummy(5, 20, blocks=(1, 2, 3, 4, 5)))
