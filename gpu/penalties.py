"""What requests change in the logits before a token is chosen: bans, bias and penalties.

In this order, as in vLLM: a banned token gets -inf; a bias is added; then come the repetition,
frequency and presence penalties of the tokens that a row has seen. Only these are read and written,
in place, and put back once the token is chosen: for 64 rows that have seen 500 tokens each, 2 ms on
one core, where a copy of the logits (64 rows of 49,152) means fresh memory and takes up to 12 ms.

The penalties are those of CTRL (arXiv:1909.05858) and of OpenAI's API: a seen token's logit is
divided by the repetition penalty where it is positive and multiplied where not, whether the token
is of the prompt or of the output; a token of the output loses its count times the frequency penalty
and once the presence penalty. -inf stays -inf under all of them.

Letters: R rows, V vocabulary, B bans, M biases, N tokens that rows have seen, each once a row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def biased(self, logit_M: Tensor) -> Tensor:
        """Return the logits of the tokens that have a bias with it."""
        return logit_M + self.bias_M

    def penalized(self, logit_N: Tensor) -> Tensor:
        """Return the logits of the seen tokens after their penalties."""
        rows_N, count_N = self.seen_rows_N, self.output_count_N
        repetition_N = self.repetition_R[rows_N]
        logit_N = torch.where(logit_N > 0, logit_N / repetition_N, logit_N * repetition_N)
        logit_N = logit_N - self.frequency_R[rows_N] * count_N
        return logit_N - self.presence_R[rows_N] * (count_N > 0)


@contextmanager
def adjusting(
    logits_RV: Tensor,
    banned_rows_B: Tensor,
    banned_tokens_B: Tensor,
    adjustments: Adjustments | None,
) -> Iterator[None]:
    """Let bans and adjustments hold in the logits within the block; then undo them to the bit.

    Raises IndexError for a token id outside the vocabulary (on a GPU, whenever it is found out).
    """
    before: list[tuple[Tensor, Tensor, Tensor]] = []

    def change(rows_N: Tensor, tokens_N: Tensor, new: Callable[[Tensor], Tensor]) -> None:
        if len(rows_N):
            logit_N = logits_RV[rows_N, tokens_N]
            before.append((rows_N, tokens_N, logit_N))
            logits_RV[rows_N, tokens_N] = new(logit_N)

    try:
        change(banned_rows_B, banned_tokens_B, lambda logit_B: torch.full_like(logit_B, -torch.inf))
        if adjustments is not None:
            change(adjustments.bias_rows_M, adjustments.bias_tokens_M, adjustments.biased)
            change(adjustments.seen_rows_N, adjustments.seen_tokens_N, adjustments.penalized)
        yield
    finally:
        for rows_N, tokens_N, logit_N in reversed(before):
            logits_RV[rows_N, tokens_N] = logit_N
