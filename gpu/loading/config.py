"""What a model says about itself besides its weights."""

from typing import Literal

import msgspec

from callboard.gpu.models.config import DecoderConfig


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape and the token ids that end or begin its text."""

    source: str
    """As the user named it."""
    format: Literal["gguf", "huggingface", "random"]
    architecture: str
    """As the source names it: "llama", "LlamaForCausalLM"."""
    decoder: DecoderConfig
    eos_token_ids: tuple[int, ...]
    """Every id that ends a generation, sorted; empty where the source names none."""
    bos_token_id: int | None
