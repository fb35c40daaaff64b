"""The shape of a decoder: everything about a model but its weights."""

from typing import Annotated

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the ways to stretch rotary positions beyond the length a model was trained on."""


class LinearScaling(RopeScaling, frozen=True, tag="linear"):
    """Divide every frequency by factor (position interpolation)."""

    factor: PositiveFloat


class Llama3Scaling(RopeScaling, frozen=True, tag="llama3"):
    """Divide low frequencies by factor, keep high ones, and blend between (Llama 3.1)."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor"
                f" {self.high_freq_factor}"
            )


class YarnScaling(RopeScaling, frozen=True, tag="yarn"):
    """Blend by the turns a frequency makes over the trained length, and rescale attention (YaRN).

    `attention_factor` is worked out from `factor` where it is not given.
    """

    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0


class FrequencyFactors(RopeScaling, frozen=True, tag="factors"):
    """Divide frequency i by factors[i]: what a GGUF file stores of any of the above."""

    factors: tuple[float, ...]


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes and variants of a Llama-family decoder. Raises ValueError where they do not fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequence_length: int
    """Tokens of prompt and output together; see the loaders for where it is cut."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the projection after attention."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm over each head of queries and keys before their rotation."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_sequence_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta is {self.rope_theta}, and must be more than 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions need pairs")
