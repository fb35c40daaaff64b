"""One copy a step: several small arrays travel to the device packed in a single buffer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; any element type and any vector load may start there


class Staging:
    """A host buffer, pinned for a GPU, and its twin on the device; on the CPU they are one.

    What `send` returns is a view of the buffer: it holds until the next `send`, and a caller must
    have waited for the device before it sends again. Arrays of the same shapes come to the same
    address each time, unless others outgrew the buffer meanwhile.
    """

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._allocate(num_bytes)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as tensors on the device, with their dtypes and shapes."""
        starts = np.cumsum([0] + [_padded(array.nbytes) for array in arrays]).tolist()
        if starts[-1] > len(self._host):
            self._allocate(2 * starts[-1])
        for array, start in zip(arrays, starts[:-1], strict=True):
            place = self._host_view[start : start + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        if self._on_device is not self._host:
            self._on_device[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        return [
            _view(self._on_device, start, array)
            for array, start in zip(arrays, starts[:-1], strict=True)
        ]

    def _allocate(self, size: int) -> None:
        on_gpu = self._device.type != "cpu"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._host_view: npt.NDArray[np.uint8] = self._host.numpy()
        self._on_device = self._host.to(self._device)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(buffer: Tensor, start: int, array: npt.NDArray[Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
