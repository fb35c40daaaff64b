"""Which kind a device's failure is."""

import pytest
import torch

from callboard.gpu.device_errors import typed_errors
from callboard.messages.errors import DeviceLost, OutOfMemory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def fail(device: torch.device, error: Exception) -> None:
    with typed_errors(device):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_want_of_memory_has_an_error_of_its_own(error: Exception) -> None:
    with pytest.raises(OutOfMemory) as caught:
        fail(CPU, error)

    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_memory_that_the_system_does_not_have_is_want_of_memory() -> None:
    with pytest.raises(OutOfMemory, match="cpu: "), typed_errors(CPU):
        torch.empty(2**60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("no")])
def test_any_other_error_comes_out_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        fail(CPU, error)

    assert caught.value is error


@pytest.mark.parametrize(("responds", "kind"), [(True, RuntimeError), (False, DeviceLost)])
def test_a_device_that_takes_no_call_any_more_is_lost(
    monkeypatch: pytest.MonkeyPatch, responds: bool, kind: type[Exception]
) -> None:
    def synchronize(device: torch.device) -> None:
        if not responds:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    with pytest.raises(kind):
        fail(CUDA, RuntimeError("CUDA error: an illegal memory access was encountered"))
