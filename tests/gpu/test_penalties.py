"""Bans, bias and penalties against a slow rule per row, and against transformers' processors."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from callboard.gpu.penalties import Adjustments, adjusting
from callboard.gpu.row_rules import RowRules
from callboard.gpu.sampling import SamplingRows
from callboard.messages.steps import RowSampling

VOCAB = 50


@dataclass
class Row:
    """What a row has said and what it asks for."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    bad: tuple[tuple[int, ...], ...] = ()

    @property
    def sampling(self) -> RowSampling:
        return RowSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=100,
            min_tokens=0,
            stop_token_ids=(),
            first_position=len(self.output),
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            logit_bias=self.bias,
            bad_token_ids=self.bad,
        )

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def apply(rows: list[Row], logits_RV: Tensor) -> Tensor:
    """Return the logits of a batch as the sampler sees them."""
    rules = RowRules()
    lines = [rules.add(np.array(row.tokens, dtype=np.int32), row.sampling) for row in rows]
    zeros = [0.0] * len(rows)
    plain = SamplingRows.build(
        temperature=zeros, top_k=zeros, top_p=zeros, min_p=zeros, seed=zeros, position=zeros
    )
    return within(rules.apply(np.array(lines), plain), logits_RV)


def within(rows: SamplingRows, logits_RV: Tensor) -> Tensor:
    logits_RV = logits_RV.contiguous()
    before = logits_RV.clone()
    with adjusting(logits_RV, rows.banned_rows_B, rows.banned_tokens_B, rows.adjustments):
        adjusted_RV = logits_RV.clone()
    torch.testing.assert_close(logits_RV, before, rtol=0, atol=0, equal_nan=True)
    return adjusted_RV


def slowly(row: Row, logits_V: Tensor) -> Tensor:
    """The rule for one row, token by token, in float32."""
    logits = logits_V.clone()
    for token, bias in row.bias.items():
        logits[token] += bias
    for token in range(len(logits)):
        count = row.output.count(token)
        if token in row.tokens:
            above = logits[token] > 0
            logits[token] = (
                logits[token] / row.repetition if above else logits[token] * row.repetition
            )
        logits[token] -= torch.tensor(row.frequency) * count
        logits[token] -= row.presence if count else 0.0
    for *before, last in row.bad:
        if len(before) <= len(row.output) and row.output[len(row.output) - len(before) :] == before:
            logits[last] = -math.inf
    return logits


def make_rows() -> list[Row]:
    """One row of each kind, some plain, and one that asks for everything."""
    prompt, output = [1, 2, 2, 3, 40], [5, 5, 5, 2, 6]
    return [
        Row(prompt, output),
        Row(prompt, output, repetition=1.3),
        Row(prompt, output, repetition=0.7),
        Row(prompt, output, presence=0.9),
        Row(prompt, output, frequency=1.7),
        Row(prompt, output),
        Row(prompt, output, presence=-2.0, frequency=-0.3),
        Row(prompt, output, bias={5: 3.5, 7: -100.0, 0: 0.25}),
        Row(prompt, output, bad=((8,), (2, 6, 9), (6, 10), (5, 6, 11), (40, 5, 5, 5, 2, 6, 12))),
        Row(prompt, [], repetition=2.0, presence=1.0, frequency=1.0),
        Row(
            prompt,
            output,
            repetition=1.1,
            presence=0.2,
            frequency=0.4,
            bias={5: 50.0, 2: -3.0, 49: 1.0},
            bad=((5,), (6, 1)),
        ),
    ]


def make_logits(num_rows: int, vocab_size: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_rows, vocab_size, generator=generator) * 4


def test_every_row_gets_what_the_slow_rule_gives_it() -> None:
    rows = make_rows()
    logits_RV = make_logits(len(rows))

    got_RV = apply(rows, logits_RV)

    for row, logits_V, got_V in zip(rows, logits_RV, got_RV, strict=True):
        torch.testing.assert_close(got_V, slowly(row, logits_V), rtol=0, atol=0)


def test_a_row_gets_the_same_alone_and_in_any_order() -> None:
    """Penalties that hung on who came first in the batch."""
    rows = make_rows()
    logits_RV = make_logits(len(rows))
    together_RV = apply(rows, logits_RV)

    backwards_RV = apply(rows[::-1], logits_RV.flip(0)).flip(0)
    alone = [apply([row], logits_RV[i : i + 1])[0] for i, row in enumerate(rows)]

    assert torch.equal(backwards_RV, together_RV)
    assert torch.equal(torch.stack(alone), together_RV)


def test_random_rows_agree_with_the_slow_rule() -> None:
    random = np.random.default_rng(11)
    for _ in range(30):
        rows = [
            Row(
                random.integers(0, VOCAB, random.integers(1, 30)).tolist(),
                random.integers(0, VOCAB, random.integers(0, 30)).tolist(),
                repetition=float(random.choice([1.0, 0.5, 1.2])),
                presence=float(random.choice([0.0, 0.6, -1.5])),
                frequency=float(random.choice([0.0, 0.3, -1.0])),
                bias={int(token): 1.5 for token in random.integers(0, VOCAB, 3)},
                bad=tuple(
                    tuple(random.integers(0, 3, random.integers(1, 4)).tolist()) for _ in range(4)
                ),
            )
            for _ in range(5)
        ]
        logits_RV = make_logits(5)

        got_RV = apply(rows, logits_RV)

        expected_RV = torch.stack([slowly(row, logits_RV[i]) for i, row in enumerate(rows)])
        torch.testing.assert_close(got_RV, expected_RV, rtol=1e-6, atol=1e-6)


