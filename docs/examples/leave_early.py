"""A stream that is left as soon as it has said enough."""

import trio

import callboard


async def main() -> None:
    async with callboard.open_engine(model="random:tiny", kv_cache_gb=0.01) as engine:
        async with engine.submit([1, 2, 3], max_tokens=1000) as stream:
            async for delta in stream:
                if delta.start >= 4:
                    break
        print(stream.finish_reason)
        [replica] = (await engine.status()).replicas
        print(replica.blocks_free == replica.blocks_total)


trio.run(main)
