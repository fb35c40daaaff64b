"""Choosing the next token of every row in one batched pass, the same token whatever the batch.

Order, as in vLLM: bans (bad words, minimum tokens), bias, and the repetition, frequency and
presence penalties (see `penalties`); then, in rows with a temperature, temperature, min-p, top-k,
and top-p over what those left. Temperature 0 is greedy and is never divided by. Tokens tied with
the last one that top-k or top-p keeps are all kept, so nothing hangs on how ties are sorted.

Log-probabilities are raw, of the logits as the model gave them, or processed, of what the row chose
from after all of that; a token that is filtered out then has -inf.

A draw is a race: token i finishes after E / weight_i with E exponential, and the first wins, which
happens with its probability. (It is the Gumbel trick without its outer logarithm.) Inverse CDF
would do with one uniform a row, but moves with every tiny change of the logits, of which a row
that is recomputed in another batch has some: each boundary between two of 50,000 tokens would be a
place where another token comes out. In a race another one wins only where two finish together. It
is run in two rounds, between groups of tokens, then within the winning group, so that a row takes
a few hundred exponentials, hashed from (seed, position, runner) and nothing else.

Sums of floats depend on their order, which kernels choose by batch shape; so probabilities are
first cut to whole multiples of 2^-40 and then summed as int64, where every order gives the same
sum. Only softmax and max are left to floating point, and they work on each row by itself.

Letters: R rows, S rows that are sampled (not greedy), V vocabulary, K likeliest tokens, B bans,
D values of a digit, N runners of a race, G groups of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.device import at_least_float32
from callboard.gpu.penalties import Adjustments, adjusting

_WEIGHT_ONE = 2**40
"""The weight of probability 1: finer than logits are exact, and 2^22 of it fit in an int64."""

# How many elements of [S, V] are drawn from at a time. Several int64 buffers of that size live at
# once: on the CPU they must stay in cache and be reused (64 rows of 49,152: 5 ms in pieces, 22 ms
# in one), on a GPU this only bounds the memory taken.
_PIECE_ELEMENTS = {"cpu": 2**18, "cuda": 2**25}

_DIGIT_BITS = 11
_DIGITS = {
    torch.float32: (torch.int32, (22, 11, 0)),
    torch.float64: (torch.int64, (55, 44, 33, 22, 11, 0)),
}
"""As what integer the bits of a float that is not negative are read, in digits from the left."""

_GROUP_TOKENS = 256
_WITHIN_GROUP = 2**32
"""Where the runners' numbers of the second round begin; those of the first are below."""

Numbers = Sequence[float] | npt.NDArray[np.generic] | Tensor


@dataclass(frozen=True, eq=False, slots=True)
class SamplingRows:
    """What one step asks of the sampler, row by row; made on the CPU by `SamplingRows.build`.

    Tensors cover only the rows that need them; the plain values beside them let `sample` skip work
    without asking the device, which would mean to wait for it.
    """

    sampled_rows_S: Tensor
    """int64, ascending: the rows with a temperature above 0."""
    temperature_S: Tensor
    """float32."""
    top_k_S: Tensor
    """int64; 0 is off."""
    top_p_S: Tensor
    """float64; 1 is off."""
    min_p_S: Tensor
    """float64; 0 is off."""
    seed_S: Tensor
    """int64."""
    position_S: Tensor
    """int64: where in its sequence the chosen token will stand."""
    banned_rows_B: Tensor
    """int64, in pairs with `banned_tokens_B`."""
    banned_tokens_B: Tensor
    """int64: ids that row must not choose in this step (end-of-sequence ids before min_tokens)."""
    uses_top_k: bool
    uses_top_p: bool
    uses_min_p: bool
    adjustments: Adjustments | None = None
    """Biases and penalties; None where no row has any."""
    processed_R: Tensor | None = None
    """bool: rows that want processed log-probs; None where no row does."""

    @classmethod
    def build(
        cls,
        *,
        temperature: Numbers,
        top_k: Numbers,
        top_p: Numbers,
        min_p: Numbers,
        seed: Numbers,
        position: Numbers,
        banned: tuple[Numbers, Numbers] = ((), ()),
    ) -> "SamplingRows":
        """Copy arrays of length R, and the bans as (rows, token ids), into what a step needs.

        Nothing is checked: ranges were, where the request came in.
        """
        temperature_R = _copy(temperature, torch.float32)
        sampled_rows_S = temperature_R.nonzero().flatten()
        top_k_S = _copy(top_k, torch.int64)[sampled_rows_S]
        top_p_S = _copy(top_p, torch.float64)[sampled_rows_S]
        min_p_S = _copy(min_p, torch.float64)[sampled_rows_S]
        return cls(
            sampled_rows_S=sampled_rows_S,
            temperature_S=temperature_R[sampled_rows_S],
            top_k_S=top_k_S,
            top_p_S=top_p_S,
            min_p_S=min_p_S,
            seed_S=_copy(seed, torch.int64)[sampled_rows_S],
            position_S=_copy(position, torch.int64)[sampled_rows_S],
            banned_rows_B=_copy(banned[0], torch.int64),
            banned_tokens_B=_copy(banned[1], torch.int64),
            uses_top_k=bool((top_k_S > 0).any()),
            uses_top_p=bool((top_p_S < 1).any()),
            uses_min_p=bool((min_p_S > 0).any()),
        )

    def to(self, device: torch.device) -> "SamplingRows":
        """Return the same rows with their tensors on the device."""
        names = _TENSOR_FIELDS if self.processed_R is None else (*_TENSOR_FIELDS, "processed_R")
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        adjustments = self.adjustments and self.adjustments.to(device)
        return replace(self, adjustments=adjustments, **tensors)


