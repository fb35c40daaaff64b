"""Sampling and training in turns: requests go on while their weights change under them."""

import trio

import callboard

PROMPTS = [[1, 2, 3], [4, 5]]


async def main() -> None:
    async with callboard.open_engine(model="random:tiny", kv_cache_gb=0.01) as engine:
        running = await engine.add_request("long", [7], max_tokens=400, ignore_eos=True)
        for seed in range(1, 4):
            answers = await engine.generate(PROMPTS, max_tokens=20, ignore_eos=True)
            print("sampled by weights", {answer.weights_version for answer in answers})

            await engine.pause()
            await engine.update_weights(f"random:tiny#{seed}")  # a trainer's checkpoint
            await engine.unpause()

        versions = (await running.completion()).weights_versions or []
        print(len(versions), "tokens of one request, in order:", versions == sorted(versions))


trio.run(main)
