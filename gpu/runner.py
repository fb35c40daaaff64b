"""Runs a model step by step: weights, KV cache and rows on one device, behind a few plain calls.

All methods but the properties and `describe` are to be called from one thread, the device's own:
torch keeps its inference mode and its OpenMP pool per thread. No call here waits for anything but
the device.

Letters: T tokens of a step, S rows that sample in it, D model width, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from callboard.gpu.batch_invariant import BatchInvariantDecoder
from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, LayerKind
from callboard.gpu.context import DynamicContext, StepOutcome
from callboard.gpu.device import (
    choose_device,
    choose_dtype,
    release_memory,
    resident_bytes,
    wait_for,
)
from callboard.gpu.device_errors import typed_errors
from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list
from callboard.gpu.loading import LoadedModel, read_config
from callboard.gpu.logprobs import PIECE_TOKENS, likeliest, score_prompt
from callboard.gpu.memory import MemoryPlan, gib_to_bytes, plan_memory
from callboard.gpu.model_slot import ModelSlot, NotReady
from callboard.gpu.models.config import DecoderConfig
from callboard.gpu.models.decoder import Decoder
from callboard.gpu.sampling import sample
from callboard.gpu.step_inputs import StepInputs
from callboard.messages.control import Weights
from callboard.messages.errors import ConfigError
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs
from callboard.messages.steps import DeviceReady, RowFailure, RowId, RunStep, StepDone

_NO_TOKEN = "no token can be chosen: the logits are not numbers, or the request bans every token"


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner loads and how much it may take.

    The KV cache is sized by `num_blocks` (the dummy included) or by `kv_cache_gb` (GiB), one of
    them; in the second case recurrent states come out of it too. max_model_len None takes the
    model's own, threads None leaves torch's choice, and max_rows None is as many as a pool and a
    step are for (`default_max_requests`). `num_graph_sizes` is how finely steps are padded (see
    `graph_list`); None: not at all. With batch_invariant what a row gets is the same to the bit,
    whatever rows are beside it and however its prompt is cut; see `batch_invariant`.
    """

    model: str  # see `load_model`
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_tokens: int = 64
    num_blocks: int | None = None
    kv_cache_gb: float | None = None
    max_rows: int | None = None
    max_tokens: int = 512  # of one step
    max_model_len: int | None = None
    threads: int | None = None
    batch_invariant: bool = False
    num_graph_sizes: int | None = None

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
        if self.batch_invariant and self.num_graph_sizes is not None:
            raise ConfigError(
                f"num_graph_sizes is {self.num_graph_sizes}, and must be None with batch_invariant,"
                " where each token is computed alone and nothing is padded"
            )