_TENSOR_FIELDS = tuple(field.name for field in fields(SamplingRows) if field.type is Tensor)


@dataclass(frozen=True, eq=False, slots=True)
class SampleResult:
    """One token per row, on the device of the logits."""

    token_ids_R: Tensor
    """int64; 0 in a bad row."""
    logprobs_R: Tensor
    """float32 natural log-probability, raw or processed as the row wants it; NaN in a bad row."""
    nan_rows_R: Tensor
    """bool: bad rows, in which a logit is NaN or +inf, or none that is allowed is above -inf."""
    scored_RV: Tensor
    """float32 at least: the logits that the rows' log-probs are of."""


def sample(logits_RV: Tensor, rows: SamplingRows) -> SampleResult:
    """Choose one token per row; logits are of any float dtype, on the rows' device, and unchanged.

    What a row gets depends on its own logits and parameters only, bit for bit.
    """
    logits_RV = logits_RV.to(at_least_float32(logits_RV.dtype)).contiguous()
    with adjusting(logits_RV, rows.banned_rows_B, rows.banned_tokens_B, rows.adjustments):
        peak_R, token_ids_R, chosen_from_RV = _choose(logits_RV, rows)
    logprobs_R = logprobs_of(logits_RV, token_ids_R)
    # A NaN under a ban shows in the raw log-probability only.
    nan_rows_R = ~torch.isfinite(peak_R) | torch.isnan(logprobs_R)
    scored_RV = logits_RV
    if rows.processed_R is not None:
        scored_RV = torch.where(rows.processed_R[:, None], chosen_from_RV, logits_RV)
        logprobs_R = logprobs_of(scored_RV, token_ids_R)
    return SampleResult(
        token_ids_R=token_ids_R.masked_fill(nan_rows_R, 0),
        logprobs_R=logprobs_R.masked_fill(nan_rows_R, torch.nan),
        nan_rows_R=nan_rows_R,
        scored_RV=scored_RV,
    )


