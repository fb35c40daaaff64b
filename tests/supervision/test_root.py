"""The root as its operators see it: over a connection, with scripted parts below it."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from callboard.actors.actor import Actor, ActorExited
from callboard.actors.ref import LocalRef
from callboard.actors.session import Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import MemoryNetwork
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    GetStatus,
    Pause,
    Resume,
    State,
    StatusReply,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    WeightsLevel,
)
from callboard.messages.errors import (
    ActorStopped,
    DeadlineExceeded,
    Failure,
    RequestError,
    StartFailed,
    WeightsError,
)
from callboard.messages.membership import Role
from callboard.supervision.root import (
    REPLICAS,
    Address,
    FromOperator,
    Root,
    ToOperator,
    reachable,
)
from callboard.supervision.spec import ChildSpec
from callboard.supervision.supervisor import Supervisor

CONTROL = "memory://control"


class Script:
    """What a part does."""

    def __init__(self) -> None:
        self.start_s = 0.0
        self.start_error: Exception | None = None
        self.verb_s = 0.0
        self.stop_s = 0.0
        self.deaf = False
        self.cannot: Verb | None = None
        self.frees = 0
        self.steps = 0
        self.details: dict[str, int | float | str] = {}
        self.abort: AbortReply | Exception = AbortReply(aborted=3)


class Part(Actor[AbortRequests]):
    """A part of the tree that writes down the verbs it obeys."""

    def __init__(self, script: Script, diary: list[Verb]) -> None:
        self._script = script
        self._diary = diary

    async def on_start(self) -> None:
        if self._script.start_error is not None:
            raise self._script.start_error
        await trio.sleep(self._script.start_s)

    async def receive(self, message: AbortRequests) -> object:
        return self._script.abort

    async def on_stopping(self) -> None:
        await trio.sleep(self._script.stop_s)

    async def obey(self, verb: Any) -> object:
        if not isinstance(verb, Verb):
            return await super().obey(verb)
        self._diary.append(verb)
        if verb == self._script.cannot:
            error = WeightsError(f"{self.name}: new.safetensors: no such file")
            return msgspec.structs.replace(
                self.ack(verb), refused=str(error), failure=Failure.of(error)
            )
        if self._script.deaf:
            self.defer()
            return None
        await trio.sleep(self._script.verb_s)
        return self.ack(verb, bytes_freed=self._script.frees, steps=self._script.steps)

    def details(self) -> dict[str, int | float | str]:
        return self._script.details


async def ignore(event: Said | Joined | Left) -> None:
    """Only answers come to an operator."""


class Theatre:
    """A root, its parts and operators."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.network = MemoryNetwork()
        self.scripts: defaultdict[str, Script] = defaultdict(Script)
        self.diary: list[Verb] = []
        self.exited: ActorExited | None = None
        self.ended = trio.Event()
        self.root: Root
        self._nursery = nursery

    def part(self, name: str) -> ChildSpec:
        return ChildSpec(name=name, start=lambda: Part(self.scripts[name], self.diary))

    async def open(self, *children: str | ChildSpec) -> Connection:
        """Begin to start the tree; returns an operator's connection."""
        await self.begin(*children)
        return await self.operator()

    async def begin(self, *children: str | ChildSpec) -> None:
        """Begin to start the tree."""
        specs = [self.part(child) if isinstance(child, str) else child for child in children]
        self.root = Root(
            self.system,
            specs,
            network=self.network,
            control_endpoint=CONTROL,
            address=Address("memory://coordinator"),
            model="a-model",
            version="1.2.3",
            coordinator=LocalRef(self.system.cell("coordinator")),
        )
        await self._nursery.start(self._live)

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        cell = self.system.cell("root")
        self.exited = await cell.run(lambda: self.root, task_status=task_status)
        self.ended.set()

    async def operator(self) -> Connection:
        connection = Connection(
            self.system,
            self.network,
            CONTROL,
            role=Role.OPERATOR,
            name="operator",
            inbox=ToOperator,
            outbox=FromOperator,
            deliver=ignore,
        )
        self._nursery.start_soon(connection.run)
        await connection.wait_welcome()
        return connection

    def alive(self) -> list[str]:
        return [name for name, cell in self.system.cells.items() if cell.actor is not None]

    async def close(self) -> None:
        await self.system.cell("root").stop()
        self._nursery.cancel_scope.cancel()


