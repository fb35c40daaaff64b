from pathlib import Path

import pytest
import torch

from callboard.gpu import device as device_module
from callboard.gpu.device import (
    choose_device,
    choose_dtype,
    describe_device,
    release_memory,
    resident_bytes,
)

CPU = torch.device("cpu")
MIB = 2**20


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert choose_device() == choose_device("cpu") == CPU


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert choose_device("auto") == torch.device("cuda", 0)


def test_a_gpu_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="'cuda:2' is not there: torch sees 2 CUDA devices"):
        choose_device("cuda:2")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError, match="torch sees 0 CUDA devices"):
        choose_device("cuda")


@pytest.mark.parametrize("name", ["gpu", "mps", "", "cuda:x"])
def test_a_device_of_no_known_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not one of auto, cpu, cuda, cuda:N"):
        choose_device(name)


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_is_half_precision_on_a_gpu(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or has_bf16

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)

    assert choose_dtype(torch.device("cuda", 0)) == dtype


def test_auto_is_float32_on_the_cpu_and_other_dtypes_are_named() -> None:
    assert choose_dtype(CPU) == torch.float32
    assert choose_dtype(CPU, "bfloat16") == torch.bfloat16
    with pytest.raises(
        ValueError, match="'int8' is not one of auto, float64, float32, float16, bfloat16"
    ):
        choose_dtype(CPU, "int8")


def test_the_cpu_is_described_with_the_memory_it_has() -> None:
    info = describe_device(CPU, torch.float32)

    assert info.name.startswith("CPU")
    assert 0 < info.available_bytes <= info.total_bytes


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", "50", (1000 * 1024, 600 * 1024)),
        ("409600", "102400", (409600, 307200)),
        ("409600", "500000", (409600, 0)),
    ],
)
def test_a_containers_limit_counts_where_it_is_less(
    limit: str,
    used: str,
    expected: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable:   600 kB\nHugePages_Total: 0\n"
    )
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    monkeypatch.setattr(device_module, "_PROC", tmp_path)
    monkeypatch.setattr(device_module, "_CGROUP", tmp_path)

    info = describe_device(CPU, torch.float32)

    assert (info.total_bytes, info.available_bytes) == expected


def test_memory_is_counted_while_held_and_given_back_when_dropped() -> None:
    release_memory(CPU)
    before = resident_bytes(CPU)

    tensor: torch.Tensor | None = torch.ones(64 * MIB // 4)
    held = resident_bytes(CPU)
    tensor = None
    release_memory(CPU)

    assert tensor is None
    assert held - before > 56 * MIB
    assert resident_bytes(CPU) - before < 8 * MIB


def test_small_tensors_below_one_still_held_are_given_back_too() -> None:
    release_memory(CPU)
    before = resident_bytes(CPU)

    tensors = [torch.ones(MIB // 64) for _ in range(1024)]  # 64 MiB of the heap
    last = tensors.pop()  # keeps the heap from shrinking by itself
    tensors.clear()
    release_memory(CPU)

    assert last[0] == 1
    assert resident_bytes(CPU) - before < 16 * MIB
