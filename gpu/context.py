"""The bookkeeping between one forward pass and the next: rows come, run, wait, resume and leave.

Two callers drive it. The executor says what each step admits and grants; the blocks are somebody
else's. An embedded script gives it a `BlockPool` and calls `add_request` and `update_requests`.

Knows nothing of requests, models or text. Letters: T tokens of a step, R rows that run in it, S
rows that sample in it (the first S of the R).
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from callboard.gpu.admission import (
    Availability,
    RowMismatch,
    check_block_ids,
    check_budget,
    check_chunk,
    check_chunk_blocks,
    check_dummy,
    check_sequence,
)
from callboard.gpu.blocks import BlockPool
from callboard.gpu.cache_spec import CacheSpec
from callboard.gpu.caches import Caches
from callboard.gpu.context_check import check_rows
from callboard.gpu.context_memory import ContextMemory
from callboard.gpu.context_rows import ContextRows, Prompt
from callboard.gpu.context_statistics import ContextStatistics
from callboard.gpu.dimensions import BatchDimensions, BatchLimits
from callboard.gpu.dummies import dummies_for
from callboard.gpu.memory import blocks_for
from callboard.gpu.padding import Padding, StepShape, shape_in, unpadded
from callboard.gpu.ragged import Lines
from callboard.gpu.row_rules import RowRules
from callboard.gpu.rows import NO_ROW, NO_TOKEN, Indices
from callboard.gpu.sampling import SamplingRows
from callboard.gpu.staging import Staging
from callboard.gpu.step_inputs import StepInputs, StepRows, build_inputs, input_bytes
from callboard.messages.base import TokenIds
from callboard.messages.errors import CallboardError, ConfigError, OutOfBlocks, RowOverflow
from callboard.messages.steps import Admit, Continue, RowId, RowSampling


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did to the rows, each named by its id.

    `kept_S` says which of the sampling rows, in the order of the logits, have a token now: those of
    `rows`, with it in `token_ids`. Rows in `failed`, `stopped` and `full` have left; rows in
    `paused` wait for a block from now on.
    """

    kept_S: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    stopped: npt.NDArray[np.int64]
    full: npt.NDArray[np.int64]
    failed: npt.NDArray[np.int64]
    paused: npt.NDArray[np.int64]


class UpdateOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What `update_requests` did to rows that did not end, each named by its id."""

    paused: list[RowId]  # wait for a block from now on
    evicted: list[RowId]  # have left to make room, the newest wait first


class PromptTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the step whose logits say how likely their successors in the prompt were.

    `tokens` is where they stand among the step's, `target_ids` the successors, of which the first
    is token number `start` of the prompt. `sampling` says what the row wants to know.
    """

    row: RowId
    start: int
    tokens: slice
    target_ids: npt.NDArray[np.int32]
    sampling: RowSampling


class _Targets(msgspec.Struct, frozen=True):
    """Successors of a chunk's tokens, from number `start` of the prompt on."""

    start: int
    ids: npt.NDArray[np.int32]
    sampling: RowSampling


