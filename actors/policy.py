"""Who runs next: which rows step, which prompts are prefilled, who waits and who is evicted.

Pure. A step is planned in two halves, with one question to the block allocator in between:
`propose` says what blocks would be needed, `plan` makes the step out of what was granted, and
`advance` applies its result. Decodes come first, then the one prompt that is being prefilled in
chunks, then new admissions, within `max_step_tokens`.

A step may be planned while the one before it still runs. What that one will do to the lengths of
rows is known (see `Timeline`); which rows it ends is not, so a planned step may name rows that have
ended by then, and what comes back of a row that is gone is dropped.

A decoding row whose last block is full asks for one more. If it gets none it waits (STARVED) and
asks again in every later step, oldest first; nothing new is admitted meanwhile. When nothing at
all could run, or the starved hold more than `paused_limit` blocks, the newest row is evicted: its
output is kept, its blocks go to the others, and it is prefilled again from its old place in the
queue.

A waiting request that does not fit may be overtaken by younger ones that do, but only in
MAX_OVERTAKEN steps: then the others wait with it until it fits. One that was evicted is never
overtaken.

A device that fails takes all its rows along, and which of them it failed of is not known. Each
request counts the failures it was part of since its last token; one that has several is tried
apart from other new rows, so that the count of the innocent goes back to 0 and that of the guilty
goes on to MAX_RETRIES.

A device that had not the memory for a step has lost its rows, too. Then steps may have half as many
tokens as that one had; only a request that was alone in it is to blame. The limit is doubled after
STEPS_TO_GROW steps that went well.
"""

import itertools
import time
from bisect import insort
from collections import deque
from collections.abc import Callable

import msgspec

from callboard.actors.ledger import Ledger, Phase, Request
from callboard.actors.room import check_fits
from callboard.actors.timeline import Timeline
from callboard.gpu.memory import blocks_for
from callboard.gpu.prefix import BlockHash, root_hash
from callboard.messages.base import unpack_floats, unpack_ids
from callboard.messages.blocks import (
    BlockRequest,
    BlocksGranted,
    Computed,
    PrefixRequest,
    ReserveBlocks,
)
from callboard.messages.errors import Failure, RequestError
from callboard.messages.requests import Delta, EventKind, FinishReason, RequestId
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

STEPS_TO_GROW = 1000
"""Steps after which more tokens are tried again than the device had not the memory for."""

MAX_OVERTAKEN = 8
"""Steps in which a request that does not fit may see younger ones admitted."""

LOOK_AHEAD = 8
"""How many waiting requests are tried in a step while the pool had no room for all in the last."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests stand where."""

    waiting: int
    running: int
    paused: int


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A row that could run: its request, for how many tokens, and the row the request had then."""

    request: Request
    num_tokens: int
    had_row: RowId | None

    @property
    def stands(self) -> bool:
        """Whether the request is still where it was when the proposal was made."""
        return self.request.phase is not Phase.DONE and self.request.row == self.had_row


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A step under way: its number, its run, and how long each prompt in it is cached after it."""

    step: int
    run: int
    prefilled: dict[RowId, int]
    prompt_tokens: int = 0  # fed by the step


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or None when nothing can run; rows given blocks for nothing; rows just evicted."""

    step: RunStep | None
    unused: list[RowId]
    evicted: list[RowId]


class Advanced(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished step means: deltas for the clients, and rows the device should forget."""

    deltas: list[Delta] = msgspec.field(default_factory=list)
    gone: list[RowId] = msgspec.field(default_factory=list)  # hold no blocks any more
    dropped: list[RowId] = msgspec.field(default_factory=list)  # of those, still in the context
    ended: list[Request] = msgspec.field(default_factory=list)
    computed: list[Computed] = msgspec.field(default_factory=list)  # blocks now full


