"""The small layers a decoder is made of.

Letters: T tokens, D model width, F inner width of the MLP, N heads, H head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from callboard.gpu.device import at_least_float32
from callboard.gpu.linear import Linear


class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight = weight_D
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class HeadNorm:
    """RMSNorm over the size of each head, with a weight for each head: queries and keys at once."""

    def __init__(self, weight_NH: Tensor, eps: float) -> None:
        self._weight_NH = weight_NH
        self._eps = eps

    def __call__(self, x_TNH: Tensor) -> Tensor:
        return F.rms_norm(x_TNH, self._weight_NH.shape[-1:], eps=self._eps) * self._weight_NH


class SwiGLU:
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self._gate_up(x_TD).chunk(2, dim=-1)
        return self._down(F.silu(gate_TF).mul_(up_TF))


class Rotation(NamedTuple):
    """Cosines and signed sines of a step's positions, each [T, 1, H], for `rotate`."""

    cos: Tensor
    signed_sin: Tensor


class RotaryEmbedding:
    """Rotates pairs (x[i], x[i + H/2]) by position * frequency[i] (Su et al., 2021).

    Args:
        inverse_frequencies: [H / 2], float32, on the device.
        magnitude: multiplies sine and cosine; 1 but for YaRN.
    """

    def __init__(self, inverse_frequencies: Tensor, magnitude: float) -> None:
        self._inverse_frequencies = inverse_frequencies
        self._magnitude = magnitude

    def at(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Work out the rotation of each position: in float32 at least, then rounded to dtype."""
        exact = at_least_float32(dtype)
        angle_TH = positions_T[:, None].to(exact) * self._inverse_frequencies.to(exact)
        cos_TH = angle_TH.cos().mul_(self._magnitude)
        sin_TH = angle_TH.sin().mul_(self._magnitude)
        return Rotation(
            cos=torch.cat((cos_TH, cos_TH), dim=-1).unsqueeze(1).to(dtype),
            signed_sin=torch.cat((-sin_TH, sin_TH), dim=-1).unsqueeze(1).to(dtype),
        )


def rotate(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Apply a rotation to queries or keys."""
    swapped_TNH = x_TNH.roll(x_TNH.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_TNH * rotation.cos, swapped_TNH, rotation.signed_sin)
