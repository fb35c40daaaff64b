"""Which device the engine runs on, in which dtype, and how much memory is there, free and held.

There are two kinds, "cpu" and "cuda". Memory held is the process's resident set on the CPU and what
torch's allocator has reserved on a GPU: what SUSPEND frees is measured with it. Sizes are bytes.
The CPU's sizes are read from Linux's /proc.
"""

import ctypes
import gc
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceInfo:
    """A device as chosen at start, for logs and for sizing the KV cache."""

    device: torch.device
    dtype: torch.dtype
    name: str
    total_bytes: int
    available_bytes: int


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; "auto" takes a GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    return _check_cuda(name, device.index or 0)


def _check_cuda(name: str, index: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ValueError(f"device {name!r} is not there: torch sees {count} CUDA devices")
    return torch.device("cuda", index)


def choose_dtype(device: torch.device, name: str = "auto") -> torch.dtype:
    """Return the dtype to compute in; "auto" is float32 on the CPU and half precision on a GPU."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        # Emulated, as before compute capability 8, it would be slower than float32.
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bfloat16 else torch.float16
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for what half precision is too coarse for: float32, or float64 if asked."""
    return torch.promote_types(dtype, torch.float32)


def describe_device(device: torch.device, dtype: torch.dtype) -> DeviceInfo:
    """Look up the device's name and memory."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        return DeviceInfo(device, dtype, torch.cuda.get_device_name(device), total, available)
    total, available = _host_memory()
    name = f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    return DeviceInfo(device, dtype, name, total, available)


def resident_bytes(device: torch.device) -> int:
    """Measure the memory this process holds on the device now."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    resident_pages = int((_PROC / "self/statm").read_text().split()[1])
    return resident_pages * mmap.PAGESIZE


def wait_for(device: torch.device) -> None:
    """Return once the device has done all it was given; calls on the CPU do their work at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give memory of dropped tensors back to the OS or driver, where it can be seen to be free.

    That of the host which was pinned for them, too.
    """
    gc.collect()
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        _empty_host_cache()
    _trim_heap()


def _empty_host_cache() -> None:
    """Return pinned host memory that nobody uses to the OS; torch has the call since 2.13."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()


def _trim_heap() -> None:
    """Return free heap pages to the OS; only glibc keeps them and only glibc has the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _host_memory() -> tuple[int, int]:
    """Return (total, available) of the machine, or of the container's limit where that is less."""
    lines = (line.split() for line in (_PROC / "meminfo").read_text().splitlines())
    kibibytes = {line[0].rstrip(":"): int(line[1]) for line in lines}
    total, available = kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024
    limit = _cgroup_bytes("memory.max")
    used = _cgroup_bytes("memory.current")
    if limit is None or used is None:
        return total, available
    return min(total, limit), min(available, max(limit - used, 0))


def _cgroup_bytes(name: str) -> int | None:
    """Read one number of the memory controller; None where there is no limit or no cgroup v2."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
