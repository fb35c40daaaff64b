"""Sampling: which tokens may be drawn, how often, and that a row never notices its neighbours."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from callboard.gpu.penalties import Adjustments
from callboard.gpu.sampling import SampleResult, SamplingRows, sample, top_logprobs, uniforms

CHI_SQUARE_999_DF7 = 24.32
"""A right sampler over 8 tokens exceeds this once in a thousand seeds."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rows this small are faster without threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_rows(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 7,
    position: int | Sequence[int] = 0,
    banned: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> SamplingRows:
    def spread(value: float | Sequence[float]) -> Sequence[float]:
        return value if isinstance(value, Sequence) else [value] * num_rows

    return SamplingRows.build(
        temperature=spread(temperature),
        top_k=spread(top_k),
        top_p=spread(top_p),
        min_p=spread(min_p),
        seed=spread(seed),
        position=spread(position),
        banned=banned,
    )


def draw(
    probs: Sequence[float],
    count: int = 2000,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
) -> list[int]:
    """Draw `count` tokens from one distribution, at positions 0, 1, ..."""
    logits_RV = torch.tensor(probs).log().expand(count, -1)
    rows = make_rows(
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=range(count),
    )
    drawn: list[int] = sample(logits_RV, rows).token_ids_R.tolist()
    return drawn


def chi_square(drawn: Sequence[int], probs: Sequence[float]) -> float:
    expected = np.array(probs) * len(drawn)
    observed = np.bincount(drawn, minlength=len(probs))
    return float(((observed - expected) ** 2 / expected).sum())


def assert_same(a: SampleResult, b: SampleResult) -> None:
    assert torch.equal(a.token_ids_R, b.token_ids_R)
    assert torch.equal(a.logprobs_R, b.logprobs_R)
    assert torch.equal(a.nan_rows_R, b.nan_rows_R)


def select(result: SampleResult, index: Tensor) -> SampleResult:
    return SampleResult(
        result.token_ids_R[index],
        result.logprobs_R[index],
        result.nan_rows_R[index],
        result.scored_RV[index],
    )


EIGHT = [0.3, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02]


@pytest.mark.parametrize(
    ("top_k", "top_p"), list(itertools.product((0, 1, 5, 10_000), (0.1, 0.9, 1.0)))
)
def test_temperature_zero_is_argmax_whatever_the_filters(top_k: int, top_p: float) -> None:
    logits_RV = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))

    result = sample(logits_RV, make_rows(20, temperature=0.0, top_k=top_k, top_p=top_p))

    assert result.token_ids_R.tolist() == logits_RV.argmax(-1).tolist()


def test_a_greedy_row_beside_a_sampled_one_keeps_its_masks() -> None:
    """Dividing by a marker temperature turned -inf into +inf."""
    logits_RV = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]] * 2)

    result = sample(logits_RV, make_rows(2, temperature=[0.0, 1.0]))

    assert result.token_ids_R[0] == 2
    assert result.token_ids_R[1] in (1, 2)
    assert not result.nan_rows_R.any()


def test_ties_of_a_greedy_row_go_to_the_lowest_id() -> None:
    result = sample(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), make_rows(1, temperature=0.0))

    assert result.token_ids_R.tolist() == [1]


def test_float64_logits_that_float32_would_tie_are_told_apart() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0 + 1e-12, 0.0]], dtype=torch.float64).repeat(50, 1)

    greedy = sample(logits_RV, make_rows(50, temperature=0.0))
    top_k = sample(logits_RV, make_rows(50, top_k=1, position=range(50)))
    top_p = sample(logits_RV, make_rows(50, top_p=0.1, position=range(50)))
    min_p = sample(logits_RV, make_rows(50, min_p=1.0, position=range(50)))

    for result in (greedy, top_k, top_p, min_p):
        assert set(result.token_ids_R.tolist()) == {2}
    assert greedy.logprobs_R.dtype == torch.float32
    assert top_logprobs(logits_RV, 2)[0][0].tolist() == [2, 1]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_off_values_give_the_full_distribution(seed: int) -> None:
    assert chi_square(draw(EIGHT, seed=seed), EIGHT) < CHI_SQUARE_999_DF7


