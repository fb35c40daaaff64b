"""What a decode step costs on one core before and after the model: scheduling and bookkeeping.

    python docs/benchmarks/scheduling.py            # the table
    python docs/benchmarks/scheduling.py --profile  # and where the time goes, at 1,024 rows

Policy, block allocator and context are the real ones, called one after another without actors and
messages between them; the sampled tokens are given. 16, 64, 256 and 1,024 rows decode at once:

inside      no row fills a block in the steps that are measured
crossing    blocks of 16 tokens, so that in every step a sixteenth of the rows gets another one,
            and the full ones are entered into the prefix cache
together    the same, but with all rows filling their blocks in one step out of sixteen
text        as inside, with every token made text
stop        as text, looking for a stop string

A line for each: the median and the 99th percentile of a step in microseconds, then the medians of
its parts, in their order:

propose     who could run, and what blocks that takes        (policy)
reserve     the blocks                                       (allocator)
plan        the step                                         (policy)
inputs      its blocks, the model's inputs, the sampler's    (context)
outcome     rows that go on, wait or end, by their tokens    (context)
advance     the same for the requests; deltas for clients    (policy)
cache       full blocks that may be shared from now on       (allocator)
"""

import cProfile
import gc
import pstats
import sys
import time
from array import array
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import Request
from callboard.actors.policy import Planned, SchedulingPolicy
from callboard.gpu.context import DynamicContext
from callboard.gpu.text import TextStream
from callboard.messages.base import Call
from callboard.messages.blocks import BlocksGranted, CacheBlocks
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import DeviceReady, RunStep, StepDone

ROWS = (16, 64, 256, 1024)
STEPS = 400
WARM_UP_STEPS = 40
PROMPT_TOKENS = 64
MAX_MODEL_LEN = 2048
VOCABULARY = 50_000
PARTS = ("propose", "reserve", "plan", "inputs", "outcome", "advance", "cache")

R = TypeVar("R")


class Kind(msgspec.Struct, frozen=True):
    """What is measured: see the top."""

    name: str
    block_tokens: int = 1024
    spread: int = 16
    makes_text: bool = False
    stop: tuple[str, ...] = ()


KINDS = (
    Kind("inside"),
    Kind("crossing", block_tokens=16),
    Kind("together", block_tokens=16, spread=1),
    Kind("text", makes_text=True),
    Kind("stop", makes_text=True, stop=("no such text",)),
)


