"""Runs a model step by step: weights, KV cache and rows on one device, behind a few plain calls.

All methods but the properties and `describe` are to be called from one thread, the device's own:
torch keeps its inference mode and its OpenMP pool per thread. No call here waits for anything but
the device.

Letters: T tokens of a step, S rows that sample in it, D model width, V vocabulary.
"""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.context import DynamicContext, StepOutcome
from callboard.gpu.device import (
    choose_device,
    choose_dtype,
    release_memory,
    resident_bytes,
    wait_for,
)
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, load_model, read_config
from callboard.gpu.memory import block_bytes, blocks_in, format_bytes
from callboard.gpu.models.config import DecoderConfig
from callboard.gpu.sampling import sample, top_logprobs
from callboard.gpu.step_inputs import StepInputs
from callboard.messages.errors import CallboardError, ConfigError
from callboard.messages.steps import DeviceReady, RowFailure, RowId, RunStep, StepDone

TopLogprobs = tuple[tuple[int, float], ...]

_NO_TOKEN = "no token can be chosen: the logits are not numbers, or the request bans every token"


class NotReady(CallboardError):
    """The weights or the KV cache are not there; nothing was changed."""


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner loads and how much it may take.

    The KV cache is sized by `num_blocks` (the dummy included) or by `kv_cache_gb` (GiB), one of
    them. max_model_len None takes the model's own, threads None leaves torch's choice.
    """

    model: str  # see `load_model`
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_tokens: int = 64
    num_blocks: int | None = None
    kv_cache_gb: float | None = None
    max_rows: int = 256
    max_tokens: int = 512  # of one step
    max_model_len: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if (self.num_blocks is None) == (self.kv_cache_gb is None):
            raise ConfigError(
                f"num_blocks is {self.num_blocks} and kv_cache_gb is {self.kv_cache_gb}, and one"
                " of them must be given"
            )
        for name in ("block_tokens", "max_rows", "max_tokens", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, and must be at least 1")


class ModelRunner:
    """The device's side of an executor: `load` and `allocate` once, then `execute` step by step.

    `free_kv` and `free_weights` give memory back to the system; `allocate` and `load` take it
    again. Each of the four does nothing where it is done already.
    """

    def __init__(self, config: RunnerConfig) -> None:
        """Read what the model says of itself, so that `room` is known before anything is loaded.

        Raises ModelError where it is no model, ConfigError for a setting that does not fit it.
        """
        self._config = config
        self._device = choose_device(config.device)
        self._dtype = choose_dtype(self._device, config.dtype)
        self._model: LoadedModel | None = None
        self._kv_cache: KVCache | None = None
        self._context: DynamicContext | None = None
        decoder = read_config(config.model).decoder
        self.num_blocks = _num_blocks(config, decoder, self._dtype)
        """Blocks of the KV cache, the dummy included."""
        self.max_model_len = _max_model_len(config, decoder)
        """Most tokens of a sequence, prompt and output."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache; 0 while it is freed."""
        return self._kv_cache.bytes if self._kv_cache else 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights; 0 while they are freed."""
        return self._model.weights_bytes if self._model else 0

    @property
    def num_rows(self) -> int:
        """Rows in the context, waiting ones included."""
        return self._context.num_rows if self._context else 0

    def room(self) -> DeviceReady:
        """Say what fits: blocks to hand out, rows, tokens of a step and of a sequence."""
        return DeviceReady(
            block_tokens=self._config.block_tokens,
            num_blocks=self.num_blocks - 1,
            max_rows=self._config.max_rows,
            max_step_tokens=self._config.max_tokens,
            max_model_len=self.max_model_len,
        )

    def describe(self) -> dict[str, int | float | str]:
        """Return what an operator wants to know: where it runs, with what, and what it holds."""
        return {
            "model": self._config.model,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "attention": self._model.attention.name if self._model else self._config.attention,
            "threads": self._config.threads or torch.get_num_threads(),
            "block_tokens": self._config.block_tokens,
            "num_blocks": self.num_blocks,
            "max_model_len": self.max_model_len,
            "rows": self.num_rows,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
        }

    def load(self) -> None:
        """Load the weights.

        Raises ModelError where they are no model, ConfigError for a setting that does not fit them.
        """
        if self._model is not None:
            return
        if self._config.threads is not None:
            torch.set_num_threads(self._config.threads)
        with torch.inference_mode():
            model = load_model(
                self._config.model,
                device=self._device,
                dtype=self._dtype,
                attention=self._config.attention,
            )
        self._check_block_multiple(model)
        self._model = model

    def allocate(self) -> None:
        """Take the KV cache's memory and begin with no rows; the model must have been loaded."""
        if self._kv_cache is not None:
            return
        decoder = self._loaded().config.decoder
        with torch.inference_mode():
            self._kv_cache = KVCache(
                num_layers=decoder.num_layers,
                num_blocks=self.num_blocks,
                block_tokens=self._config.block_tokens,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.head_dim,
                dtype=self._dtype,
                device=self._device,
            )
        self._context = DynamicContext(
            max_rows=self._config.max_rows,
            max_tokens=self._config.max_tokens,
            max_model_len=self.max_model_len,
            block_tokens=self._config.block_tokens,
            num_blocks=self.num_blocks,
            device=self._device,
        )

    def execute(self, step: RunStep) -> StepDone:
        """Take in what the step brings and run one forward pass over every row that can run.

        A row whose logits are not numbers fails alone. Raises what the context or the device
        raises; rows are then as good as lost, and are to be dropped.
        """
        start = time.perf_counter()
        context = self._ready_context()
        _take_in(step, context)
        inputs = context.begin_step()
        if inputs is None:
            return StepDone(
                step=step.step, rows=(), token_ids=b"", seconds=time.perf_counter() - start
            )
        with torch.inference_mode():
            sampled = _sample(self._logits(inputs), context)
        wait_for(self._device)  # where no row sampled, nothing was read back and it still computes
        outcome = context.finish_step(sampled.token_ids_S, sampled.failed_S)
        return _report(step, inputs, sampled, outcome, start)

    def drop(self, rows: Collection[RowId]) -> None:
        """Forget rows; ids that are not here are ignored."""
        if self._context is not None:
            self._context.drop(rows)

    def free_kv(self) -> int:
        """Give the KV cache's memory back and forget all rows; return the bytes as measured."""
        if self._kv_cache is None:
            return 0
        before = resident_bytes(self._device)
        self._kv_cache.free()
        self._kv_cache = None
        self._context = None
        release_memory(self._device)
        return before - resident_bytes(self._device)

    def free_weights(self) -> int:
        """Give the weights' memory back; return the bytes as measured."""
        if self._model is None:
            return 0
        before = resident_bytes(self._device)
        self._model = None
        release_memory(self._device)
        return before - resident_bytes(self._device)

    def _logits(self, inputs: StepInputs) -> Tensor:
        """Return the logits of the rows that sample, float32 [S, V]."""
        decoder = self._loaded().decoder
        assert self._kv_cache is not None
        hidden_TD = decoder.forward(inputs.input_ids_T, inputs.metadata, self._kv_cache)
        return decoder.logits(hidden_TD[inputs.last_token_indices_S])

    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise NotReady("the weights are not loaded: call load first")
        return self._model

    def _ready_context(self) -> DynamicContext:
        self._loaded()
        if self._context is None:
            raise NotReady("the KV cache is not allocated: call allocate first")
        return self._context

    def _check_block_multiple(self, model: LoadedModel) -> None:
        multiple = model.attention.block_multiple
        if self._config.block_tokens % multiple:
            raise ConfigError(
                f"block_tokens is {self._config.block_tokens}, and the attention backend"
                f" {model.attention.name} needs a multiple of {multiple}"
            )


