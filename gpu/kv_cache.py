"""The KV cache: one buffer that holds the keys and values of all layers, block by block."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values in `[2, layers, blocks, block_tokens, kv_heads, head_dim]`, resident at once.

    The buffer is written when it is made, so that the operating system counts it from then on and
    a cache that does not fit fails here and not in the middle of a step.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (2, num_layers, num_blocks, block_tokens, num_kv_heads, head_dim)
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(buffer[0, layer], buffer[1, layer]) for layer in range(num_layers)]
        self._bytes = buffer.nbytes

    @property
    def allocated(self) -> bool:
        """Whether the buffer exists."""
        return bool(self._layers)

    @property
    def bytes(self) -> int:
        """The size of the buffer; 0 once it is freed."""
        return self._bytes

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the layer's caches, each `[blocks, block_tokens, kv_heads, head_dim]`.

        Raises RuntimeError once the buffer is freed.
        """
        if not self._layers:
            raise RuntimeError("the KV cache is freed")
        return self._layers[index]

    def free(self) -> None:
        """Let the buffer go; its memory returns as soon as nobody else holds a layer of it."""
        self._layers = []
        self._bytes = 0
