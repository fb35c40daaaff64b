"""The rules of rows, kept up token by token, against rules told anew of the same tokens."""

import random
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from callboard.gpu.row_rules import NO_LINE, RowRules
from callboard.gpu.sampling import SamplingRows
from callboard.messages.steps import RowSampling

BAD = ((7,), (1, 2), (2, 1, 3), (1, 1, 1, 1, 4), (1, 5), (0, 0, 6))


def make_sampling(
    *,
    first_position: int = 0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
    processed: bool = False,
    logprobs: int = -1,
) -> RowSampling:
    return RowSampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=100,
        min_tokens=0,
        stop_token_ids=(),
        first_position=first_position,
        logprobs=logprobs,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias or {},
        bad_token_ids=bad,
        processed_logprobs=processed,
    )


def ids(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def plain_rows(num_rows: int) -> SamplingRows:
    zeros = [0.0] * num_rows
    return SamplingRows.build(
        temperature=zeros,
        top_k=zeros,
        top_p=zeros,
        min_p=zeros,
        seed=zeros,
        position=zeros,
        banned=([0], [99]),
    )


def applied(rules: RowRules, lines: list[int]) -> SamplingRows:
    return rules.apply(np.array(lines), plain_rows(len(lines)))


def told(rules: RowRules, lines: list[int]) -> list[tuple[object, ...]]:
    """What is said of each row: bans, biases, counts of seen tokens, and the penalties."""
    rows = applied(rules, lines)
    found: list[tuple[object, ...]] = []
    for row in range(len(lines)):
        bans = of_row(row, rows.banned_rows_B, rows.banned_tokens_B, rows.banned_tokens_B)
        asked = rows.adjustments
        if asked is None:
            found.append((bans, {}, {}, None))
            continue
        bias = of_row(row, asked.bias_rows_M, asked.bias_tokens_M, asked.bias_M)
        seen = of_row(row, asked.seen_rows_N, asked.seen_tokens_N, asked.output_count_N)
        penalties = (asked.repetition_R[row], asked.frequency_R[row], asked.presence_R[row])
        found.append((bans, bias, seen, tuple(map(float, penalties)) if seen else None))
    return found


def of_row(row: int, rows_N: Tensor, tokens_N: Tensor, values_N: Tensor) -> dict[int, float]:
    is_own = rows_N == row
    pairs = list(zip(tokens_N[is_own].tolist(), values_N[is_own].tolist(), strict=True))
    assert len(dict(pairs)) == len(pairs), "a token twice"
    return dict(pairs)


@pytest.mark.parametrize(
    "sampling",
    [
        make_sampling(),
        make_sampling(first_position=3),
        make_sampling(processed=True),
        make_sampling(logprobs=5),
        make_sampling(presence=-0.0, frequency=-0.0),
    ],
)
def test_a_row_that_asks_for_nothing_has_no_line(sampling: RowSampling) -> None:
    rules = RowRules()

    assert rules.add(ids(1, 2, 3, 4), sampling) == NO_LINE
    assert len(rules) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        make_sampling(repetition=1.1),
        make_sampling(presence=0.1),
        make_sampling(frequency=-0.1),
        make_sampling(bias={1: 0.0}),
        make_sampling(bad=((1,),)),
        make_sampling(bad=((1, 2),)),
        make_sampling(processed=True, logprobs=0),
    ],
)
def test_a_row_that_asks_for_anything_has_one(sampling: RowSampling) -> None:
    rules = RowRules()

    assert rules.add(ids(1, 2), sampling) != NO_LINE
    assert len(rules) == 1


def test_a_step_without_such_rows_is_left_as_it_is() -> None:
    rules, plain = RowRules(), plain_rows(3)
    rules.add(ids(1), make_sampling(repetition=2.0))

    assert rules.apply(np.zeros(3, dtype=np.int64), plain) is plain


def test_rows_that_ask_for_nothing_are_told_nothing_beside_others() -> None:
    rules = RowRules()
    line = rules.add(ids(1, 2, 1), make_sampling(repetition=2.0, bias={3: 1.5}, bad=((4,),)))

    bans, nothing, something = told(rules, [NO_LINE, NO_LINE, line])

    assert bans == ({99: 99}, {}, {}, None)  # the ban that was there before
    assert nothing == ({}, {}, {}, None)
    assert something == ({}, {3: 1.5, 4: -np.inf}, {1: 0, 2: 0}, (2.0, 0.0, 0.0))


