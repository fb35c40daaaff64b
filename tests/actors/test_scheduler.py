"""The scheduler beside a real allocator, and a device whose steps end when the test says so."""

import random
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import TextOut
from callboard.actors.policy import MAX_RETRIES
from callboard.actors.ref import LocalRef
from callboard.actors.scheduler import Scheduler, _DeadlinePassed
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.testing import ScriptedRunner
from callboard.messages.base import Call, Message, pack_ids, unpack_ids
from callboard.messages.blocks import BlocksGranted, ReleaseBlocks, ReserveBlocks
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    Step,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Weights,
    WeightsLevel,
)
from callboard.messages.errors import (
    CallboardError,
    DeadlineExceeded,
    OutOfBlocks,
    SequenceOverflow,
)
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    Enqueue,
    FinishReason,
    ForgetAll,
    Refused,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import DropRows, RunStep, StepDone

PROMPT = (1, 2, 3)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + tokens[-1] * 7 + len(tokens)) % 97


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request generates when nothing else happens."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Asked:
    """A verb under way, and what came of it."""

    def __init__(self) -> None:
        self.reply: ControlReply | None = None
        self.error: CallboardError | None = None

    async def ask(self, ref: LocalRef[Any], verb: Call[ControlReply]) -> None:
        try:
            self.reply = await ref.ask(verb, timeout=10_000)
        except CallboardError as error:
            self.error = error

    @property
    def open(self) -> bool:
        return self.reply is None and self.error is None


