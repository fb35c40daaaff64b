"""The whole embedded engine in batch-invariant mode: the same bits from a crowded one and alone."""

from typing import Any

from callboard.messages.control import NodeStatus
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

BLOCK_BYTES = 2048  # of random:tiny in float32, with four tokens in a block
BEGINNING = [(7 * index) % 320 for index in range(12)]
PROMPTS = [
    BEGINNING * (number % 2) + [(13 * number + index) % 320 for index in range(3 + 2 * number)]
    for number in range(8)
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "logprobs": 3}
SAMPLED: dict[str, Any] = {
    **GREEDY,
    "temperature": 0.8,
    "seed": 5,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
}


def settings(*, num_blocks: int, **others: Any) -> dict[str, Any]:
    return {
        "model": "random:tiny",
        "device": "cpu",
        "threads": 1,
        "batch_invariant": True,
        "block_tokens": 4,
        "kv_cache_gb": num_blocks * BLOCK_BYTES / 2**30,
        **others,
    }


def told(answer: Completion) -> tuple[Any, ...]:
    return answer.token_ids, answer.logprobs, answer.top_logprobs, answer.finish_reason


async def ask(engine: Engine, prompts: list[list[int]]) -> list[tuple[Any, ...]]:
    """Ask for each prompt, all at once, first greedily and then with all that sampling knows."""
    return [
        told(answer)
        for params in (GREEDY, SAMPLED)
        for answer in await engine.generate(prompts, **params)
    ]


def details_of(node: NodeStatus, kind: str) -> dict[str, Any]:
    if node.kind == kind:
        return dict(node.details)
    return next(filter(None, (details_of(child, kind) for child in node.children)), {})


async def test_a_crowded_engine_gives_the_bits_that_each_request_gets_alone() -> None:
    async with open_engine(**settings(num_blocks=400, prefix_caching=False)) as engine:
        alone = [await ask(engine, [prompt]) for prompt in PROMPTS]

    # Half of what the requests take at once: they wait, and are evicted and computed again.
    crowded = settings(num_blocks=30, max_rows=8, prefill_chunk_tokens=5)
    async with open_engine(**crowded) as engine:
        together = await ask(engine, PROMPTS)
        allocator = details_of((await engine.status()).tree, "KVAllocator")

    assert together == [answers[way] for way in range(2) for answers in alone]
    assert allocator["prefix_hits"] > 0
