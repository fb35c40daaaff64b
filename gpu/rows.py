"""The table of rows: one record, one line of KV blocks and one line of stop ids a request.

Storage only: it copies, swaps and looks up rows, and knows nothing of which of them run. All of it
is NumPy arrays on the CPU, so that a rule over a thousand rows is one call and not a loop.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from callboard.messages.steps import RowId, RowSampling

Indices = npt.NDArray[np.int64]

ROW = np.dtype(
    [
        ("id", np.int64),
        ("seed", np.int64),
        ("query_length", np.int32),  # tokens to feed in the next step; 0 while the row sits out
        ("kv_length", np.int32),  # tokens that are in the KV cache
        ("num_blocks", np.int32),
        ("last_offset", np.int32),  # slot in its last block of the last token of all these
        ("next_token", np.int32),  # what a decoding row feeds next
        ("position", np.int32),  # output index of the token the row samples next
        ("max_tokens", np.int32),
        ("min_tokens", np.int32),
        ("num_stop_ids", np.int32),
        ("state_slot", np.int32),  # of its recurrent state; NO_SLOT where the model has none
        ("rules", np.int32),  # the row's line in `RowRules`; 0 where it has none
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("logprobs", np.int32),
    ],
    align=True,
)

NO_ROW = -1
NO_TOKEN = -1
NO_SLOT = -1


class RowTable:
    """Places 0 to max_rows - 1, each with room for one row of up to max_blocks blocks.

    Unused entries of a block table name the dummy block, so that whatever reads one by way of
    padding reads a block that exists and is nobody's.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, dummy: int) -> None:
        self._dummy = dummy
        self.records: npt.NDArray[np.void] = np.zeros(max_rows, dtype=ROW)
        self.block_table = np.full((max_rows, max_blocks), dummy, dtype=np.int32)
        self._stop_ids = np.full((max_rows, 4), NO_TOKEN, dtype=np.int32)
        self.clear(0, max_rows)

    def __getitem__(self, field: str) -> npt.NDArray[np.int32]:
        """Return one field of all places, as a view to read and write."""
        return self.records[field]

    def write(self, place: int, row: RowId, sampling: RowSampling) -> None:
        """Begin a row without tokens or blocks."""
        stop_ids = sampling.stop_token_ids
        self._widen_stop_ids(len(stop_ids))
        self._stop_ids[place, : len(stop_ids)] = stop_ids
        record = self.records[place]
        record["id"] = row
        record["position"] = sampling.first_position
        record["num_stop_ids"] = len(stop_ids)
        for field in _SAMPLING_FIELDS:
            record[field] = getattr(sampling, field)

    def append_blocks(self, place: int, blocks: tuple[int, ...]) -> None:
        """Add blocks at the end of one row's block table."""
        record = self.records[place]
        start = int(record["num_blocks"])
        self.block_table[place, start : start + len(blocks)] = blocks
        record["num_blocks"] = start + len(blocks)

    def append_block_each(self, places: Indices, blocks: npt.NDArray[np.int32]) -> None:
        """Add one block to each of several rows."""
        self.block_table[places, self["num_blocks"][places]] = blocks
        self["num_blocks"][places] += 1

    def blocks_of(self, places: Indices) -> list[int]:
        """Return the blocks of these rows, row by row, without the dummy."""
        table = self.block_table[places]
        used = np.arange(table.shape[1]) < self["num_blocks"][places, None]
        blocks: list[int] = table[used & (table != self._dummy)].tolist()
        return blocks

    def stop_ids_of(self, places: slice) -> npt.NDArray[np.int32]:
        """Return the stop ids of these rows, as wide as the widest; NO_TOKEN behind a row's own."""
        width = int(self["num_stop_ids"][places].max(initial=0))
        return self._stop_ids[places, :width]

    def move(self, destination: Indices, source: Indices) -> None:
        """Copy rows from place to place; all are read before any is written."""
        for array in (self.records, self.block_table, self._stop_ids):
            array[destination] = array[source]

    def reorder(self, start: int, order: Indices) -> None:
        """Put the rows that are at `order` from `start` on; copies only those that change place."""
        places = start + np.arange(len(order))
        changed = np.flatnonzero(places != order)
        if len(changed):
            self.move(places[changed], order[changed])

    def swap(self, first: Indices, second: Indices) -> None:
        """Exchange rows pairwise."""
        self.move(np.concatenate((first, second)), np.concatenate((second, first)))

    def clear(self, start: int, stop: int) -> None:
        """Empty the places from `start` up to `stop`."""
        self.records[start:stop] = np.zeros((), dtype=ROW)
        self["id"][start:stop] = NO_ROW
        self["state_slot"][start:stop] = NO_SLOT
        self.block_table[start:stop] = self._dummy
        self._stop_ids[start:stop] = NO_TOKEN

    def find(self, rows: Iterable[RowId], start: int, stop: int) -> Indices:
        """Return where each row is between `start` and `stop`, or NO_ROW where it is not."""
        wanted = np.fromiter(rows, dtype=np.int64)
        ids = self["id"][start:stop]
        if len(ids) == 0:
            return np.full(len(wanted), NO_ROW)
        order = np.argsort(ids)
        nearest = order[np.searchsorted(ids, wanted, sorter=order).clip(max=len(ids) - 1)]
        return np.where(ids[nearest] == wanted, start + nearest, NO_ROW)

    def _widen_stop_ids(self, width: int) -> None:
        missing = width - self._stop_ids.shape[1]
        if missing > 0:
            padding = ((0, 0), (0, missing))
            self._stop_ids = np.pad(self._stop_ids, padding, constant_values=NO_TOKEN)


_SAMPLING_FIELDS = (
    "seed",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "logprobs",
)