class Stage:
    """A scheduler with everybody around it; the device and the link are the test's."""

    def __init__(
        self, system: ActorSystem, nursery: trio.Nursery, *, num_blocks: int, **options: Any
    ) -> None:
        self.system = system
        self.num_blocks = num_blocks
        self.cell = system.cell("scheduler")
        self.ref: LocalRef[Any] = LocalRef(self.cell)
        self.allocator = system.cell("kv_allocator")
        self.executor = system.cell("executor")
        self.link = system.cell("link")
        self.accepted: dict[str, Accepted] = {}
        self.refused: dict[str, Refused] = {}
        self.output: defaultdict[str, list[int]] = defaultdict(list)
        self.text: defaultdict[str, str] = defaultdict(str)
        self.ends: dict[str, Delta] = {}
        self.stats: list[StepStats | RequestStats] = []
        self.runner: ScriptedRunner
        self._options = {"text_for": None, **options}
        self._nursery = nursery
        self._mail: deque[Message] = deque()  # the device's
        self._lives = 0

    async def start(self) -> None:
        await self._nursery.start(self.cell.run, self._actor)

    async def start_allocator(self) -> None:
        await self._nursery.start(self.allocator.run, lambda: KVAllocator(self.ref))

    async def new_device(self, **limits: int) -> None:
        """Put a device in place, as at the start or after a failure."""
        self.runner = ScriptedRunner(next_token, **{"num_blocks": self.num_blocks, **limits})
        self.runner.load()
        self.runner.allocate()
        self._lives += 1
        self._read_device_mail()
        self._mail.clear()
        room = self.runner.room()
        if self.allocator.actor is not None:
            await LocalRef[Message](self.allocator).tell(room)
        await self.tell(room)

    async def tell(self, *messages: Message) -> None:
        """Tell the scheduler something, and wait until everybody has done what there is to do."""
        for message in messages:
            await self.ref.tell(message)
        await self.settle()

    async def submit(
        self,
        request_id: str = "a",
        max_tokens: int | None = 5,
        *,
        prompt: Sequence[int] = PROMPT,
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> None:
        await self.tell(
            Enqueue(
                request_id=request_id,
                prompt_token_ids=pack_ids(prompt),
                params=params or SamplingParams(max_tokens=max_tokens),
                **fields,
            )
        )

    async def ask(self, verb: Call[ControlReply]) -> Asked:
        asked = Asked()
        self._nursery.start_soon(asked.ask, self.ref, verb)
        await self.settle()
        return asked

    async def reply(self, verb: Call[ControlReply]) -> ControlReply:
        """Ask something that is answered at once."""
        asked = await self.ask(verb)
        assert asked.reply is not None
        return asked.reply

    async def settle(self) -> None:
        await wait_all_tasks_blocked()
        self._read_device_mail()
        self._read_link_mail()

    @property
    def step(self) -> RunStep | None:
        """The step the device runs now."""
        steps = self.steps
        return steps[0] if steps else None

    @property
    def steps(self) -> list[RunStep]:
        """The step the device runs now, and those it has besides."""
        steps = [message for message in self._mail if isinstance(message, RunStep)]
        assert len(steps) <= self._options.get("pipeline_depth", 1), "too many steps at once"
        return steps

    async def finish_step(self) -> StepDone:
        """Let the device finish its step."""
        while True:
            match self._mail.popleft():
                case DropRows(rows=rows):
                    self.runner.drop(rows)
                case RunStep() as step:
                    done = self.runner.execute(step)
                    await self.tell(done)
                    return done

    async def run(self, steps: int = 10_000) -> None:
        """Let the device finish its steps until there are no more, or so many."""
        for _ in range(steps):
            if self.step is None:
                return
            await self.finish_step()

    @property
    def free(self) -> int:
        return int(self.allocator.status().details["blocks_free"])

    @property
    def counts(self) -> tuple[int, int, int]:
        """Running, waiting and paused requests."""
        details = self.cell.status().details
        return (int(details["running"]), int(details["waiting"]), int(details["paused"]))

    def ended(self, reason: FinishReason) -> list[str]:
        return [name for name, delta in self.ends.items() if delta.finish is reason]

    def _actor(self) -> Scheduler:
        return Scheduler(
            allocator=LocalRef(self.allocator),
            executor=LocalRef(self.executor),
            out=LocalRef(self.link),
            **self._options,
        )

    def _read_device_mail(self) -> None:
        self._mail += drain(self.executor)
        while self._mail and isinstance(drop := self._mail[0], DropRows):
            self.runner.drop(drop.rows)
            self._mail.popleft()

    def _read_link_mail(self) -> None:
        for message in drain(self.link):
            match message:
                case Accepted(request_id=request_id):
                    assert request_id not in self.accepted
                    self.accepted[request_id] = message
                case Refused(request_id=request_id):
                    self.refused[request_id] = message
                case TokensOut(deltas=deltas):
                    for delta in deltas:
                        self._take(delta)
                case StepStats() | RequestStats():
                    self.stats.append(message)

    def _take(self, delta: Delta) -> None:
        name = delta.request_id
        assert name in self.accepted, "a delta before the acceptance"
        assert name not in self.ends, "a delta behind the terminal one"
        assert delta.start == len(self.output[name]), "a gap, or a token twice"
        self.output[name] += unpack_ids(delta.token_ids)
        self.text[name] += delta.text
        if delta.finish is not None:
            self.ends[name] = delta


def drain(cell: Cell) -> list[Message]:
    messages = []
    while (letter := cell.mailbox.take_nowait()) is not None:
        messages.append(letter.message)
    return messages


@asynccontextmanager
async def open_stage(
    *, num_blocks: int = 64, device: bool = True, allocator: bool = True, **options: Any
) -> AsyncGenerator[Stage]:
    async with open_system() as system, trio.open_nursery() as nursery:
        stage = Stage(system, nursery, num_blocks=num_blocks, **options)
        if allocator:
            await stage.start_allocator()
        await stage.start()
        if device:
            await stage.new_device()
        await stage.settle()
        yield stage
        assert stage.cell.actor is not None, "the scheduler died"
        nursery.cancel_scope.cancel()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage() as stage:
        yield stage


# Requests.


async def test_a_request_is_accepted_and_gets_a_token_a_step(stage: Stage) -> None:
    await stage.submit("a", 3)
    assert stage.accepted["a"].prompt_token_ids == pack_ids(PROMPT)
    for tokens in range(3):
        assert len(stage.output["a"]) == tokens
        await stage.finish_step()
    assert stage.output["a"] == alone(PROMPT, 3)
    assert stage.ended(FinishReason.LENGTH) == ["a"]
    assert (stage.step, stage.free) == (None, 64)


async def test_a_request_without_a_seed_is_told_the_one_it_got(stage: Stage) -> None:
    await stage.submit("drawn")
    await stage.submit("given", params=SamplingParams(max_tokens=2, seed=7))
    await stage.finish_step()
    drawn, given = stage.accepted["drawn"].seed, stage.accepted["given"].seed
    assert given == 7
    assert 0 <= drawn < 2**63
    assert stage.step is not None
    assert [admit.sampling.seed for admit in stage.step.admits] == [7]


async def test_requests_that_came_meanwhile_join_the_next_step(stage: Stage) -> None:
    await stage.submit("a", 4)
    await stage.submit("b", 4)
    await stage.submit("c", 4)
    first = stage.step
    await stage.finish_step()
    second = stage.step
    assert first is not None
    assert second is not None
    assert (len(first.admits), len(second.admits)) == (1, 2)
    await stage.run()
    assert all(stage.output[name] == alone(PROMPT, 4) for name in "abc")


async def test_the_end_of_sequence_ends_a_request_unless_it_is_to_be_ignored() -> None:
    expected = alone(PROMPT, 5)
    async with open_stage(eos_token_ids=(expected[2],)) as stage:
        await stage.submit("heeds")
        await stage.submit("ignores", params=SamplingParams(max_tokens=5, ignore_eos=True))
        await stage.run()
        assert stage.output["heeds"] == expected[:3]
        assert stage.output["ignores"] == expected
        assert stage.ended(FinishReason.STOP) == ["heeds"]


async def test_a_requests_own_stop_tokens_end_it_too(stage: Stage) -> None:
    expected = alone(PROMPT, 5)
    params = SamplingParams(max_tokens=5, stop_token_ids=(expected[1],))
    await stage.submit("a", params=params)
    await stage.run()
    assert stage.output["a"] == expected[:2]
    assert stage.ended(FinishReason.STOP) == ["a"]


class Spelled:
    """Text of numbers, up to the first that is the stop string."""

    def __init__(self, params: SamplingParams) -> None:
        self.stopped: str | None = None
        self._stops = params.stop
        self.begun = ""

    def continue_from(self, token_id: int) -> None:
        self.begun = f"…{token_id}:"

    def push(self, token_id: int) -> str:
        if str(token_id) in self._stops:
            self.stopped = str(token_id)
            return ""
        begun, self.begun = self.begun, ""
        return f"{begun}{token_id},"

    def finish(self) -> str:
        return "."


async def test_text_goes_on_behind_a_prompt_that_is_text_itself() -> None:
    text_for: Callable[[SamplingParams], TextOut] = Spelled
    async with open_stage(text_for=text_for) as stage:
        await stage.submit("a reply", 1)
        await stage.submit("more of it", 1, continues_text=True)
        await stage.run()
        first = alone(PROMPT, 1)[0]
        assert stage.text["a reply"] == f"{first},."
        assert stage.text["more of it"] == f"…{PROMPT[-1]}:{first},."


async def test_text_comes_with_the_tokens_and_ends_at_a_stop_string() -> None:
    expected = alone(PROMPT, 4)
    text_for: Callable[[SamplingParams], TextOut] = Spelled
    async with open_stage(text_for=text_for) as stage:
        await stage.submit("whole", 4)
        params = SamplingParams(max_tokens=4, stop=(str(expected[2]),))
        await stage.submit("stopped", params=params)
        await stage.run()
        assert stage.text["whole"] == ",".join(map(str, expected)) + ",."
        assert stage.text["stopped"] == f"{expected[0]},{expected[1]},"
        assert stage.ended(FinishReason.STOP) == ["stopped"]
        assert stage.free == 64


async def test_a_request_that_comes_from_elsewhere_goes_on_behind_its_tokens(stage: Stage) -> None:
    expected = alone(PROMPT, 6)
    stage.output["a"] = expected[:4]  # what its client has
    await stage.submit("a", 6, delivered=pack_ids(expected[:4]))
    assert stage.step is not None
    assert unpack_ids(stage.step.admits[0].prompt) == [*PROMPT, *expected[:4]]
    await stage.run()
    assert stage.output["a"] == expected


async def test_a_request_that_has_all_its_tokens_is_refused(stage: Stage) -> None:
    await stage.submit("a", 2, delivered=pack_ids((7, 8)))
    assert stage.refused["a"].failure.field == "delivered"


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(stage: Stage) -> None:
    await stage.submit("a")
    await stage.submit("a")
    assert "the id a is in use" in stage.refused["a"].failure.message
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)
    del stage.accepted["a"], stage.ends["a"], stage.output["a"]
    await stage.submit("a")  # it is free again
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_what_can_never_fit_is_refused(stage: Stage) -> None:
    await stage.submit("long", prompt=[1] * 1024)
    await stage.submit("large", max_tokens=300)
    long, large = stage.refused["long"].failure.error(), stage.refused["large"].failure.error()
    assert isinstance(long, SequenceOverflow)
    assert isinstance(large, OutOfBlocks)
    assert str(large).startswith("request large: the request needs 76 KV blocks")
    assert not long.transient
    assert not large.transient
    assert stage.step is None


