"""A replica's parts made of a real model. The only file of this folder that imports torch."""

from functools import partial
from pathlib import Path

from callboard.gpu.attention.registry import choose_backend
from callboard.gpu.device import choose_device, choose_dtype
from callboard.gpu.loading.loader import read_config
from callboard.gpu.loading.tokenizer import TextTokenizer, TokenizerError, load_tokenizer
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.gpu.text import TextStream
from callboard.messages.errors import ConfigError
from callboard.messages.sampling import SamplingParams
from callboard.supervision.app import ReplicaParts
from callboard.supervision.default_model import default_model
from callboard.supervision.settings import Settings

CPU_BLOCK_TOKENS = 64
"""A compromise: attention over longer blocks is a little faster, over shorter ones wastes less."""


def replica_parts(settings: Settings) -> ReplicaParts:
    """Read what a model says of itself and its tokenizer; its weights are the executor's affair.

    Raises ConfigError naming the file that is missing or wrong.
    """
    source = settings.model or str(default_model())
    try:
        config = read_config(source)
        tokenizer = _tokenizer(source)
        runner_config = _runner_config(settings, source)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    longest = settings.max_model_len or config.decoder.max_sequence_length
    eos = set(config.eos_token_ids) | (set() if tokenizer is None else tokenizer.eos_token_ids)
    return ReplicaParts(
        make_runner=lambda: ModelRunner(runner_config),
        codec=tokenizer,
        text_for=None if tokenizer is None else partial(_text_for, tokenizer),
        vocab_size=config.decoder.vocab_size,
        eos_token_ids=tuple(sorted(eos)),
        max_prompt_chars=None if tokenizer is None else longest * tokenizer.longest_token,
    )


def _tokenizer(source: str) -> TextTokenizer | None:
    """Load the tokenizer; a model for tests, or a folder without one, takes token ids only."""
    path = Path(source)
    if source.startswith("random:") or (path.is_dir() and not (path / "tokenizer.json").exists()):
        return None
    try:
        return load_tokenizer(path)
    except TokenizerError as error:
        raise ConfigError(str(error)) from error


def _runner_config(settings: Settings, source: str) -> RunnerConfig:
    device = choose_device(settings.device)
    backend = choose_backend(device, choose_dtype(device, settings.dtype), settings.attention)
    return RunnerConfig(
        model=source,
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        block_tokens=settings.block_tokens or max(CPU_BLOCK_TOKENS, backend.block_multiple),
        kv_cache_gb=settings.kv_cache_gb,
        max_rows=settings.max_rows,
        max_tokens=settings.max_step_tokens,
        max_model_len=settings.max_model_len or None,
        threads=settings.threads or None,
        batch_invariant=settings.batch_invariant,
    )


def _text_for(tokenizer: TextTokenizer, params: SamplingParams) -> TextStream:
    return TextStream(
        tokenizer,
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )
