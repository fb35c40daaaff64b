"""The context against a slow model of it: a dictionary of rows, and a cache that remembers tokens.

`Caller` plays the executor's side of the protocol (and the allocator behind it) and checks each
step's inputs by writing its tokens to where the slots say and reading them back through the block
tables, as attention would.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject, booleans, data, integers, sampled_from, sets

from callboard.gpu.admission import RowMismatch
from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, StateShape
from callboard.gpu.context import DynamicContext, StepOutcome
from callboard.gpu.dimensions import AUTOMATIC, BatchDimensions, BatchLimits, graph_list
from callboard.gpu.memory import blocks_for
from callboard.gpu.step_inputs import StepInputs
from callboard.messages.base import pack_ids
from callboard.messages.errors import OutOfBlocks, RowOverflow, SequenceOverflow, TokenOverflow
from callboard.messages.steps import Admit, Continue, RowSampling


def make_sampling(
    *,
    max_tokens: int = 100,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    first_position: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: int = -1,
) -> RowSampling:
    return RowSampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        first_position=first_position,
        logprobs=logprobs,
    )


HYBRID = CacheSpec(
    layers=("attention", "state"),
    attention=KeyValueShape(num_kv_heads=1, head_dim=1),
    dtype=torch.float32,
    state=StateShape(
        conv_shape=(1,), ssm_shape=(1,), conv_dtype=torch.float64, ssm_dtype=torch.float64
    ),
)


def make_context(
    *,
    max_rows: int = 8,
    max_tokens: int = 64,
    max_model_len: int = 1000,
    block_tokens: int = 4,
    num_blocks: int = 50,
    pool: BlockPool | None = None,
    cache_spec: CacheSpec | None = None,
    paused_limit: int | None = None,
    graphs: Sequence[BatchDimensions] | None = None,
) -> DynamicContext:
    return DynamicContext(
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        pool=pool,
        cache_spec=cache_spec,
        paused_limit=paused_limit,
        graphs=graphs,
    )


@dataclass
class Row:
    tokens: list[int]  # prompt and output
    blocks: list[int]
    num_prompt: int
    sampling: RowSampling
    num_cached: int = 0
    num_fed: int = 0  # tokens of the coming step
    num_output: int = 0

    @property
    def half_prefilled(self) -> bool:
        return self.num_cached + self.num_fed < self.num_prompt


@dataclass
class Caller:
    """The executor's side, with the slow model of what the context should hold."""

    context: DynamicContext
    pool: BlockPool
    rows: dict[int, Row] = field(default_factory=dict)
    paused: list[int] = field(default_factory=list)
    cache: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot: (row, token)
    next_row: int = 100
    has_states: bool = False

    @property
    def block_tokens(self) -> int:
        return self.context.block_tokens

    def admit(
        self,
        prompt: list[int],
        *,
        num_tokens: int | None = None,
        sampling: RowSampling | None = None,
    ) -> int:
        chunk = num_tokens or len(prompt)
        blocks = self.pool.allocate(blocks_for(chunk, self.block_tokens))
        row, self.next_row = self.next_row, self.next_row + 1
        sampling = sampling or make_sampling()
        self.context.add_row(
            Admit(
                row=row,
                prompt=pack_ids(prompt),
                num_tokens=chunk,
                blocks=tuple(blocks),
                sampling=sampling,
            )
        )
        self.rows[row] = Row(list(prompt), blocks, len(prompt), sampling, num_fed=chunk)
        self.sign_states(row)
        return row

    def sign_states(self, row: int) -> None:
        """Write a row's number into its states, which were zero."""
        for states, slots in self.states():
            place = self.context.row_ids.index(row)
            assert states[slots[place]] == 0
            states[slots[place]] = row

    def states(self) -> list[tuple[torch.Tensor, list[int]]]:
        """Return the two parts of all states, each with the rows' slots; none without states."""
        if not self.has_states:
            return []
        slots = self.context.rows()["state_slot"].tolist()
        return [(states, slots) for states in self.context.caches.states(1)]

    def continue_prefill(self, num_tokens: int) -> None:
        row = self.context.half_prefilled_id
        assert row is not None
        known = self.rows[row]
        wanted = blocks_for(known.num_cached + num_tokens, self.block_tokens) - len(known.blocks)
        blocks = self.pool.allocate(wanted)
        self.context.continue_row(Continue(row=row, num_tokens=num_tokens, blocks=tuple(blocks)))
        known.blocks += blocks
        known.num_fed = num_tokens

    def grant(self, *rows: int) -> None:
        blocks = self.pool.allocate(len(rows))
        self.context.grant(rows, blocks)
        for row, block in zip(rows, blocks, strict=True):
            self.rows[row].blocks.append(block)
            self.rows[row].num_fed = 1
            self.paused.remove(row)

    def drop(self, *rows: int) -> None:
        self.context.drop(rows)
        for row in rows:
            self.forget(row)

    def forget(self, row: int) -> None:
        self.pool.release(self.rows.pop(row).blocks)
        if row in self.paused:
            self.paused.remove(row)

    def running(self) -> list[int]:
        """The rows of the coming step, in the order the context has them in."""
        return [row for row in self.context.row_ids if self.rows[row].num_fed]

    def sampling(self) -> list[int]:
        return [row for row in self.running() if not self.rows[row].half_prefilled]

    def step(
        self, tokens: dict[int, int] | int = 7, failed: tuple[int, ...] = ()
    ) -> StepOutcome | None:
        """Run one step in which each row samples its token of `tokens`, or all the same."""
        expected = {row for row, known in self.rows.items() if known.num_fed}
        inputs = self.context.begin_step()
        self.context.check()
        if inputs is None:
            assert not expected
            return None
        assert set(self.running()) == expected
        self.write_and_read(inputs)
        sampling = self.sampling()
        chosen = [tokens if isinstance(tokens, int) else tokens[row] for row in sampling]
        outcome = self.context.finish_step(
            np.array(chosen), np.array([row in failed for row in sampling], dtype=np.bool_)
        )
        self.expect(outcome, dict(zip(sampling, chosen, strict=True)), failed)
        self.context.check()
        return outcome

    def write_and_read(self, inputs: StepInputs) -> None:
        """Do with the slots and tables what the model does, and compare with what rows hold."""
        metadata = inputs.metadata
        num_tokens, running = inputs.num_tokens, self.running()
        ids = inputs.input_ids_T[:num_tokens].tolist()
        slots = metadata.slot_mapping[:num_tokens].tolist()
        row_T = [row for row in running for _ in range(self.rows[row].num_fed)]
        self.cache.update(zip(slots, zip(row_T, ids, strict=True), strict=True))
        positions: list[int] = []
        for place, row in enumerate(running):
            known = self.rows[row]
            length = known.num_cached + known.num_fed
            assert metadata.seqlens_k[place] == metadata.kv_lens_host[place] == length
            assert metadata.query_lens_host[place] == known.num_fed
            table = metadata.block_table[place].tolist()
            assert table[: len(known.blocks)] == known.blocks
            assert self.read(table, length) == [(row, token) for token in known.tokens[:length]]
            positions += range(known.num_cached, length)
        assert metadata.positions[:num_tokens].tolist() == positions
        ends = np.cumsum([self.rows[row].num_fed for row in running]).tolist()
        assert metadata.cu_seqlens_q[: len(running) + 1].tolist() == [0, *ends]
        num_sampling = len(self.sampling())
        assert inputs.last_token_indices_S.tolist() == [end - 1 for end in ends[:num_sampling]]
        assert (metadata.query_lens_host[: metadata.num_decodes] == 1).all()
        assert metadata.max_seqlen_q >= metadata.query_lens_host.max()
        assert metadata.max_seqlen_k >= metadata.kv_lens_host.max()
        for _, slot_R in self.states()[:1]:
            assert inputs.states is not None
            wanted = slot_R[self.context.num_paused :][: len(running)]
            num_decodes = inputs.states.num_decodes
            assert inputs.states.decode_slots_D[:num_decodes].tolist() == wanted[:num_decodes]
            prefills = wanted[num_decodes:]
            assert inputs.states.prefill_slots_P[: len(prefills)].tolist() == prefills
        self.expect_harmless_padding(inputs)

    def expect_harmless_padding(self, inputs: StepInputs) -> None:
        metadata, num_tokens = inputs.metadata, inputs.num_tokens
        num_rows = metadata.num_rows
        assert len(metadata.seqlens_k) == inputs.shape.padded.requests
        assert len(inputs.input_ids_T) == len(metadata.slot_mapping) == inputs.shape.padded.tokens
        assert (metadata.slot_mapping[num_tokens:] // self.block_tokens == self.context.dummy).all()
        assert (metadata.cu_seqlens_q[num_rows:] == num_tokens).all()
        assert (metadata.seqlens_k[num_rows:] == 0).all()
        assert (metadata.block_table[num_rows:] == self.context.dummy).all()

    def read(self, table: list[int], length: int) -> list[tuple[int, int]]:
        size = self.block_tokens
        return [self.cache[table[i // size] * size + i % size] for i in range(length)]

    def expect(self, outcome: StepOutcome, chosen: dict[int, int], failed: tuple[int, ...]) -> None:
        """Advance the model by the same step, and compare."""
        stopped, full, paused = set(), set(), set()
        for row, known in self.rows.items():
            known.num_cached += known.num_fed
            known.num_fed = 0
            if row not in chosen or row in failed:
                continue
            known.tokens.append(chosen[row])
            position = known.sampling.first_position + known.num_output
            known.num_output += 1
            may_stop = position >= known.sampling.min_tokens
            if chosen[row] in known.sampling.stop_token_ids and may_stop:
                stopped.add(row)
            elif position + 1 == known.sampling.max_tokens:
                full.add(row)
            elif known.num_cached % self.block_tokens == 0:
                paused.add(row)
            else:
                known.num_fed = 1
        told = dict(zip(outcome.rows.tolist(), outcome.token_ids.tolist(), strict=True))
        assert told == {row: token for row, token in chosen.items() if row not in failed}
        assert set(outcome.stopped.tolist()) == stopped
        assert set(outcome.full.tolist()) == full
        assert set(outcome.failed.tolist()) == set(failed)
        assert set(outcome.paused.tolist()) == paused
        self.paused += outcome.paused.tolist()
        for row in [*stopped, *full, *failed]:
            self.forget(row)

    def check(self) -> None:
        self.context.check()
        assert set(self.context.row_ids) == set(self.rows)
        assert self.context.paused_ids == self.paused
        for states, slots in self.states():
            assert states[slots, 0].tolist() == self.context.row_ids
        assert self.pool.held == sum(len(known.blocks) for known in self.rows.values())
        self.pool.audit()


def make_caller(
    *,
    max_rows: int = 8,
    max_tokens: int = 64,
    block_tokens: int = 4,
    num_blocks: int = 50,
    has_states: bool = False,
    graphs: Sequence[BatchDimensions] | None = None,
) -> Caller:
    context = make_context(
        max_rows=max_rows,
        max_tokens=max_tokens,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        cache_spec=HYBRID if has_states else None,
        graphs=graphs,
    )
    return Caller(context, BlockPool(num_blocks), has_states=has_states)


# One row


def test_a_prompt_of_144_tokens_fills_one_block_of_128_and_begins_another() -> None:
    pool = BlockPool(491)
    context = make_context(block_tokens=128, num_blocks=491, max_tokens=16384, pool=pool)

    context.add_request(0, pack_ids(range(144)), make_sampling())
    inputs = context.begin_step()

    assert inputs is not None
    assert inputs.input_ids_T.tolist() == list(range(144))
    assert inputs.metadata.positions.tolist() == list(range(144))
    assert inputs.metadata.block_table.tolist() == [[488, 489]]
    slots = inputs.metadata.slot_mapping
    assert slots[:128].tolist() == [488 * 128 + offset for offset in range(128)]
    assert slots[128:].tolist() == [489 * 128 + offset for offset in range(16)]
    assert pool.free == 488
    assert context.row_ids == [0]
    context.check()


def test_an_empty_context_has_no_step() -> None:
    assert make_context().begin_step() is None


def test_a_row_decodes_from_its_last_token_until_its_limit() -> None:
    caller = make_caller()
    row = caller.admit([1, 2, 3], sampling=make_sampling(max_tokens=3))

    caller.step(11)
    second = caller.step(12)
    assert second is not None
    assert second.full.tolist() == []
    caller.grant(row)
    outcome = caller.step(13)

    assert outcome is not None
    assert outcome.full.tolist() == [row]
    assert outcome.token_ids.tolist() == [13]
    assert caller.context.num_rows == 0
    caller.check()


def test_a_row_with_one_token_to_sample_leaves_after_its_prefill() -> None:
    caller = make_caller()
    row = caller.admit([1, 2], sampling=make_sampling(max_tokens=1))

    outcome = caller.step()

    assert outcome is not None
    assert outcome.full.tolist() == [row]


def test_a_stop_id_ends_a_row_and_its_limit_is_then_not_the_reason() -> None:
    caller = make_caller()
    row = caller.admit([1, 2], sampling=make_sampling(max_tokens=1, stop_token_ids=(5, 7)))

    outcome = caller.step(7)

    assert outcome is not None
    assert outcome.stopped.tolist() == [row]
    assert outcome.full.tolist() == []


def test_a_stop_id_is_a_token_like_others_until_min_tokens_precede_it() -> None:
    caller = make_caller(block_tokens=64)
    row = caller.admit([1, 2], sampling=make_sampling(min_tokens=2, stop_token_ids=(7,)))

    endings = [caller.step(7) for _ in range(3)]

    assert [outcome.stopped.tolist() for outcome in endings if outcome] == [[], [], [row]]


def test_limits_count_from_the_first_output_of_a_row_that_was_recomputed() -> None:
    caller = make_caller(block_tokens=64)
    sampling = make_sampling(max_tokens=6, min_tokens=5, first_position=4, stop_token_ids=(7,))
    row = caller.admit([1, 2, 3, 4, 5, 6], sampling=sampling)
    most = caller.context.max_sequence_lengths().tolist()

    first = caller.step(7)
    second = caller.step(8)

    assert first is not None
    assert second is not None
    assert most == [8]  # two of its tokens are prompt, four of the six were output before
    assert first.stopped.tolist() == []
    assert second.full.tolist() == [row]


def test_stop_ids_of_one_row_do_not_stop_another() -> None:
    caller = make_caller()
    many = tuple(range(1000, 1300))
    first = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=many))
    second = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=(7,)))
    third = caller.admit([1, 2])

    outcome = caller.step({first: 7, second: 7, third: 1299})

    assert outcome is not None
    assert outcome.stopped.tolist() == [second]


