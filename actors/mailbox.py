"""A bounded, two-lane mailbox for one actor.

Control letters (verbs, exits of children, stop) come first, whatever waits in the data lane. The
consumer takes letters without yielding and decides itself when to checkpoint: a task switch costs
ten to twenty times what taking a letter does.
"""

import enum
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import outcome
import trio

from callboard.messages.base import Message
from callboard.messages.errors import ActorStopped, MailboxFull

DEFAULT_CAPACITY = 1024


class Overflow(enum.Enum):
    """What a tell to a full mailbox does: wait for room, raise MailboxFull, or drop the oldest."""

    WAIT = "wait"
    FAIL = "fail"
    SHED = "shed"


class Reply:
    """The one-shot slot an asker waits on; whoever holds it answers once, now or later."""

    __slots__ = ("_outcome", "_task")

    def __init__(self) -> None:
        self._outcome: outcome.Outcome[Any] | None = None
        self._task: trio.lowlevel.Task | None = None

    @property
    def settled(self) -> bool:
        """Whether it has been answered, or its asker has given up."""
        return self._outcome is not None

    def send(self, value: object) -> None:
        """Answer; a second answer, or one nobody waits for any more, is dropped."""
        self._settle(outcome.Value(value))

    def fail(self, error: BaseException) -> None:
        """Answer by raising `error` in the asker."""
        self._settle(outcome.Error(error))

    async def wait(self) -> Any:
        """Wait for the answer and return it; a cancelled wait drops the answer on arrival."""
        if self._outcome is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        else:
            await trio.lowlevel.checkpoint()
        assert self._outcome is not None
        return self._outcome.unwrap()

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        self._outcome = outcome.Error(ActorStopped("the asker was cancelled"))
        return trio.lowlevel.Abort.SUCCEEDED

    def _settle(self, result: outcome.Outcome[Any]) -> None:
        if self._outcome is not None:
            return
        self._outcome = result
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)


class Letter:
    """A message with what is written on its outside."""

    __slots__ = ("attempts", "cause", "deadline", "message", "message_id", "posted_at", "reply")

    def __init__(
        self,
        message: Message,
        *,
        message_id: int = 0,
        cause: int = 0,
        deadline: float = float("inf"),
        reply: Reply | None = None,
    ) -> None:
        self.message = message
        self.message_id = message_id
        self.cause = cause
        self.deadline = deadline
        self.reply = reply
        self.posted_at = time.monotonic()
        self.attempts = 0


class MailboxStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How full a mailbox is and has been; `oldest_s` is the age of the first letter waiting."""

    depth: int
    capacity: int
    high_water: int
    taken: int
    refused: int
    shed: int
    oldest_s: float


class Mailbox:
    """Two lanes of letters for one consumer; many producers."""

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, overflow: Overflow = Overflow.WAIT
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a mailbox of capacity {capacity} can hold nothing")
        self.capacity = capacity
        self.overflow = overflow
        self._control: deque[Letter] = deque()
        self._data: deque[Letter] = deque()
        self._consumer: trio.lowlevel.Task | None = None
        self._parked: OrderedDict[trio.lowlevel.Task, Letter] = OrderedDict()
        self._closed = False
        self._high_water = 0
        self._taken = 0
        self._refused = 0
        self._shed = 0

    @property
    def closed(self) -> bool:
        """Whether nothing is taken in any more."""
        return self._closed

    def put_nowait(self, letter: Letter) -> Letter | None:
        """Queue a letter; returns the letter it displaced when the mailbox sheds.

        Raises MailboxFull when the data lane is full (and does not shed), ActorStopped when closed.
        """
        if self._closed:
            raise ActorStopped("the mailbox is closed")
        if letter.message.urgent:
            self._control.append(letter)
            self._wake()
            return None
        displaced = self._make_room()
        self._data.append(letter)
        self._high_water = max(self._high_water, len(self._data))
        self._wake()
        return displaced

    async def put(self, letter: Letter) -> Letter | None:
        """Queue a letter, waiting for room where that is the mailbox's way. A checkpoint.

        Those who wait are served in order; a cancelled one has queued nothing.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.must_wait(letter):
            await self._wait_for_room(letter)
            return None
        displaced = self.put_nowait(letter)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return displaced

    def take_nowait(self) -> Letter | None:
        """Take the next letter, control lane first; None when there is none."""
        if self._control:
            self._taken += 1
            return self._control.popleft()
        if not self._data:
            return None
        self._taken += 1
        letter = self._data.popleft()
        if self._parked:
            self._admit_parked()
        return letter

    async def wait(self) -> None:
        """Wait until there is a letter; one consumer at a time. A checkpoint."""
        if self._control or self._data:
            await trio.lowlevel.checkpoint()
            return
        if self._consumer is not None:
            raise trio.BusyResourceError("a mailbox has one consumer")
        self._consumer = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)

    def put_back(self, letter: Letter) -> None:
        """Return a letter to the front of its lane."""
        lane = self._control if letter.message.urgent else self._data
        lane.appendleft(letter)
        self._wake()

    def discard(self, kind: type[Message]) -> None:
        """Forget the urgent letters of one kind that wait."""
        self._control = deque(
            letter for letter in self._control if not isinstance(letter.message, kind)
        )

    def close(self) -> Iterator[Letter]:
        """Take nothing in any more; returns the letters that were never read."""
        self._closed = True
        for producer in self._parked:
            trio.lowlevel.reschedule(producer, outcome.Error(ActorStopped("the mailbox is closed")))
        self._parked.clear()
        leftover = [*self._control, *self._data]
        self._control.clear()
        self._data.clear()
        return iter(leftover)

    def statistics(self) -> MailboxStatistics:
        """Return a snapshot of depth and counters."""
        first = self._control[0] if self._control else self._data[0] if self._data else None
        return MailboxStatistics(
            depth=len(self._control) + len(self._data),
            capacity=self.capacity,
            high_water=self._high_water,
            taken=self._taken,
            refused=self._refused,
            shed=self._shed,
            oldest_s=0.0 if first is None else time.monotonic() - first.posted_at,
        )

    def must_wait(self, letter: Letter) -> bool:
        """Return whether `put` would wait for room."""
        return (
            not self._closed
            and not letter.message.urgent
            and self.overflow is Overflow.WAIT
            and len(self._data) >= self.capacity
        )

    async def _wait_for_room(self, letter: Letter) -> None:
        producer = trio.lowlevel.current_task()
        self._parked[producer] = letter

        def give_up(_: object) -> trio.lowlevel.Abort:
            del self._parked[producer]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)

    def _admit_parked(self) -> None:
        # The consumer moves the letter itself: a place that was merely offered could be taken by
        # a newcomer before its producer runs.
        while self._parked and len(self._data) < self.capacity:
            producer, letter = self._parked.popitem(last=False)
            self._data.append(letter)
            trio.lowlevel.reschedule(producer)

    def _make_room(self) -> Letter | None:
        if len(self._data) < self.capacity:
            return None
        if self.overflow is Overflow.SHED:
            self._shed += 1
            return self._data.popleft()
        self._refused += 1
        raise MailboxFull(f"the mailbox holds {self.capacity} messages already")

    def _wake(self) -> None:
        if self._consumer is not None:
            trio.lowlevel.reschedule(self._consumer)
            self._consumer = None

    def _stop_waiting(self, _: object) -> trio.lowlevel.Abort:
        self._consumer = None
        return trio.lowlevel.Abort.SUCCEEDED
