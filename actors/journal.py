"""The journal: every message an actor of this process handles, in files that are kept small.

Optional; `callboard replay` reads it. Writing must never hold up an actor, so entries are put
behind one another in memory and a task of its own writes them out; what does not fit is counted
and left out. A process that is killed takes the last moment along, up to FLUSH_S.

An entry is four bytes, little-endian, that say how long it is, and a msgpack array; see `Entry`.
"""

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import trio

from callboard.actors.mailbox import Letter
from callboard.logs import get_logger
from callboard.messages.codec import encode_body
from callboard.messages.errors import ConfigError, WireError

FLUSH_S = 0.5
MAX_PENDING_BYTES = 16 * 2**20
FILE_BYTES = 64 * 2**20
KEPT_FILES = 4
"""Of one process; the oldest is deleted when another one is begun."""

ABOUT = "About"
"""The kind of the first entry of a file, whose body says what the process was started with."""

SUFFIX = ".journal"

_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()

log = get_logger()


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A message in the moment its receiver begins to handle it.

    `at` is in seconds since 1970. `message_id` and `cause` are those of one process: the cause is
    the message in hand of whoever sent this one, 0 where that was none. `life` counts the lives of
    the receiver. `body` is the encoded message; empty where it cannot be encoded.
    """

    at: float
    receiver: str
    life: int
    message_id: int
    cause: int
    kind: str
    asked: bool
    body: bytes


class Journal:
    """Takes entries from the actors of one process, and writes them to files of one folder."""

    def __init__(self, folder: Path, process: str, about: bytes = b"") -> None:
        """Each file is named after the process, and begins with what there is to say of it.

        Raises OSError when the folder cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.left_out = 0
        """Entries for which there was no room, or no disk any more."""
        self._folder = folder
        self._process = process
        # A program may have several engines, of one name, that begin in the same second.
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self._name = f"{process}-{stamp}-{os.getpid()}-{secrets.token_hex(3)}"
        self._about = about
        self._pending = bytearray()
        self._most = MAX_PENDING_BYTES
        self._epoch = time.time() - trio.current_time()
        self._files = itertools.count(1)
        self._file: BinaryIO | None = None

    def note(self, receiver: str, life: int, letter: Letter) -> None:
        """Add an entry; never raises, and never waits."""
        if len(self._pending) >= self._most:
            self.left_out += 1
            return
        entry = Entry(
            at=self._epoch + trio.current_time(),
            receiver=receiver,
            life=life,
            message_id=letter.message_id,
            cause=letter.cause,
            kind=type(letter.message).__name__,
            asked=letter.reply is not None,
            body=_body(letter),
        )
        self._pending += _framed(entry)

    async def run(self) -> None:
        """Write entries out until cancelled; a disk that fails ends this and nothing else."""
        try:
            while True:
                await trio.sleep(FLUSH_S)
                await trio.to_thread.run_sync(self._write, self._take())
        except OSError as error:
            log.error("the journal ends: it cannot be written", reason=str(error))
            self._most = 0

    def flush(self) -> None:
        """Write out what there is now."""
        self._write(self._take())

    def close(self) -> None:
        """Write out the rest."""
        with contextlib.suppress(OSError):  # as it may have been before, and was said then
            self.flush()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what did not fit is tried again
                self._file.close()

    def _take(self) -> bytearray:
        pending, self._pending = self._pending, bytearray()
        return pending

    def _write(self, entries: bytearray) -> None:
        """Write entries, beginning a new file when the last one is full."""
        if not entries:
            return
        if self._file is None or self._file.tell() > FILE_BYTES:
            self._file = self._new_file()
        self._file.write(entries)
        self._file.flush()

    def _new_file(self) -> BinaryIO:
        if self._file is not None:
            self._file.close()
        earlier = sorted(self._folder.glob(f"{self._process}-*{SUFFIX}"))
        for old in earlier[: max(0, len(earlier) - KEPT_FILES + 1)]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{self._name}-{next(self._files):04}{SUFFIX}"
        # It holds what clients have said, and is for its owner alone.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        file.write(_framed(_about(self._process, self._about)))
        return file


def _framed(entry: Entry) -> bytes:
    packed = _encoder.encode(entry)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


def _about(process: str, body: bytes) -> Entry:
    return Entry(
        at=time.time(),
        receiver=process,
        life=0,
        message_id=0,
        cause=0,
        kind=ABOUT,
        asked=False,
        body=body,
    )


def _body(letter: Letter) -> bytes:
    try:
        return encode_body(letter.message)
    except (WireError, TypeError, ValueError):
        return b""


@asynccontextmanager
async def open_journal(
    folder: Path | None, process: str, about: bytes = b""
) -> AsyncGenerator[Journal | None]:
    """Open the journal of this process for as long as the block lasts; None without a folder.

    Raises ConfigError when the folder cannot be made.
    """
    if folder is None:
        yield None
        return
    try:
        journal = Journal(folder, process, about)
    except OSError as error:
        raise ConfigError(f"journal: {error.filename}: {error.strerror}") from error
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            yield journal
            nursery.cancel_scope.cancel("the journal was closed")
    finally:
        journal.close()


def process_of(path: Path) -> str:
    """Return what the names of a process's files have in common, and of no other's."""
    return path.stem.rpartition("-")[0]


def read_journal(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file, up to one that a killed process has left half written.

    Raises ValueError for a file that is no journal.
    """
    decoder = msgspec.msgpack.Decoder(Entry)
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            length = int.from_bytes(prefix, "little")
            packed = file.read(length)
            if len(packed) < length:
                return
            try:
                yield decoder.decode(packed)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path} is no journal: {error}") from error
