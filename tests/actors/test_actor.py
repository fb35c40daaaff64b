import itertools
import random
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Actor, ActorExited, Cell, StopActor, start_in_order
from callboard.actors.mailbox import Overflow, Reply
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.messages.base import Call, Message
from callboard.messages.control import (
    GetNode,
    Pause,
    Resume,
    State,
    Stop,
    Suspend,
    Unpause,
    Verb,
)
from callboard.messages.errors import (
    ActorFailed,
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    OutOfBlocks,
    StartFailed,
)


class Add(Message, frozen=True):
    number: int


class Total(Call[int], frozen=True):
    pass


class Hold(Call[str], frozen=True):
    """Kept in hand until the gate opens."""


class Later(Call[str], frozen=True):
    """Answered when Release comes."""


class Release(Message, frozen=True):
    pass


class Break(Call[None], frozen=True):
    """Ends the life."""


class BreakOnce(Call[str], frozen=True):
    """Ends the first life that reads it, and is answered by the next."""


class BreakAlways(Call[str], frozen=True):
    pass


class DeferAndBreakOnce(Call[str], frozen=True):
    pass


Mail = Add | Total | Hold | Later | Release | Break | BreakOnce | BreakAlways | DeferAndBreakOnce


class Sum(msgspec.Struct, frozen=True):
    total: int


class Adder(Actor[Mail]):
    """Adds up numbers, and fails, waits or defers when told to."""

    retry_safe = (BreakOnce, BreakAlways, DeferAndBreakOnce)

    def __init__(self) -> None:
        self.total = 0
        self.gate = trio.Event()
        self.later: list[Reply] = []
        self.calls: list[str] = []

    async def on_start(self) -> None:
        self.calls.append("on_start")

    async def on_stop(self) -> None:
        self.calls.append("on_stop")

    def snapshot(self) -> Sum:
        return Sum(self.total)

    def restore(self, snapshot: msgspec.Struct) -> None:
        assert isinstance(snapshot, Sum)
        self.calls.append("restore")
        self.total = snapshot.total

    def details(self) -> dict[str, int | float | str]:
        return {"total": self.total}

    async def receive(self, message: Mail) -> object:
        match message:
            case Add():
                self.total += message.number
            case Total():
                return self.total
            case Hold():
                await self.gate.wait()
                return "held"
            case Later():
                self.later.append(self.defer())
            case Release():
                for reply in self.later:
                    reply.send("released")
            case BreakOnce() | DeferAndBreakOnce() if self.cell.lives > 1:
                return f"second try at {self.total}"
            case DeferAndBreakOnce():
                self.later.append(self.defer())
                raise ValueError("broken")
            case Break() | BreakOnce() | BreakAlways():
                raise ValueError("broken")
        return None


