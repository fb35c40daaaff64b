"""Attention by torch's scaled_dot_product_attention: works everywhere, the others' reference.

Keys and values are gathered out of the paged cache, decodes several rows at a time, prefills row by
row, and given to SDPA. Letters: T tokens of this step, R rows, L cached tokens, N query heads, K
key/value heads, H head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata

# How much is gathered at a time. On the CPU the gathered copy must stay in cache until SDPA has
# read it: 64 rows of 1024 tokens took 8 ms in pieces of 3 to 6 MiB and 88 ms in one piece (2 cores,
# 32 MiB of L3). On a GPU it only bounds the memory taken.
_GATHER_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}

# Rows are gathered together only while the shortest is at least half the longest, so that padding
# is never more than what is useful; below this many tokens a second call costs more than the
# padding.
_SHORT_TOKENS = 128


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """Rows, or one row, that are gathered and attended together."""

    tokens: Tensor | slice
    """Their tokens of this step, as an index into the first dimension of the queries."""
    num_rows: int
    slots: Tensor
    """int64 [rows * L]: which cache slots to gather; a shorter row repeats its own last one."""
    mask: Tensor | None
    """Added to the scores, [rows, 1, 1, L] or [1, 1, queries, L]; None where none is needed."""
    is_causal: bool


class SdpaAttention:
    """The backend named "sdpa"; see `AttentionBackend`."""

    name = "sdpa"
    block_multiple = 1

    def __init__(self) -> None:
        self._planned_for: AttentionMetadata | None = None
        self._plan: list[_Piece] = []

    def attend(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        if metadata is not self._planned_for:  # once a step, not once a layer
            self._plan = _plan(metadata, q_TNH, k_cache)
            self._planned_for = metadata
        out_TNH = torch.zeros_like(q_TNH)
        with _without_cudnn():
            for piece in self._plan:
                out_TNH[piece.tokens] = _attend_piece(piece, q_TNH, k_cache, v_cache, scale)
        return out_TNH


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Keep SDPA from cuDNN, which torch prefers on GPUs of compute capability 9 and 10.

    cuDNN makes a plan for every new length of keys, which takes tens of milliseconds and is kept
    for good; and in decoding every step has a new length.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]  # untyped in torch
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _attend_piece(
    piece: _Piece, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float
) -> Tensor:
    q_RNQH = _by_row(q_TNH[piece.tokens], piece.num_rows)
    out_RNQH = F.scaled_dot_product_attention(
        q_RNQH,
        _gather(k_cache, piece, q_TNH.dtype),
        _gather(v_cache, piece, q_TNH.dtype),
        attn_mask=piece.mask,
        is_causal=piece.is_causal,
        scale=scale,
        enable_gqa=True,
    )
    return out_RNQH.transpose(1, 2).flatten(0, 1)


def _gather(cache: Tensor, piece: _Piece, dtype: torch.dtype) -> Tensor:
    """Copy the piece's slots out of the cache as [rows, K, L, H]."""
    gathered = cache.flatten(0, 1).index_select(0, piece.slots).to(dtype)
    return _by_row(gathered, piece.num_rows)


def _by_row(tokens: Tensor, num_rows: int) -> Tensor:
    """View [rows * n, heads, H] as [rows, heads, n, H]."""
    return tokens.view(num_rows, -1, *tokens.shape[1:]).transpose(1, 2)


def _plan(metadata: AttentionMetadata, q_TNH: Tensor, k_cache: Tensor) -> list[_Piece]:
    block_tokens, num_kv_heads, head_dim = k_cache.shape[1:]
    token_bytes = 2 * num_kv_heads * head_dim * q_TNH.element_size()
    max_tokens = _GATHER_BYTES[q_TNH.device.type] // token_bytes
    decodes = [
        _decode_piece(metadata, rows, block_tokens, q_TNH.dtype)
        for rows in _group_rows(metadata.kv_lens_host[: metadata.num_decodes], max_tokens)
    ]
    prefills = [
        _prefill_piece(metadata, row, block_tokens, q_TNH.dtype)
        for row in range(metadata.num_decodes, metadata.num_rows)
    ]
    return decodes + prefills


def _group_rows(kv_lens: npt.NDArray[np.int32], max_tokens: int) -> list[npt.NDArray[np.int64]]:
    """Split rows into groups of similar length, each of at most max_tokens once gathered."""
    order = np.argsort(-kv_lens, kind="stable")
    groups, start = [], 0
    while start < len(order):
        longest = int(kv_lens[order[start]])
        shortest = longest // 2 if longest > _SHORT_TOKENS else 1
        group = order[start : start + max(1, max_tokens // longest)]
        group = group[kv_lens[group] >= shortest]
        groups.append(np.sort(group))
        start += len(group)
    return groups


def _decode_piece(
    metadata: AttentionMetadata,
    rows: npt.NDArray[np.int64],
    block_tokens: int,
    dtype: torch.dtype,
) -> _Piece:
    kv_lens = metadata.kv_lens_host[rows]
    contiguous = int(rows[-1] - rows[0]) + 1 == len(rows)
    index: Tensor | slice = (
        slice(int(rows[0]), int(rows[-1]) + 1)
        if contiguous
        else torch.from_numpy(rows).to(metadata.block_table.device)
    )
    longest = int(kv_lens.max())
    lens_R1 = metadata.seqlens_k[index].unsqueeze(1)
    position_RL = torch.arange(longest, device=lens_R1.device).expand(len(rows), -1)
    mask = None
    if (kv_lens != longest).any():
        # A row's padding repeats its own last slot: what another request left in a block, even a
        # NaN, is never read.
        mask_RL = torch.zeros(position_RL.shape, dtype=dtype, device=lens_R1.device)
        mask = mask_RL.masked_fill_(position_RL >= lens_R1, -torch.inf)[:, None, None, :]
        position_RL = torch.minimum(position_RL, lens_R1 - 1)
    slots_RL = _slots(metadata.block_table[index], position_RL, block_tokens)
    return _Piece(index, len(rows), slots_RL.flatten(), mask, is_causal=False)


def _prefill_piece(
    metadata: AttentionMetadata, row: int, block_tokens: int, dtype: torch.dtype
) -> _Piece:
    start = int(metadata.query_lens_host[:row].sum())
    num_queries = int(metadata.query_lens_host[row])
    kv_len = int(metadata.kv_lens_host[row])
    num_cached = kv_len - num_queries
    blocks_R = metadata.block_table[row : row + 1]
    position_RL = torch.arange(kv_len, device=blocks_R.device).unsqueeze(0)
    mask = None
    if num_cached:  # query i sees the cached tokens and the first i + 1 of this step's
        mask_QL = torch.full((num_queries, kv_len), -torch.inf, dtype=dtype, device=blocks_R.device)
        mask = mask_QL.triu_(num_cached + 1)[None, None]
    return _Piece(
        tokens=slice(start, start + num_queries),
        num_rows=1,
        slots=_slots(blocks_R, position_RL, block_tokens).flatten(),
        mask=mask,
        is_causal=num_cached == 0,
    )


def _slots(blocks_RB: Tensor, position_RL: Tensor, block_tokens: int) -> Tensor:
    block_RL = blocks_RB.long().gather(1, position_RL // block_tokens)
    return block_RL * block_tokens + position_RL % block_tokens
