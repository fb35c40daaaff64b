"""Suspending at every level, in the middle of requests, with a small random model."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from callboard.messages.control import KVLevel, NodeStatus, State, WeightsLevel
from callboard.messages.errors import ControlRefused
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

PROMPTS = [[3 * number + 1, 7, 11 + number] for number in range(4)]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "max_tokens": 40, "logprobs": 2}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offloaded waits for the disk, which these tests are not about."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr("callboard.gpu.offload._FOLDER", Path("/dev/shm"))


@asynccontextmanager
async def small_engine() -> AsyncGenerator[Engine]:
    with trio.fail_after(60):
        async with open_engine(
            model="random:tiny", device="cpu", threads=1, kv_cache_gb=0.01, block_tokens=4
        ) as engine:
            yield engine


async def generate(engine: Engine, after: int | None = None, **levels: Any) -> list[Completion]:
    """Generate for all prompts, step by step; suspended and resumed after so many steps."""
    await engine.pause()
    streams = [await engine.add_request(f"{p}", p, **SAMPLED) for p in PROMPTS]
    if after is not None:
        await engine.step(after)
        await engine.suspend(**levels)
        await engine.resume()
    await engine.unpause()
    return [await stream.completion() for stream in streams]


async def tokens_computed(engine: Engine) -> int:
    def find(node: NodeStatus) -> int | None:
        if node.name == "metrics":
            return int(node.details["tokens_computed"])
        return next((n for child in node.children if (n := find(child)) is not None), None)

    found = find((await engine.status()).tree)
    assert found is not None
    return found


def told(answers: list[Completion]) -> list[Any]:
    return [(one.token_ids, one.logprobs, one.top_logprobs) for one in answers]


@pytest.mark.parametrize("kv", [KVLevel.KEEP, KVLevel.OFFLOAD])
@pytest.mark.parametrize("weights", WeightsLevel)
async def test_a_cache_that_is_kept_or_offloaded_costs_nothing_and_changes_no_bit(
    kv: KVLevel, weights: WeightsLevel
) -> None:
    async with small_engine() as engine:
        undisturbed = await generate(engine)
        computed = await tokens_computed(engine)
    async with small_engine() as engine:
        disturbed = await generate(engine, after=15, kv=kv, weights=weights)

        assert told(disturbed) == told(undisturbed)
        assert await tokens_computed(engine) == computed


@pytest.mark.parametrize("weights", WeightsLevel)
async def test_a_cache_that_is_dropped_is_computed_again(weights: WeightsLevel) -> None:
    async with small_engine() as engine:
        undisturbed = await generate(engine)
        computed = await tokens_computed(engine)
    async with small_engine() as engine:
        disturbed = await generate(engine, after=15, kv="drop", weights=weights)

        assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
        assert await tokens_computed(engine) == computed + len(PROMPTS) * (3 + 14)


@pytest.mark.parametrize("found", [State.RUNNING, State.PAUSED])
@pytest.mark.parametrize("kv", KVLevel)
@pytest.mark.parametrize("weights", WeightsLevel)
async def test_every_level_can_be_repeated_and_no_other_can_follow(
    found: State, kv: KVLevel, weights: WeightsLevel
) -> None:
    async with small_engine() as engine:
        if found is State.PAUSED:
            await engine.pause()
        for _ in range(2):
            assert (await engine.suspend(kv=kv, weights=weights)).state is State.SUSPENDED
        for other in [(k, w) for k in KVLevel for w in WeightsLevel if (k, w) != (kv, weights)]:
            with pytest.raises(ControlRefused, match="suspended at other levels"):
                await engine.suspend(kv=other[0], weights=other[1])
        with pytest.raises(ControlRefused, match="resume first"):
            await engine.unpause()

        assert [(await engine.resume()).state for _ in range(2)] == [found, found]


@pytest.mark.parametrize("kv", KVLevel)
@pytest.mark.parametrize("weights", WeightsLevel)
async def test_what_is_cached_is_found_again_unless_it_or_the_weights_went(
    kv: KVLevel, weights: WeightsLevel
) -> None:
    prompt = list(range(1, 14))
    async with small_engine() as engine:
        [before] = await engine.generate([prompt], max_tokens=2, temperature=0.0)
        await engine.suspend(kv=kv, weights=weights)
        await engine.resume()
        [after] = await engine.generate([prompt], max_tokens=2, temperature=0.0)

    is_kept = kv is not KVLevel.DROP and weights is not WeightsLevel.DISCARD
    assert after.usage.cached_tokens == (12 if is_kept else 0)
    assert after.token_ids == before.token_ids


async def test_requests_that_come_while_all_is_offloaded_run_afterwards() -> None:
    async with small_engine() as engine:
        [before] = await engine.generate([PROMPTS[0]], **SAMPLED)
        await engine.suspend(kv="offload", weights="offload")
        stream = await engine.add_request("late", PROMPTS[0], **SAMPLED)
        await engine.resume()

        assert (await stream.completion()).token_ids == before.token_ids


async def test_a_disk_without_room_costs_the_cache_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, data: object, at: int) -> int:
        raise OSError(28, "No space left on device")

    async with small_engine() as engine:
        undisturbed = await generate(engine)
    async with small_engine() as engine:
        monkeypatch.setattr("os.pwrite", full)
        disturbed = await generate(engine, after=15, kv="offload")

    assert [one.token_ids for one in disturbed] == [one.token_ids for one in undisturbed]
