"""Copies of tensors outside device memory, bit for bit, for as long as that memory is given back.

A GPU's tensors go to pinned host memory. On the CPU the memory of the device is the process's own,
and a copy in memory would free nothing: there they go to a file without a name, which is written
through to the disk and read by memory map. It lies in TMPDIR, or else in /var/tmp, which by custom
is no file system in memory as /tmp may be; in one that is, memory only changes its place. It goes
with the process, however that ends.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callboard.gpu.device import wait_for
from callboard.gpu.linear import repacked

if TYPE_CHECKING:
    from callboard.gpu.loading.loader import LoadedModel

_FOLDER = Path("/var/tmp")
_PIECE = 2**28
"""Bytes of pinned memory taken at once: torch rounds what it takes up to a power of two."""
_PAGE = 2**20
"""Bytes of a file that are left out as a hole where all of them are 0."""


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A tensor's bytes, in pieces on the host; for one repacked for oneDNN, those it had before."""

    shape: torch.Size
    dtype: torch.dtype
    is_repacked: bool
    pieces: tuple[Tensor, ...]

    def tensor(self, device: torch.device) -> Tensor:
        """Return a new tensor on the device that is what the first was."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.write_to(tensor)
        return repacked(tensor) if self.is_repacked else tensor

    def write_to(self, tensor: Tensor) -> None:
        """Overwrite a tensor of that shape and dtype; on a GPU once `wait_for` has returned."""
        start = 0
        for piece in self.pieces:
            _bytes_of(tensor)[start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)


def host_copies(tensors: Sequence[Tensor]) -> list[HostCopy]:
    """Copy tensors of one device out of its memory; the caller then lets go of them.

    Raises OSError where the disk has no room, or what torch raises where the host has none.
    """
    if any(tensor.device.type == "cuda" for tensor in tensors):
        return [_pinned_copy(tensor) for tensor in tensors]
    return _copies_in_file(tensors)


class OffloadedModel:
    """A model whose tensors are on the host; without them it cannot be run until `restore`.

    That is every tensor that an object of this package holds which the model is made of, be it a
    weight or, as the frequencies of rotary positions are, in no checkpoint.
    """

    def __init__(self, model: "LoadedModel") -> None:
        """Take the tensors out of a model. Raises what `host_copies` raises, and takes none then.

        Their memory returns to the system once nobody else holds them: see `release_memory`.
        """
        places = list(_places(model))
        distinct = {id(tensor): tensor for _, _, tensor in places}  # a tied embedding comes twice
        copies = dict(zip(distinct, host_copies(list(distinct.values())), strict=True))
        self._model = model
        self._device = next(iter(distinct.values())).device
        self._places = [(owner, name, copies[id(tensor)]) for owner, name, tensor in places]
        for owner, name, _ in places:
            delattr(owner, name)

    def restore(self) -> "LoadedModel":
        """Put the tensors back on the device, each in its place, and return the model."""
        tensors: dict[HostCopy, Tensor] = {}
        with torch.inference_mode():
            for owner, name, copy in self._places:
                if copy not in tensors:
                    tensors[copy] = copy.tensor(self._device)
                setattr(owner, name, tensors[copy])
        wait_for(self._device)
        return self._model


def _places(root: object) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield the attributes that hold tensors, of an object and of those it is made of."""
    seen: set[int] = set()
    objects = [root]
    while objects:
        owner = objects.pop()
        if isinstance(owner, list | tuple):
            objects += owner
        elif id(owner) not in seen and type(owner).__module__.startswith("callboard."):
            seen.add(id(owner))
            for name, value in getattr(owner, "__dict__", {}).items():
                if isinstance(value, Tensor):
                    yield owner, name, value
                else:
                    objects.append(value)


def _pinned_copy(tensor: Tensor) -> HostCopy:
    pieces = tuple(
        torch.empty(len(part), dtype=torch.uint8, pin_memory=True).copy_(part)
        for part in torch.split(_bytes_of(tensor), _PIECE)
    )
    return HostCopy(tensor.shape, tensor.dtype, is_repacked=False, pieces=pieces)


def _copies_in_file(tensors: Sequence[Tensor]) -> list[HostCopy]:
    """Copy tensors to a file of which no page stays in memory, and map it."""
    with tempfile.TemporaryFile(dir=_folder(), buffering=0) as file:
        fd = file.fileno()
        sizes: list[int] = []
        for tensor in tensors:
            plain = tensor.to_dense() if tensor.is_mkldnn else tensor
            sizes.append(_write(fd, plain, sum(sizes)))
        os.ftruncate(fd, sum(sizes))
        os.fdatasync(fd)  # what is yet to be written could not be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = _mapped(fd, sum(sizes)).split_with_sizes(sizes)
    return [
        HostCopy(tensor.shape, tensor.dtype, tensor.is_mkldnn, (part,))
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def _folder() -> Path:
    if os.environ.get("TMPDIR") or not _FOLDER.is_dir():
        return Path(tempfile.gettempdir())
    return _FOLDER


def _write(fd: int, tensor: Tensor, start: int) -> int:
    """Write a tensor's bytes to a place in a file; returns how many there are."""
    data = _bytes_of(tensor)
    at = start
    for page in torch.split(data, _PAGE):
        if page.any():
            _write_all(fd, page.numpy().data, at)
        at += len(page)
    return len(data)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _mapped(fd: int, size: int) -> Tensor:
    """Return a file's bytes; they come into memory when they are read."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
