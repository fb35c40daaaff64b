"""The flash backend without its package: a stand-in refuses what flash-attn 2 would refuse."""

import importlib.util
import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from callboard.gpu.attention import flash
from callboard.gpu.attention.base import AttentionMetadata, build_metadata
from callboard.gpu.attention.flash import FlashAttention
from callboard.gpu.attention.sdpa import SdpaAttention

HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5
BLOCK_TOKENS = 256


class FlashStandIn(ModuleType):
    """The two functions of flash_attn, written out in torch, with the checks of the real ones."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[str] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        self.calls.append("varlen")
        assert block_table is not None
        assert causal
        num_rows = len(cu_seqlens_q) - 1
        check_paged(q, k, v, block_table, num_rows)
        for cumulative in (cu_seqlens_q, cu_seqlens_k):
            assert cumulative.dtype == torch.int32
            assert cumulative.shape == (num_rows + 1,)
            assert cumulative.is_contiguous()
            assert cumulative[0] == 0
        query_lens, kv_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(query_lens) == max_seqlen_q > 1, "the kernel fails for rows of one query only"
        assert max(kv_lens) == max_seqlen_k
        assert q.dim() == 3
        real, _ = q.split_with_sizes([sum(query_lens), len(q) - sum(query_lens)])
        rows = zip(real.split_with_sizes(query_lens), kv_lens, block_table, strict=True)
        out = torch.full_like(q, torch.nan)
        out[: len(real)] = torch.cat(
            [attend_row(row, k, v, kv, blocks, softmax_scale) for row, kv, blocks in rows]
        )
        return out

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        self.calls.append("kvcache")
        assert cache_seqlens is not None
        assert block_table is not None
        assert causal
        num_rows, num_queries = q.shape[:2]
        assert (q.dim(), num_queries) == (4, 1)
        check_paged(q, k_cache, v_cache, block_table, num_rows)
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (num_rows,)
        assert cache_seqlens.is_contiguous()
        rows = zip(q, cache_seqlens.tolist(), block_table, strict=True)
        return torch.stack(
            [
                attend_row(row, k_cache, v_cache, kv, blocks, softmax_scale)
                for row, kv, blocks in rows
            ]
        )


def check_paged(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, num_rows: int) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0, "page size must be a multiple of 256"
    assert q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] == k.shape[-1] <= 256
    assert block_table.dtype == torch.int32
    assert block_table.shape[0] == num_rows
    assert block_table.stride(-1) == 1


def attend_row(
    q_QNH: Tensor, k: Tensor, v: Tensor, kv_len: int, blocks: Tensor, scale: float | None
) -> Tensor:
    group = q_QNH.shape[1] // k.shape[2]
    key, value = (
        cache[blocks.long()].flatten(0, 1)[:kv_len].float().repeat_interleave(group, dim=1)
        for cache in (k, v)
    )
    scores = torch.einsum("qnh,knh->nqk", q_QNH.float(), key)
    scores = scores * (q_QNH.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.ones(scores.shape[1:]).triu(kv_len - len(q_QNH) + 1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knh->qnh", weights, value).to(q_QNH.dtype)


def make_step(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    generator = torch.Generator().manual_seed(0)
    blocks_each = max(math.ceil(kv_len / BLOCK_TOKENS) for _, kv_len in rows)
    num_blocks = len(rows) * blocks_each
    blocks = torch.randperm(num_blocks, generator=generator).view(len(rows), blocks_each)
    metadata = build_metadata(
        [query_len for query_len, _ in rows],
        [kv_len for _, kv_len in rows],
        blocks.numpy(),
        block_tokens=BLOCK_TOKENS,
    )
    k_cache, v_cache = torch.randn(
        2, num_blocks, BLOCK_TOKENS, 2, HEAD_DIM, generator=generator
    ).to(dtype)
    q = torch.randn(len(metadata.positions), 6, HEAD_DIM, generator=generator).to(dtype)
    return q, k_cache, v_cache, metadata


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "kernel"),
    [
        pytest.param([(1, 300), (1, 7)], "kvcache", id="decodes"),
        pytest.param([(1, 1)], "kvcache", id="a prompt of one token"),
        pytest.param([(40, 40), (5, 260)], "varlen", id="prefill and chunk"),
        pytest.param([(1, 511), (1, 3), (9, 9)], "varlen", id="all in one call"),
        pytest.param([(9, 9), (1, 257)], "varlen", id="a chunk of one token behind a prompt"),
        pytest.param([(1, 513)], "kvcache", id="the last token of a prompt alone"),
    ],
)
def test_it_calls_the_right_kernel_as_documented_and_agrees_with_sdpa(
    rows: list[tuple[int, int]], kernel: str, dtype: torch.dtype
) -> None:
    kernels = FlashStandIn()
    q, k_cache, v_cache, metadata = make_step(rows, dtype)

    out = FlashAttention(kernels).attend(q, k_cache, v_cache, metadata, SCALE)

    expected = SdpaAttention().attend(q, k_cache, v_cache, metadata, SCALE)
    assert kernels.calls == [kernel]
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


def test_padding_behind_the_last_row_is_left_to_the_kernel() -> None:
    q, k_cache, v_cache, metadata = make_step([(1, 9), (4, 4)], torch.float16)
    padded = torch.cat((q, q))

    out = FlashAttention(FlashStandIn()).attend(padded, k_cache, v_cache, metadata, SCALE)

    assert out.shape == padded.shape
    assert out[: len(q)].isfinite().all()


def test_cumulative_kv_lengths_are_worked_out_once_a_step() -> None:
    backend = FlashAttention(FlashStandIn())
    q, k_cache, v_cache, metadata = make_step([(4, 9)], torch.float16)
    other_q, *_, other = make_step([(4, 4)], torch.float16)

    backend.attend(q, k_cache, v_cache, metadata, SCALE)
    first = backend._cu_seqlens_k
    backend.attend(q, k_cache, v_cache, metadata, SCALE)
    assert backend._cu_seqlens_k is first

    backend.attend(other_q, k_cache, v_cache, other, SCALE)
    assert backend._cu_seqlens_k is not None
    assert backend._cu_seqlens_k.tolist() == [0, 4]


def test_it_asks_for_blocks_of_a_multiple_of_256_tokens() -> None:
    assert FlashAttention(FlashStandIn()).block_multiple == 256


def test_the_package_is_imported_when_the_backend_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FlashStandIn()
    monkeypatch.setitem(sys.modules, "flash_attn", kernels)
    q, k_cache, v_cache, metadata = make_step([(1, 9)], torch.float16)

    FlashAttention().attend(q, k_cache, v_cache, metadata, SCALE)

    assert kernels.calls == ["kvcache"]


def test_it_is_not_available_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)

    assert not flash.available()


@pytest.mark.gpu
@pytest.mark.skipif(not flash.available(), reason="needs flash-attn and an NVIDIA GPU")
@pytest.mark.parametrize("rows", [[(1, 300), (1, 7)], [(1, 511), (40, 40), (5, 260)]])
def test_the_real_kernels_agree_with_sdpa(rows: list[tuple[int, int]]) -> None:
    q, k_cache, v_cache, metadata = make_step(rows, torch.bfloat16)
    on_gpu = build_metadata(
        metadata.query_lens_host,
        metadata.kv_lens_host,
        metadata.block_table.numpy(),
        block_tokens=BLOCK_TOKENS,
        device="cuda",
    )

    out = FlashAttention().attend(q.cuda(), k_cache.cuda(), v_cache.cuda(), on_gpu, SCALE)

    expected = SdpaAttention().attend(q, k_cache, v_cache, metadata, SCALE)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=2e-2)
