"""Reported faults about scores of prompts, requests that generate nothing, and several choices.

On a small model with random weights, real tensors and the whole tree.
"""

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from callboard.messages.control import KVLevel
from callboard.messages.errors import RequestError
from callboard.messages.requests import EventKind, FinishReason
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

PROMPT = [7, 3, 300, 41, 5, 5, 6, 19, 2, 77, 250, 8, 1, 30, 31, 32, 33]


@asynccontextmanager
async def random_model(*, num_blocks: int = 100, **settings: Any) -> AsyncGenerator[Engine]:
    """Open an engine with room for `num_blocks` blocks of four tokens."""
    with trio.fail_after(60):
        async with open_engine(
            model="random:tiny",
            device="cpu",
            threads=1,
            block_tokens=4,
            kv_cache_gb=(num_blocks + 1) * 2048 / 2**30,
            max_model_len=128,
            **{"max_rows": 8, "max_step_tokens": 64, **settings},
        ) as engine:
            yield engine
            [replica] = (await engine.status()).replicas
            assert (replica.running, replica.waiting, replica.paused) == (0, 0, 0)
            assert replica.blocks_free == replica.blocks_total


async def answer(engine: Engine, prompt: Sequence[int], **options: Any) -> Completion:
    found: list[Completion] = await engine.generate([prompt], **{"temperature": 0.0, **options})
    return found[0]


def same_scores(one: Completion, other: Completion) -> bool:
    """Whether two have the same prompt scores, and all of them."""
    assert one.prompt_logprobs is not None
    assert len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1
    assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5)
    tops = [
        [[token for token, _ in top] for top in found.prompt_top_logprobs or ()]
        for found in (one, other)
    ]
    return tops[0] == tops[1]


async def test_the_scores_of_a_prompt_in_parts_come_whole_with_the_first_delta() -> None:
    async with random_model(prefix_caching=False) as engine:
        whole = await answer(engine, PROMPT, max_tokens=3, prompt_logprobs=2)
    async with (
        random_model(prefix_caching=False, prefill_chunk_tokens=5) as engine,
        engine.submit(PROMPT, temperature=0.0, max_tokens=3, prompt_logprobs=2) as stream,
    ):
        deltas = [delta async for delta in stream]
        found = await stream.completion()
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True, False, False]
    assert same_scores(found, whole)


async def test_a_prompt_is_scored_by_one_set_of_weights_and_says_by_which() -> None:
    async with random_model(prefill_chunk_tokens=5) as engine:
        await engine.pause()
        asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 2}
        cut = await engine.add_request("cut", PROMPT, **asked)
        await engine.step(2)
        await engine.update_weights("random:tiny#5")
        await engine.unpause()
        found = await cut.completion()
        whole = await answer(engine, PROMPT, max_tokens=2, prompt_logprobs=2)
        scored = await answer(engine, PROMPT, max_tokens=0, prompt_logprobs=2)

    assert same_scores(found, whole)
    assert same_scores(scored, whole)
    assert (found.weights_version, whole.weights_version, scored.weights_version) == (1, 1, 1)


@pytest.mark.parametrize("options", [{"temperature": 0.15}, {"temperature": 1.0, "top_k": 1}])
async def test_processed_scores_of_prompts_are_numbers_that_can_be_written_as_json(
    options: dict[str, Any],
) -> None:
    async with random_model() as engine:
        found = await answer(
            engine, PROMPT, max_tokens=2, prompt_logprobs=3, logprobs_mode="processed", **options
        )

    assert found.prompt_logprobs is not None
    if "top_k" not in options:
        assert min(found.prompt_logprobs) > -1000
    for top in found.prompt_top_logprobs or ():
        assert top
        assert all(logprob > -1000 for _, logprob in top)


async def test_a_prompt_that_is_only_scored_generates_nothing_and_has_no_first_token() -> None:
    async with random_model() as engine:
        for length in (1, 2, 9, 128):  # the whole context, since nothing comes behind it
            prompt = (PROMPT * 8)[:length]
            one = await answer(engine, prompt, max_tokens=0, prompt_logprobs=0)
            assert len(one.prompt_logprobs or ()) == length - 1
            assert (one.token_ids, one.finish_reason) == ([], FinishReason.LENGTH)
            assert one.time_to_first_token_s is None
        metrics = (await engine.status()).tree.children[0].details
        assert metrics["requests"] == 4
        assert metrics["mean_time_to_first_token_s"] == 0.0


