"""Two prompts, answered by a model inside this program."""

import trio

import callboard


async def main() -> None:
    async with callboard.open_engine() as engine:
        prompts = ["The capital of France is", "The opposite of hot is"]
        for answer in await engine.generate(prompts, temperature=0.0, max_tokens=2):
            print(answer.text)


trio.run(main)
