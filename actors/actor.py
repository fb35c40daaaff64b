"""An actor: a class with typed mail, and the cell that keeps it running.

    class Echo(Actor[Ping | Shout]):
        async def receive(self, message: Ping | Shout) -> object:
            match message:
                case Ping(): return Pong()          # the answer, when it was asked
                case Shout(): self.heard += 1

One message is handled at a time and nobody else touches the state, so there is nothing to lock.
An exception in `receive` is the end of this life: the asker is told, and the supervisor decides.
The mailbox belongs to the cell, so what was not read yet is read by the next life.
"""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec
import trio

from callboard.actors.mailbox import DEFAULT_CAPACITY, Letter, Mailbox, Overflow, Reply
from callboard.actors.ref import LocalRef, current_cell
from callboard.actors.system import ActorSystem, Timer
from callboard.logs import get_logger
from callboard.messages.base import Message
from callboard.messages.control import (
    ControlReply,
    GetNode,
    LifeEnd,
    NodeStatus,
    Pause,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdateWeights,
    Verb,
    Weights,
    verb_name,
)
from callboard.messages.errors import (
    ActorFailed,
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    DeliveryError,
    Failure,
    MailboxFull,
    StartFailed,
)

M = TypeVar("M", bound=Message)

MESSAGES_PER_CHECKPOINT = 64
SECONDS_PER_CHECKPOINT = 200e-6
STOP_TIMEOUT_S = 5.0

ENDS_KEPT = 8
"""How many ends of a cell's lives are remembered, for `status`."""

REACHED: dict[type[Message], State] = {
    Pause: State.PAUSED,
    Unpause: State.RUNNING,
    Suspend: State.SUSPENDED,
    Resume: State.PAUSED,
    Stop: State.STOPPED,
    Step: State.PAUSED,
}
"""The state a part of the tree is in when it acknowledges a verb; others leave it as it is."""


async def start_in_order(
    nursery: trio.Nursery, task: Callable[..., Awaitable[object]], *args: object
) -> None:
    """Start a task, and return once it has run up to its first checkpoint.

    Trio begins tasks that were started together in any order. Of tasks started by this the first is
    the first to stand in line for a lock, or to post a letter.
    """

    async def begin(task_status: trio.TaskStatus[None]) -> None:
        task_status.started()  # who waits for this goes on only after what follows has yielded
        await task(*args)

    await nursery.start(begin, name=task)


class StopActor(Message, frozen=True):
    """Supervisor → child: finish the message in hand and end."""

    urgent: ClassVar[bool] = True


class ActorExited(Message, frozen=True):
    """Cell → supervisor and watchers: a life ended; `failure` is None for an orderly end."""

    urgent: ClassVar[bool] = True
    name: str
    failure: Failure | None = None


