"""A supervisor: an actor whose state is its children, and what they should be.

It starts them in order, stops them in reverse, and restarts what fails; relays verbs to them and
merges their acknowledgements; and brings a started child to the state the tree is desired to be in
before the next begins. Restarts and verbs run in tasks of their own, so it always answers.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import trio

from callboard.actors.actor import REACHED, STOP_TIMEOUT_S, Actor, ActorExited, Cell, StopActor
from callboard.actors.mailbox import Reply
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem
from callboard.messages.base import Message
from callboard.messages.control import (
    ChildAck,
    ControlReply,
    GetNode,
    NodeStatus,
    Pause,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    verb_name,
)
from callboard.messages.errors import (
    ActorFailed,
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    Failure,
    RestartIntensityReached,
    StartFailed,
    SupervisionError,
    WeightsError,
)
from callboard.supervision.lifecycle import Desired
from callboard.supervision.spec import (
    KILL,
    AutoShutdown,
    ChildSpec,
    Intensity,
    Restart,
    Strategy,
)
from callboard.supervision.strategy import (
    RestartHistory,
    affected,
    ends_with,
    should_restart,
)

VERB_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 2.0

MARGIN, MARGIN_S = 0.05, 0.25
"""By what part of its time, and by how many seconds at most, each level answers before it is up."""


class _Failed(msgspec.Struct, frozen=True):
    """A failure to repair: whose, when, and for how long the child had not been well by then."""

    name: str
    at: float
    ill_s: float = 0.0


class Child:
    """A child's place: its spec, its cell, and whether it is up and in the desired state."""

    def __init__(self, spec: ChildSpec, cell: Cell) -> None:
        self.spec = spec
        self.cell = cell
        self.ref: LocalRef[Any] = LocalRef(cell)
        self.up = trio.Event()
        self.born = Desired()  # what was desired when its present life began
        self.expected_to_end = False
        self.retired = False  # has ended for good, as its spec wants
        self.exit: ActorExited | None = None  # of its last life, unless that was expected to end
        self.is_new = False  # added to a tree that runs, and not yet part of what verbs are for

    def set_down(self) -> None:
        """Note that the child is not up; who waits for it goes on waiting."""
        if self.up.is_set():
            self.up = trio.Event()

    def retire(self) -> None:
        """Note that the child will not come up again; who waits for it need not."""
        self.retired = True
        self.up.set()

    async def ask(self, verb: Verb, timeout: float) -> ControlReply:
        """Ask the present life. Raises what `ref.ask` does, and ActorStopped when it ends first.

        What it has not read by then waits for the next life, of which nobody wants an answer.
        """
        answer: ControlReply | CallboardError = ActorStopped(f"{self.spec.name} has ended")
        stopped = self.cell.stopped
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, stopped, nursery.cancel_scope)
            try:
                answer = await self.ref.ask(verb, timeout=timeout)
            except CallboardError as error:
                answer = error
            nursery.cancel_scope.cancel("answered")
        if isinstance(answer, CallboardError):
            raise answer
        return answer

    @property
    def can_tell_of_children(self) -> bool:
        """Whether the child has a tree of its own, and reads its mail."""
        has_children = getattr(self.cell.actor, "tells_of_children", False)
        reads = self.cell.state is not State.STARTING and not self.expected_to_end
        return has_children and reads


