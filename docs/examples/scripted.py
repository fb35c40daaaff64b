"""The whole engine around a model that is a Python function: for tests of what uses it."""

import trio

import callboard
from callboard.actors.testing import ScriptedRunner
from callboard.supervision.app import ReplicaParts


def add_last_two(tokens: list[int]) -> int:
    return (tokens[-1] + tokens[-2]) % 1000


FIBONACCI = ReplicaParts(
    make_runner=lambda: ScriptedRunner(add_last_two),
    codec=None,
    text_for=None,
    vocab_size=1000,
    eos_token_ids=(),
)


async def main() -> None:
    async with callboard.open_engine(parts=FIBONACCI) as engine:
        [answer] = await engine.generate([[1, 1]], max_tokens=8)
        print(answer.token_ids, answer.finish_reason)


trio.run(main)
