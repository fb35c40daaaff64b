"""The whole embedded engine, with the default model, against generations made by transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from callboard.messages.errors import RequestError
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

LOGPROB_TOLERANCE = 2e-4

# One thread a model (threads=1): OpenMP's barriers spin, and beside any other busy process two
# threads on two cores can take ten times as long as one.


class Expected:
    """What the tests read of a reference entry; see `ReferenceEntry` in the root conftest."""

    name: str
    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    output_text: str
    finish: str
    logprobs: list[float]


async def ask(engine: Engine, entry: Expected) -> Completion:
    """Ask for one reference entry, as text, greedily."""
    async with engine.submit(
        entry.prompt,
        temperature=0.0,
        max_tokens=max(64, len(entry.output_ids)),
        logprobs=0,
        skip_special_tokens=False,
    ) as stream:
        return await stream.completion()


def check(answer: Completion, entry: Expected) -> None:
    """Compare everything the reference knows."""
    assert answer.prompt_token_ids == entry.prompt_ids
    assert answer.token_ids == entry.output_ids
    assert answer.text == entry.output_text
    assert answer.finish_reason == entry.finish
    assert answer.logprobs == pytest.approx(entry.logprobs, abs=LOGPROB_TOLERANCE)


async def ask_together(engine: Engine, entries: list[Expected]) -> list[Completion]:
    """Ask for several entries at once; the answers are in the order of the entries."""
    answers: dict[int, Completion] = {}

    async def one(index: int, entry: Expected) -> None:
        answers[index] = await ask(engine, entry)

    async with trio.open_nursery() as nursery:
        for index, entry in enumerate(entries):
            nursery.start_soon(one, index, entry)
    return [answers[index] for index in range(len(entries))]


async def test_each_prompt_alone_gives_the_reference_tokens(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    async with open_engine(model=str(default_model), threads=1) as engine:
        for entry in reference.values():
            check(await ask(engine, entry), entry)


async def test_a_prompt_asked_again_shares_its_blocks_and_gives_the_same_tokens(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    entry = reference["unicode"]

    async with open_engine(model=str(default_model), threads=1, block_tokens=16) as engine:
        check(await ask(engine, entry), entry)
        [again] = await ask_together(engine, [entry])
        details = (await engine.status()).tree.children[-1].children[0].children[1].children[0]

    check(again, entry)
    assert details.details["prefix_hits"] == 3  # of 63 tokens


async def test_sixteen_requests_at_once_give_the_same_tokens(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    short = [entry for entry in reference.values() if len(entry.prompt_ids) < 1000]
    entries = [short[index % len(short)] for index in range(16)]

    async with open_engine(model=str(default_model), threads=1) as engine:
        answers = await ask_together(engine, entries)

    for answer, entry in zip(answers, entries, strict=True):
        check(answer, entry)


async def test_chunked_prefill_and_a_cache_too_small_for_all_give_the_same_tokens(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    entries = list(reference.values())

    async with open_engine(
        model=str(default_model),
        threads=1,
        prefill_chunk_tokens=64,
        kv_cache_gb=0.072,  # 26 blocks of 64 tokens, one of them never handed out
        block_tokens=64,
    ) as engine:
        status = await engine.status()
        assert status.replicas[0].blocks_total < 27, "room for all is no test of waiting"
        answers = await ask_together(engine, entries)
        after = await engine.status()

    for answer, entry in zip(answers, entries, strict=True):
        check(answer, entry)
    assert after.replicas[0].blocks_free == after.replicas[0].blocks_total


async def test_a_text_of_many_megabytes_is_refused_at_once_and_disturbs_nobody(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    async with open_engine(model=str(default_model), threads=1) as engine:
        with pytest.raises(RequestError, match="fit the context"):
            await engine.generate(["never mind " * 3_000_000], max_tokens=1)
        check(await ask(engine, reference["chat"]), reference["chat"])
