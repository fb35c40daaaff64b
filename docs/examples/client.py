"""Text from a running server, shown as it comes."""

import trio

import callboard


async def main() -> None:
    async with (
        callboard.connect("tcp://127.0.0.1:7500") as engine,
        engine.submit("Once upon a time", temperature=0.8, seed=7) as stream,
    ):
        async for delta in stream:
            print(delta.text, end="", flush=True)
            if "." in delta.text:
                break
    print()


trio.run(main)