def test_the_prompt_is_seen_by_the_repetition_penalty_only() -> None:
    rules = RowRules()
    lines = [
        rules.add(ids(1, 2, 3, 3), make_sampling(first_position=2, repetition=2.0)),
        rules.add(ids(1, 2, 3, 3), make_sampling(first_position=2, presence=1.0)),
        rules.add(ids(1, 2, 3, 3), make_sampling(first_position=2, frequency=1.0)),
        rules.add(ids(1, 2, 3, 3), make_sampling(first_position=2, bias={1: 1.0})),
    ]

    seen = [counts for _, _, counts, _ in told(rules, lines)]

    assert seen == [{1: 0, 2: 0, 3: 2}, {3: 2}, {3: 2}, {}]


def test_processed_log_probs_are_told_row_by_row() -> None:
    rules = RowRules()
    wanted = rules.add(ids(1), make_sampling(processed=True, logprobs=0))
    biased = rules.add(ids(1), make_sampling(bias={1: 1.0}, processed=True))

    flags = applied(rules, [biased, wanted, NO_LINE]).processed_R

    assert flags is not None
    assert flags.tolist() == [False, True, False]
    assert applied(rules, [biased, NO_LINE]).processed_R is None


def test_a_line_is_used_again_and_nothing_of_its_first_row_is_left() -> None:
    rules = RowRules()
    everything = make_sampling(
        repetition=2.0, presence=1.0, frequency=1.0, bias={1: 1.0}, bad=BAD, processed=True
    )
    first = rules.add(ids(1, 2, 3), everything)
    other = rules.add(ids(1, 2, 3), everything)
    rules.record(np.array([first, other]), ids(1, 1))
    rules.remove(np.array([NO_LINE, first]))

    second = rules.add(ids(9), make_sampling(bias={8: 2.0}, bad=((3, 4),)))

    assert second == first
    assert told(rules, [NO_LINE, second])[1] == ({}, {8: 2.0}, {}, None)
    assert len(rules) == 2


def test_rules_kept_up_are_those_of_the_same_tokens_told_anew() -> None:
    """What preemption and resumption do, at every point of a row's life and beside any others."""
    choose = random.Random(4)
    rules = RowRules()
    rows: dict[int, tuple[list[int], list[int], RowSampling]] = {}  # by line
    for _ in range(400):
        if len(rows) < 6 and choose.random() < 0.4:
            prompt = [choose.randrange(8) for _ in range(choose.randrange(1, 20))]
            sampling = make_sampling(
                repetition=choose.choice([1.0, 2.0]),
                presence=choose.choice([0.0, 1.0]),
                frequency=choose.choice([0.0, 0.5]),
                bias={choose.randrange(8): 1.0},
                bad=tuple(choose.sample(BAD, choose.randrange(len(BAD)))),
            )
            rows[rules.add(ids(*prompt), sampling)] = (prompt, [], sampling)
        lines = choose.sample(sorted(rows), choose.randrange(len(rows) + 1))
        tokens = [choose.choice([0, 1, 1, 2, choose.randrange(8)]) for _ in lines]
        rules.record(np.array([NO_LINE, *lines]), ids(3, *tokens))
        for line, token in zip(lines, tokens, strict=True):
            rows[line][1].append(token)
        if lines and choose.random() < 0.05:
            rules.remove(np.array(lines[:1]))
            del rows[lines[0]]

        anew = RowRules()
        lines_anew = [
            anew.add(
                ids(*prompt, *output),
                make_sampling(
                    first_position=len(output),
                    repetition=sampling.repetition_penalty,
                    presence=sampling.presence_penalty,
                    frequency=sampling.frequency_penalty,
                    bias=sampling.logit_bias,
                    bad=sampling.bad_token_ids,
                ),
            )
            for prompt, output, sampling in rows.values()
        ]
        assert told(rules, [NO_LINE, *rows]) == told(anew, [NO_LINE, *lines_anew])
        assert len(rules) == len(rows)


def test_counts_are_those_of_the_output() -> None:
    rules = RowRules()
    line = rules.add(ids(1, 2), make_sampling(repetition=2.0))
    output = [5, 5, 2, 5, 9] * 10

    for token in output:
        rules.record(np.array([line]), ids(token))

    [(_, _, seen, _)] = told(rules, [line])
    assert seen == {1: 0, **Counter(output)}
