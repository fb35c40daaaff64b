"""An engine that runs one forward pass at a time, whenever it is told to."""

import trio

import callboard


async def main() -> None:
    async with callboard.open_engine(model="random:tiny", kv_cache_gb=0.01) as engine:
        await engine.pause()
        first = await engine.add_request("first", [1, 2, 3], max_tokens=4, ignore_eos=True)
        reply = await engine.step(2)
        print(reply.steps, "steps:", reply.requests, "open,", reply.state)

        second = await engine.add_request("second", [4, 5], max_tokens=3, ignore_eos=True)
        while engine.has_unfinished_requests():
            reply = await engine.step()
        print(first.record.num_tokens, second.record.num_tokens, reply.requests)


trio.run(main)
