"""What a step costs besides the model: the whole embedded engine, with a script for a model.

    python docs/benchmarks/steps.py

16, 64 and 256 requests decode 500 tokens each, all at once. A line for each number of requests:

steps a second, tokens a second, and microseconds a step: in all, those the script took, and the
rest, which is the engine's: scheduling, block bookkeeping, all messages of the step, and the
streams of its requests, down to the caller's.
"""

import time

import trio

from callboard.actors.testing import ScriptedRunner
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine

REQUESTS = (16, 64, 256)
TOKENS = 500
BLOCK_TOKENS = 16
WARM_UP_TOKENS = 20


class TimedRunner(ScriptedRunner):
    """Counts its steps, and the seconds spent in them."""

    def __init__(self, requests: int) -> None:
        super().__init__(
            block_tokens=BLOCK_TOKENS,
            num_blocks=requests * (TOKENS // BLOCK_TOKENS + 2),
            max_rows=requests,
            max_step_tokens=2 * requests,
        )
        self.seconds = 0.0

    def execute(self, step: RunStep) -> StepDone:
        began = time.perf_counter()
        done = super().execute(step)
        self.seconds += time.perf_counter() - began
        return done


async def decode(engine: Engine, requests: int, tokens: int) -> None:
    prompts = [[index % 100] for index in range(requests)]
    await engine.generate(prompts, max_tokens=tokens)


async def measure(requests: int) -> None:
    runner = TimedRunner(requests)
    parts = ReplicaParts(
        make_runner=lambda: runner,
        codec=None,
        text_for=None,
        vocab_size=1000,
        eos_token_ids=(),
    )
    async with open_engine(parts=parts) as engine:
        await decode(engine, requests, WARM_UP_TOKENS)
        runner.steps, runner.seconds = 0, 0.0
        began = time.perf_counter()
        await decode(engine, requests, TOKENS)
        report(requests, runner, time.perf_counter() - began)


def report(requests: int, runner: TimedRunner, seconds: float) -> None:
    whole, script = (1e6 * value / runner.steps for value in (seconds, runner.seconds))
    print(
        f"{requests:>3} requests  {runner.steps / seconds:>7,.0f} steps/s"
        f"  {requests * TOKENS / seconds:>9,.0f} tokens/s"
        f"  {whole:>7,.0f} µs a step = {script:,.0f} script + {whole - script:,.0f} engine"
    )


def main() -> None:
    for requests in REQUESTS:
        trio.run(measure, requests)


if __name__ == "__main__":
    main()
