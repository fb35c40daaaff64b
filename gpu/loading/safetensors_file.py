"""Reads the header of a safetensors file: where its tensors lie.

The `safetensors` package maps files into memory, which `weight_file` says why not to. What it
refuses in a header is refused here: every length, offset and shape that does not add up.
"""

import math
import struct
from typing import Annotated, NamedTuple

import msgspec

from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.weight_file import WeightFile

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"

# The format's dtypes by the bits of an element.
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of a tensor; the offsets are from the end of the header."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=64)]  # torch has no more dimensions
    data_offsets: tuple[_Size, _Size]


class SafetensorsTensor(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    dtype: str
    """In the format's words: "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """In bytes from the start of the file."""
    num_bytes: int


def read_safetensors(file: WeightFile) -> dict[str, SafetensorsTensor]:
    """Read the header; raises ModelError where the file is foreign, cut off or damaged."""
    header = _header(file)
    start = _LENGTH.size + len(header)
    tensors = {
        name: _tensor(file, name, entry, start) for name, entry in _entries(file, header).items()
    }
    _check_layout(file, list(tensors.values()), start)
    return tensors


def _header(file: WeightFile) -> bytearray:
    rest = file.num_bytes - _LENGTH.size
    if rest < 0:
        raise _damaged(file, f"it has {file.num_bytes} bytes")
    (num_bytes,) = _LENGTH.unpack(file.read(0, _LENGTH.size, what="its header"))
    if num_bytes > min(rest, _MAX_HEADER_BYTES):
        raise _damaged(
            file,
            f"its header would be {num_bytes} bytes long, where {rest} follow and"
            f" {_MAX_HEADER_BYTES} are the most",
        )
    return file.read(_LENGTH.size, num_bytes, what="its header")


def _entries(file: WeightFile, header: bytearray) -> dict[str, msgspec.Raw]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        # Not used, but a file with a damaged part is not taken for a whole one.
        msgspec.json.decode(entries.pop(_METADATA, b"null"), type=dict[str, str] | None)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(file, f"its header: {error}") from error
    return entries


def _tensor(file: WeightFile, name: str, entry: msgspec.Raw, start: int) -> SafetensorsTensor:
    try:
        said = msgspec.json.decode(entry, type=_Entry)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(file, f"tensor {name!r}: {error}") from error
    if said.dtype not in _BITS:
        raise _damaged(file, f"tensor {name!r} is of the unknown dtype {said.dtype!r}")
    (begin, end), shape = said.data_offsets, tuple(said.shape)
    if math.prod(shape) * _BITS[said.dtype] != (end - begin) * 8:
        raise _damaged(
            file,
            f"tensor {name!r} lies at {begin} to {end}, which is not the size of {said.dtype} of"
            f" shape {shape}",
        )
    return SafetensorsTensor(name, said.dtype, shape, start + begin, end - begin)


def _check_layout(file: WeightFile, tensors: list[SafetensorsTensor], start: int) -> None:
    """Check that one tensor follows another, without holes or overlaps, up to the file's end."""
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise _damaged(
                file,
                f"tensor {tensor.name!r} begins at byte {tensor.offset}, and the one before it ends"
                f" at {end}",
            )
        end += tensor.num_bytes
    if end != file.num_bytes:
        raise _damaged(file, f"its tensors end at byte {end} of {file.num_bytes}")


def _damaged(file: WeightFile, fault: str) -> ModelError:
    return ModelError(f"{file.path}: not a whole safetensors file: {fault}")
