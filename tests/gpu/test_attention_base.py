import pytest
import torch

from callboard.gpu.attention.base import build_metadata, write_kv


def test_metadata_places_decodes_then_chunks_in_their_blocks() -> None:
    metadata = build_metadata(
        [1, 3], [6, 5], [[7, 2], [4, 9]], block_tokens=4, device=torch.device("cpu")
    )

    assert metadata.cu_seqlens_q.tolist() == [0, 1, 4]
    assert metadata.seqlens_k.tolist() == [6, 5]
    assert metadata.positions.tolist() == [5, 2, 3, 4]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 9 * 4]
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k, metadata.num_decodes) == (3, 6, 1)
    assert metadata.num_rows == 2


def test_metadata_has_the_dtypes_kernels_ask_for() -> None:
    metadata = build_metadata([2], [2], [[0]], block_tokens=2)

    assert metadata.cu_seqlens_q.dtype == torch.int32
    assert metadata.seqlens_k.dtype == torch.int32
    assert metadata.block_table.dtype == torch.int32
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.positions.dtype == torch.int64


def test_a_step_of_decodes_only_counts_them_all() -> None:
    metadata = build_metadata([1, 1], [3, 1], [[0], [1]], block_tokens=4)

    assert metadata.num_decodes == 2
    assert metadata.positions.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "blocks", "message"),
    [
        ([], [], [], "at least one each"),
        ([1], [1, 2], [[0]], "same number"),
        ([0], [1], [[0]], "at least 1 token"),
        ([3], [2], [[0]], "no fewer cached"),
        ([2, 1, 2], [2, 1, 2], [[0], [1], [2]], "rows of one token come before"),
        ([1], [5], [[0]], "5 cached tokens do not fit 1 blocks of 4"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    query_lens: list[int], kv_lens: list[int], blocks: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_metadata(query_lens, kv_lens, blocks, block_tokens=4)


def test_keys_and_values_go_to_their_slots_in_the_caches_dtype() -> None:
    k_cache = torch.zeros(3, 2, 1, 4, dtype=torch.float16)
    v_cache = torch.zeros_like(k_cache)

    write_kv(
        torch.ones(2, 1, 4), torch.full((2, 1, 4), 2.0), k_cache, v_cache, torch.tensor([5, 2])
    )

    assert k_cache.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 1, 0, 0, 1]
    assert v_cache.flatten(0, 1)[:, 0, 0].tolist() == [0, 0, 2, 0, 0, 2]
