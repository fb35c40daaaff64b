"""The torch backend against attention written out row by row, head by head."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from callboard.gpu.attention import sdpa
from callboard.gpu.attention.base import build_metadata
from callboard.gpu.attention.sdpa import SdpaAttention

HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5


class Step:
    """Rows of (query length, KV length) over caches whose every other slot holds NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        block_tokens: int = 8,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks_each = max(math.ceil(kv / block_tokens) for _, kv in rows)
        num_blocks = len(rows) * blocks_each
        blocks = torch.randperm(num_blocks, generator=generator).view(len(rows), blocks_each)
        shape = (num_blocks, block_tokens, num_kv_heads, HEAD_DIM)
        self.k_cache, self.v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for (_, kv_len), row_blocks in zip(rows, blocks, strict=True):
            key, value = torch.randn(2, kv_len, num_kv_heads, HEAD_DIM, generator=generator)
            position = torch.arange(kv_len)
            slot = row_blocks[position // block_tokens] * block_tokens + position % block_tokens
            self.k_cache.flatten(0, 1)[slot] = key
            self.v_cache.flatten(0, 1)[slot] = value
            self.keys.append(key)
            self.values.append(value)
        self.query_lens = [query_len for query_len, _ in rows]
        self.q = torch.randn(sum(self.query_lens), num_heads, HEAD_DIM, generator=generator)
        self.metadata = build_metadata(
            self.query_lens, [kv for _, kv in rows], blocks.numpy(), block_tokens=block_tokens
        )

    def attend(self, backend: SdpaAttention) -> Tensor:
        return backend.attend(self.q, self.k_cache, self.v_cache, self.metadata, SCALE)

    def expected(self) -> Tensor:
        rows = zip(self.q.split_with_sizes(self.query_lens), self.keys, self.values, strict=True)
        return torch.cat([attend_one_row(q, key, value) for q, key, value in rows])


def attend_one_row(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> Tensor:
    group = q_QNH.shape[1] // k_LKH.shape[1]
    out = torch.empty_like(q_QNH)
    for query in range(len(q_QNH)):
        visible = len(k_LKH) - len(q_QNH) + query + 1
        for head in range(q_QNH.shape[1]):
            scores = k_LKH[:visible, head // group] @ q_QNH[query, head] * SCALE
            out[query, head] = scores.softmax(0) @ v_LKH[:visible, head // group]
    return out


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(1, 1)], id="a first token"),
        pytest.param([(1, 29)], id="a decode"),
        pytest.param([(1, 16)], id="a decode that fills its last block"),
        pytest.param([(1, 5), (1, 40), (1, 17)], id="decodes of several lengths"),
        pytest.param([(13, 13)], id="a prefill"),
        pytest.param([(5, 21)], id="a chunk behind cached tokens"),
        pytest.param([(2, 41), (9, 9), (3, 8)], id="chunks and a prefill"),
        pytest.param([(1, 30), (1, 2), (7, 7), (4, 37)], id="all in one call"),
        pytest.param([(1, 300), (1, 20), (1, 290), (1, 9)], id="long and short decodes apart"),
    ],
)
def test_it_computes_what_attention_written_out_computes(rows: list[tuple[int, int]]) -> None:
    step = Step(rows)

    torch.testing.assert_close(step.attend(SdpaAttention()), step.expected(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (9, 3)])
def test_query_heads_share_key_heads_in_order(num_heads: int, num_kv_heads: int) -> None:
    step = Step([(1, 9), (6, 11)], num_heads=num_heads, num_kv_heads=num_kv_heads)

    torch.testing.assert_close(step.attend(SdpaAttention()), step.expected(), rtol=0, atol=1e-5)


def test_decodes_too_many_to_gather_at_once_are_done_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bytes_of_50_tokens = 50 * 2 * 2 * HEAD_DIM * 4
    monkeypatch.setitem(sdpa._GATHER_BYTES, "cpu", bytes_of_50_tokens)
    step = Step([(1, kv_len) for kv_len in (20, 130, 7, 19, 64, 23, 22)])

    torch.testing.assert_close(step.attend(SdpaAttention()), step.expected(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_lens", "max_tokens", "groups"),
    [
        ([9, 9, 9], 100, [[0, 1, 2]]),
        ([1, 100, 2, 128], 1000, [[0, 1, 2, 3]]),  # too short for a second call to pay
        ([300, 20, 290, 9], 1000, [[0, 2], [1, 3]]),
        ([300, 150, 149], 1000, [[0, 1], [2]]),
        ([10, 40, 20, 40, 30], 80, [[1, 3], [2, 4], [0]]),
        ([500], 80, [[0]]),
        ([], 80, []),
    ],
)
def test_decodes_are_grouped_by_length_and_size(
    kv_lens: list[int], max_tokens: int, groups: list[list[int]]
) -> None:
    grouped = sdpa._group_rows(np.array(kv_lens, dtype=np.int32), max_tokens)

    assert [group.tolist() for group in grouped] == groups


def test_a_row_is_the_same_alone_as_among_others() -> None:
    backend = SdpaAttention()
    alone, among = Step([(1, 33)]), Step([(1, 33), (1, 60), (1, 2), (12, 20)])
    among.q[0] = alone.q[0]
    slots = among.metadata.block_table[0].long()
    among.k_cache[slots[:5]] = alone.k_cache[alone.metadata.block_table[0].long()]
    among.v_cache[slots[:5]] = alone.v_cache[alone.metadata.block_table[0].long()]

    torch.testing.assert_close(
        among.attend(backend)[0], alone.attend(backend)[0], rtol=0, atol=1e-6
    )


def test_a_new_step_is_not_taken_for_the_last() -> None:
    backend = SdpaAttention()
    first, second = Step([(1, 20), (3, 3)], seed=1), Step([(1, 11), (1, 12)], seed=2)

    first.attend(backend)

    torch.testing.assert_close(second.attend(backend), second.expected(), rtol=0, atol=1e-5)


def test_padding_tokens_behind_the_last_row_harm_nothing() -> None:
    step = Step([(1, 20), (3, 3)])
    expected = step.expected()
    step.q = torch.cat((step.q, torch.full((4, *step.q.shape[1:]), torch.nan)))

    out = step.attend(SdpaAttention())

    torch.testing.assert_close(out[:4], expected, rtol=0, atol=1e-5)
    assert out[4:].isfinite().all()


def test_a_half_precision_cache_serves_float32_queries() -> None:
    step = Step([(1, 20), (3, 9)])
    step.k_cache, step.v_cache = step.k_cache.half(), step.v_cache.half()

    out = step.attend(SdpaAttention())

    assert out.dtype == torch.float32
    torch.testing.assert_close(out, step.expected(), rtol=0, atol=2e-3)


def test_it_takes_queries_that_are_a_slice_of_a_wider_tensor() -> None:
    step = Step([(1, 20), (1, 5), (4, 9)])
    expected = step.expected()
    step.q = torch.cat((step.q, step.q), dim=1)[:, :6]

    torch.testing.assert_close(step.attend(SdpaAttention()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_kept_out_and_then_as_it_was(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn_enabled: Callable[[], bool] = torch.backends.cuda.cudnn_sdp_enabled
    seen: list[bool] = []
    compute = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(cudnn_enabled())
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        Step([(1, 20), (3, 9)]).attend(SdpaAttention())
        after = cudnn_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)

    assert seen == [False, False]
    assert after == before
