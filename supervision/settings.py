"""What an operator can set: one struct, its defaults with units, from a TOML file and flags."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from callboard.messages.errors import ConfigError

DEFAULT_ENDPOINT = "tcp://127.0.0.1:7500"
ROUTINGS = ("prefix_aware", "least_loaded", "round_robin")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

MAX_PORT = 65535

_ENDPOINT = re.compile(r"tcp://.+:(?P<port>\d{1,5}|\*)|ipc://.+")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything `callboard serve --config` and `open_engine` accept."""

    model: str = ""  # a .gguf file, a Hugging Face folder, random:PRESET; "" is the default model
    listen: str = DEFAULT_ENDPOINT
    keys: str = ""  # the folder of the server's keys, as `callboard keys` makes it; "" is none
    insecure: bool = False  # listen at any address without keys
    replicas: int = 1  # of its own; others join
    routing: str = "prefix_aware"  # how a replica is chosen: or least_loaded, round_robin
    prefix_weight: float = 0.2  # of a known prefix against load, where routing is prefix_aware
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: str = "auto"  # auto, float64, float32, float16, bfloat16
    attention: str = "auto"  # auto, sdpa, flash
    threads: int = 0  # torch threads a replica; 0 is torch's own choice
    kv_cache_gb: float = 0.5  # GiB of KV cache a replica
    block_tokens: int = 0  # tokens a KV block; 0 is the backend's choice
    max_rows: int = 64  # requests that run at once
    max_step_tokens: int = 512  # tokens a forward pass may feed
    prefill_chunk_tokens: int = 0  # longest piece of a prompt a step; 0 is what there is room for
    prefix_caching: bool = True  # share the KV blocks of equal beginnings of prompts
    paused_limit_blocks: int = -1  # KV blocks that waiting rows may hold; -1 is all of them
    pipeline_depth: int = 1  # steps given to the device before the first of them is done, 1 or 2
    batch_invariant: bool = False  # the same bits whatever the batch, many times slower
    max_model_len: int = 0  # tokens of a sequence, prompt and output; 0 is the model's own limit
    start_timeout_s: float = 600.0
    step_timeout_s: float = 600.0  # longest forward pass; then its device is given up; 0 is never
    loop_timeout_s: float = 30.0  # longest standstill of a process; then it is ended; 0 is never
    max_restarts: int = 10  # of replica processes, counted until one is well for:
    restart_period_s: float = 60.0
    drain_s: float = 30.0  # what open requests get when a signal ends the server
    log_level: str = "warning"
    log_json: bool = False
    journal: str = ""  # folder for journals of all messages; "" keeps none


def is_endpoint(text: str) -> bool:
    """Return whether a text says where to listen or connect."""
    found = _ENDPOINT.fullmatch(text)
    if found is None:
        return False
    port = found["port"]
    return port is None or port == "*" or int(port) <= MAX_PORT


def load_settings(path: Path | None, *, base: Settings | None = None, **overrides: Any) -> Settings:
    """Return the settings of a TOML file with overrides that are not None put on top.

    What neither says is as in `base`, or as it is by default. Raises ConfigError naming the key,
    and the file where it comes from there.
    """
    known = {} if base is None else msgspec.structs.asdict(base)
    in_file = {} if path is None else _read(path)
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        settings = _convert({**known, **in_file, **given})
        _check(settings)
    except _WrongSetting as error:
        is_in_file = error.key in in_file and error.key not in given
        raise ConfigError(f"{path}: {error}" if is_in_file else str(error)) from error
    return settings


class _WrongSetting(Exception):
    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} {reason}")
        self.key = key


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _convert(values: dict[str, Any]) -> Settings:
    known = Settings.__struct_fields__
    for key in values:
        if key not in known:
            raise _WrongSetting(key, f"is no setting; there are {', '.join(known)}")
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise _WrongSetting(place.rstrip("`"), f"is wrong: {reason}") from error


def _check(settings: Settings) -> None:
    _check_ranges(settings)
    if settings.max_step_tokens < settings.max_rows:
        raise _WrongSetting(
            "max_step_tokens",
            f"is {settings.max_step_tokens}, and must be at least max_rows ({settings.max_rows}), "
            "since every running request takes a token a step",
        )
    if settings.log_level.lower() not in LOG_LEVELS:
        raise _WrongSetting(
            "log_level", f"is {settings.log_level!r}, and must be one of {', '.join(LOG_LEVELS)}"
        )
    if settings.routing not in ROUTINGS:
        raise _WrongSetting(
            "routing", f"is {settings.routing!r}, and must be one of {', '.join(ROUTINGS)}"
        )
    if not is_endpoint(settings.listen):
        raise _WrongSetting(
            "listen",
            f"is {settings.listen!r}, and must be tcp://HOST:PORT, with a port of at most "
            f"{MAX_PORT}, or ipc://PATH",
        )


def _check_ranges(settings: Settings) -> None:
    for name, low, high in (
        ("replicas", 0, 64),
        ("prefix_weight", 0, 1),
        ("threads", 0, 1024),
        ("kv_cache_gb", 1e-6, 4096),
        ("block_tokens", 0, 4096),
        ("max_rows", 1, 65536),
        ("max_step_tokens", 1, 2**20),
        ("prefill_chunk_tokens", 0, 2**20),
        ("max_model_len", 0, 2**24),
        ("paused_limit_blocks", -1, 2**31 - 1),
        ("pipeline_depth", 1, 2),
        ("start_timeout_s", 1e-3, 1e6),
        ("step_timeout_s", 0, 1e6),
        ("loop_timeout_s", 0, 1e6),
        ("max_restarts", 0, 10**6),
        ("restart_period_s", 0, 1e6),
        ("drain_s", 0, 1e6),
    ):
        value = getattr(settings, name)
        if not low <= value <= high:
            raise _WrongSetting(name, f"is {value}, and must be {low} to {high}")
