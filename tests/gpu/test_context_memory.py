"""The context's memory: caches taken and given back, and the recurrent states of its rows."""

import numpy as np
import pytest
import torch

from callboard.gpu.admission import RowMismatch
from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, LatentShape, StateShape
from callboard.gpu.context import DynamicContext
from callboard.gpu.device import release_memory, resident_bytes
from callboard.gpu.dimensions import BatchDimensions
from callboard.gpu.prefix import block_hashes
from callboard.messages.base import pack_ids
from callboard.messages.errors import ConfigError, MemoryDeallocated, OutOfStateSlots
from callboard.messages.steps import Admit, Continue, RowSampling

CPU = torch.device("cpu")

ATTENTION = CacheSpec(
    layers=("attention", "attention"),
    attention=KeyValueShape(num_kv_heads=2, head_dim=8),
    dtype=torch.float32,
)
HYBRID = CacheSpec(
    layers=("state", "other", "attention", "state"),
    attention=KeyValueShape(num_kv_heads=2, head_dim=8),
    dtype=torch.float32,
    state=StateShape(
        conv_shape=(3,), ssm_shape=(2, 2), conv_dtype=torch.float32, ssm_dtype=torch.float32
    ),
)


def make_context(
    spec: CacheSpec = HYBRID,
    *,
    max_rows: int = 8,
    num_blocks: int = 50,
    block_tokens: int = 4,
    num_states: int | None = None,
    pool: BlockPool | None = None,
    graphs: tuple[BatchDimensions, ...] | None = None,
) -> DynamicContext:
    return DynamicContext(
        max_rows=max_rows,
        max_tokens=64,
        max_model_len=1000,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        cache_spec=spec,
        num_states=num_states,
        pool=pool,
        graphs=graphs,
    )


def make_sampling() -> RowSampling:
    return RowSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=100,
        min_tokens=0,
        stop_token_ids=(),
    )


def add(context: DynamicContext, row: int, length: int = 2, *, blocks: tuple[int, ...]) -> None:
    context.add_row(
        Admit(
            row=row,
            prompt=pack_ids(range(length)),
            num_tokens=length,
            blocks=blocks,
            sampling=make_sampling(),
        )
    )


def slots(context: DynamicContext) -> dict[int, int]:
    rows = context.rows()
    return dict(zip(rows["id"].tolist(), rows["state_slot"].tolist(), strict=True))


def fill(context: DynamicContext, row: int, value: float) -> None:
    for layer in (0, 3):
        for part in context.caches.states(layer):
            part[slots(context)[row]] = value


def state(context: DynamicContext, row: int) -> set[float]:
    """Return the distinct numbers in a row's states."""
    slot = slots(context)[row]
    parts = [part[slot] for layer in (0, 3) for part in context.caches.states(layer)]
    return {number for part in parts for number in part.flatten().tolist()}


def step(context: DynamicContext, *, leaving: tuple[int, ...] = ()) -> None:
    """Run a step with tokens that stop nobody, after which these rows leave as failed."""
    inputs = context.begin_step()
    assert inputs is not None
    num_sampling = len(inputs.last_token_indices_S)
    ids = context.row_ids[context.num_paused :][:num_sampling]
    context.finish_step(
        np.ones(num_sampling, dtype=np.int64),
        np.array([row in leaving for row in ids], dtype=np.bool_),
    )
    context.check()


# Taken and given back


def test_a_context_has_its_memory_from_the_start() -> None:
    context = make_context(ATTENTION)

    k_cache, _ = context.caches.layer(1)

    assert context.allocated
    assert context.bytes == 50 * ATTENTION.block_bytes(4)
    assert k_cache.shape == (50, 4, 2, 8)


def test_memory_goes_back_to_the_system_and_comes_again() -> None:
    context = make_context(ATTENTION, num_blocks=2**15)
    release_memory(CPU)  # what others left behind
    size, allocated = context.bytes, resident_bytes(CPU)

    context.deallocate()
    release_memory(CPU)
    deallocated = resident_bytes(CPU)
    context.allocate()

    assert context.bytes == size == 32 * 2**20
    assert allocated - deallocated >= 0.9 * size
    assert resident_bytes(CPU) - deallocated >= 0.9 * size


def test_a_deallocated_context_has_no_rows_and_takes_none() -> None:
    context = make_context(ATTENTION)
    add(context, 1, blocks=(3,))

    context.deallocate()

    assert (context.allocated, context.bytes, context.num_rows) == (False, 0, 0)
    with pytest.raises(MemoryDeallocated, match="the context is deallocated"):
        add(context, 2, blocks=(3,))
    with pytest.raises(MemoryDeallocated, match="no caches"):
        _ = context.caches
    assert context.begin_step() is None