def _num_blocks(config: RunnerConfig, decoder: DecoderConfig, dtype: torch.dtype) -> int:
    size = block_bytes(
        num_layers=decoder.num_layers,
        block_tokens=config.block_tokens,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        itemsize=dtype.itemsize,
    )
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = blocks_in(config.kv_cache_gb or 0.0, size)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache has room for {num_blocks} blocks of {format_bytes(size)}, and needs"
            " at least 2: set num_blocks or kv_cache_gb higher"
        )
    return num_blocks


def _max_model_len(config: RunnerConfig, decoder: DecoderConfig) -> int:
    most = decoder.max_sequence_length
    wanted = config.max_model_len or most
    if wanted > most:
        raise ConfigError(f"max_model_len is {wanted}, and the model's context is {most} long")
    return wanted


@dataclass(frozen=True, eq=False, slots=True)
class _Sampled:
    """What the rows of a step sampled, on the CPU."""

    token_ids_S: npt.NDArray[np.int64]
    failed_S: npt.NDArray[np.bool_]
    logprobs_S: npt.NDArray[np.float32] | None  # where a row wanted one
    top_logprobs_S: Sequence[TopLogprobs]  # empty where no row wanted any


def _take_in(step: RunStep, context: DynamicContext) -> None:
    """Apply what the step brings; rows that go on come first, as they do in its token budget."""
    context.grant([grant.row for grant in step.grants], [grant.block for grant in step.grants])
    for chunk in step.continues:
        context.continue_row(chunk)
    for admit in step.admits:
        context.add_row(admit)