class SchedulingPolicy:
    """The state of scheduling, and every decision about it."""

    def __init__(
        self,
        *,
        prefill_chunk_tokens: int | None = None,
        prefix_caching: bool = False,
        paused_limit: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`paused_limit` is in blocks; `clock` gives the times of requests' events."""
        self.ledger = Ledger()
        self.device: DeviceReady | None = None
        self._to_drain: dict[Request, None] | None = None  # what is to end first, in order
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._prefix_caching = prefix_caching
        self.weights_version = 0
        self._paused_limit = paused_limit
        self._clock = clock
        self._waiting: list[Request] = []
        self._denied = False  # whether a waiting request did not fit, last time
        self._starved: list[Request] = []
        self._full: list[RowId] = []  # decoding, and in want of a block for the run proposed last
        self._prefilling: Request | None = None
        self._suspect: Request | None = None  # the one that is being tried apart
        self._row_ids = itertools.count(1)
        self._steps = itertools.count(1)
        self._runs = 0
        self._timeline = Timeline(block_tokens=1)
        self._proposed: dict[RowId, Proposal] = {}
        self._rows_then = 0  # rows there were when blocks were asked for
        self._flights: deque[Flight] = deque()
        self._max_tokens: int | None = None  # of a step, where the device had not memory for more
        self._steps_to_grow = 0

    @property
    def weights_version(self) -> int:
        """Which weights compute what is admitted from now on; rows that are there stay as they are.

        Only what the same weights have computed is shared.
        """
        return self._weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._weights_version = version
        self._root = root_hash(salt=b"", weights_version=version)

    # Requests come and go.

    def check_fits(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        *,
        delivered: int = 0,
        request_id: RequestId = "",
    ) -> int:
        """Return the request's max_tokens; raises RequestError when it can never run."""
        return check_fits(
            self._known_device(),
            prompt_tokens,
            max_tokens,
            delivered=delivered,
            request_id=request_id,
        )

    def add(self, request: Request) -> None:
        """Queue an accepted request by priority, then age."""
        self.ledger.add(request)
        request.note(EventKind.QUEUED, self._clock())
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
            self.ledger.finish(request, FinishReason.ABORT, at=self._clock())
        self._waiting.clear()
        return rows

    def device_ready(self, device: DeviceReady) -> Advanced:
        """The device knows no row: requeue all, fail those that cannot run on it.

        Those are the ones that keep killing it, and the ones that do not fit, accepted before it
        was known how much does. All rows are gone, and the allocator is to hear of it: it may have
        given them blocks of the new device, which it knew of first.
        """
        self.device = device
        suspects = [row for row in self.ledger.rows() if row.phase is not Phase.STARVED]
        was_running = bool(self._flights)
        if not device.out_of_memory:
            self._max_tokens = None
        elif was_running:
            self._try_less(self._flights[0], len(suspects))
            was_running = len(suspects) == 1
        result = Advanced(gone=self.checkpoint_all())
        self._proposed = {}
        self._flights.clear()
        self._full = []
        self._timeline = Timeline(device.block_tokens)
        for request in suspects if was_running else ():
            self._blame(result, request, device)
        for request in list(self.ledger):
            self._fit_again(result, request)
        return result

    @property
    def has_work(self) -> bool:
        """Whether a step could be of use."""
        return self.ledger.num_rows > 0 or bool(self._admissible())

    def begin_drain(self) -> None:
        """Admit nothing from now on but requests that have run, which may have lost their row."""
        self._to_drain = dict.fromkeys(request for request in self.ledger if request.has_run)

    def end_drain(self) -> None:
        """Admit all requests again."""
        self._to_drain = None

    def undrained(self) -> list[Request]:
        """Return the requests that had run when the drain began, and have not ended."""
        asked = self._to_drain or ()
        return [one for one in asked if self.ledger.get(one.request_id) is one]

    @property
    def max_tokens(self) -> int | None:
        """How many tokens a step may have after one that was too large; None where none was."""
        return self._max_tokens

    @property
    def in_flight(self) -> int:
        """How many steps are under way."""
        return len(self._flights)

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
        self._rows_then = self.ledger.num_rows
        step = next(self._steps)
        budget = min(device.max_step_tokens, self._max_tokens or device.max_step_tokens)
        self._full += self._timeline.wanting(self._runs + 1)
        grow = [self._propose(request, 1) for request in self._in_want()]
        budget -= self.ledger.num_rows - (self._prefilling is not None)
        if self._prefilling is not None:
            chunk = self._chunk(self._prefilling, budget)
            if chunk > 0:
                budget -= chunk
                grow.append(self._propose(self._prefilling, chunk))
        return ReserveBlocks(
            step=step,
            grow=tuple(grow),
            admit=tuple(self._propose_admissions(budget)),
            budget=budget,
            may_split=self._prefilling is None or self._ends_with_chunk(self._prefilling),
        )

    def plan(self, granted: BlocksGranted) -> Planned:
        """Make the step out of what was granted."""
        run = self._runs + 1
        row_left = self.ledger.num_rows < self._rows_then
        admits: list[Admit] = []
        continues: list[Continue] = []
        grants: list[Grant] = []
        prefilled: dict[RowId, int] = {}
        standing = {row: proposal for row, proposal in self._proposed.items() if proposal.stands}
        self._proposed, self._full = {}, []
        for row, proposal in standing.items():
            request, blocks = proposal.request, granted.blocks.get(row)
            if blocks is None:
                self._go_without(request, run)
            elif proposal.had_row is None:
                cached, chunk = granted.cached.get(row, 0), granted.chunks[row]
                admits.append(self._admit(request, row, cached, chunk, blocks))
                prefilled[row] = request.length
            elif request is self._prefilling:
                continues.append(self._continue(proposal, row, blocks))
                prefilled[row] = request.length
            else:
                self._feed(request, row, run)
                grants.append(Grant(row=row, block=blocks[0]))
        for row in prefilled:
            self._decode_from_next(row, run)
        self._count_overtaken(standing, granted)
        evicted = self._evict_beyond_limit()
        step = None
        if admits or continues or grants or self._any_decodes_in(run):
            self._runs = run
            prompt_tokens = sum(admit.num_tokens for admit in admits)
            prompt_tokens += sum(chunk.num_tokens for chunk in continues)
            self._flights.append(
                Flight(step=granted.step, run=run, prefilled=prefilled, prompt_tokens=prompt_tokens)
            )
            step = RunStep(
                step=granted.step,
                admits=tuple(admits),
                continues=tuple(continues),
                grants=tuple(grants),
                life=self._known_device().life,
            )
        elif not (evicted or row_left or self._flights):
            # No row has left its blocks since they were asked for, and no step may end one.
            evicted = self._evict_newest(self.ledger.rows())
        unused = [row for row in granted.blocks if row not in standing]
        return Planned(step=step, unused=unused, evicted=evicted)

    def is_next(self, done: StepDone) -> bool:
        """Whether this is the result of the oldest step under way."""
        return bool(self._flights) and self._flights[0].step == done.step

    def advance(self, done: StepDone) -> Advanced:
        """Apply the oldest step's result; what it says of rows that are gone changes nothing."""
        flight = self._flights.popleft()
        result = Advanced()
        self._note_computed(result, flight, failed={failed.row for failed in done.failed})
        for row, part in done.prompt_logprobs.items():
            if (request := self.ledger.in_row(row)) is not None:
                request.prompt_scores.take(part)
                request.scored_by = done.weights_version
        self._take_tokens(result, done)
        self._try_more()
        for row in done.full:  # those that were to sample no token are here still
            if (request := self.ledger.in_row(row)) is not None:
                self._end(result, request, FinishReason.LENGTH, in_context=False)
        for failed in done.failed:
            if (request := self.ledger.in_row(failed.row)) is not None:
                failure = Failure(code="RequestFailed", message=failed.message)
                self._end(result, request, FinishReason.ERROR, failure=failure, in_context=False)
        return result

    # Before a step: who asks for what

    def _known_device(self) -> DeviceReady:
        assert self.device is not None, "nothing is scheduled before the device is ready"
        return self.device

    def _in_want(self) -> list[Request]:
        """Decoding rows without room for their next token, oldest first."""
        full = [self.ledger.in_row(row) for row in self._full]
        wanting = [request for request in full if request is not None]
        return sorted([*self._starved, *wanting], key=_order)

    def _propose(self, request: Request, num_tokens: int) -> BlockRequest:
        row = request.row
        assert row is not None
        self._proposed[row] = Proposal(request=request, num_tokens=num_tokens, had_row=row)
        count = 1
        if request is self._prefilling:
            end = request.length + num_tokens
            count = blocks_for(end, self._known_device().block_tokens) - request.blocks
        return BlockRequest(row=row, count=count)

    def _propose_admissions(self, budget: int) -> list[PrefixRequest]:
        """Ask for those who wait, as far as the budget reaches, and for a few more.

        What is cached of a prompt costs nothing, so more may fit than it seems.
        """
        admit: list[PrefixRequest] = []
        if budget <= 0 or not self._may_admit():
            return admit
        places = self._known_device().max_rows - self.ledger.num_rows
        left, extra = budget, LOOK_AHEAD
        waiting = self._admissible()
        for request in waiting[: min(places, LOOK_AHEAD) if self._denied else places]:
            extra -= left <= 0
            if extra < 0 or (admit and _is_suspect(request)):
                break
            request.target = len(request.prompt) + len(request.output)
            admit.append(self._propose_new(request, budget))
            left -= request.target
            if _is_suspect(request):
                break
        return admit

    def _may_admit(self) -> bool:
        if self._starved:
            return False
        return self._suspect is None or not _is_suspect(self._suspect)

    def _admissible(self) -> list[Request]:
        """Return the waiting requests that may have a row, in their order."""
        if self._to_drain is None:
            return self._waiting
        return [request for request in self._waiting if request in self._to_drain]

    def _propose_new(self, request: Request, budget: int) -> PrefixRequest:
        """Propose a row for a waiting request; how much of it is cached is not known yet."""
        row = next(self._row_ids)
        self._proposed[row] = Proposal(request=request, num_tokens=0, had_row=None)
        hashes: list[BlockHash] = []
        request.hash_from(self._root)
        if self._prefix_caching and not request.prompt_scores.missing:
            block_tokens = self._known_device().block_tokens
            # One token at least is left to compute: the next is sampled from its logits.
            hashes = request.hashes_of((request.target - 1) // block_tokens, block_tokens)
        return PrefixRequest(
            row=row,
            prompt_tokens=request.target,
            chunk_tokens=self._prefill_chunk_tokens or budget,
            hashes=tuple(hashes),
            may_be_overtaken=_may_be_overtaken(request),
        )

    def _chunk(self, request: Request, budget: int) -> int:
        limit = self._prefill_chunk_tokens or budget
        return min(request.target - request.length, budget, limit)

    def _ends_with_chunk(self, request: Request) -> bool:
        """Whether the prompt that is prefilled in parts has its last one in the step proposed."""
        assert request.row is not None
        proposed = self._proposed.get(request.row)
        return proposed is not None and request.length + proposed.num_tokens == request.target

    # The step: who got what

    def _admit(
        self,
        request: Request,
        row: RowId,
        num_cached: int,
        num_tokens: int,
        blocks: tuple[int, ...],
    ) -> Admit:
        """Make a row of a waiting request, the first blocks of which hold its prompt already."""
        self._waiting.remove(request)
        self.ledger.admit(request, row)
        request.note(EventKind.ADMITTED, self._clock())
        request.overtaken = 0
        if _is_suspect(request):
            self._suspect = request
        request.blocks, request.shared = len(blocks), num_cached
        cached_tokens = num_cached * self._known_device().block_tokens
        if request.cached_tokens is None:
            request.cached_tokens = min(cached_tokens, len(request.prompt))
        request.length = cached_tokens + num_tokens
        if request.length < request.target:
            self._prefilling = request
        return Admit(
            row=row,
            cached_tokens=cached_tokens,
            prompt=request.tokens.tobytes(),
            num_tokens=num_tokens,
            blocks=blocks,
            sampling=request.sampling(),
        )

    def _continue(self, proposal: Proposal, row: RowId, blocks: tuple[int, ...]) -> Continue:
        request = proposal.request
        request.blocks += len(blocks)
        request.length += proposal.num_tokens
        return Continue(row=row, num_tokens=proposal.num_tokens, blocks=blocks)

    def _feed(self, request: Request, row: RowId, run: int) -> None:
        """Give a decoding row the block it wants from this run on."""
        if request.phase is Phase.STARVED:
            request.phase = Phase.DECODING
            request.ends_with += run - request.starved_at
            request.note(EventKind.RESUMED, self._clock())
            self._starved.remove(request)
        length = request.blocks * self._known_device().block_tokens + 1
        request.blocks += 1
        self._timeline.decodes(row, after=run, length=length, ends_with=request.ends_with)

    def _go_without(self, request: Request, run: int) -> None:
        """A row that asked got nothing; one that decodes waits from this run on."""
        if request.phase is Phase.DECODING:
            request.phase = Phase.STARVED
            request.starved_at = run
            request.note(EventKind.PAUSED, self._clock())
            self._starved.append(request)

    def _decode_from_next(self, row: RowId, run: int) -> None:
        """A row whose prompt is cached to its end with this run decodes from the next one on."""
        request = self.ledger.in_row(row)
        assert request is not None
        if request.length < request.target:
            return
        if self._prefilling is request:
            self._prefilling = None
        request.phase = Phase.DECODING
        num_more = request.max_tokens - len(request.output) - 1
        request.ends_with = run + max(0, num_more)
        self._timeline.decodes(row, after=run, length=request.target, ends_with=request.ends_with)

    def _count_overtaken(self, standing: dict[RowId, Proposal], granted: BlocksGranted) -> None:
        """See who did not fit, and who of them was overtaken by somebody who did."""
        self._denied = bool(granted.denied)
        asked = [row for row, proposal in standing.items() if proposal.had_row is None]
        fitted = [index for index, row in enumerate(asked) if row in granted.blocks]
        for row in asked[: fitted[-1]] if fitted else ():
            if row in granted.denied:
                standing[row].request.overtaken += 1

    def _evict_beyond_limit(self) -> list[RowId]:
        """Evict the newest of those that wait for a block, where they hold more than they may.

        One a step, since the next may give its blocks to the others; and none whose last token is
        still under way, which it would come back without, to wait again.
        """
        limit, flights = self._paused_limit, self._flights
        if limit is None or sum(request.blocks for request in self._starved) <= limit:
            return []
        first = flights[0].run if flights else self._runs + 1
        return self._evict_newest([row for row in self._starved if row.starved_at <= first])

    def _evict_newest(self, requests: list[Request]) -> list[RowId]:
        """Take the newest of these off the device so that older ones can go on."""
        return [self._requeue(max(requests, key=_order))] if requests else []

    def _any_decodes_in(self, run: int) -> bool:
        """Whether any row feeds a token in this run, as far as is known."""
        return any(
            request.phase is Phase.DECODING and request.ends_with >= run
            for request in self.ledger.iter_rows()
        )

    # After a step

    def _note_computed(self, result: Advanced, flight: Flight, *, failed: set[RowId]) -> None:
        """Let others find the blocks that a step has filled."""
        block_tokens = self._known_device().block_tokens
        filled = [(row, length // block_tokens) for row, length in flight.prefilled.items()]
        filled += self._timeline.filled(flight.run)
        if not self._prefix_caching:
            return
        for row, num_blocks in filled:
            request = self.ledger.in_row(row)
            if request is None or row in failed or num_blocks <= request.shared:
                continue
            first, request.shared = request.shared, num_blocks
            hashes = request.hashes_of(num_blocks, block_tokens)
            parent = hashes[first - 1] if first else b""
            new = tuple(hashes[first:])
            result.computed.append(Computed(row=row, first=first, hashes=new, parent=parent))

    def _take_tokens(self, result: Advanced, done: StepDone) -> None:
        """Give each row's token to its request, and end the requests whose last it was."""
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
            if not request.output:
                request.first_token_at = self._clock()
                request.note(EventKind.FIRST_TOKEN, request.first_token_at)
            top = done.top_logprobs.get(row, ())
            delta = request.take_token(token_id, logprob, top, done.weights_version)
            reason = ended.get(row)
            if request.hit_stop_string:
                in_context = reason is None
                self._end(result, request, FinishReason.STOP, last=delta, in_context=in_context)
            elif reason is not None:
                self._end(result, request, reason, last=delta, in_context=False)
            else:
                result.deltas.append(delta)

    # What a device has not the memory for

    def _try_less(self, failed: Flight, num_rows: int) -> None:
        """Halve the tokens of a step, counted from the one that was too large."""
        num_tokens = failed.prompt_tokens + max(0, num_rows - len(failed.prefilled))
        self._max_tokens = max(1, min(num_tokens, self._max_tokens or num_tokens) // 2)
        self._steps_to_grow = STEPS_TO_GROW

    def _try_more(self) -> None:
        """After enough steps that went well, see whether the memory is there for larger ones."""
        if self._max_tokens is None:
            return
        self._steps_to_grow -= 1
        if self._steps_to_grow == 0:
            self._steps_to_grow = STEPS_TO_GROW
            more = 2 * self._max_tokens
            self._max_tokens = more if more < self._known_device().max_step_tokens else None

    # Requests that leave

    def _blame(self, result: Advanced, request: Request, device: DeviceReady) -> None:
        """Count a failure of the device against a request that was part of it."""
        request.crashes += 1
        if request.crashes > MAX_RETRIES:
            what = "ran out of memory" if device.out_of_memory else "failed"
            why = f"the device {what} {request.crashes} times while it ran this request"
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
        result.deltas.append(
            self.ledger.finish(request, reason, at=self._clock(), failure=failure, last=last)
        )
        result.ended.append(request)

    def _requeue(self, request: Request) -> RowId:
        self._leave_lists(request)
        row = self.ledger.checkpoint(request)
        request.note(EventKind.EVICTED, self._clock())
        insort(self._waiting, request, key=_order)
        return row

    def _leave_lists(self, request: Request) -> None:
        if self._prefilling is request:
            self._prefilling = None
        if self._suspect is request:
            self._suspect = None
        if request.phase is Phase.STARVED:
            self._starved.remove(request)


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _is_suspect(request: Request) -> bool:
    return request.crashes >= TRIED_APART


def _may_be_overtaken(request: Request) -> bool:
    """Whether younger ones may go first where it does not fit; not so once it had a row."""
    return request.overtaken < MAX_OVERTAKEN and request.cached_tokens is None