class Supervisor(Actor[ActorExited]):
    """See the module."""

    tells_of_children = True

    def __init__(
        self,
        system: ActorSystem,
        children: Sequence[ChildSpec],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
        auto_shutdown: AutoShutdown = AutoShutdown.NEVER,
    ) -> None:
        """Raises ValueError for children that do not fit each other or the supervisor."""
        _check(children, auto_shutdown)
        self._system = system
        self._specs = children
        self._strategy = strategy
        self._auto_shutdown = auto_shutdown
        self._history = RestartHistory(intensity or Intensity())
        self._children: dict[str, Child] = {}
        self._desired = Desired()
        self._verbs = trio.Lock()
        self._repairs = trio.CancelScope()
        self._failed_in: trio.MemorySendChannel[_Failed]
        self._failed_out: trio.MemoryReceiveChannel[_Failed]
        self._failed_in, self._failed_out = trio.open_memory_channel(4 * len(children) + 1)

    async def on_start(self) -> None:
        """Start the children in order; the supervisor is up when all are."""
        cell = self.cell
        self._desired = Desired(paused=cell.paused, suspended=cell.suspended, weights=cell.weights)
        await self.start_children()

    async def on_stopping(self) -> None:
        """Stop the children in reverse order, each with its own time."""
        self._repairs.cancel("the supervisor is stopping")
        await self._stop_all()

    async def start_children(self) -> None:
        """Start all children, and watch over those that are up.

        Raises StartFailed, naming the child, when those that were up already have been stopped.
        """
        self.spawn(self._repair)  # the next may rely on one that fails before all are up
        try:
            for spec in self._specs:
                child = self._children[spec.name] = Child(spec, self._system.cell(spec.name))
                await self._raise(child)
        except CallboardError:
            self._repairs.cancel("a child did not start")
            await self._stop_all()
            raise

    async def add(self, spec: ChildSpec) -> None:
        """Start one more temporary child, paused, and then bring it to what the tree should be.

        No verb waits for it while it starts, however long that takes, but for SUSPEND, since it may
        be taking memory. Raises StartFailed; one that had started by then is a child all the same.
        """
        if spec.name in self._children or spec.restart is not Restart.TEMPORARY:
            raise ValueError(f"{spec.name} is there already, or not temporary")
        child = self._children[spec.name] = Child(spec, self._system.cell(spec.name))
        child.is_new = True
        try:
            await self._raise(child)
        except CallboardError:
            if child.is_new:
                await self.remove(spec.name)
            raise

    async def remove(self, name: str) -> None:
        """Stop a child, if it runs, and forget it."""
        child = self._children[name]
        await self._stop(child)
        child.retire()
        if self._children.get(name) is child:
            del self._children[name]
            self._system.forget(name)

    async def receive(self, message: ActorExited) -> None:
        """A child's life ended: restart what the strategy says, if its spec wants that."""
        child = self._children.get(message.name)
        if child is None or child.exit is not message:
            return  # that was an earlier life
        failure = message.failure
        if failure is not None and isinstance(error := failure.error(), child.spec.escalates):
            await self._escalate(error)
        elif should_restart(child.spec.restart, failure):
            ill_s = 0.0 if failure is None else failure.ill_s
            self._failed_in.send_nowait(_Failed(message.name, trio.current_time(), ill_s))
        else:
            child.retire()
            self._end_with(child)

    async def _escalate(self, error: CallboardError) -> NoReturn:
        """Stop all children, since no restart of one of them helps, and fail."""
        self._repairs.cancel("a failure escalates")
        await self._stop_all()
        raise error

    def _end_with(self, child: Child) -> None:
        """End in good order, if this was a child whose end means that."""
        left = sum(
            other.spec.significant and not other.retired for other in self._children.values()
        )
        if child.spec.significant and ends_with(self._auto_shutdown, still_significant=left):
            self.log.info("ends with its significant child", child=child.spec.name)
            self.cell.post(StopActor())

    async def obey(self, verb: Message) -> object:
        """Relay verbs to the children; tell of them."""
        match verb:
            case Pause() | Unpause() | Suspend() | Resume() | Stop() | Step() | UpdateWeights():
                await self.spawn_in_order(
                    self._relay_and_answer, verb, self.defer(), answer_by(self.cell)
                )
                return None
            case GetNode():
                self.spawn(self._answer_status, self.defer(), answer_by(self.cell))
                return None
            case _:
                return await super().obey(verb)

    async def relay(self, verb: Verb, timeout: float = VERB_TIMEOUT_S) -> ControlReply:
        """Bring the children to what the verb asks for, and merge their acknowledgements.

        Children that do not answer in time are named; the desired state stays, so a restarted one
        is brought to it.
        """
        began = trio.current_time()
        async with self._verbs:
            self._desired = self._desired.after(verb)
            acks = await self._ask_all(verb, began + timeout)
        state = REACHED.get(type(verb), self.cell.state)
        return _merge(verb, state, acks, trio.current_time() - began)

    async def node(self, timeout: float = STATUS_TIMEOUT_S) -> NodeStatus:
        """Describe this part of the tree; children that do not answer in time, by hearsay."""
        deadline = trio.current_time() + timeout
        children: dict[str, NodeStatus] = {}

        async def ask(child: Child) -> None:
            children[child.spec.name] = await _describe(child, deadline)

        present = list(self._children.values())
        async with trio.open_nursery() as nursery:
            for child in present:
                nursery.start_soon(ask, child)
        return msgspec.structs.replace(
            self.cell.status(),
            children=tuple(children[child.spec.name] for child in present),
            restarts_left=self._history.left(trio.current_time()),
        )

    async def _relay_and_answer(self, verb: Verb, reply: Reply, deadline: float) -> None:
        answer = await self.relay(verb, deadline - trio.current_time())
        if answer.done:
            self.cell.state = answer.state
        reply.send(answer)

    async def _answer_status(self, reply: Reply, deadline: float) -> None:
        timeout = min(STATUS_TIMEOUT_S, deadline - trio.current_time())
        reply.send(await self.node(timeout))

    async def _ask_all(self, verb: Verb, deadline: float) -> list[ControlReply]:
        """Ask independent children together and others in order: down to pause, up to go on."""
        suspends = isinstance(verb, Suspend)
        children = [child for child in self._children.values() if suspends or not child.is_new]
        if self._strategy is Strategy.ONE_FOR_ONE:
            return await self._ask_together(children, verb, deadline)
        going_on = isinstance(verb, Unpause | Resume)
        acks: list[ControlReply] = []
        for child in reversed(children) if going_on else children:
            acks.append(await self._ask(child, verb, deadline))
            if not acks[-1].done:
                break  # the next relies on this one: memory is not taken from what still runs
        return acks[::-1] if going_on else acks

    async def _ask_together(
        self, children: list[Child], verb: Verb, deadline: float
    ) -> list[ControlReply]:
        acks: dict[str, ControlReply] = {}

        async def ask(child: Child) -> None:
            acks[child.spec.name] = await self._ask(child, verb, deadline)

        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(ask, child)
        return [acks[child.spec.name] for child in children]

    async def _ask(self, child: Child, verb: Verb, deadline: float) -> ControlReply:
        """Ask one child; one that fails meanwhile answers by coming up in the desired state."""
        name, reply = child.spec.name, ControlReply(verb=verb_name(verb), state=child.cell.state)
        with trio.move_on_at(deadline):
            while True:
                if _is_about_a_life(verb) and not child.up.is_set():
                    return reply  # what is down need not come up for it
                await child.up.wait()
                if child.retired:
                    return reply
                try:
                    ack = await child.ask(verb, deadline - trio.current_time())
                except (ActorFailed, ActorStopped) as error:
                    if _is_prepare(verb):
                        return _failed(reply, f"{name}: {error}")  # it might fail of that again
                    # Asked again, its next life answers. How far this one stepped went with it.
                    verb = Pause() if isinstance(verb, Step) else verb
                    continue
                except DeadlineExceeded:
                    break
                except CallboardError as error:
                    return msgspec.structs.replace(reply, refused=f"{name}: {error}")
                return _with_leaf(name, ack)
        return msgspec.structs.replace(reply, late=(name,))

    async def _repair(self) -> None:
        """Restart what fails, one failure at a time."""
        with self._repairs:
            async for failed in self._failed_out:
                if self._children[failed.name].up.is_set():
                    continue  # it has been restarted with another
                pending = [failed]
                while pending:
                    failed = pending.pop()
                    await trio.sleep(await self._allowed_after(failed))
                    pending = await self._restart(failed.name)

    async def _allowed_after(self, failed: _Failed) -> float:
        """Count a restart; returns the wait before it, or stops all and escalates."""
        try:
            return self._history.record(failed.at, failed.name, ill_s=failed.ill_s)
        except RestartIntensityReached:
            await self._stop_all()
            raise

    async def _restart(self, failed: str) -> list[_Failed]:
        """Restart a child and whom its failure affects; returns the one that failed to start."""
        group = [
            self._children[name] for name in affected(self._strategy, list(self._children), failed)
        ]
        for child in reversed(group):
            await self._stop(child)
        for child in group:
            if child.spec.restart is Restart.TEMPORARY:
                child.retire()
                continue
            try:
                await self._raise(child)
            except CallboardError as error:
                self.log.error("restart failed", child=child.spec.name, reason=str(error))
                if isinstance(cause := error.__cause__, child.spec.escalates):
                    await self._stop_all()
                    raise cause from None
                return [_Failed(child.spec.name, trio.current_time())]
            self.log.info("restarted", child=child.spec.name, lives=child.cell.lives)
        return []

    async def _raise(self, child: Child) -> None:
        """Start a child and bring it to what the tree should be; then it is up."""
        try:
            await self._start(child)
            child.is_new = False
            await self._bring(child)
        except StartFailed:
            raise
        except Exception as error:  # whatever a child's start raises is its failure, not ours
            reason = str(error) if isinstance(error, OSError) else Failure.of(error).message
            raise StartFailed(f"{child.spec.name} did not start: {reason}") from error
        if child.cell.actor is not None:  # or it has failed since, and will be restarted
            child.up.set()
            self._history.up(child.spec.name, trio.current_time())

    async def _start(self, child: Child) -> None:
        child.born = msgspec.structs.replace(
            self._desired, paused=self._desired.paused or child.is_new
        )
        child.cell.paused, child.cell.suspended = child.born.paused, child.born.suspended
        child.cell.weights = child.born.weights
        child.expected_to_end = child.retired = False
        child.exit = None
        await self.cell.nursery.start(self._live, child)

    async def _bring(self, child: Child) -> None:
        """Bring a fresh child to what the tree should be, also if that changes meanwhile."""
        reached: Desired | None = None
        while reached != self._desired:
            reached = self._desired
            for verb in reached.path(child.born):
                ack = await child.ask(verb, VERB_TIMEOUT_S)
                if not ack.done:
                    late = f"no answer from {', '.join(ack.late)}"
                    raise SupervisionError(f"{verb_name(verb)}: {ack.refused or late}")

    async def _live(
        self, child: Child, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        # One that is killed still has its time to clean up.
        stop_timeout = child.spec.shutdown_s or STOP_TIMEOUT_S
        exited = await child.cell.run(
            child.spec.start, stop_timeout=stop_timeout, task_status=task_status
        )
        # Before anybody runs who waited for this life: they are to wait for the next.
        child.set_down()
        if not child.expected_to_end:
            child.exit = exited
            self.cell.post(exited)

    async def _stop_all(self) -> None:
        for child in list(reversed(self._children.values())):
            await self._stop(child)

    async def _stop(self, child: Child) -> None:
        child.expected_to_end = True
        child.set_down()
        self._history.down(child.spec.name)
        if child.spec.shutdown_s != KILL:
            await child.cell.stop(child.spec.shutdown_s)
        elif child.cell.actor is not None:
            child.cell.cancel(f"{child.spec.name} is killed rather than stopped")
            await child.cell.stopped.wait()


def _check(children: Sequence[ChildSpec], auto_shutdown: AutoShutdown) -> None:
    names = [spec.name for spec in children]
    if len(set(names)) != len(names):
        raise ValueError(f"two children have one name: {names}")
    for spec in children:
        if not spec.shutdown_s >= 0:  # NaN, too
            raise ValueError(
                f"shutdown_s of {spec.name} is {spec.shutdown_s}, and must be 0 or more"
            )
        if not spec.significant:
            continue
        if spec.restart is Restart.PERMANENT:
            raise ValueError(f"{spec.name} is significant, and must be transient or temporary")
        if auto_shutdown is AutoShutdown.NEVER:
            raise ValueError(f"{spec.name} is significant, and auto_shutdown is never")


def answer_by(cell: Cell) -> float:
    """Return when to answer the message in hand at the latest.

    That is a little before its asker gives up, who then hears which of our children was late.
    """
    now = trio.current_time()
    if cell.deadline == float("inf"):
        return now + VERB_TIMEOUT_S
    return now + a_little_less(cell.deadline - now)


def a_little_less(timeout: float) -> float:
    """Return how long we may take for who waits so long for us."""
    return timeout - min(MARGIN_S, MARGIN * timeout)


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel("the child has ended")


async def _describe(child: Child, deadline: float) -> NodeStatus:
    timeout = deadline - trio.current_time()
    actor = child.cell.actor
    if child.cell.state is State.STARTING and isinstance(actor, Supervisor):
        return await actor.node(timeout)  # it reads no mail yet, and so far it can be read itself
    if not child.can_tell_of_children:
        return _by_hearsay(child)
    try:
        node: NodeStatus = await child.ref.ask(GetNode(), timeout=timeout)
    except CallboardError as error:
        late = isinstance(error, DeadlineExceeded)
        return msgspec.structs.replace(_by_hearsay(child), late=late)
    return node


def _by_hearsay(child: Child) -> NodeStatus:
    own = child.cell.status()
    return msgspec.structs.replace(own, pid=getattr(child.cell.actor, "process_id", own.pid))


def _with_leaf(name: str, ack: ControlReply) -> ControlReply:
    """Add the acknowledgement of a child that has no children of its own to its reply."""
    if ack.children or ack.late:
        return ack
    leaf = ChildAck(
        name=name,
        state=ack.state,
        bytes_freed=ack.bytes_freed,
        requests=ack.requests,
        failure=ack.refused,
        steps=ack.steps,
    )
    return msgspec.structs.replace(ack, children=(leaf,))


def _merge(verb: Verb, state: State, acks: list[ControlReply], seconds: float) -> ControlReply:
    """Make one acknowledgement of many."""
    refused = [ack.refused for ack in acks if ack.refused]
    failures = [ack.failure for ack in acks if ack.failure is not None]
    return ControlReply(
        verb=verb_name(verb),
        state=state,
        refused=refused[0] if refused else "",
        failure=failures[0] if failures else None,
        late=tuple(name for ack in acks for name in ack.late),
        children=tuple(child for ack in acks for child in ack.children),
        seconds=seconds,
        bytes_freed=sum(ack.bytes_freed for ack in acks),
        requests=sum(ack.requests for ack in acks),
        steps=sum(ack.steps for ack in acks),
    )


def _is_prepare(verb: Verb) -> bool:
    return isinstance(verb, UpdateWeights) and verb.phase is UpdatePhase.PREPARE


def _is_about_a_life(verb: Verb) -> bool:
    """Whether a verb is about what a life has or does, so that the next has nothing to do."""
    cancels = isinstance(verb, UpdateWeights) and verb.phase is UpdatePhase.CANCEL
    return cancels or isinstance(verb, Stop)


def _failed(reply: ControlReply, why: str) -> ControlReply:
    failure = Failure.of(WeightsError(why))
    return msgspec.structs.replace(reply, refused=why, failure=failure)
