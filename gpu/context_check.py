"""Whether the rows of a context are as its picture says; slow, for tests.

Letters: R rows, B entries of a block table.
"""

import numpy as np
import numpy.typing as npt

from callboard.gpu.context_rows import Regions
from callboard.gpu.rows import NO_ROW, RowTable


def check_rows(table: RowTable, regions: Regions, *, block_tokens: int, dummy: int) -> None:
    """Raise AssertionError unless lengths, blocks and states agree, and rows stand where they may.

    Rows for captures and warm-ups have the dummy block and nothing else.
    """
    rows = table.records[: regions.num_rows]
    lengths = rows["kv_length"] + rows["query_length"]
    assert 0 <= regions.num_paused <= regions.num_rows <= len(table.records)
    assert len(set(rows["id"].tolist())) == regions.num_rows, "a row is here twice"
    assert (rows["num_blocks"] == -(-lengths // block_tokens)).all(), "wrong block count"
    assert (rows["last_offset"] == (lengths - 1) % block_tokens).all(), "wrong offset"
    assert (table["id"][regions.num_rows :] == NO_ROW).all(), "a place is not empty"
    _check_blocks(table.block_table[: regions.num_rows], rows, block_tokens, dummy)
    _check_regions(rows["query_length"], regions)


def check_state_slots(rows: npt.NDArray[np.void], num_taken: int, num_slots: int) -> None:
    """Raise AssertionError unless each row has one slot of a recurrent state, and nobody else."""
    slots = rows["state_slot"]
    assert ((slots >= 0) & (slots < num_slots)).all(), "a row has no slot of its state"
    assert len(set(slots.tolist())) == len(rows) == num_taken, "a slot is two rows', or nobody's"


def _check_blocks(
    table_RB: npt.NDArray[np.int32], rows: npt.NDArray[np.void], block_tokens: int, dummy: int
) -> None:
    column_B = np.arange(table_RB.shape[1])
    is_used_RB = column_B < rows["num_blocks"][:, None]
    is_dummy_RB = table_RB == dummy
    assert is_dummy_RB[~is_used_RB].all(), "an unused entry names a block"
    is_real_RB = is_used_RB & ~is_dummy_RB
    is_either_R = (is_real_RB == is_used_RB).all(axis=1) | ~is_real_RB.any(axis=1)
    assert is_either_R.all(), "a row has the dummy block among others"
    # A block that is full before this step is only read, and may be many rows': a cached prefix.
    is_full_RB = column_B < (rows["kv_length"] // block_tokens)[:, None]
    blocks, counts = np.unique(table_RB[is_real_RB], return_counts=True)
    is_shared_RB = np.isin(table_RB, blocks[counts > 1]) & is_real_RB
    assert is_full_RB[is_shared_RB].all(), "a block that is written to is in two rows"
    places = set(zip(*_entries(table_RB, is_shared_RB), strict=True))
    assert len({block for block, _ in places}) == len(places), "a shared block has two places"


def _entries(
    table_RB: npt.NDArray[np.int32], is_wanted_RB: npt.NDArray[np.bool_]
) -> tuple[list[int], list[int]]:
    """Return the blocks of some entries, and which of their row's blocks they are."""
    _, columns = np.nonzero(is_wanted_RB)
    return table_RB[is_wanted_RB].tolist(), columns.tolist()


def _check_regions(query_length: npt.NDArray[np.int32], regions: Regions) -> None:
    running = query_length[regions.num_paused : regions.end_of_running]
    assert (query_length[: regions.num_paused] == 0).all(), "a paused row runs"
    assert (running > 0).all(), "a row sits out"
    is_decoding = query_length[regions.num_paused : regions.first_prefill] == 1
    assert is_decoding.all(), "a prefill stands before a decode"
