"""The attention backends by name, and which of them a device can use."""

import torch

from callboard.gpu.attention import flash
from callboard.gpu.attention.base import AttentionBackend
from callboard.gpu.attention.sdpa import SdpaAttention

BACKENDS = ("flash", "sdpa")


def choose_backend(
    device: torch.device, dtype: torch.dtype, name: str = "auto"
) -> AttentionBackend:
    """Return the named backend; "auto" takes the fastest that this device and dtype can use.

    Raises ValueError where the name is unknown, or the backend cannot be used here, saying why.
    """
    if name == "auto":
        name = "sdpa" if _why_no_flash(device, dtype) else "flash"
    if name == "sdpa":
        return SdpaAttention()
    if name == "flash":
        if reason := _why_no_flash(device, dtype):
            raise ValueError(f"attention backend 'flash' cannot be used: {reason}")
        return flash.FlashAttention()
    raise ValueError(f"attention backend {name!r} is not one of auto, {', '.join(BACKENDS)}")


def _why_no_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not flash.available():
        return "the flash-attn package or a GPU of compute capability 8.0 is missing"
    return None
