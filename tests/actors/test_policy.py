"""The policy beside a real block pool and a device that is as strict about blocks as a real one."""

import contextlib
import itertools
import random
import re
from array import array
from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject, booleans, data, integers, lists, none, sampled_from

from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import Phase, Request
from callboard.actors.policy import (
    LOOK_AHEAD,
    MAX_OVERTAKEN,
    MAX_RETRIES,
    STEPS_TO_GROW,
    Advanced,
    SchedulingPolicy,
)
from callboard.actors.prompt_scores import PromptScores
from callboard.actors.testing import ScriptedRunner
from callboard.messages.base import Call, Message, pack_floats, unpack_floats, unpack_ids
from callboard.messages.blocks import BlocksGranted, CacheBlocks, ReleaseBlocks, ReserveBlocks
from callboard.messages.errors import Failure, OutOfBlocks, RequestError, SequenceOverflow
from callboard.messages.requests import Delta, EventKind, FinishReason, RequestEvent, Usage
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import Admit, DeviceReady, RowFailure, RowId, RunStep, StepDone

STOPS = tuple(range(0, 97, 7))  # a token in seven ends a request


def next_token(tokens: list[int]) -> int:
    """A token that depends on all before it and on their number."""
    return (sum(tokens) * 31 + tokens[-1] * 7 + len(tokens)) % 97


def alone(prompt: Sequence[int], max_tokens: int, stops: Sequence[int] = ()) -> list[int]:
    """What a request generates when nothing else happens."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Answers:
    """A ref that keeps what it is told."""

    name = "scheduler"

    def __init__(self) -> None:
        self.last: Message | None = None

    async def tell(self, message: Message) -> None:
        self.last = message

    def tell_nowait(self, message: Message) -> None:
        self.last = message

    async def ask(self, call: Call[Any], *, timeout: float = 5.0) -> Any:
        raise NotImplementedError


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


class ScoringRunner(ScriptedRunner):
    """A runner that says of each token that its log-probability is minus its id."""

    def execute(self, step: RunStep) -> StepDone:
        done = super().execute(step)
        logprobs = [-float(token_id) for token_id in unpack_ids(done.token_ids)]
        return msgspec.structs.replace(done, logprobs=pack_floats(logprobs))


class Replica:
    """The policy, an allocator and a device, stepped by hand; its clock ticks when it is read."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_tokens: int = 4,
        max_rows: int = 8,
        max_step_tokens: int = 64,
        max_model_len: int = 200,
        chunk: int | None = None,
        prefix_caching: bool = False,
        paused_limit: int | None = None,
    ) -> None:
        self.limits = {
            "num_blocks": num_blocks,
            "block_tokens": block_tokens,
            "max_rows": max_rows,
            "max_step_tokens": max_step_tokens,
            "max_model_len": max_model_len,
        }
        ticks = itertools.count()
        self.policy = SchedulingPolicy(
            prefill_chunk_tokens=chunk,
            prefix_caching=prefix_caching,
            paused_limit=paused_limit,
            clock=lambda: float(next(ticks)),
        )
        self.answers = Answers()
        self.allocator = KVAllocator(self.answers)
        self.mail: deque[RunStep | tuple[RowId, ...]] = deque()  # steps, and rows to drop
        self.output: defaultdict[str, list[int]] = defaultdict(list)
        self.logprobs: defaultdict[str, list[float]] = defaultdict(list)
        self.events: defaultdict[str, list[RequestEvent]] = defaultdict(list)
        self.ends: dict[str, Delta] = {}
        self.arrivals = 0
        self.runner: ScriptedRunner
        self.restart()

    def crash(self) -> Advanced:
        """Have the device fail of a step, and put a new one in its place."""
        if not self.policy.in_flight:
            self.plan()
        return self.restart()

    def run_out_of_memory(self) -> Advanced:
        """Have the device lose all rows for want of memory for a step."""
        if not self.policy.in_flight:
            self.plan()
        self.mail.clear()
        self.runner.start_over()
        device = msgspec.structs.replace(self.runner.room(), out_of_memory=True)
        run(self.allocator.receive(device))
        return self.apply(self.policy.device_ready(device))

    def restart(self) -> Advanced:
        """Put a new device in place of the old one."""
        self.runner = ScoringRunner(next_token, **self.limits)
        self.runner.load()
        self.runner.allocate()
        self.mail.clear()
        device = self.runner.room()
        run(self.allocator.receive(device))
        return self.apply(self.policy.device_ready(device))

    def add(
        self,
        request_id: str,
        prompt: int | Sequence[int] = 3,
        max_tokens: int | None = 5,
        *,
        priority: int = 0,
        stops: tuple[int, ...] = (),
        logprobs: int | None = None,
    ) -> Request:
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
        self.arrivals += 1
        request = Request(
            request_id,
            array("i", tokens),
            SamplingParams(max_tokens=max_tokens, logprobs=logprobs),
            seed=1,
            max_tokens=self.policy.check_fits(len(tokens), max_tokens),
            stop_token_ids=stops,
            order=(priority, self.arrivals),
            text=None,
            accepted_at=0.0,
            deadline=float("inf"),
        )
        self.policy.add(request)
        return request

    def reserve(self, question: ReserveBlocks) -> BlocksGranted:
        run(self.allocator.receive(question))
        assert isinstance(self.answers.last, BlocksGranted)
        return self.answers.last

    def release(self, rows: Sequence[RowId]) -> None:
        run(self.allocator.receive(ReleaseBlocks(rows=tuple(rows))))

    def plan(self) -> RunStep | None:
        """Plan a step, and drop who is evicted for it."""
        return self.plan_with(self.reserve(self.policy.propose()))

    def plan_with(self, granted: BlocksGranted) -> RunStep | None:
        planned = self.policy.plan(granted)
        self.release(planned.unused)
        self.drop(planned.evicted)
        return planned.step

    def step(self) -> RunStep | None:
        """Run a whole round; returns the step, or None where there was none."""
        step = self.plan()
        if step is not None:
            self.finish_step(self.runner.execute(step))
        return step

    def finish_step(self, done: StepDone) -> Advanced:
        result = self.policy.advance(done)
        run(self.allocator.receive(CacheBlocks(computed=tuple(result.computed))))
        return self.apply(result)

    def drop(self, rows: Sequence[RowId]) -> None:
        self.tell_device(tuple(rows))
        self.release(rows)

    def tell_device(self, message: RunStep | tuple[RowId, ...]) -> None:
        """Drops are obeyed at once where no step is before them."""
        self.mail.append(message)
        while self.mail and isinstance(self.mail[0], tuple):
            self.read_mail()

    def read_mail(self) -> StepDone | None:
        """Have the device obey the oldest message; returns the result of a step."""
        message = self.mail.popleft()
        if isinstance(message, RunStep):
            return self.runner.execute(message)
        self.runner.drop(message)
        return None

    def abort(self, request_id: str) -> None:
        request = self.policy.ledger.get(request_id)
        assert request is not None
        self.apply(self.policy.finish(request, FinishReason.ABORT))

    def apply(self, result: Advanced) -> Advanced:
        self.tell_device(tuple(result.dropped))
        self.release(result.gone)
        for delta in result.deltas:
            self.take(delta)
        return result

    def take(self, delta: Delta) -> None:
        assert delta.request_id not in self.ends, "a delta behind the terminal one"
        output = self.output[delta.request_id]
        assert delta.start == len(output), "a gap, or a token twice"
        output += unpack_ids(delta.token_ids)
        self.logprobs[delta.request_id] += unpack_floats(delta.logprobs)
        self.events[delta.request_id] += delta.events
        if delta.finish is not None:
            self.ends[delta.request_id] = delta

    def drain(self, most: int = 10_000) -> int:
        """Step until there is no work; returns how many steps that took."""
        for steps in range(most):
            if not self.policy.has_work:
                return steps
            self.step()
        raise AssertionError("no progress")

    def kinds(self, request_id: str) -> list[EventKind]:
        """What has happened to a request, as far as it was told."""
        return [event.kind for event in self.events[request_id]]

    @property
    def free(self) -> int:
        return int(self.allocator.details()["blocks_free"])

    def phases(self) -> dict[str, Phase]:
        return {request.request_id: request.phase for request in self.policy.ledger}

    def check_blocks(self) -> None:
        """Between steps every block is free or held by the row of a living request."""
        held = {row: blocks for row, blocks in self.allocator._held.items() if blocks}
        distinct = {block for blocks in held.values() for block in blocks}
        assert self.free + len(distinct) == self.limits["num_blocks"]
        rows = {request.row: request.blocks for request in self.policy.ledger.rows()}
        counts = {row: len(blocks) for row, blocks in held.items()}
        assert {row: count for row, count in rows.items() if count} == counts