def test_neighbouring_seeds_at_one_position_are_independent_draws() -> None:
    logits_RV = torch.tensor(EIGHT).log().expand(2000, -1)

    drawn = sample(logits_RV, make_rows(2000, seed=range(2000), position=3)).token_ids_R

    assert chi_square(drawn.tolist(), EIGHT) < CHI_SQUARE_999_DF7


def test_temperature_sharpens_the_distribution_by_its_inverse_power() -> None:
    sharp = np.array(EIGHT) ** 2
    sharp /= sharp.sum()

    assert chi_square(draw(EIGHT, temperature=0.5), sharp.tolist()) < CHI_SQUARE_999_DF7


def test_filters_leave_the_ratios_of_what_they_keep() -> None:
    drawn = draw([0.5, 0.25, 0.125, 0.125], 4000, top_k=2)

    assert drawn.count(0) / drawn.count(1) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.81, {0, 1, 2}),
        (0.96, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_tokens_up_to_the_one_that_crosses(top_p: float, kept: set[int]) -> None:
    assert set(draw([0.5, 0.3, 0.15, 0.05], 500, top_p=top_p)) == kept


def test_the_least_top_p_keeps_the_likeliest_alone() -> None:
    """Rows keep it as a float32, in which it is 0: less than the least that is left is not off."""
    for top_p in (1e-50, 1e-45, 1e-9):
        assert set(draw(EIGHT[::-1], 200, top_p=float(np.float32(top_p)))) == {7}


def test_top_p_keeps_all_that_tie_with_the_one_that_crosses() -> None:
    assert set(draw([0.4, 0.2, 0.2, 0.2], 500, top_p=0.5)) == {0, 1, 2, 3}


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert set(draw([0.1, 0.3, 0.3, 0.3], 500, top_k=2)) == {1, 2, 3}


def test_top_k_of_one_is_argmax_when_nothing_ties() -> None:
    assert set(draw(EIGHT[::-1], 200, top_k=1)) == {7}


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert draw(EIGHT, 500, top_k=2**31 - 1) == draw(EIGHT, 500)


def test_min_p_drops_what_is_below_its_share_of_the_likeliest() -> None:
    assert set(draw([0.5, 0.26, 0.2, 0.04], 500, min_p=0.5)) == {0, 1}
    assert set(draw([0.5, 0.26, 0.2, 0.04], 500, min_p=1.0)) == {0}


def test_top_p_is_taken_of_what_min_p_and_top_k_left() -> None:
    probs = [0.4, 0.3, 0.2, 0.1]

    assert set(draw(probs, 500, top_p=0.6)) == {0, 1}
    assert set(draw(probs, 500, top_p=0.55, top_k=2)) == {0}
    assert set(draw(probs, 500, top_p=0.55, min_p=0.7)) == {0}


def slowly_kept(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The rule in plain Python, for distributions without ties."""
    order = sorted(range(len(probs)), key=lambda token_id: -probs[token_id])
    order = [i for i in order if probs[i] >= min_p * probs[order[0]]][: top_k or None]
    total = sum(probs[i] for i in order)
    kept: set[int] = set()
    before = 0.0
    for i in order:
        if before >= top_p * total:
            break
        kept.add(i)
        before += probs[i]
    return kept


@pytest.mark.parametrize("spread", [1.0, 8.0, 30.0])
def test_filters_agree_with_the_slow_rule_for_peaked_and_flat_rows(spread: float) -> None:
    generator = torch.Generator().manual_seed(int(spread))
    for top_k, top_p, min_p in itertools.product((0, 3, 40), (1.0, 0.9, 0.3), (0.0, 0.05)):
        logits_V = torch.randn(60, generator=generator) * spread
        kept = slowly_kept(torch.softmax(logits_V, -1).tolist(), top_k, top_p, min_p)
        rows = make_rows(100, top_k=top_k, top_p=top_p, min_p=min_p, position=range(100))

        drawn = set(sample(logits_V.expand(100, -1), rows).token_ids_R.tolist())

        assert drawn <= kept
        # The likeliest of what is kept, and the rest at least as a sum, must turn up.
        assert len(drawn) >= min(len(kept), 2) or torch.softmax(logits_V, -1).max() > 0.98


def mixed_batch(num_rows: int, vocab_size: int) -> tuple[Tensor, dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator) * 3
    params: dict[str, list[float]] = {
        "temperature": [(0.0, 0.5, 1.0, 2.5)[i % 4] for i in range(num_rows)],
        "top_k": [(0, 5, 50)[i % 3] for i in range(num_rows)],
        "top_p": [(1.0, 0.9)[i % 2] for i in range(num_rows)],
        "min_p": [(0.0, 0.0, 0.1, 0.0, 0.0)[i % 5] for i in range(num_rows)],
        "seed": [11 * i for i in range(num_rows)],
        "position": [i // 2 for i in range(num_rows)],
    }
    return logits_RV, params


def pick(params: dict[str, list[float]], index: Sequence[int]) -> SamplingRows:
    picked = {name: [values[i] for i in index] for name, values in params.items()}
    return SamplingRows.build(
        temperature=picked["temperature"],
        top_k=picked["top_k"],
        top_p=picked["top_p"],
        min_p=picked["min_p"],
        seed=picked["seed"],
        position=picked["position"],
    )


def test_a_row_alone_gets_bit_for_bit_what_it_gets_in_any_batch_and_order() -> None:
    """Seeds that held only for some neighbours and orders."""
    torch.set_num_threads(2)
    num_rows = 67  # more than one piece, and not a multiple of any vector width
    logits_RV, params = mixed_batch(num_rows, 5003)
    together = sample(logits_RV, pick(params, range(num_rows)))

    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    in_other_order = sample(logits_RV[shuffled], pick(params, shuffled.tolist()))

    assert_same(in_other_order, select(together, shuffled))
    for i in range(num_rows):
        alone = sample(logits_RV[i : i + 1], pick(params, [i]))
        assert_same(alone, select(together, torch.tensor([i])))


def test_logprobs_of_a_row_do_not_depend_on_its_batch() -> None:
    # Threads, and rows so long that a kernel would share the sum of one row alone among them.
    torch.set_num_threads(2)
    num_rows = 33
    logits_RV, _ = mixed_batch(num_rows, 40_009)
    token_ids_RK, logprobs_RK = top_logprobs(logits_RV, 5)
    greedy = make_rows(num_rows, temperature=0.0)
    assert torch.equal(sample(logits_RV, greedy).logprobs_R, logprobs_RK[:, 0])

    for i in range(num_rows):
        ids_alone, logprobs_alone = top_logprobs(logits_RV[i : i + 1], 5)
        assert torch.equal(ids_alone[0], token_ids_RK[i])
        assert torch.equal(logprobs_alone[0], logprobs_RK[i])


def test_a_filter_in_one_row_does_not_reach_another() -> None:
    """Filters slipped to another row."""
    logits_RV = torch.tensor(EIGHT).log().expand(2000, -1)
    top_k = [1 if i % 2 else 0 for i in range(2000)]

    drawn = sample(logits_RV, make_rows(2000, top_k=top_k, position=range(2000))).token_ids_R

    assert set(drawn[1::2].tolist()) == {0}
    assert drawn[::2].tolist() == draw(EIGHT, 2000)[::2]


def test_the_same_seed_and_position_give_the_same_token() -> None:
    rows = make_rows(50, seed=5, position=9)

    assert len(set(sample(torch.zeros(50, 1000), rows).token_ids_R.tolist())) == 1


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    logits_RV = torch.zeros(50, 20_000)

    by_seed = sample(logits_RV, make_rows(50, seed=range(50))).token_ids_R
    by_position = sample(logits_RV, make_rows(50, position=range(50))).token_ids_R

    assert len(set(by_seed.tolist())) >= 48  # two of 50 may meet by chance
    assert len(set(by_position.tolist())) >= 48


def test_uniforms_are_those_of_splitmix64() -> None:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    pairs = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 2**31), (12345, 678)]
    states = [mix(mix(s + gamma & mask) + (p + 1) * gamma & mask) for s, p in pairs]
    runners = [0, 1, 2**32 + 7]
    expected = [
        [((mix(state + (n + 1) * gamma & mask) >> 12) + 0.5) / 2**52 for n in runners]
        for state in states
    ]

    seeds, positions = torch.tensor(pairs).unbind(-1)
    assert uniforms(seeds, positions, torch.tensor([runners])).tolist() == expected
    # The first output of the published generator from state 0, so that the hash above is it.
    assert mix(gamma) == 0xE220A8397B1DCDAF


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    position_S = torch.arange(20_000)

    uniform_S = uniforms(
        torch.zeros_like(position_S), position_S, torch.zeros(1, 1, dtype=torch.int64)
    ).flatten()

    assert uniform_S.min() > 0
    assert uniform_S.max() < 1
    counts = torch.histc(uniform_S.float(), bins=10, min=0, max=1)
    assert ((counts - 2000).abs() < 200).all()


def test_masked_tokens_are_never_drawn() -> None:
    logits_V = torch.full((1000,), -math.inf)
    logits_V[[3, 500, 999]] = 0.0
    rows = make_rows(3000, position=range(3000))

    drawn = sample(logits_V.expand(3000, -1), rows).token_ids_R

    assert set(drawn.tolist()) == {3, 500, 999}


def test_logits_off_by_rounding_give_the_same_tokens() -> None:
    """A row that is recomputed in another batch, or chunked, has logits off by about 1e-6."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randn(400, 49_152, generator=generator) * 2
    noise_RV = torch.randn(logits_RV.shape, generator=generator) * 2e-6
    rows = make_rows(400, position=range(400))

    tokens = sample(logits_RV, rows).token_ids_R
    again = sample(logits_RV + noise_RV, rows).token_ids_R

    assert (tokens == again).all()


def test_the_least_temperature_is_finite_and_greedy() -> None:
    """strict JSON once met "out of range float" here."""
    logits_RV = torch.tensor([[1e4, -1e4, 9.9e3, -math.inf]] * 3)

    result = sample(logits_RV, make_rows(3, temperature=[1e-4, 1e-30, 1e-45]))

    assert result.token_ids_R.tolist() == [0, 0, 0]
    assert torch.isfinite(result.logprobs_R).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_bad_rows_are_flagged_alone(temperature: float, top_p: float) -> None:
    logits_RV = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    bad_RV = logits_RV.clone()
    bad_RV[1, 17] = math.nan
    bad_RV[3] = -math.inf
    bad_RV[4, 5] = math.inf
    rows = make_rows(
        6, temperature=temperature, top_p=top_p, top_k=40, min_p=0.01, position=range(6)
    )

    result = sample(bad_RV, rows)

    assert result.nan_rows_R.tolist() == [False, True, False, True, True, False]
    assert result.token_ids_R[[1, 3, 4]].tolist() == [0, 0, 0]
    healthy = torch.tensor([0, 2, 5])
    assert_same(select(result, healthy), select(sample(logits_RV, rows), healthy))


def test_a_banned_token_is_not_chosen_in_its_row_only() -> None:
    """The end of sequence waits for min_tokens, greedy or sampled."""
    logits_RV = torch.tensor([[0.0, 9.0, 1.0]] * 4)
    rows = make_rows(4, temperature=[0.0, 1.0, 0.0, 1.0], top_k=1, banned=([0, 1], [1, 1]))

    result = sample(logits_RV, rows)

    assert result.token_ids_R.tolist() == [2, 2, 1, 1]
    assert result.logprobs_R[0] == pytest.approx(float(logits_RV[0].log_softmax(-1)[2]))


def test_a_row_of_which_everything_is_banned_is_bad() -> None:
    result = sample(torch.zeros(2, 2), make_rows(2, banned=([0, 0], [0, 1])))

    assert result.nan_rows_R.tolist() == [True, False]


def test_a_nan_under_a_ban_is_still_a_bad_row() -> None:
    result = sample(torch.tensor([[math.nan, 1.0]]), make_rows(1, banned=([0], [0])))

    assert result.nan_rows_R.tolist() == [True]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 5.0])
