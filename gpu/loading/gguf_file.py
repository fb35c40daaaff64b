"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

The `gguf` package has a reader as well; it makes an array of each of a tokenizer's 100,000 strings
(1.6 s where this takes 0.1 s), and a damaged length keeps it busy for good. Here every length is
checked against what is left of the file. The tensors' encodings are left to the package.
"""

import struct
from pathlib import Path
from typing import NamedTuple

from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.weight_file import WeightFile

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_WINDOW_BYTES = 2**18
"""What is read at once: a header has 100,000 strings, and a read for each would take too long."""

# The format's value types; scalars by their struct codes.
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class GgufTensor(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file has it the other way round."""
    ggml_type: int
    offset: int
    """In bytes from the start of the file."""


class GgufFile(NamedTuple):
    """The header of a GGUF file, and the file, which its tensors are read from."""

    contents: WeightFile
    metadata: dict[str, object]
    """Numbers, booleans, strings and lists of these, by key."""
    tensors: dict[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The file's name when it was opened."""
        return self.contents.path

    @property
    def num_bytes(self) -> int:
        """The size of the whole file."""
        return self.contents.num_bytes


def read_gguf(file: WeightFile) -> GgufFile:
    """Read the header; raises ModelError where the file is foreign, cut off or damaged."""
    path, cursor = file.path, _Cursor(file)
    if not cursor.begins_with(_MAGIC):
        raise ModelError(
            f"{path}: not a GGUF file: it does not begin with 'GGUF'; name a Hugging Face model by"
            " its folder"
        )
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} is not one of {_VERSIONS}")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = [cursor.tensor() for _ in range(num_tensors)]
    start = _align(cursor.position, metadata.get("general.alignment", _DEFAULT_ALIGNMENT), path)
    return GgufFile(
        contents=file,
        metadata=metadata,
        tensors={tensor.name: tensor._replace(offset=start + tensor.offset) for tensor in tensors},
    )


def _align(position: int, alignment: object, path: Path) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, not a positive number")
    return -(-position // alignment) * alignment


class _Cursor:
    """Reads one value after another, and no further than the file goes."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._path = file.path
        self._window = bytearray()
        self._window_start = 0
        self.position = 0

    def begins_with(self, magic: bytes) -> bool:
        """Whether the file does; what is read next follows on it."""
        return self._file.num_bytes >= len(magic) and self._take(len(magic)) == magic

    def scalar(self, code: str) -> int:
        return int(self._unpack(f"<{code}")[0])

    def count(self) -> int:
        """Read how many things follow: no more than there are bytes, as each takes one or more."""
        count = self.scalar("Q")
        self._require(count)
        return count

    def string(self) -> str:
        length = self.count()
        start = self.position
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self._path}: damaged: the string at byte {start} is not UTF-8"
            ) from error

    def value(self, value_type: int) -> object:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY:
            return self._array(self.scalar("I"), self.count())
        return self._unpack(f"<{self._code(value_type)}")[0]

    def tensor(self) -> GgufTensor:
        """Read a tensor's entry; its offset is still from the start of the tensors."""
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: tensor {name!r} has {num_dimensions} dimensions")
        shape = self._unpack(f"<{num_dimensions}Q")
        ggml_type, offset = self._unpack("<IQ")
        return GgufTensor(name, tuple(reversed(shape)), ggml_type, offset)

    def _array(self, value_type: int, count: int) -> list[object]:
        if value_type == _STRING:
            return [self.string() for _ in range(count)]
        return list(self._unpack(f"<{count}{self._code(value_type)}"))

    def _code(self, value_type: int) -> str:
        code = _SCALARS.get(value_type)
        if code is None:
            raise ModelError(
                f"{self._path}: damaged: unknown value type {value_type} at byte {self.position}"
            )
        return code

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, num_bytes: int) -> bytearray:
        self._require(num_bytes)
        start = self.position - self._window_start
        if start + num_bytes > len(self._window):
            self._move_window(num_bytes)
            start = 0
        self.position += num_bytes
        return self._window[start : start + num_bytes]

    def _move_window(self, num_bytes: int) -> None:
        """Read from the position on, so many bytes or more."""
        rest = self._file.num_bytes - self.position
        num_bytes = max(num_bytes, min(_WINDOW_BYTES, rest))
        self._window = self._file.read(self.position, num_bytes, what="its header")
        self._window_start = self.position

    def _require(self, num_bytes: int) -> None:
        if num_bytes > self._file.num_bytes - self.position:
            raise ModelError(
                f"{self._path}: cut off or damaged: {num_bytes} bytes are wanted at byte"
                f" {self.position} of {self._file.num_bytes}"
            )