async def test_more_requests_than_are_kept_are_refused_until_one_ends() -> None:
    async with open_stage(max_queued=2) as stage:
        for name in "abc":
            await stage.submit(name, 1)
        assert list(stage.accepted) == ["a", "b"]
        assert stage.refused["c"].failure.code == "MailboxFull"
        await stage.run()
        await stage.submit("c", 1)
        assert "c" in stage.accepted


async def test_a_long_prompt_is_prefilled_in_parts_beside_who_decodes() -> None:
    async with open_stage(prefill_chunk_tokens=4) as stage:
        await stage.submit("a", 9)
        await stage.submit("long", 3, prompt=range(10))
        await stage.run(3)
        assert len(stage.output["a"]) == 3
        assert stage.output["long"] == []
        await stage.run()
        assert stage.output["a"] == alone(PROMPT, 9)
        assert stage.output["long"] == alone(range(10), 3)


async def test_more_than_fits_at_once_still_all_comes_out_right() -> None:
    async with open_stage(num_blocks=6) as stage:
        for index in range(6):
            await stage.submit(str(index), 12, prompt=(index, 1))
        await stage.run()
        for index in range(6):
            assert stage.output[str(index)] == alone((index, 1), 12)
        assert stage.free == 6
    assert stage.refused == {}  # a want that may pass is nobody else's business


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_device_has_as_many_steps_as_may_be_planned_ahead(depth: int) -> None:
    async with open_stage(pipeline_depth=depth) as stage:
        await stage.submit("a", 5)
        assert len(stage.steps) == depth
        await stage.submit("b", 4)
        most = 0
        while stage.step is not None:
            await stage.finish_step()
            most = max(most, len(stage.steps))
        assert most == depth
        assert (stage.output["a"], stage.output["b"]) == (alone(PROMPT, 5), alone(PROMPT, 4))
        assert (stage.free, stage.counts) == (64, (0, 0, 0))


@pytest.mark.parametrize(("paused_limit", "paused"), [(None, 1), (1, 0)])
async def test_what_waiting_rows_may_hold_is_limited(paused_limit: int | None, paused: int) -> None:
    async with open_stage(num_blocks=4, paused_limit=paused_limit) as stage:
        for name in ("old", "new"):
            await stage.submit(name, 9, prompt=(1, 2, 3, 4))
        most = 0
        while stage.step is not None:
            await stage.finish_step()
            most = max(most, stage.counts[2])
        assert most == paused
        assert all(stage.output[name] == alone((1, 2, 3, 4), 9) for name in ("old", "new"))


async def test_urgent_requests_overtake_those_that_wait(stage: Stage) -> None:
    await stage.new_device(max_rows=1)
    await stage.submit("running", 2)
    await stage.submit("normal", 1)
    await stage.submit("urgent", 1, priority=-1)
    await stage.run()
    assert list(stage.ends) == ["running", "urgent", "normal"]


async def test_each_step_and_each_end_is_reported(autojump_clock: MockClock, stage: Stage) -> None:
    await stage.submit("a", 2)
    await trio.sleep(3)
    await stage.finish_step()
    await trio.sleep(4)
    await stage.finish_step()
    steps = [one for one in stage.stats if isinstance(one, StepStats)]
    assert [(one.num_tokens, one.num_sampled) for one in steps] == [(3, 1), (1, 1)]
    (ended,) = [one for one in stage.stats if isinstance(one, RequestStats)]
    assert (ended.finish, ended.prompt_tokens, ended.output_tokens) == ("length", 3, 2)
    assert ended.first_token_s == pytest.approx(3)
    assert ended.total_s == pytest.approx(7)


async def test_the_time_to_the_first_token_is_reported_once_and_only_where_there_was_one(
    autojump_clock: MockClock,
) -> None:
    async with open_stage(num_blocks=64) as stage:
        await stage.submit("aborted", 2)
        await stage.tell(Abort(request_id="aborted"))
        stage.output["moved"] = alone(PROMPT, 2)
        await stage.submit("moved", 4, delivered=pack_ids(stage.output["moved"]))
        await stage.submit("prefilled twice", 2)
        await trio.sleep(3)
        await stage.new_device()
        await stage.settle()
        await trio.sleep(4)
        await stage.run()
        ends = [one for one in stage.stats if isinstance(one, RequestStats)]
        assert [one.first_token_s for one in ends] == [None, None, pytest.approx(7)]
        assert [one.total_s for one in ends] == [0, pytest.approx(7), pytest.approx(7)]


# Before the device is known.


async def test_requests_that_come_before_the_device_wait_for_it() -> None:
    async with open_stage(device=False) as stage:
        await stage.submit("a", 3)
        await stage.submit("room left", None)
        await stage.submit("too large", 300)
        assert list(stage.accepted) == ["a", "room left", "too large"]
        assert stage.step is None
        await stage.new_device()
        await stage.settle()
        assert stage.ended(FinishReason.ERROR) == ["too large"]
        failure = stage.ends["too large"].failure
        assert failure is not None
        assert "needs 76 KV blocks of 4 tokens, and the pool has 64" in failure.message
        await stage.run()
        assert stage.output["a"] == alone(PROMPT, 3)
        assert len(stage.output["room left"]) == 64 * 4 + 1 - len(PROMPT)


async def test_requests_can_be_aborted_before_the_device_is_known() -> None:
    async with open_stage(device=False) as stage:
        await stage.submit("a")
        await stage.tell(Abort(request_id="a"))
        assert stage.ended(FinishReason.ABORT) == ["a"]


