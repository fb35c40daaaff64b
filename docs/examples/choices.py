"""Four answers to one prompt, each made with a seed of its own."""

import trio

import callboard


async def main() -> None:
    async with callboard.open_engine(model="random:tiny", kv_cache_gb=0.01) as engine:
        answers = await engine.generate([[1, 2, 3]], n=4, seed=7, max_tokens=8)
        print([(answer.choice, answer.seed) for answer in answers])

        [alone] = await engine.generate([[1, 2, 3]], seed=9, max_tokens=8)
        print(alone.token_ids == answers[2].token_ids)


trio.run(main)