class ModelRunner:
    """The device's side of an executor: `load` and `allocate` once, then `execute` step by step.

    `free_kv` and `free_weights` give memory back to the system, and `offload_kv` and
    `offload_weights` do so with a copy on the host; `allocate` and `load` take it again. Each does
    nothing where it is done already.
    """

    def __init__(self, config: RunnerConfig) -> None:
        """Read what the model says of itself, so that `room` is known before anything is loaded.

        Raises ModelError where it is no model, ConfigError for a setting that does not fit it.
        """
        self._config = config
        self._device = choose_device(config.device)
        self._dtype = choose_dtype(self._device, config.dtype)
        self._context: DynamicContext | None = None
        decoder = read_config(config.model).decoder
        self._cache_spec = _cache_spec(decoder, self._dtype)
        self._plan = _plan(config, self._cache_spec)
        self.max_model_len = _max_model_len(config, decoder)
        """Most tokens of a sequence, prompt and output."""
        self._slot = ModelSlot(
            Weights(source=config.model, version=0),
            shape=decoder,
            max_model_len=self.max_model_len,
            device=self._device,
            dtype=self._dtype,
            attention=config.attention,
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the dummy included."""
        return self._plan.num_blocks

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache; 0 while it is freed."""
        return self._context.bytes if self._context else 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights; 0 while they are freed."""
        return self._slot.model.weights_bytes if self._slot.loaded else 0

    @property
    def num_rows(self) -> int:
        """Rows in the context, waiting ones included."""
        return self._context.num_rows if self._context else 0

    def room(self) -> DeviceReady:
        """Say what fits: blocks to hand out, rows, tokens of a step and of a sequence."""
        return DeviceReady(
            block_tokens=self._config.block_tokens,
            num_blocks=self.num_blocks - 1,
            max_rows=self._plan.max_requests,
            max_step_tokens=self._config.max_tokens,
            max_model_len=self.max_model_len,
        )

    def describe(self) -> dict[str, int | float | str]:
        """Return what an operator wants to know: where it runs, with what, and what it holds."""
        return {
            "model": self._slot.weights.source,
            "weights_version": self._slot.weights.version,
            "device": str(self._device),
            "dtype": str(self._dtype).removeprefix("torch."),
            "attention": self._attention,
            "threads": self._config.threads or torch.get_num_threads(),
            "batch_invariant": int(self._config.batch_invariant),
            "block_tokens": self._config.block_tokens,
            "num_blocks": self.num_blocks,
            "max_model_len": self.max_model_len,
            "rows": self.num_rows,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
        }

    def load(self) -> None:
        """Load the weights, from the host where they were offloaded.

        Raises WeightsError where they are no model or do not fit, ConfigError for a setting that
        does not fit them.
        """
        if self._slot.loaded:
            return
        with typed_errors(self._device):
            self._load()

    def _load(self) -> None:
        if self._config.threads is not None or self._config.batch_invariant:
            # Once a number is set, MKL keeps to it; before, it may take fewer.
            torch.set_num_threads(self._config.threads or torch.get_num_threads())
        self._slot.load()
        try:
            self._check_block_multiple(self._slot.model)
        except ConfigError:
            self._slot.free()
            raise

    def prepare_weights(self, weights: Weights) -> None:
        """Read and check other weights, to be used from `commit_weights` on.

        Raises WeightsError, naming file and tensor, where they cannot be; nothing is changed then.
        """
        with typed_errors(self._device):
            self._slot.prepare(self._named(weights))

    def commit_weights(self, weights: Weights) -> None:
        """Use other weights from now on, for rows that are here too; see `ModelSlot.commit`."""
        with typed_errors(self._device):
            self._slot.commit(self._named(weights))

    def cancel_weights(self) -> None:
        """Forget what was prepared."""
        self._slot.cancel()

    def allocate(self) -> None:
        """Take the KV cache's memory and begin with no rows, or with those that were offloaded.

        The model must have been loaded.
        """
        _ = self._slot.model
        with typed_errors(self._device):
            if self._context is None:
                self._context = self._make_context()
            was_offloaded = self._context.offloaded
            self._context.allocate()
        if was_offloaded:
            release_memory(self._device)  # the host's

    def execute(self, step: RunStep) -> StepDone:
        """Take in what the step brings and run one forward pass over every row that can run.

        A row whose logits are not numbers fails alone. Raises what the context or the device
        raises; rows are then as good as lost, and are to be dropped. Where the device had not the
        memory that is OutOfMemory, and `start_over` makes it ready for a smaller step; where it
        will never answer again, DeviceLost.
        """
        with typed_errors(self._device):
            return self._execute(step)

    def start_over(self) -> None:
        """Forget every row, and give back to the system what only steps have needed."""
        if self._context is not None and self._context.allocated:
            self._context.reset()
        release_memory(self._device)

    def _execute(self, step: RunStep) -> StepDone:
        start = time.perf_counter()
        context = self._ready_context()
        _take_in(step, context)
        inputs = context.begin_step()
        if inputs is None:
            seconds = time.perf_counter() - start
            return StepDone(step=step.step, rows=(), token_ids=b"", seconds=seconds)
        with torch.inference_mode():
            hidden_TD = self._hidden(inputs)
            scores = self._score_prompts(hidden_TD, context)
            sample_rows = _sample_one_by_one if self._config.batch_invariant else _sample
            sampled = sample_rows(self._logits(inputs.last_tokens(hidden_TD)), context)
        wait_for(self._device)  # where no row sampled, nothing was read back and it still computes
        outcome = context.finish_step(
            sampled.token_ids_S,
            sampled.failed_S,
            failed_prompts=[row for row, score in scores.items() if score is None],
        )
        done = _report(step, inputs, sampled, scores, outcome, start)
        return msgspec.structs.replace(done, weights_version=self._slot.weights.version)

    def drop(self, rows: Collection[RowId]) -> None:
        """Forget rows; ids that are not here are ignored."""
        if self._context is not None:
            self._context.drop(rows)

    def free_kv(self) -> int:
        """Give the KV cache's memory back and forget all rows; return the bytes as measured."""
        context = self._context
        if context is None or not (context.allocated or context.offloaded):
            return 0
        return self._freed(context.deallocate)

    def offload_kv(self) -> int:
        """Give the KV cache's memory back and keep it on the host, and the rows with it.

        Returns the bytes as measured. Raises what `host_copies` raises, and changes nothing then.
        """
        if self._context is None or not self._context.allocated:
            return 0
        return self._freed(self._context.offload)

    def free_weights(self) -> int:
        """Give the weights' memory back; return the bytes as measured."""
        return self._freed(self._slot.free) if self._slot.holds_weights else 0

    def offload_weights(self) -> int:
        """Give the weights' memory back and keep them on the host; else as `offload_kv`."""
        return self._freed(self._slot.offload) if self._slot.loaded else 0

    def _freed(self, free: Callable[[], None]) -> int:
        """Free memory; returns by how many bytes the process or the device's reserve shrank."""
        before = resident_bytes(self._device)
        free()
        release_memory(self._device)
        return before - resident_bytes(self._device)

    def _make_context(self) -> DynamicContext:
        return DynamicContext(
            max_rows=self._plan.max_requests,
            max_tokens=self._config.max_tokens,
            max_model_len=self.max_model_len,
            block_tokens=self._config.block_tokens,
            num_blocks=self.num_blocks,
            device=self._device,
            cache_spec=self._cache_spec,
            graphs=self._graphs(),
        )

    def _graphs(self) -> Sequence[BatchDimensions] | None:
        if self._config.num_graph_sizes is None:
            return None
        limits = BatchLimits(
            max_tokens=self._config.max_tokens,
            max_requests=self._plan.max_requests,
            max_model_len=self.max_model_len,
        )
        return graph_list(limits, num_sizes=self._config.num_graph_sizes)

    def _score_prompts(
        self, hidden_TD: Tensor, context: DynamicContext
    ) -> dict[RowId, PromptLogprobs | None]:
        """Return the log-probs of prompts that want them; None for those that are not numbers."""
        piece = 1 if self._config.batch_invariant else PIECE_TOKENS
        return {
            targets.row: score_prompt(targets, hidden_TD, self._logits, piece_tokens=piece)
            for targets in context.prompt_targets()
        }

    def _hidden(self, inputs: StepInputs) -> Tensor:
        caches = self._ready_context().caches
        return self._decoder().forward(inputs.input_ids_T, inputs.metadata, caches)

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        return self._decoder().logits(hidden_RD)

    @property
    def _attention(self) -> str:
        return self._slot.model.attention.name if self._slot.loaded else self._config.attention

    def _named(self, weights: Weights) -> Weights:
        """Give those of no source, which a tree was started with, the source they have here."""
        source = weights.source or self._config.model
        return msgspec.structs.replace(weights, source=source)

    def _decoder(self) -> Decoder | BatchInvariantDecoder:
        decoder = self._slot.model.decoder
        return BatchInvariantDecoder(decoder) if self._config.batch_invariant else decoder

    def _ready_context(self) -> DynamicContext:
        _ = self._slot.model
        if self._context is None or not self._context.allocated:
            raise NotReady("the KV cache is not allocated: call allocate first")
        return self._context

    def _check_block_multiple(self, model: LoadedModel) -> None:
        multiple = model.attention.block_multiple
        if self._config.block_tokens % multiple:
            raise ConfigError(
                f"block_tokens is {self._config.block_tokens}, and the attention backend"
                f" {model.attention.name} needs a multiple of {multiple}"
            )


def _cache_spec(decoder: DecoderConfig, dtype: torch.dtype) -> CacheSpec:
    attention: LayerKind = "attention"
    return CacheSpec(
        layers=(attention,) * decoder.num_layers,
        attention=KeyValueShape(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim),
        dtype=dtype,
    )


def _plan(config: RunnerConfig, spec: CacheSpec) -> MemoryPlan:
    """Work out how large the pool is and how many rows it is for; ConfigError where it is short."""
    bytes_per_block, bytes_per_state = spec.block_bytes(config.block_tokens), spec.state_bytes()
    if config.num_blocks is not None:
        num_states = config.max_rows or config.num_blocks
        budget = config.num_blocks * bytes_per_block + num_states * bytes_per_state
    else:  # which the state that padding writes to comes out of, as the block it writes to does
        budget = gib_to_bytes(config.kv_cache_gb or 0.0) - bytes_per_state
    return plan_memory(
        budget_bytes=budget,
        bytes_per_block=bytes_per_block,
        bytes_per_state=bytes_per_state,
        max_tokens=config.max_tokens,
        max_requests=config.max_rows,
    )


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


def _sample(logits_SV: Tensor, context: DynamicContext, which: slice = slice(None)) -> _Sampled:
    """Sample those of the sampling rows, of which these are the logits."""
    rows = context.sampling_rows(which)  # on the CPU, while a GPU still computes the logits
    wanted_S = context.logprobs_wanted()[which]
    result = sample(logits_SV, rows.to(logits_SV.device))
    return _Sampled(
        token_ids_S=result.token_ids_R.cpu().numpy(),
        failed_S=result.nan_rows_R.cpu().numpy(),
        logprobs_S=result.logprobs_R.cpu().numpy() if (wanted_S >= 0).any() else None,
        top_logprobs_S=likeliest(result.scored_RV, wanted_S),
    )


def _sample_one_by_one(logits_SV: Tensor, context: DynamicContext) -> _Sampled:
    """Sample each row by itself, from logits in memory of their own; see `batch_invariant`."""
    parts = [
        _sample(logits_SV[row : row + 1].clone(), context, slice(row, row + 1))
        for row in range(len(logits_SV))
    ]
    wanted = [part.logprobs_S for part in parts if part.logprobs_S is not None]
    logprobs = [math.nan if part.logprobs_S is None else part.logprobs_S[0] for part in parts]
    return _Sampled(
        token_ids_S=np.array([part.token_ids_S[0] for part in parts], dtype=np.int64),
        failed_S=np.array([part.failed_S[0] for part in parts], dtype=np.bool_),
        logprobs_S=np.array(logprobs, dtype=np.float32) if wanted else None,
        top_logprobs_S=[top for part in parts for top in part.top_logprobs_S or [()]],
    )


def _report(
    step: RunStep,
    inputs: StepInputs,
    sampled: _Sampled,
    scores: dict[RowId, PromptLogprobs | None],
    outcome: StepOutcome,
    start: float,
) -> StepDone:
    rows = tuple(outcome.rows.tolist())
    logprobs_S = sampled.logprobs_S
    top_S = compress(sampled.top_logprobs_S, outcome.kept_S)
    return StepDone(
        step=step.step,
        rows=rows,
        token_ids=outcome.token_ids.tobytes(),
        stopped=tuple(outcome.stopped.tolist()),
        full=tuple(outcome.full.tolist()),
        failed=tuple(RowFailure(row=row, message=_NO_TOKEN) for row in outcome.failed.tolist()),
        logprobs=b"" if logprobs_S is None else logprobs_S[outcome.kept_S].tobytes(),
        top_logprobs={row: top for row, top in zip(rows, top_S, strict=False) if top},
        num_tokens=inputs.num_tokens,
        seconds=time.perf_counter() - start,
        prompt_logprobs={row: score for row, score in scores.items() if score is not None},
    )