def test_stop_ids_leave_with_their_row() -> None:
    caller = make_caller()
    first = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=(5, 6, 7)))
    caller.step({first: 5})
    second = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=(8,)))
    third = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=(1, 2, 3)))

    outcome = caller.step({second: 6, third: 4})

    assert outcome is not None
    assert outcome.stopped.tolist() == []


# Rows that wait for a block


def test_a_row_whose_block_is_full_waits_while_others_go_on() -> None:
    caller = make_caller()
    full = caller.admit([1, 2, 3, 4])
    other = caller.admit([5, 6])

    outcome = caller.step({full: 21, other: 22})
    assert outcome is not None
    assert outcome.paused.tolist() == [full]
    caller.step({other: 23})
    caller.grant(full)
    outcome = caller.step({full: 24, other: 25})

    assert outcome is not None
    assert outcome.rows.tolist() == [full, other]
    caller.check()


def test_grants_may_come_in_any_order_and_the_rest_keep_theirs() -> None:
    caller = make_caller()
    rows = [caller.admit([1, 2, 3, 4]) for _ in range(5)]
    caller.step()

    caller.grant(rows[3], rows[1])

    assert caller.context.paused_ids == [rows[0], rows[2], rows[4]]
    assert caller.context.row_ids[3:] == [rows[3], rows[1]]
    caller.step({rows[3]: 1, rows[1]: 2})
    caller.check()


