"""From the rows of a step to what the model is given: token ids, places, slots, block tables.

Letters: T tokens of the step, R rows that run, S rows that sample (the first S), B blocks a row.
"""

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata
from callboard.gpu.memory import blocks_for
from callboard.gpu.staging import Staging


class StepInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is to compute; the tensors hold until the next step begins."""

    input_ids_T: Tensor  # int64
    metadata: AttentionMetadata
    last_token_indices_S: Tensor  # int64; the token from whose logits each sampling row samples

    @property
    def num_tokens(self) -> int:
        """Tokens fed."""
        return len(self.input_ids_T)


def build_inputs(
    *,
    input_ids_T: npt.NDArray[np.int64],
    query_lens_R: npt.NDArray[np.int32],
    kv_lens_R: npt.NDArray[np.int32],
    block_table_RB: npt.NDArray[np.int32],
    num_sampling: int,
    block_tokens: int,
    staging: Staging,
) -> StepInputs:
    """Work out where each token stands and send everything to the device in one copy.

    Args:
        input_ids_T: the tokens, row by row.
        query_lens_R: tokens each row feeds, at least 1.
        kv_lens_R: tokens each row has cached after this step.
        block_table_RB: the rows' blocks; unused entries name blocks that exist.
        num_sampling: S.
        block_tokens: token slots in a block.
        staging: the way to the device.
    """
    max_kv_len = int(kv_lens_R.max())
    table_RB = block_table_RB[:, : blocks_for(max_kv_len, block_tokens)]
    cu_seqlens_q = np.zeros(len(query_lens_R) + 1, dtype=np.int32)
    np.cumsum(query_lens_R, out=cu_seqlens_q[1:])
    position_T, row_T = _positions(query_lens_R, kv_lens_R, cu_seqlens_q)
    block_T, offset_T = np.divmod(position_T, block_tokens)
    slot_T = table_RB[row_T, block_T].astype(np.int64) * block_tokens + offset_T
    last_token_S = cu_seqlens_q[1 : num_sampling + 1].astype(np.int64) - 1

    arrays = (input_ids_T, position_T, slot_T, last_token_S, cu_seqlens_q, kv_lens_R, table_RB)
    ids, positions, slots, last_tokens, cu_lens, kv_lens, table = staging.send(arrays)
    return StepInputs(
        input_ids_T=ids,
        last_token_indices_S=last_tokens,
        metadata=AttentionMetadata(
            cu_seqlens_q=cu_lens,
            seqlens_k=kv_lens,
            block_table=table,
            slot_mapping=slots,
            positions=positions,
            max_seqlen_q=int(query_lens_R.max()),
            max_seqlen_k=max_kv_len,
            num_decodes=_leading_ones(query_lens_R),
            query_lens_host=query_lens_R,
            kv_lens_host=kv_lens_R,
        ),
    )


def _positions(
    query_lens_R: npt.NDArray[np.int32],
    kv_lens_R: npt.NDArray[np.int32],
    cu_seqlens_q: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each token's place in its sequence and its row, both [T]."""
    row_T = np.repeat(np.arange(len(query_lens_R)), query_lens_R)
    shift_R = (kv_lens_R - cu_seqlens_q[1:]).astype(np.int64)
    return np.arange(len(row_T)) + shift_R[row_T], row_T


def _leading_ones(query_lens_R: npt.NDArray[np.int32]) -> int:
    longer = np.flatnonzero(query_lens_R != 1)
    return int(longer[0]) if len(longer) else len(query_lens_R)
