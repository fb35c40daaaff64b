"""What the actors of one process share: names, message ids, timers and dead letters.

There is one `ActorSystem` per trio run and caller, never a global one.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import trio

from callboard.logs import get_logger
from callboard.messages.base import Message

if TYPE_CHECKING:
    from callboard.actors.actor import Cell
    from callboard.actors.journal import Journal

log = get_logger()

DEAD_LETTERS_KEPT = 1000


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message nobody will handle, and why."""

    receiver: str
    reason: str
    message: Message


class DeadLetters:
    """The last undeliverable messages, and how many there were by reason and type."""

    def __init__(self, kept: int = DEAD_LETTERS_KEPT) -> None:
        self.last: deque[DeadLetter] = deque(maxlen=kept)
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, receiver: str, reason: str, message: Message) -> None:
        """Record one; never raises and never blocks."""
        kind = type(message).__name__
        self.last.append(DeadLetter(receiver=receiver, reason=reason, message=message))
        self.counts[reason, kind] += 1
        log.debug("dead letter", receiver=receiver, reason=reason, kind=kind)


class Timer:
    """A callback that is due at a time of the trio clock, unless cancelled."""

    __slots__ = ("_timers", "callback", "due")

    def __init__(self, timers: "Timers", due: float, callback: Callable[[], None]) -> None:
        self._timers = timers
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Make it never fire; harmless when it has."""
        if self.callback is not None:
            self.callback = None
            self._timers.forget()


class Timers:
    """One heap of timers served by one task, instead of a cancel scope a message (10 to 50 µs)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0
        self._earlier = trio.Event()

    def at(self, due: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` at `due` on the trio clock; it must not raise.

        Raises ValueError when `due` is NaN, which is before and after nothing.
        """
        if math.isnan(due):
            raise ValueError("a timer cannot be due at NaN")
        timer = Timer(self, due, callback)
        if not self._heap or due < self._heap[0][0]:
            self._earlier.set()
        heapq.heappush(self._heap, (due, next(self._order), timer))
        return timer

    def forget(self) -> None:
        """Count a cancelled timer, and rebuild the heap when most of it is cancelled."""
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    async def run(self) -> None:
        """Fire timers for ever."""
        while True:
            self._earlier = trio.Event()
            due = self._heap[0][0] if self._heap else float("inf")
            with trio.move_on_at(due):
                await self._earlier.wait()
            self._fire(trio.current_time())

    def _fire(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            _, _, timer = heapq.heappop(self._heap)
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._cancelled -= 1
            else:
                callback()


class ActorSystem:
    """Names to cells, fresh message ids, timers, dead letters, and the journal if there is one."""

    def __init__(self, journal: "Journal | None" = None) -> None:
        self.journal = journal
        self.dead_letters = DeadLetters()
        self.timers = Timers()
        self.cells: dict[str, Cell] = {}
        self._message_ids = itertools.count(1)

    def next_message_id(self) -> int:
        """Return an id no other message of this process has."""
        return next(self._message_ids)

    def cell(self, name: str) -> "Cell":
        """Return the cell of that name; it has a mailbox before, between and after its lives."""
        from callboard.actors.actor import Cell

        found = self.cells.get(name)
        if found is None:
            found = self.cells[name] = Cell(self, name)
        return found

    def forget(self, name: str) -> None:
        """Close the cell of a name that nobody will use again, and let go of it."""
        found = self.cells.pop(name, None)
        if found is not None:
            found.close()


@asynccontextmanager
async def open_system(journal: "Journal | None" = None) -> AsyncGenerator[ActorSystem]:
    """Open an actor system in the caller's task; its timers run until the block ends.

    What is in a mailbox then is answered or buried, since no life will read it.
    """
    system = ActorSystem(journal)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(system.timers.run)
            yield system
            nursery.cancel_scope.cancel("the actor system was closed")
    finally:
        for cell in system.cells.values():
            cell.close()