def test_a_step_of_rows_that_all_wait_is_none() -> None:
    caller = make_caller()
    caller.admit([1, 2, 3, 4])
    caller.step()

    assert caller.step() is None


# One prompt over several steps


def test_a_prompt_in_chunks_is_fed_in_order_and_samples_once() -> None:
    caller = make_caller()
    row = caller.admit(list(range(10)), num_tokens=3)

    first = caller.step()
    caller.continue_prefill(3)
    second = caller.step()
    caller.continue_prefill(4)
    third = caller.step()

    assert [len(outcome.rows) for outcome in (first, second, third) if outcome] == [0, 0, 1]
    assert third is not None
    assert third.rows.tolist() == [row]
    caller.check()


def test_a_half_prefilled_row_stays_last_and_sits_out_without_a_chunk() -> None:
    caller = make_caller()
    half = caller.admit(list(range(20)), num_tokens=8)
    later = caller.admit([1, 2])
    assert caller.context.row_ids == [later, half]
    caller.step()

    outcome = caller.step()

    assert outcome is not None
    assert outcome.rows.tolist() == [later]
    assert caller.context.half_prefilled_id == half
    assert caller.context.paused_ids == []
    caller.check()


def test_a_half_prefilled_row_moves_up_when_others_leave() -> None:
    caller = make_caller()
    ending = [caller.admit([1, 2], sampling=make_sampling(max_tokens=1)) for _ in range(3)]
    going_on = caller.admit([3, 4])
    half = caller.admit(list(range(20)), num_tokens=8)

    caller.step()

    assert caller.context.row_ids == [going_on, half]
    assert not set(ending) & set(caller.context.row_ids)
    caller.continue_prefill(12)
    caller.step()
    caller.check()