def row_of(request: Request) -> RowId:
    assert request.row is not None
    return request.row


# What fits.


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    replica = Replica(max_model_len=20)
    with pytest.raises(SequenceOverflow, match=r"the prompt has 20 tokens.*may have 20") as caught:
        replica.policy.check_fits(20, 1)
    assert caught.value.field == "prompt"
    assert caught.value.allowed == "1 to 19 tokens"


def test_max_tokens_beyond_the_context_is_refused_with_what_would_fit() -> None:
    replica = Replica(max_model_len=20)
    with pytest.raises(SequenceOverflow, match="15 prompt tokens and max_tokens 6") as caught:
        replica.policy.check_fits(15, 6)
    assert caught.value.field == "max_tokens"
    assert caught.value.allowed == "1 to 5"
    assert replica.policy.check_fits(15, 5) == 5


def test_a_request_the_pool_can_never_hold_is_refused_naming_both_numbers() -> None:
    replica = Replica(num_blocks=3, block_tokens=4)
    assert replica.policy.check_fits(5, 8) == 8  # 12 tokens are cached, the 13th never is
    with pytest.raises(OutOfBlocks, match="request a: the request needs 4 KV") as caught:
        replica.policy.check_fits(5, 9, request_id="a")
    assert caught.value.message == "the request needs 4 KV blocks of 4 tokens, and the pool has 3"
    assert not caught.value.transient


def test_max_tokens_is_by_default_what_there_is_room_for() -> None:
    assert Replica(max_model_len=50).policy.check_fits(20, None) == 30
    assert Replica(num_blocks=3, block_tokens=4).policy.check_fits(5, None) == 8


def test_a_request_runs_up_to_the_last_place_of_the_pool() -> None:
    replica = Replica(num_blocks=3, block_tokens=4)
    replica.add("a", 5, None)
    replica.drain()
    assert replica.output["a"] == alone(range(1, 6), 8)
    assert replica.ends["a"].finish is FinishReason.LENGTH


def test_a_prompt_of_8_in_a_block_of_256_gets_249_tokens_and_not_one_more() -> None:
    replica = Replica(num_blocks=1, block_tokens=256, max_model_len=300)
    replica.add("a", prompt=8, max_tokens=249)
    replica.drain()
    assert replica.output["a"] == alone(range(1, 9), 249)
    with pytest.raises(OutOfBlocks, match="needs 2 KV blocks of 256 tokens, and the pool has 1"):
        replica.add("b", prompt=8, max_tokens=250)
    assert not replica.policy.has_work


def test_a_request_that_has_all_its_tokens_already_is_refused() -> None:
    policy = Replica().policy
    assert policy.check_fits(3, 5, delivered=4) == 5
    with pytest.raises(RequestError, match="5 tokens are delivered already, and max_tokens is 5"):
        policy.check_fits(3, 5, delivered=5)


# A step.


def test_a_short_prompt_is_admitted_whole_with_just_its_blocks() -> None:
    replica = Replica(block_tokens=4)
    request = replica.add("a", prompt=5)
    question = replica.policy.propose()
    assert question.grow == ()
    assert [asked.prompt_tokens for asked in question.admit] == [5]
    planned = replica.policy.plan(replica.reserve(question))
    assert planned.step is not None
    (admit,) = planned.step.admits
    assert unpack_ids(admit.prompt) == [1, 2, 3, 4, 5]
    assert (admit.num_tokens, len(admit.blocks), admit.row) == (5, 2, request.row)


def test_a_row_asks_for_a_block_only_when_its_last_one_is_full() -> None:
    replica = Replica(block_tokens=4)
    replica.add("a", prompt=3, max_tokens=7)
    grants = []
    while (step := replica.step()) is not None:
        grants.append(len(step.grants))
        if "a" in replica.ends:
            break
    # Cached after each step: 3, 4, 5 (a block more), 6, 7, 8, 9 (another).
    assert grants == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("lengths", "num_free", "num_running"),
    [((1, 2), 0, 2), ((4, 2), 0, 1), ((4, 2), 1, 2)],
)
def test_rows_want_a_block_for_each_that_is_full_and_no_more(
    lengths: tuple[int, ...], num_free: int, num_running: int
) -> None:
    replica = Replica(num_blocks=len(lengths) + num_free, block_tokens=4)
    for name, length in enumerate(lengths):
        replica.add(f"{name}", prompt=length, max_tokens=2)
    replica.step()
    question = replica.policy.propose()
    assert sum(asked.count for asked in question.grow) == lengths.count(4)
    replica.plan_with(replica.reserve(question))
    assert list(replica.phases().values()).count(Phase.DECODING) == num_running


def test_a_prompt_that_fills_its_last_block_needs_one_for_its_first_token() -> None:
    replica = Replica(block_tokens=4)
    replica.add("a", prompt=4)
    replica.step()
    question = replica.policy.propose()
    assert [asked.count for asked in question.grow] == [1]


def test_decoding_rows_are_served_before_prompts() -> None:
    replica = Replica(max_step_tokens=10, max_rows=8)
    for name in "abc":
        replica.add(name, prompt=2, max_tokens=50)
    replica.step()
    replica.add("long", prompt=100)
    step = replica.step()
    assert step is not None
    assert [admit.num_tokens for admit in step.admits] == [7]  # three tokens go to the others


def test_a_prompt_longer_than_a_step_is_prefilled_in_parts() -> None:
    replica = Replica(max_step_tokens=10)
    replica.add("a", prompt=25, max_tokens=3)
    steps = [replica.step() for _ in range(3)]
    assert [step.admits[0].num_tokens for step in steps[:1] if step] == [10]
    assert [step.continues[0].num_tokens for step in steps[1:] if step] == [10, 5]
    assert [len(step.continues[0].blocks) for step in steps[1:] if step] == [2, 2]
    replica.drain()
    assert replica.output["a"] == alone(range(1, 26), 3)


def test_a_chunk_is_no_longer_than_the_limit() -> None:
    replica = Replica(chunk=4)
    replica.add("a", prompt=10)
    steps = [replica.step() for _ in range(3)]
    assert [step.admits[0].num_tokens for step in steps[:1] if step] == [4]
    assert [step.continues[0].num_tokens for step in steps[1:] if step] == [4, 2]


def test_one_prompt_at_a_time_is_prefilled_in_parts_and_shorter_ones_beside_it() -> None:
    replica = Replica(chunk=4)
    replica.add("a", prompt=10)
    replica.add("b", prompt=5)
    replica.add("c", prompt=3)
    first = replica.step()
    assert first is not None
    assert [admit.num_tokens for admit in first.admits] == [4, 3]
    assert replica.phases()["b"] is Phase.WAITING
    replica.step()
    third = replica.step()
    assert third is not None
    assert third.continues[0].num_tokens == 2
    assert [admit.num_tokens for admit in third.admits] == [4]  # the last part makes place for it


def test_only_one_prompt_at_a_time_is_prefilled_in_parts() -> None:
    replica = Replica(max_step_tokens=10)
    replica.add("a", prompt=15)
    replica.add("b", prompt=15)
    replica.step()
    assert replica.phases() == {"a": Phase.PREFILLING, "b": Phase.WAITING}
    step = replica.step()
    assert step is not None
    assert step.continues[0].num_tokens == 5
    assert step.admits[0].num_tokens == 5  # b begins where a ends
    assert replica.phases() == {"a": Phase.DECODING, "b": Phase.PREFILLING}


def fed(step: RunStep) -> list[int]:
    """The tokens of each piece of a prompt in a step: the one that goes on, then new ones."""
    going_on = [chunk.num_tokens for chunk in step.continues]
    return going_on + [admit.num_tokens for admit in step.admits]


@pytest.mark.parametrize(
    ("budget", "prompts", "pieces"),
    [
        # One prompt: the last piece is what is left, be it one token. A step of one token a row is
        # a decode for every kernel, so no piece is cut short to spare it.
        (1000, (1200,), [[1000], [200]]),
        (256, (513,), [[256], [256], [1]]),
        (256, (257,), [[256], [1]]),
        # Two: the second begins in what the first leaves of a step, be it one token.
        (900, (512, 512), [[512, 388], [124]]),
        (256, (254, 2), [[254, 2]]),
        (256, (255, 2), [[255, 1], [1]]),
        # Nothing is left: the second waits, and has no row.
        (256, (256, 2), [[256], [2]]),
    ],
)
def test_a_step_is_filled_with_pieces_of_prompts(
    budget: int, prompts: tuple[int, ...], pieces: list[list[int]]
) -> None:
    replica = Replica(max_step_tokens=budget, num_blocks=200, block_tokens=16, max_model_len=2000)
    for name, prompt in enumerate(prompts):
        replica.add(f"{name}", prompt=prompt, max_tokens=1)
    for number, expected in enumerate(pieces):
        step = replica.step()
        assert step is not None
        assert fed(step) == expected
        num_begun = sum(len(piece) for piece in pieces[: number + 1])
        assert replica.policy.counts().waiting == max(0, len(prompts) - num_begun)
    assert [len(replica.output[f"{name}"]) for name in range(len(prompts))] == [1] * len(prompts)


