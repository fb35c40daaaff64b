"""What requests change in the logits before a token is chosen: bans, bias and penalties.

In this order, as in vLLM: a banned token gets -inf; a bias is added; then come the repetition,
frequency and presence penalties of the tokens that a row has seen. Only these are read and written,
and they are few beside the vocabulary: a penalty costs little more than a copy of the logits.

The penalties are those of CTRL (arXiv:1909.05858) and of OpenAI's API: a seen token's logit is
divided by the repetition penalty where it is positive and multiplied where not, whether the token
is of the prompt or of the output; a token of the output loses its count times the frequency penalty
and once the presence penalty. -inf stays -inf under all of them.

Letters: R rows, V vocabulary, B bans, M biases, N tokens that rows have seen, each once a row.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Adjustments:
    """The biases and penalties of one step, in rows that ask for any."""

    bias_rows_M: Tensor
    """int64, in step with the two behind it; no row has a token twice."""
    bias_tokens_M: Tensor
    """int64."""
    bias_M: Tensor
    """float32; -inf is a ban."""
    seen_rows_N: Tensor
    """int64, in step with the two behind it; no row has a token twice."""
    seen_tokens_N: Tensor
    """int64."""
    output_count_N: Tensor
    """float32: how often the token is in the row's output; 0 where it is in the prompt only."""
    repetition_R: Tensor
    """float32, above 0; 1 is off."""
    frequency_R: Tensor
    """float32; 0 is off."""
    presence_R: Tensor
    """float32; 0 is off."""

    def to(self, device: torch.device) -> "Adjustments":
        """Return the same with its tensors on the device."""
        names = [field.name for field in fields(self)]
        tensors = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **tensors)


def adjusted(
    logits_RV: Tensor,
    banned_rows_B: Tensor,
    banned_tokens_B: Tensor,
    adjustments: Adjustments | None,
) -> Tensor:
    """Return a copy of float32 logits with the bans, and the adjustments where there are any.

    A token id outside the vocabulary changes nothing: it is led to one element behind the last row.
    """
    num_rows, vocab_size = logits_RV.shape
    flat = logits_RV.new_empty(num_rows * vocab_size + 1)
    adjusted_RV = flat[:-1].view(num_rows, vocab_size)
    adjusted_RV.copy_(logits_RV)
    flat.index_fill_(0, _places(adjusted_RV, banned_rows_B, banned_tokens_B), -torch.inf)
    if adjustments is not None:
        _add_bias(
            flat,
            _places(adjusted_RV, adjustments.bias_rows_M, adjustments.bias_tokens_M),
            adjustments,
        )
        _penalize(
            flat,
            _places(adjusted_RV, adjustments.seen_rows_N, adjustments.seen_tokens_N),
            adjustments,
        )
    return adjusted_RV


def _places(logits_RV: Tensor, rows_N: Tensor, tokens_N: Tensor) -> Tensor:
    num_rows, vocab_size = logits_RV.shape
    is_known_N = (tokens_N >= 0) & (tokens_N < vocab_size)
    return torch.where(is_known_N, rows_N * vocab_size + tokens_N, num_rows * vocab_size)


def _add_bias(flat: Tensor, places_M: Tensor, adjustments: Adjustments) -> None:
    flat.index_copy_(0, places_M, flat[places_M] + adjustments.bias_M)


def _penalize(flat: Tensor, places_N: Tensor, adjustments: Adjustments) -> None:
    rows_N, count_N = adjustments.seen_rows_N, adjustments.output_count_N
    logit_N, repetition_N = flat[places_N], adjustments.repetition_R[rows_N]
    logit_N = torch.where(logit_N > 0, logit_N / repetition_N, logit_N * repetition_N)
    logit_N = logit_N - adjustments.frequency_R[rows_N] * count_N
    logit_N = logit_N - adjustments.presence_R[rows_N] * (count_N > 0)
    flat.index_copy_(0, places_N, logit_N)