async def test_scores_of_a_cached_prompt_are_those_of_a_cold_engine() -> None:
    """Behind another request that filled the buffers, and with a cached beginning of its own."""
    longer = [*PROMPT[:12], 200, 201, 202]
    async with random_model(prefix_caching=False) as engine:
        cold = await answer(engine, PROMPT, max_tokens=2, prompt_logprobs=3)
        cold_longer = await answer(engine, longer, max_tokens=0, prompt_logprobs=3)
    async with random_model() as engine:
        await answer(engine, [9] * 60, max_tokens=2, prompt_logprobs=3)
        await answer(engine, PROMPT, max_tokens=4)
        again = await answer(engine, PROMPT, max_tokens=2, prompt_logprobs=3)
        assert same_scores(again, cold)
        assert again.token_ids == cold.token_ids
        assert again.usage.cached_tokens == 0, "computed again, and so it is said"
        assert same_scores(
            await answer(engine, longer, max_tokens=0, prompt_logprobs=3), cold_longer
        )
        plain = await answer(engine, PROMPT, max_tokens=2)
        assert plain.usage.cached_tokens == 16


async def test_greedy_tokens_are_the_likeliest_when_they_are_scored() -> None:
    async with random_model() as engine:
        said = (await answer(engine, PROMPT, max_tokens=32)).token_ids
        scored = await answer(engine, [*PROMPT, *said], max_tokens=0, prompt_logprobs=1)
    top = (scored.prompt_top_logprobs or [])[len(PROMPT) - 1 :]
    assert [ids[0][0] for ids in top] == said


@pytest.mark.parametrize("seed", range(3))
async def test_scores_survive_whatever_happens_to_their_rows(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        (
            PROMPT[: rng.randint(0, 17)] + rng.choices(range(320), k=rng.randint(1, 20)),
            {"max_tokens": rng.choice([0, 1, 8]), "prompt_logprobs": rng.choice([0, 2])},
        )
        for _ in range(12)
    ]
    async with random_model(prefix_caching=False) as engine:
        cold = [await answer(engine, prompt, **options) for prompt, options in requests]
    settings = {"max_step_tokens": 16, "prefill_chunk_tokens": 5, "pipeline_depth": 1 + seed % 2}
    async with random_model(num_blocks=14, **settings) as engine, trio.open_nursery() as nursery:

        async def ask(index: int) -> None:
            prompt, options = requests[index]
            found = await answer(engine, prompt, **options)
            assert same_scores(found, cold[index])
            assert found.token_ids == cold[index].token_ids
            assert msgspec.json.decode(msgspec.json.encode(found), type=Completion) == found

        async def abort_one() -> None:
            async with engine.submit(PROMPT * 3, prompt_logprobs=2, request_id="a") as stream:
                await engine.abort("a")
                assert len((await stream.completion()).prompt_logprobs or ()) in (0, 50)

        nursery.start_soon(abort_one)
        for index in range(len(requests)):
            nursery.start_soon(ask, index)
        for kv in (KVLevel.DROP, KVLevel.KEEP, KVLevel.DROP):
            await trio.sleep(0.01)
            await engine.suspend(kv=kv)
            await engine.resume()


async def test_more_choices_than_there_are_rows_all_come_each_by_its_seed() -> None:
    async with random_model(max_rows=4) as engine:
        choices = await engine.generate([PROMPT], n=9, max_tokens=6, seed=4)
        alone = [
            await answer(engine, PROMPT, max_tokens=6, seed=4 + index, temperature=1.0)
            for index in range(9)
        ]
        assert [one.token_ids for one in choices] == [one.token_ids for one in alone]
        for wrong in (0, -1, 512):
            with pytest.raises(RequestError, match="n is"):
                await engine.generate([PROMPT], n=wrong)


async def test_an_evicted_request_has_its_first_token_once() -> None:
    async with random_model(num_blocks=12) as engine:
        found = await engine.generate([[index] * 8 for index in range(1, 6)], max_tokens=20)
        kinds = [[event.kind for event in one.events] for one in found]
        assert any(EventKind.EVICTED in one for one in kinds)
        for one in kinds:
            assert one.count(EventKind.FIRST_TOKEN) == 1
            assert (one[0], one[-1]) == (EventKind.QUEUED, EventKind.FINISHED)
            assert one.count(EventKind.EVICTED) == one.count(EventKind.ADMITTED) - 1
