"""The scheduler: owns the requests of a replica and decides, step by step, who runs.

A step is one round: propose to the allocator, plan with what it grants, tell the executor, apply
its result. One question to the allocator is open at a time, and up to `pipeline_depth` steps are
at the executor: with 2, it finds the next step in its mailbox when it has finished one. PAUSE is
acknowledged when nothing is under way, and then nothing is begun but what a STEP allows; everything
else (new requests, aborts, deadlines) goes on meanwhile.
"""

import secrets
import time
from array import array
from collections.abc import Callable

import msgspec
import trio

from callboard.actors.actor import Actor
from callboard.actors.ledger import Request, TextOut
from callboard.actors.mailbox import Reply
from callboard.actors.policy import Advanced, SchedulingPolicy
from callboard.actors.prompt_scores import check_size
from callboard.actors.ref import ActorRef
from callboard.actors.system import Timer
from callboard.messages.base import Message, id_array
from callboard.messages.blocks import (
    BlocksGranted,
    CacheBlocks,
    ReleaseBlocks,
    ReserveBlocks,
)
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    Step,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    verb_name,
)
from callboard.messages.errors import Failure, MailboxFull, RequestError
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.requests import (
    Abort,
    Accepted,
    Enqueue,
    FinishReason,
    ForgetAll,
    Refused,
    RequestId,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import DeviceReady, DropRows, RowId, RunStep, StepDone

SchedulerInbox = Enqueue | Abort | ForgetAll | BlocksGranted | StepDone | DeviceReady

MAX_QUEUED = 10_000
"""Requests a scheduler keeps, running and waiting; more are refused."""


class _DeadlinePassed(Message, frozen=True):
    """Scheduler → itself: the request's time is over, unless it ended before."""

    request_id: RequestId


class _DrainOver(Message, frozen=True):
    """Scheduler → itself: the requests that still run have had their time, in that drain."""

    number: int


class Scheduler(Actor[SchedulerInbox | _DeadlinePassed | _DrainOver]):
    """See the module."""

    capacity = 4 * 1024

    def __init__(
        self,
        *,
        allocator: ActorRef[ReserveBlocks | CacheBlocks | ReleaseBlocks],
        executor: ActorRef[RunStep | DropRows],
        out: ActorRef[Accepted | Refused | TokensOut | StepStats | RequestStats],
        text_for: Callable[[SamplingParams], TextOut] | None,
        eos_token_ids: tuple[int, ...] = (),
        prefill_chunk_tokens: int | None = None,
        prefix_caching: bool = False,
        paused_limit: int | None = None,
        pipeline_depth: int = 1,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        """`text_for` makes the text stream of a request; None when the model has no tokenizer."""
        self._epoch = time.time() - trio.current_time()
        self._allocator = allocator
        self._executor = executor
        self._out = out
        self._text_for = text_for
        self._eos_token_ids = eos_token_ids
        self._max_queued = max_queued
        self._policy = SchedulingPolicy(
            prefill_chunk_tokens=prefill_chunk_tokens,
            prefix_caching=prefix_caching,
            paused_limit=paused_limit,
            clock=self._clock,
        )
        self._pipeline_depth = pipeline_depth
        self._asked: int | None = None  # the step the allocator was asked about
        self._stuck = False  # nothing more can run before a step under way is done
        self._paused = False
        self._draining = False
        self._drains = 0
        self._timers: dict[RequestId, Timer] = {}
        self._pausing: list[tuple[Pause, Reply]] = []
        self._stepping: tuple[Step, Reply, int] | None = None  # and the steps there were before
        self._allowance = 0  # steps it may begin yet, until then:
        self._step_until = 0.0
        self._arrivals = 0
        self._steps = 0

    async def receive(self, message: SchedulerInbox | _DeadlinePassed | _DrainOver) -> None:
        """Handle one message, then begin a step if one is due."""
        match message:
            case Enqueue():
                await self._enqueue(message)
            case Abort(request_id=request_id):
                await self._finish(request_id, FinishReason.ABORT)
            case _DeadlinePassed(request_id=request_id):
                await self._expire(request_id)
            case ForgetAll():
                await self._forget_all()
            case BlocksGranted():
                await self._plan(message)
            case StepDone():
                await self._advance(message)
            case DeviceReady():
                await self._meet_device(message)
            case _DrainOver(number=number):
                await self._abort_running(number)
        await self._go_on()

    def _clock(self) -> float:
        """Return seconds since 1970, in which nobody can turn back the clock meanwhile."""
        return self._epoch + trio.current_time()

    async def on_start(self) -> None:
        """Begin as the tree is, with its weights; where it is paused, without a step."""
        if self.cell.weights is not None:
            self._policy.weights_version = self.cell.weights.version
        if self.cell.paused:
            self._paused = True
            self.cell.state = State.PAUSED

    async def on_pause(self, verb: Pause) -> ControlReply | None:
        """Stop stepping; acknowledged when no step is under way."""
        if verb.mode is PauseMode.ABORT:
            for request in list(self._policy.ledger):
                await self._finish(request.request_id, FinishReason.ABORT)
        if verb.mode is PauseMode.DRAIN and not self._paused:
            self._draining = True
            self._drains += 1
            self._policy.begin_drain()
            over = _DrainOver(number=self._drains)
            self.tell_self_at(trio.current_time() + verb.drain_s, over)
        else:
            self._paused = True
            self._draining = False
        self._allowance = 0
        self.cell.state = State.PAUSING
        self._pausing.append((verb, self.defer()))
        await self._go_on()
        return None

    async def on_unpause(self, verb: Unpause) -> ControlReply | None:
        """Step again; a PAUSE that has not been reached is refused."""
        self._paused = self._draining = False
        self._policy.end_drain()
        self._allowance = 0
        self._refuse_pauses()
        reply = self.ack(verb, requests=len(self._policy.ledger))
        await self._go_on()
        return reply

    async def on_step(self, verb: Step) -> ControlReply | None:
        """Run so many steps, or as many as there is work for; acknowledged when none is under way.

        A PAUSE that comes meanwhile ends it early, and so does the deadline of who asked for it.
        """
        if not self._paused or self._pausing or self._stepping is not None:
            return ControlReply(verb="step", state=self.cell.state, refused="pause first")
        self._policy.end_drain()  # which lasts until something is to run again
        self._allowance, self._step_until = verb.count, self.cell.deadline
        self._stepping = (verb, self.defer(), self._steps)
        self.cell.state = State.PAUSING
        await self._go_on()
        return None

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Take every row off the device if its memory goes; their outputs stay here."""
        if self._is_busy or not self._paused or self._stepping is not None:
            return ControlReply(verb="suspend", state=self.cell.state, refused="pause first")
        if verb.kv is KVLevel.DROP:
            await self._release(self._policy.checkpoint_all(), dropped=True)
        return self.ack(verb, requests=len(self._policy.ledger))

    async def on_resume(self, verb: Resume) -> ControlReply | None:
        """Be paused, with the memory back."""
        return self.ack(verb, requests=len(self._policy.ledger))

    async def on_update_weights(self, verb: UpdateWeights) -> ControlReply | None:
        """Compute every row again with the new weights, unless the verb says otherwise."""
        if self._is_busy or not self._paused or self._stepping is not None:
            return ControlReply(verb=verb_name(verb), state=self.cell.state, refused="pause first")
        is_new = verb.version != self._policy.weights_version
        if verb.phase is UpdatePhase.COMMIT and is_new:
            self._policy.weights_version = verb.version
            if not verb.keep_kv:
                await self._release(self._policy.checkpoint_all(), dropped=True)
        return self.ack(verb, requests=len(self._policy.ledger))

    def details(self) -> dict[str, int | float | str]:
        """Return the counters `status` shows."""
        counts = self._policy.counts()
        return {
            "steps": self._steps,
            "running": counts.running,
            "waiting": counts.waiting,
            "paused": counts.paused,
            **({} if self._policy.max_tokens is None else {"max_tokens": self._policy.max_tokens}),
        }

    async def _enqueue(self, message: Enqueue) -> None:
        try:
            request = self._request(message)
        except (RequestError, MailboxFull) as error:
            await self._out.tell(Refused(request_id=message.request_id, failure=Failure.of(error)))
            return
        self._policy.add(request)
        self._set_timer(request)
        await self._out.tell(
            Accepted(
                request_id=request.request_id,
                prompt_token_ids=message.prompt_token_ids,
                seed=request.seed,
            )
        )

    def _request(self, message: Enqueue) -> Request:
        policy, params = self._policy, message.params
        if message.request_id in policy.ledger:
            raise RequestError(
                f"the id {message.request_id} is in use", field="request_id", allowed="a new id"
            )
        if len(policy.ledger) >= self._max_queued:
            raise MailboxFull(f"{self._max_queued} requests are queued already")
        prompt, delivered = id_array(message.prompt_token_ids), id_array(message.delivered)
        check_size(params.prompt_logprobs, len(prompt))
        max_tokens = params.max_tokens or 0
        if policy.device is not None:  # else the device's arrival brings the check
            max_tokens = policy.check_fits(
                len(prompt),
                params.max_tokens,
                delivered=len(delivered),
                request_id=message.request_id,
            )
        now = trio.current_time()
        self._arrivals += 1
        eos = () if params.ignore_eos else self._eos_token_ids
        request = Request(
            message.request_id,
            prompt,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            stop_token_ids=tuple(sorted({*eos, *params.stop_token_ids})),
            order=(message.priority, self._arrivals),
            text=self._text(message, prompt),
            accepted_at=self._clock(),
            deadline=float("inf") if message.timeout_s is None else now + message.timeout_s,
        )
        request.restore_output(delivered)
        return request

    def _text(self, message: Enqueue, prompt: "array[int]") -> TextOut | None:
        if self._text_for is None:
            return None
        text = self._text_for(message.params)
        if message.continues_text:
            text.continue_from(prompt[-1])
        return text

    def _set_timer(self, request: Request) -> None:
        if request.deadline == float("inf"):
            return
        passed = _DeadlinePassed(request_id=request.request_id)
        self._timers[request.request_id] = self.tell_self_at(request.deadline, passed)

    def _cancel_timer(self, request_id: RequestId) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    async def _expire(self, request_id: RequestId) -> None:
        request = self._policy.ledger.get(request_id)
        # The id may have been used again since the timer fired.
        if request is not None and request.deadline <= trio.current_time():
            await self._finish(request_id, FinishReason.DEADLINE)

    async def _forget_all(self) -> None:
        for request_id in list(self._timers):
            self._cancel_timer(request_id)
        await self._release(self._policy.forget_all(), dropped=True)

    async def _finish(self, request_id: RequestId, reason: FinishReason) -> None:
        request = self._policy.ledger.get(request_id)
        if request is not None:
            await self._apply(self._policy.finish(request, reason))

    async def _abort_running(self, drain: int) -> None:
        if not self._draining or drain != self._drains:
            return
        for request in self._policy.undrained():
            await self._finish(request.request_id, FinishReason.ABORT)

    async def _meet_device(self, device: DeviceReady) -> None:
        self._asked = None
        self._stuck = False
        await self._apply(self._policy.device_ready(device))

    @property
    def _is_busy(self) -> bool:
        return self._asked is not None or self._policy.in_flight > 0

    async def _go_on(self) -> None:
        """Begin a round if one is due, and say so if a pause has been reached, or reached again."""
        if self._draining and not self._policy.undrained():
            self._paused, self._draining = True, False
        steps_on = self._allowance > 0 and trio.current_time() < self._step_until
        if self._paused and not (steps_on and self._policy.has_work):
            if not self._is_busy:
                self._acknowledge_paused()
        elif self._may_begin:
            await self._propose()

    @property
    def _may_begin(self) -> bool:
        policy = self._policy
        if policy.device is None or self._asked is not None or self._stuck:
            return False
        return policy.in_flight < self._pipeline_depth and policy.has_work

    def _acknowledge_paused(self) -> None:
        num_open = len(self._policy.ledger)
        if self._stepping is not None:
            step, reply, before = self._stepping
            self._stepping, self._allowance = None, 0
            reply.send(self.ack(step, requests=num_open, steps=self._steps - before))
        while self._pausing:
            verb, reply = self._pausing.pop()
            reply.send(self.ack(verb, requests=num_open))

    def _refuse_pauses(self) -> None:
        refused = ControlReply(verb="pause", state=State.RUNNING, refused="unpaused meanwhile")
        while self._pausing:
            _, reply = self._pausing.pop()
            reply.send(refused)
        if self._stepping is not None:
            _, reply, _ = self._stepping
            self._stepping = None
            reply.send(msgspec.structs.replace(refused, verb="step"))

    async def _propose(self) -> None:
        question = self._policy.propose()
        self._asked = question.step
        await self._allocator.tell(question)

    async def _plan(self, granted: BlocksGranted) -> None:
        if granted.step != self._asked:
            # An answer to a question from before the device was replaced.
            await self._release(list(granted.blocks), dropped=False)
            return
        self._asked = None
        planned = self._policy.plan(granted)
        await self._release(planned.unused, dropped=False)
        await self._release(planned.evicted, dropped=True)
        if planned.step is not None:
            self._allowance = max(0, self._allowance - 1)
            await self._executor.tell(planned.step)
        else:
            self._stuck = self._policy.in_flight > 0

    async def _advance(self, done: StepDone) -> None:
        if not self._policy.is_next(done):
            return  # from before the device was replaced
        self._stuck = False
        self._steps += 1
        result = self._policy.advance(done)
        if result.computed:
            # Before the blocks of rows that ended are given back: what nobody holds is not cached.
            await self._allocator.tell(CacheBlocks(computed=tuple(result.computed)))
        await self._apply(result)
        await self._report_step(done)

    async def _apply(self, result: Advanced) -> None:
        dropped = set(result.dropped)
        await self._release([row for row in result.gone if row not in dropped], dropped=False)
        await self._release(result.dropped, dropped=True)
        if result.deltas:
            await self._out.tell(TokensOut(deltas=tuple(result.deltas)))
        for request in result.ended:
            self._cancel_timer(request.request_id)
            await self._report_end(request, self._clock())

    async def _release(self, rows: list[RowId], *, dropped: bool) -> None:
        """Give blocks back; `dropped` rows are still in the device's context."""
        if not rows:
            return
        if dropped:
            await self._executor.tell(DropRows(rows=tuple(rows)))
        await self._allocator.tell(ReleaseBlocks(rows=tuple(rows)))

    async def _report_step(self, done: StepDone) -> None:
        await self._out.tell(
            StepStats(num_tokens=done.num_tokens, num_sampled=len(done.rows), seconds=done.seconds)
        )

    async def _report_end(self, request: Request, now: float) -> None:
        assert request.finish_reason is not None
        first_token_s = None
        if request.first_token_at is not None:
            first_token_s = request.first_token_at - request.accepted_at
        await self._out.tell(
            RequestStats(
                finish=request.finish_reason,
                prompt_tokens=len(request.prompt),
                output_tokens=len(request.output),
                first_token_s=first_token_s,
                total_s=now - request.accepted_at,
            )
        )
