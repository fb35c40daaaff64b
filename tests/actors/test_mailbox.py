import random
from collections.abc import Callable
from typing import ClassVar

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from callboard.actors.mailbox import Letter, Mailbox, Overflow, Reply
from callboard.messages.base import Message
from callboard.messages.errors import ActorFailed, ActorStopped, MailboxFull


class Note(Message, frozen=True):
    number: int


class Alarm(Message, frozen=True):
    urgent: ClassVar[bool] = True
    number: int


def note(number: int) -> Letter:
    return Letter(Note(number))


def alarm(number: int) -> Letter:
    return Letter(Alarm(number))


def number_in(letter: Letter | None) -> int:
    assert letter is not None
    assert isinstance(letter.message, Note | Alarm)
    return letter.message.number


def take_all(mailbox: Mailbox) -> list[int]:
    numbers = []
    while (letter := mailbox.take_nowait()) is not None:
        numbers.append(number_in(letter))
    return numbers


def full_mailbox(overflow: Overflow = Overflow.WAIT) -> Mailbox:
    mailbox = Mailbox(2, overflow)
    mailbox.put_nowait(note(1))
    mailbox.put_nowait(note(2))
    return mailbox


async def park(nursery: trio.Nursery, mailbox: Mailbox, *numbers: int) -> None:
    """Let producers wait for room, in this order."""
    for number in numbers:
        nursery.start_soon(mailbox.put, note(number))
        await wait_all_tasks_blocked()


# Lanes


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_mailbox_that_can_hold_nothing_cannot_be_made(capacity: int) -> None:
    with pytest.raises(ValueError, match="can hold nothing"):
        Mailbox(capacity)


def test_an_empty_mailbox_gives_nothing() -> None:
    assert Mailbox().take_nowait() is None


def test_letters_of_a_lane_are_taken_in_the_order_they_came() -> None:
    mailbox = Mailbox()
    for number in range(5):
        mailbox.put_nowait(note(number))

    assert take_all(mailbox) == [0, 1, 2, 3, 4]


def test_urgent_letters_are_taken_first_and_in_their_order() -> None:
    mailbox = Mailbox()
    for letter in (note(1), alarm(10), note(2), alarm(11)):
        mailbox.put_nowait(letter)

    assert take_all(mailbox) == [10, 11, 1, 2]


def test_an_urgent_letter_overtakes_a_backlog_that_is_being_read() -> None:
    mailbox = full_mailbox()
    assert number_in(mailbox.take_nowait()) == 1

    mailbox.put_nowait(alarm(10))

    assert number_in(mailbox.take_nowait()) == 10


def test_a_letter_put_back_is_the_next_of_its_lane() -> None:
    mailbox = Mailbox()
    mailbox.put_nowait(note(2))
    mailbox.put_nowait(alarm(11))

    mailbox.put_back(note(1))
    mailbox.put_back(alarm(10))

    assert take_all(mailbox) == [10, 11, 1, 2]


def test_a_letter_put_back_finds_a_place_in_a_full_mailbox() -> None:
    mailbox = full_mailbox()

    mailbox.put_back(note(0))

    assert take_all(mailbox) == [0, 1, 2]


def test_discarding_forgets_urgent_letters_of_one_kind_only() -> None:
    class Other(Alarm, frozen=True):
        pass

    mailbox = full_mailbox()
    for letter in (alarm(10), Letter(Other(11)), alarm(12)):
        mailbox.put_nowait(letter)

    mailbox.discard(Other)

    assert take_all(mailbox) == [10, 12, 1, 2]


# Overflow


@pytest.mark.parametrize("overflow", [Overflow.FAIL, Overflow.WAIT])
def test_a_full_mailbox_refuses_without_queueing(overflow: Overflow) -> None:
    mailbox = full_mailbox(overflow)

    with pytest.raises(MailboxFull, match="holds 2 messages"):
        mailbox.put_nowait(note(3))

    assert take_all(mailbox) == [1, 2]


async def test_a_put_fails_when_a_failing_mailbox_is_full() -> None:
    mailbox = full_mailbox(Overflow.FAIL)

    with pytest.raises(MailboxFull):
        await mailbox.put(note(3))

    assert take_all(mailbox) == [1, 2]


def test_a_shedding_mailbox_gives_back_the_oldest_letter() -> None:
    mailbox = full_mailbox(Overflow.SHED)

    displaced = mailbox.put_nowait(note(3))

    assert number_in(displaced) == 1
    assert take_all(mailbox) == [2, 3]


async def test_a_put_into_a_shedding_mailbox_does_not_wait() -> None:
    mailbox = full_mailbox(Overflow.SHED)

    assert number_in(await mailbox.put(note(3))) == 1


@pytest.mark.parametrize("overflow", list(Overflow))
def test_urgent_letters_always_find_room_and_displace_nothing(overflow: Overflow) -> None:
    mailbox = full_mailbox(overflow)

    assert [mailbox.put_nowait(alarm(number)) for number in (10, 11, 12)] == [None] * 3

    assert take_all(mailbox) == [10, 11, 12, 1, 2]


def test_urgent_letters_take_no_room_from_the_others() -> None:
    mailbox = Mailbox(1, Overflow.FAIL)
    mailbox.put_nowait(alarm(10))

    mailbox.put_nowait(note(1))

    assert take_all(mailbox) == [10, 1]


# Producers that wait


async def test_a_producer_waits_for_room(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    await park(nursery, mailbox, 3)
    assert mailbox.statistics().depth == 2

    taken = number_in(mailbox.take_nowait())

    assert [taken, *take_all(mailbox)] == [1, 2, 3]


async def test_a_producer_that_found_room_goes_on() -> None:
    mailbox = full_mailbox()
    async with trio.open_nursery() as nursery:
        await park(nursery, mailbox, 3)
        mailbox.take_nowait()


async def test_taking_an_urgent_letter_makes_no_room(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    mailbox.put_nowait(alarm(10))
    await park(nursery, mailbox, 3)

    mailbox.take_nowait()
    await wait_all_tasks_blocked()

    assert mailbox.statistics().depth == 2


async def test_waiting_producers_are_served_in_the_order_they_came(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    await park(nursery, mailbox, 3, 4, 5, 6)

    taken = []
    while (letter := mailbox.take_nowait()) is not None:
        taken.append(number_in(letter))
        await wait_all_tasks_blocked()

    assert taken == [1, 2, 3, 4, 5, 6]


async def test_a_newcomer_cannot_take_the_place_of_one_who_waits(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    await park(nursery, mailbox, 3)

    mailbox.take_nowait()  # the producer of 3 has not run yet

    with pytest.raises(MailboxFull):
        mailbox.put_nowait(note(4))
    assert take_all(mailbox) == [2, 3]


async def test_a_cancelled_producer_queues_nothing_and_its_turn_goes_on(
    nursery: trio.Nursery,
) -> None:
    mailbox = full_mailbox()
    async with trio.open_nursery() as impatient:
        await park(impatient, mailbox, 3)
        await park(nursery, mailbox, 4)
        impatient.cancel_scope.cancel()

    assert take_all(mailbox) == [1, 2, 4]


async def test_a_producer_cancelled_just_after_it_found_room_has_put_its_letter() -> None:
    mailbox = full_mailbox()
    put = []

    async def produce() -> None:
        await mailbox.put(note(3))
        put.append(3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce)
        await wait_all_tasks_blocked()
        mailbox.take_nowait()
        nursery.cancel_scope.cancel()

    assert put == [3]
    assert take_all(mailbox) == [2, 3]


async def test_a_producer_cancelled_just_before_there_is_room_leaves_it_to_the_next(
    nursery: trio.Nursery,
) -> None:
    mailbox = full_mailbox()
    async with trio.open_nursery() as impatient:
        await park(impatient, mailbox, 3)
        await park(nursery, mailbox, 4)
        impatient.cancel_scope.cancel()
        mailbox.take_nowait()

    assert take_all(mailbox) == [2, 4]


@pytest.mark.parametrize("make", [Mailbox, full_mailbox], ids=["room", "no room"])
async def test_a_put_in_a_cancelled_scope_queues_nothing(make: Callable[[], Mailbox]) -> None:
    mailbox = make()
    before = mailbox.statistics().depth

    with trio.CancelScope() as scope:
        scope.cancel()
        await mailbox.put(note(3))

    assert scope.cancelled_caught
    assert mailbox.statistics().depth == before


async def test_a_put_is_a_checkpoint_whether_there_is_room_or_not() -> None:
    mailbox = Mailbox(1)
    with assert_checkpoints():
        await mailbox.put(note(1))
    with assert_checkpoints(), trio.move_on_after(0):
        await mailbox.put(note(2))


async def test_when_a_mailbox_shrinks_those_who_wait_wait_longer(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    await park(nursery, mailbox, 3)

    mailbox.capacity = 1
    mailbox.take_nowait()
    assert mailbox.statistics().depth == 1

    assert take_all(mailbox) == [2, 3]


async def test_when_a_mailbox_grows_all_who_fit_are_let_in(nursery: trio.Nursery) -> None:
    mailbox = full_mailbox()
    await park(nursery, mailbox, 3, 4, 5)

    mailbox.capacity = 10
    mailbox.take_nowait()

    assert mailbox.statistics().depth == 4


@pytest.mark.parametrize("seed", range(5))
async def test_impatient_producers_lose_nothing_and_keep_their_order(seed: int) -> None:
    """Every letter whose put returned is taken once, every other one never."""
    dice = random.Random(seed)
    mailbox = Mailbox(3)
    put: list[int] = []
    taken: list[int] = []

    async def produce(first: int) -> None:
        for number in range(first, first + 50):
            with trio.CancelScope() as scope:
                if dice.random() < 0.3:
                    nursery.start_soon(cancel_soon, scope, dice.randrange(4))
                await mailbox.put(note(number))
                put.append(number)

    async def cancel_soon(scope: trio.CancelScope, ticks: int) -> None:
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    async def consume() -> None:
        while True:
            await mailbox.wait()
            letters = [mailbox.take_nowait() for _ in range(dice.randrange(1, 4))]
            taken.extend(number_in(letter) for letter in letters if letter is not None)

    async with trio.open_nursery() as consumer:
        consumer.start_soon(consume)
        async with trio.open_nursery() as nursery:
            for producer in range(8):
                nursery.start_soon(produce, 1000 * producer)
        await wait_all_tasks_blocked()
        consumer.cancel_scope.cancel()

    assert sorted(taken) == sorted(put)
    for producer in range(8):
        of_one = [number for number in taken if number // 1000 == producer]
        assert of_one == sorted(of_one)
    assert 0 < len(put) < 400


# The consumer


async def test_waiting_with_a_letter_there_is_only_a_checkpoint() -> None:
    mailbox = full_mailbox()

    with assert_checkpoints():
        await mailbox.wait()


@pytest.mark.parametrize("letter", [note(1), alarm(1)], ids=["data", "urgent"])
async def test_a_waiting_consumer_is_woken_by_a_letter(letter: Letter) -> None:
    mailbox = Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.wait)
        await wait_all_tasks_blocked()
        mailbox.put_nowait(letter)
        mailbox.put_nowait(letter)  # a second one in the same tick must not wake it again


async def test_a_waiting_consumer_is_woken_by_a_letter_put_back() -> None:
    mailbox = Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.wait)
        await wait_all_tasks_blocked()
        mailbox.put_back(note(1))


async def test_a_second_consumer_is_refused(nursery: trio.Nursery) -> None:
    mailbox = Mailbox()
    nursery.start_soon(mailbox.wait)
    await wait_all_tasks_blocked()

    with pytest.raises(trio.BusyResourceError):
        await mailbox.wait()


async def test_a_consumer_that_gave_up_waiting_leaves_the_mailbox_usable() -> None:
    mailbox = Mailbox()
    with trio.move_on_after(0):
        await mailbox.wait()

    mailbox.put_nowait(note(1))
    await mailbox.wait()

    assert take_all(mailbox) == [1]


async def test_a_consumer_cancelled_just_after_it_was_woken_leaves_the_letter() -> None:
    mailbox = Mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.wait)
        await wait_all_tasks_blocked()
        mailbox.put_nowait(note(1))
        nursery.cancel_scope.cancel()

    assert take_all(mailbox) == [1]


# Closing


def test_closing_returns_what_was_not_read_urgent_first() -> None:
    mailbox = full_mailbox()
    mailbox.put_nowait(alarm(10))

    assert [number_in(letter) for letter in mailbox.close()] == [10, 1, 2]
    assert mailbox.closed
    assert mailbox.statistics().depth == 0


@pytest.mark.parametrize("overflow", list(Overflow))
@pytest.mark.parametrize("letter", [note(3), alarm(3)], ids=["data", "urgent"])
async def test_a_closed_mailbox_takes_nothing(overflow: Overflow, letter: Letter) -> None:
    mailbox = full_mailbox(overflow)
    mailbox.close()

    with pytest.raises(ActorStopped):
        mailbox.put_nowait(letter)
    with pytest.raises(ActorStopped):
        await mailbox.put(letter)

    assert mailbox.statistics().depth == 0


async def test_closing_sends_waiting_producers_away_with_their_letters() -> None:
    mailbox = full_mailbox()
    refused: list[int] = []

    async def produce(number: int) -> None:
        with pytest.raises(ActorStopped):
            await mailbox.put(note(number))
        refused.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce, 3)
        nursery.start_soon(produce, 4)
        await wait_all_tasks_blocked()
        unread = [number_in(letter) for letter in mailbox.close()]

    assert unread == [1, 2]
    assert sorted(refused) == [3, 4]


async def test_a_letter_let_in_just_before_closing_is_among_the_unread() -> None:
    mailbox = full_mailbox()
    async with trio.open_nursery() as nursery:
        await park(nursery, mailbox, 3)
        mailbox.take_nowait()
        unread = [number_in(letter) for letter in mailbox.close()]

    assert unread == [2, 3]


async def test_a_letter_put_while_the_mailbox_closes_is_queued_or_refused_never_both() -> None:
    mailbox = Mailbox()
    unread: list[int] = []
    refused: list[int] = []

    async def produce(number: int) -> None:
        try:
            await mailbox.put(note(number))
        except ActorStopped:
            refused.append(number)

    async def close() -> None:
        unread.extend(number_in(letter) for letter in mailbox.close())

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(produce, number)
        nursery.start_soon(close)

    assert sorted(unread + refused) == list(range(20))


def test_closing_twice_finds_nothing_more() -> None:
    mailbox = full_mailbox()
    mailbox.close()

    assert list(mailbox.close()) == []


# Statistics


def test_statistics_count_what_happened() -> None:
    mailbox = full_mailbox(Overflow.SHED)
    mailbox.put_nowait(alarm(10))
    mailbox.put_nowait(note(3))
    mailbox.take_nowait()
    mailbox.take_nowait()

    seen = mailbox.statistics()

    assert (seen.depth, seen.capacity, seen.high_water) == (1, 2, 2)
    assert (seen.taken, seen.shed, seen.refused) == (2, 1, 0)


def test_statistics_count_refusals() -> None:
    mailbox = full_mailbox(Overflow.FAIL)
    for _ in range(3):
        with pytest.raises(MailboxFull):
            mailbox.put_nowait(note(3))

    assert mailbox.statistics().refused == 3


def test_statistics_tell_the_age_of_the_next_letter() -> None:
    mailbox = Mailbox()
    assert mailbox.statistics().oldest_s == 0.0

    old = note(1)
    old.posted_at -= 60.0
    mailbox.put_nowait(old)
    mailbox.put_nowait(note(2))

    assert 60.0 <= mailbox.statistics().oldest_s < 120.0


# Replies


async def test_an_asker_gets_the_answer_it_waits_for() -> None:
    reply = Reply()
    answers: list[object] = []

    async def ask() -> None:
        answers.append(await reply.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        reply.send("yes")

    assert answers == ["yes"]


async def test_an_answer_may_come_before_the_wait_which_is_still_a_checkpoint() -> None:
    reply = Reply()
    reply.send("yes")

    with assert_checkpoints():
        assert await reply.wait() == "yes"


async def test_a_failed_reply_raises_in_the_asker() -> None:
    reply = Reply()
    reply.fail(ActorFailed("it broke"))

    with pytest.raises(ActorFailed, match="it broke"):
        await reply.wait()


async def test_only_the_first_answer_counts() -> None:
    reply = Reply()
    assert not reply.settled
    reply.send("first")
    reply.send("second")
    reply.fail(ActorFailed("third"))

    assert await reply.wait() == "first"


async def test_a_second_answer_in_the_tick_of_the_first_is_dropped() -> None:
    reply = Reply()
    answers: list[object] = []

    async def ask() -> None:
        answers.append(await reply.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        reply.send("first")
        reply.fail(ActorStopped("second"))

    assert answers == ["first"]


async def test_an_answer_to_an_asker_that_gave_up_is_dropped() -> None:
    reply = Reply()
    with trio.move_on_after(0) as scope:
        await reply.wait()

    assert scope.cancelled_caught
    assert reply.settled
    reply.send("late")
    reply.fail(ActorStopped("later"))


async def test_an_answer_wins_over_a_cancellation_in_the_same_tick() -> None:
    reply = Reply()
    answers: list[object] = []

    async def ask() -> None:
        answers.append(await reply.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        reply.send("yes")
        nursery.cancel_scope.cancel()

    assert answers == ["yes"]


async def test_a_cancellation_wins_over_an_answer_that_comes_after_it() -> None:
    reply = Reply()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reply.wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        reply.send("late")

    assert nursery.cancel_scope.cancelled_caught