def test_all_others_may_leave_while_a_row_is_half_prefilled() -> None:
    caller = make_caller()
    caller.admit([1, 2], sampling=make_sampling(max_tokens=1))
    half = caller.admit(list(range(20)), num_tokens=8)

    caller.step()
    assert caller.context.row_ids == [half]
    assert caller.step() is None
    caller.continue_prefill(12)
    outcome = caller.step()

    assert outcome is not None
    assert outcome.rows.tolist() == [half]
    assert caller.context.half_prefilled_id is None


def test_a_half_prefilled_row_that_was_dropped_makes_room_for_the_next() -> None:
    caller = make_caller()
    half = caller.admit(list(range(20)), num_tokens=8)
    caller.step()

    caller.drop(half)
    other = caller.admit(list(range(30, 50)), num_tokens=5)
    caller.step()

    assert caller.context.half_prefilled_id == other
    caller.check()


def test_prompts_of_one_token_stand_with_the_decodes() -> None:
    caller = make_caller()
    decoding = caller.admit([1, 2])
    caller.step()
    long = caller.admit([1, 2, 3])
    single = caller.admit([9])
    half = caller.admit(list(range(20)), num_tokens=6)

    inputs = caller.context.begin_step()

    assert inputs is not None
    assert inputs.metadata.num_decodes == 2
    assert caller.context.row_ids == [decoding, single, long, half]
    caller.step()


@pytest.mark.parametrize(("num_others", "max_seqlen_q"), [(0, 1), (1, 3)])
def test_the_last_chunk_of_a_prompt_may_be_one_token_and_is_then_a_decode(
    num_others: int, max_seqlen_q: int
) -> None:
    """Kernels for prefills never get a step whose longest query is one token."""
    caller = make_caller()
    decoding = caller.admit([1, 2])
    half = caller.admit(list(range(9)), num_tokens=8)
    caller.step()
    others = [caller.admit([1, 2, 3]) for _ in range(num_others)]
    caller.continue_prefill(1)

    inputs = caller.context.begin_step()

    assert inputs is not None
    assert (inputs.metadata.num_decodes, inputs.metadata.max_seqlen_q) == (2, max_seqlen_q)
    assert caller.context.row_ids == [decoding, half, *others]
    outcome = caller.step()
    assert outcome is not None
    assert outcome.rows.tolist() == [decoding, half, *others]


def test_a_chunk_of_one_token_before_the_last_stays_behind_longer_prompts() -> None:
    caller = make_caller()
    half = caller.admit(list(range(9)), num_tokens=1)
    alone = caller.context.begin_step()
    long = caller.admit([1, 2, 3])
    beside = caller.context.begin_step()

    assert alone is not None
    assert beside is not None
    assert (alone.metadata.num_decodes, alone.metadata.max_seqlen_q) == (1, 1)
    assert (beside.metadata.num_decodes, beside.metadata.max_seqlen_q) == (0, 3)
    assert caller.context.row_ids == [long, half]
    caller.step()
    assert caller.context.half_prefilled_id == half


# Dropping


def test_rows_are_dropped_wherever_they_stand() -> None:
    caller = make_caller()
    paused = [caller.admit([1, 2, 3, 4]) for _ in range(3)]
    decoding = [caller.admit([5, 6]) for _ in range(3)]
    caller.step()
    half = caller.admit(list(range(20)), num_tokens=6)

    caller.drop(paused[1], decoding[0], half)
    caller.check()
    caller.step({decoding[1]: 1, decoding[2]: 2})

    assert caller.context.paused_ids == [paused[0], paused[2]]
    caller.check()


def test_unknown_rows_are_ignored_when_dropped() -> None:
    caller = make_caller()
    row = caller.admit([1, 2])

    caller.context.drop([12345, row, 777])

    assert caller.context.row_ids == []


def test_a_step_that_failed_may_be_begun_again_or_its_rows_dropped() -> None:
    caller = make_caller()
    kept = caller.admit([1, 2, 3])
    dropped = caller.admit([4, 5])
    half = caller.admit(list(range(20)), num_tokens=6)
    caller.context.begin_step()

    caller.drop(dropped)
    caller.step({kept: 3})
    caller.drop(half, kept)

    assert caller.context.num_rows == 0
    assert caller.context.half_prefilled_id is None
    caller.check()


def test_reset_forgets_everything() -> None:
    caller = make_caller()
    caller.admit([1, 2, 3, 4])
    caller.step()
    caller.admit([1, 2])
    caller.admit(list(range(20)), num_tokens=6)

    caller.context.reset()

    assert caller.context.row_ids == []
    assert caller.context.num_tokens == 0
    caller.context.check()
    assert caller.context.begin_step() is None


# How rows choose


def test_stop_ids_are_banned_only_while_min_tokens_do_not_precede() -> None:
    caller = make_caller(block_tokens=64)
    waiting = caller.admit([1, 2], sampling=make_sampling(min_tokens=2, stop_token_ids=(8, 9)))
    free = caller.admit([1, 2], sampling=make_sampling(stop_token_ids=(7,)))
    bans = []

    for _ in range(3):
        caller.context.begin_step()
        rows = caller.context.sampling_rows()
        bans.append((rows.banned_rows_B.tolist(), rows.banned_tokens_B.tolist()))
        caller.step({waiting: 1, free: 2})

    assert bans == [([0, 0], [8, 9]), ([0, 0], [8, 9]), ([], [])]