def test_while_a_prompt_has_further_pieces_every_step_is_full() -> None:
    """Three prompts through steps of 52 tokens; what decodes takes its token of each first."""
    replica = Replica(max_step_tokens=52, num_blocks=60, block_tokens=16, max_model_len=400)
    replica.add("one", prompt=130, max_tokens=3)
    replica.add("two", prompt=160, max_tokens=2)
    replica.add("three", prompt=24, max_tokens=1)
    steps, sizes = [], []
    while (step := replica.plan()) is not None:
        done = replica.runner.execute(step)
        replica.finish_step(done)
        steps.append(fed(step))
        sizes.append(done.num_tokens)
    assert steps == [[52], [52], [26, 26], [51], [51], [32, 20], [4]]
    assert sizes == [52] * 6 + [5]
    assert replica.output["two"] == alone(range(1, 161), 2)


def test_no_prompt_begins_in_a_step_that_decodes_fill() -> None:
    replica = Replica(max_step_tokens=2)
    for name in "ab":
        replica.add(name, prompt=1, max_tokens=3)
    replica.step()
    replica.add("late", prompt=1)
    for _ in range(2):
        replica.step()
        assert replica.phases()["late"] is Phase.WAITING
    replica.step()
    assert replica.phases() == {"late": Phase.DECODING}


@pytest.mark.parametrize(("max_rows", "num_steps"), [(816, 23), (4, 35)])
def test_eight_requests_of_16_tokens_a_step_apart_take_so_many_steps(
    max_rows: int, num_steps: int
) -> None:
    """Seven come after the first, and it takes 16 steps; with four places the last waits for one.

    The fifth has the first's place from step 17 on, and so has the last the fourth's from step 20.
    """
    replica = Replica(max_rows=max_rows, num_blocks=818, block_tokens=256, max_step_tokens=16384)
    for number in range(7):
        replica.add(f"{number}", prompt=4 + number, max_tokens=16)
        replica.step()
    replica.add("7", prompt=11, max_tokens=16)
    assert 7 + replica.drain() == num_steps
    assert all(len(replica.output[f"{number}"]) == 16 for number in range(8))


def test_no_more_rows_run_than_there_are_places() -> None:
    replica = Replica(max_rows=3)
    for name in "abcde":
        replica.add(name)
    step = replica.step()
    assert step is not None
    assert len(step.admits) == 3
    assert replica.policy.counts().waiting == 2
    replica.drain()
    assert all(replica.output[name] == alone((1, 2, 3), 5) for name in "abcde")


def test_more_rows_than_tokens_of_a_step_never_run() -> None:
    replica = Replica(max_rows=8, max_step_tokens=3)
    for name in "abcde":
        replica.add(name, prompt=2)
    replica.drain()  # the device checks each step
    assert all(replica.output[name] == alone((1, 2), 5) for name in "abcde")


def test_requests_are_admitted_by_priority_then_by_age() -> None:
    replica = Replica(max_rows=1)
    replica.add("late", priority=1)
    replica.add("first", priority=0)
    replica.add("second", priority=0)
    replica.add("urgent", priority=-1)
    replica.drain()
    assert list(replica.ends) == ["urgent", "first", "second", "late"]


def test_a_request_that_does_not_fit_is_overtaken_by_a_smaller_one() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("running", prompt=7, max_tokens=4)
    replica.step()
    replica.add("big", prompt=11, max_tokens=2)
    replica.add("small", prompt=1, max_tokens=2)
    replica.step()
    assert replica.phases()["big"] is Phase.WAITING
    assert replica.phases()["small"] is Phase.DECODING
    replica.drain()
    assert replica.output["big"] == alone(range(1, 12), 2)


def test_a_request_is_overtaken_in_so_many_steps_and_then_keeps_its_place() -> None:
    replica = Replica(num_blocks=6, block_tokens=4, max_rows=30)
    replica.add("running", prompt=5, max_tokens=16)
    replica.step()
    replica.add("big", prompt=21, max_tokens=2)  # all six blocks
    for index in range(2 * MAX_OVERTAKEN):
        replica.add(f"small{index}", prompt=1, max_tokens=1)
        replica.step()
    assert set(replica.ends) == {f"small{index}" for index in range(MAX_OVERTAKEN)} | {"running"}
    replica.drain()
    assert list(replica.ends)[MAX_OVERTAKEN + 1] == "big"
    assert len(replica.ends) == 2 * MAX_OVERTAKEN + 2


def test_while_the_pool_is_short_only_the_first_in_line_are_tried() -> None:
    replica = Replica(num_blocks=4, block_tokens=4, max_rows=100, max_step_tokens=400)
    replica.add("running", prompt=7, max_tokens=4)
    replica.step()
    for index in range(30):
        replica.add(f"big{index}", prompt=11, max_tokens=2)
    assert len(replica.policy.propose().admit) == 30
    replica.step()
    assert len(replica.policy.propose().admit) == LOOK_AHEAD


def test_there_is_work_while_there_are_rows_or_requests_to_admit() -> None:
    replica = Replica()
    seen = [replica.policy.has_work]
    replica.add("a")
    seen.append(replica.policy.has_work)
    replica.policy.begin_drain()
    seen.append(replica.policy.has_work)
    assert seen == [False, True, False]


def test_nothing_is_admitted_in_a_drain_but_what_has_run() -> None:
    replica = Replica()
    replica.add("a", max_tokens=3)
    replica.step()
    replica.policy.begin_drain()
    replica.add("b")
    while replica.policy.has_work:
        replica.step()
    assert (list(replica.ends), replica.phases()) == (["a"], {"b": Phase.WAITING})
    assert replica.policy.undrained() == []


def test_what_has_run_and_lost_its_row_ends_in_a_drain_as_well() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("old", prompt=1, max_tokens=12)
    replica.add("new", prompt=4, max_tokens=10)
    replica.step()
    replica.policy.begin_drain()
    replica.add("later")
    while replica.policy.has_work:
        replica.step()
    assert sorted(replica.ends) == ["new", "old"]
    assert replica.phases() == {"later": Phase.WAITING}


def test_a_drain_goes_on_with_what_a_lost_device_was_running() -> None:
    replica = Replica()
    replica.add("a", max_tokens=3)
    replica.step()
    replica.policy.begin_drain()
    replica.restart()
    assert [request.request_id for request in replica.policy.undrained()] == ["a"]
    while replica.policy.has_work:
        replica.step()
    assert list(replica.ends) == ["a"]


# Too few blocks.


def starved_pair() -> Replica:
    """Two rows that fill the pool; the newer is the first that has no room left."""
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("old", prompt=1, max_tokens=12)
    replica.add("new", prompt=4, max_tokens=10)
    while Phase.STARVED not in replica.phases().values():
        replica.step()
    return replica


def test_a_row_without_a_block_waits_and_the_others_go_on() -> None:
    replica = starved_pair()
    before = {name: len(tokens) for name, tokens in replica.output.items()}
    (starved,) = [name for name, phase in replica.phases().items() if phase is Phase.STARVED]
    (running,) = {"old", "new"} - {starved}
    replica.step()
    assert len(replica.output[starved]) == before[starved]
    assert len(replica.output[running]) == before[running] + 1
    assert replica.policy.counts().paused == 1


def test_nothing_is_admitted_while_a_row_starves() -> None:
    replica = starved_pair()
    replica.add("small", prompt=1, max_tokens=1)
    assert replica.policy.propose().admit == ()


def test_starved_rows_ask_again_oldest_first() -> None:
    replica = Replica(num_blocks=3, block_tokens=4)
    requests = [replica.add(name, prompt=4, max_tokens=4) for name in "abc"]
    replica.step()  # three prompts fill the pool
    assert replica.step() is None  # nobody has room: all starve, and the newest is evicted
    question = replica.policy.propose()
    assert [asked.row for asked in question.grow] == [request.row for request in requests[:2]]
    planned = replica.policy.plan(replica.reserve(question))
    assert planned.step is not None
    assert [grant.row for grant in planned.step.grants] == [requests[0].row]
    assert replica.phases() == {"a": Phase.DECODING, "b": Phase.STARVED, "c": Phase.WAITING}


