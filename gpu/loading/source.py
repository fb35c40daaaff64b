"""What a model can be loaded from."""

from typing import Protocol

from callboard.gpu.loading.checkpoint import Checkpoint
from callboard.gpu.loading.config import ModelConfig


class ModelSource(Protocol):
    """A place that names a model: its configuration is read, its weights not yet.

    Made with an ExitStack where it has files: those that it opens, for its checkpoint too, are held
    open until that is closed.
    """

    @property
    def config(self) -> ModelConfig: ...

    def open(self) -> Checkpoint:
        """Open the weights; raises ModelError where they are missing or damaged."""