# Pause.


async def test_a_pause_is_acknowledged_when_the_step_is_over_and_none_follows(
    stage: Stage,
) -> None:
    await stage.submit("a")
    asked = await stage.ask(Pause())
    assert asked.open
    assert stage.cell.state is State.PAUSING
    await stage.finish_step()
    assert asked.reply is not None
    assert (asked.reply.state, asked.reply.requests) == (State.PAUSED, 1)
    await stage.submit("b")
    assert stage.step is None


async def test_an_idle_scheduler_pauses_at_once(stage: Stage) -> None:
    assert (await stage.reply(Pause())).state is State.PAUSED


async def test_a_pause_may_be_repeated_at_any_time(stage: Stage) -> None:
    await stage.submit("a")
    both = [await stage.ask(Pause()), await stage.ask(Pause())]
    assert all(asked.open for asked in both)
    await stage.finish_step()
    assert all(asked.reply is not None and asked.reply.done for asked in both)
    assert (await stage.reply(Pause())).state is State.PAUSED


async def test_unpausing_goes_on_where_it_was(stage: Stage) -> None:
    await stage.submit("a")
    await stage.finish_step()
    await stage.ask(Pause())
    await stage.finish_step()
    reply = await stage.reply(Unpause())
    assert (reply.state, reply.requests) == (State.RUNNING, 1)
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_unpausing_what_runs_changes_nothing(stage: Stage) -> None:
    await stage.submit("a")
    assert (await stage.reply(Unpause())).done
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_a_pause_that_was_not_reached_is_refused_when_unpaused(stage: Stage) -> None:
    await stage.submit("a")
    asked = await stage.ask(Pause())
    await stage.reply(Unpause())
    assert asked.reply is not None
    assert asked.reply.refused == "unpaused meanwhile"
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_what_comes_while_paused_waits_and_runs_afterwards_in_order(stage: Stage) -> None:
    await stage.new_device(max_rows=1)
    await stage.reply(Pause())
    for name in "abc":
        await stage.submit(name, 2)
    assert list(stage.accepted) == ["a", "b", "c"]
    assert (stage.step, stage.counts) == (None, (0, 3, 0))
    await stage.reply(Unpause())
    await stage.run()
    assert list(stage.ends) == ["a", "b", "c"]


async def test_a_pause_asked_for_between_question_and_step_waits_for_that_step() -> None:
    async with open_stage(allocator=False) as stage:
        await stage.submit("a")
        (question,) = drain(stage.allocator)
        assert isinstance(question, ReserveBlocks)
        asked = await stage.ask(Pause())
        assert asked.open
        row = question.admit[0].row
        await stage.tell(BlocksGranted(step=question.step, blocks={row: (0,)}, chunks={row: 3}))
        assert asked.open
        await stage.finish_step()
        assert asked.reply is not None
        assert drain(stage.allocator) == []


async def test_a_scheduler_that_is_born_paused_runs_nothing_until_it_is_unpaused() -> None:
    async with open_system() as system, trio.open_nursery() as nursery:
        stage = Stage(system, nursery, num_blocks=64)
        stage.cell.paused = True
        await stage.start_allocator()
        await stage.start()
        await stage.new_device()
        await stage.submit("a", 2)
        assert (stage.step, stage.cell.state) == (None, State.PAUSED)
        assert (await stage.reply(Pause())).state is State.PAUSED
        await stage.reply(Unpause())
        await stage.run()
        assert stage.output["a"] == alone(PROMPT, 2)
        nursery.cancel_scope.cancel()


# Step by step.


async def paused(stage: Stage) -> None:
    assert (await stage.reply(Pause())).state is State.PAUSED


