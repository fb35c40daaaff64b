"""Which tokens would complete a sequence that must not come: the longer of the bad words.

A sequence is looked for in the output only, as in vLLM: what the prompt ends with is not the
model's word. Token ids are kept plus one, so that zero is "none" wherever nothing was written.

Letters: L rows' lines, W sequences of a line, K tokens before the last of a sequence, C candidates.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from callboard.gpu.ragged import Lines, widened

Ids = npt.NDArray[np.int32]


class BadWords:
    """Sequences of two and more tokens by line, and the last tokens of each line's output."""

    def __init__(self) -> None:
        self._last_W = np.zeros((1, 0), dtype=np.int32)
        self._before_WK = np.zeros((1, 0, 0), dtype=np.int32)  # from the last backwards
        self._output_K = np.zeros((1, 0), dtype=np.int32)  # likewise

    def write(self, line: int, sequences: Sequence[Sequence[int]], output: Ids) -> None:
        """Replace a line by these sequences, with nothing or more in its output."""
        most_before = max((len(sequence) - 1 for sequence in sequences), default=0)
        self._widen(line + 1, len(sequences), most_before)
        self._last_W[line] = 0
        self._before_WK[line] = 0
        for place, sequence in enumerate(sequences):
            *before, last = sequence
            self._last_W[line, place] = last + 1
            self._before_WK[line, place, : len(before)] = np.array(before[::-1]) + 1
        newest = output[::-1][: self._output_K.shape[1]]
        self._output_K[line] = 0
        self._output_K[line, : len(newest)] = newest + 1

    def push(self, lines_L: Lines, tokens_L: Ids) -> None:
        """Append a token to each line's output."""
        if self._output_K.shape[1] == 0:
            return
        self._output_K[lines_L, 1:] = self._output_K[lines_L, :-1]
        self._output_K[lines_L, 0] = tokens_L + 1

    def completing(self, lines_L: Lines) -> tuple[Lines, Ids]:
        """Return the tokens that must not come next: which of the lines, 0 to L - 1, and the ids.

        Nearly all sequences are out after a look at the token just before their last.
        """
        if self._output_K.shape[1] == 0:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        newest_L1 = self._output_K[lines_L, :1]
        is_candidate_LW = (self._before_WK[:, :, 0][lines_L] == newest_L1) & (newest_L1 > 0)
        index_C, place_C = np.nonzero(is_candidate_LW)
        line_C = lines_L[index_C]
        before_CK = self._before_WK[line_C, place_C]
        fits_C = ((before_CK == self._output_K[line_C]) | (before_CK == 0)).all(axis=1)
        return index_C[fits_C], self._last_W[line_C, place_C][fits_C] - 1

    def _widen(self, num_lines: int, num_sequences: int, num_before: int) -> None:
        self._last_W = widened(self._last_W, (num_lines, num_sequences))
        self._before_WK = widened(self._before_WK, (num_lines, num_sequences, num_before))
        self._output_K = widened(self._output_K, (num_lines, num_before))
