import os
from pathlib import Path

import pytest

from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.weight_file import WeightFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(100)))
    os.utime(path, (0, 0))  # the clock of files is too coarse to tell a new one's last changes
    return path


def test_any_part_of_a_file_can_be_read(path: Path) -> None:
    buffer = bytearray(3)

    with WeightFile(path) as file:
        assert file.num_bytes == 100
        assert file.read(90, 10, what="its end") == bytes(range(90, 100))
        assert file.read(100, 0, what="nothing") == b""
        file.read_into(memoryview(buffer), 5, what="its beginning")

    assert bytes(buffer) == bytes([5, 6, 7])


@pytest.mark.parametrize("size", [0, 50, 101])
def test_a_file_of_another_size_than_when_it_was_opened_has_changed(path: Path, size: int) -> None:
    with WeightFile(path) as file:
        os.truncate(path, size)

        with pytest.raises(ModelError, match=f"{path}: tensor 'a': the file changed while it was"):
            file.read(40, 60, what="tensor 'a'")


def test_a_file_cut_short_that_is_as_before_by_its_time_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightFile, "_size_and_time", lambda self: (100, 0))

    with WeightFile(path) as file:
        os.truncate(path, 50)
        assert file.read(0, 50, what="what is left") == bytes(range(50))
        with pytest.raises(ModelError, match="the file changed while it was read"):
            file.read(40, 60, what="what is not")


def test_a_file_written_to_has_changed_whatever_was_read(path: Path) -> None:
    with WeightFile(path) as file:
        with path.open("r+b") as other:
            other.write(b"\0")

        with pytest.raises(ModelError, match="the file changed while it was read"):
            file.read(50, 50, what="its end")


def test_a_file_is_read_on_when_its_name_is_another_ones_or_nobodys(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"new")

    with WeightFile(path) as file:
        new.rename(path)
        assert file.read(98, 2, what="its end") == bytes([98, 99])
        path.unlink()
        assert file.read(98, 2, what="its end") == bytes([98, 99])


def test_a_file_that_is_not_there_or_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing: cannot be read: No such file"):
        WeightFile(tmp_path / "nothing")
    with pytest.raises(ModelError, match=f"{tmp_path}: cannot be read: Is a directory"):
        WeightFile(tmp_path)


def test_a_fault_of_the_disk_is_an_error_with_what_was_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: WeightFile, buffer: memoryview, offset: int) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(WeightFile, "_fill", fail)

    with (
        WeightFile(path) as file,
        pytest.raises(ModelError, match=f"{path}: tensor 'a' cannot be read: Input/output error"),
    ):
        file.read(0, 10, what="tensor 'a'")