async def test_so_many_steps_are_run_and_then_it_is_paused_again(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a")
    asked = await stage.ask(Step(count=3))
    for number in range(3):
        assert asked.open
        assert stage.cell.state is State.PAUSING
        await stage.finish_step()
        assert len(stage.output["a"]) == number + 1
    assert asked.reply is not None
    assert (asked.reply.verb, asked.reply.state) == ("step", State.PAUSED)
    assert (asked.reply.steps, asked.reply.requests) == (3, 1)
    assert (stage.step, stage.cell.state) == (None, State.PAUSED)


async def test_a_request_can_be_stepped_to_its_end(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a", 3)
    counts = []
    while stage.counts != (0, 0, 0):
        asked = await stage.ask(Step())
        await stage.finish_step()
        assert asked.reply is not None
        counts.append(asked.reply.requests)
    assert counts == [1, 1, 0]
    assert stage.output["a"] == alone(PROMPT, 3)


async def test_fewer_steps_are_run_when_there_is_nothing_left(stage: Stage) -> None:
    await paused(stage)
    idle = await stage.reply(Step(count=9))
    await stage.submit("a", 2)
    asked = await stage.ask(Step(count=9))
    await stage.run()
    assert (idle.done, idle.steps, idle.requests) == (True, 0, 0)
    assert asked.reply is not None
    assert (asked.reply.steps, asked.reply.requests) == (2, 0)


async def test_what_runs_is_not_stepped(stage: Stage) -> None:
    refused = await stage.reply(Step())
    await stage.submit("a")
    pausing = await stage.ask(Pause())
    early = await stage.reply(Step())
    assert (refused.refused, early.refused) == ("pause first", "pause first")
    await stage.finish_step()
    assert pausing.reply is not None
    assert stage.step is None


async def test_one_stepping_at_a_time(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a")
    first = await stage.ask(Step(count=2))
    assert (await stage.reply(Step())).refused == "pause first"
    await stage.run()
    assert first.reply is not None
    assert first.reply.steps == 2


async def test_a_pause_ends_the_stepping_and_both_are_answered(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a")
    stepping = await stage.ask(Step(count=100))
    await stage.finish_step()
    pausing = await stage.ask(Pause())
    assert stepping.open
    assert pausing.open
    await stage.finish_step()
    assert stepping.reply is not None
    assert pausing.reply is not None
    assert (stepping.reply.steps, pausing.reply.state) == (2, State.PAUSED)
    assert stage.step is None


async def test_an_unpause_ends_the_stepping_and_it_runs(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a")
    stepping = await stage.ask(Step(count=2))
    await stage.reply(Unpause())
    assert stepping.reply is not None
    assert (stepping.reply.verb, stepping.reply.refused) == ("step", "unpaused meanwhile")
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_a_device_that_fails_in_a_step_leaves_the_stepping_answered(stage: Stage) -> None:
    await paused(stage)
    await stage.submit("a")
    stepping = await stage.ask(Step(count=2))
    await stage.finish_step()
    await stage.new_device()  # in the second
    await stage.settle()
    assert stepping.reply is not None
    assert (stepping.reply.steps, stepping.reply.state) == (1, State.PAUSED)
    assert stage.step is None
    await stage.reply(Unpause())
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_a_device_that_fails_before_its_step_is_waited_for() -> None:
    async with open_stage(device=False) as stage:
        await paused(stage)
        await stage.submit("a")
        stepping = await stage.ask(Step())
        assert stepping.open
        await stage.new_device()
        await stage.settle()
        await stage.finish_step()
        assert stepping.reply is not None
        assert stepping.reply.steps == 1


async def test_no_step_is_begun_when_nobody_waits_for_it_any_more(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await paused(stage)
    await stage.submit("a")
    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Step(count=100), timeout=5.0)
    await stage.settle()
    await stage.finish_step()
    assert (stage.step, stage.cell.state) == (None, State.PAUSED)
    assert len(stage.output["a"]) == 1


async def test_what_waited_for_the_end_of_a_drain_can_be_stepped(stage: Stage) -> None:
    await stage.new_device(max_rows=1)
    for name in "ab":
        await stage.submit(name, 2)
    await stage.ask(Pause(mode=PauseMode.DRAIN))
    await stage.run()
    assert list(stage.ends) == ["a"]
    await stage.ask(Step(count=2))
    await stage.run()
    assert list(stage.ends) == ["a", "b"]


async def test_a_chunk_of_a_prompt_is_a_step() -> None:
    async with open_stage(prefill_chunk_tokens=4) as stage:
        await paused(stage)
        await stage.submit("a", 1, prompt=range(10))
        asked = await stage.ask(Step(count=2))
        await stage.run()
        assert asked.reply is not None
        assert (asked.reply.steps, asked.reply.requests) == (2, 1)
        assert stage.output["a"] == []
        await stage.ask(Step())
        await stage.run()
        assert stage.output["a"] == alone(range(10), 1)


# Pause, and what becomes of those that run.


async def test_draining_lets_the_running_finish_and_the_waiting_wait(stage: Stage) -> None:
    await stage.new_device(max_rows=2)
    for name in "abc":
        await stage.submit(name, 3)
    await stage.finish_step()
    asked = await stage.ask(Pause(mode=PauseMode.DRAIN))
    while stage.step is not None:
        assert asked.open
        await stage.finish_step()
    assert asked.reply is not None
    assert (list(stage.ends), stage.counts) == (["a", "b"], (0, 1, 0))
    await stage.submit("d", 1)
    assert stage.step is None
    await stage.reply(Unpause())
    await stage.run()
    assert list(stage.ends) == ["a", "b", "d", "c"]  # d has only one token to make


async def test_draining_an_idle_scheduler_is_done_at_once(stage: Stage) -> None:
    assert (await stage.reply(Pause(mode=PauseMode.DRAIN))).state is State.PAUSED


async def test_a_drain_that_takes_too_long_aborts_the_running_only(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.new_device(max_rows=1)
    await stage.submit("running", 50)
    await stage.submit("waiting", 2)
    asked = await stage.ask(Pause(mode=PauseMode.DRAIN, drain_s=30))
    await stage.run(3)
    await trio.sleep(31)
    await stage.settle()
    assert stage.ended(FinishReason.ABORT) == ["running"]
    await stage.run()
    assert asked.reply is not None
    assert (stage.free, stage.counts) == (64, (0, 1, 0))


async def test_the_time_of_an_earlier_drain_does_not_count_in_a_later_one(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.reply(Pause(mode=PauseMode.DRAIN, drain_s=30))
    await stage.reply(Unpause())
    await stage.submit("a", 50)
    await trio.sleep(20)
    await stage.ask(Pause(mode=PauseMode.DRAIN, drain_s=30))
    await trio.sleep(15)  # 35 s after the first
    await stage.settle()
    assert stage.ends == {}
    await trio.sleep(20)
    await stage.settle()
    assert stage.ended(FinishReason.ABORT) == ["a"]


async def test_the_time_of_a_drain_that_is_over_ends_nothing_that_is_stepped_later(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.reply(Pause(mode=PauseMode.DRAIN, drain_s=30))
    await stage.submit("a", 5)
    await stage.ask(Step(count=2))
    await stage.run(2)
    await trio.sleep(60)
    await stage.settle()
    assert stage.ends == {}


async def test_a_plain_pause_ends_a_drain_and_keeps_who_runs(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.submit("a")
    drained = await stage.ask(Pause(mode=PauseMode.DRAIN, drain_s=30))
    kept = await stage.ask(Pause())
    await stage.finish_step()
    assert drained.reply is not None
    assert kept.reply is not None
    await trio.sleep(60)
    await stage.settle()
    assert stage.ends == {}
    await stage.reply(Unpause())
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_pausing_with_abort_ends_all_and_frees_all(stage: Stage) -> None:
    await stage.new_device(max_rows=1)
    for name in "abc":
        await stage.submit(name)
    asked = await stage.ask(Pause(mode=PauseMode.ABORT))
    assert stage.ended(FinishReason.ABORT) == ["a", "b", "c"]
    assert asked.open
    await stage.finish_step()
    assert asked.reply is not None
    assert (stage.free, asked.reply.requests) == (64, 0)


# Suspension.


async def test_suspending_needs_a_pause_first(stage: Stage) -> None:
    assert (await stage.reply(Suspend())).refused == "pause first"
    await stage.submit("a")
    await stage.ask(Pause())
    assert (await stage.reply(Suspend())).refused == "pause first"  # a step is under way
    await stage.finish_step()
    assert (await stage.reply(Suspend())).state is State.SUSPENDED


async def test_nothing_is_suspended_while_steps_wait_for_a_device() -> None:
    async with open_stage(device=False) as stage:
        await paused(stage)
        await stage.submit("a")
        stepping = await stage.ask(Step())
        assert (await stage.reply(Suspend())).refused == "pause first"
        await stage.new_device()
        await stage.run()
        assert stepping.reply is not None
        assert (await stage.reply(Suspend())).done


async def test_dropping_the_cache_takes_all_rows_off_and_loses_nothing(stage: Stage) -> None:
    await stage.new_device(max_rows=2)
    for name in "abcd":
        await stage.submit(name, 4)
    await stage.run(2)
    await stage.ask(Pause())
    await stage.run()
    reply = await stage.reply(Suspend(kv=KVLevel.DROP))
    assert reply.requests == 4
    assert (stage.free, stage.counts) == (64, (0, 4, 0))
    assert not stage.runner._rows
    assert (await stage.reply(Suspend(kv=KVLevel.DROP))).done
    await stage.submit("late", 1)  # does not jump the queue
    await stage.reply(Resume())
    await stage.reply(Unpause())
    await stage.run()
    assert list(stage.ends) == ["a", "b", "c", "d", "late"]
    assert all(stage.output[name] == alone(PROMPT, 4) for name in "abcd")


@pytest.mark.parametrize("kv", [KVLevel.KEEP, KVLevel.OFFLOAD])
async def test_a_cache_that_is_not_dropped_keeps_the_rows(stage: Stage, kv: KVLevel) -> None:
    await stage.submit("a")
    await stage.ask(Pause())
    await stage.finish_step()
    held = 64 - stage.free
    await stage.reply(Suspend(kv=kv, weights=WeightsLevel.DISCARD))
    assert (64 - stage.free, len(stage.runner._rows)) == (held, 1)
    await stage.reply(Resume())
    await stage.reply(Unpause())
    assert stage.step is not None
    assert stage.step.admits == ()
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


# New weights.


def update(
    phase: UpdatePhase = UpdatePhase.COMMIT, *, version: int = 1, keep_kv: bool = False
) -> UpdateWeights:
    return UpdateWeights(source="new", version=version, keep_kv=keep_kv, phase=phase)


async def pause_in_the_middle(stage: Stage) -> int:
    """Have a row that has sampled a few tokens, and nothing under way; returns blocks held."""
    await stage.submit("a", 9)
    await stage.run(3)
    await stage.ask(Pause())
    await stage.finish_step()
    return 64 - stage.free


@pytest.mark.parametrize("phase", [UpdatePhase.PREPARE, UpdatePhase.COMMIT])
async def test_new_weights_need_a_pause_first(stage: Stage, phase: UpdatePhase) -> None:
    await stage.submit("a")
    assert (await stage.reply(update(phase))).refused == "pause first"
    await stage.ask(Pause())
    assert (await stage.reply(update(phase))).refused == "pause first"  # a step is under way


@pytest.mark.parametrize("phase", [UpdatePhase.PREPARE, UpdatePhase.CANCEL])
async def test_rows_stay_until_the_new_weights_are_used(stage: Stage, phase: UpdatePhase) -> None:
    held = await pause_in_the_middle(stage)
    reply = await stage.reply(update(phase))
    assert (reply.state, reply.requests) == (State.PAUSED, 1)
    assert 64 - stage.free == held


async def test_all_a_row_has_is_computed_again_by_the_new_weights(stage: Stage) -> None:
    await pause_in_the_middle(stage)
    so_far = list(stage.output["a"])
    reply = await stage.reply(update())
    stage.runner.commit_weights(Weights(source="new", version=1))
    assert (reply.state, reply.requests) == (State.PAUSED, 1)
    assert (stage.free, stage.counts) == (64, (0, 1, 0))
    assert (await stage.reply(update())).done
    await stage.reply(Unpause())
    assert stage.step is not None
    [admit] = stage.step.admits
    assert unpack_ids(admit.prompt) == [*PROMPT, *so_far]
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 9)


async def test_rows_can_keep_what_the_old_weights_computed(stage: Stage) -> None:
    held = await pause_in_the_middle(stage)
    await stage.reply(update(keep_kv=True))
    assert 64 - stage.free == held
    await stage.reply(Unpause())
    assert stage.step is not None
    assert stage.step.admits == ()
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 9)


async def test_requests_come_and_go_while_suspended(stage: Stage) -> None:
    await stage.submit("a")
    await stage.ask(Pause())
    await stage.finish_step()
    await stage.reply(Suspend())
    await stage.submit("b", 2)
    await stage.tell(Abort(request_id="a"))
    assert stage.ended(FinishReason.ABORT) == ["a"]
    await stage.reply(Resume())
    await stage.reply(Unpause())
    await stage.run()
    assert stage.output["b"] == alone(PROMPT, 2)


# Deadlines.


@pytest.mark.parametrize("paused", [False, True])
async def test_a_deadline_ends_a_request_wherever_it_stands(
    autojump_clock: MockClock, stage: Stage, paused: bool
) -> None:
    await stage.new_device(max_rows=1)
    await stage.submit("running", 50, timeout_s=10)
    await stage.submit("waiting", 50, timeout_s=20)
    await stage.submit("patient", 2)
    if paused:
        await stage.ask(Pause())
        await stage.finish_step()
    await trio.sleep(11)
    await stage.settle()
    assert stage.ended(FinishReason.DEADLINE) == ["running"]
    await trio.sleep(11)
    await stage.settle()
    assert stage.ended(FinishReason.DEADLINE) == ["running", "waiting"]
    await stage.reply(Unpause())
    await stage.run()
    assert stage.output["patient"] == alone(PROMPT, 2)
    assert stage.free == 64


async def test_the_deadline_of_a_request_that_ended_does_not_end_the_next_of_its_id(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.submit("a", 1, timeout_s=10)
    await stage.run()
    stage.accepted.clear()
    stage.ends.clear()
    stage.output.clear()
    await trio.sleep(5)
    await stage.submit("a", 50, timeout_s=10)
    await trio.sleep(6)
    await stage.settle()
    assert stage.ends == {}
    await trio.sleep(5)
    await stage.settle()
    assert stage.ended(FinishReason.DEADLINE) == ["a"]


async def test_a_timer_that_fired_already_does_not_end_the_next_of_its_id(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.submit("a", 50, timeout_s=10)
    await stage.tell(_DeadlinePassed(request_id="a"))  # of an earlier "a", and read late
    assert stage.ends == {}


async def test_requests_that_ended_leave_no_timers_behind(
    autojump_clock: MockClock, stage: Stage
) -> None:
    for index in range(300):
        await stage.submit(str(index), 1, timeout_s=1e6)
        await stage.run()
    # Cancelled ones are thrown out when they are most of all there are.
    assert len(stage.system.timers._heap) < 100
    for index in range(300):
        await stage.submit(f"forgotten {index}", 50, timeout_s=1e6)
    await stage.tell(ForgetAll())
    assert len(stage.system.timers._heap) < 100


# Aborts.


async def abort_waiting(stage: Stage) -> None:
    await stage.ask(Pause())
    await stage.submit("a")


async def abort_prefilling(stage: Stage) -> None:
    await stage.submit("a", prompt=range(100))  # two steps long
    await stage.finish_step()
    await stage.ask(Pause())
    await stage.finish_step()


async def abort_decoding(stage: Stage) -> None:
    await stage.submit("a", 20)
    await stage.run(2)
    await stage.ask(Pause())
    await stage.finish_step()


async def abort_in_a_step(stage: Stage) -> None:
    await stage.submit("a", 20)
    await stage.finish_step()


async def abort_starved(stage: Stage) -> None:
    await stage.submit("other", 30)
    await stage.submit("a", 20)
    while stage.counts[2] == 0:
        await stage.finish_step()


@pytest.mark.parametrize(
    "reach", [abort_waiting, abort_prefilling, abort_decoding, abort_in_a_step, abort_starved]
)
async def test_an_abort_ends_a_request_once_and_frees_its_blocks(
    reach: Callable[[Stage], Any],
) -> None:
    async with open_stage(num_blocks=32 if reach is not abort_starved else 10) as stage:
        await reach(stage)
        held = stage.free
        assert "a" in stage.accepted
        await stage.tell(Abort(request_id="a"))
        assert stage.ended(FinishReason.ABORT) == ["a"]
        if reach is abort_in_a_step:
            assert stage.free > held  # at once: whoever gets them comes behind this step
        await stage.tell(Abort(request_id="a"))
        await stage.reply(Unpause())
        await stage.run()
        assert stage.free == stage.num_blocks
        assert not stage.runner._rows


async def test_an_abort_between_question_and_step_leaves_nothing_to_run() -> None:
    async with open_stage(allocator=False) as stage:
        await stage.submit("a")
        (question,) = drain(stage.allocator)
        assert isinstance(question, ReserveBlocks)
        row = question.admit[0].row
        await stage.tell(Abort(request_id="a"))
        assert drain(stage.allocator) == []
        await stage.tell(BlocksGranted(step=question.step, blocks={row: (0,)}, chunks={row: 3}))
        assert drain(stage.allocator) == [ReleaseBlocks(rows=(row,))]
        assert (stage.step, list(stage.ends)) == (None, ["a"])


async def test_aborting_what_is_not_there_changes_nothing(stage: Stage) -> None:
    await stage.submit("a", 2)
    await stage.tell(Abort(request_id="b"))
    await stage.run()
    assert list(stage.ends) == ["a"]


async def test_the_blocks_of_an_aborted_request_may_go_to_the_next_at_once() -> None:
    async with open_stage(num_blocks=2) as stage:
        await stage.submit("a", 5)
        await stage.submit("b", 5)
        await stage.tell(Abort(request_id="a"))  # while the device still runs it
        await stage.run()
        assert stage.output["b"] == alone(PROMPT, 5)


# What the coordinator has given away.


async def test_forgetting_all_says_nothing_and_frees_all(stage: Stage) -> None:
    await stage.new_device(max_rows=1)
    await stage.submit("a")
    await stage.submit("b")
    await stage.finish_step()
    said = dict(stage.output)
    await stage.tell(ForgetAll())
    await stage.run()
    assert (stage.ends, stage.output) == ({}, said)
    assert (stage.free, stage.counts) == (64, (0, 0, 0))
    stage.accepted.clear()
    stage.output.clear()
    await stage.submit("a", 2)
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 2)


# What is late.


async def test_blocks_granted_for_another_question_are_given_back() -> None:
    async with open_stage(allocator=False) as stage:
        await stage.tell(BlocksGranted(step=99, blocks={7: (1, 2)}))
        assert drain(stage.allocator) == [ReleaseBlocks(rows=(7,))]
        assert stage.step is None


async def test_the_result_of_another_step_changes_nothing(stage: Stage) -> None:
    await stage.submit("a", 3)
    step = stage.step
    assert step is not None
    for number in (step.step - 1, step.step + 1):
        await stage.tell(StepDone(step=number, rows=(1,), token_ids=pack_ids((77,))))
    assert stage.output["a"] == []
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 3)


async def test_a_new_device_begins_where_the_old_one_failed(stage: Stage) -> None:
    for name in "ab":
        await stage.submit(name, 5)
    await stage.run(3)
    step = stage.step
    assert step is not None
    late = stage.runner.execute(step)
    await stage.new_device()
    await stage.tell(late)  # a result from beyond the grave
    await stage.run()
    assert all(stage.output[name] == alone(PROMPT, 5) for name in "ab")
    assert stage.free == 64


async def test_a_new_device_while_blocks_were_asked_for_begins_a_new_round() -> None:
    async with open_stage(allocator=False) as stage:
        await stage.submit("a")
        (first,) = drain(stage.allocator)
        await stage.new_device()
        await stage.settle()
        (second,) = drain(stage.allocator)
        assert isinstance(first, ReserveBlocks)
        assert isinstance(second, ReserveBlocks)
        assert first.step != second.step
        assert first.admit[0].row != second.admit[0].row
        await stage.tell(BlocksGranted(step=first.step, blocks={first.admit[0].row: (0,)}))
        assert drain(stage.allocator) == [ReleaseBlocks(rows=(first.admit[0].row,))]


async def test_blocks_of_a_new_device_that_were_granted_before_it_was_known_come_back(
    stage: Stage,
) -> None:
    await LocalRef[Message](stage.allocator).tell(stage.runner.room())
    await stage.submit("a")  # the allocator reads of the device first, and grants its blocks
    assert stage.free < 64
    await stage.tell(stage.runner.room())
    await stage.tell(Abort(request_id="a"))
    assert stage.free == 64


async def test_a_device_that_fails_while_pausing_lets_the_pause_be_reached(stage: Stage) -> None:
    await stage.submit("a")
    asked = await stage.ask(Pause())
    await stage.new_device()
    await stage.settle()
    assert asked.reply is not None
    assert stage.step is None
    await stage.reply(Unpause())
    await stage.run()
    assert stage.output["a"] == alone(PROMPT, 5)


async def test_a_request_that_keeps_killing_the_device_is_failed(stage: Stage) -> None:
    await stage.submit("a")
    for _ in range(MAX_RETRIES + 1):
        assert stage.ends == {}
        await stage.new_device()
        await stage.settle()
    assert stage.ended(FinishReason.ERROR) == ["a"]
    failure = stage.ends["a"].failure
    assert failure is not None
    assert failure.code == "RequestFailed"


# Two steps at the device.


async def test_a_pause_is_acknowledged_when_both_steps_under_way_are_over() -> None:
    async with open_stage(pipeline_depth=2) as stage:
        await stage.submit("a")
        assert len(stage.steps) == 2
        asked = await stage.ask(Pause())
        await stage.finish_step()
        assert asked.open
        await stage.finish_step()
        assert asked.reply is not None
        assert (asked.reply.state, stage.steps) == (State.PAUSED, [])
        assert stage.output["a"] == alone(PROMPT, 2)


async def test_as_many_steps_are_run_as_were_asked_for_though_two_are_begun_at_once() -> None:
    async with open_stage(pipeline_depth=2) as stage:
        await paused(stage)
        await stage.submit("a")
        for count in (1, 3):
            asked = await stage.ask(Step(count=count))
            assert len(stage.steps) == min(count, 2)
            await stage.run()
            assert asked.reply is not None
            assert asked.reply.steps == count
        assert stage.output["a"] == alone(PROMPT, 4)


async def test_a_device_that_fails_with_two_steps_under_way_takes_no_token_along() -> None:
    async with open_stage(pipeline_depth=2) as stage:
        await stage.submit("a")
        await stage.finish_step()
        first, second = stage.steps
        late = [stage.runner.execute(step) for step in (first, second)]
        pausing = await stage.ask(Pause())
        await stage.new_device()
        assert pausing.reply is not None
        await stage.tell(*late)
        assert stage.output["a"] == alone(PROMPT, 1)
        await stage.reply(Unpause())
        await stage.run()
        assert stage.output["a"] == alone(PROMPT, 5)
        assert stage.free == 64


# Anything, in any order.


class Director:
    """Does whatever comes to its mind, and remembers what must come of it."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.rng = random.Random(seed)
        self.expected: dict[str, list[int]] = {}
        self.stopped = False  # a pause is acknowledged, and no unpause came since
        self.pause: Asked | None = None
        self.stepped = 0  # passes since a STEP was asked for
        self.allowed: int | None = None  # how many that may be

    async def act(self) -> None:
        scenes: list[Callable[[], Any]] = [
            self.submit,
            self.submit,
            self.abort,
            self.finish,
            self.finish,
            self.finish,
            self.finish,
            self.ask_pause,
            self.unpause,
            self.suspend,
            self.crash,
            self.step,
        ]
        weights = [6, 6, 2, 8, 8, 8, 8, 2, 3, 1, 1, 6]
        (scene,) = self.rng.choices(scenes, weights)
        await scene()
        if self.pause is not None and self.pause.reply is not None:
            self.stopped = self.pause.reply.done
            if self.allowed is not None:
                assert self.pause.reply.steps == self.stepped <= self.allowed
            self.pause = self.allowed = None
        if self.stopped:
            assert self.stage.step is None, "a step after the pause was acknowledged"

    async def submit(self) -> None:
        name = f"r{len(self.expected)}"
        prompt = [self.rng.randrange(97) for _ in range(self.rng.randint(1, 12))]
        max_tokens = self.rng.randint(1, 10)
        self.expected[name] = alone(prompt, max_tokens)
        timeout_s = self.rng.choice((None, None, 1e6))
        await self.stage.submit(
            name, max_tokens, prompt=prompt, priority=self.rng.randint(0, 1), timeout_s=timeout_s
        )

    async def abort(self) -> None:
        if self.expected:
            await self.stage.tell(Abort(request_id=self.rng.choice(sorted(self.expected))))

    async def finish(self) -> None:
        if self.stage.step is not None:
            self.stepped += 1
            await self.stage.finish_step()

    async def ask_pause(self) -> None:
        if self.pause is None and not self.stopped:
            self.pause = await self.stage.ask(Pause())

    async def unpause(self) -> None:
        await self.stage.reply(Unpause())
        self.stopped, self.pause, self.allowed = False, None, None

    async def step(self) -> None:
        if self.stopped:
            self.stepped, self.allowed = 0, self.rng.randint(1, 4)
            self.pause = await self.stage.ask(Step(count=self.allowed))
            self.stopped = False

    async def suspend(self) -> None:
        reply = await self.stage.reply(Suspend())
        assert reply.done is self.stopped
        if self.stopped:
            await self.stage.reply(Resume())

    async def crash(self) -> None:
        await self.stage.new_device()
        await self.stage.settle()

    async def end(self) -> None:
        await self.unpause()
        await self.stage.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_every_request_ends_once_and_right(seed: int, depth: int) -> None:
    async with open_stage(
        num_blocks=7, prefill_chunk_tokens=(None, 3)[seed % 2], pipeline_depth=depth
    ) as stage:
        director = Director(stage, seed)
        for _ in range(150):
            await director.act()
        await director.end()
        assert set(stage.ends) == set(director.expected)
        for name, expected in director.expected.items():
            if stage.ends[name].finish is FinishReason.LENGTH:
                assert stage.output[name] == expected
            else:
                assert stage.output[name] == expected[: len(stage.output[name])]
        assert (stage.free, stage.counts) == (7, (0, 0, 0))
        assert len(stage.ended(FinishReason.LENGTH)) > len(stage.ends) / 2