class Vocabulary:
    """Tokens of two to seven letters and a space, as byte-level ones are on average."""

    special_token_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self) -> None:
        self._bytes = [f" {token:x}".encode() * (1 + token % 2) for token in range(VOCABULARY)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


class Answers:
    """The scheduler, as the allocator sees it: it keeps what it is told."""

    name = "scheduler"

    def __init__(self) -> None:
        self.granted: BlocksGranted | None = None

    async def tell(self, message: BlocksGranted) -> None:
        self.granted = message

    def tell_nowait(self, message: BlocksGranted) -> None:
        self.granted = message

    async def ask(self, call: Call[R], *, timeout: float = 5.0) -> R:
        raise NotImplementedError


class Replica:
    """As many decoding rows as there is room for, stepped by hand, each part against the clock."""

    def __init__(self, rows: int, kind: Kind) -> None:
        num_blocks = rows * -(-MAX_MODEL_LEN // kind.block_tokens)
        device = DeviceReady(
            block_tokens=kind.block_tokens,
            num_blocks=num_blocks,
            max_rows=rows,
            max_step_tokens=rows * (PROMPT_TOKENS + kind.block_tokens),
            max_model_len=MAX_MODEL_LEN,
        )
        self._policy = SchedulingPolicy(prefix_caching=True)
        self._policy.device_ready(device)
        self._answers = Answers()
        self._allocator = KVAllocator(self._answers)
        finish(self._allocator.receive(device))
        self._context = DynamicContext(
            max_rows=rows,
            max_tokens=device.max_step_tokens,
            max_model_len=MAX_MODEL_LEN,
            block_tokens=kind.block_tokens,
            num_blocks=num_blocks + 1,
        )
        self._random = np.random.default_rng(0)
        vocabulary = Vocabulary()
        for number in range(rows):
            text = TextStream(vocabulary, stop=kind.stop) if kind.makes_text else None
            prompt_tokens = PROMPT_TOKENS + number % kind.spread
            self._policy.add(self._request(number, prompt_tokens, text))
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self) -> None:
        """Run one step, its parts timed."""
        policy = self._policy
        question = self._timed("propose", policy.propose)
        self._timed("reserve", lambda: finish(self._allocator.receive(question)))
        planned = self._timed("plan", self._plan)
        assert planned.step is not None
        step = planned.step
        num_sampling = self._timed("inputs", lambda: self._begin(step))
        tokens = self._random.integers(0, VOCABULARY, num_sampling, dtype=np.int32)
        done = self._timed("outcome", lambda: self._finish(step, tokens))
        result = self._timed("advance", lambda: policy.advance(done))
        cache = CacheBlocks(computed=tuple(result.computed))
        self._timed("cache", lambda: finish(self._allocator.receive(cache)))

    def _request(self, number: int, prompt_tokens: int, text: TextStream | None) -> Request:
        prompt = self._random.integers(0, VOCABULARY, prompt_tokens)
        return Request(
            str(number),
            array("i", prompt.tolist()),
            SamplingParams(),
            seed=number,
            max_tokens=MAX_MODEL_LEN - len(prompt),
            stop_token_ids=(VOCABULARY + 1,),
            order=(0, number),
            text=text,
            accepted_at=0.0,
            deadline=float("inf"),
        )

    def _plan(self) -> Planned:
        assert self._answers.granted is not None
        return self._policy.plan(self._answers.granted)

    def _begin(self, step: RunStep) -> int:
        """Take in what the step brings; return how many rows sample."""
        context = self._context
        context.grant([grant.row for grant in step.grants], [grant.block for grant in step.grants])
        for admit in step.admits:
            context.add_row(admit)
        inputs = context.begin_step()
        assert inputs is not None
        context.sampling_rows()
        return len(inputs.last_token_indices_S)

    def _finish(self, step: RunStep, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> StepDone:
        outcome = self._context.finish_step(tokens)
        return StepDone(
            step=step.step,
            rows=tuple(outcome.rows.tolist()),
            token_ids=outcome.token_ids.tobytes(),
            stopped=tuple(outcome.stopped.tolist()),
            full=tuple(outcome.full.tolist()),
        )

    def _timed(self, part: str, call: Callable[[], R]) -> R:
        began = time.perf_counter()
        result = call()
        self.seconds[part].append(time.perf_counter() - began)
        return result


def finish(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


def measured(rows: int, kind: Kind) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the microseconds of each part of each step."""
    replica = Replica(rows, kind)
    for _ in range(WARM_UP_STEPS):
        replica.step()
    replica.seconds = {part: [] for part in PARTS}
    for _ in range(STEPS):
        replica.step()
    return {part: 1e6 * np.array(seconds) for part, seconds in replica.seconds.items()}


def report(rows: int, kind: Kind) -> None:
    parts = measured(rows, kind)
    steps = sum(parts.values(), np.zeros(STEPS))
    medians = "".join(f"{np.median(part):>9,.0f}" for part in parts.values())
    whole = f"{np.median(steps):>9,.0f}{np.percentile(steps, 99):>9,.0f}"
    print(f"{rows:>5} {kind.name:<9}{whole}  ={medians}", flush=True)


def profile(rows: int, kind: Kind) -> None:
    print(f"\n{rows} rows, {kind.name}, {STEPS} steps")
    replica = Replica(rows, kind)
    for _ in range(WARM_UP_STEPS):
        replica.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(STEPS):
        replica.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main() -> None:
    names = "".join(f"{part:>9}" for part in PARTS)
    print(f" rows {'µs a step':<9}{'median':>9}{'p99':>9}   {names}")
    for kind in KINDS:
        for rows in ROWS:
            report(rows, kind)
            gc.collect()
    if "--profile" in sys.argv[1:]:
        for kind in KINDS:
            profile(ROWS[-1], kind)


if __name__ == "__main__":
    main()
