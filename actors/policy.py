"""Who runs next: which rows step, which prompts are prefilled, who waits and who is evicted.

Pure. A step is planned in two halves, with one question to the block allocator in between:
`propose` says what blocks would be needed, `plan` makes the step out of what was granted, and
`advance` applies its result. Decodes come first, then the one prompt that is being prefilled in
chunks, then new admissions, within `max_step_tokens`.

A decoding row whose last block is full asks for one more. If it gets none it waits (STARVED) and
asks again in every later step, oldest first; nothing new is admitted meanwhile. When nothing at
all could run, the newest row is evicted: its output is kept, its blocks go to the others, and it
is prefilled again from its old place in the queue.

A device that fails takes all its rows along, and which of them it failed of is not known. Each
request counts the failures it was part of since its last token; one that has several is tried
apart from other new rows, so that the count of the innocent goes back to 0 and that of the guilty
goes on to MAX_RETRIES.
"""

import itertools
from array import array
from bisect import insort

import msgspec

from callboard.actors.ledger import Ledger, Phase, Request
from callboard.gpu.memory import blocks_for
from callboard.gpu.prefix import BlockHash
from callboard.messages.base import unpack_floats, unpack_ids
from callboard.messages.blocks import (
    BlockRequest,
    BlocksGranted,
    Computed,
    PrefixRequest,
    ReserveBlocks,
)
from callboard.messages.errors import Failure, OutOfBlocks, RequestError, SequenceOverflow
from callboard.messages.requests import Delta, FinishReason, RequestId
from callboard.messages.steps import (
    Admit,
    Continue,
    DeviceReady,
    Grant,
    RowId,
    RunStep,
    StepDone,
)

MAX_RETRIES = 3
"""Device failures a request may be part of, with no token in between, before it is their cause."""

TRIED_APART = 2
"""After so many it is admitted with no other new row, so that the innocent can clear themselves."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests stand where."""

    waiting: int
    running: int
    paused: int


class Proposal(msgspec.Struct, kw_only=True):
    """A row that could run: its request, for how many tokens, and the row the request had then."""

    request: Request
    num_tokens: int
    had_row: RowId | None

    @property
    def stands(self) -> bool:
        """Whether the request is still where it was when the proposal was made."""
        return self.request.phase is not Phase.DONE and self.request.row == self.had_row


class Planned(msgspec.Struct, kw_only=True):
    """A step, or None when nothing can run; and rows that were given blocks for nothing."""

    step: RunStep | None
    unused: list[RowId]


class Advanced(msgspec.Struct, kw_only=True):
    """What a finished step means: deltas for the clients, and rows the device should forget."""

    deltas: list[Delta] = msgspec.field(default_factory=list)
    gone: list[RowId] = msgspec.field(default_factory=list)  # hold no blocks any more
    dropped: list[RowId] = msgspec.field(default_factory=list)  # of those, still in the context
    ended: list[Request] = msgspec.field(default_factory=list)
    computed: list[Computed] = msgspec.field(default_factory=list)  # blocks now full