def test_a_starved_row_is_served_before_a_younger_one_that_is_full_only_now() -> None:
    replica = Replica(num_blocks=3, block_tokens=4)
    old = replica.add("old", prompt=4, max_tokens=9)
    replica.add("young", prompt=2, max_tokens=9)
    replica.add("short", prompt=1, max_tokens=3)
    for _ in range(3):
        replica.step()
    assert replica.phases() == {"old": Phase.STARVED, "young": Phase.DECODING}
    assert replica.free == 1
    step = replica.step()
    assert step is not None
    assert [grant.row for grant in step.grants] == [old.row]
    assert replica.phases() == {"old": Phase.DECODING, "young": Phase.STARVED}


def test_when_nothing_can_run_the_newest_row_is_evicted_and_loses_nothing() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("old", prompt=4, max_tokens=9)
    replica.add("new", prompt=4, max_tokens=9)
    while replica.step() is not None:
        pass
    assert replica.phases()["new"] is Phase.WAITING
    kept = list(replica.output["new"])
    assert kept
    replica.drain()
    assert replica.output["new"][: len(kept)] == kept
    for name in ("old", "new"):
        assert replica.output[name] == alone(range(1, 5), 9)


def test_an_evicted_request_comes_back_before_younger_ones() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("old", prompt=4, max_tokens=9)
    replica.add("new", prompt=4, max_tokens=9)
    while replica.step() is not None:
        pass
    younger = replica.add("younger", prompt=1, max_tokens=1)
    admitted: list[Admit] = []
    while replica.policy.has_work:
        step = replica.step()
        admitted += step.admits if step is not None else ()
    assert [len(unpack_ids(admit.prompt)) for admit in admitted] == [9, 1]
    assert younger.finish_reason is FinishReason.LENGTH


def test_the_most_urgent_row_is_never_evicted() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("late but urgent", prompt=4, max_tokens=9, priority=-1)
    replica.add("early", prompt=4, max_tokens=9)
    while replica.step() is not None:
        pass
    assert replica.phases()["early"] is Phase.WAITING
    assert replica.phases()["late but urgent"] is not Phase.WAITING


def test_a_half_prefilled_row_that_cannot_go_on_is_evicted_for_older_ones() -> None:
    replica = Replica(num_blocks=4, block_tokens=4, chunk=4)
    replica.add("old", prompt=4, max_tokens=9)
    replica.step()
    replica.add("long", prompt=12, max_tokens=2)
    replica.drain()
    assert replica.output["old"] == alone(range(1, 5), 9)
    assert replica.output["long"] == alone(range(1, 13), 2)
    assert replica.free == 4


def test_without_rows_there_is_nobody_to_evict() -> None:
    replica = Replica()
    planned = replica.policy.plan(replica.reserve(replica.policy.propose()))
    assert (planned.step, planned.evicted) == (None, [])


# Between the halves of a round.


def test_a_request_aborted_before_it_is_planned_gives_its_blocks_back() -> None:
    replica = Replica()
    replica.add("a")
    granted = replica.reserve(replica.policy.propose())
    replica.abort("a")
    planned = replica.policy.plan(granted)
    assert planned.step is None
    assert planned.unused == list(granted.blocks)
    replica.release(planned.unused)
    assert replica.free == 64


def test_a_row_aborted_before_it_is_planned_is_not_granted_anything() -> None:
    replica = Replica(block_tokens=4)
    request = replica.add("a", prompt=4)
    replica.step()
    granted = replica.reserve(replica.policy.propose())
    row = row_of(request)
    replica.abort("a")
    planned = replica.policy.plan(granted)
    assert (planned.step, planned.unused) == (None, [row])
    replica.release(planned.unused)  # once more than needed: the row is gone already
    replica.check_blocks()
    assert replica.free == 64


def test_a_half_prefilled_row_aborted_before_it_is_planned_lets_the_next_begin() -> None:
    replica = Replica(max_step_tokens=8)
    replica.add("a", prompt=20)
    replica.step()
    replica.add("b", prompt=20)
    granted = replica.reserve(replica.policy.propose())
    replica.abort("a")
    replica.release(replica.policy.plan(granted).unused)
    step = replica.step()
    assert step is not None
    assert [admit.num_tokens for admit in step.admits] == [8]
    replica.drain()
    assert replica.output["b"] == alone(range(1, 21), 5)


def test_the_result_of_a_row_aborted_during_its_step_changes_nothing() -> None:
    replica = Replica()
    replica.add("a")
    replica.add("b")
    step = replica.plan()
    assert step is not None
    done = replica.runner.execute(step)
    replica.abort("a")
    result = replica.finish_step(done)
    assert [delta.request_id for delta in result.deltas] == ["b"]
    assert replica.ends["a"].finish is FinishReason.ABORT
    replica.check_blocks()


def test_a_request_aborted_during_its_last_step_ends_once() -> None:
    replica = Replica()
    replica.add("a", max_tokens=1)
    step = replica.plan()
    assert step is not None
    done = replica.runner.execute(step)
    replica.abort("a")
    result = replica.finish_step(done)
    assert (result.deltas, result.gone, result.ended) == ([], [], [])
    assert replica.free == 64


def test_a_row_checkpointed_during_its_step_loses_that_token_and_makes_it_again() -> None:
    replica = Replica()
    replica.add("a", max_tokens=4)
    replica.step()
    step = replica.plan()
    assert step is not None
    done = replica.runner.execute(step)
    replica.drop(replica.policy.checkpoint_all())
    assert replica.finish_step(done).deltas == []
    replica.drain()
    assert replica.output["a"] == alone((1, 2, 3), 4)


def test_a_request_that_came_back_as_another_row_is_not_moved_by_its_old_rows_result() -> None:
    replica = Replica()
    request = replica.add("a", max_tokens=4)
    step = replica.plan()
    assert step is not None
    old = replica.runner.execute(step)
    replica.drop(replica.policy.checkpoint_all())
    again = replica.plan()
    assert again is not None
    assert request.row not in old.rows
    assert replica.finish_step(old).deltas == []


# The ends of a request.


def test_a_stop_token_ends_a_request_and_is_its_last_token() -> None:
    replica = Replica()
    expected = alone((1, 2, 3), 5)
    replica.add("a", stops=(expected[2],))
    replica.drain()
    assert replica.output["a"] == expected[:3]
    assert replica.ends["a"].finish is FinishReason.STOP


def test_a_request_that_ended_on_the_device_is_not_dropped_there_again() -> None:
    replica = Replica()
    replica.add("a", max_tokens=1)
    step = replica.plan()
    assert step is not None
    result = replica.finish_step(replica.runner.execute(step))
    assert (len(result.gone), result.dropped) == (1, [])


def test_a_row_that_could_not_be_computed_fails_alone() -> None:
    replica = Replica()
    bad = replica.add("bad")
    replica.add("good")
    step = replica.plan()
    assert step is not None
    done = replica.runner.execute(step)
    row = row_of(bad)
    replica.runner.drop((row,))
    good = [at for at, other in enumerate(done.rows) if other != row]
    ids = unpack_ids(done.token_ids)
    replica.finish_step(
        StepDone(
            step=done.step,
            rows=tuple(done.rows[at] for at in good),
            token_ids=array("i", [ids[at] for at in good]).tobytes(),
            failed=(RowFailure(row=row, message="not numbers"),),
        )
    )
    end = replica.ends["bad"]
    assert end.finish is FinishReason.ERROR
    assert end.failure is not None
    assert end.failure.message == "not numbers"
    replica.drain()
    assert replica.output["good"] == alone((1, 2, 3), 5)
    assert replica.free == 64