class Stage:
    """A cell, the actors that have lived in it, and what became of asks in the background."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.nursery = nursery
        self.cell = system.cell("adder")
        self.ref: LocalRef[Any] = LocalRef(self.cell)
        self.exits: list[ActorExited] = []
        self.answers: list[object] = []
        self.errors: list[CallboardError] = []

    async def play(self, factory: Callable[[], Actor[Any]] = Adder, **options: Any) -> Any:
        """Start a life; returns the actor."""
        await self.nursery.start(partial(self._live, factory, options))
        return self.cell.actor

    async def _live(
        self,
        factory: Callable[[], Actor[Any]],
        options: dict[str, Any],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        self.exits.append(await self.cell.run(factory, task_status=task_status, **options))

    async def tell(self, *messages: Message) -> None:
        """Queue messages and let the actor do with them what it can."""
        for message in messages:
            self.ref.tell_nowait(message)
        await wait_all_tasks_blocked()

    async def ask(self, *calls: Call[Any]) -> None:
        """Start asks, in this order, and let each get as far as it can."""
        for call in calls:
            self.nursery.start_soon(self._ask, call)
            await wait_all_tasks_blocked()

    async def _ask(self, call: Call[Any]) -> None:
        try:
            self.answers.append(await self.ref.ask(call))
        except CallboardError as error:
            self.errors.append(error)

    def dead(self) -> dict[tuple[str, str], int]:
        return dict(self.system.dead_letters.counts)


class Watcher(Actor[ActorExited]):
    def __init__(self) -> None:
        self.seen: list[ActorExited] = []

    async def receive(self, message: ActorExited) -> None:
        self.seen.append(message)


@pytest.fixture
async def system() -> AsyncGenerator[ActorSystem, None]:
    async with open_system() as system:
        yield system


@pytest.fixture
async def stage(system: ActorSystem, nursery: trio.Nursery) -> Stage:
    return Stage(system, nursery)


@pytest.fixture
async def watcher(system: ActorSystem, nursery: trio.Nursery) -> Watcher:
    watching = Watcher()
    await nursery.start(system.cell("watcher").run, lambda: watching)
    return watching


# Handling messages


async def test_messages_are_handled_one_after_the_other(stage: Stage) -> None:
    adder = await stage.play()
    await stage.ask(Hold())
    await stage.tell(Add(1), Add(2))
    assert adder.total == 0  # the first message is still in hand

    adder.gate.set()
    await wait_all_tasks_blocked()

    assert adder.total == 3
    assert stage.answers == ["held"]


async def test_a_deferred_answer_is_given_later_and_the_actor_goes_on_meanwhile(
    stage: Stage,
) -> None:
    adder = await stage.play()
    await stage.ask(Later())
    await stage.tell(Add(5))
    assert (stage.answers, adder.total) == ([], 5)

    await stage.tell(Release())

    assert stage.answers == ["released"]


async def test_tasks_that_were_started_in_order_stand_in_line_in_order() -> None:
    for _ in range(30):  # trio turns the order of what it begins together round, or does not
        line = trio.Lock()
        served: list[int] = []

        async def be_served(number: int, line: trio.Lock, served: list[int]) -> None:
            async with line:
                await trio.lowlevel.checkpoint()
                served.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                await start_in_order(nursery, be_served, number, line, served)

        assert served == [0, 1, 2]


async def test_a_message_that_was_told_may_be_deferred_like_one_that_was_asked(
    stage: Stage,
) -> None:
    await stage.play()
    await stage.tell(Later(), Release())

    assert await stage.ref.ask(Total()) == 0


async def test_an_urgent_message_is_handled_after_the_one_in_hand_whatever_waits(
    stage: Stage,
) -> None:
    handled: list[str] = []

    class Recorder(Actor[Add | Hold]):
        gate = trio.Event()

        async def receive(self, message: Add | Hold) -> None:
            handled.append(type(message).__name__)
            await self.gate.wait()

        async def on_pause(self, verb: Pause) -> None:
            handled.append("Pause")

    await stage.play(Recorder)
    await stage.tell(*(Add(number) for number in range(900)))
    await stage.tell(Pause())
    Recorder.gate.set()
    await wait_all_tasks_blocked()

    assert handled[:3] == ["Add", "Pause", "Add"]
    assert len(handled) == 901


async def test_a_backlog_does_not_keep_others_from_running(stage: Stage) -> None:
    adder = await stage.play()
    seen = []

    async def look() -> None:
        while adder.total < 900:
            seen.append(adder.total)
            await trio.lowlevel.checkpoint()

    for _ in range(900):
        stage.ref.tell_nowait(Add(1))
    await look()

    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert 0 < max(steps) <= 2 * 64  # trio shuffles, so two turns may come together


# Answers when an actor dies


async def test_an_actor_that_dies_answers_the_asker_it_dies_of(stage: Stage) -> None:
    await stage.play()

    with pytest.raises(ActorFailed, match="adder failed: ValueError: broken"):
        await stage.ref.ask(Break())

    assert stage.cell.state is State.FAILED
    assert stage.dead() == {("poison", "Break"): 1}


async def test_an_actor_that_dies_answers_those_it_deferred(stage: Stage) -> None:
    await stage.play()
    await stage.ask(Later(), Later(), Break())

    assert [type(error) for error in stage.errors] == [ActorFailed] * 3


async def test_an_actor_that_stops_answers_those_it_deferred(stage: Stage) -> None:
    await stage.play()
    await stage.ask(Later(), Later())

    await stage.cell.stop()
    await wait_all_tasks_blocked()

    assert [type(error) for error in stage.errors] == [ActorStopped] * 2


async def test_deferred_answers_can_still_be_given_while_stopping(stage: Stage) -> None:
    class LastWord(Adder):
        async def on_stop(self) -> None:
            for reply in self.later:
                reply.send("bye")

    await stage.play(LastWord)
    await stage.ask(Later(), Break())

    assert stage.answers == ["bye"]


async def test_a_failure_is_logged_with_its_exception(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.play()
    await stage.tell(Break())

    [record] = caplog.records

    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    assert (record.levelname, record.getMessage()) == ("ERROR", "actor failed")
    assert record.__dict__["failure"] == "ValueError: broken"


async def test_an_error_of_ours_is_logged_without_a_traceback(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    class Broke(Actor[Add]):
        async def receive(self, message: Add) -> None:
            raise OutOfBlocks("no block left")

    await stage.play(Broke)
    await stage.tell(Add(1))

    [record] = caplog.records
    assert not record.exc_info
    assert record.__dict__["failure"] == "no block left"


async def test_an_error_of_ours_keeps_its_name_in_the_exit(stage: Stage) -> None:
    class Broke(Actor[Add]):
        async def receive(self, message: Add) -> None:
            raise OutOfBlocks("no block left")

    await stage.play(Broke)
    await stage.tell(Add(1))

    [exited] = stage.exits
    assert exited.failure is not None
    assert isinstance(exited.failure.error(), OutOfBlocks)


# Mail between lives


async def test_unread_mail_is_read_by_the_next_life(stage: Stage) -> None:
    await stage.play()
    await stage.tell(Break(), Add(1), Add(2))
    assert stage.cell.mailbox.statistics().depth == 2

    adder = await stage.play()
    await wait_all_tasks_blocked()

    assert adder.total == 3


async def test_mail_may_be_sent_before_the_first_life(stage: Stage) -> None:
    await stage.tell(Add(1))

    adder = await stage.play()
    await wait_all_tasks_blocked()

    assert adder.total == 1


async def test_asks_that_wait_between_lives_are_answered_by_the_next(stage: Stage) -> None:
    await stage.play()
    await stage.tell(Break())
    await stage.ask(Total())
    assert stage.answers == []

    await stage.play()
    await wait_all_tasks_blocked()

    assert stage.answers == [0]


async def test_closing_answers_every_ask_that_waits(stage: Stage) -> None:
    await stage.play()
    await stage.ask(Break(), Total(), Total())
    await stage.tell(Add(1))

    stage.cell.close()
    await wait_all_tasks_blocked()

    assert [type(error) for error in stage.errors] == [ActorFailed, ActorStopped, ActorStopped]
    assert stage.dead() == {
        ("poison", "Break"): 1,
        ("stopped", "Total"): 2,
        ("stopped", "Add"): 1,
    }


async def test_closing_twice_buries_nothing_twice(stage: Stage) -> None:
    await stage.tell(Add(1))
    stage.cell.close()
    stage.cell.close()

    assert stage.dead() == {("stopped", "Add"): 1}


async def test_the_class_says_how_much_mail_waits_and_what_happens_to_more(stage: Stage) -> None:
    class Small(Adder):
        capacity = 3
        overflow = Overflow.SHED

    await stage.play(Small)

    assert stage.cell.mailbox.capacity == 3
    assert stage.cell.mailbox.overflow is Overflow.SHED


# Retrying the message in hand


async def test_a_message_is_not_tried_again_unless_that_is_safe(stage: Stage) -> None:
    await stage.play()
    await stage.ask(Break())

    await stage.play()
    await wait_all_tasks_blocked()

    assert len(stage.exits) == 1
    assert len(stage.errors) == 1


async def test_a_retry_safe_message_is_handled_by_the_next_life_before_all_others(
    stage: Stage,
) -> None:
    await stage.play()
    await stage.ask(BreakOnce())
    await stage.tell(Add(1))
    assert (stage.answers, stage.errors) == ([], [])

    adder = await stage.play()
    await wait_all_tasks_blocked()

    assert stage.answers == ["second try at 0"]
    assert adder.total == 1
    assert stage.dead() == {}


async def test_a_message_that_ends_two_lives_is_put_aside_as_poison(stage: Stage) -> None:
    await stage.play()
    await stage.ask(BreakAlways())
    await stage.play()
    await wait_all_tasks_blocked()

    [error] = stage.errors
    assert isinstance(error, ActorFailed)
    assert stage.dead() == {("poison", "BreakAlways"): 1}
    await stage.play()
    assert await stage.ref.ask(Total()) == 0


async def test_a_deferred_message_that_is_tried_again_can_still_be_answered(stage: Stage) -> None:
    await stage.play()
    await stage.ask(DeferAndBreakOnce())
    await stage.play()
    await wait_all_tasks_blocked()

    assert (stage.answers, stage.errors) == (["second try at 0"], [])


async def test_a_message_held_when_another_task_fails_may_be_retried_too(stage: Stage) -> None:
    class Fragile(Actor[BreakOnce]):
        retry_safe = (BreakOnce,)

        async def receive(self, message: BreakOnce) -> str:
            if self.cell.lives == 1:
                self.spawn(fail)
                await trio.sleep_forever()
            return "second try"

    await stage.play(Fragile)
    await stage.ask(BreakOnce())
    await stage.play(Fragile)
    await wait_all_tasks_blocked()

    assert stage.answers == ["second try"]


async def test_after_closing_nothing_is_tried_again_and_the_asker_is_told(stage: Stage) -> None:
    class ClosedUnderneath(Adder):
        async def receive(self, message: Mail) -> object:
            self.cell.close()
            raise ValueError("broken")

    await stage.play(ClosedUnderneath)
    await stage.ask(BreakOnce())

    [error] = stage.errors
    assert isinstance(error, ActorFailed)
    assert stage.cell.mailbox.statistics().depth == 0


# State that survives


async def test_the_state_of_a_failed_life_is_restored_before_the_next_starts(stage: Stage) -> None:
    await stage.play()
    await stage.tell(Add(3), Break())

    adder = await stage.play()

    assert adder.total == 3
    assert adder.calls == ["restore", "on_start"]


async def test_an_orderly_end_leaves_no_state(stage: Stage) -> None:
    await stage.play()
    await stage.tell(Add(3))
    await stage.cell.stop()

    adder = await stage.play()

    assert (adder.total, adder.calls) == (0, ["on_start"])


async def test_a_snapshot_is_restored_once(stage: Stage) -> None:
    await stage.play()
    await stage.tell(Add(3), Break())
    await stage.play()
    await stage.cell.stop()

    assert (await stage.play()).total == 0


async def test_an_actor_without_a_snapshot_begins_anew(stage: Stage) -> None:
    class Forgetful(Adder):
        def snapshot(self) -> None:  # type: ignore[override]  # nothing to keep
            return None

    await stage.play(Forgetful)
    await stage.tell(Add(3), Break())

    assert (await stage.play()).calls == ["on_start"]


async def test_a_snapshot_that_fails_does_not_hide_the_failure_before_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    class Confused(Adder):
        def snapshot(self) -> Sum:
            raise RuntimeError("what was the total?")

    await stage.play(Confused)
    await stage.ask(Later(), Break())

    assert [type(error) for error in stage.errors] == [ActorFailed, ActorFailed]
    assert stage.cell.stopped.is_set()
    assert "snapshot failed" in caplog.messages
    assert (await stage.play()).calls == ["on_start"]


async def test_a_snapshot_survives_a_start_that_fails(stage: Stage) -> None:
    class NotNow(Adder):
        async def on_start(self) -> None:
            raise OSError("the device is busy")

    def no_actor() -> Adder:
        raise OSError("the model file is gone")

    await stage.play()
    await stage.tell(Add(3), Break())
    for factory in (NotNow, no_actor):
        with pytest.raises(OSError, match=r"busy|gone"):
            await stage.play(factory)

    assert (await stage.play()).total == 3


async def test_a_snapshot_that_cannot_be_restored_is_dropped(stage: Stage) -> None:
    class Picky(Adder):
        def restore(self, snapshot: msgspec.Struct) -> None:
            raise ValueError("no such total")

    await stage.play()
    await stage.tell(Add(3), Break())
    with pytest.raises(ValueError, match="no such total"):
        await stage.play(Picky)

    await stage.play(Picky)


# Starting


async def test_a_start_takes_until_on_start_returns(stage: Stage) -> None:
    ready = trio.Event()

    class Slow(Adder):
        async def on_start(self) -> None:
            assert self.cell.state is State.STARTING
            await ready.wait()

    async with trio.open_nursery() as starter:
        starter.start_soon(stage.play, Slow)
        await wait_all_tasks_blocked()
        assert stage.cell.state is State.STARTING
        ready.set()

    assert stage.cell.status().state is State.RUNNING


async def test_mail_is_read_only_after_the_start(stage: Stage) -> None:
    class Slow(Adder):
        async def on_start(self) -> None:
            await wait_all_tasks_blocked()
            assert self.total == 0

    await stage.tell(Add(1))
    adder = await stage.play(Slow)
    await wait_all_tasks_blocked()

    assert adder.total == 1


async def test_an_actor_may_start_in_a_state_of_its_own(stage: Stage) -> None:
    class StartsPaused(Adder):
        async def on_start(self) -> None:
            self.ack(Pause())

    await stage.play(StartsPaused)

    assert stage.cell.state is State.PAUSED


class StartsBadly(Adder):
    async def on_start(self) -> None:
        self.calls.append("on_start")
        raise OSError("the device is busy")


async def test_a_failed_start_raises_what_on_start_raised_in_the_starter(stage: Stage) -> None:
    with pytest.raises(OSError, match="the device is busy"):
        await stage.play(StartsBadly)

    assert stage.cell.state is State.FAILED
    assert stage.cell.actor is None
    assert stage.cell.stopped.is_set()


async def test_a_failed_start_raises_what_a_task_of_it_raised(stage: Stage) -> None:
    class SpawnsBadly(Adder):
        async def on_start(self) -> None:
            self.spawn(fail)
            await trio.sleep_forever()

    with pytest.raises(ValueError, match="a task failed"):
        await stage.play(SpawnsBadly)


async def test_an_actor_that_did_not_start_cleans_up(stage: Stage) -> None:
    actor = StartsBadly()
    with pytest.raises(OSError, match="the device is busy"):
        await stage.play(lambda: actor)

    assert actor.calls == ["on_start", "on_stop"]


async def test_a_failed_start_leaves_the_mail_and_tells_the_watchers(
    stage: Stage, system: ActorSystem, watcher: Watcher
) -> None:
    stage.cell.watch(watcher.ref)
    await stage.ask(Total())
    with pytest.raises(OSError, match="the device is busy"):
        await stage.play(StartsBadly)
    await wait_all_tasks_blocked()

    [exited] = watcher.seen
    assert exited.failure is not None
    assert exited.failure.message == "OSError: the device is busy"
    await stage.play()
    await wait_all_tasks_blocked()
    assert stage.answers == [0]


# Stopping


async def test_stopping_finishes_the_message_in_hand_and_leaves_the_rest(stage: Stage) -> None:
    adder = await stage.play()
    await stage.ask(Hold())
    await stage.tell(Add(1))
    async with trio.open_nursery() as stopper:
        stopper.start_soon(stage.cell.stop)
        await wait_all_tasks_blocked()
        assert not stage.cell.stopped.is_set()
        adder.gate.set()

    assert stage.answers == ["held"]
    assert adder.total == 0
    assert adder.calls == ["on_start", "on_stop"]
    assert stage.cell.state is State.STOPPED
    assert stage.cell.mailbox.statistics().depth == 1


async def test_a_stopped_actor_reports_an_orderly_end(stage: Stage) -> None:
    await stage.play()
    await stage.cell.stop()
    await wait_all_tasks_blocked()

    assert stage.exits == [ActorExited(name="adder")]


async def test_an_actor_that_does_not_stop_in_time_is_cancelled(
    stage: Stage, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    adder = await stage.play()
    await stage.ask(Hold(), Later())

    await stage.cell.stop(timeout=3.0)

    assert trio.current_time() == 3.0
    assert adder.calls == ["on_start", "on_stop"]
    await wait_all_tasks_blocked()
    assert [type(error) for error in stage.errors] == [ActorStopped]
    assert stage.exits == [ActorExited(name="adder")]
    assert stage.dead() == {("stopped", "Hold"): 1}
    assert "actor did not stop in time" in caplog.messages


async def test_on_stop_may_wait_although_the_actor_is_cancelled_but_not_for_ever(
    stage: Stage, autojump_clock: MockClock
) -> None:
    class Lingers(Adder):
        async def on_stop(self) -> None:
            await trio.sleep(1.0)
            self.calls.append("flushed")
            await trio.sleep_forever()

    lingering = await stage.play(Lingers, stop_timeout=2.0)
    await stage.ask(Hold())

    await stage.cell.stop(timeout=3.0)

    assert lingering.calls == ["on_start", "flushed"]
    assert trio.current_time() == 5.0


async def test_an_exception_in_on_stop_is_a_failure(stage: Stage) -> None:
    class LeavesBadly(Adder):
        async def on_stop(self) -> None:
            raise OSError("the disk is full")

    await stage.play(LeavesBadly)
    await stage.cell.stop()
    await wait_all_tasks_blocked()

    [exited] = stage.exits
    assert exited.failure is not None
    assert exited.failure.message == "OSError: the disk is full"


async def test_stopping_nobody_returns_at_once(stage: Stage) -> None:
    await stage.cell.stop()
    await stage.play()
    await stage.cell.stop()
    await stage.cell.stop()

    assert (await stage.play()).total == 0
    assert await stage.ref.ask(Total()) == 0


async def test_two_may_stop_the_same_actor_and_the_next_life_is_not_meant(stage: Stage) -> None:
    adder = await stage.play()
    await stage.ask(Hold())
    async with trio.open_nursery() as stoppers:
        stoppers.start_soon(stage.cell.stop)
        stoppers.start_soon(stage.cell.stop)
        await wait_all_tasks_blocked()
        adder.gate.set()

    await stage.play()

    assert await stage.ref.ask(Total()) == 0


async def test_a_stop_that_was_never_read_is_not_meant_for_the_next_life(
    stage: Stage, autojump_clock: MockClock
) -> None:
    await stage.play()
    await stage.ask(Hold())
    await stage.cell.stop(timeout=1.0)

    await stage.play()

    assert await stage.ref.ask(Total()) == 0


async def test_an_actor_whose_cell_was_closed_can_be_stopped(
    stage: Stage, autojump_clock: MockClock
) -> None:
    await stage.play()
    stage.cell.close()

    await stage.cell.stop(timeout=1.0)

    assert stage.cell.state is State.STOPPED


async def test_an_actor_stopped_while_it_starts_has_failed_to_start(
    stage: Stage, autojump_clock: MockClock
) -> None:
    class NeverReady(Adder):
        async def on_start(self) -> None:
            await trio.sleep_forever()

    async with trio.open_nursery() as starter:

        async def start() -> None:
            with pytest.raises(StartFailed, match="stopped before it had started"):
                await stage.play(NeverReady)

        starter.start_soon(start)
        await wait_all_tasks_blocked()
        await stage.cell.stop(timeout=1.0)

    assert trio.current_time() == 0.0  # it reads no mail yet, so there is no point in waiting
    assert stage.cell.state is State.FAILED


async def test_a_cancelled_actor_ends_at_once_with_no_more_than_its_on_stop(stage: Stage) -> None:
    adder = await stage.play()
    await stage.ask(Hold())
    await stage.tell(Add(1))

    stage.cell.cancel("no time left")
    await stage.cell.stopped.wait()

    assert adder.calls == ["on_start", "on_stop"]
    assert adder.total == 0
    await wait_all_tasks_blocked()
    assert stage.exits == [ActorExited(name="adder")]
    assert [type(error) for error in stage.errors] == [ActorStopped]


async def test_on_stop_can_tell_a_failure_from_an_orderly_end(stage: Stage) -> None:
    seen: list[bool] = []

    class Looks(Adder):
        async def on_stop(self) -> None:
            seen.append(self.cell.crashed)

    await stage.play(Looks)
    await stage.tell(Break())
    await stage.play(Looks)
    await stage.cell.stop()

    assert seen == [True, False]


async def test_an_actor_can_end_itself(stage: Stage) -> None:
    class Quits(Actor[Add | StopActor]):
        async def receive(self, message: Add | StopActor) -> None:
            self.ref.tell_nowait(StopActor())

    await stage.play(Quits)
    await stage.tell(Add(1), Add(2))

    assert stage.exits == [ActorExited(name="adder")]
    assert stage.cell.mailbox.statistics().depth == 1


# Cancellation from outside


async def test_cancellation_from_outside_cleans_up_and_answers_what_is_open(stage: Stage) -> None:
    adder = Adder()
    ended: list[ActorExited] = []
    async with trio.open_nursery() as outside:

        async def live(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            ended.append(await stage.cell.run(lambda: adder, task_status=task_status))

        await outside.start(live)
        await stage.ask(Later(), Hold())
        outside.cancel_scope.cancel()
    await wait_all_tasks_blocked()

    assert outside.cancel_scope.cancelled_caught
    assert ended == []
    assert adder.calls == ["on_start", "on_stop"]
    assert [type(error) for error in stage.errors] == [ActorStopped] * 2
    assert stage.cell.state is State.STOPPED


async def test_cancellation_during_the_start_cleans_up_too(stage: Stage) -> None:
    class NeverReady(Adder):
        async def on_start(self) -> None:
            await trio.sleep_forever()

    actor = NeverReady()
    with trio.move_on_after(0) as scope:
        await stage.cell.run(lambda: actor)

    assert scope.cancelled_caught
    assert actor.calls == ["on_stop"]
    assert stage.cell.stopped.is_set()


async def test_watchers_hear_of_a_cancelled_life(stage: Stage, watcher: Watcher) -> None:
    stage.cell.watch(watcher.ref)
    with trio.move_on_after(0):
        await stage.cell.run(Adder)
    await wait_all_tasks_blocked()

    assert watcher.seen == [ActorExited(name="adder")]


# Watching


async def test_watchers_hear_of_every_end(stage: Stage, watcher: Watcher) -> None:
    stage.cell.watch(watcher.ref)
    await stage.play()
    await stage.tell(Break())
    await stage.play()
    await stage.cell.stop()
    await wait_all_tasks_blocked()

    failed, stopped = watcher.seen
    assert failed.failure is not None
    assert failed.failure.message == "ValueError: broken"
    assert stopped == ActorExited(name="adder")


async def test_a_watcher_hears_of_a_death_before_it_watched(stage: Stage, watcher: Watcher) -> None:
    await stage.play()
    await stage.tell(Break())

    stage.cell.watch(watcher.ref)
    await wait_all_tasks_blocked()

    assert len(watcher.seen) == 1


async def test_a_watcher_of_the_living_hears_nothing_of_former_lives(
    stage: Stage, watcher: Watcher
) -> None:
    await stage.play()
    await stage.tell(Break())
    await stage.play()

    stage.cell.watch(watcher.ref)
    await wait_all_tasks_blocked()

    assert watcher.seen == []


async def test_a_watcher_that_is_gone_harms_nobody(
    stage: Stage, system: ActorSystem, watcher: Watcher
) -> None:
    gone = system.cell("gone")
    gone.close()
    stage.cell.watch(LocalRef(gone))
    stage.cell.watch(watcher.ref)
    await stage.play()
    await stage.ask(Later(), Break())

    assert len(watcher.seen) == 1
    assert len(stage.errors) == 2
    assert ("stopped", "ActorExited") in stage.dead()
    stage.cell.watch(LocalRef(gone))


# Tasks of an actor


async def fail() -> None:
    raise ValueError("a task failed")


async def test_the_failure_of_a_task_is_the_failure_of_its_actor(stage: Stage) -> None:
    class Parent(Adder):
        async def receive(self, message: Mail) -> object:
            self.spawn(fail)
            return 7

    await stage.play(Parent)
    await stage.ask(Total())
    assert stage.answers == [7]

    [exited] = stage.exits
    assert exited.failure is not None
    assert exited.failure.message == "ValueError: a task failed"


async def test_tasks_end_with_the_life_before_on_stop(stage: Stage) -> None:
    class Parent(Adder):
        async def on_start(self) -> None:
            self.spawn(self.tick)

        async def tick(self) -> None:
            try:
                await trio.sleep_forever()
            finally:
                self.calls.append("task ended")

    parent = await stage.play(Parent)
    await stage.cell.stop()

    assert parent.calls == ["task ended", "on_stop"]


async def test_a_spawned_task_gets_its_arguments(stage: Stage) -> None:
    class Parent(Adder):
        async def on_start(self) -> None:
            self.spawn(self.add, 2, 3)

        async def add(self, *numbers: int) -> None:
            self.total = sum(numbers)

    parent = await stage.play(Parent)
    await wait_all_tasks_blocked()

    assert parent.total == 5


async def test_several_failures_at_once_are_told_of_together(stage: Stage) -> None:
    class Parent(Adder):
        async def receive(self, message: Mail) -> object:
            self.spawn(fail)
            self.spawn(fail)
            return None

    await stage.play(Parent)
    await stage.tell(Add(1))

    [exited] = stage.exits
    assert exited.failure is not None
    assert "2 sub-exceptions" in exited.failure.message


# Messages to itself at a time


class Alarm(Actor[Add | Break]):
    """Sends itself `Add(7)` at 5 s for each `Add` it is told."""

    capacity = 2

    def __init__(self) -> None:
        self.heard: list[tuple[float, int]] = []

    async def receive(self, message: Add | Break) -> None:
        match message:
            case Add(number=7):
                self.heard.append((trio.current_time(), 7))
            case Add():
                self.tell_self_at(5.0, Add(7))
            case Break():
                raise ValueError("broken")


async def test_an_actor_can_tell_itself_something_at_a_time(
    stage: Stage, autojump_clock: MockClock
) -> None:
    alarm = await stage.play(Alarm)
    await stage.tell(Add(1))

    await trio.sleep_until(10.0)

    assert alarm.heard == [(5.0, 7)]


async def test_what_a_life_had_set_for_later_is_not_told_to_the_next(
    stage: Stage, autojump_clock: MockClock
) -> None:
    await stage.play(Alarm)
    await stage.tell(Add(1), Break())
    alarm = await stage.play(Alarm)

    await trio.sleep_until(10.0)

    assert alarm.heard == []


@pytest.mark.parametrize("closed", [False, True])
async def test_a_timed_message_that_finds_no_room_is_buried(
    stage: Stage, mock_clock: MockClock, closed: bool
) -> None:
    """The reasons are the same ones as for messages from others."""

    class Busy(Alarm):
        async def receive(self, message: Add | Break) -> None:
            self.tell_self_at(5.0, Add(7))
            await trio.sleep_forever()

    await stage.play(Busy)
    await stage.tell(Add(1))
    await stage.tell(Add(2), Add(3))
    if closed:
        stage.cell.close()

    mock_clock.jump(5.0)
    await wait_all_tasks_blocked()

    reason, count = ("stopped", 3) if closed else ("mailbox_full", 1)
    assert stage.dead() == {(reason, "Add"): count}


async def test_a_timed_message_is_caused_by_the_one_that_set_it(
    stage: Stage, mock_clock: MockClock
) -> None:
    handled: list[int] = []

    class Sets(Actor[Add]):
        async def receive(self, message: Add) -> None:
            handled.append(self.cell.handling)
            if message.number == 1:
                self.tell_self_at(5.0, Add(7))
            else:
                await trio.sleep_forever()

    await stage.play(Sets)
    await stage.tell(Add(1), Add(2))
    mock_clock.jump(5.0)
    await wait_all_tasks_blocked()

    letter = stage.cell.mailbox.take_nowait()
    assert letter is not None
    assert letter.cause == handled[0]
    assert handled[0] != handled[1]


# Verbs, status


@pytest.mark.parametrize(
    ("verb", "state"),
    [
        (Pause(), State.PAUSED),
        (Unpause(), State.RUNNING),
        (Suspend(), State.SUSPENDED),
        (Resume(), State.PAUSED),
        (Stop(), State.STOPPED),
    ],
)
async def test_an_actor_that_does_nothing_special_acknowledges_every_verb(
    stage: Stage, verb: Verb, state: State
) -> None:
    await stage.play()

    reply = await stage.ref.ask(verb)

    assert reply.done
    assert (reply.verb, reply.state) == (type(verb).__name__.lower(), state)
    assert stage.cell.state is state


async def test_an_acknowledgement_may_be_deferred(stage: Stage) -> None:
    class Steps(Adder):
        async def on_pause(self, verb: Pause) -> None:
            self.later.append(self.defer())

    steps = await stage.play(Steps)
    await stage.ask(Pause())
    assert stage.answers == []
    assert stage.cell.state is State.RUNNING

    steps.later[0].send(steps.ack(Pause(), requests=3))
    await wait_all_tasks_blocked()

    [reply] = stage.answers
    assert reply == steps.ack(Pause(), requests=3)


async def test_an_actor_knows_when_its_asker_gives_up(stage: Stage, mock_clock: MockClock) -> None:
    deadlines: list[float] = []

    class Looks(Adder):
        async def receive(self, message: Mail) -> object:
            deadlines.append(self.cell.deadline)
            return 0

    await stage.play(Looks)
    mock_clock.jump(10.0)
    await stage.ref.ask(Total(), timeout=2.5)
    await stage.tell(Add(1))

    assert deadlines == [12.5, float("inf")]
    assert stage.cell.deadline == float("inf")


async def test_a_failed_verb_is_answered(stage: Stage) -> None:
    class Stuck(Adder):
        async def on_pause(self, verb: Pause) -> None:
            raise RuntimeError("the device does not answer")

    await stage.play(Stuck)

    with pytest.raises(ActorFailed, match="the device does not answer"):
        await stage.ref.ask(Pause())


async def test_an_urgent_message_of_the_actors_own_comes_to_receive(stage: Stage) -> None:
    class Urgent(Call[str], frozen=True):
        urgent: ClassVar[bool] = True

    class Hears(Actor[Urgent]):
        async def receive(self, message: Urgent) -> str:
            return "heard"

    await stage.play(Hears)

    assert await stage.ref.ask(Urgent()) == "heard"


async def test_status_describes_the_cell_and_who_lives_in_it(stage: Stage) -> None:
    before = stage.cell.status()
    assert (before.kind, before.state, before.restarts) == ("", State.STOPPED, 0)

    await stage.play()
    await stage.tell(Add(3), Break())
    assert stage.cell.status().state is State.FAILED
    assert stage.cell.status().details == {}

    await stage.play()
    node = await stage.ref.ask(GetNode())

    assert (node.name, node.kind, node.state) == ("adder", "Adder", State.RUNNING)
    assert (node.restarts, node.details) == (1, {"total": 3})


# What an actor says about itself


def test_the_inbox_is_the_union_an_actor_was_declared_with() -> None:
    class Adders(Adder):
        pass

    assert Adder.inbox() == Mail
    assert Adders.inbox() == Mail


def test_an_actor_that_does_not_say_what_it_receives_has_no_inbox() -> None:
    class Silent(Actor):  # type: ignore[type-arg]  # that is the point
        async def receive(self, message: object) -> None: ...

    M = TypeVar("M", bound=Message)

    class Open(Actor[M]):
        async def receive(self, message: M) -> None: ...

    for kind in (Silent, Open):
        with pytest.raises(TypeError, match="does not say what it receives"):
            kind.inbox()


async def test_an_actor_knows_its_name_and_address(stage: Stage) -> None:
    adder = await stage.play()

    assert adder.name == "adder"
    adder.ref.tell_nowait(Add(1))
    await wait_all_tasks_blocked()
    assert adder.total == 1


async def test_what_an_actor_logs_says_who_it_is(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    adder = await stage.play()

    adder.log.warning("hello")

    [record] = caplog.records
    assert record.__dict__["actor"] == "adder"


# Everything at once


class Chaotic(Actor[Total | Later | Hold | BreakOnce]):
    """Does anything an actor may do with a question."""

    capacity = 3
    retry_safe = (BreakOnce,)

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.later: list[Reply] = []

    async def receive(self, message: Total | Later | Hold | BreakOnce) -> object:
        await trio.sleep(self.dice.random())
        while self.later and self.dice.random() < 0.7:
            self.later.pop().send("later")
        match message:
            case Later():
                self.later.append(self.defer())
            case Hold():
                await trio.sleep(self.dice.random() * 10)
            case BreakOnce():
                raise ValueError("broken")
        return "now"


@pytest.mark.parametrize("seed", range(20))
async def test_every_ask_has_exactly_one_outcome(
    system: ActorSystem, nursery: trio.Nursery, autojump_clock: MockClock, seed: int
) -> None:
    """Deaths, restarts, stops, deadlines, cancellations and closing at random times."""
    dice = random.Random(seed)
    cell = system.cell("chaotic")
    ref: LocalRef[Any] = LocalRef(cell)
    outcomes: list[str] = []

    async def ask() -> None:
        await trio.sleep(dice.random() * 20)
        calls: list[Call[Any]] = [Total(), Later(), Hold(), BreakOnce()]
        with trio.move_on_after(dice.choice([2.0, 1000.0])) as scope:
            try:
                timeout = dice.choice([0.5, 3.0, 100.0])
                outcomes.append(await ref.ask(dice.choice(calls), timeout=timeout))
            except CallboardError as error:
                outcomes.append(type(error).__name__)
        if scope.cancelled_caught:
            outcomes.append("cancelled")

    async def keep_alive() -> None:
        while True:
            await cell.run(lambda: Chaotic(dice))
            await trio.sleep(dice.random())

    async def disturb() -> None:
        while True:
            await trio.sleep(dice.random() * 8)
            await cell.stop(timeout=dice.random())

    for _ in range(60):
        nursery.start_soon(ask)
    async with trio.open_nursery() as keepers:
        keepers.start_soon(keep_alive)
        keepers.start_soon(disturb)
        await trio.sleep(25.0)
        keepers.cancel_scope.cancel()
    cell.close()
    await wait_all_tasks_blocked()

    assert len(outcomes) == 60  # nobody has to wait for a deadline after the end
    assert len(set(outcomes)) > 2


# Kinds of sender the type checker cannot rule out


async def test_defer_is_only_for_use_while_handling_a_message(stage: Stage) -> None:
    adder = await stage.play()

    with pytest.raises(AssertionError, match="while handling"):
        adder.defer()


async def test_a_question_read_too_late_is_answered_although_its_timer_is_late(
    system: ActorSystem, nursery: trio.Nursery
) -> None:
    """The reader and the timer agree on the error, whichever comes first."""
    cell = Cell(ActorSystem(), "adder")  # a system whose timers nobody runs
    ref: LocalRef[Any] = LocalRef(cell)
    caught: list[type[BaseException]] = []

    async def ask() -> None:
        with pytest.raises(DeadlineExceeded) as error:
            await ref.ask(Total(), timeout=0.0)
        caught.append(error.type)

    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    await nursery.start(cell.run, Adder)
    await wait_all_tasks_blocked()

    assert caught == [DeadlineExceeded]
