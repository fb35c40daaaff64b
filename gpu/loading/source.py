"""What a model can be loaded from."""

from typing import Protocol

from callboard.gpu.loading.checkpoint import Checkpoint
from callboard.gpu.loading.config import ModelConfig


class ModelSource(Protocol):
    """A place that names a model: its configuration is read, its weights not yet."""

    @property
    def config(self) -> ModelConfig: ...

    def open(self) -> Checkpoint:
        """Open the weights; raises ModelError where they are missing or damaged."""
