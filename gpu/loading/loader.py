"""Loads a model by what the user calls it: a GGUF file, a Hugging Face folder, or `random:`.

torch and gguf are imported when weights are loaded, not before.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from callboard.gpu.loading.checkpoint import check_tensors
from callboard.gpu.loading.config import ModelConfig
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.gguf import GgufSource
from callboard.gpu.loading.huggingface import HuggingFaceSource
from callboard.gpu.loading.random import RandomSource
from callboard.gpu.loading.source import ModelSource

if TYPE_CHECKING:
    import torch

    from callboard.gpu.attention.base import AttentionBackend
    from callboard.gpu.models.decoder import Decoder

_RANDOM = "random:"


@dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, and what loading it came to."""

    decoder: "Decoder"
    attention: "AttentionBackend"
    config: ModelConfig
    weights_bytes: int
    """What the weights take on the device."""
    unused_tensors: tuple[str, ...]
    """Tensors of the file that the decoder has no use for."""
    seconds: float


def read_config(source: str | Path) -> ModelConfig:
    """Read what a model says about itself, without its weights. Raises ModelError."""
    with _find(source) as found:
        return found.config


def check_model(source: str | Path) -> None:
    """Raise ModelError unless every weight a model needs is there in its shape; read none yet."""
    with _find(source) as found:
        check_tensors(found.config.decoder, found.open())


def load_model(
    source: str | Path,
    *,
    device: "torch.device",
    dtype: "torch.dtype",
    attention: str = "auto",
) -> LoadedModel:
    """Load a model's weights to the device, in the dtype to compute in.

    Args:
        source: a `.gguf` file, a folder with config.json and safetensors, or `random:` with "tiny"
            or the path of a config.json.
        device: where to compute.
        dtype: the weights' and the activations'.
        attention: the backend's name; see `callboard.gpu.attention.registry.choose_backend`.

    Raises ModelError, naming file and tensor, where the source is missing, foreign, damaged, of an
    architecture that is not supported, or at odds with its own configuration; all this before
    memory is taken; and where a file changes while it is read. Raises ValueError where the
    attention backend cannot be used.
    """
    from callboard.gpu.attention.registry import choose_backend
    from callboard.gpu.loading.assemble import Assembler

    start = time.monotonic()
    backend = choose_backend(device, dtype, attention)
    with _find(source) as found:
        config, checkpoint = found.config, found.open()
        unused_tensors = check_tensors(config.decoder, checkpoint)
        assembler = Assembler(config.decoder, checkpoint, backend, device=device, dtype=dtype)
        decoder = assembler.decoder()
    return LoadedModel(
        decoder=decoder,
        attention=backend,
        config=config,
        weights_bytes=assembler.weights_bytes,
        unused_tensors=unused_tensors,
        seconds=time.monotonic() - start,
    )


@contextmanager
def _find(source: str | Path) -> Iterator[ModelSource]:
    """Yield what the user named; its files are open for as long."""
    with ExitStack() as files:
        yield _source(source, files)


def _source(source: str | Path, files: ExitStack) -> ModelSource:
    name = str(source)
    if name.startswith(_RANDOM):
        return RandomSource(name.removeprefix(_RANDOM), name)
    path = Path(source)
    if path.is_dir():
        return HuggingFaceSource(path, name, files)
    if not path.exists():
        raise ModelError(f"{name}: no such file or folder")
    return GgufSource(path, name, files)
