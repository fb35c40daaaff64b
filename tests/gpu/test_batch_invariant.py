"""Tokens one at a time: the metadata of each, and bits that no neighbour changes."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata, build_metadata
from callboard.gpu.batch_invariant import BatchInvariantDecoder, single_tokens
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import load_model
from callboard.gpu.models.decoder import Decoder

BLOCK_TOKENS = 4
LENGTHS = (9, 2, 14, 6)
BLOCKS = np.random.default_rng(3).permutation(16).reshape(4, 4)  # of each sequence, in no order


def values(metadata: AttentionMetadata) -> dict[str, Any]:
    found = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()
    }


def test_each_tokens_metadata_is_that_of_a_step_in_which_it_is_decoded_alone() -> None:
    together = build_metadata([1, 1, 3, 2], [5, 4, 10, 2], BLOCKS, block_tokens=BLOCK_TOKENS)

    singles = list(single_tokens(together, BLOCK_TOKENS))

    alone = [(0, 5), (1, 4), (2, 8), (2, 9), (2, 10), (3, 1), (3, 2)]
    assert len(singles) == len(alone)
    for single, (row, kv_len) in zip(singles, alone, strict=True):
        blocks = BLOCKS[row : row + 1, : -(-kv_len // BLOCK_TOKENS)]
        expected = build_metadata([1], [kv_len], blocks, block_tokens=BLOCK_TOKENS)
        assert values(single) == values(expected)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return load_model("random:tiny", device=torch.device("cpu"), dtype=request.param).decoder


def make_cache(decoder: Decoder, dtype: torch.dtype) -> KVCache:
    return KVCache(
        num_layers=decoder.config.num_layers,
        num_blocks=16,
        block_tokens=BLOCK_TOKENS,
        num_kv_heads=decoder.config.num_kv_heads,
        head_dim=decoder.config.head_dim,
        dtype=dtype,
        device="cpu",
    )


def logits_of(
    decoder: Decoder, steps: list[list[tuple[int, int]]], *, invariant: bool = True
) -> list[Tensor]:
    """Return the logits of each sequence after steps that feed (sequence, number of tokens)."""
    model = BatchInvariantDecoder(decoder) if invariant else decoder
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(320, (length,), generator=generator) for length in LENGTHS]
    cache = make_cache(decoder, decoder._embedding_VD.dtype)
    fed, got = [0] * len(LENGTHS), [list[Tensor]() for _ in LENGTHS]
    for feeds in steps:
        rows, counts = [row for row, _ in feeds], [count for _, count in feeds]
        tokens = [sequences[row][fed[row] : fed[row] + count] for row, count in feeds]
        for row, count in feeds:
            fed[row] += count
        metadata = build_metadata(
            counts, [fed[row] for row in rows], BLOCKS[rows], block_tokens=BLOCK_TOKENS
        )
        with torch.inference_mode():
            logits = model.logits(model.forward(torch.cat(tokens), metadata, cache))
        for row, part in zip(rows, torch.split(logits, counts), strict=True):
            got[row].append(part)
    return [torch.cat(parts) for parts in got]


ALONE = [[(row, length)] for row, length in enumerate(LENGTHS)]
TOGETHER = [list(enumerate(LENGTHS))]
IN_CHUNKS = [
    [(3, 1), (0, 3), (1, 2), (2, 5)],
    [(2, 1), (0, 2), (3, 2)],
    [(0, 1), (3, 3), (2, 8)],
    [(0, 3)],
]


@pytest.mark.parametrize("steps", [TOGETHER, IN_CHUNKS], ids=["together", "in chunks"])
def test_logits_are_the_same_bits_together_and_in_chunks(
    decoder: Decoder, steps: list[list[tuple[int, int]]]
) -> None:
    alone = logits_of(decoder, ALONE)

    for one, other in zip(alone, logits_of(decoder, steps), strict=True):
        assert torch.equal(one, other)


def test_logits_are_those_of_the_decoder(decoder: Decoder) -> None:
    tolerance = 0.2 if decoder._embedding_VD.dtype == torch.bfloat16 else 1e-4
    expected = logits_of(decoder, TOGETHER, invariant=False)

    for one, other in zip(expected, logits_of(decoder, TOGETHER), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_a_step_in_which_no_row_samples_has_no_logits(decoder: Decoder) -> None:
    hidden = torch.empty(0, 64, dtype=decoder._embedding_VD.dtype)

    assert BatchInvariantDecoder(decoder).logits(hidden).shape == (0, 320)