def test_parameters_and_positions_follow_their_rows() -> None:
    caller = make_caller()
    plain = caller.admit([1, 2], sampling=make_sampling(max_tokens=1))
    drawn = make_sampling(temperature=0.5, seed=2**62 + 1, first_position=3, logprobs=4)
    row = caller.admit([3, 4], sampling=drawn)
    caller.step({plain: 1, row: 2})
    caller.context.begin_step()

    rows = caller.context.sampling_rows()

    assert caller.context.row_ids == [row]
    assert rows.temperature_S.tolist() == [0.5]
    assert rows.seed_S.tolist() == [2**62 + 1]
    assert rows.position_S.tolist() == [4]
    assert caller.context.logprobs_wanted().tolist() == [4]


def test_some_of_the_sampling_rows_may_be_asked_for_alone() -> None:
    caller = make_caller()
    caller.admit([1, 2], sampling=make_sampling(temperature=0.5, seed=5))
    biased = msgspec.structs.replace(make_sampling(temperature=0.7, seed=7), logit_bias={8: 1.0})
    caller.admit([3, 4], sampling=biased)
    caller.admit([5, 6], sampling=make_sampling(min_tokens=2, stop_token_ids=(9,)))
    caller.context.begin_step()

    second = caller.context.sampling_rows(slice(1, 2))
    third = caller.context.sampling_rows(slice(2, 3))

    assert (second.sampled_rows_S.tolist(), second.seed_S.tolist()) == ([0], [7])
    assert second.adjustments is not None
    assert second.adjustments.bias_rows_M.tolist() == [0]
    assert second.banned_rows_B.tolist() == []
    assert (third.banned_rows_B.tolist(), third.banned_tokens_B.tolist()) == ([0], [9])
    assert (third.sampled_rows_S.tolist(), third.adjustments) == ([], None)


def test_a_row_that_failed_leaves_alone() -> None:
    caller = make_caller()
    good = caller.admit([1, 2])
    bad = caller.admit([1, 2], sampling=make_sampling(max_tokens=1, stop_token_ids=(7,)))

    outcome = caller.step(7, failed=(bad,))

    assert outcome is not None
    assert outcome.failed.tolist() == [bad]
    assert outcome.rows.tolist() == [good]
    assert caller.context.row_ids == [good]


# What callers get wrong


def admit(
    row: int = 1,
    *,
    prompt: range = range(6),
    num_tokens: int | None = None,
    blocks: tuple[int, ...] = (0, 1),
    sampling: RowSampling | None = None,
) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=len(prompt) if num_tokens is None else num_tokens,
        blocks=blocks,
        sampling=sampling or make_sampling(),
    )


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        (admit(7), RowMismatch, "row 7 is here already"),
        (admit(prompt=range(0), blocks=()), RowMismatch, "must have 1 to 0"),
        (admit(num_tokens=0, blocks=()), RowMismatch, "a chunk of 0 tokens, and must have 1 to 6"),
        (admit(num_tokens=7), RowMismatch, "a chunk of 7 tokens, and must have 1 to 6"),
        (admit(blocks=(0,)), RowMismatch, "got 1 blocks for 6 tokens after 0, and needs 2 of 4"),
        (admit(blocks=(0, 49)), RowMismatch, "block 49 is not one of 0 to 48"),
        (admit(blocks=(0, -1)), RowMismatch, "block -1 is not one of"),
        (admit(num_tokens=4, blocks=(0,)), RowMismatch, "prefilled in part: row 7 is"),
        (admit(sampling=make_sampling(max_tokens=-1)), RowMismatch, "no token to sample"),
        (
            admit(sampling=make_sampling(max_tokens=995)),
            SequenceOverflow,
            r"row 1: 6 \+ 995 tokens are wanted, and the context holds 1000",
        ),
        (
            admit(prompt=range(57), blocks=tuple(range(15))),
            TokenOverflow,
            "row 1: the step has 8 tokens and is to get 57 more, and may have 64",
        ),
    ],
)
def test_a_row_that_cannot_be_is_refused_and_changes_nothing(
    message: Admit, error: type[Exception], reason: str
) -> None:
    context = make_context()
    context.add_row(admit(7, prompt=range(20), num_tokens=8, blocks=(10, 11)))

    with pytest.raises(error, match=reason):
        context.add_row(message)

    assert context.row_ids == [7]
    assert context.num_tokens == 8
    context.check()


def test_rows_beyond_the_last_place_are_refused() -> None:
    context = make_context(max_rows=2)
    context.add_row(admit(1, blocks=(0, 1)))
    context.add_row(admit(2, blocks=(2, 3)))

    with pytest.raises(RowOverflow, match="row 3: all 2 rows are taken"):
        context.add_row(admit(3, blocks=(4, 5)))
    assert context.row_ids == [1, 2]


def test_only_the_half_prefilled_row_is_continued_and_once_a_step() -> None:
    caller = make_caller()
    caller.admit([1, 2])
    half = caller.admit(list(range(20)), num_tokens=8)
    context = caller.context

    with pytest.raises(RowMismatch, match="has a chunk in this step already"):
        context.continue_row(Continue(row=half, num_tokens=1, blocks=(5,)))
    caller.step()
    with pytest.raises(RowMismatch, match="row 1 cannot be continued"):
        context.continue_row(Continue(row=1, num_tokens=1, blocks=(5,)))
    with pytest.raises(RowMismatch, match="a chunk of 13 tokens, and must have 1 to 12"):
        context.continue_row(Continue(row=half, num_tokens=13, blocks=(5,)))
    with pytest.raises(RowMismatch, match="got 0 blocks for 3 tokens after 8, and needs 1"):
        context.continue_row(Continue(row=half, num_tokens=3, blocks=()))
    caller.step()
    caller.check()


