"""What stands in a tree for a part of it that lives in another process, and how that answers.

Verbs and questions go there over a listener that the other end is connected to, and come back as
acknowledgements. What else is said over that line is the affair of those who derive from this.
"""

import contextlib
from typing import TypeVar

import msgspec
import trio

from callboard.actors.actor import Actor, Cell
from callboard.actors.mailbox import Reply
from callboard.actors.ref import LocalRef
from callboard.actors.session import SERVER, Connection, Joined, Left, Listener, Said
from callboard.actors.transport import PeerKey
from callboard.messages.base import Call, Message
from callboard.messages.control import (
    GetNode,
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
)
from callboard.messages.errors import CallboardError, DeadlineExceeded, Unreachable
from callboard.supervision.supervisor import VERB_TIMEOUT_S, answer_by

R = TypeVar("R")

MAX_DEPTH = 8
"""How many levels of a tree another process may tell of."""

ToRemote = Verb | GetNode


class Remote(Actor[Said | Joined | Left]):
    """See the module. A verb waits for the other end to be connected, as long as it has time."""

    tells_of_children = True

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._peer: PeerKey = SERVER
        self._connected = trio.Event()

    @property
    def process_id(self) -> int:
        """The id of the other process; 0 where it is not known."""
        return 0

    async def receive(self, message: Said | Joined | Left) -> None:
        """Nothing is left to do: what the line brings is noted as it comes."""

    async def obey(self, verb: Message) -> object:
        """Pass verbs and questions on to the process."""
        match verb:
            case Pause() | Unpause() | Suspend() | Resume() | Stop() | Step() | UpdateWeights():
                await self.spawn_in_order(self._pass_on, verb, self.defer(), answer_by(self.cell))
                return None
            case GetNode():
                self.spawn(self._ask_node, self.defer(), answer_by(self.cell))
                return None
            case _:
                return await super().obey(verb)

    def connected(self, peer: PeerKey) -> None:
        """The other end has begun a session."""
        self._peer = peer
        self._connected.set()

    def disconnected(self, peer: PeerKey) -> None:
        """A session has ended; of one that is not the present one this may come late."""
        if peer == self._peer and self._connected.is_set():
            self._connected = trio.Event()

    def has_obeyed(self, state: State) -> None:
        """The process has done what a verb asked for, and is in this state."""
        self.cell.state = state

    async def ask_process(self, call: Call[R], deadline: float) -> R:
        """Ask the process, once it is connected. Raises DeadlineExceeded, or what it answers."""
        assert self._listener is not None
        with trio.move_on_at(deadline):
            while not self._connected.is_set():  # a wait for nothing would cost the order of verbs
                await self._connected.wait()
            left = deadline - trio.current_time()
            return await self._listener.ask(self._peer, call, timeout=left)
        raise DeadlineExceeded(f"{self.name} did not answer in time")

    async def _pass_on(self, verb: Verb, reply: Reply, deadline: float) -> None:
        try:
            answer = await self.ask_process(verb, deadline)
        except CallboardError as error:
            reply.fail(error)
            return
        if answer.done:
            self.has_obeyed(answer.state)
        reply.send(answer)

    async def _ask_node(self, reply: Reply, deadline: float) -> None:
        own = msgspec.structs.replace(self.cell.status(), pid=self.process_id)
        try:
            inner = await self.ask_process(GetNode(), deadline)
        except CallboardError as error:
            late = isinstance(error, DeadlineExceeded)
            reply.send(msgspec.structs.replace(own, late=late))
        else:
            reply.send(
                msgspec.structs.replace(
                    own,
                    children=_pruned(inner, MAX_DEPTH).children,
                    restarts_left=inner.restarts_left,
                )
            )


async def answer_from(top: Cell, connection: Connection, said: Said) -> None:
    """Have what lives at the other end obey a verb or answer a question, and send its answer."""
    timeout = VERB_TIMEOUT_S if said.timeout_s is None else said.timeout_s
    try:
        answer: object = await LocalRef[Message](top).ask(said.message, timeout=timeout)
    except CallboardError as error:
        answer = error
    with contextlib.suppress(Unreachable):  # then nobody waits for it any more
        connection.answer(said.message_id, answer)


def _pruned(node: NodeStatus, depth: int) -> NodeStatus:
    """Return a tree without what is so deep that nobody could draw it."""
    children = tuple(_pruned(child, depth - 1) for child in node.children) if depth else ()
    return msgspec.structs.replace(node, children=children)
