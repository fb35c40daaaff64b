"""Log-probabilities that a runner tells against transformers', on tiny random models.

Every schedule must give them: chunks of any size, neighbours that decode, and a prefix that another
row has computed. Letters: T tokens of a sequence, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from callboard.gpu.memory import blocks_for
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.messages.base import pack_ids, unpack_floats, unpack_ids
from callboard.messages.logprobs import PromptLogprobs
from callboard.messages.steps import Admit, Continue, Grant, RowId, RowSampling, RunStep, StepDone

VOCABULARY = 131
BLOCK_TOKENS = 4
MAX_MODEL_LEN = 64
BLOCKS_A_ROW = MAX_MODEL_LEN // BLOCK_TOKENS
TOLERANCE = 1e-4

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def save_model(kind: str, folder: Path) -> Any:
    """Make a random model as transformers has it, and save it to the folder."""
    family, options = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough for every part to show in the logits
        **options,
    )
    torch.manual_seed(11)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


class Pair(NamedTuple):
    """The same model run by us, and by transformers."""

    runner: ModelRunner
    reference: Any


@pytest.fixture(
    scope="module", params=[(kind, False) for kind in KINDS] + [("llama", True)], ids=str
)
def loaded_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind, batch_invariant = request.param
    folder = tmp_path_factory.mktemp("model")
    reference = save_model(kind, folder)
    runner = ModelRunner(
        RunnerConfig(
            model=str(folder),
            device="cpu",
            block_tokens=BLOCK_TOKENS,
            num_blocks=8 * BLOCKS_A_ROW,
            max_model_len=MAX_MODEL_LEN,
            batch_invariant=batch_invariant,
        )
    )
    runner.load()
    runner.allocate()
    return Pair(runner, reference)


@pytest.fixture
def pair(loaded_pair: Pair) -> Iterator[Pair]:
    yield loaded_pair
    loaded_pair.runner.drop(range(100))


# What transformers says


def reference_logprobs(reference: Any, token_ids: Sequence[int]) -> Tensor:
    """Return [T, V]: in line i the log-probs of what may follow the first i + 1 tokens."""
    with torch.inference_mode():
        logits_TV: Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits_TV.double().log_softmax(dim=-1)


def next_logprobs(reference: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token but the first, after those before it."""
    logprobs_TV = reference_logprobs(reference, token_ids)
    chosen: list[float] = logprobs_TV[torch.arange(len(token_ids) - 1), token_ids[1:]].tolist()
    return chosen


# What a runner tells


class Told(NamedTuple):
    """What a row was told of one token."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def told_of(done: StepDone, row: RowId) -> list[Told]:
    """Return what the step told a row: one token, or none."""
    lines = zip(done.rows, unpack_ids(done.token_ids), unpack_floats(done.logprobs), strict=True)
    return [
        Told(token, logprob, done.top_logprobs.get(its_row, ()))
        for its_row, token, logprob in lines
        if its_row == row
    ]


def make_sampling(*, max_tokens: int, top: int, seed: int) -> RowSampling:
    return RowSampling(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_token_ids=(),
        logprobs=top,
    )


def blocks_of(row: RowId) -> list[int]:
    """The blocks that a row may use, in the order of its tokens, and of nobody else's."""
    return list(range((row + 1) * BLOCKS_A_ROW - 1, row * BLOCKS_A_ROW, -1))


def run_row(
    runner: ModelRunner,
    prompt: Sequence[int],
    *,
    row: RowId = 0,
    chunk: int = 1000,
    max_tokens: int = 10,
    top: int = 5,
    shared: Sequence[int] = (),
) -> list[Told]:
    """Run a row to its end, its prompt in chunks behind the blocks that it shares."""
    blocks = [*shared, *blocks_of(row)]
    ends = [*range(len(shared) * BLOCK_TOKENS, len(prompt), chunk), len(prompt)]
    first = Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=ends[1] - ends[0],
        blocks=tuple(blocks[: blocks_for(ends[1], BLOCK_TOKENS)]),
        sampling=make_sampling(max_tokens=max_tokens, top=top, seed=row),
        cached_tokens=ends[0],
    )
    steps = [
        RunStep(step=1, admits=(first,)),
        *later_chunks(row, ends[1:], blocks),
        *decodes(row, len(prompt), max_tokens - 1, blocks),
    ]
    return [told for step in steps for told in told_of(runner.execute(step), row)]


def later_chunks(row: RowId, ends: Sequence[int], blocks: Sequence[int]) -> Iterator[RunStep]:
    """Yield the steps that feed the prompt from each of these places to the next."""
    for start, end in pairwise(ends):
        new = blocks[blocks_for(start, BLOCK_TOKENS) : blocks_for(end, BLOCK_TOKENS)]
        yield RunStep(
            step=1, continues=(Continue(row=row, num_tokens=end - start, blocks=tuple(new)),)
        )


def decodes(row: RowId, num_cached: int, count: int, blocks: Sequence[int]) -> Iterator[RunStep]:
    """Yield that many steps of one token, with a block where the last one is full."""
    for cached in range(num_cached, num_cached + count):
        full = cached % BLOCK_TOKENS == 0
        grant = Grant(row=row, block=blocks[cached // BLOCK_TOKENS])
        yield RunStep(step=1, grants=(grant,) if full else ())


def some_tokens(count: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
    return ids


def check(pair: Pair, prompt: Sequence[int], told: Sequence[Told], *, top: int = 5) -> None:
    """Compare all that a row was told with what transformers says of the same tokens."""
    sequence = [*prompt, *(each.token for each in told)]
    expected_TV = reference_logprobs(pair.reference, sequence)[len(prompt) - 1 : -1]
    likeliest = expected_TV.topk(top)

    assert [each.logprob for each in told] == pytest.approx(
        next_logprobs(pair.reference, sequence)[len(prompt) - 1 :], abs=TOLERANCE
    )
    assert [[token for token, _ in each.top] for each in told] == likeliest.indices.tolist()
    torch.testing.assert_close(
        torch.tensor([[logprob for _, logprob in each.top] for each in told], dtype=torch.float64),
        likeliest.values,
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("chunk", [1000, 1, 2, 3, 5, 8])
def test_log_probs_of_the_output_are_those_of_transformers(pair: Pair, chunk: int) -> None:
    prompt = some_tokens(19)

    told = run_row(pair.runner, prompt, chunk=chunk)

    assert len(told) == 10
    check(pair, prompt, told)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_log_probs_are_right_for_prompts_about_the_size_of_a_block(pair: Pair, length: int) -> None:
    prompt = some_tokens(length, seed=length)

    check(pair, prompt, run_row(pair.runner, prompt))


def test_all_of_the_vocabulary_may_be_asked_for(pair: Pair) -> None:
    prompt = some_tokens(6, seed=6)

    told = run_row(pair.runner, prompt, top=VOCABULARY, max_tokens=2)

    check(pair, prompt, told, top=VOCABULARY)
    assert sum(2.718281828**logprob for _, logprob in told[0].top) == pytest.approx(1.0)


@pytest.mark.parametrize("chunk", [1000, 1, 3])
@pytest.mark.parametrize("num_shared", [1, 2, 4])
def test_log_probs_behind_a_shared_prefix_are_those_of_transformers(
    pair: Pair, num_shared: int, chunk: int
) -> None:
    """The last block but one of the prompt may be shared, and its tokens are never fed again."""
    prompt = some_tokens(num_shared * BLOCK_TOKENS, seed=1) + some_tokens(3, seed=2)
    run_row(pair.runner, prompt[:-3] + some_tokens(2, seed=3), row=1, max_tokens=1)

    told = run_row(pair.runner, prompt, row=2, chunk=chunk, shared=blocks_of(1)[:num_shared])

    check(pair, prompt, told)


@pytest.mark.parametrize("chunk", [1000, 2])
def test_log_probs_beside_rows_that_decode_are_those_of_transformers(
    pair: Pair, chunk: int
) -> None:
    prompts = [some_tokens(length, seed=length) for length in (9, 13, 5)]
    admits = tuple(
        Admit(
            row=row,
            prompt=pack_ids(prompt),
            num_tokens=len(prompt),
            blocks=tuple(blocks_of(row)[: blocks_for(len(prompt), BLOCK_TOKENS)]),
            sampling=make_sampling(max_tokens=20, top=row, seed=row),
        )
        for row, prompt in enumerate(prompts, start=1)
    )
    first = pair.runner.execute(RunStep(step=1, admits=admits))
    prompt = some_tokens(11, seed=11)

    told = run_row(pair.runner, prompt, row=4, chunk=chunk)

    check(pair, prompt, told)
    for row, its_prompt in enumerate(prompts, start=1):
        check(pair, its_prompt, told_of(first, row), top=row)


# Prompts


def score_row(
    runner: ModelRunner,
    prompt: Sequence[int],
    *,
    row: RowId = 0,
    chunk: int = 1000,
    top: int = 3,
    **asked: Any,
) -> tuple[list[PromptLogprobs], StepDone]:
    """Prefill a row in chunks, without a token to sample; return each chunk's part, and the end."""
    blocks = blocks_of(row)
    ends = [*range(0, len(prompt), chunk), len(prompt)]
    sampling = msgspec.structs.replace(
        make_sampling(max_tokens=0, top=-1, seed=0), prompt_logprobs=top, **asked
    )
    first = Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=ends[1],
        blocks=tuple(blocks[: blocks_for(ends[1], BLOCK_TOKENS)]),
        sampling=sampling,
    )
    steps = [RunStep(step=1, admits=(first,)), *later_chunks(row, ends[1:], blocks)]
    done = [runner.execute(step) for step in steps]
    parts = [each.prompt_logprobs[row] for each in done if row in each.prompt_logprobs]
    return parts, done[-1]


@pytest.mark.parametrize("chunk", [1000, 1, 2, 3, 5, 8])
def test_log_probs_of_a_prompt_are_those_of_transformers_in_whatever_chunks(
    pair: Pair, chunk: int
) -> None:
    prompt = some_tokens(19)

    parts, done = score_row(pair.runner, prompt, chunk=chunk)

    logprobs = [value for part in parts for value in unpack_floats(part.logprobs)]
    assert logprobs == pytest.approx(next_logprobs(pair.reference, prompt), abs=TOLERANCE)
    starts = [1, *np.cumsum([len(part.logprobs) // 4 for part in parts[:-1]]) + 1][: len(parts)]
    assert [part.start for part in parts] == starts
    assert (done.rows, done.full) == ((), (0,))
    assert pair.runner.num_rows == 0


def test_the_likeliest_in_the_place_of_each_prompt_token_are_those_of_transformers(
    pair: Pair,
) -> None:
    prompt = some_tokens(11)

    parts, _ = score_row(pair.runner, prompt, chunk=4, top=3)

    expected = reference_logprobs(pair.reference, prompt)[:-1].topk(3)
    ids = [token_id for part in parts for token_id in unpack_ids(part.top_ids)]
    values = [value for part in parts for value in unpack_floats(part.top_logprobs)]
    assert ids == expected.indices.flatten().tolist()
    assert values == pytest.approx(expected.values.flatten().tolist(), abs=TOLERANCE)
    assert {part.num_top for part in parts} == {3}


def test_processed_log_probs_of_a_prompt_are_those_of_what_could_be_drawn(pair: Pair) -> None:
    prompt = some_tokens(11)

    parts, _ = score_row(
        pair.runner, prompt, chunk=4, temperature=0.5, top_k=3, processed_logprobs=True
    )

    raw_TV = reference_logprobs(pair.reference, prompt)[:-1]
    kept = raw_TV >= raw_TV.topk(3).values[:, -1:]
    expected_TV = (raw_TV / 0.5).masked_fill(~kept, -torch.inf).log_softmax(dim=-1)
    expected = expected_TV[torch.arange(10), prompt[1:]].tolist()
    logprobs = [value for part in parts for value in unpack_floats(part.logprobs)]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    values = [value for part in parts for value in unpack_floats(part.top_logprobs)]
    assert values == pytest.approx(expected_TV.topk(3).values.flatten().tolist(), abs=TOLERANCE)


def test_a_prompt_is_scored_beside_rows_that_decode(pair: Pair) -> None:
    run_row(pair.runner, some_tokens(5, seed=5), row=1, max_tokens=1)
    other = Admit(
        row=2,
        prompt=pack_ids(some_tokens(6, seed=6)),
        num_tokens=6,
        blocks=tuple(blocks_of(2)[:2]),
        sampling=make_sampling(max_tokens=20, top=0, seed=2),
    )
    pair.runner.execute(RunStep(step=1, admits=(other,)))
    prompt = some_tokens(13, seed=13)

    parts, _ = score_row(pair.runner, prompt, row=3, chunk=6, top=0)

    logprobs = [value for part in parts for value in unpack_floats(part.logprobs)]
    assert logprobs == pytest.approx(next_logprobs(pair.reference, prompt), abs=TOLERANCE)


def test_a_prompt_of_one_token_has_no_log_probs(pair: Pair) -> None:
    parts, done = score_row(pair.runner, some_tokens(1))
    assert parts == []
    assert done.full == (0,)


def test_the_reference_helpers_agree(pair: Pair) -> None:
    """`next_logprobs` is the path through `reference_logprobs` that the tokens take."""
    ids = some_tokens(7)
    logprobs_TV = reference_logprobs(pair.reference, ids)

    by_hand = [float(logprobs_TV[place, ids[place + 1]]) for place in range(6)]

    assert next_logprobs(pair.reference, ids) == by_hand
    assert logprobs_TV.exp().sum(dim=-1).tolist() == pytest.approx([1.0] * 7)
