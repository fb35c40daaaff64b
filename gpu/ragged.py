"""Lines of different lengths in one array, so that a rule over many of them is one call.

Letters: L lines that are asked for, N entries of all of these.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Lines = npt.NDArray[np.int64]


class RaggedTable:
    """Numbered lines of records of one dtype; a line is empty until it is written."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.entries: npt.NDArray[Any] = np.zeros((1, 0), dtype=dtype)
        """Line by line; behind a line's own entries stands whatever stood there before."""
        self.lengths: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def write(self, line: int, entries: npt.NDArray[Any]) -> None:
        """Replace a line."""
        self.widen(line + 1, len(entries))
        self.entries[line, : len(entries)] = entries
        self.lengths[line] = len(entries)

    def widen(self, num_lines: int, width: int) -> None:
        """Make room for that many lines and for that many entries in each."""
        self.entries = widened(self.entries, (num_lines, width))
        self.lengths = widened(self.lengths, (num_lines,))

    def gather(self, lines_L: Lines) -> tuple[Lines, npt.NDArray[Any]]:
        """Return which of the lines each entry is of, 0 to L - 1, and the entries: both [N]."""
        lengths_L = self.lengths[lines_L]
        index_N = np.repeat(np.arange(len(lines_L)), lengths_L)
        # Where entry 0 of the line would be in the flat array, if all N stood in a row before it.
        shift_L = lines_L * self.entries.shape[1] - (lengths_L.cumsum() - lengths_L)
        return index_N, self.entries.ravel()[np.arange(len(index_N)) + shift_L[index_N]]


def widened(array: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return the array if it has the shape at least, else a larger copy with zeros behind it."""
    if all(have >= need for have, need in zip(array.shape, shape, strict=True)):
        return array
    sizes = [
        have if have >= need else 1 << (need - 1).bit_length()
        for have, need in zip(array.shape, shape, strict=True)
    ]
    larger = np.zeros(sizes, dtype=array.dtype)
    larger[tuple(slice(have) for have in array.shape)] = array
    return larger
