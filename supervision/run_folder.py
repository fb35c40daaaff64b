"""The folder of a server's own sockets: private, and gone when the server is, however it ended.

A server that is killed cannot clean up. Its replica processes do that for it when they find it
gone, and should they be killed, too, the next server that starts does. A lock tells a folder in use
from one that is left over: the system lets go of it when the process that holds it ends.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from callboard.messages.errors import StartFailed

PREFIX = "callboard-"
LOCK = "lock"

LONGEST = 88
"""Bytes of the folder's path: that of a socket in it may have 107."""


@contextmanager
def open_run_folder() -> Iterator[Path]:
    """Make a folder for this process alone, of mode 0700; it is removed at the end."""
    remove_leftovers()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if len(os.fsencode(name)) > LONGEST:
            raise StartFailed(
                f"the folder for temporary files, {folder.parent}, has too long a path for sockets:"
                " set TMPDIR to a shorter one"
            )
        with _held_lock(folder):
            yield folder


def remove_leftovers() -> None:
    """Remove the folders of our servers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        remove_if_left_over(folder)


def remove_if_left_over(folder: Path) -> None:
    """Remove a run folder that is ours and that no living server holds."""
    if not folder.name.startswith(PREFIX):
        return
    with suppress(OSError):
        if folder.lstat().st_uid == os.geteuid() and _is_left_over(folder):
            shutil.rmtree(folder)


def _is_left_over(folder: Path) -> bool:
    """Say whether nobody holds the lock. Raises OSError where there is no such lock."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def _held_lock(folder: Path) -> Iterator[None]:
    # It gets its name once it is held, so that nobody ever finds it free while we live.
    unnamed = folder / f"{LOCK}.new"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unnamed.rename(folder / LOCK)
        yield
    finally:
        os.close(descriptor)
