"""Supervisors over scripted children: starts, stops, restarts, verbs and status."""

import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Actor, ActorExited, Cell
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.messages.base import Call, Message
from callboard.messages.control import (
    ControlReply,
    GetNode,
    NodeStatus,
    Pause,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
)
from callboard.messages.errors import (
    ActorFailed,
    ControlRefused,
    Failure,
    RestartIntensityReached,
    StartFailed,
    WeightsError,
)
from callboard.supervision.spec import ChildSpec, Intensity, Restart, Strategy
from callboard.supervision.supervisor import Supervisor

BEARABLE = Intensity(restarts=100, backoff_s=0.0)


class Crash(Message, frozen=True):
    """Test → child: fail."""


class Leave(Message, frozen=True):
    """Test → child: end in good order, of your own accord."""


class Work(Message, frozen=True):
    """Test → child: be busy for so long, and fail then if you are told to."""

    seconds: float
    crash: bool = False


class Where(Call[str], frozen=True):
    """Test → child: which life are you in?"""


class Script:
    """What a child does, life after life."""

    def __init__(self) -> None:
        self.start_errors: deque[Exception] = deque()
        self.start_s = 0.0
        self.verb_s = 0.0
        self.deaf = False  # verbs get no answer
        self.dies_of: type[Message] | None = None  # once
        self.answer: ControlReply | None = None
        self.stop_s = 0.0
        self.frees = 0
        self.steps = 0


class Part(Actor[Crash | Leave | Work | Where]):
    """A child that writes down what happens to it."""

    def __init__(self, script: Script, diary: list[str]) -> None:
        self._script = script
        self._diary = diary

    def _note(self, what: str) -> None:
        self._diary.append(f"{what} {self.name}")

    async def on_start(self) -> None:
        self._note("starts")
        if self.cell.suspended is not None:
            self._note("is born suspended")
        elif self.cell.paused:
            self._note("is born paused")
        if self.cell.weights is not None:
            self._note(f"is born with weights {self.cell.weights.version} in")
        if self._script.start_errors:
            raise self._script.start_errors.popleft()
        await trio.sleep(self._script.start_s)
        self._note("up")

    async def on_stopping(self) -> None:
        self._note("stops")
        await trio.sleep(self._script.stop_s)

    async def on_stop(self) -> None:
        self._note("gone")

    async def receive(self, message: Crash | Leave | Work | Where) -> object:
        match message:
            case Crash():
                raise RuntimeError("ouch")
            case Leave():
                self.cell.cancel("of its own accord")
                await trio.sleep_forever()
            case Work(seconds=seconds, crash=crash):
                await trio.sleep(seconds)
                if crash:
                    raise RuntimeError("ouch")
            case Where():
                return f"life {self.cell.lives}"
        return None

    async def on_pause(self, verb: Pause) -> ControlReply | None:
        return await self._obey(verb)

    async def on_unpause(self, verb: Unpause) -> ControlReply | None:
        return await self._obey(verb)

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        return await self._obey(verb)

    async def on_resume(self, verb: Resume) -> ControlReply | None:
        return await self._obey(verb)

    async def on_drain(self, verb: Stop) -> ControlReply | None:
        return await self._obey(verb)

    async def on_step(self, verb: Step) -> ControlReply | None:
        return await self._obey(verb)

    async def on_update_weights(self, verb: UpdateWeights) -> ControlReply | None:
        self._note(verb.phase)
        return await self._obey(verb)

    async def _obey(self, verb: Verb) -> ControlReply | None:
        kind = type(verb)
        self._note(kind.__name__.lower())
        if self._script.dies_of is kind:
            self._script.dies_of = None
            raise RuntimeError("ouch")
        if self._script.deaf:
            self.defer()
            return None
        await trio.sleep(self._script.verb_s)
        if self._script.answer is not None:
            return self._script.answer
        return self.ack(verb, bytes_freed=self._script.frees, requests=1, steps=self._script.steps)