@pytest.fixture
async def theatre() -> AsyncIterator[Theatre]:
    async with open_system() as system, trio.open_nursery() as nursery:
        opened = Theatre(system, nursery)
        yield opened
        await opened.close()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


async def ask(operator: Connection, verb: Verb, timeout: float = 10.0) -> ControlReply:
    return await operator.ask(verb, timeout=timeout)


async def status(operator: Connection) -> StatusReply:
    return await operator.ask(GetStatus(), timeout=10.0)


# Verbs


async def test_every_verb_is_answered_with_the_state_it_led_to(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    verbs: list[Verb] = [
        Pause(),
        Step(),
        Unpause(),
        Pause(),
        Suspend(),
        Resume(),
        Unpause(),
        Stop(),
    ]

    replies = [await ask(operator, verb) for verb in verbs]

    assert [(reply.verb, str(reply.state)) for reply in replies] == [
        ("pause", "paused"),
        ("step", "paused"),
        ("unpause", "running"),
        ("pause", "paused"),
        ("suspend", "suspended"),
        ("resume", "paused"),
        ("unpause", "running"),
        ("stop", "stopped"),
    ]
    assert all(reply.done for reply in replies)


async def test_a_repeated_verb_is_acknowledged_and_not_relayed(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Pause())

    reply = await ask(operator, Pause())

    assert reply.done
    assert reply.state is State.PAUSED
    assert theatre.diary == [Pause()]


async def test_an_illegal_verb_is_refused_and_not_relayed(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Suspend())
    theatre.diary.clear()

    reply = await ask(operator, Unpause())

    assert reply.refused == "the tree is suspended: resume first"
    assert reply.state is State.SUSPENDED
    assert theatre.diary == []


async def test_a_step_is_relayed_each_time_and_only_while_paused(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].steps = 2
    operator = await theatre.open("a")
    running = await ask(operator, Step())
    await ask(operator, Pause())
    paused = [await ask(operator, Step(count=5)) for _ in range(2)]
    await ask(operator, Suspend())
    suspended = await ask(operator, Step())

    assert running.refused == "the tree is running: pause first"
    assert [(reply.done, reply.steps) for reply in paused] == [(True, 2)] * 2
    assert suspended.refused == "the tree is suspended: resume first"
    assert theatre.diary == [Pause(), Step(count=5), Step(count=5), Suspend()]


async def test_the_tree_is_pausing_while_it_steps(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Pause())
    theatre.scripts["a"].deaf = True

    late = await ask(operator, Step(), timeout=2.0)
    theatre.scripts["a"].deaf = False

    assert (late.late, late.state) == (("a",), State.PAUSING)
    assert (await ask(operator, Pause())).state is State.PAUSED


async def test_suspend_pauses_first_and_says_what_was_freed(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].frees = 100
    operator = await theatre.open("a", "b")
    verb = Suspend(weights=WeightsLevel.DISCARD)

    reply = await ask(operator, verb)

    assert theatre.diary[0::2] == [Pause(), verb]
    assert reply.bytes_freed >= 100
    assert [child.name for child in reply.children] == ["a", "b"]


def update(
    phase: UpdatePhase = UpdatePhase.PREPARE, *, source: str = "new", version: int = 1
) -> UpdateWeights:
    return UpdateWeights(source=source, version=version, phase=phase)


PREPARE, COMMIT, CANCEL = (update(phase) for phase in UpdatePhase)


async def test_new_weights_are_prepared_by_all_and_then_used_by_all(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a", "b")
    running = await ask(operator, update(version=0))
    await ask(operator, Pause())
    theatre.diary.clear()

    done = await ask(operator, update(version=0))
    again = await ask(operator, update())

    assert running.refused == "the tree is running: pause first"
    assert (done.verb, done.state, done.done) == ("update-weights", State.PAUSED, True)
    assert theatre.diary == [PREPARE, PREPARE, COMMIT, COMMIT]
    assert again.done
    shown = await status(operator)
    assert (shown.model, shown.weights_version) == ("new", 1)


@pytest.mark.parametrize("state", [State.PAUSED, State.SUSPENDED])
async def test_weights_that_one_part_cannot_use_are_used_by_none(
    autojump_clock: MockClock, theatre: Theatre, state: State
) -> None:
    operator = await theatre.open("a", "b")
    await ask(operator, Pause() if state is State.PAUSED else Suspend())
    theatre.scripts["b"].cannot = PREPARE
    theatre.diary.clear()

    reply = await ask(operator, PREPARE)

    assert reply.refused == "b: new.safetensors: no such file; weights 0 stay in use"
    assert reply.failure == Failure.of(WeightsError(reply.refused))
    assert reply.state is state
    assert [child.failure for child in reply.children] == ["", "b: new.safetensors: no such file"]
    assert theatre.diary == [PREPARE, PREPARE, CANCEL, CANCEL]
    shown = await status(operator)
    assert (shown.model, shown.weights_version) == ("a-model", 0)
    assert (await ask(operator, Resume())).done
    assert (await ask(operator, Unpause())).done


async def test_weights_that_one_part_has_not_read_in_time_are_used_by_none(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a", "b")
    await ask(operator, Pause())
    theatre.scripts["b"].verb_s = 9.0
    theatre.diary.clear()

    reply = await ask(operator, PREPARE, timeout=10.0)

    assert reply.late == ("b",)
    assert reply.refused == "no answer in time from b; weights 0 stay in use"
    assert theatre.diary[:3] == [PREPARE, PREPARE, CANCEL]
    assert (await ask(operator, Unpause(), timeout=60.0)).done


async def test_a_part_that_is_late_to_use_new_weights_holds_everything_up_until_it_does(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    class LateToCommit(Part):
        async def obey(self, verb: Any) -> object:
            self._script.deaf = verb == COMMIT and not theatre.diary.count(COMMIT)
            return await super().obey(verb)

    late = ChildSpec(name="b", start=lambda: LateToCommit(theatre.scripts["b"], theatre.diary))
    operator = await theatre.open(late)
    await ask(operator, Pause())

    reply = await ask(operator, PREPARE, timeout=5.0)
    held_up = [await ask(operator, verb) for verb in (Unpause(), Step())]
    theatre.diary.clear()
    theatre.diary.append(COMMIT)
    again = await ask(operator, PREPARE)

    assert (reply.late, reply.refused, reply.state) == (("b",), "", State.PAUSED)
    assert {one.refused for one in held_up} == {
        "not all replicas are known to have weights 1: repeat update-weights"
    }
    assert theatre.diary == [COMMIT, COMMIT]
    assert again.done
    assert (await ask(operator, Unpause())).state is State.RUNNING


async def test_a_part_that_cannot_use_what_it_prepared_leads_all_back_to_the_old_weights(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a", "b")
    await ask(operator, Pause())
    theatre.scripts["b"].cannot = COMMIT
    theatre.diary.clear()

    reply = await ask(operator, PREPARE)

    back = update(UpdatePhase.COMMIT, source="a-model", version=0)
    assert reply.refused == "b: new.safetensors: no such file; weights 0 stay in use"
    assert theatre.diary == [PREPARE, PREPARE, COMMIT, COMMIT, back, back]
    assert (await status(operator)).weights_version == 0
    assert (await ask(operator, Unpause())).done


async def test_a_resume_that_one_part_refuses_leaves_the_tree_suspended(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a", "b")
    levels = Suspend(weights=WeightsLevel.DISCARD)
    await ask(operator, levels)
    theatre.scripts["b"].cannot = Resume()
    theatre.diary.clear()

    reply = await ask(operator, Resume())
    theatre.scripts["b"].cannot = None

    assert reply.refused == "b: new.safetensors: no such file"
    assert reply.state is State.SUSPENDED
    assert theatre.diary == [Resume(), Resume(), levels, levels]
    assert (await ask(operator, Resume())).state is State.RUNNING


async def test_a_part_that_is_late_is_named_and_the_verb_can_be_repeated(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].deaf = True
    operator = await theatre.open("a", "b")
    late = await ask(operator, Pause(), timeout=2.0)
    theatre.scripts["b"].deaf = False

    again = await ask(operator, Pause(), timeout=2.0)

    assert (late.late, late.state) == (("b",), State.PAUSING)
    assert (again.late, again.state) == ((), State.PAUSED)


async def test_of_a_verb_in_two_steps_the_second_waits_for_the_first(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].deaf = True
    operator = await theatre.open("a", "b")

    reply = await ask(operator, Suspend(), timeout=2.0)

    assert reply.late == ("b",)
    assert reply.state is State.PAUSING
    assert theatre.diary == [Pause(), Pause()]


async def test_there_is_one_verb_at_a_time(autojump_clock: MockClock, theatre: Theatre) -> None:
    theatre.scripts["a"].verb_s = 5.0
    operator = await theatre.open("a")
    other = await theatre.operator()
    replies: dict[str, ControlReply] = {}

    async def send(name: str, connection: Connection, verb: Verb) -> None:
        replies[name] = await ask(connection, verb, timeout=60.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, "first", operator, Pause())
        await trio.sleep(1.0)
        nursery.start_soon(send, "second", other, Unpause())

    assert theatre.diary == [Pause(), Unpause()]
    assert replies["first"].state is State.PAUSED
    assert replies["second"].state is State.RUNNING
    assert replies["second"].seconds == pytest.approx(9.0)


async def test_a_verb_whose_turn_does_not_come_is_late_and_never_has_an_effect(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].verb_s = 5.0
    operator = await theatre.open("a")
    other = await theatre.operator()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, operator, Pause(), 60.0)
        await trio.sleep(1.0)

        late = await ask(other, Unpause(), timeout=2.0)

    await trio.sleep(60.0)
    assert late.late == ("root",)
    assert theatre.diary == [Pause()]
    assert (await status(operator)).state is State.PAUSED


async def test_a_verb_sent_while_the_tree_starts_waits_for_that(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = 5.0
    operator = await theatre.open("a", "b")

    reply = await ask(operator, Pause())

    assert reply.done
    assert reply.seconds == pytest.approx(5.0)
    assert reply.state is State.PAUSED


async def test_a_verb_that_the_start_outlasts_is_late_and_never_has_an_effect(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = 5.0
    operator = await theatre.open("a", "b")

    reply = await ask(operator, Pause(), timeout=2.0)

    await trio.sleep(60.0)
    assert reply.late == ("root",)
    assert reply.state is State.STARTING
    assert (await status(operator)).state is State.RUNNING
    assert theatre.diary == []


async def test_a_stop_does_not_wait_for_the_start(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = 5.0
    operator = await theatre.open("a", "b")

    reply = await ask(operator, Stop())

    await trio.sleep(60.0)
    assert reply.done
    assert reply.seconds < 0.5
    assert (await status(operator)).state is State.STOPPED


# Stop


async def test_after_stop_only_stop_is_not_refused(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Stop())

    refused = await ask(operator, Pause())
    again = await ask(operator, Stop())

    assert refused.refused == "the tree is stopped"
    assert again.done
    assert again.state is State.STOPPED


async def test_who_runs_the_root_hears_of_a_stop_when_it_has_been_answered(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Pause())
    assert not theatre.root.stopped_by_verb.is_set()

    await ask(operator, Stop())

    assert theatre.root.stopped_by_verb.is_set()


async def test_operators_are_answered_while_the_children_of_a_stopped_tree_end(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["coordinator"].stop_s = theatre.scripts["inner"].stop_s = 3.0
    nest = ChildSpec(name="nest", start=lambda: Supervisor(theatre.system, [theatre.part("inner")]))
    operator = await theatre.open("coordinator", nest)
    await ask(operator, Stop())
    began = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(theatre.root.end_children)
        for second in range(6):
            await trio.sleep_until(began + second + 0.5)
            assert (await ask(operator, Stop())).state is State.STOPPED
            assert (await ask(operator, Pause())).refused == "the tree is stopped"
            assert (await status(operator)).state is State.STOPPED
            assert await operator.ask(AbortRequests(all=True), timeout=9) == AbortReply(aborted=0)
            assert trio.current_time() == began + second + 0.5
    assert theatre.alive() == ["root"]


async def test_a_stop_of_which_a_part_is_late_does_not_count_as_stopped(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].deaf = True
    operator = await theatre.open("a")

    reply = await ask(operator, Stop(), timeout=2.0)

    assert reply.state is State.STOPPING
    assert not theatre.root.stopped_by_verb.is_set()


async def test_requests_get_their_time_to_drain(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")

    await ask(operator, Stop(drain_s=30.0))

    assert theatre.diary == [Stop(drain_s=30.0)]


async def test_requests_that_cannot_run_get_no_time_to_drain(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")
    await ask(operator, Pause())

    await ask(operator, Stop(drain_s=30.0))

    assert theatre.diary[-1] == Stop(drain_s=0.0)


# Status


async def test_status_is_answered_at_once_while_the_tree_starts(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    group = ChildSpec(
        name=REPLICAS, start=lambda: Supervisor(theatre.system, [theatre.part("replica-0")])
    )
    theatre.scripts["replica-0"].start_s = float("inf")
    operator = await theatre.open("a", group)
    began = trio.current_time()

    reply = await status(operator)

    assert reply.state is State.STARTING
    assert [(child.name, child.state) for child in reply.tree.children] == [
        ("a", State.RUNNING),
        (REPLICAS, State.STARTING),
    ]
    assert [(one.name, one.state) for one in reply.replicas] == [("replica-0", State.STARTING)]
    assert trio.current_time() - began < 0.5


async def test_status_is_answered_at_once_while_a_verb_is_under_way(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].verb_s = 50.0
    operator = await theatre.open("a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, operator, Pause(), 100.0)
        await trio.sleep(1.0)
        began = trio.current_time()

        reply = await status(operator)

        assert trio.current_time() - began < 0.5
        assert reply.state is State.PAUSING
        nursery.cancel_scope.cancel()


async def test_status_says_what_this_is(autojump_clock: MockClock, theatre: Theatre) -> None:
    operator = await theatre.open("a")
    await theatre.root.started.wait()

    reply = await status(operator)

    assert (reply.model, reply.version) == ("a-model", "1.2.3")
    assert reply.endpoint == "memory://coordinator"
    assert reply.tree.name == "root"
    assert reply.tree.state is State.RUNNING


async def test_status_sums_up_each_replica(autojump_clock: MockClock, theatre: Theatre) -> None:
    names = ["replica-0", "replica-1"]

    def replicas() -> Supervisor:
        specs = [
            ChildSpec(name=name, start=lambda name=name: replica(name))  # type: ignore[misc]
            for name in names
        ]
        return Supervisor(theatre.system, specs)

    def replica(name: str) -> Supervisor:
        parts = [theatre.part(f"{name}/scheduler"), theatre.part(f"{name}/kv_allocator")]
        return Supervisor(theatre.system, parts)

    theatre.scripts["replica-1/scheduler"].details = {"steps": 7, "running": 2, "waiting": 3}
    theatre.scripts["replica-1/kv_allocator"].details = {"blocks_total": 10, "blocks_free": 4}
    operator = await theatre.open("a", ChildSpec(name=REPLICAS, start=replicas))
    await theatre.root.started.wait()

    reply = await status(operator)

    assert [one.name for one in reply.replicas] == names
    second = reply.replicas[1]
    assert (second.steps, second.running, second.waiting, second.paused) == (7, 2, 3, 0)
    assert (second.blocks_total, second.blocks_free) == (10, 4)
    assert second.state is State.RUNNING


# Abort


async def test_abort_is_the_coordinators_affair(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("coordinator")

    reply = await operator.ask(AbortRequests(all=True), timeout=5.0)

    assert reply.aborted == 3


async def test_an_error_of_abort_comes_back_as_it_is(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["coordinator"].abort = RequestError(
        "say which", field="request_id", allowed="one id"
    )
    operator = await theatre.open("coordinator")

    with pytest.raises(RequestError, match="say which") as caught:
        await operator.ask(AbortRequests(), timeout=5.0)

    assert (caught.value.field, caught.value.allowed) == ("request_id", "one id")


async def test_abort_without_a_coordinator_that_answers_is_late(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    operator = await theatre.open("a")

    with pytest.raises(DeadlineExceeded):
        await operator.ask(AbortRequests(all=True), timeout=5.0)


# Where it is


@pytest.mark.parametrize(
    ("control_endpoint", "found_at", "wanted"),
    [
        ("tcp://0.0.0.0:9", "tcp://example.org:7500", "tcp://example.org:9"),
        ("tcp://[::]:9", "tcp://[fe80::1]:7500", "tcp://[fe80::1]:9"),
        ("tcp://127.0.0.1:9", "tcp://localhost:7500", "tcp://127.0.0.1:9"),
        ("ipc:///run/a.control", "ipc:///run/a", "ipc:///run/a.control"),
    ],
)
def test_a_client_sends_verbs_to_the_host_where_it_found_the_server(
    control_endpoint: str, found_at: str, wanted: str
) -> None:
    assert reachable(control_endpoint, beside=found_at) == wanted


# How it ends


async def test_a_tree_that_does_not_start_ends_in_good_order_and_says_why(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_error = RuntimeError("no such model")

    await theatre.begin("a", "b", "c")
    await theatre.ended.wait()

    failure = theatre.root.start_failure
    assert isinstance(failure, StartFailed)
    assert str(failure) == "b did not start: RuntimeError: no such model"
    assert theatre.exited == ActorExited(name="root")
    assert not theatre.root.started.is_set()
    assert theatre.alive() == []


async def test_a_part_that_fails_while_later_ones_start_is_restarted_meanwhile(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = 100.0
    await theatre.begin("a", "b")
    await trio.sleep(10.0)

    theatre.system.cell("a").cancel("a failure")
    await trio.sleep(10.0)

    assert theatre.system.cell("a").lives == 2
    assert "a" in theatre.alive()
    assert not theatre.root.started.is_set()
    await theatre.root.started.wait()


async def test_a_part_that_cannot_be_repaired_while_later_ones_start_is_the_end(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = float("inf")
    await theatre.begin("a", "b")
    await trio.sleep(10.0)
    theatre.scripts["a"].start_error = RuntimeError("never again")

    theatre.system.cell("a").cancel("a failure")
    with trio.fail_after(100.0):
        await theatre.ended.wait()

    assert theatre.exited is not None
    assert theatre.exited.failure is not None
    assert theatre.exited.failure.code == "RestartIntensityReached"
    assert not theatre.root.started.is_set()
    assert theatre.alive() == []


async def test_a_stop_while_the_tree_starts_is_prompt_and_leaves_nothing(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["b"].start_s = float("inf")
    await theatre.open("a", "b", "c")
    began = trio.current_time()

    await theatre.system.cell("root").stop(60.0)

    assert trio.current_time() - began < 0.5
    assert theatre.exited == ActorExited(name="root")
    assert theatre.root.start_failure is None
    assert theatre.alive() == []


async def test_a_tree_that_cannot_be_repaired_fails(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    await theatre.open("a")
    theatre.scripts["a"].start_error = RuntimeError("never again")
    theatre.system.cell("a").cancel("a failure")

    await theatre.ended.wait()

    assert theatre.exited is not None
    assert theatre.exited.failure is not None
    assert theatre.exited.failure.code == "RestartIntensityReached"
    assert theatre.alive() == []


async def test_operators_hear_at_once_that_the_tree_has_ended(
    autojump_clock: MockClock, theatre: Theatre
) -> None:
    theatre.scripts["a"].verb_s = 1000.0
    operator = await theatre.open("a")
    began = trio.current_time()

    async def end() -> None:
        await trio.sleep(1.0)
        await theatre.system.cell("root").stop(5.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        with pytest.raises(ActorStopped):
            await ask(operator, Pause(), timeout=500.0)

    assert trio.current_time() - began < 30.0
