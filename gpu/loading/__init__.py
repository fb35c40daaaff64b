"""Models from files: `load_model` for all of one, `read_config` for what it says about itself."""

from callboard.gpu.loading.config import ModelConfig
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.loader import LoadedModel, check_model, load_model, read_config

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "check_model",
    "load_model",
    "read_config",
]
