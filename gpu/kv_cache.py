"""The KV cache: one buffer that holds what attention keeps of every token, block by block.

Letters: T tokens of a step, K key/value heads, H head size, W width of a latent vector.
"""

import torch
from torch import Tensor

from callboard.gpu.attention.base import write_kv


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
        self.buffers: tuple[Tensor, ...] = (buffer,)

    @property
    def allocated(self) -> bool:
        """Whether the buffer exists."""
        return bool(self._layers)

    @property
    def bytes(self) -> int:
        """The size of the buffer; 0 once it is freed."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the layer's caches, each `[blocks, block_tokens, kv_heads, head_dim]`.

        Raises RuntimeError once the buffer is freed.
        """
        if not self._layers:
            raise RuntimeError("the KV cache is freed")
        return self._layers[index]

    def append(self, index: int, k_TKH: Tensor, v_TKH: Tensor, slot_mapping: Tensor) -> None:
        """Store the keys and values of a step's tokens in the slots named for them, int64 [T]."""
        write_kv(k_TKH, v_TKH, *self.layer(index), slot_mapping)

    def free(self) -> None:
        """Let the buffer go; its memory returns as soon as nobody else holds a layer of it."""
        self._layers = []
        self.buffers = ()


class LatentCache:
    """Latent vectors in `[layers, blocks, block_tokens, width]`, resident like `KVCache`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_blocks, block_tokens, width)
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = list(buffer.unbind())
        self.buffers: tuple[Tensor, ...] = (buffer,)

    @property
    def bytes(self) -> int:
        """The size of the buffer; 0 once it is freed."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def layer(self, index: int) -> Tensor:
        """Return the layer's cache, `[blocks, block_tokens, width]`.

        Raises RuntimeError once the buffer is freed.
        """
        if not self._layers:
            raise RuntimeError("the KV cache is freed")
        return self._layers[index]

    def append(self, index: int, latent_TW: Tensor, slot_mapping: Tensor) -> None:
        """Store the vectors of a step's tokens in the slots named for them, int64 [T]."""
        cache = self.layer(index)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, latent_TW.to(cache.dtype))

    def free(self) -> None:
        """Let the buffer go; its memory returns as soon as nobody else holds a layer of it."""
        self._layers = []
        self.buffers = ()
