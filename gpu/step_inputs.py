"""From the rows of a step to what the model is given: token ids, places, slots, block tables.

Letters: T tokens of the step, R rows that run, S rows that sample (the first S), B blocks a row.
"""

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata
from callboard.gpu.dimensions import BatchDimensions, BatchLimits
from callboard.gpu.memory import blocks_for
from callboard.gpu.padding import StepShape, extended
from callboard.gpu.staging import ALIGNMENT, Staging
from callboard.gpu.state_slots import RowSlots, StateMetadata, state_arrays, state_metadata

_PADDING_ID = 0


class StepRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that run in a step, in the order of their places.

    Those of one token come first; only the last may be another one, where it is half prefilled.
    """

    input_ids_T: npt.NDArray[np.int64]  # row by row
    query_lens_R: npt.NDArray[np.int32]  # tokens each row feeds, at least 1
    kv_lens_R: npt.NDArray[np.int32]  # tokens each row has cached after this step
    block_table_RB: npt.NDArray[np.int32]  # as wide as a row may get; unused entries: the dummy
    state_slots: RowSlots | None  # where the model has recurrent states
    num_sampling: int

    def dimensions(self) -> BatchDimensions:
        """Return what is in the step; leading rows of one token are decodes, even prompts."""
        longer = np.flatnonzero(self.query_lens_R != 1)
        num_rows = len(self.query_lens_R)
        num_decodes = int(longer[0]) if len(longer) else num_rows
        return BatchDimensions(len(self.input_ids_T), num_rows - num_decodes, num_decodes)


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is to compute; the tensors hold until the next step begins.

    They have the dimensions of `shape.padded`. Steps in one graph find them at one address.
    """

    input_ids_T: Tensor  # int64
    metadata: AttentionMetadata
    last_token_indices_S: Tensor  # int64; the token from whose logits each sampling row samples
    shape: StepShape
    states: StateMetadata | None = None  # where the model has recurrent states

    @property
    def num_tokens(self) -> int:
        """Tokens fed, without those of padding."""
        return self.shape.real.tokens

    @property
    def is_decode_only(self) -> bool:
        """Whether the step, as it is padded, has no row but decodes."""
        return self.shape.padded.prefills == 0

    def last_tokens(self, values_TX: Tensor) -> Tensor:
        """Return the line of each sampling row, [S, X]: its hidden state or logits, say.

        Raises ValueError where there is not one line for each token, padding included.
        """
        if len(values_TX) != len(self.input_ids_T):
            raise ValueError(
                f"{len(values_TX)} lines for a step of {len(self.input_ids_T)} tokens, and must be"
                " one for each"
            )
        return values_TX[self.last_token_indices_S]


def build_inputs(
    rows: StepRows, shape: StepShape, *, block_tokens: int, dummy: int, staging: Staging
) -> StepInputs:
    """Work out where each token stands and send everything to the device in one copy.

    Args:
        rows: what runs.
        shape: what it is padded to.
        block_tokens: token slots in a block.
        dummy: the block that padding writes to.
        staging: the way to the device.
    """
    padded = shape.padded
    max_kv_len = int(rows.kv_lens_R.max())
    table_RB = rows.block_table_RB
    if shape.graph is None:  # a graph replays one shape, so its table has room for any row
        table_RB = table_RB[:, : blocks_for(max_kv_len, block_tokens)]
    cu_seqlens_q = np.zeros(len(rows.query_lens_R) + 1, dtype=np.int32)
    np.cumsum(rows.query_lens_R, out=cu_seqlens_q[1:])
    position_T, row_T = _positions(rows, cu_seqlens_q)
    block_T, offset_T = np.divmod(position_T, block_tokens)
    slot_T = table_RB[row_T, block_T].astype(np.int64) * block_tokens + offset_T

    ids, positions, slots, cu_lens, kv_lens, table, *states, last_tokens = staging.send(
        [
            extended(rows.input_ids_T, padded.tokens, _PADDING_ID),
            extended(position_T, padded.tokens, 0),
            extended(slot_T, padded.tokens, dummy * block_tokens),
            extended(cu_seqlens_q, padded.requests + 1, cu_seqlens_q[-1]),
            extended(rows.kv_lens_R, padded.requests, 0),
            extended(table_RB, padded.requests, dummy),
            *(state_arrays(rows.state_slots, rows.query_lens_R, shape) if rows.state_slots else []),
            # Behind all that a graph reads: how many rows sample, no graph fixes.
            cu_seqlens_q[1 : rows.num_sampling + 1].astype(np.int64) - 1,
        ]
    )
    return StepInputs(
        input_ids_T=ids,
        last_token_indices_S=last_tokens,
        shape=shape,
        states=state_metadata(states, shape),
        metadata=AttentionMetadata(
            cu_seqlens_q=cu_lens,
            seqlens_k=kv_lens,
            block_table=table,
            slot_mapping=slots,
            positions=positions,
            max_seqlen_q=_max_query_len(rows, shape),
            max_seqlen_k=table_RB.shape[1] * block_tokens if shape.graph else max_kv_len,
            num_decodes=shape.num_decodes,
            query_lens_host=rows.query_lens_R,
            kv_lens_host=rows.kv_lens_R,
        ),
    )


def input_bytes(limits: BatchLimits, max_blocks: int) -> int:
    """Return what the inputs of the largest step take at most, with block tables so wide."""
    per_token = 3 * 8 + 4  # id, position, slot; which prefill it is of
    per_row = 4 * (2 + max_blocks + 3) + 8  # lengths, table, state slots; last token
    num_arrays = 11
    return (
        limits.max_tokens * per_token + (limits.max_requests + 1) * per_row + num_arrays * ALIGNMENT
    )


def _positions(
    rows: StepRows, cu_seqlens_q: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each token's place in its sequence and its row, both [T]."""
    row_T = np.repeat(np.arange(len(rows.query_lens_R)), rows.query_lens_R)
    shift_R = (rows.kv_lens_R - cu_seqlens_q[1:]).astype(np.int64)
    return np.arange(len(row_T)) + shift_R[row_T], row_T


def _max_query_len(rows: StepRows, shape: StepShape) -> int:
    """Return the longest query there is, or, in a graph, the longest there can be in it."""
    if shape.graph is None:
        return int(rows.query_lens_R.max())
    # 2 at least: where one token is the longest, kernels take every row for a decode.
    return max(2, shape.graph.tokens) if shape.graph.prefills else 1
