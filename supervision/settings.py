"""What an operator can set: one struct, its defaults with units, from a TOML file and flags."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from callboard.messages.errors import ConfigError

MIB = 2**20

DEFAULT_ENDPOINT = "tcp://127.0.0.1:7500"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `callboard serve --config` and `open_engine` accept."""

    model: str = ""  # a .gguf file, a Hugging Face folder, random:PRESET; "" is the default model
    listen: str = DEFAULT_ENDPOINT
    replicas: int = 1
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: str = "auto"  # auto, float32, float16, bfloat16
    attention: str = "auto"  # auto, sdpa, flash
    threads: int = 0  # torch threads a replica; 0 is torch's own choice
    kv_cache_gb: float = 0.5  # GiB of KV cache a replica
    block_tokens: int = 0  # tokens a KV block; 0 is the backend's choice
    max_rows: int = 64  # requests that run at once
    max_step_tokens: int = 512  # tokens a forward pass may feed
    prefill_chunk_tokens: int = (
        0  # longest piece of a prompt a step; 0 is what the step has room for
    )
    max_model_len: int = 0  # tokens of a sequence, prompt and output; 0 is the model's own limit
    start_timeout_s: float = 600.0
    log_level: str = "warning"
    log_json: bool = False


def load_settings(path: Path | None, **overrides: Any) -> Settings:
    """Return the settings of a TOML file with overrides that are not None put on top.

    Raises ConfigError naming the file and the key.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = _read(path)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'settings'}: {error}") from error
    _check(settings)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _check(settings: Settings) -> None:
    for name, low, high in (
        ("replicas", 1, 64),
        ("threads", 0, 1024),
        ("kv_cache_gb", 1e-6, 4096),
        ("block_tokens", 0, 4096),
        ("max_rows", 1, 65536),
        ("max_step_tokens", 1, 2**20),
        ("prefill_chunk_tokens", 0, 2**20),
        ("max_model_len", 0, 2**24),
        ("start_timeout_s", 1e-3, 1e6),
    ):
        value = getattr(settings, name)
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}, and must be {low} to {high}")
    if settings.max_step_tokens < settings.max_rows:
        raise ConfigError(
            f"max_step_tokens is {settings.max_step_tokens}, and must be at least max_rows "
            f"({settings.max_rows}), since every running request takes a token a step"
        )
