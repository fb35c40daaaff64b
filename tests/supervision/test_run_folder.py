import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from callboard.messages.errors import StartFailed
from callboard.supervision.run_folder import (
    LOCK,
    PREFIX,
    open_run_folder,
    remove_if_left_over,
    remove_leftovers,
)

KILLED = """
import os, signal
from callboard.supervision.run_folder import open_run_folder

with open_run_folder() as folder:
    (folder / "a.socket").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def leave_over() -> None:
    """Have a process make a run folder and be killed."""
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -9


def test_a_run_folder_is_private_and_gone_afterwards(temp: Path) -> None:
    with open_run_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == temp

    assert list(temp.iterdir()) == []


def test_what_a_killed_server_has_left_is_removed_by_the_next(temp: Path) -> None:
    leave_over()
    assert len(list(temp.iterdir())) == 1

    with open_run_folder() as folder:
        assert list(temp.iterdir()) == [folder]


def test_a_folder_in_use_is_not_removed(temp: Path) -> None:
    with open_run_folder() as folder, open_run_folder() as other:
        remove_leftovers()
        remove_if_left_over(folder)

        assert sorted(temp.iterdir()) == sorted([folder, other])


@pytest.mark.parametrize("name", [f"{PREFIX}without-a-lock", "somebody-elses"])
def test_a_folder_that_is_none_of_ours_is_not_removed(temp: Path, name: str) -> None:
    other = temp / name
    other.mkdir()
    if not name.startswith(PREFIX):
        (other / LOCK).touch()

    remove_leftovers()
    remove_if_left_over(other)

    assert other.exists()


def test_a_folder_that_somebody_has_removed_already_is_no_error(temp: Path) -> None:
    remove_if_left_over(temp / f"{PREFIX}gone")
    with open_run_folder() as folder:
        (folder / LOCK).unlink()
        folder.rmdir()


def test_a_folder_whose_path_is_too_long_for_sockets_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    with pytest.raises(StartFailed, match="set TMPDIR to a shorter one"), open_run_folder():
        pytest.fail("it was opened")

    assert list(long.iterdir()) == []
