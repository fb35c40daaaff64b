import sys
from types import ModuleType

import pytest
import torch

from callboard.gpu.attention import flash
from callboard.gpu.attention.registry import choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_the_cpu_gets_sdpa() -> None:
    backend = choose_backend(CPU, torch.float32)

    assert (backend.name, backend.block_multiple) == ("sdpa", 1)


def test_a_gpu_without_flash_attn_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "available", lambda: False)

    assert choose_backend(CUDA, torch.bfloat16).name == "sdpa"


def test_a_gpu_in_float32_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "available", lambda: True)

    assert choose_backend(CUDA, torch.float32).name == "sdpa"


@pytest.mark.parametrize("name", ["auto", "flash"])
def test_a_gpu_with_flash_attn_gets_flash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))

    assert choose_backend(CUDA, torch.bfloat16, name).name == "flash"


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fast' is not one of auto, flash, sdpa"):
        choose_backend(CPU, torch.float32, "fast")


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.float16, "needs a CUDA device, not cpu"),
        (CUDA, torch.float32, "computes in float16 or bfloat16, not float32"),
        (CUDA, torch.float16, "flash-attn package or a GPU of compute capability 8.0 is missing"),
    ],
)
def test_flash_where_it_cannot_run_is_refused_with_the_reason(
    device: torch.device, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "available", lambda: False)

    with pytest.raises(ValueError, match=reason):
        choose_backend(device, dtype, "flash")
