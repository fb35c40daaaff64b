"""Computes every token by itself, so that what a request gets depends on the request alone.

A sum of floats depends on its order, and what order a kernel takes depends on what it is given: a
matrix product on how many rows there are, attention on how many queries and keys, a vector loop on
where its remainder begins, and some of them on how the memory is aligned. So a batch can change the
last bit of a logit, and that bit now and then a token.

Here nothing that a kernel is given depends on the batch. It sees one token, in memory allocated for
it (which torch aligns always alike), and the keys up to that token, copied out of the cache in
order. The token's logits are computed alone too. Since each key and value was computed that way, in
whatever step and for whichever row, the same sequence gives the same bits: in a batch, in chunks,
behind a shared prefix, and when it is computed again. What kernels still choose by is the machine,
the number of threads and the version of torch; these must be the same.

Letters: T tokens of a step, R rows of which logits are wanted, D model width, V vocabulary.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from callboard.gpu.attention.base import AttentionMetadata
from callboard.gpu.memory import blocks_for
from callboard.gpu.models.decoder import Decoder, LayerCaches


class BatchInvariantDecoder:
    """A decoder that is fed one token at a time; called as `Decoder` is."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def forward(
        self, input_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: LayerCaches
    ) -> Tensor:
        """Run the layers over each token, a row's tokens in their order; return hidden [T, D]."""
        block_tokens = kv_cache.layer(0)[0].shape[1]
        tokens = zip(
            torch.split(input_ids_T, 1), single_tokens(metadata, block_tokens), strict=True
        )
        return torch.cat([self._decoder.forward(ids, single, kv_cache) for ids, single in tokens])

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return the logits [R, V] of rows of what `forward` returned."""
        rows = torch.split(hidden_RD, 1)  # one of no rows, where there are none
        return torch.cat([self._decoder.logits(hidden_1D.clone()) for hidden_1D in rows])


def single_tokens(metadata: AttentionMetadata, block_tokens: int) -> Iterator[AttentionMetadata]:
    """Yield each token's metadata as that of a step with one row, which decodes it.

    The block table is no wider than the token's own keys need, for kernels look at that too.
    """
    device = metadata.positions.device
    cu_seqlens_q = torch.tensor([0, 1], dtype=torch.int32, device=device)
    seqlens_T = (metadata.positions + 1).to(torch.int32)
    for token, (row, kv_len) in enumerate(_rows_and_lengths(metadata)):
        this = slice(token, token + 1)
        yield AttentionMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_T[this],
            block_table=metadata.block_table[row : row + 1, : blocks_for(kv_len, block_tokens)],
            slot_mapping=metadata.slot_mapping[this],
            positions=metadata.positions[this],
            max_seqlen_q=1,
            max_seqlen_k=kv_len,
            num_decodes=1,
            query_lens_host=np.ones(1, dtype=np.int32),
            kv_lens_host=np.array([kv_len], dtype=np.int32),
        )


def _rows_and_lengths(metadata: AttentionMetadata) -> Iterator[tuple[int, int]]:
    """Yield each token's row and how many keys it sees, itself included."""
    lengths = zip(metadata.query_lens_host.tolist(), metadata.kv_lens_host.tolist(), strict=True)
    for row, (query_len, kv_len) in enumerate(lengths):
        for seen in range(kv_len - query_len + 1, kv_len + 1):
            yield row, seen