class SchedulingPolicy:
    """The state of scheduling, and every decision about it."""

    def __init__(
        self, *, prefill_chunk_tokens: int | None = None, prefix_caching: bool = False
    ) -> None:
        self.ledger = Ledger()
        self.device: DeviceReady | None = None
        self.admitting = True
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prefix_caching = prefix_caching
        self._waiting: list[Request] = []
        self._starved: list[Request] = []
        self._full: list[Request] = []  # decoding, and their next token needs a block
        self._prefilling: Request | None = None
        self._row_ids = itertools.count(1)
        self._steps = itertools.count(1)
        self._proposed: dict[RowId, Proposal] = {}

    # Requests come and go.

    def room_for(self, prompt_tokens: int) -> int:
        """Return how many tokens a request could generate at most behind such a prompt."""
        device = self._known_device()
        return min(device.max_model_len, _most_tokens(device)) - prompt_tokens

    def check_fits(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        *,
        delivered: int = 0,
        request_id: RequestId = "",
    ) -> int:
        """Return the request's max_tokens; raises RequestError when it can never run.

        That is a ContextOverflow, and no transient one, where it is too long for what there is.
        `delivered` is how many tokens it has generated already, in an earlier life.
        """
        device = self._known_device()
        if prompt_tokens >= device.max_model_len:
            raise SequenceOverflow(
                f"the prompt has {prompt_tokens} tokens, and prompt and output together may have "
                f"{device.max_model_len}",
                request_id=request_id,
                field="prompt",
                allowed=f"1 to {device.max_model_len - 1} tokens",
            )
        wanted = max(1, self.room_for(prompt_tokens)) if max_tokens is None else max_tokens
        if prompt_tokens + wanted > device.max_model_len:
            raise SequenceOverflow(
                f"{prompt_tokens} prompt tokens and max_tokens {wanted} are together over the "
                f"context of {device.max_model_len}",
                request_id=request_id,
                field="max_tokens",
                allowed=f"1 to {device.max_model_len - prompt_tokens}",
            )
        needed = blocks_for(prompt_tokens + wanted - 1, device.block_tokens)
        if needed > device.num_blocks:
            raise OutOfBlocks(
                f"the request needs {needed} KV blocks of {device.block_tokens} tokens, and the "
                f"pool has {device.num_blocks}",
                request_id=request_id,
                transient=False,
                field="max_tokens",
                allowed=f"prompt and output within {_most_tokens(device)} tokens",
            )
        if delivered >= wanted:
            raise RequestError(
                f"{delivered} tokens are delivered already, and max_tokens is {wanted}",
                field="delivered",
                allowed=f"at most {wanted - 1} tokens",
            )
        return wanted

    def add(self, request: Request) -> None:
        """Queue an accepted request by priority, then age."""
        self.ledger.add(request)
        insort(self._waiting, request, key=_order)

    def finish(
        self, request: Request, reason: FinishReason, failure: Failure | None = None
    ) -> Advanced:
        """End a request wherever it stands; says which row and blocks that frees."""
        result = Advanced()
        self._end(result, request, reason, failure=failure)
        return result

    def checkpoint_all(self) -> list[RowId]:
        """Take every row off the device, outputs kept, each back to its place in the queue."""
        return [self._requeue(request) for request in self.ledger.rows()]

    def forget_all(self) -> list[RowId]:
        """Drop every request without a word; returns the rows they had."""
        rows = self.checkpoint_all()
        for request in list(self.ledger):
            self.ledger.finish(request, FinishReason.ABORT)
        self._waiting.clear()
        return rows

    def device_ready(self, device: DeviceReady, *, in_flight: bool) -> Advanced:
        """The device is new and knows no row: requeue all, fail those that cannot run on it.

        Those are the ones that keep killing it, and the ones that do not fit, accepted before it
        was known how much does. `in_flight` says whether a step was running when the device before
        it failed.
        """
        self.device = device
        result = Advanced()
        suspects = [row for row in self.ledger.rows() if row.phase is not Phase.STARVED]
        self.checkpoint_all()
        self._proposed = {}
        for request in suspects if in_flight else ():
            self._suspect(result, request)
        for request in list(self.ledger):
            self._fit_again(result, request)
        return result

    @property
    def has_work(self) -> bool:
        """Whether a step could be of use."""
        return self.ledger.num_rows > 0 or (self.admitting and bool(self._waiting))

    def counts(self) -> Counts:
        """Return how many requests stand where."""
        starved = len(self._starved)
        return Counts(
            waiting=len(self._waiting), running=self.ledger.num_rows - starved, paused=starved
        )

    # A step.

    def propose(self) -> ReserveBlocks:
        """Choose who could run in the next step, and ask for the blocks that takes."""
        device = self._known_device()
        self._proposed = {}
        step = next(self._steps)
        budget = device.max_step_tokens
        grow = [self._propose(request, 1) for request in self._in_want()]
        budget -= self.ledger.num_rows - (self._prefilling is not None)
        if self._prefilling is not None:
            chunk = self._chunk(self._prefilling, budget)
            if chunk > 0:
                budget -= chunk
                grow.append(self._propose(self._prefilling, chunk))
        admit = self._propose_admissions(budget)
        return ReserveBlocks(step=step, grow=tuple(grow), admit=tuple(admit))

    def plan(self, granted: BlocksGranted) -> Planned:
        """Make the step out of what was granted."""
        prefilling = int(self._prefilling is not None)
        admits: list[Admit] = []
        continues: list[Continue] = []
        grants: list[Grant] = []
        standing = {row: proposal for row, proposal in self._proposed.items() if proposal.stands}
        for row, proposal in standing.items():
            request, blocks = proposal.request, granted.blocks.get(row)
            if blocks is None:
                self._starve(request)
            elif proposal.had_row is None:
                cached = granted.cached.get(row, 0)
                admits.append(self._admit(proposal, row, cached, blocks))
            elif request.phase is Phase.PREFILLING:
                request.blocks += len(blocks)
                continues.append(Continue(row=row, num_tokens=proposal.num_tokens, blocks=blocks))
            else:
                self._feed(request)
                grants.append(Grant(row=row, block=blocks[0]))
        self._proposed = {row: standing[row] for row in granted.blocks if row in standing}
        decoding = self.ledger.num_rows - len(self._starved) - prefilling - len(admits)
        step = RunStep(
            step=granted.step,
            admits=tuple(admits),
            continues=tuple(continues),
            grants=tuple(grants),
            life=self._known_device().life,
        )
        return Planned(
            step=step if admits or continues or decoding > 0 else None,
            unused=[row for row in granted.blocks if row not in standing],
        )

    def evict(self) -> RowId | None:
        """Take the newest row off the device so that older ones can go on; None without rows."""
        rows = self.ledger.rows()
        if not rows:
            return None
        return self._requeue(max(rows, key=_order))

    def advance(self, done: StepDone, now: float) -> Advanced:
        """Apply a step's result; results of rows that were dropped meanwhile change nothing."""
        result = Advanced()
        failed_rows = {failed.row for failed in done.failed}
        prefilled = self._count_prefilled(result, failed_rows)
        ended = dict.fromkeys(done.stopped, FinishReason.STOP)
        ended.update(dict.fromkeys(done.full, FinishReason.LENGTH))
        logprobs: list[float] | list[None] = (
            unpack_floats(done.logprobs) if done.logprobs else [None] * len(done.rows)
        )
        token_ids = unpack_ids(done.token_ids)
        for row, token_id, logprob in zip(done.rows, token_ids, logprobs, strict=True):
            request = self.ledger.in_row(row)
            if request is None:
                continue
            request.crashes = 0
            if request.first_token_at is None:
                request.first_token_at = now
            top = done.top_logprobs.get(row, ())
            delta = request.take_token(token_id, logprob, top, done.weights_version)
            if row not in prefilled:
                request.length += 1
                self._note_computed(result, request)
            self._settle(result, request, delta, ended.get(row))
        for failed in done.failed:
            request = self.ledger.in_row(failed.row)
            if request is not None:
                failure = Failure(code="RequestFailed", message=failed.message)
                self._end(result, request, FinishReason.ERROR, failure=failure, in_context=False)
        return result

    # Details of the above.

    def _known_device(self) -> DeviceReady:
        assert self.device is not None, "nothing is scheduled before the device is ready"
        return self.device

    def _suspect(self, result: Advanced, request: Request) -> None:
        request.crashes += 1
        if request.crashes > MAX_RETRIES:
            why = f"the device failed {request.crashes} times while it ran this request"
            failure = Failure(code="RequestFailed", message=why)
            self._end(result, request, FinishReason.ERROR, failure=failure)

    def _fit_again(self, result: Advanced, request: Request) -> None:
        try:
            request.max_tokens = self.check_fits(
                len(request.prompt),
                request.params.max_tokens,
                delivered=len(request.output),
                request_id=request.request_id,
            )
        except RequestError as error:
            self._end(result, request, FinishReason.ERROR, failure=Failure.of(error))

    def _in_want(self) -> list[Request]:
        """Decoding rows without room for their next token, oldest first."""
        wanting = [request for request in self._full if request.phase is Phase.DECODING]
        self._full = wanting
        return sorted([*self._starved, *wanting], key=_order)

    def _propose(self, request: Request, num_tokens: int) -> BlockRequest:
        row = next(self._row_ids) if request.row is None else request.row
        self._proposed[row] = Proposal(request=request, num_tokens=num_tokens, had_row=request.row)
        end = request.length + num_tokens
        count = blocks_for(end, self._known_device().block_tokens) - request.blocks
        return BlockRequest(row=row, count=count)

    def _propose_new(self, request: Request, chunk: int) -> PrefixRequest:
        """Propose a row for a waiting request; how much of it is cached is not known yet."""
        row = next(self._row_ids)
        self._proposed[row] = Proposal(request=request, num_tokens=chunk, had_row=None)
        hashes: list[BlockHash] = []
        if self._prefix_caching:
            block_tokens = self._known_device().block_tokens
            # One token at least is left to compute: the next is sampled from its logits.
            hashes = request.hashes_of((request.target - 1) // block_tokens, block_tokens)
        return PrefixRequest(
            row=row, prompt_tokens=request.target, chunk_tokens=chunk, hashes=tuple(hashes)
        )

    def _chunk(self, request: Request, budget: int) -> int:
        limit = self._prefill_chunk_tokens or budget
        return min(request.target - request.length, budget, limit)

    def _propose_admissions(self, budget: int) -> list[PrefixRequest]:
        admit: list[PrefixRequest] = []
        if not self._may_admit():
            return admit
        slots = self._known_device().max_rows - self.ledger.num_rows
        for request in self._waiting[: max(0, slots)]:
            request.target = len(request.prompt) + len(request.output)
            chunk = self._chunk(request, budget)
            if chunk <= 0 or (admit and _is_suspect(request)):
                break
            admit.append(self._propose_new(request, chunk))
            budget -= chunk
            if chunk < request.target or _is_suspect(request):
                break  # one prompt at a time is prefilled in parts, one suspect at a time is tried
        return admit

    def _may_admit(self) -> bool:
        if not self.admitting or not self._waiting or self._starved:
            return False
        if self._prefilling is not None and self._unfinished_after_chunk(self._prefilling):
            return False
        return not any(map(_is_suspect, self.ledger.rows()))

    def _unfinished_after_chunk(self, request: Request) -> bool:
        assert request.row is not None
        proposed = self._proposed.get(request.row)
        return proposed is None or request.length + proposed.num_tokens < request.target

    def _admit(
        self, proposal: Proposal, row: RowId, num_cached: int, blocks: tuple[int, ...]
    ) -> Admit:
        """Make a row of a waiting request, the first blocks of which hold its prompt already."""
        request = proposal.request
        self._waiting.remove(request)
        self.ledger.admit(request, row)
        request.blocks, request.shared = len(blocks), num_cached
        request.length = num_cached * self._known_device().block_tokens
        num_tokens = min(proposal.num_tokens, request.target - request.length)
        proposal.num_tokens = num_tokens
        if request.length + num_tokens < request.target:
            self._prefilling = request
        return Admit(
            row=row,
            cached_tokens=request.length,
            prompt=request.tokens.tobytes(),
            num_tokens=num_tokens,
            blocks=blocks,
            sampling=request.sampling(),
        )

    def _feed(self, request: Request) -> None:
        request.blocks += 1
        if request.phase is Phase.STARVED:
            request.phase = Phase.DECODING
            self._starved.remove(request)
        else:
            self._full.remove(request)

    def _starve(self, request: Request) -> None:
        if request.phase is Phase.DECODING:
            request.phase = Phase.STARVED
            self._full.remove(request)
            self._starved.append(request)

    def _count_prefilled(self, result: Advanced, failed: set[RowId]) -> set[RowId]:
        """Account for the prompt tokens the step put into the cache; returns the rows now whole."""
        whole = set()
        for row, proposal in self._proposed.items():
            request = proposal.request
            if request.row != row or request.phase is not Phase.PREFILLING:
                continue
            request.length += proposal.num_tokens
            if row not in failed:
                self._note_computed(result, request)
            if request.length == request.target:
                request.phase = Phase.DECODING
                whole.add(row)
                if self._prefilling is request:
                    self._prefilling = None
        self._proposed = {}
        return whole

    def _note_computed(self, result: Advanced, request: Request) -> None:
        """Let others find the blocks that a row has filled by now."""
        block_tokens = self._known_device().block_tokens
        first, full = request.shared, request.length // block_tokens
        if not self._prefix_caching or full <= first:
            return
        assert request.row is not None
        hashes = request.hashes_of(full, block_tokens)
        request.shared = full
        result.computed.append(
            Computed(
                row=request.row,
                first=first,
                hashes=tuple(hashes[first:]),
                parent=hashes[first - 1] if first else b"",
            )
        )

    def _settle(
        self, result: Advanced, request: Request, delta: Delta, reason: FinishReason | None
    ) -> None:
        """Send one token of one row on its way, and end the request if that was its last."""
        if request.length % self._known_device().block_tokens == 0:
            self._full.append(request)
        if reason is None and not request.hit_stop_string:
            result.deltas.append(delta)
            return
        in_context = reason is None
        if request.hit_stop_string:
            reason = FinishReason.STOP
        assert reason is not None
        self._end(result, request, reason, last=delta, in_context=in_context)

    def _end(
        self,
        result: Advanced,
        request: Request,
        reason: FinishReason,
        *,
        failure: Failure | None = None,
        last: Delta | None = None,
        in_context: bool = True,
    ) -> None:
        if request.row is None:
            self._waiting.remove(request)
        else:
            result.gone.append(request.row)
            if in_context:
                result.dropped.append(request.row)
            self._leave_lists(request)
        result.deltas.append(self.ledger.finish(request, reason, failure=failure, last=last))
        result.ended.append(request)

    def _requeue(self, request: Request) -> RowId:
        self._leave_lists(request)
        row = self.ledger.checkpoint(request)
        insort(self._waiting, request, key=_order)
        return row

    def _leave_lists(self, request: Request) -> None:
        if self._prefilling is request:
            self._prefilling = None
        if request.phase is Phase.STARVED:
            self._starved.remove(request)
        elif request in self._full:
            self._full.remove(request)


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _is_suspect(request: Request) -> bool:
    return request.crashes >= TRIED_APART


def _most_tokens(device: DeviceReady) -> int:
    """Return how long a sequence may get: the last token sampled is never put into the cache."""
    return device.num_blocks * device.block_tokens + 1


def tokens_of(packed: bytes) -> "array[int]":
    """Unpack token ids into the compact form requests keep them in."""
    ids: array[int] = array("i")
    ids.frombytes(packed)
    return ids