def top_logprobs(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens, likeliest first: ids (int64) and log-probs (float32), [R, k].

    Of equal ones those with the lowest ids come first, so that the first is the greedy one.
    Where a row has fewer than k finite logits the rest are -inf; a smaller vocabulary gives all.
    """
    logits_RV = logits_RV.to(at_least_float32(logits_RV.dtype))
    token_ids_RK = _highest(logits_RV, min(k, logits_RV.shape[-1]))
    return token_ids_RK, _logprobs(logits_RV, logits_RV.gather(-1, token_ids_RK))


def uniforms(seed_S: Tensor, position_S: Tensor, runner_SN: Tensor) -> Tensor:
    """Return float64 [S, N] in (0, 1) by (seed, position, runner) only, the same on every device.

    The generator SplitMix64, entered at output `runner` from a state hashed from the other two.
    """
    state_S = _mix64(_mix64(seed_S + _GAMMA) + (position_S + 1) * _GAMMA)
    hash_SN = _mix64(state_S[:, None] + (runner_SN + 1) * _GAMMA)
    return (_shift_right(hash_SN, 12).double() + 0.5) * 2.0**-52


def _highest(values_RV: Tensor, k: int) -> Tensor:
    """Return the columns, int64 [R, k], of the highest values; of equal ones the first columns.

    torch.topk leaves it open which of those it returns. So it is given keys of which no two are
    equal: a float's bits, which sort as it does, above the column counted from the end.
    """
    if values_RV.dtype != torch.float32:
        return values_RV.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    bits_RV = (values_RV + 0.0).view(torch.int32).to(torch.int64)  # -0.0 is 0.0
    bits_RV = torch.where(bits_RV < 0, bits_RV ^ _LOW_31, bits_RV)
    columns_V = torch.arange(values_RV.shape[-1], device=values_RV.device)
    keys_RV = (bits_RV << 31) + (_LOW_31 - columns_V)
    return _LOW_31 - (keys_RV.topk(k, dim=-1).values & _LOW_31)


def _copy(numbers: Numbers, dtype: torch.dtype) -> Tensor:
    """Copy, because the caller's arrays go on to the next step while this one may still wait."""
    return torch.asarray(numbers, dtype=dtype, copy=True)


def _choose(logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's highest logit, its token, and what this was chosen from.

    The last, [R, V], is filtered only where a row wants to know; else it may be the logits.
    """
    peak_R, token_ids_R = logits_RV.max(dim=-1)
    chosen_from_RV = logits_RV if rows.processed_R is None else logits_RV.clone()
    if len(rows.sampled_rows_S):
        drawn_S = _draw(logits_RV, peak_R, rows, chosen_from_RV)
        token_ids_R = token_ids_R.index_copy(0, rows.sampled_rows_S, drawn_S)
    return peak_R, token_ids_R, chosen_from_RV


def logprobs_of(logits_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    return _logprobs(logits_RV, logits_RV.gather(-1, token_ids_R[:, None])).squeeze(-1)


def _logprobs(logits_RV: Tensor, chosen_RK: Tensor) -> Tensor:
    """Return the log-probabilities, float32 [R, K], of logits chosen from each row.

    They are taken from the likeliest token, whose probability is at least 1/V. Softmax keeps to its
    row, where torch.logsumexp splits the sum by batch shape; and log_softmax takes twice the time.
    """
    likeliest_R1 = torch.softmax(logits_RV, dim=-1).amax(dim=-1, keepdim=True)
    return (chosen_RK - logits_RV.amax(dim=-1, keepdim=True) + likeliest_R1.log()).float()


def _draw(logits_RV: Tensor, peak_R: Tensor, rows: SamplingRows, chosen_from_RV: Tensor) -> Tensor:
    """Draw a token for each sampled row, [S]; a bad row gets any id of the vocabulary.

    Writes what the rows are drawn from into `chosen_from_RV` when a row wants to know it.
    """
    row_elements = max(logits_RV.shape[-1], 2**_DIGIT_BITS)
    piece = max(1, _PIECE_ELEMENTS[logits_RV.device.type] // row_elements)
    drawn = []
    for start in range(0, len(rows.sampled_rows_S), piece):
        part = slice(start, start + piece)
        row_S = rows.sampled_rows_S[part]
        # Nothing is above 0 once the peak is taken off: no temperature is too small to divide by.
        scaled_SV = logits_RV[row_S].sub_(peak_R[row_S, None])
        scaled_SV.div_(rows.temperature_S[part, None])
        probs_SV = torch.softmax(scaled_SV, dim=-1)
        dropped_SV = None
        if rows.processed_R is not None:
            dropped_SV = torch.zeros_like(probs_SV, dtype=torch.bool)
        weights_SV = _filtered_weights(probs_SV, rows, part, dropped_SV)
        drawn.append(_race(weights_SV, rows.seed_S[part], rows.position_S[part]))
        if dropped_SV is not None:
            # Not what is too unlikely ever to be drawn: that has a probability all the same.
            chosen_from_RV[row_S] = scaled_SV.masked_fill_(dropped_SV, -torch.inf)
    return torch.cat(drawn)


def _filtered_weights(
    probs_SV: Tensor, rows: SamplingRows, part: slice, dropped_SV: Tensor | None
) -> Tensor:
    """Return int64 weights, `_WEIGHT_ONE` for probability 1, of what min-p, top-k, top-p keep.

    What they drop is noted in `dropped_SV`, where somebody wants to know.
    """
    weights_SV = (probs_SV * _WEIGHT_ONE).to(torch.int64)

    def drop_below(least_S: Tensor) -> None:
        below_SV = probs_SV < least_S[:, None].to(probs_SV.dtype)
        weights_SV.masked_fill_(below_SV, 0)
        if dropped_SV is not None:
            dropped_SV.logical_or_(below_SV)

    if rows.uses_min_p:
        drop_below(rows.min_p_S[part] * probs_SV.amax(dim=-1))
    if rows.uses_top_k:
        top_k_S = rows.top_k_S[part].clamp(max=probs_SV.shape[-1])
        num_kept_S = torch.where(top_k_S == 0, probs_SV.shape[-1], top_k_S)
        drop_below(_threshold(probs_SV, torch.ones_like(weights_SV), num_kept_S))
    if rows.uses_top_p:
        mass_S = (rows.top_p_S[part] * weights_SV.sum(dim=-1)).ceil().to(torch.int64)
        mass_S.clamp_(min=1)  # a top_p too small for a float32 has become 0
        drop_below(_threshold(probs_SV, weights_SV, mass_S))
    return weights_SV


def _race(weights_SV: Tensor, seed_S: Tensor, position_S: Tensor) -> Tensor:
    """Return the token that wins each row's race; never one of weight 0 where another has more."""
    num_rows, num_tokens = weights_SV.shape
    padding = -num_tokens % _GROUP_TOKENS
    grouped_SGN = torch.nn.functional.pad(weights_SV, (0, padding)).view(
        num_rows, -1, _GROUP_TOKENS
    )
    group_G = torch.arange(grouped_SGN.shape[1], device=weights_SV.device)
    group_S = _first(grouped_SGN.sum(dim=-1), uniforms(seed_S, position_S, group_G[None, :]))
    member_N = torch.arange(_GROUP_TOKENS, device=weights_SV.device)
    token_SN = group_S[:, None] * _GROUP_TOKENS + member_N
    members_SN = grouped_SGN[torch.arange(num_rows, device=weights_SV.device), group_S]
    member_S = _first(members_SN, uniforms(seed_S, position_S, _WITHIN_GROUP + token_SN))
    return (group_S * _GROUP_TOKENS + member_S).clamp_(max=num_tokens - 1)


def _first(weights_SN: Tensor, uniform_SN: Tensor) -> Tensor:
    """Return who finishes first when runner i takes an exponential time of rate weight i."""
    return (-uniform_SN.log() / weights_SN.double()).argmin(dim=-1)


def _threshold(values_SV: Tensor, amounts_SV: Tensor, need_S: Tensor) -> Tensor:
    """Return, per row, the largest value such that what is at or above it amounts to the need.

    Values are floats and not negative, amounts and needs int64. It is a radix select: the bits of
    such floats sort as they do, and a histogram of each digit leads to the next. Without a sort,
    it is exact and takes the same time however flat the distribution is (64 rows of 49,152 on two
    cores: 13 ms, a sort 94 ms), and it never asks the device.
    """
    as_int, digit_shifts = _DIGITS[values_SV.dtype]
    bits_SV = values_SV.view(as_int)
    need_S1 = need_S[:, None]
    found_S1 = torch.zeros_like(need_S1, dtype=as_int)
    for shift in digit_shifts:
        digit_SV = ((bits_SV >> shift) & (2**_DIGIT_BITS - 1)).to(torch.int64)
        amount_SD = amounts_SV.new_zeros(len(need_S), 2**_DIGIT_BITS)
        amount_SD.scatter_add_(-1, digit_SV, amounts_SV)
        reached_SD = amount_SD.flip(-1).cumsum(dim=-1)
        from_top_S1 = torch.searchsorted(reached_SD, need_S1).clamp_(max=2**_DIGIT_BITS - 1)
        digit_S1 = 2**_DIGIT_BITS - 1 - from_top_S1
        need_S1 = need_S1 - (reached_SD.gather(-1, from_top_S1) - amount_SD.gather(-1, digit_S1))
        found_S1 |= digit_S1.to(as_int) << shift
        amounts_SV = torch.where(digit_SV == digit_S1, amounts_SV, 0)
    return found_S1.view(values_SV.dtype).squeeze(-1)


_LOW_31 = 2**31 - 1

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's finishing hash; products of int64 wrap just as unsigned ones do."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift as if unsigned; torch's own shift of int64 draws the sign bit along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
