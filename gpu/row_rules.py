"""What only some rows ask for: penalties, bias, bad words and processed log-probs.

Such a row has a line here, by number, for as long as it lives, and carries the number wherever it
moves. Line 0 is that of all other rows: nothing is ever written to it. How often a row has seen
which token is counted from its tokens when it comes, and kept up with every token it samples.

NumPy on the CPU, like the table of rows. Letters: S rows that sample in a step, by their lines.
"""

import heapq
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.bad_words import BadWords
from callboard.gpu.penalties import Adjustments
from callboard.gpu.ragged import Lines, RaggedTable, widened
from callboard.gpu.sampling import SamplingRows
from callboard.messages.steps import RowSampling

Ids = npt.NDArray[np.int32]

NO_LINE = 0

_RULE = np.dtype(
    [
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("is_penalized", np.bool_),
        ("processed_logprobs", np.bool_),
    ]
)
_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])
_SEEN = np.dtype([("token", np.int32), ("count", np.int32)])


class RowRules:
    """The lines of the rows that have any; `len` is their number."""

    def __init__(self) -> None:
        self._rules = np.zeros(1, dtype=_RULE)
        self._bias = RaggedTable(_BIAS)
        self._seen = RaggedTable(_SEEN)
        self._bad_words = BadWords()
        self._free: list[int] = []  # a heap, so that lines stay few and low
        self._num_lines = 1

    def __len__(self) -> int:
        return self._num_lines - 1 - len(self._free)

    def add(self, tokens: Ids, sampling: RowSampling) -> int:
        """Take a row in and return its line; NO_LINE where it asks for nothing.

        The last `first_position` of the row's tokens are its output so far.
        """
        if not _asks(sampling):
            return NO_LINE
        line = self._take_line()
        num_prompt = max(0, len(tokens) - sampling.first_position)
        prompt, output = tokens[:num_prompt], tokens[num_prompt:]
        self._rules[line] = _rule(sampling)
        self._bias.write(line, _biases(sampling))
        self._seen.write(line, _seen(prompt, output, sampling))
        sequences = [ids for ids in sampling.bad_token_ids if len(ids) > 1]
        self._bad_words.write(line, sequences, output)
        return line

    def remove(self, lines: Lines) -> None:
        """Forget the rows of these lines, NO_LINE among them or not."""
        for line in lines[lines != NO_LINE].tolist():
            heapq.heappush(self._free, line)

    def record(self, lines_S: Lines, tokens_S: Ids) -> None:
        """Count the tokens that these rows sampled as their output."""
        has_line = lines_S != NO_LINE
        lines, tokens = lines_S[has_line], tokens_S[has_line]
        self._bad_words.push(lines, tokens)
        is_penalized = self._rules["is_penalized"][lines]
        self._count(lines[is_penalized], tokens[is_penalized])

    def apply(self, lines_S: Lines, rows: SamplingRows) -> SamplingRows:
        """Return how rows choose their tokens once their rules count too."""
        if not lines_S.any():
            return rows
        index_B, tokens_B = self._bad_words.completing(lines_S)
        processed_S = self._rules["processed_logprobs"][lines_S]
        return replace(
            rows,
            banned_rows_B=torch.cat((rows.banned_rows_B, _int64(index_B))),
            banned_tokens_B=torch.cat((rows.banned_tokens_B, _int64(tokens_B))),
            adjustments=self._adjustments(lines_S),
            processed_R=torch.from_numpy(processed_S) if processed_S.any() else None,
        )

    def _adjustments(self, lines_S: Lines) -> Adjustments | None:
        """Return the biases and penalties of these rows; None where none has any."""
        bias_rows, biases = self._bias.gather(lines_S)
        seen_rows, seen = self._seen.gather(lines_S)
        if not len(biases) and not len(seen):
            return None
        rules_S = self._rules[lines_S]
        return Adjustments(
            bias_rows_M=_int64(bias_rows),
            bias_tokens_M=_int64(biases["token"]),
            bias_M=_float32(biases["bias"]),
            seen_rows_N=_int64(seen_rows),
            seen_tokens_N=_int64(seen["token"]),
            output_count_N=_float32(seen["count"]),
            repetition_R=_float32(rules_S["repetition"]),
            frequency_R=_float32(rules_S["frequency"]),
            presence_R=_float32(rules_S["presence"]),
        )

    def _take_line(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        line = self._num_lines
        self._num_lines += 1
        self._rules = widened(self._rules, (self._num_lines,))
        return line

    def _count(self, lines: Lines, tokens: Ids) -> None:
        """Add one to the count of each line's token, which may be new to the line."""
        lengths = self._seen.lengths[lines]
        width = int(lengths.max(initial=0)) + 1
        self._seen.widen(self._num_lines, width)
        entries = self._seen.entries
        is_own = np.arange(width) < lengths[:, None]
        is_token = (entries["token"][lines, :width] == tokens[:, None]) & is_own
        places = np.where(is_token.any(axis=1), is_token.argmax(axis=1), lengths)
        is_new = places == lengths
        counts = np.where(is_new, 0, entries["count"][lines, places])
        entries["token"][lines, places] = tokens
        entries["count"][lines, places] = counts + 1
        self._seen.lengths[lines] = lengths + is_new


def _asks(sampling: RowSampling) -> bool:
    """Say whether a row needs a line: most rows do not."""
    has_lists = bool(sampling.logit_bias or sampling.bad_token_ids)
    return has_lists or _is_penalized(sampling) or _wants_processed(sampling)


def _wants_processed(sampling: RowSampling) -> bool:
    return sampling.processed_logprobs and sampling.logprobs >= 0


def _is_penalized(sampling: RowSampling) -> bool:
    is_off = sampling.presence_penalty == sampling.frequency_penalty == 0
    return sampling.repetition_penalty != 1 or not is_off


def _rule(sampling: RowSampling) -> tuple[float, float, float, bool, bool]:
    return (
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        _is_penalized(sampling),
        _wants_processed(sampling),
    )


def _biases(sampling: RowSampling) -> npt.NDArray[np.void]:
    """Return the bias of each token that has one; a bad word of one token is a bias of -inf."""
    banned = {ids[0]: -np.inf for ids in sampling.bad_token_ids if len(ids) == 1}
    return np.array(list({**sampling.logit_bias, **banned}.items()), dtype=_BIAS)


def _seen(prompt: Ids, output: Ids, sampling: RowSampling) -> npt.NDArray[np.void]:
    """Return the distinct tokens that matter to a row's penalties, with their counts in its output.

    Those of the prompt matter to the repetition penalty only.
    """
    if not _is_penalized(sampling):
        return np.empty(0, dtype=_SEEN)
    tokens = np.unique(
        output if sampling.repetition_penalty == 1 else np.concatenate((prompt, output))
    )
    output_tokens, counts = np.unique(output, return_counts=True)
    seen = np.zeros(len(tokens), dtype=_SEEN)
    seen["token"] = tokens
    seen["count"][np.searchsorted(tokens, output_tokens)] = counts
    return seen


def _int64(numbers: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64))


def _float32(numbers: npt.NDArray[np.number]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.float32))