class Stage:
    """A supervisor with scripted children, and what happened to them."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.diary: list[str] = []
        self.scripts: defaultdict[str, Script] = defaultdict(Script)
        self.exited: ActorExited | None = None
        self.cell = system.cell("top")
        self._nursery = nursery

    def part(self, name: str, **spec: Any) -> ChildSpec:
        return ChildSpec(name=name, start=lambda: Part(self.scripts[name], self.diary), **spec)

    def group(self, name: str, *parts: str, **options: Any) -> ChildSpec:
        return ChildSpec(name=name, start=self.supervisor(*parts, **options), shutdown_s=60.0)

    def supervisor(
        self,
        *children: str | ChildSpec,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity = BEARABLE,
    ) -> Callable[[], Supervisor]:
        specs = [self.part(child) if isinstance(child, str) else child for child in children]
        return lambda: Supervisor(self.system, specs, strategy=strategy, intensity=intensity)

    async def play(self, *children: str | ChildSpec, **options: Any) -> None:
        """Start the tree; raises what the start raises."""
        await self._nursery.start(self._live, self.supervisor(*children, **options))
        await wait_all_tasks_blocked()

    async def _live(
        self,
        make: Callable[[], Supervisor],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        self.exited = await self.cell.run(make, stop_timeout=60.0, task_status=task_status)

    def ref(self, name: str) -> LocalRef[Any]:
        return LocalRef(self.system.cell(name))

    async def tell(self, name: str, message: Message) -> None:
        await self.ref(name).tell(message)
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(5):
            await wait_all_tasks_blocked()

    async def ask(self, verb: Verb, timeout: float = 10.0) -> ControlReply:
        answer: ControlReply = await self.ref("top").ask(verb, timeout=timeout)
        return answer

    async def node(self) -> NodeStatus:
        answer: NodeStatus = await self.ref("top").ask(GetNode(), timeout=60.0)
        return answer

    def seen(self, *kinds: str) -> list[str]:
        """Return what the diary says of some kinds of events, and forget it all."""
        found = [entry for entry in self.diary if entry.split()[0] in kinds]
        self.diary.clear()
        return found

    def alive(self) -> list[str]:
        return [cell.name for cell in self.cells() if cell.actor is not None]

    def cells(self) -> list[Cell]:
        return [cell for cell in self.system.cells.values() if cell.name != "top"]

    def lives(self) -> dict[str, int]:
        return {cell.name: cell.lives for cell in self.cells()}


@asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    async with open_system() as system, trio.open_nursery() as nursery:
        stage = Stage(system, nursery)
        yield stage
        await stage.cell.stop(60.0)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


async def failed_start(stage: Stage, *children: str | ChildSpec, **options: Any) -> StartFailed:
    """Return the error of a tree that does not start."""
    with pytest.RaisesGroup(StartFailed, allow_unwrapped=True, flatten_subgroups=True) as caught:
        async with trio.open_nursery() as nursery:
            stage._nursery = nursery
            await stage.play(*children, **options)
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartFailed)
    return error


# Start and stop


async def test_a_child_begins_to_start_when_the_one_before_has_started(
    autojump_clock: MockClock, stage: Stage
) -> None:
    for name in "abc":
        stage.scripts[name].start_s = 1.0
    began = trio.current_time()

    await stage.play("a", "b", "c")

    assert stage.diary == ["starts a", "up a", "starts b", "up b", "starts c", "up c"]
    assert trio.current_time() - began == pytest.approx(3.0)


async def test_children_stop_in_reverse_one_after_the_other(
    autojump_clock: MockClock, stage: Stage
) -> None:
    for name in "abc":
        stage.scripts[name].stop_s = 1.0
    await stage.play("a", "b", "c")

    await stage.cell.stop(60.0)

    assert stage.seen("stops", "gone") == [
        "stops c",
        "gone c",
        "stops b",
        "gone b",
        "stops a",
        "gone a",
    ]
    assert stage.exited == ActorExited(name="top")


async def test_a_failed_start_stops_those_already_up_in_reverse(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["c"].start_errors.append(RuntimeError("no such file"))

    await failed_start(stage, "a", "b", "c", "d")

    assert stage.seen("stops") == ["stops b", "stops a"]
    assert stage.alive() == []
    assert "d" not in stage.lives()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no such file"), "RuntimeError: no such file"),
        (ActorFailed("the other died"), "the other died"),
        (OSError(98, "in use", "tcp://x"), "in use: 'tcp://x'"),
    ],
)
async def test_a_failed_start_escalates_with_the_child_and_the_reason(
    autojump_clock: MockClock, stage: Stage, error: Exception, reason: str
) -> None:
    stage.scripts["b"].start_errors.append(error)

    failure = await failed_start(stage, "a", "b")

    assert str(failure).startswith("b did not start: ")
    assert reason in str(failure)


async def test_a_child_that_cannot_even_be_made_counts_as_a_failed_start(
    autojump_clock: MockClock, stage: Stage
) -> None:
    def make() -> Part:
        raise ValueError("no such model")

    failure = await failed_start(stage, "a", ChildSpec(name="b", start=make))

    assert str(failure) == "b did not start: ValueError: no such model"


async def test_a_failed_start_deep_in_the_tree_names_the_child_that_failed(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["device/executor"].start_errors.append(RuntimeError("no memory"))
    device = stage.group("device", "device/allocator", "device/executor")

    failure = await failed_start(stage, "a", device)

    assert str(failure) == "device/executor did not start: RuntimeError: no memory"
    assert stage.alive() == []


async def test_a_child_that_ignores_stop_is_cancelled_after_its_time(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].stop_s = float("inf")
    await stage.play("a", stage.part("b", shutdown_s=3.0), "c")
    began = trio.current_time()

    await stage.cell.stop(60.0)

    assert trio.current_time() - began == pytest.approx(3.0)
    assert stage.seen("gone") == ["gone c", "gone b", "gone a"]


async def test_a_child_that_is_busy_for_ever_is_cancelled_after_its_time(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play(stage.part("a", shutdown_s=3.0))
    await stage.tell("a", Work(seconds=float("inf")))
    began = trio.current_time()

    await stage.cell.stop(60.0)

    assert trio.current_time() - began == pytest.approx(3.0)
    assert stage.alive() == []


async def test_a_stop_while_a_child_starts_is_prompt_and_leaves_nothing(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].start_s = float("inf")

    async def start() -> None:
        with pytest.raises(StartFailed, match="stopped before it had started"):
            await stage.cell.run(stage.supervisor("a", "b", "c"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(start)
        await stage.settle()
        began = trio.current_time()
        await stage.cell.stop(60.0)

    assert trio.current_time() == began
    assert stage.alive() == []
    assert stage.lives() == {"a": 1, "b": 1}


async def test_a_stop_while_a_restart_is_under_way_is_prompt_and_leaves_nothing(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b", "c", strategy=Strategy.ONE_FOR_ALL)
    stage.scripts["b"].start_s = float("inf")
    await stage.tell("c", Crash())
    assert stage.alive() == ["a", "b"]
    began = trio.current_time()

    await stage.cell.stop(60.0)

    assert trio.current_time() == began
    assert stage.alive() == []
    assert stage.lives() == {"a": 2, "b": 2, "c": 1}
    assert stage.exited == ActorExited(name="top")


async def test_a_stop_while_a_restart_is_put_off_is_prompt(
    autojump_clock: MockClock, stage: Stage
) -> None:
    slow = Intensity(restarts=100, backoff_s=1000.0, max_backoff_s=1000.0)
    await stage.play("a", intensity=slow)
    await stage.tell("a", Crash())
    await stage.tell("a", Crash())
    assert stage.alive() == []
    began = trio.current_time()

    await stage.cell.stop(60.0)

    assert trio.current_time() == began


async def test_nothing_is_restarted_after_a_stop(autojump_clock: MockClock, stage: Stage) -> None:
    stage.scripts["a"].stop_s = 5.0
    await stage.play("a", "b")
    await stage.tell("b", Work(seconds=1.0, crash=True))

    await stage.cell.stop(60.0)
    await trio.sleep(1000.0)

    assert stage.alive() == []
    assert stage.lives() == {"a": 1, "b": 1}


async def test_two_children_of_one_name_are_refused(
    autojump_clock: MockClock, stage: Stage
) -> None:
    with pytest.raises(ValueError, match="one name"):
        Supervisor(stage.system, [stage.part("a"), stage.part("a")])


# Restarts


@pytest.mark.parametrize(
    ("restart", "end", "lives"),
    [
        (Restart.PERMANENT, Crash(), 2),
        (Restart.PERMANENT, Leave(), 2),
        (Restart.TRANSIENT, Crash(), 2),
        (Restart.TRANSIENT, Leave(), 1),
        (Restart.TEMPORARY, Crash(), 1),
        (Restart.TEMPORARY, Leave(), 1),
    ],
)
async def test_a_child_is_restarted_as_its_spec_says(
    autojump_clock: MockClock, stage: Stage, restart: Restart, end: Message, lives: int
) -> None:
    await stage.play(stage.part("a", restart=restart))

    await stage.tell("a", end)

    assert stage.lives() == {"a": lives}
    assert stage.alive() == (["a"] if lives == 2 else [])


@pytest.mark.parametrize(
    ("strategy", "stopped", "started"),
    [
        (Strategy.ONE_FOR_ONE, "", "b"),
        (Strategy.REST_FOR_ONE, "dc", "bcd"),
        (Strategy.ONE_FOR_ALL, "dca", "abcd"),
    ],
)
async def test_a_strategy_restarts_whom_it_should_in_order(
    autojump_clock: MockClock, stage: Stage, strategy: Strategy, stopped: str, started: str
) -> None:
    await stage.play("a", "b", "c", "d", strategy=strategy)
    stage.diary.clear()

    await stage.tell("b", Crash())

    assert stage.seen("stops", "up") == [
        *(f"stops {name}" for name in stopped),
        *(f"up {name}" for name in started),
    ]


async def test_a_temporary_sibling_is_stopped_with_the_others_and_stays_so(
    autojump_clock: MockClock, stage: Stage
) -> None:
    temporary = stage.part("b", restart=Restart.TEMPORARY)
    await stage.play("a", temporary, "c", strategy=Strategy.ONE_FOR_ALL)

    await stage.tell("a", Crash())

    assert stage.lives() == {"a": 2, "b": 1, "c": 2}
    assert (await stage.ask(Pause())).done


async def test_a_transient_sibling_is_restarted_with_the_others(
    autojump_clock: MockClock, stage: Stage
) -> None:
    # That it is stopped for this is no orderly end of its own, after which it would stay away.
    transient = stage.part("b", restart=Restart.TRANSIENT)
    await stage.play("a", transient, strategy=Strategy.ONE_FOR_ALL)
    stage.scripts["a"].start_s = 3.0

    await stage.tell("a", Crash())
    reply = await stage.ask(Pause())

    assert stage.lives() == {"a": 2, "b": 2}
    assert [child.name for child in reply.children] == ["a", "b"]


async def test_news_of_an_earlier_life_do_not_end_the_present_one(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a")
    news = Failure(code="ActorFailed", message="long ago")

    for name in ("a", "somebody else"):
        await stage.tell("top", ActorExited(name=name, failure=news))

    assert stage.lives() == {"a": 1}
    assert (await stage.ask(Pause())).done


async def test_siblings_that_fail_together_are_restarted_together_once(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b", "c", strategy=Strategy.ONE_FOR_ALL)

    for name in "ab":
        stage.ref(name).tell_nowait(Crash())
    await stage.settle()

    assert stage.lives() == {"a": 2, "b": 2, "c": 2}


async def test_more_failures_than_are_bearable_stop_all_and_escalate(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b", "c", intensity=Intensity(restarts=2, backoff_s=0.0))
    for _ in range(2):
        await stage.tell("b", Crash())
    stage.diary.clear()

    await stage.tell("b", Crash())

    assert stage.seen("stops") == ["stops c", "stops a"]
    assert stage.exited is not None
    assert stage.exited.failure is not None
    assert isinstance(stage.exited.failure.error(), RestartIntensityReached)
    assert "b failed again after 2 restarts" in stage.exited.failure.message
    assert stage.alive() == []


async def test_a_supervisor_that_gave_up_is_restarted_by_its_own(
    autojump_clock: MockClock, stage: Stage
) -> None:
    fragile = stage.group("group", "a", "b", intensity=Intensity(restarts=0))
    await stage.play(fragile, "c")

    await stage.tell("a", Crash())

    assert stage.lives() == {"group": 2, "a": 2, "b": 2, "c": 1}


async def test_children_of_a_restarted_supervisor_hear_what_they_are_told(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.group("group", "b"), strategy=Strategy.REST_FOR_ONE)

    await stage.tell("a", Crash())

    assert await stage.ref("b").ask(Where()) == "life 2"
    assert (await stage.ask(Pause())).done


async def test_restarts_in_quick_succession_are_put_off_ever_longer(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", intensity=Intensity(restarts=10, backoff_s=1.0, max_backoff_s=100.0))
    times = []
    for _ in range(4):
        began = trio.current_time()
        stage.ref("a").tell_nowait(Crash())
        await stage.ref("a").ask(Where(), timeout=1000.0)
        times.append(trio.current_time() - began)

    assert times == pytest.approx([0.0, 1.0, 2.0, 4.0])


async def test_a_restart_that_fails_is_tried_again(autojump_clock: MockClock, stage: Stage) -> None:
    await stage.play("a")
    stage.scripts["a"].start_errors.extend([RuntimeError("one"), RuntimeError("two")])

    await stage.tell("a", Crash())

    assert stage.lives() == {"a": 4}
    assert stage.alive() == ["a"]


async def test_restarts_that_fail_count_as_failures(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b", intensity=Intensity(restarts=3, backoff_s=0.0))
    stage.scripts["b"].start_errors.extend(RuntimeError("no") for _ in range(9))

    await stage.tell("b", Crash())

    assert stage.exited is not None
    assert stage.exited.failure is not None
    assert stage.exited.failure.code == "RestartIntensityReached"
    assert stage.lives() == {"a": 1, "b": 4}
    assert stage.alive() == []


async def test_those_behind_one_that_fails_to_start_again_are_started_when_it_has(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b", "c", strategy=Strategy.REST_FOR_ONE)
    stage.scripts["b"].start_errors.append(RuntimeError("not yet"))
    stage.diary.clear()

    await stage.tell("a", Crash())

    assert stage.seen("up") == ["up a", "up b", "up c"]
    assert stage.lives() == {"a": 2, "b": 3, "c": 2}


async def test_a_child_that_dies_of_the_mail_it_finds_is_restarted(
    autojump_clock: MockClock, stage: Stage
) -> None:
    # Each life may end before the supervisor has taken note of its start.
    await stage.play("a")
    for _ in range(50):
        stage.ref("a").tell_nowait(Crash())

    await stage.settle()

    assert await stage.ref("a").ask(Where()) == "life 51"
    assert (await stage.ask(Pause())).done


async def test_a_child_that_dies_before_all_are_up_is_restarted_then(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.ref("a").tell_nowait(Crash())
    stage.scripts["b"].start_s = 1.0

    await stage.play("a", "b")

    assert stage.lives() == {"a": 2, "b": 1}


# Verbs


PAUSES: list[Verb] = [Pause(), Suspend(), Stop(), Step()]
PREPARE, COMMIT, CANCEL = (
    UpdateWeights(source="new", version=3, phase=phase) for phase in UpdatePhase
)
GOES_ON: list[Verb] = [Unpause(), Resume()]


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE])
@pytest.mark.parametrize("verb", [*PAUSES, *GOES_ON])
async def test_ordered_children_get_a_verb_one_by_one_down_to_pause_and_up_to_go_on(
    autojump_clock: MockClock, stage: Stage, strategy: Strategy, verb: Verb
) -> None:
    for name in "abc":
        stage.scripts[name].verb_s = 1.0
    await stage.play("a", "b", "c", strategy=strategy)
    stage.diary.clear()
    began = trio.current_time()

    reply = await stage.ask(verb)

    word = type(verb).__name__.lower()
    wanted = [f"{word} {name}" for name in "abc"]
    assert stage.diary == (wanted[::-1] if verb in GOES_ON else wanted)
    assert [child.name for child in reply.children] == ["a", "b", "c"]
    assert trio.current_time() - began == pytest.approx(3.0)


async def test_independent_children_get_a_verb_together(
    autojump_clock: MockClock, stage: Stage
) -> None:
    for name in "abc":
        stage.scripts[name].verb_s = 1.0
    await stage.play("a", "b", "c")

    reply = await stage.ask(Pause())

    assert reply.done
    assert reply.seconds == pytest.approx(1.0)


async def test_acknowledgements_are_merged_with_every_leaf_by_name(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.group("group", "b", "c"))
    for number, name in enumerate("abc", start=1):
        stage.scripts[name].frees = number
    await stage.ask(Pause())

    reply = await stage.ask(Suspend())

    assert [(child.name, child.bytes_freed) for child in reply.children] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
    ]
    assert (reply.verb, reply.state) == ("suspend", State.SUSPENDED)
    assert (reply.bytes_freed, reply.requests) == (6, 3)
    assert reply.done


@pytest.mark.parametrize("phase", UpdatePhase)
async def test_ordered_children_get_each_phase_of_an_update_downwards(
    autojump_clock: MockClock, stage: Stage, phase: UpdatePhase
) -> None:
    group = stage.group("group", "b", strategy=Strategy.ONE_FOR_ALL)
    await stage.play("a", group, "c", strategy=Strategy.REST_FOR_ONE)
    await stage.ask(Pause())
    stage.diary.clear()

    reply = await stage.ask(UpdateWeights(source="new", version=3, phase=phase))

    assert stage.seen(phase) == [f"{phase} {name}" for name in "abc"]
    assert (reply.verb, reply.state, reply.done) == ("update-weights", State.PAUSED, True)
    assert stage.cell.state is State.PAUSED


async def test_a_child_that_cannot_prepare_is_named_with_its_failure(
    autojump_clock: MockClock, stage: Stage
) -> None:
    why = "b: new.safetensors: tensor 'x' is missing"
    stage.scripts["b"].answer = ControlReply(
        verb="update-weights",
        state=State.PAUSED,
        refused=why,
        failure=Failure.of(WeightsError(why)),
    )
    await stage.play(stage.group("group", "a", "b"), "c")

    reply = await stage.ask(PREPARE)

    assert reply.refused == why
    assert reply.failure == Failure.of(WeightsError(why))
    assert [(child.name, child.failure) for child in reply.children] == [
        ("a", ""),
        ("b", why),
        ("c", ""),
    ]


async def test_a_child_that_dies_of_preparing_is_not_asked_again_and_comes_back_as_it_was(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    await stage.ask(Pause())
    stage.scripts["b"].dies_of = UpdateWeights
    stage.diary.clear()

    reply = await stage.ask(PREPARE)
    await stage.settle()

    assert reply.refused == "b: b failed: RuntimeError: ouch"
    assert reply.failure is not None
    assert isinstance(reply.failure.error(), WeightsError)
    assert [entry for entry in stage.seen("prepare", "is", "pause") if entry[-1] == "b"] == [
        "prepare b",
        "is born paused b",
        "pause b",
    ]


async def test_a_child_that_dies_of_committing_comes_back_with_the_new_weights(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    await stage.ask(Pause())
    stage.scripts["b"].dies_of = UpdateWeights
    stage.diary.clear()

    reply = await stage.ask(COMMIT)

    assert reply.done
    assert [entry for entry in stage.diary if entry.endswith(" b")] == [
        "commit b",
        "updateweights b",
        "gone b",
        "starts b",
        "is born paused b",
        "is born with weights 3 in b",
        "up b",
        "pause b",
        "commit b",
        "updateweights b",
    ]


async def test_a_child_restarted_after_an_update_has_the_new_weights_at_any_depth(
    autojump_clock: MockClock, stage: Stage
) -> None:
    fragile = stage.group("group", "a", intensity=Intensity(restarts=0))
    await stage.play(fragile)
    for verb in (Pause(), PREPARE, COMMIT, Unpause()):
        await stage.ask(verb)
    stage.diary.clear()

    await stage.tell("a", Crash())

    assert stage.diary == ["gone a", "starts a", "is born with weights 3 in a", "up a"]
    assert stage.system.cell("a").weights == Weights(source="new", version=3)


async def test_a_child_that_started_while_all_was_updated_and_went_on_follows_paused(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = 5.0
    await stage.tell("b", Crash())
    stage.diary.clear()
    for verb in (Pause(), COMMIT, Unpause()):
        assert (await stage.ask(verb, timeout=1.0)).late == ("b",)

    await trio.sleep(10.0)

    assert [entry for entry in stage.diary if entry.endswith(" b")] == [
        "up b",
        "pause b",
        "commit b",
        "updateweights b",
        "unpause b",
    ]


async def test_what_is_down_need_not_come_up_to_forget_what_it_prepared(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = 5.0
    await stage.tell("b", Crash())

    reply = await stage.ask(CANCEL)

    assert reply.done
    assert reply.seconds < 1.0


async def test_the_steps_of_all_are_added_up_and_told_of_each(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.group("group", "b", "c"))
    for number, name in enumerate("abc", start=1):
        stage.scripts[name].steps = number
    await stage.ask(Pause())

    reply = await stage.ask(Step(count=3))

    assert [(child.name, child.steps) for child in reply.children] == [("a", 1), ("b", 2), ("c", 3)]
    assert (reply.verb, reply.state, reply.steps) == ("step", State.PAUSED, 6)
    assert stage.cell.state is State.PAUSED


async def test_a_child_that_dies_of_a_step_is_paused_and_not_stepped_again(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].dies_of = Step
    await stage.play("a", "b")
    await stage.ask(Pause())

    reply = await stage.ask(Step())

    assert (reply.done, reply.verb, reply.state) == (True, "step", State.PAUSED)
    assert sorted(stage.seen("step")) == ["step a", "step b"]
    assert stage.lives() == {"a": 1, "b": 2}
    assert stage.system.cell("b").state is State.PAUSED


async def test_a_refusal_is_passed_up(autojump_clock: MockClock, stage: Stage) -> None:
    stage.scripts["b"].answer = ControlReply(
        verb="suspend", state=State.RUNNING, refused="pause first"
    )
    await stage.play("a", "b")

    reply = await stage.ask(Suspend())

    assert reply.refused == "pause first"
    assert not reply.done


async def test_an_error_a_child_answers_with_is_a_refusal_that_names_it(
    autojump_clock: MockClock, stage: Stage
) -> None:
    class Rude(Part):
        async def obey(self, verb: Message) -> object:
            return ControlRefused("not now")

    rude = ChildSpec(name="b", start=lambda: Rude(Script(), stage.diary))
    await stage.play("a", rude)

    reply = await stage.ask(Pause())

    assert reply.refused == "b: not now"
    assert stage.exited is None


async def test_those_behind_a_child_that_refuses_are_not_asked(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["a"].answer = ControlReply(
        verb="suspend", state=State.RUNNING, refused="pause first"
    )
    await stage.play("a", "b", strategy=Strategy.REST_FOR_ONE)

    await stage.ask(Suspend())

    assert stage.seen("suspend") == ["suspend a"]


async def test_a_child_that_does_not_answer_is_named_within_the_time(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].deaf = True
    await stage.play("a", "b", "c")
    began = trio.current_time()

    reply = await stage.ask(Pause(), timeout=4.0)

    assert reply.late == ("b",)
    assert [child.name for child in reply.children] == ["a", "c"]
    assert trio.current_time() - began < 4.0


async def test_it_is_the_leaf_that_is_named_not_the_supervisors_above_it(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["c"].deaf = True
    inner = stage.group("inner", "b", "c")
    outer = ChildSpec(name="outer", start=stage.supervisor(inner), shutdown_s=60.0)
    await stage.play("a", outer)

    reply = await stage.ask(Pause(), timeout=1.0)

    assert reply.late == ("c",)


async def test_of_ordered_children_only_the_one_that_holds_things_up_is_named(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    stage.scripts["b"].deaf = True
    await stage.play("a", "b", "c", strategy=Strategy.REST_FOR_ONE)

    reply = await stage.ask(Pause(), timeout=4.0)

    assert reply.late == ("b",)
    assert stage.seen("pause") == ["pause a", "pause b"]


async def test_a_verb_that_takes_longer_than_usual_has_the_time_its_asker_gives_it(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    stage.scripts["b"].verb_s = 500.0
    await stage.play("a", stage.group("group", "b"))

    reply = await stage.ask(Pause(), timeout=1000.0)

    assert reply.done


async def test_a_repeated_verb_reaches_the_child_that_was_late(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].deaf = True
    await stage.play("a", "b")
    await stage.ask(Pause(), timeout=1.0)
    stage.scripts["b"].deaf = False

    reply = await stage.ask(Pause(), timeout=1.0)

    assert reply.done
    assert {child.name for child in reply.children} == {"a", "b"}


async def test_a_child_that_dies_of_a_verb_answers_by_coming_up_as_desired(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["b"].dies_of = Pause
    stage.scripts["b"].start_s = 3.0
    await stage.play("a", "b")
    stage.diary.clear()
    began = trio.current_time()

    reply = await stage.ask(Pause())

    assert reply.done
    assert trio.current_time() - began == pytest.approx(3.0)
    stage.diary.remove("pause a")
    assert stage.seen("pause", "starts", "is", "up")[:4] == [
        "pause b",
        "starts b",
        "is born paused b",
        "up b",
    ]
    assert stage.system.cell("b").state is State.PAUSED


async def test_a_child_that_dies_before_it_reads_a_verb_answers_with_its_next_life(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b")
    await stage.tell("b", Work(seconds=1.0, crash=True))

    reply = await stage.ask(Pause())

    assert reply.done
    assert stage.lives() == {"a": 1, "b": 2}
    assert stage.system.cell("b").state is State.PAUSED


async def test_a_suspend_that_finds_a_child_dying_is_not_answered_by_a_life_half_way(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    # The letter survives its first reader; the next life must be paused before it obeys it.
    await stage.play("a", "b", strategy=Strategy.REST_FOR_ONE)
    await stage.ask(Pause())
    await stage.tell("b", Work(seconds=1.0, crash=True))

    reply = await stage.ask(Suspend())

    assert reply.done
    assert stage.system.cell("b").state is State.SUSPENDED


async def test_a_verb_waits_for_a_child_that_is_being_restarted(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = 3.0
    await stage.tell("b", Crash())
    began = trio.current_time()

    reply = await stage.ask(Pause())

    assert reply.done
    assert trio.current_time() - began == pytest.approx(3.0)


async def test_a_child_that_does_not_come_up_in_time_is_named(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = float("inf")
    await stage.tell("b", Crash())

    reply = await stage.ask(Pause(), timeout=2.0)

    assert reply.late == ("b",)


async def test_a_child_that_ended_for_good_is_not_waited_for(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.part("b", restart=Restart.TEMPORARY))
    await stage.tell("b", Crash())
    began = trio.current_time()

    reply = await stage.ask(Pause())

    assert reply.done
    assert [child.name for child in reply.children] == ["a"]
    assert trio.current_time() == began


async def test_a_verb_stops_waiting_when_its_child_ends_for_good(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.part("b", restart=Restart.TEMPORARY))
    await stage.tell("b", Work(seconds=1.0, crash=True))
    began = trio.current_time()

    reply = await stage.ask(Pause())

    assert reply.done
    assert trio.current_time() - began == pytest.approx(1.0)


async def test_a_stop_does_not_wait_for_a_child_that_is_down(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = float("inf")
    await stage.tell("b", Crash())
    began = trio.current_time()

    reply = await stage.ask(Stop())

    assert reply.done
    assert trio.current_time() == began


async def test_a_child_that_dies_of_a_stop_has_stopped(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].dies_of = Stop
    stage.scripts["b"].start_s = float("inf")

    assert (await stage.ask(Stop())).done


# The desired state


async def test_a_child_restarted_while_paused_is_paused_before_it_counts_as_up(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b", strategy=Strategy.REST_FOR_ONE)
    await stage.ask(Pause())
    stage.diary.clear()

    await stage.tell("a", Crash())

    assert stage.seen("starts", "is", "up", "pause") == [
        "starts a",
        "is born paused a",
        "up a",
        "pause a",
        "starts b",
        "is born paused b",
        "up b",
        "pause b",
    ]


async def test_a_child_restarted_while_suspended_is_told_so_before_it_takes_memory(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a")
    await stage.ask(Pause())
    await stage.ask(Suspend())
    stage.diary.clear()

    await stage.tell("a", Crash())

    assert stage.diary == [
        "gone a",
        "starts a",
        "is born suspended a",
        "up a",
        "pause a",
        "suspend a",
    ]
    assert stage.system.cell("a").state is State.SUSPENDED


async def test_a_supervisor_restarted_while_paused_pauses_each_child_before_the_next_starts(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    fragile = stage.group("group", "a", "b", intensity=Intensity(restarts=0))
    await stage.play(fragile)
    await stage.ask(Pause())
    stage.diary.clear()

    await stage.tell("a", Crash())

    # And once more when the group as a whole is brought to what it should be.
    assert stage.seen("starts", "pause")[:4] == ["starts a", "pause a", "starts b", "pause b"]


async def test_a_child_restarted_after_all_went_on_is_not_held_back(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a")
    for verb in (Pause(), Suspend(), Resume(), Unpause()):
        await stage.ask(verb)
    stage.diary.clear()

    await stage.tell("a", Crash())

    assert stage.diary == ["gone a", "starts a", "up a"]


async def test_a_verb_that_was_given_up_still_holds_for_a_child_that_comes_up_later(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b")
    stage.scripts["b"].start_s = 5.0
    await stage.tell("b", Crash())
    assert (await stage.ask(Pause(), timeout=1.0)).late == ("b",)

    await trio.sleep(10.0)

    assert stage.system.cell("b").state is State.PAUSED


async def test_a_child_born_suspended_gets_its_memory_when_all_went_on_meanwhile(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b")
    for verb in (Pause(), Suspend()):
        await stage.ask(verb)
    stage.scripts["b"].start_s = 5.0
    await stage.tell("b", Crash())
    stage.diary.clear()
    for going_on in (Resume(), Unpause()):
        assert (await stage.ask(going_on, timeout=1.0)).late == ("b",)

    await trio.sleep(10.0)

    assert [entry for entry in stage.diary if entry.endswith(" b")] == [
        "up b",
        "resume b",
        "unpause b",
    ]


async def test_what_is_desired_may_change_while_a_child_is_brought_there(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a")
    await stage.ask(Pause())
    stage.scripts["a"].verb_s = 5.0
    await stage.tell("a", Crash())
    assert (await stage.ask(Unpause(), timeout=1.0)).late == ("a",)

    await trio.sleep(30.0)

    assert stage.system.cell("a").state is State.RUNNING


async def test_a_child_that_cannot_be_brought_to_what_is_desired_counts_as_failed(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", intensity=Intensity(restarts=2, backoff_s=0.0))
    await stage.ask(Pause())
    stage.scripts["a"].answer = ControlReply(verb="pause", state=State.RUNNING, refused="never")

    await stage.tell("a", Crash())

    assert stage.exited is not None
    assert stage.exited.failure is not None
    assert stage.exited.failure.code == "RestartIntensityReached"
    assert stage.alive() == []


async def test_a_child_that_dies_while_it_is_brought_there_does_not_hold_up_repairs(
    autojump_clock: MockClock,
    stage: Stage,
) -> None:
    await stage.play("a", "b")
    await stage.ask(Pause())
    stage.scripts["a"].dies_of = Pause
    began = trio.current_time()

    await stage.tell("a", Crash())
    await stage.tell("b", Crash())

    assert stage.lives() == {"a": 3, "b": 2}
    assert trio.current_time() == began


# Status


async def test_status_tells_of_the_whole_tree(autojump_clock: MockClock, stage: Stage) -> None:
    await stage.play("a", stage.group("group", "b"))
    await stage.tell("b", Crash())
    await stage.ask(Pause())

    node = await stage.node()

    assert [child.name for child in node.children] == ["a", "group"]
    [b] = node.children[1].children
    assert (b.name, b.kind, b.state, b.restarts) == ("b", "Part", State.PAUSED, 1)
    assert node.children[1].state is State.PAUSED
    assert not any(child.late for child in (node, *node.children, b))


async def test_status_tells_of_ends_and_of_the_restarts_that_are_left(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", "b", intensity=Intensity(restarts=3, period_s=60.0, backoff_s=0.0))
    for name in "ab":
        await stage.tell(name, Crash())
    await stage.tell("b", Leave())

    node = await stage.node()

    assert node.restarts_left == 0
    ends = [[end.reason for end in child.ends] for child in node.children]
    assert ends == [["RuntimeError: ouch"], ["RuntimeError: ouch", ""]]
    assert node.children[0].ends[0].at == pytest.approx(time.time(), abs=60.0)
    await trio.sleep(61.0)
    assert (await stage.node()).restarts_left == 3


async def test_status_is_answered_at_once_while_a_verb_waits(
    autojump_clock: MockClock, stage: Stage
) -> None:
    stage.scripts["a"].deaf = True
    await stage.play("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.ask, Pause())
        await stage.settle()
        began = trio.current_time()

        node = await stage.node()

        assert trio.current_time() == began
        assert node.name == "top"


async def test_status_is_answered_at_once_while_a_child_is_restarted(
    autojump_clock: MockClock, stage: Stage
) -> None:
    await stage.play("a", stage.group("group", "b"))
    stage.scripts["b"].start_s = float("inf")
    await stage.tell("b", Crash())
    began = trio.current_time()

    node = await stage.node()

    [b] = node.children[1].children
    assert (b.state, b.restarts) == (State.STARTING, 1)
    assert trio.current_time() == began


async def test_status_is_answered_at_once_while_a_supervisor_is_restarted(
    autojump_clock: MockClock, stage: Stage
) -> None:
    fragile = stage.group("group", "a", intensity=Intensity(restarts=0))
    await stage.play(fragile)
    stage.scripts["a"].start_s = float("inf")
    await stage.tell("a", Crash())
    began = trio.current_time()

    node = await stage.node()

    assert node.children[0].state is State.STARTING
    assert trio.current_time() == began


async def test_status_shows_what_is_known_of_a_child_that_does_not_answer(
    autojump_clock: MockClock, stage: Stage
) -> None:
    class Mute(Supervisor):
        async def obey(self, verb: Message) -> object:
            return self.defer()

    mute = ChildSpec(name="mute", start=lambda: Mute(stage.system, []))
    await stage.play("a", mute)
    began = trio.current_time()

    node = await stage.node()

    assert [child.name for child in node.children] == ["a", "mute"]
    assert node.children[1].state is State.RUNNING
    assert [child.late for child in node.children] == [False, True]
    assert trio.current_time() - began < 3.0
