"""Headers of safetensors files: read as the package reads them, and refused as it refuses them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file

from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.safetensors_file import SafetensorsTensor, read_safetensors
from callboard.gpu.loading.weight_file import WeightFile

DATA = b"\0" * 12


def read(path: Path) -> dict[str, SafetensorsTensor]:
    with WeightFile(path) as file:
        return read_safetensors(file)


def read_by_the_package(content: bytes) -> set[str]:
    return {name for name, _ in deserialize(content)}  # type: ignore[no-untyped-call]  # it is not


def file_of(header: bytes | dict[str, Any], data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: int = 0, end: int = 12, **changes: Any) -> dict[str, Any]:
    elements = (end - begin) // 4
    return {"dtype": "F32", "shape": [elements], "data_offsets": [begin, end]} | changes


def test_every_tensor_is_described_as_it_lies_in_the_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(4).bfloat16(),
        "scalar": torch.tensor(1.5),
        "empty": torch.ones(0, 4),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "complex": torch.ones(1, dtype=torch.complex64),
        "eight": torch.ones(2).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    content = path.read_bytes()

    stored = read(path)

    assert {name: tensor.shape for name, tensor in stored.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert (kinds["a"], kinds["b"], kinds["bytes"]) == ("F32", "BF16", "U8")
    for name, tensor in tensors.items():
        lies = stored[name]
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[lies.offset : lies.offset + lies.num_bytes] == expected


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(more="than is known")},
        {"__metadata__": None, "a": entry()},
        {"a": entry(dtype="F4", shape=[4, 6])},
        {"b": entry(4), "a": entry(0, 4), "none": entry(4, 4)},
        b'  {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}  \n',
    ],
)
def test_what_the_package_reads_is_read(header: bytes | dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(header))

    assert set(read(path)) == read_by_the_package(path.read_bytes())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it has 0 bytes"),
        (b"\0" * 7, "it has 7 bytes"),
        (struct.pack("<Q", 0), "its header: "),
        (struct.pack("<Q", 3) + b"{}", "its header would be 3 bytes long, where 2 follow"),
        (struct.pack("<Q", 2**63) + b"{}", "its header would be 9223372036854775808 bytes"),
        (file_of(b"[]"), "its header: Expected `object`, got `array`"),
        (file_of(b"{"), "its header: "),
        (file_of(b'{"a": 1'), "its header: "),
        (file_of(b'{"a\xff": {}}'), "its header: "),
        (file_of(b'{"a": ' + b"[" * 100_000), "its header: maximum recursion"),
        (file_of({"__metadata__": {"a": 1}, "a": entry()}), "its header: Expected `str`"),
        (file_of({"a": None}), "tensor 'a': Expected `object`, got `null`"),
        (file_of({"a": {"dtype": "F32", "shape": [3]}}), "tensor 'a': .*missing.*`data_offsets`"),
        (file_of({"a": entry(shape=[-3])}), r"tensor 'a': .*>= 0 - at `\$.shape\[0\]`"),
        (file_of({"a": entry(shape=[3.0])}), "tensor 'a': Expected `int`, got `float`"),
        (file_of({"a": entry(data_offsets=[0, 4, 12])}), "tensor 'a': Expected `array` of length"),
        (file_of({"a": entry(dtype="F33")}), "tensor 'a' is of the unknown dtype 'F33'"),
        (file_of({"a": entry(shape=[4])}), r"tensor 'a' lies at 0 to 12, .* of shape \(4,\)"),
        (file_of({"a": entry(shape=[2**40, 2**40])}), "tensor 'a' lies at 0 to 12, which is not"),
        (file_of({"a": entry(dtype="F4", shape=[23])}), "tensor 'a' lies at 0 to 12"),
        (file_of({"a": entry(data_offsets=[12, 0])}), "tensor 'a' lies at 12 to 0"),
        (file_of({}), "its tensors end at byte 10 of 22"),
        (file_of({"a": entry()}, DATA[1:]), "its tensors end at byte .*"),
        (file_of({"a": entry()}, DATA + b"\0"), "its tensors end at byte .*"),
        (file_of({"a": entry(4)}), "tensor 'a' begins at byte .*, and the one before it ends at"),
        (file_of({"a": entry(0, 4), "b": entry(8)}), "tensor 'b' begins at byte"),
        (file_of({"a": entry(0, 8), "b": entry(4)}), "tensor 'b' begins at byte"),
        (file_of({"a": entry(), "b": entry()}), "tensor 'b' begins at byte"),
    ],
)
def test_what_the_package_refuses_is_refused_with_the_file_and_the_fault(
    content: bytes, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=rf"^{path}: not a whole safetensors file: {fault}"):
        read(path)
    with pytest.raises(SafetensorError):
        read_by_the_package(content)


def test_a_header_with_a_byte_changed_is_read_or_refused_as_by_the_package(tmp_path: Path) -> None:
    content = save({"a": torch.ones(2, 3), "b": torch.ones(4)}, metadata={"format": "pt"})
    header = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(0)
    path = tmp_path / "changed.safetensors"
    refused = 0

    for position in generator.integers(0, header, 500):
        changed = bytearray(content)
        changed[position] ^= int(generator.integers(1, 256))
        path.write_bytes(changed)
        try:
            expected = read_by_the_package(bytes(changed))
        except SafetensorError:
            refused += 1
            with pytest.raises(ModelError):
                read(path)
        else:
            assert set(read(path)) == expected

    assert 250 < refused < 500