def test_logprobs_are_those_of_the_raw_logits(temperature: float) -> None:
    logits_RV = torch.randn(40, 2000, generator=torch.Generator().manual_seed(4)) * 10

    result = sample(logits_RV, make_rows(40, temperature=temperature, top_k=3, seed=range(40)))

    exact_RV = logits_RV.double().log_softmax(-1)
    exact_R = exact_RV.gather(-1, result.token_ids_R[:, None]).squeeze(-1)
    torch.testing.assert_close(result.logprobs_R, exact_R.float(), atol=2e-6, rtol=1e-6)


def test_logits_of_half_precision_are_taken_and_left_as_they_are() -> None:
    logits_RV = torch.randn(4, 50, dtype=torch.bfloat16)
    before = logits_RV.clone()

    result = sample(logits_RV, make_rows(4, temperature=[0, 0, 1, 1], banned=([0], [0])))

    assert torch.equal(logits_RV, before)
    assert result.logprobs_R.dtype == torch.float32


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    logits_RV = torch.randn(3, 500, generator=torch.Generator().manual_seed(6))

    token_ids_RK, logprobs_RK = top_logprobs(logits_RV, 5)

    expected = logits_RV.log_softmax(-1).topk(5, dim=-1)
    assert torch.equal(token_ids_RK, expected.indices)
    torch.testing.assert_close(logprobs_RK, expected.values, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_of_equal_logits_the_lowest_ids_come_first_and_the_first_is_the_greedy_one(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(9)
    logits_RV = torch.randint(-3, 4, (50, 3000), generator=generator).to(dtype)
    logits_RV[0] = 0.0
    logits_RV[1, ::2] = -0.0
    logits_RV[1, 1::2] = 0.0

    token_ids_RK, _ = top_logprobs(logits_RV, 20)

    order = logits_RV.double().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(token_ids_RK, order[:, :20])
    greedy = sample(logits_RV, make_rows(50, temperature=0.0))
    assert torch.equal(token_ids_RK[:, 0], greedy.token_ids_R)


def test_top_logprobs_beyond_the_finite_logits_are_minus_infinity() -> None:
    _, logprobs_RK = top_logprobs(torch.tensor([[0.0, -math.inf, 0.0]]), 20)

    assert logprobs_RK.shape == (1, 3)
    assert logprobs_RK[0].tolist() == [pytest.approx(math.log(0.5))] * 2 + [-math.inf]


# Bias and penalties, whose arithmetic test_penalties.py looks at


def make_adjustments(
    num_rows: int,
    *,
    bias: tuple[Sequence[int], Sequence[int], Sequence[float]] = ((), (), ()),
    seen: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ()),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> Adjustments:
    return Adjustments(
        bias_rows_M=torch.tensor(bias[0], dtype=torch.int64),
        bias_tokens_M=torch.tensor(bias[1], dtype=torch.int64),
        bias_M=torch.tensor(bias[2], dtype=torch.float32),
        seen_rows_N=torch.tensor(seen[0], dtype=torch.int64),
        seen_tokens_N=torch.tensor(seen[1], dtype=torch.int64),
        output_count_N=torch.tensor(seen[2], dtype=torch.float32),
        repetition_R=torch.full((num_rows,), repetition),
        frequency_R=torch.full((num_rows,), frequency),
        presence_R=torch.full((num_rows,), presence),
    )


def test_greedy_and_sampled_rows_choose_from_the_adjusted_logits() -> None:
    logits_RV = torch.tensor([[5.0, 4.0, 0.0]] * 4)
    biased = make_adjustments(
        4,
        bias=([0, 1], [2, 2], [90.0, 90.0]),
        seen=([2, 3], [0, 0], [1, 1]),
        repetition=50.0,
        presence=90.0,
    )
    rows = make_rows(4, temperature=[0.0, 1.0, 0.0, 0.01])

    result = sample(logits_RV, replace(rows, adjustments=biased))

    assert result.token_ids_R.tolist() == [2, 2, 1, 1]
    exact_RV = logits_RV.log_softmax(-1)
    assert result.logprobs_R.tolist() == pytest.approx(exact_RV[0, [2, 2, 1, 1]].tolist())


def test_a_biased_distribution_is_drawn_from_as_it_is() -> None:
    bias = [0.5, -1.0, 0.0, 2.0, 0.0, 0.0, -3.0, 0.0]
    biased = torch.softmax(torch.tensor(EIGHT).log() + torch.tensor(bias), -1).tolist()
    rows = make_rows(2000, position=range(2000))
    pairs = [(row, token) for row in range(2000) for token in range(8)]
    adjustments = make_adjustments(
        2000, bias=([row for row, _ in pairs], [token for _, token in pairs], bias * 2000)
    )

    drawn = sample(
        torch.tensor(EIGHT).log().expand(2000, -1), replace(rows, adjustments=adjustments)
    ).token_ids_R.tolist()

    assert chi_square(drawn, biased) < CHI_SQUARE_999_DF7


def test_adjusted_rows_leave_their_neighbours_as_they_were() -> None:
    logits_RV, params = mixed_batch(21, 500)
    rows = pick(params, range(21))
    plain = sample(logits_RV, rows)
    adjusted_rows = list(range(0, 21, 3))
    adjustments = make_adjustments(
        21,
        bias=(adjusted_rows, [7] * 7, [100.0] * 7),
        seen=(adjusted_rows, [8] * 7, [3] * 7),
        repetition=1.5,
        frequency=1.0,
    )

    beside = sample(logits_RV, replace(rows, adjustments=adjustments))

    others = torch.tensor([row for row in range(21) if row % 3])
    assert_same(select(beside, others), select(plain, others))
    assert beside.token_ids_R[::3].tolist() == [7] * 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_are_left_as_they_are_whatever_was_adjusted(temperature: float) -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits_RV.clone()
    adjustments = make_adjustments(
        3, bias=([0, 1], [3, 3], [1.0, -math.inf]), seen=([0, 2], [3, 9], [1, 2]), repetition=2.0
    )
    rows = make_rows(3, temperature=temperature, top_p=0.9, banned=([0, 0], [3, 3]))

    result = sample(logits_RV, process(replace(rows, adjustments=adjustments), True, False, True))

    assert torch.equal(logits_RV, before)
    assert torch.equal(result.scored_RV[1], before[1])


def test_an_overflow_by_a_penalty_is_a_bad_row_and_no_other() -> None:
    adjustments = make_adjustments(2, seen=([0], [1], [1]), repetition=0.01)
    logits_RV = torch.tensor([[0.0, 3e38], [0.0, 1.0]])

    result = sample(logits_RV, replace(make_rows(2, temperature=0.0), adjustments=adjustments))

    assert result.nan_rows_R.tolist() == [True, False]


# Processed log-probs


def process(rows: SamplingRows, *flags: bool) -> SamplingRows:
    return replace(rows, processed_R=torch.tensor(flags))


FILTERS = list(itertools.product((0.3, 1.0, 2.5), (0, 1, 7), (1.0, 0.8, 0.3), (0.0, 0.1)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_processed_log_probs_are_those_of_transformers_warpers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits_RV = torch.randn(20, 60, generator=torch.Generator().manual_seed(8)) * 2
    rows = make_rows(
        20, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, position=range(20)
    )
    warpers = [
        TemperatureLogitsWarper(temperature),
        *([MinPLogitsWarper(min_p)] if min_p > 0 else []),
        *([TopKLogitsWarper(top_k)] if top_k > 0 else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ]
    scores_RV = logits_RV
    for warper in warpers:
        scores_RV = warper(torch.empty(0, dtype=torch.int64), scores_RV)
    expected_RV = scores_RV.log_softmax(-1)

    result = sample(logits_RV, process(rows, *[True] * 20))

    chosen_R1 = result.token_ids_R[:, None]
    torch.testing.assert_close(result.logprobs_R, expected_RV.gather(-1, chosen_R1).squeeze(-1))
    top_ids_RK, top_RK = top_logprobs(result.scored_RV, 60)
    torch.testing.assert_close(top_RK, expected_RV.gather(-1, top_ids_RK))


def test_processed_log_probs_of_a_greedy_row_know_no_temperature_and_no_filter() -> None:
    logits_RV = torch.tensor([[2.0, 1.0, 0.0, 3.0]])
    rows = make_rows(1, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, banned=([0], [3]))
    biased = make_adjustments(1, bias=([0], [1], [0.5]))

    result = sample(logits_RV, process(replace(rows, adjustments=biased), True))

    expected_V = torch.tensor([2.0, 1.5, 0.0, -math.inf]).log_softmax(-1)
    assert float(result.logprobs_R) == pytest.approx(float(expected_V[0]))
    torch.testing.assert_close(result.scored_RV[0].log_softmax(-1), expected_V)


def test_each_row_gets_its_kind_of_log_probs_whatever_the_batch() -> None:
    logits_RV, params = mixed_batch(67, 500)
    flags = [row % 3 == 0 for row in range(67)]
    raw = sample(logits_RV, pick(params, range(67)))

    together = sample(logits_RV, process(pick(params, range(67)), *flags))

    assert torch.equal(together.token_ids_R, raw.token_ids_R)
    others = torch.tensor([row for row in range(67) if not flags[row]])
    assert_same(select(together, others), select(raw, others))
    for row in range(67):
        rows = pick(params, [row])
        alone = sample(logits_RV[row : row + 1], process(rows, True) if flags[row] else rows)
        assert_same(alone, select(together, torch.tensor([row])))
        assert torch.equal(alone.scored_RV[0], together.scored_RV[row])


def test_processed_log_probs_are_finite_at_the_least_temperature() -> None:
    logits_RV = torch.tensor([[1e4, -1e4, 9.9e3, -math.inf]] * 3)
    rows = process(make_rows(3, temperature=[1e-4, 1e-30, 1e-45], top_p=0.9), True, True, True)

    result = sample(logits_RV, rows)

    assert result.logprobs_R.tolist() == [0.0] * 3
    assert not torch.isnan(result.scored_RV).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_under_a_ban_is_a_bad_row_with_processed_log_probs_too(temperature: float) -> None:
    logits_RV = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 1.0, 2.0]])
    rows = make_rows(2, temperature=temperature, banned=([0], [0]))

    result = sample(logits_RV, process(rows, True, True))

    assert result.nan_rows_R.tolist() == [True, False]
    assert torch.isnan(result.logprobs_R).tolist() == [True, False]


def test_rows_go_to_a_device_with_all_they_hold() -> None:
    rows = process(replace(make_rows(2), adjustments=make_adjustments(2)), True, False)

    moved = rows.to(torch.device("meta"))

    assert moved.adjustments is not None
    assert moved.processed_R is not None
    assert moved.adjustments.bias_M.device.type == moved.processed_R.device.type == "meta"
    assert moved.adjustments.repetition_R.device.type == moved.seed_S.device.type == "meta"


def test_rows_do_not_follow_changes_of_the_arrays_they_came_from() -> None:
    temperature = np.zeros(1, dtype=np.float32)
    rows = SamplingRows.build(
        temperature=temperature, top_k=[0], top_p=[1.0], min_p=[0.0], seed=[0], position=[0]
    )

    temperature[0] = 1.0

    assert len(rows.sampled_rows_S) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_from_the_same_uniforms_and_any_batch() -> None:
    device = torch.device("cuda")
    logits_RV, params = mixed_batch(67, 50_048)
    logits_RV = logits_RV.to(device)
    seeds, positions = torch.arange(1000), torch.arange(1000) * 7
    together = sample(logits_RV, pick(params, range(67)).to(device))

    alone = [sample(logits_RV[i : i + 1], pick(params, [i]).to(device)) for i in range(67)]

    runners = torch.arange(300)[None, :]
    on_gpu = uniforms(seeds.cuda(), positions.cuda(), runners.cuda()).cpu()
    assert torch.equal(on_gpu, uniforms(seeds, positions, runners))
    assert [int(one.token_ids_R) for one in alone] == together.token_ids_R.tolist()
    on_cpu = sample(logits_RV.cpu(), pick(params, range(67)))
    assert (on_cpu.token_ids_R == together.token_ids_R.cpu()).float().mean() > 0.98
