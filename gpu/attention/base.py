"""What every attention backend is given and must do: one ragged call over a paged KV cache.

The shapes are those of flash-attention's varlen kernels, so that a kernel can take them as they
are. Prefills, chunks and decodes of a step stand one after another in one token dimension; nothing
is padded to a rectangle.

Letters: T tokens of this step, R rows (requests), N query heads, K key/value heads, H head size.
Knows nothing of requests, sampling or models: only of lengths, blocks and slots.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class AttentionMetadata:
    """Where each token of a step stands, and which blocks hold the keys and values it looks at.

    The first `num_decodes` rows have query length 1. Those behind them are longer, but for the
    last, which may be a chunk of one token, and for decodes that a graph takes for prefills.
    `kv_lens_host` and `query_lens_host` repeat on the CPU what a backend must know to launch work
    without waiting for the device. Tokens beyond `cu_seqlens_q[-1]` are padding: their keys and
    values go to the slots named for them, and what attention returns for them means nothing. Rows
    beyond `num_rows` are padding too: the tensors have them, with query length and KV length 0 and
    blocks that are nobody's, the arrays on the CPU do not. Make a new object for each step:
    backends remember by identity what they worked out from the last one.
    """

    cu_seqlens_q: Tensor
    """int32 [R + 1]: row r owns tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1]."""
    seqlens_k: Tensor
    """int32 [R]: cached tokens of each row, those of this step included; 0 only for padding."""
    block_table: Tensor
    """int32 [R, max_blocks]: the row's blocks in order; after its last, any valid block."""
    slot_mapping: Tensor
    """int64 [T]: block * block_tokens + offset, where each token's key and value are written."""
    positions: Tensor
    """int64 [T]: the token's place in its sequence, from 0."""
    max_seqlen_q: int
    max_seqlen_k: int
    num_decodes: int
    query_lens_host: npt.NDArray[np.int32]
    """[R], on the CPU."""
    kv_lens_host: npt.NDArray[np.int32]
    """[R], on the CPU; equals seqlens_k but for its padding."""

    @property
    def num_rows(self) -> int:
        """Rows without those of padding."""
        return len(self.query_lens_host)

    def cu_seqlens_k(self) -> Tensor:
        """Return int32 [R + 1]: how many tokens the rows before each have cached; padding none."""
        return F.pad(self.seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))


class AttentionBackend(Protocol):
    """One way to compute causal attention over the paged cache; see `registry.choose_backend`."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""

    @property
    def block_multiple(self) -> int:
        """The number of tokens in a block must be a multiple of this."""

    def attend(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Attend from this step's queries to each row's cached keys, and return [T, N, H].

        The caches are `[blocks, block_tokens, kv_heads, head_dim]` and already hold this step's
        keys and values (`write_kv`). The last query of a row sees all of the row's keys, the one
        before it all but the last, and so on. N is a multiple of K. A row's result depends on its
        own blocks only, whatever other blocks hold.
        """


def write_kv(
    k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store this step's keys and values in the slots named for them, in the cache's own dtype."""
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k_TKH.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v_TKH.to(v_cache.dtype))


def build_metadata(
    query_lens: npt.ArrayLike,
    kv_lens: npt.ArrayLike,
    block_table: npt.ArrayLike,
    *,
    block_tokens: int,
    device: torch.device | str = "cpu",
) -> AttentionMetadata:
    """Work out a step's metadata from the lengths and blocks of its rows.

    Args:
        query_lens: tokens each row feeds this step, [R]; rows of one token first, though the last
            may be another one.
        kv_lens: tokens each row has cached after this step, [R].
        block_table: the row's blocks, [R, max_blocks]; unused entries may be any valid block.
        block_tokens: token slots in a block.
        device: where the tensors go.
    """
    queries = np.asarray(query_lens, dtype=np.int32)
    lengths = np.asarray(kv_lens, dtype=np.int32)
    blocks = np.asarray(block_table, dtype=np.int32)
    _check_rows(queries, lengths, blocks, block_tokens)

    cu_seqlens = np.zeros(len(queries) + 1, dtype=np.int32)
    np.cumsum(queries, out=cu_seqlens[1:])
    row_T = np.repeat(np.arange(len(queries)), queries)
    first_position_R = (lengths - queries - cu_seqlens[:-1]).astype(np.int64)
    position_T = np.arange(cu_seqlens[-1]) + first_position_R[row_T]
    block_T = blocks[row_T, position_T // block_tokens].astype(np.int64)
    return AttentionMetadata(
        cu_seqlens_q=torch.from_numpy(cu_seqlens).to(device),
        seqlens_k=torch.from_numpy(lengths).to(device),
        block_table=torch.from_numpy(blocks).to(device),
        slot_mapping=torch.from_numpy(block_T * block_tokens + position_T % block_tokens).to(
            device
        ),
        positions=torch.from_numpy(position_T).to(device),
        max_seqlen_q=int(queries.max()),
        max_seqlen_k=int(lengths.max()),
        num_decodes=_leading_ones(queries),
        query_lens_host=queries,
        kv_lens_host=lengths,
    )


def _check_rows(
    queries: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32],
    block_tokens: int,
) -> None:
    if not len(queries) == len(lengths) == len(blocks) > 0:
        raise ValueError(
            f"need the same number of query lengths, KV lengths and block rows, at least one each;"
            f" got {len(queries)}, {len(lengths)} and {len(blocks)}"
        )
    if (queries < 1).any() or (queries > lengths).any():
        raise ValueError(
            f"each row feeds at least 1 token and has no fewer cached;"
            f" got query lengths {queries.tolist()} and KV lengths {lengths.tolist()}"
        )
    if (queries[_leading_ones(queries) : -1] == 1).any():
        raise ValueError(f"rows of one token come before longer ones; got {queries.tolist()}")
    if lengths.max() > blocks.shape[1] * block_tokens:
        raise ValueError(
            f"{lengths.max()} cached tokens do not fit {blocks.shape[1]} blocks of {block_tokens}"
        )


def _leading_ones(queries: npt.NDArray[np.int32]) -> int:
    longer = np.flatnonzero(queries != 1)
    return int(longer[0]) if len(longer) else len(queries)
