"""Reads files piece by piece, and notices when they change meanwhile.

Never through a memory map: the system kills a process that touches a page which the file has lost
(SIGBUS), where a read that comes back short is an error like any other.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from callboard.gpu.loading.errors import ModelError


class WeightFile:
    """A file that is held open, and whose contents are those of one moment.

    Another file that is renamed over it changes nothing: the one that was opened is read on.

    Raises ModelError where there is none or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)  # what is read is large, and read once
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        self._opened = self._size_and_time()
        self.num_bytes = self._opened[0]
        """Its size when it was opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def read(self, offset: int, num_bytes: int, *, what: str) -> bytearray:
        """Return the bytes at an offset; see `read_into`."""
        content = bytearray(num_bytes)
        self.read_into(memoryview(content), offset, what=what)
        return content

    def read_into(self, buffer: memoryview, offset: int, *, what: str) -> None:
        """Fill a buffer from an offset on, up to the end of the file at most.

        Raises ModelError, naming the file and `what` is read, where that fails or the file is not
        as it was when it was opened.
        """
        assert offset + len(buffer) <= self.num_bytes
        try:
            is_whole = self._fill(buffer, offset)
            # Asked for after the read: a write sets the time first and the contents then.
            is_as_opened = self._size_and_time() == self._opened
        except OSError as error:
            raise ModelError(f"{self.path}: {what} cannot be read: {error.strerror}") from error
        if not (is_whole and is_as_opened):
            raise ModelError(
                f"{self.path}: {what}: the file changed while it was read; write another one and"
                " rename it instead"
            )

    def _fill(self, buffer: memoryview, offset: int) -> bool:
        """Read until the buffer is full, or return False at the end of the file."""
        self._file.seek(offset)
        while buffer:
            count = self._file.readinto(buffer)  # 2 GiB at most, as Linux has it
            if not count:
                return False
            buffer = buffer[count:]
        return True

    def _size_and_time(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns
