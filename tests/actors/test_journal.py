import itertools
import time
from pathlib import Path

import msgspec
import pytest
import trio

from callboard.actors import journal
from callboard.actors.actor import Actor
from callboard.actors.journal import (
    ABOUT,
    Entry,
    Journal,
    open_journal,
    process_of,
    read_journal,
)
from callboard.actors.mailbox import Letter
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.messages.base import Message
from callboard.messages.errors import ConfigError


class Note(Message, frozen=True):
    text: str


class Unsayable(Message, frozen=True):
    what: object


class Forwarder(Actor[Note]):
    """Tells another what it is told."""

    def __init__(self, other: LocalRef[Note] | None = None) -> None:
        self.other = other

    async def receive(self, message: Note) -> None:
        if self.other is not None:
            await self.other.tell(Note(text=message.text.upper()))


def entries_of(folder: Path) -> list[Entry]:
    return [entry for file in sorted(folder.iterdir()) for entry in read_journal(file)]


async def test_each_message_is_written_with_its_receiver_and_its_cause(tmp_path: Path) -> None:
    async with (
        open_journal(tmp_path, "here", b"all about it") as written,
        open_system(written) as system,
        trio.open_nursery() as nursery,
    ):
        last = system.cell("last")
        first = system.cell("first")
        nursery.start_soon(last.run, Forwarder)
        nursery.start_soon(first.run, lambda: Forwarder(LocalRef(last)))
        await LocalRef[Note](first).tell(Note(text="hello"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    about, one, two = entries_of(tmp_path)
    assert (about.kind, about.receiver, about.body) == (ABOUT, "here", b"all about it")
    assert [(e.receiver, e.life, e.kind, e.asked) for e in (one, two)] == [
        ("first", 1, "Note", False),
        ("last", 1, "Note", False),
    ]
    assert (one.cause, two.cause) == (0, one.message_id)
    assert msgspec.msgpack.decode(two.body, type=Note) == Note(text="HELLO")
    assert one.at <= two.at


async def test_a_journal_is_for_nobody_elses_eyes(tmp_path: Path) -> None:
    written = Journal(tmp_path / "journal", "here")
    written.note("somebody", 1, Letter(Note(text="x")))
    written.close()

    [file] = files_in(tmp_path / "journal")
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=f"journal: {tmp_path}/file/journal: Not a directory"):
        async with open_journal(tmp_path / "file" / "journal", "here"):
            pass


async def test_without_a_folder_there_is_no_journal() -> None:
    async with open_journal(None, "here") as written:
        assert written is None


async def test_a_message_that_cannot_be_encoded_is_written_without_its_body(
    tmp_path: Path,
) -> None:
    async with open_journal(tmp_path, "here") as written:
        assert written is not None
        written.note("somebody", 1, Letter(Unsayable(what=object())))
    assert [(entry.kind, entry.body) for entry in entries_of(tmp_path)[1:]] == [("Unsayable", b"")]


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(folder.glob(pattern))


async def test_files_are_kept_small_and_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 1000)
    written = Journal(tmp_path, "here")
    for number in range(40):
        written.note("somebody", 1, Letter(Note(text=f"{number:400}")))
        written.flush()
    written.close()
    files = files_in(tmp_path)
    assert len(files) == journal.KEPT_FILES
    assert all(file.stat().st_size < 2500 for file in files)
    assert all(next(read_journal(file)).kind == ABOUT for file in files)
    kept = [entry for entry in entries_of(tmp_path) if entry.kind == "Note"]
    assert msgspec.msgpack.decode(kept[-1].body)[1].strip() == "39"


async def test_all_files_of_a_journal_are_known_as_its_own_and_no_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 1)
    now = [0.0]
    monkeypatch.setattr(time, "gmtime", lambda: time.localtime(now[0]))
    both = [Journal(tmp_path, "engine") for _ in range(2)]  # in one process, in one second
    for _ in range(2):
        for written in both:
            written.note("somebody", 1, Letter(Note(text="x")))
            written.flush()
        now[0] += 1.0
    for written in both:
        written.close()

    owners = [process_of(file) for file in sorted(files_in(tmp_path))]
    assert [len(list(own)) for _, own in itertools.groupby(owners)] == [2, 2]


async def test_the_files_of_another_process_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 1)
    for process, count in (("two", 1), ("one", 10)):
        written = Journal(tmp_path, process)
        for _ in range(count):
            written.note("somebody", 1, Letter(Note(text="x")))
            written.flush()
        written.close()
    assert len(files_in(tmp_path, "two-*")) == 1
    assert len(files_in(tmp_path, "one-*")) == journal.KEPT_FILES


async def test_what_does_not_fit_is_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_PENDING_BYTES", 500)
    written = Journal(tmp_path, "here")
    for _ in range(10):
        written.note("somebody", 1, Letter(Note(text="x" * 200)))
    written.close()
    assert written.left_out == 7
    assert len(entries_of(tmp_path)) == 4


async def test_a_disk_that_fails_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FLUSH_S", 0.0)
    folder = tmp_path / "journal"
    written = Journal(folder, "here")
    folder.rmdir()
    written.note("somebody", 1, Letter(Note(text="lost")))
    with trio.fail_after(10):
        await written.run()
    written.note("somebody", 1, Letter(Note(text="not even tried")))
    assert written.left_out == 1
    written.close()


async def test_a_journal_for_whose_end_there_is_no_room_is_closed_all_the_same(
    tmp_path: Path,
) -> None:
    written = Journal(tmp_path, "here")
    written._file = open("/dev/full", "wb")  # noqa: ASYNC230, SIM115  # it is closed below
    written.note("somebody", 1, Letter(Note(text="lost")))

    written.close()

    assert written._file.closed


async def test_an_entry_that_was_half_written_ends_a_file(tmp_path: Path) -> None:
    async with open_journal(tmp_path, "here") as written:
        assert written is not None
        for text in ("one", "two"):
            written.note("somebody", 1, Letter(Note(text=text)))
    (file,) = files_in(tmp_path)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert len(list(read_journal(file))) <= 2


async def test_other_files_are_no_journals(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_bytes(b"\x05\x00\x00\x00hello")
    with pytest.raises(ValueError, match="is no journal"):
        list(read_journal(file))