class StopsAfter:
    """A text stream whose stop string is complete after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.stopped: str | None = None
        self._left = tokens

    def continue_from(self, token_id: int) -> None:
        pass

    def push(self, token_id: int) -> str:
        self._left -= 1
        if self._left == 0:
            self.stopped = "stop"
        return f"{token_id} "

    def finish(self) -> str:
        return ""


def test_a_stop_string_ends_a_request_and_takes_its_row_off_the_device() -> None:
    replica = Replica()
    request = replica.add("a")
    request.text = StopsAfter(2)
    replica.drain()
    assert replica.output["a"] == alone((1, 2, 3), 2)
    assert replica.ends["a"].finish is FinishReason.STOP
    assert replica.free == 64
    assert not replica.runner._rows


def test_the_token_that_completes_a_stop_string_has_its_log_prob_and_none_follows() -> None:
    replica = Replica()
    request = replica.add("a", logprobs=0)
    request.text = StopsAfter(2)
    replica.drain()
    assert replica.logprobs["a"] == [-float(token_id) for token_id in alone((1, 2, 3), 2)]
    assert replica.ends["a"].start == 1  # the end comes with the token, and not a step later


def test_log_probs_of_all_lives_of_a_request_are_kept() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    for name in ("old", "new"):
        replica.add(name, prompt=4, max_tokens=9, logprobs=0)
    replica.drain()
    assert EventKind.EVICTED in replica.kinds("new")
    for name in ("old", "new"):
        assert replica.logprobs[name] == [-float(one) for one in alone(range(1, 5), 9)]


def test_a_request_can_be_ended_wherever_it_stands() -> None:
    for steps in range(4):
        replica = Replica(chunk=2)
        replica.add("a", prompt=4, max_tokens=4)
        for _ in range(steps):
            replica.step()
        replica.abort("a")
        assert replica.ends["a"].finish is FinishReason.ABORT
        assert replica.free == 64
        assert not replica.policy.has_work


def test_forgetting_all_says_nothing_and_frees_everything() -> None:
    replica = Replica(max_rows=2)
    for name in "abc":
        replica.add(name)
    replica.step()
    replica.drop(replica.policy.forget_all())
    assert replica.ends == {}
    assert replica.free == 64
    assert not replica.policy.has_work
    replica.add("a")  # the ids are free again


# The device fails.


def test_a_new_device_gets_every_row_again_in_order_with_its_output() -> None:
    replica = Replica(max_rows=2)
    for name in "abc":
        replica.add(name)
    replica.step()
    replica.step()
    replica.restart()
    step = replica.step()
    assert step is not None
    prompts = [unpack_ids(admit.prompt) for admit in step.admits]
    expected = [1, 2, 3, *alone((1, 2, 3), 2)]
    assert prompts == [expected, expected]
    replica.drain()
    assert all(replica.output[name] == alone((1, 2, 3), 5) for name in "abc")
    assert replica.free == 64


def test_a_step_names_the_life_of_the_device_it_is_for() -> None:
    policy = SchedulingPolicy()
    device = DeviceReady(
        block_tokens=4, num_blocks=9, max_rows=2, max_step_tokens=8, max_model_len=20, life=5
    )
    policy.device_ready(device)
    policy.add(Replica().add("a"))
    question = policy.propose()
    row = question.admit[0].row
    granted = BlocksGranted(step=1, blocks={row: (0,)}, chunks={row: 3})
    planned = policy.plan(granted)
    assert planned.step is not None
    assert planned.step.life == 5


def test_only_rows_that_ran_when_the_device_failed_are_suspects() -> None:
    replica = starved_pair()
    replica.crash()
    crashes = {request.request_id: request.crashes for request in replica.policy.ledger}
    assert sorted(crashes.values()) == [0, 1]
    replica.restart()
    assert crashes == {request.request_id: request.crashes for request in replica.policy.ledger}


class Poisonous(Replica):
    """A device that dies of a request whose prompt begins with 66."""

    def run_until_done(self) -> int:
        crashes = 0
        while self.policy.has_work:
            step = self.plan()
            if step is None:
                continue
            if any(request.prompt[0] == 66 for request in self.policy.ledger.rows()):
                crashes += 1
                self.crash()
            else:
                self.finish_step(self.runner.execute(step))
        return crashes


@pytest.mark.parametrize("position", range(5))
def test_a_request_that_keeps_killing_the_device_fails_alone_and_by_name(position: int) -> None:
    replica = Poisonous()
    for index in range(5):
        prompt = (66, 1) if index == position else (index + 1, 2, 3)
        replica.add(str(index), prompt)
    assert replica.run_until_done() == MAX_RETRIES + 1
    end = replica.ends[str(position)]
    assert end.finish is FinishReason.ERROR
    assert end.failure is not None
    assert end.failure.code == "RequestFailed"
    assert "4 times" in end.failure.message
    for index in {*range(5)} - {position}:
        assert replica.ends[str(index)].finish is FinishReason.LENGTH
        assert replica.output[str(index)] == alone((index + 1, 2, 3), 5)


def test_two_such_requests_fail_and_nobody_else() -> None:
    replica = Poisonous()
    for index in range(8):
        replica.add(str(index), (66, 1) if index in (2, 5) else (index + 1, 2, 3))
    assert replica.run_until_done() <= 2 * (MAX_RETRIES + 1)
    failed = [name for name, end in replica.ends.items() if end.finish is FinishReason.ERROR]
    assert sorted(failed) == ["2", "5"]


def test_a_token_clears_a_request_of_suspicion() -> None:
    replica = Replica()
    request = replica.add("a", max_tokens=50)
    for _ in range(3 * MAX_RETRIES):
        replica.step()
        replica.crash()
        assert request.crashes == 1
    replica.drain()
    assert replica.output["a"] == alone((1, 2, 3), 50)


def test_a_prompt_prefilled_in_parts_is_not_cleared_by_the_first_of_them() -> None:
    replica = Replica(max_step_tokens=8)
    replica.add("a", prompt=20)
    for _ in range(MAX_RETRIES + 1):
        replica.step()  # one part goes well, the next does not
        replica.crash()
    assert replica.ends["a"].finish is FinishReason.ERROR


def test_after_one_failure_everybody_is_admitted_at_once_again() -> None:
    replica = Replica()
    for name in "abcd":
        replica.add(name)
    replica.crash()
    step = replica.step()
    assert step is not None
    assert len(step.admits) == 4


def test_who_was_part_of_several_failures_is_admitted_with_no_other_new_row() -> None:
    replica = Replica()
    for name in "abc":
        replica.add(name, max_tokens=9)
    for _ in range(2):
        replica.plan()
        replica.crash()
    replica.add("fresh", max_tokens=9)
    admitted = []
    for _ in range(4):
        step = replica.step()
        assert step is not None
        admitted.append(len(step.admits))
    assert admitted == [1, 1, 1, 1]
    replica.drain()
    assert all(replica.output[name] == alone((1, 2, 3), 9) for name in ("a", "b", "c", "fresh"))


def test_a_suspect_does_not_join_others_that_are_admitted_before_it() -> None:
    replica = Replica()
    replica.add("suspect", max_tokens=9)
    for _ in range(2):
        replica.plan()
        replica.crash()
    replica.add("urgent", max_tokens=9, priority=-1)
    replica.step()
    assert replica.phases() == {"suspect": Phase.WAITING, "urgent": Phase.DECODING}
    replica.step()
    assert replica.phases()["suspect"] is Phase.DECODING


def test_nothing_is_admitted_behind_a_suspect_whose_prompt_has_further_parts() -> None:
    replica = Replica(max_step_tokens=8)
    replica.add("long", prompt=12)
    for _ in range(2):
        replica.plan()
        replica.crash()
    replica.add("fresh", prompt=1)
    for _ in range(2):
        replica.step()  # there is room for the other beside the last part
        assert replica.phases()["fresh"] is Phase.WAITING
    replica.drain()
    assert set(replica.ends) == {"long", "fresh"}


def test_blocks_of_a_device_that_is_gone_admit_nobody() -> None:
    replica = Replica()
    replica.add("a")
    granted = replica.reserve(replica.policy.propose())
    replica.restart()
    planned = replica.policy.plan(granted)
    assert (planned.step, planned.unused) == (None, list(granted.blocks))


def test_what_no_longer_fits_a_new_device_fails_with_the_reason() -> None:
    replica = Replica(num_blocks=8)
    replica.add("big", prompt=20)
    replica.add("small")
    replica.limits["num_blocks"] = 2
    replica.restart()
    assert replica.ends["big"].finish is FinishReason.ERROR
    failure = replica.ends["big"].failure
    assert failure is not None
    assert "needs 6 KV blocks" in failure.message
    replica.drain()
    assert replica.output["small"] == alone((1, 2, 3), 5)


# Anything, in any order.


# Shared prefixes.


def test_the_second_of_two_equal_prompts_computes_its_last_block_only() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=10, max_tokens=3)
    replica.drain()
    replica.add("b", prompt=10, max_tokens=3)

    step = replica.step()

    assert step is not None
    (admit,) = step.admits
    assert (admit.cached_tokens, admit.num_tokens, len(admit.blocks)) == (8, 2, 3)
    replica.drain()
    assert replica.output["a"] == replica.output["b"]


def test_a_prompt_that_is_cached_whole_computes_one_token_at_least() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=8, max_tokens=9)
    replica.drain()
    replica.add("b", prompt=8, max_tokens=9)

    step = replica.step()

    assert step is not None
    assert (step.admits[0].cached_tokens, step.admits[0].num_tokens) == (4, 4)


def test_a_conversation_that_goes_on_shares_the_answer_before_it() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=6, max_tokens=8)
    replica.drain()
    turn = [*range(1, 7), *replica.output["a"], 50]
    replica.add("b", prompt=turn)

    step = replica.step()

    assert step is not None
    assert step.admits[0].cached_tokens == 12  # the last token of an answer is never computed


def update_weights(replica: Replica, version: int, *, keep_kv: bool) -> None:
    """Do what scheduler and allocator do when other weights are used."""
    replica.policy.weights_version = version
    if not keep_kv:
        replica.drop(replica.policy.checkpoint_all())
    assert replica.allocator._pool is not None
    replica.allocator._pool.forget_all()


def test_what_other_weights_have_computed_is_not_shared() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9, max_tokens=9)
    replica.drain()
    cached: list[int] = []
    for version in (1, 1, 2):
        update_weights(replica, version, keep_kv=False)
        for name in (f"b{len(cached)}", f"c{len(cached)}"):
            replica.add(name, prompt=9, max_tokens=2)
            step = replica.step()
            assert step is not None
            cached.append(step.admits[0].cached_tokens)
            replica.drain()

    assert cached == [0, 8] * 3


def test_a_row_that_keeps_its_old_keys_shares_none_of_what_it_computes_with_them() -> None:
    replica = Replica(prefix_caching=True)
    whole = [*range(1, 10), *alone(list(range(1, 10)), 30)]
    replica.add("old", prompt=9, max_tokens=30)
    for _ in range(2):
        replica.step()
    update_weights(replica, 1, keep_kv=True)
    replica.add("new", prompt=whole[:13], max_tokens=1)  # the beginning of what "old" will fill
    replica.drain()
    replica.add("later", prompt=whole[:30], max_tokens=2)

    step = replica.step()

    assert step is not None
    assert step.admits[0].cached_tokens == 12  # what "new" computed, and none of what "old" did
    assert [*range(1, 10), *replica.output["old"]] == whole


def test_a_row_evicted_after_an_update_is_computed_and_shared_by_the_new_weights() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9, max_tokens=9)
    replica.step()
    update_weights(replica, 1, keep_kv=True)
    replica.drop(replica.policy.checkpoint_all())

    step = replica.step()
    replica.add("b", prompt=9, max_tokens=1)
    after = replica.step()

    assert step is not None
    assert after is not None
    assert (step.admits[0].cached_tokens, after.admits[0].cached_tokens) == (0, 8)


def test_an_evicted_request_finds_what_it_had_computed() -> None:
    replica = Replica(prefix_caching=True, num_blocks=16)
    request = replica.add("a", prompt=9, max_tokens=9)
    replica.step()
    replica.step()
    replica.drop(replica.policy.checkpoint_all())
    assert request.row is None

    step = replica.step()

    assert step is not None
    assert step.admits[0].cached_tokens == 8
    replica.drain()
    assert replica.output["a"] == alone(list(range(1, 10)), 9)


def test_a_chunked_prompt_registers_each_chunks_blocks() -> None:
    replica = Replica(prefix_caching=True, chunk=5)
    replica.add("a", prompt=16, max_tokens=1)
    replica.step()
    replica.step()
    assert replica.allocator.details()["blocks_cached"] == 2  # of ten tokens


def test_a_row_that_failed_shares_nothing_of_the_step_it_failed_in() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9)
    step = replica.plan()
    assert step is not None
    row = step.admits[0].row
    replica.finish_step(
        StepDone(
            step=step.step, rows=(), token_ids=b"", failed=(RowFailure(row=row, message="NaN"),)
        )
    )
    assert replica.allocator.details()["blocks_cached"] == 0


def test_a_prompt_that_is_computed_again_needs_no_room_beside_what_is_cached_of_it() -> None:
    replica = Replica(prefix_caching=True, num_blocks=5, block_tokens=4, chunk=12)
    replica.add("a", prompt=9, max_tokens=1)
    replica.drain()
    request = replica.add("b", prompt=20, max_tokens=1)  # all five blocks
    request.prompt_scores = PromptScores(0, 20)
    replica.drain(most=20)
    assert replica.output["b"] == alone(range(1, 21), 1)


# Two steps under way at once.


def two_under_way(replica: Replica) -> tuple[RunStep, RunStep]:
    """Plan two steps before the first is run."""
    steps = (replica.plan(), replica.plan())
    for step in steps:
        assert step is not None
        replica.tell_device(step)
    first, second = steps
    assert first is not None
    assert second is not None
    return first, second


def run_one(replica: Replica) -> StepDone:
    """Have the device obey its mail up to the end of a step, and advance."""
    done = None
    while done is None:
        done = replica.read_mail()
    replica.finish_step(done)
    return done


def test_a_step_can_be_planned_before_the_one_ahead_is_done() -> None:
    replica = Replica(block_tokens=4)
    replica.add("a", prompt=3, max_tokens=8)
    replica.add("b", prompt=6, max_tokens=2)
    while replica.policy.has_work:
        two_under_way(replica)
        assert replica.policy.in_flight == 2
        run_one(replica)
        run_one(replica)
    assert replica.output == {"a": alone((1, 2, 3), 8), "b": alone(range(1, 7), 2)}


def test_a_block_for_a_row_that_ended_in_the_step_before_comes_back() -> None:
    replica = Replica(block_tokens=4)
    replica.add("a", prompt=4, max_tokens=9, stops=(alone(range(1, 5), 1)[0],))
    first, second = two_under_way(replica)
    assert [grant.row for grant in second.grants] == [first.admits[0].row]
    run_one(replica)
    assert replica.ends["a"].finish is FinishReason.STOP
    assert replica.free == 64
    assert run_one(replica).rows == ()
    assert replica.free == 64


def test_no_block_is_asked_for_a_token_that_will_not_be_computed() -> None:
    replica = Replica(block_tokens=4)
    replica.add("a", prompt=4, max_tokens=1)
    replica.plan()
    assert replica.policy.propose().grow == ()


def test_no_step_is_planned_for_rows_that_all_end_with_the_one_under_way() -> None:
    replica = Replica()
    replica.add("a", prompt=3, max_tokens=1)
    assert replica.plan() is not None
    assert replica.plan() is None
    assert replica.policy.in_flight == 1


def test_an_abort_takes_effect_though_two_steps_of_the_row_are_under_way() -> None:
    replica = Replica()
    replica.add("a", max_tokens=9)
    replica.add("b", max_tokens=9)
    two_under_way(replica)
    replica.abort("a")
    for _ in range(2):
        run_one(replica)
    assert replica.output["a"] == []
    assert replica.output["b"] == alone((1, 2, 3), 2)
    replica.drain()
    assert replica.free == 64


def test_blocks_of_an_aborted_row_go_to_others_behind_the_steps_that_still_use_them() -> None:
    replica = Replica(num_blocks=2, block_tokens=4)
    replica.add("a", prompt=5, max_tokens=3)
    two_under_way(replica)
    replica.abort("a")
    replica.add("b", prompt=6, max_tokens=2)
    run_one(replica)
    third = replica.plan()
    assert third is not None
    assert sorted(third.admits[0].blocks) == [0, 1]
    replica.tell_device(third)
    run_one(replica)
    run_one(replica)  # the device is strict about who writes to a block
    replica.drain()
    assert replica.output["b"] == alone(range(1, 7), 2)


def test_results_of_a_device_that_was_replaced_are_told_from_those_of_the_new_one() -> None:
    replica = Replica()
    replica.add("a", max_tokens=3)
    two_under_way(replica)
    stale = replica.read_mail()
    replica.restart()
    assert stale is not None
    assert not replica.policy.is_next(stale)
    replica.drain()
    assert replica.output["a"] == alone((1, 2, 3), 3)


def test_nothing_is_evicted_while_a_step_under_way_may_free_blocks() -> None:
    replica = Replica(num_blocks=2, block_tokens=4)
    replica.add("a", prompt=3, max_tokens=6, stops=(alone((1, 2, 3), 2)[1],))
    replica.add("b", prompt=4, max_tokens=4)
    assert replica.step() is not None
    second = replica.plan()
    assert second is not None
    replica.tell_device(second)
    assert replica.plan() is None  # both want a block, and there is none
    assert replica.policy.counts().paused == 2
    run_one(replica)
    assert replica.ends["a"].finish is FinishReason.STOP
    step = replica.step()
    assert step is not None
    assert len(step.grants) == 1  # that of the row that ended


def test_nothing_is_evicted_where_a_row_has_left_its_blocks_since_they_were_asked_for() -> None:
    replica = Replica(num_blocks=2, block_tokens=4)
    replica.add("a", prompt=3, max_tokens=6, stops=(alone((1, 2, 3), 2)[1],))
    replica.add("b", prompt=4, max_tokens=4)
    assert replica.step() is not None
    second = replica.plan()
    assert second is not None
    replica.tell_device(second)
    granted = replica.reserve(replica.policy.propose())
    run_one(replica)
    assert "a" in replica.ends
    assert replica.plan_with(granted) is None
    assert replica.phases() == {"b": Phase.STARVED}
    assert replica.step() is not None
    assert replica.phases() == {"b": Phase.DECODING}


@pytest.mark.parametrize("caching", [False, True])
def test_steps_planned_ahead_change_no_token_whatever_happens_between_them(caching: bool) -> None:
    departed = 0
    for seed in range(80):
        departed += _shuffled(random.Random(seed), caching)
    assert departed > 10  # grants for rows that were gone


def _shuffled(choose: random.Random, caching: bool) -> int:
    """Submit, propose, plan, run and advance in any order; returns the grants that came late."""
    replica = Replica(
        num_blocks=choose.randint(4, 12),
        block_tokens=choose.choice((1, 2, 4)),
        max_rows=5,
        max_step_tokens=12,
        max_model_len=40,
        prefix_caching=caching,
    )
    expected: dict[str, list[int]] = {}
    done: deque[StepDone] = deque()
    granted: BlocksGranted | None = None
    stuck, departed = False, 0
    for move in range(10_000):
        match choose.choice(("submit", "propose", "plan", "device", "advance")):
            case "submit" if move < 200 and len(replica.policy.ledger) < 5:
                prompt = [choose.randint(1, 3) for _ in range(choose.randint(1, 8))]
                name, most = str(len(expected)), choose.randint(1, 12)
                with contextlib.suppress(RequestError):
                    replica.add(name, prompt, most, stops=STOPS)
                    expected[name] = alone(prompt, most, STOPS)
            case "propose" if granted is None and not stuck and replica.policy.has_work:
                if replica.policy.in_flight < 2:
                    granted = replica.reserve(replica.policy.propose())
            case "plan" if granted is not None:
                step, granted = replica.plan_with(granted), None
                stuck = step is None and replica.policy.in_flight > 0
                if step is not None:
                    replica.tell_device(step)
            case "device" if replica.mail:
                message = replica.mail[0]
                if isinstance(message, RunStep):
                    departed += sum(g.row not in replica.runner.rows for g in message.grants)
                if (result := replica.read_mail()) is not None:
                    done.append(result)
            case "advance" if done:
                replica.finish_step(done.popleft())
                stuck = False
        if move > 200 and not (replica.policy.has_work or granted or replica.mail or done):
            break
    assert replica.output == {name: tokens for name, tokens in expected.items() if tokens}
    assert set(replica.ends) == set(expected)
    assert replica.free == replica.limits["num_blocks"]
    return departed


# What a request says of itself.


def test_a_terminal_delta_says_what_was_used_and_what_happened() -> None:
    replica = Replica()
    replica.add("a", prompt=3, max_tokens=1)
    replica.drain()
    end = replica.ends["a"]
    assert [event.kind for event in end.events] == ["queued", "admitted", "first_token", "finished"]
    assert end.usage == Usage(prompt_tokens=3, cached_tokens=0, output_tokens=1)


def test_events_are_told_once_and_in_order() -> None:
    replica = Replica(num_blocks=4, block_tokens=4)
    replica.add("old", prompt=4, max_tokens=9)
    replica.add("new", prompt=4, max_tokens=9)
    replica.drain()
    start = ["queued", "admitted", "first_token"]
    assert replica.kinds("old") == [*start, "paused", "resumed", "finished"]
    assert replica.kinds("new") == [*start, "paused", "evicted", "admitted", "finished"]


def test_a_request_that_comes_from_elsewhere_has_had_its_first_token() -> None:
    replica = Replica()
    request = replica.add("a", max_tokens=3)
    delivered = array("i", alone((1, 2, 3), 1))
    request.restore_output(delivered)
    replica.output["a"] = delivered.tolist()
    replica.drain()
    assert replica.output["a"] == alone((1, 2, 3), 3)
    assert request.first_token_at is None
    assert [event.kind.value for event in replica.ends["a"].events] == ["finished"]
    assert replica.kinds("a") == ["queued", "admitted", "finished"]


def test_a_request_that_is_taken_off_says_how_it_ended() -> None:
    replica = Replica()
    for name in ("aborted", "failed"):
        request = replica.add(name)
    replica.step()
    replica.abort("aborted")
    failure = Failure(code="RequestFailed", message="why")
    replica.apply(replica.policy.finish(request, FinishReason.ERROR, failure))
    for name in ("aborted", "failed"):
        assert replica.kinds(name) == ["queued", "admitted", "first_token", name]


LIFE = re.compile("q(ae)*at(pr)*(p?ea(pr)*)*f")
"""A life to its natural end: queued, admitted, first token, paused, resumed, evicted, finished."""


def test_the_events_of_a_request_are_a_life_in_order_and_at_rising_times() -> None:
    letters = {EventKind.QUEUED: "q", EventKind.ADMITTED: "a", EventKind.FIRST_TOKEN: "t"}
    lives = []
    for seed in range(10):
        chance = random.Random(seed)
        replica = Replica(num_blocks=7, block_tokens=2, chunk=3, paused_limit=(None, 2)[seed % 2])
        for number in range(12):
            replica.add(f"{number}", prompt=chance.randint(1, 6), max_tokens=8)
        replica.drain()
        for name, events in replica.events.items():
            lives.append("".join(letters.get(kind, kind[0]) for kind in replica.kinds(name)))
            assert LIFE.fullmatch(lives[-1]), lives[-1]
            times = [event.at for event in events]
            assert times == sorted(set(times))
    assert any(life.count("p") >= 3 and life.count("e") >= 2 for life in lives)


def test_of_sixteen_requests_those_that_fit_finish_and_the_others_never_begin() -> None:
    replica = Replica(num_blocks=4, block_tokens=4, max_model_len=24)
    refused = []
    for number in range(16):
        try:
            replica.add(f"{number}", prompt=2 + number, max_tokens=4)
        except RequestError:
            refused.append(number)
    replica.drain()
    # All tokens but the last are cached, and four blocks hold 16.
    assert refused == [12, 13, 14, 15]
    assert set(replica.ends) == {f"{number}" for number in range(12)}
    assert all(replica.kinds(name)[-1] == "finished" for name in replica.ends)


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9, max_tokens=1)
    replica.drain()
    replica.add("b", prompt=9, max_tokens=1)
    replica.drain()
    assert replica.ends["b"].usage == Usage(prompt_tokens=9, cached_tokens=8, output_tokens=1)


def test_a_request_for_no_tokens_ends_with_its_prompt() -> None:
    replica = Replica(max_step_tokens=4)
    replica.add("a", prompt=10, max_tokens=0)
    replica.drain()
    assert replica.output["a"] == []
    assert replica.ends["a"].finish is FinishReason.LENGTH
    assert replica.free == 64


# Rows that wait hold no more than they may.


def test_rows_that_wait_and_hold_too_many_blocks_are_evicted_the_newest_first() -> None:
    def starve(paused_limit: int | None) -> dict[str, Phase]:
        replica = Replica(num_blocks=6, block_tokens=4, paused_limit=paused_limit)
        for name, prompt in (("old", 5), ("mid", 4), ("new", 8)):
            replica.add(name, prompt=prompt, max_tokens=8)
        for _ in range(2):
            replica.step()
        return replica.phases()

    assert starve(None)["new"] is Phase.STARVED
    assert starve(2)["new"] is Phase.STARVED
    assert starve(1)["new"] is Phase.WAITING


def test_rows_over_the_limit_are_evicted_with_the_token_that_was_under_way_for_them() -> None:
    """Else they come again with that token to be computed, and wait for a block again."""
    replica = Replica(num_blocks=2, block_tokens=4, paused_limit=0)
    for name in ("old", "new"):
        replica.add(name, prompt=4, max_tokens=3)
    for _ in range(20):
        while (step := replica.plan()) is not None and replica.policy.in_flight < 2:
            replica.tell_device(step)
        if step is not None:
            replica.tell_device(step)
        while replica.mail:
            run_one(replica)
    assert replica.output == {"old": alone(range(1, 5), 3), "new": alone(range(1, 5), 3)}


def test_one_row_over_the_limit_is_evicted_and_its_blocks_are_for_the_others() -> None:
    replica = Replica(num_blocks=2, block_tokens=4, paused_limit=0)
    for name in ("old", "new"):
        replica.add(name, prompt=4, max_tokens=3)
    replica.step()
    assert replica.step() is None
    assert replica.phases() == {"old": Phase.STARVED, "new": Phase.WAITING}
    replica.step()
    assert replica.phases() == {"old": Phase.DECODING, "new": Phase.WAITING}
    replica.drain()
    assert replica.output["new"] == alone(range(1, 5), 3)


def test_prompts_that_are_cached_are_admitted_together_however_long_they_are() -> None:
    replica = Replica(prefix_caching=True, max_step_tokens=20)
    for index in range(7):
        replica.add(str(index), prompt=17, max_tokens=4)
    first, second = replica.step(), replica.step()
    assert first is not None
    assert second is not None
    assert [admit.num_tokens for admit in first.admits] == [17]
    assert [admit.num_tokens for admit in second.admits] == [1] * 6
    replica.drain()
    assert all(replica.output[str(index)] == alone(range(1, 18), 4) for index in range(7))


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9)
    replica.add("same", prompt=9)
    replica.add("other", prompt=(50, 51, 52, 53, 54))
    first = replica.step()
    assert first is not None
    assert [unpack_ids(admit.prompt)[0] for admit in first.admits] == [1, 50]
    second = replica.step()
    assert second is not None
    assert [admit.cached_tokens for admit in second.admits] == [8]


def test_a_prefix_is_not_waited_for_when_who_computes_it_is_gone() -> None:
    replica = Replica(prefix_caching=True, chunk=4)
    replica.add("a", prompt=12)
    replica.add("same", prompt=12)
    replica.step()
    replica.abort("a")
    step = replica.step()
    assert step is not None
    assert [admit.cached_tokens for admit in step.admits] == [4]  # what was computed stays


def test_a_prompt_whose_log_probs_are_wanted_is_computed_and_not_looked_up() -> None:
    replica = Replica(prefix_caching=True)
    replica.add("a", prompt=9, max_tokens=1)
    replica.drain()
    request = replica.add("b", prompt=9, max_tokens=1)
    request.prompt_scores = PromptScores(0, 9)
    assert replica.policy.propose().admit[0].hashes == ()


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: blocks are conserved, deltas contiguous, and everything drains right."""

    @initialize(
        num_blocks=integers(2, 12),
        block_tokens=sampled_from((1, 2, 4)),
        max_rows=integers(1, 5),
        max_step_tokens=integers(1, 12),
        chunk=none() | integers(1, 6),
        prefix_caching=booleans(),
        paused_limit=none() | integers(0, 6),
        depth=integers(1, 2),
    )
    def begin(
        self,
        num_blocks: int,
        block_tokens: int,
        max_rows: int,
        max_step_tokens: int,
        chunk: int | None,
        prefix_caching: bool,
        paused_limit: int | None,
        depth: int,
    ) -> None:
        self.replica = Replica(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=40,
            chunk=chunk,
            prefix_caching=prefix_caching,
            paused_limit=paused_limit,
        )
        self.depth = depth
        self.granted: BlocksGranted | None = None
        self.stuck = False
        self.done: deque[StepDone] = deque()
        self.expected: dict[str, list[int]] = {}
        self.refused = 0

    @rule(
        prompt=lists(integers(0, 96), min_size=1, max_size=16)
        | lists(sampled_from((1, 2)), min_size=5, max_size=16),  # some of these begin alike
        max_tokens=none() | integers(1, 16),
        priority=integers(-1, 1),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, priority: int) -> None:
        name = f"r{len(self.expected) + self.refused}"
        try:
            request = self.replica.add(name, prompt, max_tokens, priority=priority, stops=STOPS)
        except RequestError:
            self.refused += 1
            return
        self.expected[name] = alone(prompt, request.max_tokens, STOPS)

    @precondition(lambda self: len(self.replica.policy.ledger) > 0)
    @rule(choice=data())
    def abort(self, choice: DataObject) -> None:
        open_ids = sorted(request.request_id for request in self.replica.policy.ledger)
        self.replica.abort(choice.draw(sampled_from(open_ids)))

    @precondition(lambda self: self._may_propose)
    @rule()
    def propose(self) -> None:
        self.granted = self.replica.reserve(self.replica.policy.propose())

    @precondition(lambda self: self.granted is not None)
    @rule()
    def plan(self) -> None:
        assert self.granted is not None
        step = self.replica.plan_with(self.granted)
        self.granted = None
        if step is not None:
            self.replica.tell_device(step)
        self.stuck = step is None and self.replica.policy.in_flight > 0

    @precondition(lambda self: len(self.replica.mail) > 0)
    @rule()
    def run_device(self) -> None:
        done = self.replica.read_mail()
        if done is not None:
            self.done.append(done)

    @precondition(lambda self: len(self.done) > 0)
    @rule()
    def advance(self) -> None:
        done = self.done.popleft()
        assert self.replica.policy.is_next(done)
        self.replica.finish_step(done)
        self.stuck = False

    @precondition(lambda self: self._idle)
    @rule()
    def checkpoint(self) -> None:
        """As SUSPEND does, which is only obeyed between steps."""
        self.replica.drop(self.replica.policy.checkpoint_all())

    @rule()
    def restart(self) -> None:
        self.replica.restart()
        self.granted = None
        self.done.clear()
        self.stuck = False

    @rule(admitting=booleans())
    def switch_admitting(self, admitting: bool) -> None:
        policy = self.replica.policy
        (policy.end_drain if admitting else policy.begin_drain)()

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "replica") and self.granted is None:
            self.replica.check_blocks()

    @invariant()
    def counts_add_up(self) -> None:
        if hasattr(self, "replica"):
            counts = self.replica.policy.counts()
            total = counts.waiting + counts.running + counts.paused
            assert total == len(self.replica.policy.ledger)

    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        if self.granted is not None:
            self.plan()
        while self.replica.mail or self.done:
            if self.replica.mail:
                self.run_device()
            if self.done:
                self.advance()
        self.replica.policy.end_drain()
        self.replica.drain()
        self._check_ends()

    def _check_ends(self) -> None:
        replica = self.replica
        assert replica.free == replica.limits["num_blocks"]
        assert set(replica.ends) == set(self.expected)
        for name, expected in self.expected.items():
            end, output = replica.ends[name], replica.output[name]
            if end.finish in (FinishReason.ABORT, FinishReason.ERROR):
                assert output == expected[: len(output)]
            else:
                assert output == expected
                assert (end.finish is FinishReason.STOP) == (expected[-1] in STOPS)

    @property
    def _idle(self) -> bool:
        return self.granted is None and self.replica.policy.in_flight == 0

    @property
    def _may_propose(self) -> bool:
        policy = self.replica.policy
        ready = self.granted is None and not self.stuck and policy.in_flight < self.depth
        return ready and policy.has_work


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# A device that has not the memory for a step.


def test_a_step_that_was_too_large_is_tried_with_half_as_many_tokens() -> None:
    replica = Replica(max_step_tokens=64)
    for number in range(8):
        replica.add(f"r{number}", 8, 20)

    replica.run_out_of_memory()
    assert replica.policy.max_tokens == 32
    replica.run_out_of_memory()
    assert replica.policy.max_tokens == 16

    step = replica.step()
    assert step is not None
    assert sum(admit.num_tokens for admit in step.admits) == 16
    replica.drain()
    assert {end.finish for end in replica.ends.values()} == {FinishReason.LENGTH}
    for number in range(8):
        assert replica.output[f"r{number}"] == alone(range(1, 9), 20)


def test_nobody_is_to_blame_for_a_step_of_many() -> None:
    replica = Replica(max_step_tokens=64, max_rows=32)
    requests = [replica.add(f"r{number}", 1, 5) for number in range(32)]

    for most in (16, 8, 4, 2):
        replica.run_out_of_memory()
        assert replica.policy.max_tokens == most

    assert {request.crashes for request in requests} == {0}


def test_a_request_that_has_not_the_memory_alone_is_failed_by_name() -> None:
    replica = Replica(max_step_tokens=64)
    replica.add("large", 60, 5)

    for _ in range(MAX_RETRIES + 1):
        assert replica.ends == {}
        replica.run_out_of_memory()

    failure = replica.ends["large"].failure
    assert failure is not None
    assert failure.message == "the device ran out of memory 4 times while it ran this request"


def test_larger_steps_are_tried_again_after_many_that_went_well() -> None:
    replica = Replica(max_step_tokens=64, num_blocks=2000, max_model_len=4000)
    replica.add("long", 20, 3 * STEPS_TO_GROW)
    replica.run_out_of_memory()
    assert replica.policy.max_tokens == 10

    seen = set()
    while "long" not in replica.ends:
        replica.step()
        seen.add(replica.policy.max_tokens)

    assert seen == {10, 20, 40, None}


def test_a_new_device_is_not_held_to_what_the_old_one_had_room_for() -> None:
    replica = Replica(max_step_tokens=64)
    replica.add("a", 20, 5)
    replica.run_out_of_memory()

    replica.restart()

    assert replica.policy.max_tokens is None
