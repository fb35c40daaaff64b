"""Prompts scored by the whole embedded engine: the same numbers however it goes about it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from callboard.messages.control import KVLevel
from callboard.messages.requests import EventKind, FinishReason
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

BLOCK_BYTES = 4096  # of random:tiny in float64, with four tokens in a block
PROMPTS = [
    [(7 * number + 3 * index) % 320 for index in range(4 + 5 * number)] for number in range(5)
]
SCORING: dict[str, Any] = {"prompt_logprobs": 2, "logprobs": 1, "temperature": 0.0}


@asynccontextmanager
async def engine(*, num_blocks: int = 100, **settings: Any) -> AsyncGenerator[Engine]:
    with trio.fail_after(30):
        async with open_engine(
            model="random:tiny",
            device="cpu",
            dtype="float64",  # whose rounding is far below what is told
            threads=1,
            block_tokens=4,
            kv_cache_gb=(num_blocks + 1) * BLOCK_BYTES / 2**30,
            max_model_len=64,
            **{"max_rows": 8, "max_step_tokens": 32, **settings},
        ) as open_:
            yield open_


async def alone(**options: Any) -> list[Completion]:
    """What each prompt gets in an engine that does nothing else."""
    found = []
    async with engine() as one:
        for prompt in PROMPTS:
            found += await one.generate([prompt], **SCORING, **options)
    return found


def assert_same(some: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert one.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-6)
        assert one.prompt_top_logprobs is not None
        assert other.prompt_top_logprobs is not None
        ids = [[token_id for token_id, _ in top] for top in one.prompt_top_logprobs]
        assert ids == [[token_id for token_id, _ in top] for top in other.prompt_top_logprobs]


async def test_a_prompt_has_one_log_prob_a_token_but_the_first() -> None:
    for one in await alone(max_tokens=3):
        num_prompt = len(one.prompt_token_ids)
        assert one.prompt_logprobs is not None
        assert one.prompt_top_logprobs is not None
        assert len(one.prompt_logprobs) == len(one.prompt_top_logprobs) == num_prompt - 1
        assert all(-50 < logprob <= 0 for logprob in one.prompt_logprobs)
        assert len(one.logprobs or ()) == len(one.token_ids) == 3


async def test_a_prompt_can_be_scored_without_a_token() -> None:
    scored, answered = await alone(max_tokens=0), await alone(max_tokens=1)

    for one, other in zip(scored, answered, strict=True):
        assert (one.token_ids, one.logprobs, one.text) == ([], [], "")
        assert one.finish_reason is FinishReason.LENGTH
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="together"),
        pytest.param({"prefill_chunk_tokens": 1}, id="in chunks of 1"),
        pytest.param({"prefill_chunk_tokens": 3}, id="in chunks of 3"),
        pytest.param({"max_step_tokens": 8}, id="in small steps"),
        pytest.param({"pipeline_depth": 2, "prefill_chunk_tokens": 5}, id="planned ahead"),
        pytest.param({"num_blocks": 9, "prefill_chunk_tokens": 3}, id="evicted"),
        pytest.param({"batch_invariant": True}, id="batch-invariant"),
    ],
)
async def test_a_prompt_scores_the_same_whatever_the_schedule(settings: dict[str, Any]) -> None:
    expected = await alone(max_tokens=8)

    async with engine(**settings) as busy:
        found = await busy.generate(PROMPTS, **SCORING, max_tokens=8)
        again = await busy.generate(PROMPTS, **SCORING, max_tokens=8)  # behind a full prefix cache

    assert_same(found, expected)
    assert_same(again, expected)
    if "num_blocks" in settings:
        evicted = [
            event for one in found for event in one.events if event.kind == EventKind.EVICTED
        ]
        assert evicted


async def test_a_prompt_that_is_suspended_between_its_chunks_is_scored_once() -> None:
    expected = await alone(max_tokens=2)

    async with engine(prefill_chunk_tokens=2) as stepped:
        await stepped.pause()
        requests = [
            await stepped.add_request(f"{number}", prompt, **SCORING, max_tokens=2)
            for number, prompt in enumerate(PROMPTS)
        ]
        for steps in (1, 3, 7, 4):
            await stepped.step(steps)
            await stepped.suspend(kv=KVLevel.DROP)
            await stepped.resume()
        await stepped.unpause()
        found = [await request.completion() for request in requests]

    assert_same(found, expected)
    assert max(len(one.events) for one in found) > 6, "no prompt was begun again"
