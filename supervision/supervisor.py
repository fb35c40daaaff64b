"""A supervisor: an actor whose state is its children, and what they should be.

It starts them in order, stops them in reverse, and restarts what fails; relays verbs to them and
merges their acknowledgements; and brings a restarted child to the state the tree is desired to be
in before it counts as up. Restarts and verbs run in tasks of their own, so it always answers.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from callboard.actors.actor import REACHED, Actor, ActorExited, Cell
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
    Stop,
    Suspend,
    Unpause,
    Verb,
)
from callboard.messages.errors import (
    ActorFailed,
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    RestartIntensityReached,
    StartFailed,
)
from callboard.supervision.lifecycle import Desired
from callboard.supervision.spec import ChildSpec, Intensity, Strategy
from callboard.supervision.strategy import RestartHistory, affected, should_restart

VERB_TIMEOUT_S = 60.0
STATUS_TIMEOUT_S = 2.0


class Child:
    """A child's place: its spec, its cell, and whether it is up and in the desired state."""

    def __init__(self, spec: ChildSpec, cell: Cell) -> None:
        self.spec = spec
        self.cell = cell
        self.ref: LocalRef[Any] = LocalRef(cell)
        self.up = trio.Event()
        self.expected_to_end = False

    def set_down(self) -> None:
        """Note that the child is not up; who waits for it goes on waiting."""
        if self.up.is_set():
            self.up = trio.Event()

    @property
    def answers_status(self) -> bool:
        """Whether the child has a tree of its own to tell about."""
        return getattr(self.cell.actor, "tells_of_children", False)


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
    ) -> None:
        names = [spec.name for spec in children]
        if len(set(names)) != len(names):
            raise ValueError(f"two children have one name: {names}")
        self._system = system
        self._specs = children
        self._strategy = strategy
        self._history = RestartHistory(intensity or Intensity())
        self._children: dict[str, Child] = {}
        self._desired = Desired()
        self._verbs = trio.Lock()
        self._repairs = trio.CancelScope()
        self._failed_in: trio.MemorySendChannel[str]
        self._failed_out: trio.MemoryReceiveChannel[str]
        self._failed_in, self._failed_out = trio.open_memory_channel(4 * len(children) + 1)

    async def on_start(self) -> None:
        """Start the children in order; the supervisor is up when all are."""
        if self.cell.suspended is not None:
            self._desired = Desired(paused=True, suspended=self.cell.suspended)
        await self.start_children()

    async def on_stopping(self) -> None:
        """Stop the children in reverse order, each with its own time."""
        self._repairs.cancel("the supervisor is stopping")
        await self._stop_all()

    async def on_stop(self) -> None:
        """Answer what still waits in the children's mailboxes."""
        for child in self._children.values():
            child.cell.close()

    async def start_children(self) -> None:
        """Start all children, then watch over them. Raises StartFailed."""
        for spec in self._specs:
            child = Child(spec, self._system.cell(spec.name))
            self._children[spec.name] = child
            await self._start(child)
            child.up.set()
        self.spawn(self._repair)

    async def receive(self, message: ActorExited) -> None:
        """A child's life ended: restart what the strategy says, if its spec wants that."""
        child = self._children[message.name]
        child.set_down()
        if should_restart(child.spec.restart, message.failure):
            self._failed_in.send_nowait(message.name)

    async def obey(self, verb: Message) -> object:
        """Relay verbs to the children; tell of them."""
        match verb:
            case Pause() | Unpause() | Suspend() | Resume() | Stop():
                self.spawn(self._relay_and_answer, verb, self.defer())
                return None
            case GetNode():
                self.spawn(self._answer_status, self.defer())
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
            for child in self._children.values():
                child.cell.suspended = self._desired.suspended
            acks = await self._ask_all(verb, began + timeout)
        return _merge(verb, acks, trio.current_time() - began)

    async def node(self) -> NodeStatus:
        """Describe this part of the tree."""
        children: dict[str, NodeStatus] = {}

        async def ask(child: Child) -> None:
            children[child.spec.name] = await _describe(child)

        async with trio.open_nursery() as nursery:
            for child in self._children.values():
                nursery.start_soon(ask, child)
        own = self.cell.status()
        return msgspec.structs.replace(
            own, children=tuple(children[name] for name in self._children)
        )

    async def _relay_and_answer(self, verb: Verb, reply: Reply) -> None:
        answer = await self.relay(verb)
        if answer.done:
            self.cell.state = answer.state
        reply.send(answer)

    async def _answer_status(self, reply: Reply) -> None:
        reply.send(await self.node())

    async def _ask_all(self, verb: Verb, deadline: float) -> list[ControlReply]:
        """Ask independent children together and others in order: down to pause, up to go on."""
        children = list(self._children.values())
        acks: dict[str, ControlReply] = {}

        async def ask(child: Child) -> None:
            acks[child.spec.name] = await self._ask(child, verb, deadline)

        if self._strategy is Strategy.ONE_FOR_ONE:
            async with trio.open_nursery() as nursery:
                for child in children:
                    nursery.start_soon(ask, child)
        else:
            going_on = isinstance(verb, Unpause | Resume)
            for child in reversed(children) if going_on else children:
                await ask(child)
        return [acks[child.spec.name] for child in children]

    async def _ask(self, child: Child, verb: Verb, deadline: float) -> ControlReply:
        """Ask one child; one that fails meanwhile answers by coming up in the desired state."""
        name = child.spec.name
        late = ControlReply(verb=_name(verb), state=child.cell.state, late=(name,), children=())
        with trio.move_on_at(deadline):
            while True:
                await child.up.wait()
                try:
                    left = deadline - trio.current_time()
                    ack: ControlReply = await child.ref.ask(verb, timeout=left)
                except (ActorFailed, ActorStopped):
                    continue  # asked again, its next life answers
                except DeadlineExceeded:
                    return late
                if not ack.children:
                    leaf = ChildAck(
                        name=name,
                        state=ack.state,
                        bytes_freed=ack.bytes_freed,
                        requests=ack.requests,
                        failure=ack.refused,
                    )
                    ack = msgspec.structs.replace(ack, children=(leaf,))
                return ack
        return late

    async def _repair(self) -> None:
        """Restart what fails, one failure at a time."""
        with self._repairs:
            async for name in self._failed_out:
                pending = [name]
                while pending:
                    failed = pending.pop()
                    await trio.sleep(await self._allowed_after(failed))
                    pending = await self._restart(failed)

    async def _allowed_after(self, failed: str) -> float:
        """Count a restart; returns the wait before it, or stops all and escalates."""
        try:
            return self._history.record(trio.current_time(), failed)
        except RestartIntensityReached:
            await self._stop_all()
            raise

    async def _restart(self, failed: str) -> list[str]:
        """Restart a child and whom its failure affects; returns the one that failed to start."""
        group = [
            self._children[name] for name in affected(self._strategy, list(self._children), failed)
        ]
        for child in reversed(group):
            await self._stop(child)
        for child in group:
            try:
                await self._start(child)
                await self._bring(child)
                child.up.set()
            except CallboardError as error:
                self.log.error("restart failed", child=child.spec.name, reason=str(error))
                return [child.spec.name]
            self.log.info("restarted", child=child.spec.name, lives=child.cell.lives)
        return []

    async def _start(self, child: Child) -> None:
        child.cell.suspended = self._desired.suspended
        child.expected_to_end = False
        try:
            await self.cell.nursery.start(self._live, child)
        except CallboardError:
            raise
        except Exception as error:  # whatever a child's start raises is its failure, not ours
            raise StartFailed(f"{child.spec.name} did not start: {error}") from error

    async def _bring(self, child: Child) -> None:
        """Bring a fresh child to what the tree should be."""
        for verb in self._desired.path():
            await child.ref.ask(verb, timeout=VERB_TIMEOUT_S)

    async def _live(
        self, child: Child, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        exited = await child.cell.run(
            child.spec.start, stop_timeout=child.spec.shutdown_s, task_status=task_status
        )
        if not child.expected_to_end:
            self.cell.post(exited)

    async def _stop_all(self) -> None:
        for child in reversed(self._children.values()):
            await self._stop(child)

    async def _stop(self, child: Child) -> None:
        child.expected_to_end = True
        child.set_down()
        await child.cell.stop(child.spec.shutdown_s)


async def _describe(child: Child) -> NodeStatus:
    if not child.answers_status:
        return child.cell.status()
    try:
        node: NodeStatus = await child.ref.ask(GetNode(), timeout=STATUS_TIMEOUT_S)
    except CallboardError:
        return child.cell.status()
    return node


def _merge(verb: Verb, acks: list[ControlReply], seconds: float) -> ControlReply:
    """Make one acknowledgement of many."""
    refused = [ack.refused for ack in acks if ack.refused]
    return ControlReply(
        verb=_name(verb),
        state=REACHED[type(verb)],
        refused=refused[0] if refused else "",
        late=tuple(name for ack in acks for name in ack.late),
        children=tuple(child for ack in acks for child in ack.children),
        seconds=seconds,
        bytes_freed=sum(ack.bytes_freed for ack in acks),
        requests=sum(ack.requests for ack in acks),
    )


def _name(verb: Verb) -> str:
    return type(verb).__name__.lower()