def test_only_waiting_rows_get_a_block() -> None:
    caller = make_caller()
    waiting = caller.admit([1, 2, 3, 4])
    running = caller.admit([1, 2])
    caller.step()
    context = caller.context

    with pytest.raises(RowMismatch, match=rf"rows \[{running}\] got a block and wait for none"):
        context.grant([waiting, running], [5, 6])
    with pytest.raises(RowMismatch, match="not one for each"):
        context.grant([waiting, waiting], [5, 6])
    with pytest.raises(RowMismatch, match="block 49 is not one"):
        context.grant([waiting], [49])
    assert context.paused_ids == [waiting]
    caller.check()


def test_blocks_and_chunks_for_rows_that_ended_in_the_last_step_are_ignored() -> None:
    context = make_context()
    context.add_row(admit(1, prompt=range(4), blocks=(0,), sampling=make_sampling(max_tokens=1)))
    context.begin_step()
    context.finish_step(np.array([9]))
    context.grant([1], [5])
    context.continue_row(Continue(row=1, num_tokens=1, blocks=()))
    assert context.num_rows == 0
    with pytest.raises(RowMismatch, match="wait for none"):
        context.grant([2], [5])


def test_a_row_that_ended_a_step_earlier_is_unknown_again() -> None:
    context = make_context()
    context.add_row(admit(1, prompt=range(4), blocks=(0,), sampling=make_sampling(max_tokens=1)))
    context.add_row(admit(2, prompt=range(3), blocks=(1,)))
    for count in (2, 1):
        context.begin_step()
        context.finish_step(np.arange(count))
    with pytest.raises(RowMismatch, match="wait for none"):
        context.grant([1], [5])


def test_a_row_that_is_to_sample_nothing_leaves_with_its_prompt() -> None:
    context = make_context()
    context.add_row(admit(1, prompt=range(6), sampling=make_sampling(max_tokens=0)))
    context.begin_step()
    outcome = context.finish_step(np.array([9]))
    assert (outcome.rows.tolist(), outcome.token_ids.tolist()) == ([], [])
    assert (outcome.full.tolist(), outcome.stopped.tolist()) == ([1], [])
    assert context.num_rows == 0


def test_targets_are_the_prompt_tokens_behind_those_of_the_chunk() -> None:
    context = make_context()
    context.add_row(admit(1, prompt=range(20, 23), blocks=(9,)))
    sampling = msgspec.structs.replace(make_sampling(), prompt_logprobs=2)
    context.add_row(admit(2, prompt=range(30, 36), num_tokens=4, blocks=(0,), sampling=sampling))
    context.begin_step()
    (targets,) = context.prompt_targets()
    assert (targets.row, targets.start, targets.sampling) == (2, 1, sampling)
    assert targets.tokens == slice(3, 7)
    assert targets.target_ids.tolist() == [31, 32, 33, 34]
    context.finish_step(np.array([9]))

    context.continue_row(Continue(row=2, num_tokens=2, blocks=(1,)))
    context.begin_step()
    (targets,) = context.prompt_targets()
    assert (targets.start, targets.target_ids.tolist()) == (5, [35])  # nothing is behind the last
    assert targets.tokens == slice(1, 2)
    context.finish_step(np.array([9, 9]))
    assert context.prompt_targets() == []


def test_rows_whose_prompt_could_not_be_scored_leave_alone() -> None:
    context = make_context()
    context.add_row(admit(1, prompt=range(3), blocks=(9,)))
    context.add_row(admit(2, prompt=range(3), blocks=(8,)))
    context.add_row(admit(3, prompt=range(8), num_tokens=4, blocks=(0,)))
    context.begin_step()
    outcome = context.finish_step(np.array([7, 8]), failed_prompts=[1, 3])
    assert sorted(outcome.failed.tolist()) == [1, 3]
    assert (outcome.rows.tolist(), outcome.token_ids.tolist()) == ([2], [8])
    assert (context.row_ids, context.half_prefilled_id) == ([2], None)
    context.continue_row(Continue(row=3, num_tokens=4, blocks=(1,)))  # planned before it was known
    context.check()


def test_tokens_for_other_rows_than_those_that_sampled_are_refused() -> None:
    caller = make_caller()
    caller.admit([1, 2])
    caller.context.begin_step()

    with pytest.raises(RowMismatch, match="2 tokens for 1 sampling rows"):
        caller.context.finish_step(np.array([1, 2]))


# Alone, with a pool


