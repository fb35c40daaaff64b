"""Models with random weights, for tests: the same seed gives the same weights everywhere.

`random:tiny` is a model small enough for a test of the whole engine; `random:config.json` is any
Hugging Face configuration, without its weights. `#7` behind either is another seed than 0.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from callboard.gpu.loading.checkpoint import TensorInfo, expected_shapes
from callboard.gpu.loading.config import ModelConfig
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.huggingface import read_config_json
from callboard.gpu.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

_PRESETS = {
    "tiny": DecoderConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_sequence_length=2048,
    )
}


class RandomSource:
    """A configuration whose weights are drawn when they are read."""

    def __init__(self, spec: str, source: str) -> None:
        name, _, seed = spec.partition("#")
        if seed and not seed.isdecimal():
            raise ModelError(f"{source}: the seed behind '#' is {seed!r}, not a number")
        self._seed = int(seed or 0)
        self.config = _config(name, source)

    def open(self) -> "RandomCheckpoint":
        return RandomCheckpoint(self.config, self._seed)


def _config(name: str, source: str) -> ModelConfig:
    if name in _PRESETS:
        return ModelConfig(
            source=source,
            format="random",
            architecture=name,
            decoder=_PRESETS[name],
            eos_token_ids=(),
            bos_token_id=None,
        )
    if not Path(name).is_file():
        raise ModelError(
            f"{source}: {name!r} is neither a config.json nor one of {', '.join(_PRESETS)}"
        )
    return msgspec.structs.replace(read_config_json(Path(name), source), format="random")


class RandomCheckpoint:
    """Weights made up from their names and a seed; see `Checkpoint`."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.source = config.source
        self._seed = seed
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(config.source, name, shape, "F32", is_supported=True)
            for name, shape in expected_shapes(config.decoder)
        }

    def stored_name(self, name: str) -> str:
        return name

    def read_into(self, name: str, weight: "Tensor") -> None:
        """Draw norms around 1, biases around 0, matrices that keep the variance of their input."""
        import torch

        shape = self.tensors[name].shape
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), self._seed))
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            noise.div_(shape[1] ** 0.5)
        else:
            noise.mul_(0.1).add_(1.0 if name.endswith("norm.weight") else 0.0)
        weight.copy_(noise)
