"""Log-probabilities beyond those of the sampled tokens: the likeliest ones, and those of prompts.

Letters: S rows that sample, P prompt tokens whose successors are scored, K likeliest tokens, D the
model's width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.context import PromptTargets
from callboard.gpu.sampling import SamplingRows, logprobs_of, sample, top_logprobs
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs
from callboard.messages.steps import RowSampling

PIECE_TOKENS = 64
"""Prompt tokens whose logits are computed together: 64 of 50,000 float32 are 13 MB."""


def likeliest(logits_SV: Tensor, wanted_S: npt.NDArray[np.int32]) -> list[TopLogprobs]:
    """Return as many of the likeliest tokens as each row wants; empty where no row wants any.

    A row gets fewer where fewer are possible at all.
    """
    asking = np.flatnonzero(wanted_S > 0)
    if not len(asking):
        return []
    if len(asking) < len(wanted_S):
        logits_SV = logits_SV[torch.from_numpy(asking).to(logits_SV.device)]
    top = top_logprobs(logits_SV, int(wanted_S.max()))
    found: list[TopLogprobs] = [()] * len(wanted_S)
    for row, ids, logprobs in zip(asking.tolist(), *(each.tolist() for each in top), strict=True):
        found[row] = _of_row(ids, logprobs, int(wanted_S[row]))
    return found


def _of_row(ids: list[int], logprobs: list[float], wanted: int) -> TopLogprobs:
    pairs = zip(ids[:wanted], logprobs[:wanted], strict=True)
    return tuple((token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf)


def score_prompt(
    targets: PromptTargets,
    hidden_TD: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    piece_tokens: int = PIECE_TOKENS,
) -> PromptLogprobs | None:
    """Return the log-probabilities of a chunk's successors; None where they are not numbers.

    `logits_of` makes logits [P, V] of hidden states [P, D].
    """
    hidden_PD = hidden_TD[targets.tokens]
    target_P = torch.from_numpy(targets.target_ids.astype(np.int64)).to(hidden_TD.device)
    pieces = zip(
        torch.split(hidden_PD, piece_tokens), torch.split(target_P, piece_tokens), strict=True
    )
    parts = [_score(logits_of(hidden), target, targets.sampling) for hidden, target in pieces]
    logprobs_P, top_ids_PK, top_PK = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    if logprobs_P.isnan().any():
        return None
    return PromptLogprobs(
        start=targets.start,
        logprobs=logprobs_P.numpy().tobytes(),
        num_top=top_PK.shape[1],
        top_ids=top_ids_PK.to(torch.int32).numpy().tobytes(),
        top_logprobs=top_PK.numpy().tobytes(),
    )


def _score(logits_PV: Tensor, target_P: Tensor, sampling: RowSampling) -> Sequence[Tensor]:
    """Return the targets' log-probabilities [P], and ids and values of the likeliest, [P, K]."""
    if sampling.processed_logprobs:
        logits_PV = _processed(logits_PV, sampling)
    num_top, logprobs_P = sampling.prompt_logprobs, logprobs_of(logits_PV, target_P)
    if not num_top:
        return (
            logprobs_P,
            target_P.new_empty(len(target_P), 0),
            logprobs_P.new_empty(len(target_P), 0),
        )
    top_ids_PK, top_PK = top_logprobs(logits_PV, num_top)
    return logprobs_P, top_ids_PK, top_PK


def _processed(logits_PV: Tensor, sampling: RowSampling) -> Tensor:
    """Return what the row would have chosen from in these places, but for penalties and bans.

    Those are about what the row says, and here it says nothing.
    """
    count = len(logits_PV)
    rows = SamplingRows.build(
        temperature=[sampling.temperature] * count,
        top_k=[sampling.top_k] * count,
        top_p=[sampling.top_p] * count,
        min_p=[sampling.min_p] * count,
        seed=[0] * count,
        position=[0] * count,
    )
    rows = replace(rows, processed_R=torch.ones(count, dtype=torch.bool))
    result = sample(logits_PV, rows.to(logits_PV.device))
    return result.scored_RV.masked_fill(result.nan_rows_R[:, None], torch.nan)