@pytest.mark.parametrize(
    ("num_blocks", "spec"), [(491, None), (556, HYBRID)], ids=["attention", "hybrid"]
)
def test_rows_leave_move_wait_and_resume_in_one_update(
    num_blocks: int, spec: CacheSpec | None
) -> None:
    """Ten rows of which three leave, two wait and two more reach the end of their block."""
    pool = BlockPool(num_blocks)
    context = make_context(
        max_rows=16,
        block_tokens=128,
        num_blocks=num_blocks,
        max_tokens=16384,
        pool=pool,
        cache_spec=spec,
    )
    first = num_blocks - 12  # of the eleven blocks that rows hold: 479, or 544
    lengths = [128, 128, 10, 138, 10, 127, 127, 10, 10, 10]
    tables = [[first + row] for row in range(10)]
    tables[3].append(first + 10)
    pool.allocate(pool.free)  # nothing is free for now
    for row, (length, blocks) in enumerate(zip(lengths, tables, strict=True)):
        context.add_row(
            admit(row, prompt=range(length), blocks=tuple(blocks), sampling=make_sampling())
        )
    slots = context.rows()["state_slot"]
    context.begin_step()
    assert context.update_requests(np.ones(10, dtype=np.bool_), np.arange(10)).paused == [0, 1]
    assert context.row_ids == list(range(10))
    pool.release(range(first))

    mask = np.array([1, 0, 1, 1, 1, 0, 0, 1], dtype=np.bool_)
    newly_paused = context.update_requests(mask, np.arange(2, 10)).paused
    inputs = context.begin_step()

    assert newly_paused == []
    assert context.paused_ids == []
    assert context.row_ids == [0, 1, 5, 6, 4, 2, 9]
    assert inputs is not None
    assert inputs.input_ids_T.tolist() == [0, 1, 5, 6, 4, 2, 9]
    assert inputs.metadata.positions.tolist() == [128, 128, 128, 128, 11, 11, 11]
    offsets = (inputs.metadata.slot_mapping % 128).tolist()
    assert offsets == [0, 0, 0, 0, 11, 11, 11]
    counts = [2, 2, 2, 2, 1, 1, 1]
    table = inputs.metadata.block_table.tolist()
    held = [blocks[:count] for blocks, count in zip(table, counts, strict=True)]
    assert [[block - first for block in blocks] for blocks in held] == [
        [0, 3],
        [1, 10],
        [5, 7],
        [6, 8],
        [4],
        [2],
        [9],
    ]
    assert all(blocks[1] == pool.dummy for blocks in table[4:])
    assert context.rows()["state_slot"].tolist() == slots[[0, 1, 5, 6, 4, 2, 9]].tolist()
    assert pool.free == first
    assert pool.held == sum(counts)
    context.check()


def test_an_update_whose_mask_does_not_match_the_rows_is_refused() -> None:
    pool = BlockPool(50)
    context = make_context(pool=pool)
    context.add_request(1, pack_ids([1, 2]), make_sampling())
    context.begin_step()

    with pytest.raises(RowMismatch, match="5 entries of the mask for 1 sampling rows"):
        context.update_requests(np.ones(5, dtype=np.bool_), np.arange(5))


def test_the_longest_wait_ends_first_when_a_block_comes_free() -> None:
    pool = BlockPool(4)
    context = make_context(pool=pool)
    context.add_request(1, pack_ids([1, 2, 3]), make_sampling())
    context.add_request(2, pack_ids([1, 2, 3, 4]), make_sampling())
    context.add_request(3, pack_ids([1, 2]), make_sampling())
    stay = np.ones(3, dtype=np.bool_)

    assert context.update_requests(stay, np.array([5, 6, 7])).paused == [2]
    assert context.update_requests(stay[:2], np.array([5, 7])).paused == [1]
    assert context.paused_ids == [2, 1]
    assert context.update_requests(np.zeros(1, dtype=np.bool_), np.array([7])).paused == []

    assert context.paused_ids == [1]
    assert context.row_ids == [1, 2]
    assert pool.free == 0
    context.check()


def test_no_more_rows_resume_than_a_step_has_tokens() -> None:
    pool = BlockPool(50)
    context = make_context(max_tokens=2, block_tokens=2, pool=pool)
    others = pool.allocate(pool.usable)
    for row in (1, 2, 3):
        pool.release([others.pop()])
        context.add_request(row, pack_ids([1, 2]), make_sampling())
        context.update_requests(np.ones(1, dtype=np.bool_), np.array([5]))
    assert context.paused_ids == [1, 2, 3]
    pool.release(others)

    context.update_requests(np.ones(0, dtype=np.bool_), np.ones(0, dtype=np.int64))

    assert context.paused_ids == [3]
    assert context.num_tokens == 2
    context.check()


def test_all_rows_waiting_for_ever_is_a_state_and_no_crash() -> None:
    pool = BlockPool(3)
    context = make_context(pool=pool)
    for row in (1, 2):
        context.add_request(row, pack_ids([1, 2, 3, 4]), make_sampling())

    assert context.update_requests(np.ones(2, dtype=np.bool_), np.array([5, 6])).paused == [1, 2]

    assert context.begin_step() is None
    context.drop([2])
    assert pool.free == 1


def test_a_row_that_is_refused_leaves_the_pool_as_it_was() -> None:
    pool = BlockPool(50)
    context = make_context(max_rows=1, pool=pool)
    context.add_request(1, pack_ids([1, 2]), make_sampling())

    with pytest.raises(RowOverflow):
        context.add_request(2, pack_ids([1, 2]), make_sampling())
    with pytest.raises(OutOfBlocks, match="row 2: 50 blocks wanted") as caught:
        context.add_request(2, pack_ids(range(200)), make_sampling())
    assert not caught.value.transient
    assert pool.held == 1


def test_without_a_pool_the_blocks_are_somebody_elses() -> None:
    context = make_context()

    with pytest.raises(RowMismatch, match="no block pool"):
        context.add_request(1, pack_ids([1, 2]), make_sampling())
    context.add_row(admit(1))
    with pytest.raises(RowMismatch, match="no block pool"):
        context.update_requests(np.ones(1, dtype=np.bool_), np.ones(1, dtype=np.int64))
    assert context.num_tokens == 6