class DynamicContext(ContextRows):
    """The rows of one executor, and the memory they stand in.

    Args:
        max_rows: places for rows, paused ones included.
        max_tokens: most tokens one step may feed.
        max_model_len: most tokens a sequence may have, prompt and output.
        block_tokens: token slots in a KV block.
        num_blocks: blocks of the KV cache; the last one is the dummy.
        device: where the inputs of the model go.
        pool: where `add_request` and `update_requests` take blocks from and return them to.
        cache_spec: what the model keeps between steps; its memory is taken at once. None leaves
            the tensors to somebody else.
        num_states: rows that can have a recurrent state, where the model has any; None: all.
        paused_limit: blocks of the pool that paused rows may hold; where they hold more, the newest
            are evicted. None: they may hold all.
        graphs: what steps are padded to: see `graph_list`. A step that fits none of them is padded
            to round dimensions; None: no step is padded.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        block_tokens: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        pool: BlockPool | None = None,
        cache_spec: CacheSpec | None = None,
        num_states: int | None = None,
        paused_limit: int | None = None,
        graphs: Sequence[BatchDimensions] | None = None,
    ) -> None:
        super().__init__(
            max_rows=max_rows,
            max_model_len=max_model_len,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
        )
        if paused_limit is not None and not 0 <= paused_limit < num_blocks - 1:
            raise ConfigError(
                f"paused_limit is {paused_limit}, and must be 0 to {num_blocks - 2}: one of the"
                f" {num_blocks - 1} usable blocks at least is for rows that run"
            )
        self.max_tokens = max_tokens
        self._pool = pool
        self._paused_limit = paused_limit
        self._memory = ContextMemory(
            cache_spec,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_states=max_rows if num_states is None else num_states,
            device=torch.device(device),
        )
        self._rules = RowRules()
        self._targets: dict[RowId, _Targets] = {}  # of chunks whose log-probs are wanted
        self._departed: set[RowId] = set()  # with the last step
        self._padding: Padding | None = None
        self._staging = Staging(torch.device(device))
        if graphs is not None:
            limits = BatchLimits(
                max_tokens=max_tokens,
                max_requests=min(max_rows, max_tokens),
                max_model_len=max_model_len,
            )
            self._padding = Padding(graphs, limits, strict=self._memory.has_states)
            self._staging = Staging(
                torch.device(device), input_bytes(limits, blocks_for(max_model_len, block_tokens))
            )
        self.allocate()

    # Memory

    @property
    def allocated(self) -> bool:
        """Whether rows can be here: the memory of what the model keeps is taken."""
        return self._memory.allocated

    @property
    def bytes(self) -> int:
        """The size of the caches; 0 while they are deallocated or somebody else's."""
        return self._memory.bytes

    @property
    def caches(self) -> Caches:
        """What the model keeps between steps; raises MemoryDeallocated where it is not here."""
        return self._memory.caches

    @property
    def offloaded(self) -> bool:
        """Whether the caches are on the host, and the rows wait for `allocate`."""
        return self._memory.offloaded

    def allocate(self) -> None:
        """Take the memory of the caches, with no row in them; does nothing where it is taken.

        Behind `offload` they are what they were, and so are the rows.

        Raises ConfigError where the blocks have another size than the model needs, and what the
        device raises where the memory is not there.
        """
        self._memory.allocate()

    def offload(self) -> None:
        """Copy the caches to the host and give their memory back; rows wait until `allocate`.

        Returns to the system as with `deallocate`. Raises what `host_copies` raises, and changes
        nothing then.
        """
        self._memory.offload()

    def deallocate(self) -> None:
        """Forget all rows and give the memory of the caches back, until `allocate`.

        It returns to the system once nobody holds a layer: see `release_memory`.
        """
        self.reset()
        self._memory.free()

    # What is here

    def statistics(self) -> ContextStatistics:
        """Return the context's numbers now."""
        usable, pool = self.dummy, self._pool
        held = self._num_blocks_of(slice(0, self._num_rows)) if pool is None else pool.held
        return ContextStatistics(
            rows=self._num_rows,
            paused_rows=self._num_paused,
            max_rows=self.max_rows,
            tokens=self.num_tokens,
            max_tokens=self.max_tokens,
            usable_blocks=usable,
            free_blocks=usable - held,
            held_blocks=held,
            active_blocks=self._num_blocks_of(slice(self._num_paused, self._num_rows)),
        )

    # What changes between steps

    def add_row(self, admit: Admit) -> None:
        """Take a new row in; its first chunk is part of the coming step.

        Raises ContextOverflow where there is no room, RowMismatch where the message contradicts
        itself or the rows that are here.
        """
        prompt = np.frombuffer(admit.prompt, dtype=np.int32)
        self._check_admit(admit, prompt)
        place = self._begin_row(admit, prompt)
        self._rows["kv_length"][place] = admit.cached_tokens
        whole = Prompt(admit.row, prompt, admit.sampling)
        end = self._feed(place, whole, admit.num_tokens, admit.blocks)
        if end < len(prompt):
            self._half_prefilled = whole
        elif self._half_prefilled is not None:
            self._rows.swap(np.array([place - 1]), np.array([place]))

    def continue_row(self, step: Continue) -> None:
        """Make the next chunk of the half prefilled row part of the coming step.

        Ignored where the row ended in the last step: whoever asks may not know it yet.
        """
        if step.row in self._departed:
            return
        place = self._num_rows - 1
        prompt = self._check_continue(step, place)
        end = self._feed(place, prompt, step.num_tokens, step.blocks)
        if end == len(prompt.ids):
            self._half_prefilled = None

    def add_dummy_requests(self, admits: Sequence[Admit], *, as_decodes: bool = False) -> None:
        """Take rows in whose blocks are all the dummy, to warm up or to keep others company.

        They run like others, with their whole prompts, or with their one token each as decodes,
        and are dropped like others; the pool is not asked. All are taken in or none. Raises what
        `add_row` raises.
        """
        self._check_dummies(admits, as_decodes=as_decodes)
        for admit in admits:
            prompt = np.frombuffer(admit.prompt, dtype=np.int32)
            place = self._begin_row(admit, prompt)
            blocks = (self.dummy,) * blocks_for(len(prompt), self.block_tokens)
            self._feed(place, Prompt(admit.row, prompt, admit.sampling), len(prompt), blocks)
            if as_decodes:
                self._rows["next_token"][place] = self._prefill_ids.pop(admit.row)[0]

    def add_dummy_requests_for(self, graph: BatchDimensions) -> None:
        """Fill the coming step with dummies up to what a graph has room for, to capture it.

        Begin the step with the same graph, and `reset` behind it. Raises ValueError where a
        prefill would be without a token, and what `add_dummy_requests` raises.
        """
        decodes, prefills = dummies_for(graph)
        self._check_dummies([*decodes, *prefills], as_decodes=False)
        self.add_dummy_requests(decodes, as_decodes=True)
        self.add_dummy_requests(prefills)

    def grant(self, rows: Sequence[RowId], blocks: Sequence[int]) -> None:
        """Let paused rows go on, each with its new block; the others keep their order.

        Rows that ended in the last step are ignored: whoever grants may not know it yet.
        """
        if not self._departed.isdisjoint(rows):
            staying = [index for index, row in enumerate(rows) if row not in self._departed]
            rows = [rows[index] for index in staying]
            blocks = [blocks[index] for index in staying]
        if len(rows) == 0:
            return
        places = self._check_grant(rows, blocks)
        self._rows.append_block_each(places, np.asarray(blocks, dtype=np.int32))
        self._rows["last_offset"][places] = 0
        self._rows["query_length"][places] = 1
        waiting = np.delete(np.arange(self._num_paused), places)
        self._rows.reorder(0, np.concatenate((waiting, places)))
        self._num_paused = len(waiting)

    def drop(self, rows: Collection[RowId]) -> None:
        """Forget rows wherever they stand; ids that are not here are ignored."""
        leaving = np.isin(self._rows["id"][: self._num_rows], list(rows))
        if not leaving.any():
            return
        self._release(np.flatnonzero(leaving))
        staying = np.flatnonzero(~leaving)
        self._rows.reorder(0, staying)
        self._num_paused -= int(leaving[: self._num_paused].sum())
        self._shrink(len(staying))
        for row in rows:
            self._prefill_ids.pop(row, None)
            self._targets.pop(row, None)
        if self.half_prefilled_id in rows:
            self._half_prefilled = None

    def reset(self, *, keep_prefix_cache: bool = False) -> None:
        """Forget all rows; what is in the caches stays there, though nobody reads it.

        The context's own pool then forgets which blocks hold which prefixes, unless they are kept
        for rows to come.
        """
        self.drop(self.row_ids)
        if self._pool is not None and not keep_prefix_cache:
            self._pool.forget_all()

    # A step

    def begin_step(self, graph: BatchDimensions | None = None) -> StepInputs | None:
        """Return the inputs of a forward pass over every row that can run; None when none can.

        They are padded to `graph`, say to capture it, or to what the context chooses. A step that
        fails changes no row: it may be begun again, or its rows dropped. Raises ValueError where
        the graph has no room for the step.
        """
        if self._end_of_running == self._num_paused:
            return None
        self._put_single_tokens_first()
        running = slice(self._num_paused, self._end_of_running)
        query_lens_R = self._rows["query_length"][running].copy()
        rows = StepRows(
            input_ids_T=self._gather_ids(int(query_lens_R.sum())),
            query_lens_R=query_lens_R,
            kv_lens_R=self._rows["kv_length"][running] + query_lens_R,
            block_table_RB=self._rows.block_table[running],
            state_slots=self._memory.row_slots(self._rows["state_slot"][running]),
            num_sampling=self._num_sampling,
        )
        return build_inputs(
            rows,
            self._shape_of(rows.dimensions(), graph),
            block_tokens=self.block_tokens,
            dummy=self.dummy,
            staging=self._staging,
        )

    def sampling_rows(self, which: slice = slice(None)) -> SamplingRows:
        """Return how the rows of the step that was begun choose their tokens, or those of them."""
        places = range(self._num_paused, self._end_of_sampling)[which]
        sampling = slice(places.start, places.stop)
        records = self._rows.records[sampling]
        stop_ids = self._rows.stop_ids_of(sampling)
        too_early = records["position"] < records["min_tokens"]
        rows, columns = np.nonzero((stop_ids != NO_TOKEN) & too_early[:, None])
        sampling_rows = SamplingRows.build(
            temperature=records["temperature"],
            top_k=records["top_k"],
            top_p=records["top_p"],
            min_p=records["min_p"],
            seed=records["seed"],
            position=records["position"],
            banned=(rows, stop_ids[rows, columns]),
        )
        if len(self._rules):
            return self._rules.apply(self._lines(sampling), sampling_rows)
        return sampling_rows

    def logprobs_wanted(self) -> npt.NDArray[np.int32]:
        """Return what each sampling row asks for, [S]: see `RowSampling.logprobs`."""
        return self._rows["logprobs"][self._num_paused : self._end_of_sampling].copy()

    def prompt_targets(self) -> list[PromptTargets]:
        """Return what the step that was begun can say of prompts whose log-probs are wanted."""
        if not self._targets:
            return []
        running = slice(self._num_paused, self._end_of_running)
        starts = (
            np.cumsum(self._rows["query_length"][running]) - self._rows["query_length"][running]
        )
        found = zip(self._rows["id"][running].tolist(), starts.tolist(), strict=True)
        return [
            PromptTargets(
                row=row,
                start=targets.start,
                tokens=slice(first, first + len(targets.ids)),
                target_ids=targets.ids,
                sampling=targets.sampling,
            )
            for row, first in found
            if (targets := self._targets.get(row)) is not None
        ]

    def finish_step(
        self,
        token_ids_S: npt.NDArray[np.integer[Any]],
        failed_S: npt.NDArray[np.bool_] | None = None,
        *,
        failed_prompts: Collection[RowId] = (),
    ) -> StepOutcome:
        """Take the tokens the step sampled: rows end, go on, or wait for a block.

        A row ends with one of its stop ids once `min_tokens` tokens precede it, with its last
        allowed token, where `failed_S` says that its token is none, or when it is one of
        `failed_prompts`. One that may have no token at all ends with its prompt.
        """
        self._check_sampled("tokens", len(token_ids_S))
        tokens_S = np.asarray(token_ids_S, dtype=np.int32)
        sampling = slice(self._num_paused, self._end_of_sampling)
        records = self._rows.records[sampling]
        failed = np.isin(records["id"], list(failed_prompts))
        if failed_S is not None:
            failed |= failed_S
        kept = (records["max_tokens"] > 0) & ~failed
        is_stop_id = (self._rows.stop_ids_of(sampling) == tokens_S[:, None]).any(axis=1)
        stopped = is_stop_id & (records["position"] >= records["min_tokens"]) & kept
        full = (records["position"] + 1 >= records["max_tokens"]) & ~stopped & ~failed
        ids = records["id"].copy()
        half_failed = [row for row in failed_prompts if row == self.half_prefilled_id]
        self.drop(half_failed)
        paused = self._advance(tokens_S, leaving=stopped | full | failed)
        self._departed = {*ids[stopped | full | failed].tolist(), *half_failed}
        return StepOutcome(
            kept_S=kept,
            rows=ids[kept],
            token_ids=tokens_S[kept],
            stopped=ids[stopped],
            full=ids[full],
            failed=np.array([*ids[failed].tolist(), *half_failed], dtype=np.int64),
            paused=paused,
        )

    # Alone, with a pool

    def add_request(
        self, row: RowId, prompt: TokenIds, sampling: RowSampling, *, num_tokens: int | None = None
    ) -> None:
        """Add a row with blocks of the pool: its whole prompt, or a first chunk of `num_tokens`.

        Raises OutOfBlocks or what `add_row` raises; the pool is then as it was.
        """
        pool = self._own_pool()
        chunk = len(prompt) // 4 if num_tokens is None else num_tokens
        try:
            blocks = pool.allocate(blocks_for(chunk, self.block_tokens))
        except OutOfBlocks as error:
            error.row = row
            raise
        try:
            self.add_row(
                Admit(
                    row=row,
                    prompt=prompt,
                    num_tokens=chunk,
                    blocks=tuple(blocks),
                    sampling=sampling,
                )
            )
        except CallboardError:
            pool.release(blocks)
            raise

    def update_requests(
        self,
        active_mask_S: npt.NDArray[np.bool_],
        new_tokens_S: npt.NDArray[np.integer[Any]],
    ) -> UpdateOutcome:
        """Finish a step whose caller judged which rows go on, then resume what the pool allows.

        Rows that end give their blocks back first; paused rows then resume, the longest wait
        first; and while those that still wait hold more than `paused_limit`, the newest of them
        is evicted for the others.
        """
        pool = self._own_pool()
        self._check_sampled("entries of the mask", len(active_mask_S))
        self._check_sampled("tokens", len(new_tokens_S))
        tokens_S = np.asarray(new_tokens_S, dtype=np.int32)
        paused = self._advance(tokens_S, leaving=~np.asarray(active_mask_S, dtype=np.bool_))
        self._resume_from(pool)
        evicted = self._evict_over_limit(pool)
        still_paused = set(self.paused_ids)
        return UpdateOutcome(
            paused=[row for row in paused.tolist() if row in still_paused], evicted=evicted
        )

    def check_availability(self, num_tokens: int) -> Availability:
        """Say whether a new row that feeds so many tokens fits the coming step, and what is short.

        With a pool of its own only; changes nothing.
        """
        free_states = self._memory.free_states
        return Availability(
            rows=self._num_rows < self.max_rows,
            tokens=self.num_tokens + num_tokens <= self.max_tokens,
            blocks=blocks_for(num_tokens, self.block_tokens) <= self._own_pool().free,
            states=self.allocated and (free_states is None or free_states > 0),
        )

    def check(self) -> None:
        """Raise AssertionError unless the rows are as the picture says; slow, for tests."""
        rows = self.rows()
        check_rows(self._rows, self._regions(), block_tokens=self.block_tokens, dummy=self.dummy)
        if self._half_prefilled is not None:
            assert self.row_ids[-1] == self._half_prefilled.row, "the half prefilled row moved"
        lines = rows["rules"][rows["rules"] > 0].tolist()
        assert len(set(lines)) == len(lines) == len(self._rules), "wrong lines of rules"
        self._memory.check(rows)

    # How rows move

    def _advance(
        self, token_ids_S: npt.NDArray[np.int32], *, leaving: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Count this step's tokens as cached, let rows leave, and return the rows newly paused."""
        active = slice(self._num_paused, self._num_rows)
        sampling = slice(self._num_paused, self._end_of_sampling)
        self._rows["kv_length"][active] += self._rows["query_length"][active]
        self._rows["query_length"][active] = 0
        self._rows["next_token"][sampling] = token_ids_S
        self._rows["position"][sampling] += 1
        self._prefill_ids.clear()
        self._targets.clear()
        if len(self._rules):
            self._rules.record(self._lines(sampling), token_ids_S)
        self._release(self._num_paused + np.flatnonzero(leaving))
        self._compact(leaving)
        return self._pause_full_rows()

    def _compact(self, leaving: npt.NDArray[np.bool_]) -> None:
        """Fill the places of leaving rows with the last staying ones, moving as few as can be."""
        num_staying = len(leaving) - int(leaving.sum())
        if num_staying == len(leaving):
            return
        boundary = self._num_paused + num_staying
        holes = self._num_paused + np.flatnonzero(leaving[:num_staying])
        movers = boundary + np.flatnonzero(~leaving[num_staying:])
        self._rows.move(holes, movers)
        if self._half_prefilled is not None:
            self._rows.move(np.array([boundary]), np.array([self._num_rows - 1]))
            boundary += 1
        self._shrink(boundary)

    def _pause_full_rows(self) -> npt.NDArray[np.int64]:
        """Move the rows whose next token needs a new block behind the paused ones; return them."""
        start, stop = self._num_paused, self._end_of_sampling
        is_full = self._rows["last_offset"][start:stop] == self.block_tokens - 1
        num_full = int(is_full.sum())
        outside = start + num_full + np.flatnonzero(is_full[num_full:])
        if len(outside):
            self._rows.swap(start + np.flatnonzero(~is_full[:num_full]), outside)
        self._num_paused += num_full
        going_on = slice(self._num_paused, stop)
        self._rows["query_length"][going_on] = 1
        self._rows["last_offset"][going_on] += 1
        return self._rows["id"][start : self._num_paused].astype(np.int64)

    def _resume_from(self, pool: BlockPool) -> None:
        count = min(self._num_paused, pool.free, self.max_tokens - self.num_tokens)
        self.grant(self.row_ids[:count], pool.allocate(count))

    def _evict_over_limit(self, pool: BlockPool) -> list[RowId]:
        """Drop the newest of the paused rows until the rest hold no more than they may."""
        if self._paused_limit is None:
            return []
        evicted: list[RowId] = []
        while self._num_blocks_of(slice(0, self._num_paused)) > self._paused_limit:
            evicted.append(self.paused_ids[-1])
            self.drop(evicted[-1:])
            self._resume_from(pool)
        return evicted

    def _release(self, places: Indices) -> None:
        """Give up what leaving rows hold: rules, state slots, blocks of the context's own pool."""
        if len(self._rules):
            self._rules.remove(self._lines(places))
        if self._memory.has_states:
            self._memory.end_states(self._rows["state_slot"][places].tolist())
        if self._pool is not None and len(places):
            self._pool.release(self._rows.blocks_of(places))

    def _begin_row(self, admit: Admit, prompt: npt.NDArray[np.int32]) -> int:
        """Write a new row behind all others, without a block or a token, and return its place."""
        place = self._num_rows
        self._num_rows += 1
        self._rows.write(place, admit.row, admit.sampling)
        self._rows["rules"][place] = self._rules.add(prompt, admit.sampling)
        self._rows["state_slot"][place] = self._memory.begin_state()
        return place

    def _shrink(self, num_rows: int) -> None:
        self._rows.clear(num_rows, self._num_rows)
        self._num_rows = num_rows

    def _feed(self, place: int, prompt: Prompt, num_tokens: int, blocks: tuple[int, ...]) -> int:
        """Make a chunk of a row's prompt part of the coming step; return where it ends."""
        record = self._rows.records[place]
        start = int(record["kv_length"])
        end = start + num_tokens
        self._rows.append_blocks(place, blocks)
        record["query_length"] = num_tokens
        record["last_offset"] = (end - 1) % self.block_tokens
        self._prefill_ids[prompt.row] = prompt.ids[start:end]
        if prompt.sampling.prompt_logprobs >= 0 and start + 1 < len(prompt.ids):
            successors = prompt.ids[start + 1 : end + 1]
            self._targets[prompt.row] = _Targets(start + 1, successors, prompt.sampling)
        return end

    def _lines(self, places: Indices | slice) -> Lines:
        return self._rows["rules"][places].astype(np.int64)

    def _shape_of(self, real: BatchDimensions, graph: BatchDimensions | None) -> StepShape:
        if graph is not None:
            return shape_in(graph, real)
        return self._padding.shape_of(real) if self._padding else unpadded(real)

    def _put_single_tokens_first(self) -> None:
        """Move prompts of one token before longer ones: attention takes them for decodes."""
        start, stop = self._end_of_running - len(self._prefill_ids), self._end_of_sampling
        is_longer = self._rows["query_length"][start:stop] > 1
        self._rows.reorder(start, start + np.argsort(is_longer, kind="stable"))

    def _gather_ids(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the tokens of the step, int64 [T]: decoding rows' next ones, then the chunks."""
        first_prefill = self._end_of_running - len(self._prefill_ids)
        decoding = slice(self._num_paused, first_prefill)
        input_ids_T = np.empty(num_tokens, dtype=np.int64)
        end = first_prefill - self._num_paused
        input_ids_T[:end] = self._rows["next_token"][decoding]
        for row in self._rows["id"][first_prefill : self._end_of_running].tolist():
            start, end = end, end + len(self._prefill_ids[row])
            input_ids_T[start:end] = self._prefill_ids[row]
        return input_ids_T

    # What callers may get wrong

    def _own_pool(self) -> BlockPool:
        if self._pool is None:
            raise RowMismatch("this context has no block pool: its caller grants blocks")
        return self._pool

    def _check_new_rows(self, rows: Sequence[RowId]) -> None:
        """Raise unless there is a place for each of these rows, and none of them is here."""
        self._memory.check_room(len(rows))
        if self._num_rows + len(rows) > self.max_rows:
            taken = "all" if self._num_rows == self.max_rows else f"{self._num_rows} of"
            raise RowOverflow(f"{taken} {self.max_rows} rows are taken", row=rows[-1])
        ids = self._rows["id"][: self._num_rows]
        known = [row for row in rows if (ids == row).any()]
        if known or len(set(rows)) < len(rows):
            raise RowMismatch(f"row {known[0] if known else rows} is here already, or named twice")

    def _check_dummies(self, admits: Sequence[Admit], *, as_decodes: bool) -> None:
        if not admits:
            return
        self._check_new_rows([admit.row for admit in admits])
        if self._half_prefilled is not None or (as_decodes and self._prefill_ids):
            raise RowMismatch("dummies come behind all rows, and decodes of them before any prompt")
        for admit in admits:
            num_prompt = len(np.frombuffer(admit.prompt, dtype=np.int32))
            check_dummy(admit, num_prompt, most=1 if as_decodes else self.max_model_len)
        num_tokens = sum(admit.num_tokens for admit in admits)
        check_budget(num_tokens, self.num_tokens, self.max_tokens)

    def _check_admit(self, admit: Admit, prompt: npt.NDArray[np.int32]) -> None:
        self._check_new_rows([admit.row])
        check_sequence(admit, len(prompt), self.max_model_len)
        if self._memory.has_states and admit.cached_tokens:
            raise RowMismatch(
                f"row {admit.row} shares {admit.cached_tokens} tokens, and the recurrent state"
                " behind them is kept nowhere"
            )
        self._check_chunk(admit, num_cached=admit.cached_tokens, num_prompt=len(prompt))
        end = admit.cached_tokens + admit.num_tokens
        if end < len(prompt) and self._half_prefilled is not None:
            raise RowMismatch(
                f"row {admit.row} cannot be prefilled in part: row {self._half_prefilled.row} is"
            )

    def _check_continue(self, step: Continue, place: int) -> Prompt:
        half = self._half_prefilled
        if half is None or half.row != step.row:
            raise RowMismatch(f"row {step.row} cannot be continued: it is not half prefilled")
        if step.row in self._prefill_ids:
            raise RowMismatch(f"row {step.row} has a chunk in this step already")
        num_cached = int(self._rows["kv_length"][place])
        self._check_chunk(step, num_cached=num_cached, num_prompt=len(half.ids))
        return half

    def _check_chunk(self, step: Admit | Continue, *, num_cached: int, num_prompt: int) -> None:
        check_chunk(step, num_cached=num_cached, num_prompt=num_prompt)
        check_budget(step.num_tokens, self.num_tokens, self.max_tokens, row=step.row)
        check_chunk_blocks(step, num_cached=num_cached, block_tokens=self.block_tokens)
        check_block_ids(step.blocks, self.dummy)

    def _check_grant(self, rows: Sequence[RowId], blocks: Sequence[int]) -> Indices:
        """Return the places of the rows."""
        if len(rows) != len(blocks) or len(set(rows)) != len(rows):
            raise RowMismatch(f"{len(blocks)} blocks for the rows {list(rows)}, not one for each")
        check_budget(len(rows), self.num_tokens, self.max_tokens)
        check_block_ids(blocks, self.dummy)
        places = self._rows.find(rows, 0, self._num_paused)
        if (places == NO_ROW).any():
            unknown = [row for row, place in zip(rows, places, strict=True) if place == NO_ROW]
            raise RowMismatch(f"rows {unknown} got a block and wait for none")
        return places

    def _check_sampled(self, what: str, count: int) -> None:
        if count != self._num_sampling:
            raise RowMismatch(f"{count} {what} for {self._num_sampling} sampling rows")
