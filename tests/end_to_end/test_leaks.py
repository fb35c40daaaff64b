"""Thousands of requests come and go, and nothing of them stays."""

import gc
import random
import types
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import Request
from callboard.actors.testing import ScriptedRunner
from callboard.messages.sampling import SamplingParams
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.stream import RequestStream

EMPTY = types.CellType()

REQUESTS = 2_000
EARLIER = 400
"""Requests after which every table has the size that it keeps."""

TOLERATED = 500
"""Entries that may come and go, as those of cancelled timers do; a leak is one a request at least.

A timer counts four times, with what is in it.
"""


def next_token(tokens: list[int]) -> int:
    return (tokens[-1] * 31 + len(tokens)) % 900


class Letters:
    """The text of a request: a letter a token, without a stop string."""

    stopped = None

    def continue_from(self, token_id: int) -> None:
        pass

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def finish(self) -> str:
        return ""


def parts(runner: ScriptedRunner) -> ReplicaParts:
    return ReplicaParts(
        make_runner=lambda: runner,
        codec=None,
        text_for=lambda params: Letters(),
        vocab_size=1000,
        eos_token_ids=(),
    )


async def come_and_go(engine: Engine, count: int, rng: random.Random) -> None:
    """Let requests of 1 to 64 tokens run, a few of which are left, aborted or too late."""
    async with trio.open_nursery() as nursery:
        for number in range(count):
            prompt = [number % 7] * rng.randint(1, 40)
            params = SamplingParams(max_tokens=rng.randint(1, 64))
            nursery.start_soon(one, engine, prompt, params, number % 50)


async def one(engine: Engine, prompt: list[int], params: SamplingParams, kind: int) -> None:
    timeout_s = 0.001 if kind == 0 else 1e6 if kind < 10 else None
    async with engine.submit(prompt, params, timeout_s=timeout_s) as stream:
        if kind == 3:
            return
        async for _ in stream:
            if kind == 4:
                await engine.abort(stream.request_id)


async def settle(engine: Engine) -> None:
    """Wait until all mail about the requests before has been read, and that has been said."""
    await engine.generate([[1]], max_tokens=1)
    await trio.sleep(2.0)  # of the mock clock; clients say within a second what they have read
    await engine.generate([[1]], max_tokens=1)
    await wait_all_tasks_blocked()
    gc.collect()


def alive(kind: type) -> int:
    return sum(type(found) is kind for found in gc.get_objects())


def sizes(engine: Engine) -> Counter[str]:
    """Return how many entries there are in all containers of the engine and its actors."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("Engine", engine)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            found[name] += len(value)
        waiting += inside(name, value)
    return found


def inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object of ours refers to, each under the name of its place."""
    if isinstance(value, dict):
        yield from ((name, item) for item in value.values())
    elif isinstance(value, list | set | deque | tuple):
        yield from ((name, item) for item in value)
    elif isinstance(value, types.FunctionType):
        yield from ((name, cell.cell_contents) for cell in value.__closure__ or () if cell != EMPTY)
    elif type(value).__module__.startswith("callboard.") and not isinstance(value, msgspec.Struct):
        kind = type(value).__name__
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for attribute in names:
            if hasattr(value, attribute):
                yield f"{kind}.{attribute}", getattr(value, attribute)


@pytest.fixture
def jumping_clock() -> MockClock:
    """Jumps once nothing has happened for long enough that no job is on the device's thread."""
    return MockClock(autojump_threshold=0.03)


@pytest.mark.parametrize("pipeline_depth", [1, 2])
async def test_two_thousand_requests_leave_nothing_behind(
    pipeline_depth: int, jumping_clock: MockClock
) -> None:
    rng = random.Random(7)
    runner = ScriptedRunner(
        next_token, block_tokens=16, num_blocks=300, max_rows=128, max_step_tokens=512
    )
    async with open_engine(parts=parts(runner), pipeline_depth=pipeline_depth) as engine:
        await come_and_go(engine, EARLIER, rng)
        await settle(engine)
        before = sizes(engine)

        await come_and_go(engine, REQUESTS, rng)
        await settle(engine)

        grown = [name for name, size in sizes(engine).items() if size > before[name] + TOLERATED]
        assert grown == []
        assert (alive(Request), alive(RequestStream)) == (0, 0)
        assert runner.rows == []
        allocator = engine._system.cells["replica-0/kv_allocator"].actor
        assert isinstance(allocator, KVAllocator)
        assert allocator._pool is not None
        allocator._pool.audit()
        assert allocator._pool.free == allocator._pool.usable == 300
