"""Notices that something stands still, be it the event loop of this process or another process.

What stands still cannot say so itself: an event loop is watched by a thread, and a replica's
process by its root, too. Time is counted in the watcher's own turns, so that it blames nobody for
time in which it stood still itself, because the whole machine or terminal job was stopped.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

STUCK_LOOP = 70
"""The exit code of a process whose event loop was stuck."""

LOOKS = 10
"""How often a watcher looks within the time after which it gives up."""

LONGEST_LOOK_S = 1.0
LAST_WORDS_S = 2.0


class Silence:
    """For how long there was no new sign of life, in seconds of the watcher's own turns."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None

    def look(self, sign: object, turn_s: float) -> float:
        """Compare the newest sign with the one of the turn before, which began `turn_s` ago."""
        self.seconds = self.seconds + turn_s if sign == self._last else 0.0
        self._last = sign
        return self.seconds


def turn_of(timeout_s: float) -> float:
    """Return how long to wait between two looks."""
    return min(timeout_s / LOOKS, LONGEST_LOOK_S)


def end_stuck_process() -> None:
    """Write the stack of every thread to standard error, and end the process at once."""
    # By a thread, since standard error may be what everything waits for.
    writer = threading.Thread(target=_write_stacks, daemon=True)
    writer.start()
    writer.join(LAST_WORDS_S)
    os._exit(STUCK_LOOP)


@contextmanager
def watched_loop(
    timeout_s: float, *, give_up: Callable[[], object] = end_stuck_process
) -> Iterator[None]:
    """Call `give_up`, in a thread, when this event loop makes no turn for so long; 0 is never."""
    if timeout_s == 0:
        yield
        return
    watch = _LoopWatch(timeout_s, give_up, trio.lowlevel.current_trio_token())
    thread = threading.Thread(target=watch.run, name="callboard watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join()


class _LoopWatch:
    def __init__(
        self, timeout_s: float, give_up: Callable[[], object], loop: trio.lowlevel.TrioToken
    ) -> None:
        self.over = threading.Event()
        self._timeout_s = timeout_s
        self._turn_s = turn_of(timeout_s)
        self._give_up = give_up
        self._loop = loop
        self._turns = 0

    def run(self) -> None:
        """Look until it is over, or the loop is stuck."""
        silence = Silence()
        while not self.over.wait(self._turn_s):
            if silence.look(self._turns, self._turn_s) >= self._timeout_s:
                self._give_up()
                return
            self._loop.run_sync_soon(self._count_turn, idempotent=True)

    def _count_turn(self) -> None:
        self._turns += 1


def _write_stacks() -> None:
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
