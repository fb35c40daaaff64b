"""Log-probabilities that clients get from the whole engine, against transformers' on one model.

Through chunks, shared prefixes, evictions and steps planned ahead.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import callboard

VOCABULARY = 131
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """A random model as transformers has it, saved to the folder."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    model.save_pretrained(folder)
    return model


def next_logprobs(reference: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token but the first, after those before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([token_ids])).logits[0].double()
    logprobs = logits.log_softmax(dim=-1)
    chosen: list[float] = logprobs[torch.arange(len(token_ids) - 1), token_ids[1:]].tolist()
    return chosen


def prompts() -> list[list[int]]:
    """Some of them begin alike, as far as a few blocks of four tokens."""
    generator = torch.Generator().manual_seed(1)
    shared: list[int] = torch.randint(VOCABULARY, (13,), generator=generator).tolist()
    lengths = (1, 2, 4, 5, 9, 17, 30)
    tails = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [*tails, *(shared + tail for tail in tails), shared]


SCHEDULES = [
    pytest.param({}, id="plain"),
    pytest.param({"prefill_chunk_tokens": 5}, id="chunks of 5"),
    pytest.param({"prefill_chunk_tokens": 1, "pipeline_depth": 2}, id="chunks of 1, planned ahead"),
    pytest.param({"pipeline_depth": 2, "kv_cache_gb": 1.5e-5}, id="a pool that is too small"),
    pytest.param({"batch_invariant": True, "prefill_chunk_tokens": 7}, id="batch-invariant"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_log_probs_of_prompts_and_outputs_are_those_of_transformers(
    reference: Any, folder: Path, schedule: dict[str, Any]
) -> None:
    options = {"kv_cache_gb": 0.001, "block_tokens": 4, "threads": 1, "max_step_tokens": 64}
    async with callboard.open_engine(model=str(folder), **(options | schedule)) as engine:
        for _ in range(2):  # the second time all of them are in the prefix cache
            answers = await engine.generate(
                prompts(), max_tokens=9, temperature=0.8, seed=5, logprobs=2, prompt_logprobs=2
            )
            for prompt, answer in zip(prompts(), answers, strict=True):
                expected = next_logprobs(reference, [*prompt, *answer.token_ids])
                assert answer.prompt_logprobs is not None
                assert answer.logprobs is not None
                assert answer.prompt_logprobs + answer.logprobs == pytest.approx(
                    expected, abs=TOLERANCE
                )
                assert len(answer.logprobs) == 9
                assert answer.prompt_top_logprobs is not None
                assert [len(top) for top in answer.prompt_top_logprobs] == [2] * (len(prompt) - 1)
        plain = await engine.generate(prompts(), max_tokens=9, temperature=0.8, seed=5)
        assert [answer.token_ids for answer in plain] == [answer.token_ids for answer in answers]
        status = await engine.status()
        assert status.replicas[0].blocks_free == status.replicas[0].blocks_total


async def test_what_greedy_decoding_chose_is_the_likeliest_when_it_is_scored(
    reference: Any, folder: Path
) -> None:
    async with callboard.open_engine(
        model=str(folder), kv_cache_gb=0.001, block_tokens=4, threads=1
    ) as engine:
        [answer] = await engine.generate([[1, 2, 3]], max_tokens=32, temperature=0.0)
        text = [1, 2, 3, *answer.token_ids]
        [scored] = await engine.generate([text], max_tokens=0, prompt_logprobs=1)
    assert scored.prompt_top_logprobs is not None
    likeliest = [top[0][0] for top in scored.prompt_top_logprobs]
    assert likeliest[2:] == answer.token_ids
    assert (scored.token_ids, scored.time_to_first_token_s) == ([], None)


async def test_scoring_a_prompt_that_is_cached_costs_its_tokens_again(
    reference: Any, folder: Path
) -> None:
    prompt = list(range(20))
    async with callboard.open_engine(
        model=str(folder), kv_cache_gb=0.001, block_tokens=4, threads=1
    ) as engine:

        async def tokens_computed() -> float:
            status = await engine.status()
            node = next(node for node in status.tree.children if node.name == "metrics")
            return float(node.details["tokens_computed"])

        before = await tokens_computed()
        costs = []
        asked: list[dict[str, Any]] = [{}, {}, {"prompt_logprobs": 0}]
        for options in asked:
            [answer] = await engine.generate([prompt], max_tokens=1, **options)
            after = await tokens_computed()
            costs.append((after - before, answer.usage.cached_tokens))
            before = after
    assert costs == [(20, 0), (4, 16), (20, 0)]
    assert answer.prompt_logprobs == pytest.approx(next_logprobs(reference, prompt), abs=TOLERANCE)
