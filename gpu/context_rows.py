"""The rows of a batch: where they stand, what that says of them, and what can be asked of them.

Rows stand without gaps, and what they do is told by where they stand:

    0            num_paused                                            num_rows        max_rows
    | paused     | decoding ...  | prefilling ...  | half prefilled   |   unused      |
                 |<---------------------- active -------------------->|

A paused row has filled its last block and waits for another; the oldest wait is first. The
prompt of at most one row is prefilled over several steps: that row is the last one, and it sits
out (query length 0) while no chunk of it was asked for. All other active rows sample a token in
every step.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from callboard.gpu.memory import blocks_for
from callboard.gpu.rows import RowTable
from callboard.messages.steps import RowId, RowSampling


class Regions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of the picture begin and end, by place."""

    num_paused: int
    first_prefill: int
    end_of_running: int
    num_rows: int


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of a row, and what is wanted of its log-probabilities."""

    row: RowId
    ids: npt.NDArray[np.int32]
    sampling: RowSampling


class ContextRows:
    """The rows and their regions; see the picture above. `DynamicContext` changes them."""

    def __init__(
        self, *, max_rows: int, max_model_len: int, block_tokens: int, num_blocks: int
    ) -> None:
        self.max_rows = max_rows
        self.max_model_len = max_model_len
        self.block_tokens = block_tokens
        self.dummy = num_blocks - 1
        max_blocks = blocks_for(max_model_len, block_tokens)
        self._rows = RowTable(max_rows=max_rows, max_blocks=max_blocks, dummy=self.dummy)
        self._num_rows = 0
        self._num_paused = 0
        self._half_prefilled: Prompt | None = None  # the last row, while chunks are to come
        self._prefill_ids: dict[RowId, npt.NDArray[np.int32]] = {}  # chunks of the coming step

    @property
    def num_rows(self) -> int:
        """Rows that are here: paused ones, running ones, and the one that is half prefilled."""
        return self._num_rows

    @property
    def num_paused(self) -> int:
        """Rows that wait for a block."""
        return self._num_paused

    @property
    def num_active(self) -> int:
        """Rows that wait for no block."""
        return self._num_rows - self._num_paused

    @property
    def num_prefills(self) -> int:
        """Rows of which a part of the prompt is in the coming step, or all of it."""
        return len(self._prefill_ids)

    @property
    def num_decodes(self) -> int:
        """Rows that feed the token they sampled last to the coming step."""
        return self._end_of_running - self._num_paused - self.num_prefills

    @property
    def is_decode_only(self) -> bool:
        """Whether no part of a prompt is in the coming step."""
        return self.num_prefills == 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any row is here; a request that was never admitted is none."""
        return self._num_rows > 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the coming step would feed now."""
        return int(self._active("query_length").sum())

    @property
    def row_ids(self) -> list[RowId]:
        """The rows by place."""
        ids: list[RowId] = self._rows["id"][: self._num_rows].tolist()
        return ids

    @property
    def paused_ids(self) -> list[RowId]:
        """The rows that wait for a block, the longest wait first."""
        return self.row_ids[: self._num_paused]

    @property
    def half_prefilled_id(self) -> RowId | None:
        """The row whose prompt is not asked for to its end, if there is one."""
        return self._half_prefilled.row if self._half_prefilled else None

    def rows(self) -> npt.NDArray[np.void]:
        """Return what is known of each row, by place, as a copy: see `ROW` for the fields."""
        return self._rows.records[: self._num_rows].copy()

    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Return how many tokens each active row has cached after the coming step."""
        return self._active("kv_length") + self._active("query_length")

    def max_sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Return how many tokens each active row has in the end, if nothing stops it before."""
        lengths = self.sequence_lengths()
        if self._half_prefilled is not None:
            lengths[-1] = len(self._half_prefilled.ids)
        return lengths + self._active("max_tokens") - self._active("position")

    # Regions

    @property
    def _end_of_sampling(self) -> int:
        return self._num_rows - (self._half_prefilled is not None)

    @property
    def _num_sampling(self) -> int:
        return self._end_of_sampling - self._num_paused

    @property
    def _end_of_running(self) -> int:
        sits_out = self._half_prefilled is not None and (
            self._half_prefilled.row not in self._prefill_ids
        )
        return self._num_rows - sits_out

    def _num_blocks_of(self, places: slice) -> int:
        """Return how many blocks these rows hold; one that several of them hold counts once."""
        return len(set(self._rows.blocks_of(np.arange(*places.indices(self._num_rows)))))

    def _regions(self) -> Regions:
        return Regions(
            num_paused=self._num_paused,
            first_prefill=self._end_of_running - len(self._prefill_ids),
            end_of_running=self._end_of_running,
            num_rows=self._num_rows,
        )

    def _active(self, field: str) -> npt.NDArray[np.int32]:
        return self._rows[field][self._num_paused : self._num_rows]
