from collections.abc import AsyncGenerator, Callable
from typing import ClassVar

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, wait_all_tasks_blocked

from callboard.actors.actor import Actor, Cell
from callboard.actors.mailbox import Overflow
from callboard.actors.ref import ActorRef, LocalRef, current_cell
from callboard.actors.system import ActorSystem, open_system
from callboard.messages.base import Call, Message
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    MailboxFull,
    RequestError,
)


class Note(Message, frozen=True):
    number: int


class Question(Call[int], frozen=True):
    number: int = 0


class UrgentQuestion(Call[int], frozen=True):
    urgent: ClassVar[bool] = True


Mail = Note | Question | UrgentQuestion


class Reader(Actor[Mail]):
    """Answers a question with ten times its number; reads only while the gate is open."""

    capacity = 2

    def __init__(self, gate: trio.Event) -> None:
        self.gate = gate
        self.seen: list[int] = []

    async def receive(self, message: Mail) -> object:
        await self.gate.wait()
        match message:
            case Note():
                self.seen.append(message.number)
                return None
            case Question():
                self.seen.append(message.number)
                return message.number * 10
            case UrgentQuestion():
                return 1000


class SheddingReader(Reader):
    overflow = Overflow.SHED


class FailingReader(Reader):
    overflow = Overflow.FAIL


class Stage:
    """One reader in one cell, whose gate is shut until a test opens it."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.nursery = nursery
        self.gate = trio.Event()
        self.cell = system.cell("reader")
        self.ref: LocalRef[Mail] = LocalRef(self.cell)

    async def play(self, kind: type[Reader] = Reader) -> Reader:
        """Start the reader; it takes one letter, and waits for the gate with it in hand."""
        reader = kind(self.gate)
        await self.nursery.start(self.cell.run, lambda: reader)
        return reader

    async def fill(self) -> None:
        """Put one letter in the reader's hand and two into its mailbox of two."""
        for number in (1, 2, 3):
            self.ref.tell_nowait(Note(number))
            await wait_all_tasks_blocked()

    def dead(self) -> dict[tuple[str, str], int]:
        return dict(self.system.dead_letters.counts)