def _sample(logits_SV: Tensor, context: DynamicContext) -> _Sampled:
    rows = context.sampling_rows()  # on the CPU, while a GPU still computes the logits
    wanted_S = context.logprobs_wanted()
    result = sample(logits_SV, rows.to(logits_SV.device))
    return _Sampled(
        token_ids_S=result.token_ids_R.cpu().numpy(),
        failed_S=result.nan_rows_R.cpu().numpy(),
        logprobs_S=result.logprobs_R.cpu().numpy() if (wanted_S >= 0).any() else None,
        top_logprobs_S=_top_logprobs(result.scored_RV, wanted_S),
    )


def _top_logprobs(logits_SV: Tensor, wanted_S: npt.NDArray[np.int32]) -> list[TopLogprobs]:
    """Return as many of the likeliest tokens as each row wants; empty where no row wants any.

    A row gets fewer where fewer are possible at all.
    """
    most = int(wanted_S.max(initial=0))
    if most == 0:
        return []
    ids_SK, logprobs_SK = top_logprobs(logits_SV, most)
    rows = zip(ids_SK.tolist(), logprobs_SK.tolist(), wanted_S.tolist(), strict=True)
    return [_top_of_row(ids, logprobs, wanted) for ids, logprobs, wanted in rows]


def _top_of_row(ids: list[int], logprobs: list[float], wanted: int) -> TopLogprobs:
    if wanted <= 0:
        return ()
    pairs = zip(ids[:wanted], logprobs[:wanted], strict=True)
    return tuple((token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf)


def _report(
    step: RunStep, inputs: StepInputs, sampled: _Sampled, outcome: StepOutcome, start: float
) -> StepDone:
    rows = tuple(outcome.rows_S.tolist())
    is_good_S = ~sampled.failed_S
    logprobs_S = sampled.logprobs_S
    top_S = compress(sampled.top_logprobs_S, is_good_S)
    return StepDone(
        step=step.step,
        rows=rows,
        token_ids=outcome.token_ids_S.tobytes(),
        stopped=tuple(outcome.stopped.tolist()),
        full=tuple(outcome.full.tolist()),
        failed=tuple(RowFailure(row=row, message=_NO_TOKEN) for row in outcome.failed.tolist()),
        logprobs=b"" if logprobs_S is None else logprobs_S[is_good_S].tobytes(),
        top_logprobs={row: top for row, top in zip(rows, top_S, strict=False) if top},
        num_tokens=inputs.num_tokens,
        seconds=time.perf_counter() - start,
    )