def processed(processor: LogitsProcessor, tokens: list[int], logits_V: Tensor) -> Tensor:
    scores_1V = processor(torch.tensor([tokens]), logits_V[None])
    return torch.as_tensor(scores_1V)[0]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    row = Row([1, 2, 3, 2], [5, 1, 5], repetition=penalty)
    logits_V = make_logits(1)[0]

    expected_V = processed(RepetitionPenaltyLogitsProcessor(penalty), row.tokens, logits_V)

    torch.testing.assert_close(apply([row], logits_V[None])[0], expected_V)


def test_a_bias_is_a_sequence_bias_of_transformers() -> None:
    bias = {3: -2.5, 7: 40.0, 0: 0.125}
    logits_V = make_logits(1)[0]
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])

    got_V = apply([Row([1], bias=bias)], logits_V[None])[0]

    torch.testing.assert_close(got_V, processed(processor, [1], logits_V))


@pytest.mark.parametrize("output", [[], [4], [3, 4], [3, 4, 4], [9, 3, 4, 3, 4]])
def test_bad_words_are_those_of_transformers(output: list[int]) -> None:
    """Of the output: what the prompt ends with begins no bad word here, as in vLLM."""
    bad = ((7,), (4, 8), (3, 4, 9), (3, 4, 10), (4, 3, 4, 11), (0, 12))
    logits_V = make_logits(1)[0]
    processor = NoBadWordsLogitsProcessor([list(ids) for ids in bad])

    got_V = apply([Row([0], output, bad=bad)], logits_V[None])[0]

    torch.testing.assert_close(got_V, processed(processor, [49, *output], logits_V))


def test_a_bias_comes_before_the_repetition_penalty() -> None:
    row = Row([3], repetition=2.0, bias={3: 4.0})

    got_V = apply([row], torch.full((1, VOCAB), -1.0))[0]

    assert got_V[3] == (-1.0 + 4.0) / 2.0


def test_penalties_that_are_off_change_not_a_bit_beside_those_that_are_on() -> None:
    logits_RV = make_logits(3)
    logits_RV[0, 1], logits_RV[0, 2] = 0.0, -0.0
    plain = Row([1, 2], [3, 1])

    got_RV = apply([plain, Row([1, 2], [3], repetition=3.0), plain], logits_RV)

    assert torch.equal(got_RV[0], logits_RV[0])
    assert torch.equal(got_RV[2], logits_RV[2])
    assert not torch.equal(got_RV[1], logits_RV[1])


@pytest.mark.parametrize("repetition", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("penalty", [-2.0, 2.0])
def test_minus_infinity_stays_what_it_is(repetition: float, penalty: float) -> None:
    """Masks that became +inf, and NaN after the softmax."""
    row = Row(
        [1, 2], [2, 3] * 40, repetition, penalty, penalty, bias=dict.fromkeys(range(9), 100.0)
    )
    logits_RV = torch.full((2, VOCAB), -math.inf)
    logits_RV[:, VOCAB - 1] = 1.0

    got_RV = apply([row, Row([1], bias={1: -100.0})], logits_RV)

    assert torch.equal(got_RV, logits_RV)


def test_a_ban_outlasts_every_bias() -> None:
    row = Row([1], [5, 6], bias={7: 100.0, 8: 100.0}, bad=((7,), (6, 8)), presence=-2.0)

    got_V = apply([row], torch.zeros(1, VOCAB))[0]

    assert got_V[7] == got_V[8] == -math.inf


def test_nan_stays_nan_in_its_row() -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[0, 3] = math.nan
    row = Row([3], [3], repetition=1.5, bias={3: 1.0})

    got_RV = apply([row, row], logits_RV)

    assert torch.isnan(got_RV).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 3, 2 * VOCAB, 2**31 - 2])
@pytest.mark.parametrize("kind", ["bad word", "completed bad word", "bias", "seen"])
def test_an_id_outside_the_vocabulary_touches_no_row(token: int, kind: str) -> None:
    """A mask for an id past the end landed in the next row."""
    row = {
        "bad word": Row([1], bad=((token,),)),
        "completed bad word": Row([1], [2], bad=((2, token),)),
        "bias": Row([1], bias={token: 5.0}),
        "seen": Row([token], repetition=2.0),
    }[kind]
    logits_RV = make_logits(3)
    before = logits_RV.clone()

    with pytest.raises(IndexError):
        apply([Row([1], repetition=2.0, bad=((3,),)), row, Row([1])], logits_RV)

    assert torch.equal(logits_RV, before)


def test_the_logits_are_as_they_were_after_an_error_within() -> None:
    logits_RV = make_logits(1)
    before = logits_RV.clone()
    bans = torch.tensor([0, 0, 0]), torch.tensor([3, 4, 3])
    zeros_R, zeros_2 = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    tokens = torch.tensor([3, 5])
    adjustments = Adjustments(
        zeros_2,
        tokens,
        torch.ones(2),
        zeros_2,
        tokens,
        torch.ones(2),
        zeros_R + 2,
        zeros_R,
        zeros_R,
    )

    def fail() -> None:
        with adjusting(logits_RV, *bans, adjustments):
            assert logits_RV[0, 3] == -math.inf
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert torch.equal(logits_RV, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    rules, rows = RowRules(), make_rows()
    lines = [rules.add(np.array(row.tokens, dtype=np.int32), row.sampling) for row in rows]
    zeros = [0.0] * len(rows)
    plain = SamplingRows.build(
        temperature=zeros, top_k=zeros, top_p=zeros, min_p=zeros, seed=zeros, position=zeros
    )
    on_gpu = rules.apply(np.array(lines), plain).to(torch.device("cuda"))
    logits_RV = make_logits(len(rows))

    got_RV = within(on_gpu, logits_RV.cuda())

    torch.testing.assert_close(got_RV.cpu(), apply(rows, logits_RV))
