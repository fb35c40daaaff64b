import logging
import random
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.system import ActorSystem, DeadLetters, Timer, Timers, open_system
from callboard.messages.base import Message


class Note(Message, frozen=True):
    number: int


class Other(Message, frozen=True):
    pass


class Bell:
    """Remembers who rang, and when."""

    def __init__(self) -> None:
        self.rung: list[object] = []
        self.times: list[float] = []

    def pull(self, name: object = None) -> Callable[[], None]:
        def ring() -> None:
            self.rung.append(name)
            self.times.append(trio.current_time())

        return ring


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def timers(nursery: trio.Nursery, mock_clock: MockClock) -> Timers:
    running = Timers()
    nursery.start_soon(running.run)
    return running


async def pass_time(clock: MockClock, seconds: float) -> None:
    await wait_all_tasks_blocked()
    clock.jump(seconds)
    await wait_all_tasks_blocked()


# Timers


async def test_a_timer_fires_when_it_is_due_and_not_before(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    timers.at(10.0, bell.pull())

    await pass_time(mock_clock, 9.9)
    assert bell.rung == []
    await pass_time(mock_clock, 0.2)
    assert len(bell.rung) == 1
    await pass_time(mock_clock, 100.0)
    assert len(bell.rung) == 1


async def test_timers_fire_in_the_order_they_are_due(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    for due in (3.0, 1.0, 2.0):
        timers.at(due, bell.pull(due))

    await pass_time(mock_clock, 5.0)

    assert bell.rung == [1.0, 2.0, 3.0]


async def test_timers_due_at_the_same_time_fire_in_the_order_they_were_set(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    for name in range(20):
        timers.at(1.0, bell.pull(name))

    await pass_time(mock_clock, 1.0)

    assert bell.rung == list(range(20))


async def test_an_earlier_timer_does_not_wait_for_a_later_one(
    timers: Timers, autojump_clock: MockClock, bell: Bell
) -> None:
    timers.at(100.0, bell.pull("late"))
    await wait_all_tasks_blocked()
    timers.at(1.0, bell.pull("early"))

    await trio.sleep_until(2.0)

    assert (bell.rung, bell.times) == (["early"], [1.0])


async def test_a_timer_that_is_already_due_fires_at_once(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    mock_clock.jump(50.0)

    timers.at(10.0, bell.pull())
    await wait_all_tasks_blocked()

    assert bell.times == [50.0]


async def test_a_time_that_is_no_number_is_refused_and_the_other_timers_fire(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    timers.at(1.0, bell.pull())
    with pytest.raises(ValueError, match="NaN"):
        timers.at(float("nan"), bell.pull())
    timers.at(float("inf"), bell.pull())
    mock_clock.jump(2.0)
    await wait_all_tasks_blocked()
    assert bell.times == [2.0]


async def test_timers_set_before_anybody_runs_them_fire_when_somebody_does(
    nursery: trio.Nursery, mock_clock: MockClock, bell: Bell
) -> None:
    timers = Timers()
    timers.at(1.0, bell.pull())
    nursery.start_soon(timers.run)

    await pass_time(mock_clock, 1.0)

    assert len(bell.rung) == 1


async def test_a_cancelled_timer_never_fires(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    first, second = timers.at(1.0, bell.pull("first")), timers.at(1.0, bell.pull("second"))
    first.cancel()
    first.cancel()

    await pass_time(mock_clock, 2.0)

    assert bell.rung == ["second"]
    second.cancel()  # harmless when it has fired


async def test_a_timer_may_set_another_one(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    def set_another() -> None:
        timers.at(2.0, bell.pull())

    timers.at(1.0, set_another)

    await pass_time(mock_clock, 1.0)
    assert bell.rung == []
    await pass_time(mock_clock, 1.0)
    assert bell.times == [2.0]


async def test_a_timer_may_cancel_others_that_are_due_with_it(
    timers: Timers, mock_clock: MockClock, bell: Bell
) -> None:
    """Enough of them that the heap is rebuilt while it is being worked off."""
    victims: list[Timer] = []

    def cancel_all() -> None:
        for victim in victims:
            victim.cancel()

    timers.at(1.0, cancel_all)
    victims.extend(timers.at(1.0, bell.pull("victim")) for _ in range(200))
    timers.at(1.0, bell.pull("survivor"))

    await pass_time(mock_clock, 1.0)

    assert bell.rung == ["survivor"]


async def test_cancelled_timers_do_not_pile_up(timers: Timers, bell: Bell) -> None:
    """Ten thousand asks that are answered at once must not leave their deadlines behind."""
    for number in range(10_000):
        timers.at(1000.0 + number, bell.pull()).cancel()

    assert len(timers._heap) < 200


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_set_and_cancelled_the_rest_fires_in_time(
    timers: Timers, autojump_clock: MockClock, bell: Bell, seed: int
) -> None:
    dice = random.Random(seed)
    expected = []
    for number in range(500):
        due = float(dice.randrange(1, 100))
        timer = timers.at(due, bell.pull((due, number)))
        if dice.random() < 0.6:
            timer.cancel()
        else:
            expected.append((due, number))
        if dice.random() < 0.02:
            await wait_all_tasks_blocked()

    await trio.sleep_until(200.0)

    assert bell.rung == sorted(expected)
    assert bell.times == [due for due, _ in sorted(expected)]


# Dead letters


def test_dead_letters_are_counted_by_reason_and_type() -> None:
    dead = DeadLetters()
    dead.add("a", "stopped", Note(1))
    dead.add("b", "stopped", Note(2))
    dead.add("a", "expired", Note(3))
    dead.add("a", "stopped", Other())

    assert dead.counts == {
        ("stopped", "Note"): 2,
        ("expired", "Note"): 1,
        ("stopped", "Other"): 1,
    }


def test_a_dead_letter_says_who_did_not_get_what_and_why() -> None:
    dead = DeadLetters()
    dead.add("scheduler", "poison", Note(7))

    [letter] = dead.last

    assert (letter.receiver, letter.reason, letter.message) == ("scheduler", "poison", Note(7))


def test_only_the_last_dead_letters_are_kept_but_all_are_counted() -> None:
    dead = DeadLetters(kept=3)
    for number in range(10):
        dead.add("a", "stopped", Note(number))

    assert [letter.message for letter in dead.last] == [Note(7), Note(8), Note(9)]
    assert dead.counts["stopped", "Note"] == 10


def test_a_dead_letter_is_logged_without_its_contents(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="callboard"):
        DeadLetters().add("scheduler", "stopped", Note(7))

    [record] = caplog.records
    line = record.__dict__
    assert (line["receiver"], line["reason"], line["kind"]) == ("scheduler", "stopped", "Note")


# The system


def test_message_ids_are_fresh_and_never_zero() -> None:
    system = ActorSystem()

    ids = [system.next_message_id() for _ in range(100)]

    assert len(set(ids)) == 100
    assert 0 not in ids


def test_a_name_means_the_same_cell_each_time() -> None:
    system = ActorSystem()

    cell = system.cell("scheduler")

    assert system.cell("scheduler") is cell
    assert system.cell("executor") is not cell
    assert set(system.cells) == {"scheduler", "executor"}


def test_two_systems_share_nothing() -> None:
    assert ActorSystem().cell("scheduler") is not ActorSystem().cell("scheduler")


async def test_an_open_system_runs_its_timers(autojump_clock: MockClock, bell: Bell) -> None:
    async with open_system() as system:
        system.timers.at(5.0, bell.pull())
        await trio.sleep_until(6.0)

    assert bell.times == [5.0]


async def test_leaving_a_system_leaves_nothing_running(
    autojump_clock: MockClock, bell: Bell
) -> None:
    async with open_system() as system:
        system.timers.at(5.0, bell.pull())

    await trio.sleep_until(10.0)

    assert bell.rung == []
