"""One source of chance: while a simulation runs, everything random comes from its seed.

Trio has a switch that its Hypothesis support uses: tasks that may run at once are put into order
and then shuffled by a random instance of trio's own. Here that instance is seeded, so the seed
decides about the interleaving of tasks, too.
"""

import functools
import gc
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import trio
from trio._core import _run as trio_run
from trio._core._run import GLOBAL_RUN_CONTEXT
from trio.testing import MockClock

from callboard.actors import session
from callboard.messages.codec import schema_hash

_cached_schema_hash = functools.cache(schema_hash)

EPOCH = 1_700_000_000.0
"""What the time of day is when a simulation begins."""


def new_clock() -> MockClock:
    """Return a clock that jumps to the next deadline whenever nothing can run, at little cost."""
    clock = MockClock(autojump_threshold=0.0)

    def autojump() -> None:  # as its own, which counts all tasks and sockets first
        jump = GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline() - clock.current_time()
        if 0 < jump < math.inf:
            clock.jump(jump)

    clock._real_clock = lambda: 0.0  # its rate is 0, and it is asked often
    clock._autojump = autojump  # type: ignore[method-assign]
    return clock


def stream(seed: int, purpose: str) -> random.Random:
    """Return a source of random numbers of its own for each purpose, the same for every run."""
    return random.Random(f"{seed}/{purpose}")


@contextmanager
def determined(seed: int, clock: MockClock) -> Iterator[None]:
    """Let trio's scheduler, the entropy pool, the clocks and threads follow the seed."""
    entropy, pace = stream(seed, "entropy"), stream(seed, "pace")
    before = trio_run._r.getstate()
    with ExitStack() as stack:
        replace = _replacer(stack)
        replace(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        replace(secrets, "token_hex", lambda size=32: entropy.randbytes(size).hex())
        replace(secrets, "randbits", entropy.getrandbits)
        replace(time, "time", lambda: EPOCH + clock.current_time())
        replace(time, "time_ns", lambda: int((EPOCH + clock.current_time()) * 1e9))
        replace(time, "monotonic", clock.current_time)
        replace(time, "perf_counter", _unsteady(pace))
        replace(trio.to_thread, "run_sync", _run_here)
        replace(os, "getpid", lambda: 1)
        replace(session, "schema_hash", _cached_schema_hash)  # a third of a connection's cost
        trio_run._r.seed(stream(seed, "trio").random())
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            trio_run._r.setstate(before)


def _replacer(stack: ExitStack) -> Callable[[Any, str, object], None]:
    def replace(owner: Any, name: str, value: object) -> None:
        stack.enter_context(patch.object(owner, name, value))

    return replace


def _unsteady(rng: random.Random) -> Callable[[], float]:
    """Return a clock that now and then has an actor believe that it has worked for long enough."""
    now = 0.0

    def read() -> float:
        nonlocal now
        if rng.random() < 0.05:
            now += 1e-3
        return now

    return read


async def _run_here(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do a worker thread's job at once, in the task that waits for it."""
    await trio.lowlevel.checkpoint()
    return function(*args)