def test_rows_are_taken_again_once_memory_is_there() -> None:
    context = make_context(ATTENTION)
    context.deallocate()

    context.allocate()
    add(context, 1, blocks=(3,))
    step(context)

    assert context.row_ids == [1]


def test_taking_and_giving_back_twice_is_harmless() -> None:
    context = make_context(ATTENTION)
    add(context, 1, blocks=(3,))

    context.allocate()
    assert context.row_ids == [1]  # it was there: nothing happened
    context.deallocate()
    context.deallocate()

    assert not context.allocated


def test_a_context_without_caches_of_its_own_can_be_deallocated_too() -> None:
    context = DynamicContext(
        max_rows=2, max_tokens=8, max_model_len=200, block_tokens=4, num_blocks=5
    )

    context.deallocate()

    with pytest.raises(MemoryDeallocated):
        add(context, 1, blocks=(0,))


def test_an_offloaded_context_keeps_its_rows_and_all_that_is_in_their_memory() -> None:
    context = make_context(num_states=4)
    for row in (1, 2):
        add(context, row, blocks=(row,))
        fill(context, row, float(row))
    k_cache, _ = context.caches.layer(2)
    k_cache[1].fill_(0.5)
    size = context.bytes

    context.offload()
    context.offload()

    assert (context.allocated, context.offloaded, context.bytes) == (False, True, 0)
    with pytest.raises(MemoryDeallocated, match="the context is deallocated"):
        add(context, 3, blocks=(3,))
    context.drop([1])
    context.allocate()
    assert (context.allocated, context.offloaded, context.bytes) == (True, False, size)
    assert context.row_ids == [2]
    assert state(context, 2) == {2.0}
    assert context.caches.layer(2)[0][1].eq(0.5).all()
    step(context)


def test_an_offloaded_context_that_is_deallocated_forgets_its_rows() -> None:
    context = make_context(ATTENTION)
    add(context, 1, blocks=(3,))
    context.offload()

    context.deallocate()
    context.allocate()

    assert (context.row_ids, context.offloaded) == ([], False)


def test_its_pool_forgets_prefixes_with_the_memory_that_held_them() -> None:
    pool = BlockPool(50)
    context = make_context(ATTENTION, pool=pool)
    context.add_request(1, pack_ids([1, 2, 3, 4]), make_sampling())
    [block_hash] = block_hashes([1, 2, 3, 4], 4, salt=b"", weights_version=0)
    pool.register(pool_block(context), block_hash, None)

    context.deallocate()

    assert pool.match([block_hash]) == []
    assert pool.free == pool.usable


def pool_block(context: DynamicContext) -> int:
    inputs = context.begin_step()
    assert inputs is not None
    return int(inputs.metadata.block_table[0, 0])


def test_reset_keeps_the_prefix_cache_only_on_request() -> None:
    pool = BlockPool(50)
    context = make_context(ATTENTION, pool=pool)
    context.add_request(1, pack_ids([1, 2, 3, 4]), make_sampling())
    [block_hash] = block_hashes([1, 2, 3, 4], 4, salt=b"", weights_version=0)
    block = pool_block(context)
    pool.register(block, block_hash, None)
    for half in context.caches.layer(0):
        half[block] = 5.0

    context.reset(keep_prefix_cache=True)
    assert pool.match([block_hash]) == [block]
    assert all((half[block] == 5).all() for half in context.caches.layer(0))  # and is good to read

    context.reset()
    assert pool.match([block_hash]) == []


def test_latent_vectors_stand_in_blocks_of_64_tokens() -> None:
    spec = CacheSpec(
        layers=("attention",) * 3,
        attention=LatentShape(kv_lora_rank=6, rope_head_dim=2),
        dtype=torch.float32,
    )
    context = make_context(spec, num_blocks=5, block_tokens=64)

    assert context.caches.latent(2).shape == (5, 64, 8)
    with pytest.raises(ConfigError, match="must be 64"):
        make_context(spec, block_tokens=32)


# Recurrent states


def test_a_row_has_a_slot_of_its_own_and_begins_with_nothing_in_it() -> None:
    context = make_context()
    for layer in (0, 3):
        for part in context.caches.states(layer):
            part.fill_(7)

    add(context, 1, blocks=(1,))
    add(context, 2, blocks=(2,))

    assert len(set(slots(context).values())) == 2
    assert state(context, 1) == state(context, 2) == {0.0}
    assert (context.caches.states(0)[0][-1] == 7).all()  # the dummy's
    context.check()