class Outcomes:
    """What became of asks that ran in the background."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.answers: list[int] = []
        self.errors: list[CallboardError] = []
        self.times: list[float] = []

    async def ask(self, ref: LocalRef[Mail], call: Call[int], timeout: float = 5.0) -> None:
        """Start an ask and let it get as far as it can."""
        self.nursery.start_soon(self._ask, ref, call, timeout)
        await wait_all_tasks_blocked()

    async def _ask(self, ref: LocalRef[Mail], call: Call[int], timeout: float) -> None:
        try:
            answer: int = await ref.ask(call, timeout=timeout)
            self.answers.append(answer)
        except CallboardError as error:
            self.errors.append(error)
        self.times.append(trio.current_time())


@pytest.fixture
async def system() -> AsyncGenerator[ActorSystem, None]:
    async with open_system() as system:
        yield system


@pytest.fixture
async def stage(system: ActorSystem, nursery: trio.Nursery) -> Stage:
    return Stage(system, nursery)


@pytest.fixture
async def outcomes(nursery: trio.Nursery) -> Outcomes:
    return Outcomes(nursery)


# Who it is


def test_a_ref_says_whose_it_is() -> None:
    ref: ActorRef[Mail] = LocalRef(Cell(ActorSystem(), "reader"))

    assert ref.name == "reader"
    assert repr(ref) == "<ref reader>"


# Telling


async def test_told_messages_are_read_in_order(stage: Stage) -> None:
    stage.gate.set()
    reader = await stage.play()

    for number in range(20):
        await stage.ref.tell(Note(number))
    await wait_all_tasks_blocked()

    assert reader.seen == list(range(20))


async def test_telling_waits_for_room(stage: Stage) -> None:
    reader = await stage.play()
    await stage.fill()

    with trio.move_on_after(0) as scope:
        await stage.ref.tell(Note(4))
    assert scope.cancelled_caught

    stage.nursery.start_soon(stage.ref.tell, Note(5))
    await wait_all_tasks_blocked()
    stage.gate.set()
    await wait_all_tasks_blocked()
    assert reader.seen == [1, 2, 3, 5]


async def test_telling_is_a_checkpoint(stage: Stage) -> None:
    with assert_checkpoints():
        await stage.ref.tell(Note(1))


@pytest.mark.parametrize("kind", [Reader, FailingReader])
async def test_telling_now_is_refused_when_there_is_no_room(
    stage: Stage, kind: type[Reader]
) -> None:
    reader = await stage.play(kind)
    await stage.fill()

    with pytest.raises(MailboxFull):
        stage.ref.tell_nowait(Note(4))

    stage.gate.set()
    await wait_all_tasks_blocked()
    assert reader.seen == [1, 2, 3]
    assert stage.dead() == {}  # the teller knows, so nobody else needs to


async def test_telling_a_shedding_actor_buries_its_oldest_letter(stage: Stage) -> None:
    reader = await stage.play(SheddingReader)
    await stage.fill()

    stage.ref.tell_nowait(Note(4))
    await stage.ref.tell(Note(5))

    stage.gate.set()
    await wait_all_tasks_blocked()
    assert reader.seen == [1, 4, 5]
    assert stage.dead() == {("mailbox_full", "Note"): 2}


async def test_telling_a_closed_cell_raises_and_counts_a_dead_letter(stage: Stage) -> None:
    stage.cell.close()

    with pytest.raises(ActorStopped, match="reader has stopped"):
        stage.ref.tell_nowait(Note(1))
    with pytest.raises(ActorStopped, match="reader has stopped"):
        await stage.ref.tell(Note(2))

    assert stage.dead() == {("stopped", "Note"): 2}


async def test_a_teller_waiting_for_room_is_told_when_the_cell_closes(stage: Stage) -> None:
    await stage.play()
    await stage.fill()

    async with trio.open_nursery() as nursery:

        async def tell() -> None:
            with pytest.raises(ActorStopped):
                await stage.ref.tell(Note(4))

        nursery.start_soon(tell)
        await wait_all_tasks_blocked()
        stage.cell.close()

    assert stage.dead() == {("stopped", "Note"): 3}


# Asking


async def test_asking_returns_the_answer(stage: Stage) -> None:
    stage.gate.set()
    await stage.play()

    assert await stage.ref.ask(Question(4)) == 40


async def test_asking_is_a_checkpoint(stage: Stage) -> None:
    stage.gate.set()
    await stage.play()

    with assert_checkpoints():
        await stage.ref.ask(Question(4))


async def test_each_of_many_askers_gets_its_own_answer(stage: Stage, outcomes: Outcomes) -> None:
    await stage.play()
    for number in range(10):
        await outcomes.ask(stage.ref, Question(number))

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert sorted(outcomes.answers) == [number * 10 for number in range(10)]


async def test_an_urgent_question_is_answered_before_the_backlog(
    stage: Stage, outcomes: Outcomes
) -> None:
    reader = await stage.play()
    await stage.fill()
    await outcomes.ask(stage.ref, Question(4))  # waits for room
    await outcomes.ask(stage.ref, UrgentQuestion())

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert outcomes.answers == [1000, 40]
    assert reader.seen == [1, 2, 3, 4]


async def test_an_ask_that_is_not_answered_in_time_raises(
    stage: Stage, outcomes: Outcomes, autojump_clock: MockClock
) -> None:
    await stage.play()

    with pytest.raises(DeadlineExceeded, match=r"reader did not answer Question in 2\.5 s"):
        await stage.ref.ask(Question(), timeout=2.5)

    assert trio.current_time() == 2.5


async def test_an_ask_times_out_also_when_nobody_lives_there(
    stage: Stage, autojump_clock: MockClock
) -> None:
    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Question(), timeout=2.5)

    assert trio.current_time() == 2.5


@pytest.mark.parametrize("timeout", [0.0, -1.0])
async def test_an_ask_with_no_time_left_raises_and_is_not_handled(
    stage: Stage, timeout: float, autojump_clock: MockClock
) -> None:
    stage.gate.set()
    reader = await stage.play()

    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Question(), timeout=timeout)

    await wait_all_tasks_blocked()
    assert reader.seen == []
    assert stage.dead() == {("expired", "Question"): 1}


async def test_an_ask_may_wait_for_ever(stage: Stage, outcomes: Outcomes) -> None:
    await stage.play()
    await outcomes.ask(stage.ref, Question(4), float("inf"))

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert outcomes.answers == [40]


async def test_an_answer_that_comes_too_late_is_dropped(
    stage: Stage, autojump_clock: MockClock
) -> None:
    reader = await stage.play()
    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Question(4), timeout=1.0)

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert reader.seen == [4]
    assert await stage.ref.ask(Question(5)) == 50


async def test_a_question_still_unread_at_its_deadline_is_never_handled(
    stage: Stage, autojump_clock: MockClock
) -> None:
    reader = await stage.play()
    stage.ref.tell_nowait(Note(1))
    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Question(2), timeout=1.0)

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert reader.seen == [1]
    assert stage.dead() == {("expired", "Question"): 1}


async def test_a_cancelled_ask_drops_its_answer_and_harms_nobody(
    stage: Stage, outcomes: Outcomes
) -> None:
    reader = await stage.play()
    with trio.move_on_after(0) as scope:
        await stage.ref.ask(Question(1))
    assert scope.cancelled_caught

    await outcomes.ask(stage.ref, Question(2))
    stage.gate.set()
    await wait_all_tasks_blocked()

    assert outcomes.answers == [20]
    assert 2 in reader.seen


async def test_an_ask_in_a_cancelled_scope_sends_nothing(stage: Stage) -> None:
    stage.gate.set()
    reader = await stage.play()

    with trio.CancelScope() as scope:
        scope.cancel()
        await stage.ref.ask(Question(1))
    await wait_all_tasks_blocked()

    assert scope.cancelled_caught
    assert reader.seen == []


async def test_answered_asks_leave_no_timers_behind(
    stage: Stage, system: ActorSystem, mock_clock: MockClock
) -> None:
    stage.gate.set()
    await stage.play()

    for number in range(500):
        await stage.ref.ask(Question(number))

    assert len(system.timers._heap) < 200


# Asking when there is no room


async def test_an_ask_waits_for_room_until_its_deadline(
    stage: Stage, autojump_clock: MockClock
) -> None:
    reader = await stage.play()
    await stage.fill()

    with pytest.raises(DeadlineExceeded):
        await stage.ref.ask(Question(4), timeout=2.5)
    assert trio.current_time() == 2.5

    stage.gate.set()
    await wait_all_tasks_blocked()
    assert reader.seen == [1, 2, 3]
    assert stage.dead() == {}


async def test_an_ask_that_waited_for_room_is_answered(stage: Stage, outcomes: Outcomes) -> None:
    await stage.play()
    await stage.fill()
    await outcomes.ask(stage.ref, Question(4))

    stage.gate.set()
    await wait_all_tasks_blocked()

    assert outcomes.answers == [40]


async def test_an_ask_let_in_at_its_very_deadline_has_one_outcome(
    stage: Stage, outcomes: Outcomes, mock_clock: MockClock
) -> None:
    """Room and deadline come in one tick: the letter is queued, expired, and never handled."""
    reader = await stage.play()
    await stage.fill()
    await outcomes.ask(stage.ref, Question(4), timeout=1.0)

    mock_clock.jump(1.0)
    stage.gate.set()
    await wait_all_tasks_blocked()

    [error] = outcomes.errors
    assert isinstance(error, DeadlineExceeded)
    assert outcomes.answers == []
    assert reader.seen == [1, 2, 3]


async def test_an_ask_waiting_for_room_is_told_at_once_when_the_cell_closes(
    stage: Stage, outcomes: Outcomes, mock_clock: MockClock
) -> None:
    await stage.play()
    await stage.fill()
    await outcomes.ask(stage.ref, Question(4))

    stage.cell.close()
    await wait_all_tasks_blocked()

    [error] = outcomes.errors
    assert isinstance(error, ActorStopped)
    assert outcomes.times == [0.0]
    assert stage.dead() == {("stopped", "Note"): 2, ("stopped", "Question"): 1}


async def test_an_ask_waiting_for_room_survives_the_death_of_the_actor(
    stage: Stage, outcomes: Outcomes
) -> None:
    await stage.play()
    await stage.fill()
    await outcomes.ask(stage.ref, Question(4))

    await stage.cell.stop(timeout=0.0)
    stage.gate.set()
    await stage.play()
    await wait_all_tasks_blocked()

    assert outcomes.answers == [40]


async def test_an_ask_of_a_full_failing_actor_raises_at_once(stage: Stage) -> None:
    reader = await stage.play(FailingReader)
    await stage.fill()

    with pytest.raises(MailboxFull):
        await stage.ref.ask(Question(4))

    stage.gate.set()
    await wait_all_tasks_blocked()
    assert reader.seen == [1, 2, 3]


async def test_an_ask_that_is_shed_is_told_that_the_mailbox_was_full(
    stage: Stage, outcomes: Outcomes
) -> None:
    await stage.play(SheddingReader)
    stage.ref.tell_nowait(Note(1))
    await wait_all_tasks_blocked()
    await outcomes.ask(stage.ref, Question(2))

    stage.ref.tell_nowait(Note(3))
    stage.ref.tell_nowait(Note(4))
    await wait_all_tasks_blocked()

    [error] = outcomes.errors
    assert isinstance(error, MailboxFull)
    assert stage.dead() == {("mailbox_full", "Question"): 1}


# Asking one who has stopped


async def test_asking_a_closed_cell_raises_at_once_and_counts_a_dead_letter(
    stage: Stage, mock_clock: MockClock
) -> None:
    stage.cell.close()

    with pytest.raises(ActorStopped, match="reader has stopped"):
        await stage.ref.ask(Question())

    assert stage.dead() == {("stopped", "Question"): 1}


async def test_a_ref_is_good_across_lives(stage: Stage) -> None:
    stage.gate.set()
    for number in range(3):
        await stage.play()
        assert await stage.ref.ask(Question(number)) == number * 10
        await stage.cell.stop()


# Causes and answers that are errors


class Relay(Actor[Note]):
    """Tells every note to somebody else, in its own task or in another."""

    def __init__(self, target: LocalRef[Mail], *, spawned: bool = False) -> None:
        self.target = target
        self.spawned = spawned
        self.handled: list[int] = []

    async def receive(self, message: Note) -> None:
        self.handled.append(self.cell.handling)
        if self.spawned:
            self.spawn(self.target.tell, message)
            await wait_all_tasks_blocked()
        else:
            await self.target.tell(message)


@pytest.mark.parametrize("spawned", [False, True])
async def test_a_message_names_the_one_that_led_to_it(
    stage: Stage, system: ActorSystem, nursery: trio.Nursery, spawned: bool
) -> None:
    relay = Relay(stage.ref, spawned=spawned)
    await nursery.start(system.cell("relay").run, lambda: relay)

    LocalRef[Note](system.cell("relay")).tell_nowait(Note(1))
    await wait_all_tasks_blocked()

    letter = stage.cell.mailbox.take_nowait()
    assert letter is not None
    assert [letter.cause] == relay.handled
    assert letter.message_id not in {0, letter.cause}


async def test_a_message_from_outside_has_no_cause(stage: Stage) -> None:
    stage.ref.tell_nowait(Note(1))

    letter = stage.cell.mailbox.take_nowait()

    assert letter is not None
    assert letter.cause == 0


async def test_an_actor_at_rest_is_the_cause_of_nothing(
    stage: Stage, system: ActorSystem, nursery: trio.Nursery
) -> None:
    cell = system.cell("relay")
    await nursery.start(cell.run, lambda: Relay(stage.ref))
    LocalRef[Note](cell).tell_nowait(Note(1))
    await wait_all_tasks_blocked()

    assert cell.handling == 0
    assert current_cell.get() is None  # an actor's context does not leak into its starter's


class Refuser(Actor[Question]):
    async def receive(self, message: Question) -> object:
        return RequestError("too odd", field="number", allowed="even ones")


async def test_an_error_that_is_returned_is_raised_in_the_asker_and_ends_no_life(
    system: ActorSystem, nursery: trio.Nursery
) -> None:
    cell = system.cell("refuser")
    await nursery.start(cell.run, Refuser)
    ref: LocalRef[Question] = LocalRef(cell)

    for _ in range(2):
        with pytest.raises(RequestError, match="too odd") as caught:
            await ref.ask(Question(1))

    assert caught.value.field == "number"
    assert cell.lives == 1


# Tests of the same thing for all ways to send


@pytest.mark.parametrize(
    "send",
    [lambda ref: ref.tell(Note(1)), lambda ref: ref.ask(Question(1))],
    ids=["tell", "ask"],
)
async def test_sending_in_a_cancelled_scope_queues_nothing(
    stage: Stage, send: Callable[[LocalRef[Mail]], object]
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await send(stage.ref)  # type: ignore[misc]  # any awaitable

    assert scope.cancelled_caught
    assert stage.cell.mailbox.statistics().depth == 0