class Actor(ABC, Generic[M]):
    """Base of all actors; subclasses write `receive` and whichever hooks they need."""

    capacity: ClassVar[int] = DEFAULT_CAPACITY
    overflow: ClassVar[Overflow] = Overflow.WAIT
    retry_safe: ClassVar[tuple[type[Message], ...]] = ()

    cell: "Cell"

    @abstractmethod
    async def receive(self, message: M) -> object:
        """Handle one message; what is returned is the answer when it was asked.

        Returning a CallboardError raises it in the asker; raising one ends this life.
        """

    async def on_start(self) -> None:
        """Get ready; the start, for a supervisor, takes until this returns."""

    async def on_stopping(self) -> None:
        """Begin an orderly end: the actor's own tasks still run, its mail is not read any more."""

    async def on_stop(self) -> None:
        """Clean up, in orderly ends and failures alike; shielded, with a deadline."""

    async def on_pause(self, verb: Pause) -> ControlReply | None:
        """Obey PAUSE; return the acknowledgement, or None after `defer`."""
        return self.ack(verb)

    async def on_unpause(self, verb: Unpause) -> ControlReply | None:
        """Obey UNPAUSE."""
        return self.ack(verb)

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Obey SUSPEND: free what the levels name."""
        return self.ack(verb)

    async def on_resume(self, verb: Resume) -> ControlReply | None:
        """Obey RESUME: take back what SUSPEND freed."""
        return self.ack(verb)

    async def on_step(self, verb: Step) -> ControlReply | None:
        """Obey STEP: run so many forward passes, and be paused again."""
        return self.ack(verb)

    async def on_update_weights(self, verb: UpdateWeights) -> ControlReply | None:
        """Obey UPDATE_WEIGHTS, in the phase that is due."""
        return self.ack(verb)

    async def on_drain(self, verb: Stop) -> ControlReply | None:
        """Obey STOP: end the open requests; the actor itself ends later."""
        return self.ack(verb)

    def details(self) -> dict[str, int | float | str]:
        """Return what `status` should show of this actor, as numbers and words."""
        return {}

    def snapshot(self) -> msgspec.Struct | None:
        """Return state that the next life should `restore` after a failure, or None."""
        return None

    def restore(self, snapshot: msgspec.Struct) -> None:
        """Take over the state of the life before; called before `on_start`."""

    # What an actor has: its name, its log, its tasks, its clock.

    @property
    def name(self) -> str:
        """The name it is addressed by."""
        return self.cell.name

    @property
    def log(self) -> Any:
        """A logger bound to the actor's name."""
        return self.cell.log

    @property
    def ref(self) -> LocalRef[M]:
        """Its own address."""
        return LocalRef(self.cell)

    def spawn(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task for as long as this life; its failure is the actor's."""
        self.cell.nursery.start_soon(task, *args)

    async def spawn_in_order(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task like `spawn`, and return once it has come to where it waits first.

        See `start_in_order`.
        """
        await start_in_order(self.cell.nursery, task, *args)

    def tell_self_at(self, due: float, message: M) -> Timer:
        """Put a message into the own mailbox at a time of the trio clock, if this life lasts."""
        cell, life, cause = self.cell, self.cell.lives, self.cell.handling

        def fire() -> None:
            if cell.lives == life:
                cell.post(message, cause=cause)

        return cell.system.timers.at(due, fire)

    def defer(self) -> Reply:
        """Answer the message in hand later: return the slot to answer through.

        A message that was told, not asked, gets a slot nobody waits on.
        """
        return self.cell.defer()

    def ack(
        self, verb: Verb, *, bytes_freed: int = 0, requests: int = 0, steps: int = 0
    ) -> ControlReply:
        """Return the acknowledgement of a verb that has had its effect here."""
        state = self.cell.state = REACHED.get(type(verb), self.cell.state)
        return ControlReply(
            verb=verb_name(verb),
            state=state,
            bytes_freed=bytes_freed,
            requests=requests,
            steps=steps,
        )

    async def obey(self, verb: Message) -> object:
        """Dispatch an urgent message to its hook."""
        match verb:
            case Pause():
                return await self.on_pause(verb)
            case Unpause():
                return await self.on_unpause(verb)
            case Suspend():
                return await self.on_suspend(verb)
            case Resume():
                return await self.on_resume(verb)
            case Stop():
                return await self.on_drain(verb)
            case Step():
                return await self.on_step(verb)
            case UpdateWeights():
                return await self.on_update_weights(verb)
            case GetNode():
                return self.cell.status()
            case _:
                return await self.receive(verb)  # type: ignore[arg-type]  # the actor's own

    @classmethod
    def inbox(cls) -> Any:
        """Return the union of messages the class was parameterised with."""
        for kind in cls.__mro__:
            for base in getattr(kind, "__orig_bases__", ()):
                arguments = get_args(base)
                if arguments and not isinstance(arguments[0], TypeVar):
                    return arguments[0]
        raise TypeError(f"{cls.__name__} does not say what it receives: Actor[Message | …]")


class Cell:
    """One place in the tree: a name and a mailbox that outlive the actors that live in it."""

    def __init__(self, system: ActorSystem, name: str) -> None:
        self.system = system
        self.name = name
        self.mailbox = Mailbox()
        self.state = State.STOPPED
        self.lives = 0
        self.handling = 0
        self.kind = ""
        self.paused = False  # whether a life that begins now must not run anything
        self.suspended: Suspend | None = None  # what it must not allocate
        self.weights: Weights | None = None  # what it must load; None: as it was made
        self.log = get_logger(actor=name)
        self.crashed = False  # in on_stop: whether this life ends with a failure
        self.nursery: trio.Nursery
        self.actor: Actor[Any] | None = None
        self.stopped = trio.Event()
        self._scope = trio.CancelScope()
        self._letter: Letter | None = None
        self._deferred: set[Reply] = set()
        self._was_deferred = False
        self._snapshot: msgspec.Struct | None = None
        self._watchers: list[LocalRef[Any]] = []
        self._exit: ActorExited | None = None
        self._ends: deque[LifeEnd] = deque(maxlen=ENDS_KEPT)

    async def run(
        self,
        factory: Callable[[], Actor[Any]],
        *,
        stop_timeout: float = STOP_TIMEOUT_S,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> ActorExited:
        """Live one life; returns how it ended. Only cancellation and a failed start are raised."""
        current_cell.set(self)
        self._begin()
        error: Exception | None = None
        started = _Started(task_status)
        try:
            with self._scope:
                await self._live(factory, stop_timeout, started)
        except Exception as caught:  # an actor's failure becomes a message
            error = _root_cause(caught)
        except BaseException:
            self._end(None)
            raise
        if not started.done:
            error = error or StartFailed(f"{self.name} was stopped before it had started")
            self._end(Failure.of(error))
            raise error
        if error is None:
            return self._end(None)
        failure = Failure.of(error)
        # What is ours says in its message what happened; what is foreign needs its traceback.
        foreign = None if isinstance(error, CallboardError) else error
        self.log.error("actor failed", failure=failure.message, exc_info=foreign)
        self._snapshot = self._take_snapshot()
        return self._end(failure)

    async def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Ask the actor to end, wait, and cancel it when it does not; returns when it has ended."""
        if self.actor is None:
            return
        if self.state is State.STARTING:
            # It reads no mail yet, and nothing depends on it yet.
            self.cancel(f"{self.name} was stopped while it started")
        elif not self.mailbox.closed:
            self.mailbox.put_nowait(Letter(StopActor()))
        with trio.move_on_after(timeout):
            await self.stopped.wait()
            return
        self.log.warning("actor did not stop in time", timeout=timeout)
        self.cancel(f"{self.name} did not stop in {timeout:g} s")
        await self.stopped.wait()

    def cancel(self, reason: str) -> None:
        """End this life at once, with no more than its `on_stop`."""
        self._scope.cancel(reason)

    def close(self) -> None:
        """End the cell for good: what waits in its mailbox is answered or buried."""
        if not self.mailbox.closed:
            for letter in self.mailbox.close():
                self.bury(letter, "stopped")

    def watch(self, watcher: LocalRef[Any]) -> None:
        """Tell `watcher` when a life ends; at once when the last one has already ended."""
        self._watchers.append(watcher)
        if self._exit is not None and self.actor is None:
            self._tell_exit(watcher, self._exit)

    def post(self, message: Message, *, cause: int = 0) -> None:
        """Put a message in the own mailbox; one that does not fit is buried."""
        letter = Letter(message, message_id=self.system.next_message_id(), cause=cause)
        try:
            displaced = self.mailbox.put_nowait(letter)
        except ActorStopped:
            self.bury(letter, "stopped")
            return
        except MailboxFull:
            displaced = letter
        if displaced is not None:
            self.bury(displaced, "mailbox_full")

    def bury(self, letter: Letter, reason: str) -> None:
        """Answer a letter nobody will handle, and count it."""
        error = MailboxFull if reason == "mailbox_full" else ActorStopped
        if letter.reply is not None:
            letter.reply.fail(error(f"{self.name} did not handle it: {reason}"))
        self.system.dead_letters.add(self.name, reason, letter.message)

    @property
    def deadline(self) -> float:
        """When who asked the message in hand gives up, on the trio clock; infinity when nobody."""
        return float("inf") if self._letter is None else self._letter.deadline

    def defer(self) -> Reply:
        """Return the slot of the letter in hand, to be answered later."""
        assert self._letter is not None, "defer is for use while handling a message"
        reply = self._letter.reply or Reply()
        self._was_deferred = True
        self._deferred = {open_ for open_ in self._deferred if not open_.settled}
        self._deferred.add(reply)
        return reply

    def status(self) -> NodeStatus:
        """Describe the cell and who lives in it."""
        return NodeStatus(
            name=self.name,
            kind=self.kind,
            state=self.state,
            restarts=max(0, self.lives - 1),
            pid=os.getpid(),
            details={} if self.actor is None else self.actor.details(),
            ends=tuple(self._ends),
        )

    def _begin(self) -> None:
        self.state = State.STARTING
        self.lives += 1
        self.crashed = False
        self.stopped = trio.Event()
        self._scope = trio.CancelScope()

    async def _live(
        self, factory: Callable[[], Actor[Any]], stop_timeout: float, started: "_Started"
    ) -> None:
        actor = factory()
        actor.cell = self
        self.actor, self.kind = actor, type(actor).__name__
        self.mailbox.capacity, self.mailbox.overflow = actor.capacity, actor.overflow
        self._restore(actor)
        try:
            async with trio.open_nursery() as self.nursery:
                await actor.on_start()
                if self.state is State.STARTING:
                    self.state = State.RUNNING
                started()
                self._snapshot = None
                await self._read_mail(actor)
                await actor.on_stopping()
                self.nursery.cancel_scope.cancel(f"{self.name} was told to stop")
        except Exception:
            self.crashed = True
            raise
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + stop_timeout):
                await actor.on_stop()

    async def _read_mail(self, actor: Actor[Any]) -> None:
        taken, since = 0, time.perf_counter()
        while True:
            letter = self.mailbox.take_nowait()
            if letter is None:
                await self.mailbox.wait()
                taken, since = 0, time.perf_counter()
                continue
            if isinstance(letter.message, StopActor):
                return
            await self._handle(actor, letter)
            taken += 1
            if (
                taken >= MESSAGES_PER_CHECKPOINT
                or time.perf_counter() - since > SECONDS_PER_CHECKPOINT
            ):
                await trio.lowlevel.checkpoint()
                taken, since = 0, time.perf_counter()

    async def _handle(self, actor: Actor[Any], letter: Letter) -> None:
        if letter.deadline != float("inf") and letter.deadline <= trio.current_time():
            if letter.reply is not None:
                letter.reply.fail(DeadlineExceeded(f"{self.name} read it too late"))
            self.system.dead_letters.add(self.name, "expired", letter.message)
            return
        self._letter, self._was_deferred = letter, False
        self.handling = letter.message_id
        if self.system.journal is not None:
            self.system.journal.note(self.name, self.lives, letter)
        message = letter.message
        answer = await (actor.obey(message) if message.urgent else actor.receive(message))
        if letter.reply is not None and not self._was_deferred:
            if isinstance(answer, CallboardError):
                letter.reply.fail(answer)
            else:
                letter.reply.send(answer)
        self._letter = None
        self.handling = 0

    def _end(self, failure: Failure | None) -> ActorExited:
        actor, self.actor = self.actor, None
        self.state = State.STOPPED if failure is None else State.FAILED
        self.mailbox.discard(StopActor)  # the next life is not meant
        self._settle_letter_in_hand(failure, () if actor is None else actor.retry_safe)
        self._settle_deferred(failure)
        self._exit = ActorExited(name=self.name, failure=failure)
        self._ends.append(LifeEnd(at=time.time(), reason=failure.message if failure else ""))
        self.stopped.set()
        for watcher in self._watchers:
            self._tell_exit(watcher, self._exit)
        return self._exit

    def _restore(self, actor: Actor[Any]) -> None:
        # A snapshot that cannot be restored is dropped; one whose life does not start is kept.
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            actor.restore(snapshot)
            self._snapshot = snapshot

    def _take_snapshot(self) -> msgspec.Struct | None:
        assert self.actor is not None
        try:
            return self.actor.snapshot()
        except Exception as error:  # it must not hide the failure that came before
            self.log.error("snapshot failed", exc_info=error)
            return None

    def _tell_exit(self, watcher: LocalRef[Any], exit_: ActorExited) -> None:
        with contextlib.suppress(ActorStopped):  # counted as a dead letter
            watcher.tell_nowait(exit_)

    def _settle_deferred(self, failure: Failure | None) -> None:
        for reply in self._deferred:
            reply.fail(self._ended(failure))
        self._deferred.clear()

    def _settle_letter_in_hand(
        self, failure: Failure | None, retry_safe: tuple[type[Message], ...]
    ) -> None:
        letter, self._letter, self.handling = self._letter, None, 0
        if letter is None:
            return
        letter.attempts += 1
        retry = failure is not None and isinstance(letter.message, retry_safe)
        if retry and letter.attempts < 2 and not self.mailbox.closed:
            self.mailbox.put_back(letter)
            self._deferred.discard(letter.reply)
            return
        if letter.reply is not None:
            letter.reply.fail(self._ended(failure))
        self.system.dead_letters.add(self.name, "poison" if failure else "stopped", letter.message)

    def _ended(self, failure: Failure | None) -> DeliveryError:
        if failure is None:
            return ActorStopped(f"{self.name} stopped")
        return ActorFailed(f"{self.name} failed: {failure.message}")


class _Started:
    """Remembers whether a start was reported, since what follows a failure depends on it."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status
        self.done = False

    def __call__(self) -> None:
        self.done = True
        self._task_status.started()


def _root_cause(error: Exception) -> Exception:
    """Return the one exception inside nested groups of one, which is what the user raised."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
