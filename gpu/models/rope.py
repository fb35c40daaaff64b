"""Frequencies of rotary positions, with the scalings that stretch a model's context.

Letters: P pairs of a head's dimensions, half its size.
"""

import math

import torch
from torch import Tensor

from callboard.gpu.models.config import (
    DecoderConfig,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    YarnScaling,
)


def rope_frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """Return the inverse frequencies, float32 [P], and the magnitude of the rotation."""
    exponent_P = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency_P = 1.0 / config.rope_theta**exponent_P
    match config.rope_scaling:
        case None:
            return frequency_P, 1.0
        case LinearScaling(factor=factor):
            return frequency_P / factor, 1.0
        case Llama3Scaling() as scaling:
            return _scale_llama3(frequency_P, scaling), 1.0
        case YarnScaling() as scaling:
            return _scale_yarn(frequency_P, scaling, config.rope_theta), _magnitude(scaling)
        case FrequencyFactors(factors=factors):
            return frequency_P / torch.tensor(factors, dtype=torch.float32), 1.0


def _scale_llama3(frequency_P: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep what turns often over the trained length, stretch what turns seldom, blend between."""
    turns_P = scaling.original_max_position_embeddings * frequency_P / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_P = ((turns_P - low) / (high - low)).clamp(0.0, 1.0)
    return kept_P * frequency_P + (1 - kept_P) * frequency_P / scaling.factor


def _scale_yarn(frequency_P: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Like Llama 3's, but the blend is linear in the pair's number (Peng et al., 2023)."""
    head_dim = 2 * len(frequency_P)

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(scaling.beta_slow)), head_dim - 1)
    pair_P = torch.arange(len(frequency_P), dtype=torch.float32)
    stretched_P = ((pair_P - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return (1 - stretched_P) * frequency_P + stretched_P * frequency_P / scaling.factor


def _magnitude(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