def test_a_state_stays_while_others_leave_and_its_row_moves() -> None:
    context = make_context()
    for row in range(5):
        add(context, row, blocks=(row,))
        fill(context, row, float(row + 1))
    before = slots(context)
    addresses = [part.data_ptr() for part in context.caches.states(0)]

    step(context, leaving=(0, 2, 4))

    assert context.row_ids == [3, 1]
    assert slots(context) == {3: before[3], 1: before[1]}
    assert (state(context, 3), state(context, 1)) == ({4.0}, {2.0})
    assert [part.data_ptr() for part in context.caches.states(0)] == addresses


def test_the_slot_of_a_row_that_left_is_another_rows_and_begins_anew() -> None:
    context = make_context(num_states=2)
    for row in (1, 2):
        add(context, row, blocks=(row,))
        fill(context, row, 9.0)
    slot = slots(context)[1]

    step(context, leaving=(1,))
    add(context, 3, blocks=(3,))

    assert slots(context)[3] == slot
    assert (state(context, 3), state(context, 2)) == ({0.0}, {9.0})


def test_a_waiting_row_keeps_its_state_and_goes_on_with_it() -> None:
    context = make_context()
    add(context, 1, 4, blocks=(1,))
    add(context, 2, blocks=(2,))
    fill(context, 1, 5.0)
    slot = slots(context)[1]

    step(context)
    assert context.paused_ids == [1]
    step(context)
    context.grant([1], [3])

    assert slots(context)[1] == slot
    assert state(context, 1) == {5.0}


def test_a_state_is_kept_from_chunk_to_chunk() -> None:
    context = make_context()
    context.add_row(
        Admit(
            row=1,
            prompt=pack_ids(range(6)),
            num_tokens=4,
            blocks=(1,),
            sampling=make_sampling(),
        )
    )
    fill(context, 1, 5.0)
    step(context)
    add(context, 2, blocks=(5,))  # takes the half prefilled row's place
    context.continue_row(Continue(row=1, num_tokens=2, blocks=(2,)))

    assert state(context, 1) == {5.0}
    assert state(context, 2) == {0.0}


def test_a_row_that_is_dropped_gives_its_slot_back() -> None:
    context = make_context(num_states=1)
    for row in range(3):
        add(context, row, blocks=(row,))
        context.drop([row])

    add(context, 4, blocks=(4,))
    assert context.row_ids == [4]


def test_a_row_for_whose_state_no_slot_is_left_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(50)
    context = make_context(num_states=1, pool=pool)
    context.add_request(1, pack_ids([1, 2]), make_sampling())
    before = (context.row_ids, slots(context), pool.held)

    with pytest.raises(OutOfStateSlots, match="0 of 1 slots are free"):
        context.add_request(2, pack_ids([1, 2]), make_sampling())

    assert (context.row_ids, slots(context), pool.held) == before
    context.check()


def test_a_row_with_a_state_does_not_share_the_tokens_of_another() -> None:
    context = make_context()

    with pytest.raises(RowMismatch, match="shares 4 tokens, and the recurrent state behind them"):
        context.add_row(
            Admit(
                row=1,
                prompt=pack_ids(range(6)),
                num_tokens=2,
                blocks=(1, 2),
                sampling=make_sampling(),
                cached_tokens=4,
            )
        )
    assert context.num_rows == 0
    context.check()


@pytest.mark.parametrize(("spec", "matched"), [(HYBRID, (16, 2, 14)), (ATTENTION, (16, 2, 2))])
def test_only_without_states_a_graph_takes_decodes_for_prefills(
    spec: CacheSpec, matched: tuple[int, int, int]
) -> None:
    graphs = (BatchDimensions(16, 2, 2), BatchDimensions(16, 2, 14))
    context = make_context(spec, graphs=graphs)
    for row in (1, 2, 3):
        add(context, row, 1, blocks=(row,))
    add(context, 4, 5, blocks=(4, 5))

    inputs = context.begin_step()

    assert inputs is not None
    assert inputs.shape.graph == BatchDimensions(*matched)


def test_every_slot_is_free_after_a_reset() -> None:
    context = make_context(max_rows=3)
    for _ in range(2):
        for row in range(3):
            add(context, row, blocks=(row,))
        context.reset()

    assert context.num_rows == 0


def test_a_model_without_states_has_no_slots() -> None:
    context = make_context(ATTENTION)
    add(context, 1, blocks=(1,))

    assert slots(context) == {1: -1}
    with pytest.raises(IndexError, match="no layer does"):
        context.caches.states(0)
