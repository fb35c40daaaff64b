"""Attention by the flash-attn 2 package's paged kernels, in half precision on NVIDIA GPUs of
compute capability 8 up.

Steps in which every row has one query go to `flash_attn_with_kvcache`, which spreads long contexts
over the GPU; all others go to `flash_attn_varlen_func` in one ragged call. Both read the cache
through the block table, with no copy.
"""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata


def available() -> bool:
    """Say whether flash-attn is installed and the current GPU can run it."""
    return (
        importlib.util.find_spec("flash_attn") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= (8, 0)
    )


class FlashAttention:
    """The backend named "flash"; see `AttentionBackend`. Queries and caches share one dtype,
    float16 or bfloat16.

    Args:
        kernels: a module with the two functions named above; by default `flash_attn`, imported here
        and not before.
    """

    name = "flash"
    block_multiple = 256

    def __init__(self, kernels: Any = None) -> None:
        self._kernels = kernels or importlib.import_module("flash_attn")
        self._cu_seqlens_k_for: AttentionMetadata | None = None
        self._cu_seqlens_k: Tensor | None = None

    def attend(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        # One query a row includes prompts of one token: the varlen kernel fails where that is the
        # longest.
        if metadata.max_seqlen_q == 1:
            return self._attend_decodes(q_TNH, k_cache, v_cache, metadata, scale)
        return self._attend_ragged(q_TNH, k_cache, v_cache, metadata, scale)

    def _attend_decodes(
        self,
        q_RNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        out_R1NH: Tensor = self._kernels.flash_attn_with_kvcache(
            q_RNH.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=metadata.seqlens_k,
            block_table=metadata.block_table,
            softmax_scale=scale,
            causal=True,
        )
        return out_R1NH.squeeze(1)

    def _attend_ragged(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        out_TNH: Tensor = self._kernels.flash_attn_varlen_func(
            q_TNH,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=self._cumulative_kv_lens(metadata),
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=metadata.block_table,
        )
        return out_TNH

    def _cumulative_kv_lens(self, metadata: AttentionMetadata) -> Tensor:
        """Return int32 [R + 1], worked out once a step and not once a layer."""
        if self._cu_seqlens_k is None or metadata is not self._cu_seqlens_k_for:
            self._cu_seqlens_k = metadata.cu_seqlens_k()
            self._cu_seqlens_k_for = metadata
        return self._cu_seqlens_k
