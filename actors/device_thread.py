"""One operating-system thread that makes all torch calls of an executor.

CUDA's current device, the OpenMP pool and inference mode belong to a thread, and a kernel that
runs for 50 ms must not stop the event loop: so the calls go through a queue to this thread and
their results come back through trio's token.
"""

import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import trio

from callboard.actors.mailbox import Reply

T = TypeVar("T")

DEVICE_THREAD = "callboard device"
LEFT_BEHIND = " (left behind)"


def num_left_behind() -> int:
    """Return how many threads of this process hang in a job that was given up."""
    return sum(thread.name.endswith(LEFT_BEHIND) for thread in threading.enumerate())


def hangs() -> bool:
    """Whether a device thread of this process is in a job that was waited for in vain."""
    return any(thread.name.startswith(DEVICE_THREAD) for thread in threading.enumerate())


class DeviceThread:
    """A worker thread; everything but its jobs is for tasks of the trio run that made it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Reply] | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        # A daemon, since a kernel that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._is_left_behind = False

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    async def aclose(self) -> None:
        """Take no more jobs and wait for the one in hand; cancelled, it leaves the thread to it.

        The interpreter must not end while a thread is inside torch, or the process aborts. A thread
        that was left behind is not waited for.
        """
        if self._is_left_behind:
            return
        self._jobs.put(None)
        await trio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)

    def leave_behind(self) -> str:
        """Give up a job that does not end, and the thread with it; returns where it hangs.

        Should it end after all, nobody hears of it, and the thread ends as well.
        """
        self._is_left_behind = True
        self._thread.name += LEFT_BEHIND
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job on the thread and return what it returns, or raise what it raises.

        Jobs run in order. A cancelled wait leaves the job running and drops its result.
        """
        reply = Reply()
        self._jobs.put((job, reply))
        return cast(T, await reply.wait())

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, reply = item
            try:
                result = job()
            except BaseException as error:  # goes to whoever waits, whatever it is
                self._hand_over(reply.fail, error)
            else:
                self._hand_over(reply.send, result)
            # Nothing of a job may live on here while the thread waits for the next: a model, say.
            del item, job, reply
            result = None

    def _hand_over(self, settle: Callable[[Any], None], value: object) -> None:
        try:
            self._token.run_sync_soon(settle, value)
        except trio.RunFinishedError:
            return
