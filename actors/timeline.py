"""When each decoding row fills its last KV block. Pure.

A decoding row puts one token into the cache in every run of the device, so the run that fills its
block is known as soon as it begins to decode: nothing has to be counted for each row in each step.
Runs are numbered as they are planned, whether or not the one before is done.
"""

from callboard.gpu.memory import blocks_for
from callboard.messages.steps import RowId


class Timeline:
    """Rows by the run that fills their last block, and by the run they need another one for.

    Rows that are gone by then stay until their run is asked for; a row id is never used twice.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._filled: dict[int, list[tuple[RowId, int]]] = {}
        self._wanting: dict[int, list[RowId]] = {}

    def decodes(self, row: RowId, *, after: int, length: int, ends_with: int) -> None:
        """Note that a row holds `length` tokens after run `after`, and adds one in each from then.

        `ends_with` is the last run it takes part in.
        """
        fills_with = after + (-length) % self._block_tokens
        if fills_with > ends_with:
            return
        blocks = blocks_for(length, self._block_tokens)
        self._filled.setdefault(fills_with, []).append((row, blocks))
        if fills_with < ends_with:
            self._wanting.setdefault(fills_with + 1, []).append(row)

    def wanting(self, run: int) -> list[RowId]:
        """Return, once, the rows that need a block more in this run."""
        return self._wanting.pop(run, [])

    def filled(self, run: int) -> list[tuple[RowId, int]]:
        """Return, once, the rows that fill a block with this run, and how many they have filled."""
        return self._filled.pop(run, [])