@pytest.mark.parametrize("seed", range(8))
def test_every_row_ends_and_every_block_comes_back_under_any_pressure(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(chance.randint(8, 20))
    context = make_context(max_rows=6, num_blocks=pool.num_blocks, pool=pool)
    waiting = [(row, chance.randint(1, 12), chance.randint(1, 12)) for row in range(30)]
    remaining = {row: num_tokens for row, _, num_tokens in waiting}
    for _ in range(1000):
        while waiting and not context.paused_ids and context.num_rows < 6:
            row, length, _ = waiting[0]
            try:
                context.add_request(row, pack_ids(range(length)), make_sampling())
            except OutOfBlocks:
                break
            waiting.pop(0)
        if context.begin_step() is None:
            context.drop([victim := context.paused_ids[-1]])  # preempt the newest, recompute it
            waiting.insert(0, (victim, 1, remaining[victim]))
            continue
        running = context.row_ids[context.num_paused :]
        for row in running:
            remaining[row] -= 1
        mask = np.array([remaining[row] > 0 for row in running], dtype=np.bool_)
        context.update_requests(mask, np.ones(len(running), dtype=np.int64))
        context.check()
        pool.audit()
        if not waiting and context.num_rows == 0:
            break

    assert set(remaining.values()) == {0}
    assert pool.free == pool.usable


@pytest.mark.parametrize("seed", range(8))
def test_every_row_ends_where_the_context_itself_evicts(seed: int) -> None:
    chance = random.Random(seed)
    pool = BlockPool(chance.randint(8, 20))
    context = make_context(
        max_rows=6, num_blocks=pool.num_blocks, pool=pool, paused_limit=chance.randint(0, 4)
    )
    waiting = [(row, chance.randint(1, 12)) for row in range(30)]
    remaining = {row: chance.randint(1, 12) for row, _ in waiting}
    for _ in range(1000):
        while waiting and not context.paused_ids:
            if not context.check_availability(waiting[0][1]).fits:
                break
            row, length = waiting.pop(0)
            context.add_request(row, pack_ids(range(length)), make_sampling())
        assert context.begin_step() is not None  # somebody can always run
        running = context.row_ids[context.num_paused :]
        for row in running:
            remaining[row] -= 1
        mask = np.array([remaining[row] > 0 for row in running], dtype=np.bool_)
        outcome = context.update_requests(mask, np.ones(len(running), dtype=np.int64))
        waiting = [(row, 1) for row in outcome.evicted[::-1]] + waiting  # to compute them again
        context.check()
        pool.audit()
        if not waiting and not context.has_unfinished:
            break

    assert set(remaining.values()) == {0}
    assert pool.free == pool.usable


# Anything in any order


class ContextMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=sampled_from([1, 2, 4, 7]),
        max_tokens=integers(8, 30),
        num_graph_sizes=sampled_from([None, 0, 2, AUTOMATIC]),
        has_states=booleans(),
    )
    def start(
        self, block_tokens: int, max_tokens: int, num_graph_sizes: int | None, has_states: bool
    ) -> None:
        limits = BatchLimits(max_tokens=max_tokens, max_requests=6, max_model_len=1000)
        self.caller = make_caller(
            max_rows=6,
            max_tokens=max_tokens,
            block_tokens=block_tokens,
            num_blocks=60,
            has_states=has_states,
            graphs=None
            if num_graph_sizes is None
            else graph_list(limits, num_sizes=num_graph_sizes, max_graph_tokens=12),
        )
        self.clock = 0

    @property
    def room(self) -> int:
        return self.caller.context.max_tokens - self.caller.context.num_tokens

    @precondition(lambda self: self.caller.context.num_rows < 6 and self.room > 0)
    @rule(
        length=integers(1, 25),
        new=integers(1, 12),
        min_tokens=integers(0, 3),
        in_part=booleans(),
        stops=booleans(),
    )
    def admit(self, length: int, new: int, min_tokens: int, in_part: bool, stops: bool) -> None:
        chunk = min(length, self.room)
        if in_part:
            chunk = max(1, chunk // 2)
        free = self.caller.pool.free
        if chunk < length and self.caller.context.half_prefilled_id is not None:
            return
        if blocks_for(chunk, self.caller.block_tokens) > free:
            return
        prompt = [1000 * self.caller.next_row + index for index in range(length)]
        self.caller.admit(
            prompt,
            num_tokens=chunk,
            sampling=make_sampling(
                max_tokens=new, min_tokens=min_tokens, stop_token_ids=(1, 3) if stops else ()
            ),
        )

    @precondition(lambda self: self.caller.context.half_prefilled_id is not None and self.room > 0)
    @rule(length=integers(1, 25))
    def continue_prefill(self, length: int) -> None:
        known = self.caller.rows[self.caller.context.half_prefilled_id or 0]
        chunk = min(length, known.num_prompt - known.num_cached, self.room)
        needed = blocks_for(known.num_cached + chunk, self.caller.block_tokens)
        if known.num_fed == 0 and needed - len(known.blocks) <= self.caller.pool.free:
            self.caller.continue_prefill(chunk)

    @precondition(lambda self: self.caller.paused)
    @rule(choice=data())
    def grant(self, choice: DataObject) -> None:
        most = min(self.room, self.caller.pool.free, len(self.caller.paused))
        rows = choice.draw(sets(sampled_from(self.caller.paused), max_size=most))
        self.caller.grant(*sorted(rows, reverse=True))

    @precondition(lambda self: self.caller.rows)
    @rule(choice=data())
    def drop(self, choice: DataObject) -> None:
        self.caller.drop(*choice.draw(sets(sampled_from(sorted(self.caller.rows)), max_size=2)))

    @rule(fails=booleans())
    def step(self, fails: bool) -> None:
        self.clock += 1
        sampling = self.caller.sampling()
        tokens = {row: (self.clock * 7 + row) % 5 for row in sampling}
        self.caller.step(tokens, failed=tuple(sampling[:1]) if fails and sampling else ())

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "caller"):
            self.caller.check()


TestContextMachine = ContextMachine.TestCase
TestContextMachine.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=30, stateful_step_count=40
)


def test_the_bookkeeping_of_a_step_of_1024_decodes_takes_below_a_millisecond() -> None:
    context = make_context(max_rows=1024, max_tokens=8192, block_tokens=64, num_blocks=2048)
    for row in range(1024):
        context.add_row(admit(row, prompt=range(5), blocks=(row,)))
    tokens = np.ones(1024, dtype=np.int64)
    seconds = []

    for _ in range(30):
        start = time.perf_counter()
        assert context.begin_step() is not None
        context.sampling_rows()
        context.finish_step(tokens)
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 1e-3
