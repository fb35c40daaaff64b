"""Which kind of error a device's failure is: what to do about it depends on that.

A caller that knows no torch sees OutOfMemory, after which a smaller step may run; DeviceLost, after
which no call of this process does; or what was raised, where it is neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from callboard.messages.errors import DeviceLost, OutOfMemory

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""What torch says, in a plain RuntimeError, of memory the system, CUDA or cuBLAS did not have."""


@contextmanager
def typed_errors(device: torch.device) -> Iterator[None]:
    """Raise OutOfMemory or DeviceLost for what a device failed of, and anything else as it is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{device}: {_first_line(error)}") from error
        if device.type == "cuda" and not _responds(device):
            raise DeviceLost(f"{device}: {_first_line(error)}") from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the host or the device had not the memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in _OUT_OF_MEMORY)


def _responds(device: torch.device) -> bool:
    """Whether the context takes another call: after some errors it never does."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
