"""The root supervisor: where verbs arrive, and where what the tree should be is decided.

Operators speak to a socket of its own, apart from the requests', so that no load delays a verb.
"""

from collections.abc import Sequence

import msgspec
import trio

from callboard.actors.actor import ActorExited, StopActor
from callboard.actors.ref import ActorRef, LocalRef
from callboard.actors.session import Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem
from callboard.actors.transport import Network, PeerKey
from callboard.messages.base import Message
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    GetStatus,
    NodeStatus,
    Pause,
    PauseMode,
    ReplicaStatus,
    Resume,
    State,
    StatusReply,
    Stop,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
    verb_name,
)
from callboard.messages.errors import CallboardError, Failure, MailboxFull, WeightsError, WireError
from callboard.messages.membership import Role, Welcome
from callboard.supervision.joined import FromHost, ToHost, check_host
from callboard.supervision.lifecycle import Lifecycle
from callboard.supervision.spec import ChildSpec, Strategy
from callboard.supervision.supervisor import (
    STATUS_TIMEOUT_S,
    VERB_TIMEOUT_S,
    Supervisor,
    a_little_less,
)

FromOperator = Verb | GetStatus | AbortRequests
ToOperator = ControlReply

PREPARE_SHARE = 0.8
"""What part of an update's time parts have to read new weights; the rest is to take or undo."""

MAX_OPERATORS = 64

REPLICAS = "replicas"
"""The name of the supervisor whose children are the replicas."""

JOINED = "joined"
"""The name of the supervisor whose children are the hosts that have brought replicas along."""


class Address:
    """Where the coordinator listens: what was asked for, then, with its port, what it got."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def set(self, endpoint: str) -> None:
        """Note the endpoint that was bound."""
        self.endpoint = endpoint


def reachable(control_endpoint: str, *, beside: str) -> str:
    """Return where a client sends verbs that found the server at `beside`.

    A server that listens at every address does not know under which of them it is found.
    """
    host, _, port = control_endpoint.rpartition(":")
    if host not in ("tcp://0.0.0.0", "tcp://[::]"):
        return control_endpoint
    return f"{beside.rpartition(':')[0]}:{port}"


class Root(Supervisor):
    """See the module."""

    def __init__(
        self,
        system: ActorSystem,
        children: Sequence[ChildSpec],
        *,
        network: Network,
        control_endpoint: str,
        address: Address,
        model: str,
        version: str,
        coordinator: ActorRef[AbortRequests],
        hosts: ActorRef[Said | Joined | Left] | None = None,
    ) -> None:
        """`hosts` hears of the hosts that come, with their sessions, to the operators' socket."""
        super().__init__(system, children, strategy=Strategy.ONE_FOR_ONE)
        self.control_endpoint = control_endpoint
        self.started = trio.Event()
        self.start_failure: CallboardError | None = None
        self.stopped_by_verb = trio.Event()
        self._network = network
        self._address = address
        self._model = model
        self._version = version
        self._coordinator = coordinator
        self._hosts = hosts
        self._host_peers: set[PeerKey] = set()
        self._lifecycle = Lifecycle(model)
        self._entry = trio.Lock()
        self._turn = trio.Lock()
        self._start_scope = trio.CancelScope()
        self._listener: Listener | None = None

    async def on_start(self) -> None:
        """Listen for operators first, so that a tree that is still starting can be asked."""
        self._listener = Listener(
            self._system,
            self._network,
            self.control_endpoint,
            name=self.name,
            inboxes={Role.OPERATOR: FromOperator, Role.REPLICA: FromHost},
            outboxes={Role.OPERATOR: ToOperator, Role.REPLICA: ToHost},
            welcome=self._welcome,
            deliver=LocalRef[Message](self.cell).tell,
            admit=check_host,
            unique=(Role.REPLICA,),
            max_peers=MAX_OPERATORS,
        )
        self.control_endpoint = self._listener.endpoint
        self.spawn(self._listener.run)
        self.spawn(self._start_tree)

    async def end_children(self) -> None:
        """Stop the children, for who is about to stop the root: operators are answered meanwhile.

        That takes a second for each process, and verbs may be repeated.
        """
        self._start_scope.cancel("the tree is stopping")
        self._repairs.cancel("the tree is stopping")
        await self._stop_all()

    async def on_stopping(self) -> None:
        """Give up a start that is under way, stop the children, and tell operators goodbye."""
        await self.end_children()
        if self._listener is not None:
            await self._listener.say_goodbye()

    async def on_stop(self) -> None:
        """Close the operators' socket last."""
        if self._listener is not None:
            self._listener.close()

    async def receive(self, message: ActorExited | Said | Joined | Left) -> None:
        """Handle one message; operators are answered from a task of their own."""
        match message:
            case ActorExited():
                await super().receive(message)
            case Joined(peer=peer, hello=hello):
                self._tell_hosts(Left(peer=peer, reason="it began anew"))  # if it was one
                if hello.role is Role.REPLICA:
                    self._host_peers.add(peer)
                    self._tell_hosts(message)
            case Said() | Left() if message.peer in self._host_peers:
                self._tell_hosts(message)
            case Said():
                await self.spawn_in_order(self._answer, message)
            case Left():
                pass

    @property
    def listener(self) -> Listener:
        """Where operators and hosts connect."""
        assert self._listener is not None
        return self._listener

    async def control(self, verb: Verb, timeout: float = VERB_TIMEOUT_S) -> ControlReply:
        """Do what a verb asks for, whole; one verb at a time. All but STOP wait for the start."""
        began = trio.current_time()
        deadline = began + timeout
        with trio.move_on_at(deadline) as waiting:
            if isinstance(verb, Stop):
                await self._turn.acquire()
            else:
                async with self._entry:  # so that they get their turns in the order they came
                    if not self.started.is_set():
                        await self.started.wait()
                    await self._turn.acquire()
        if waiting.cancelled_caught:
            # It has no effect later either: whoever sent it does not count on it any more.
            return msgspec.structs.replace(self._reply(verb), late=(self.name,))
        try:
            reply = await self._do(verb, deadline)
        finally:
            self._turn.release()
        seconds = trio.current_time() - began
        return msgspec.structs.replace(reply, state=self._lifecycle.state, seconds=seconds)

    async def status(self, timeout: float = STATUS_TIMEOUT_S) -> StatusReply:
        """Describe the whole tree; what does not answer in time, by hearsay."""
        tree = await self.node(min(timeout, STATUS_TIMEOUT_S))
        return StatusReply(
            state=self._lifecycle.state,
            endpoint=self._address.endpoint,
            model=self._lifecycle.weights.source,
            version=self._version,
            weights_version=self._lifecycle.weights.version,
            tree=msgspec.structs.replace(tree, state=self._lifecycle.state),
            replicas=tuple(_summary(node) for node in _replica_nodes(tree)),
            late=tuple(node.name for node in _walk(tree) if node.late),
        )

    async def _do(self, verb: Verb, deadline: float) -> ControlReply:
        plan = self._lifecycle.plan(verb)
        if plan.refused:
            return self._reply(verb, refused=plan.refused)
        self._lifecycle.accept(verb)
        reply, before = self._reply(verb), self._lifecycle.weights
        for step in plan.relay:
            self._lifecycle.begin(step)
            part = await self.relay(self._fit(step), _time_for(step, deadline))
            reply = _sum(reply, part)
            if not part.done:
                return await self._undo(step, reply, before, deadline)
            self._lifecycle.reach(step)
        if isinstance(verb, Pause) and verb.mode is PauseMode.ABORT:
            return await self._abort_all(reply, deadline)
        return reply

    async def _abort_all(self, reply: ControlReply, deadline: float) -> ControlReply:
        """End what no replica knows of, too, and what was open in a tree that was paused before."""
        answer = await self._abort(AbortRequests(all=True), deadline - trio.current_time())
        if isinstance(answer, AbortReply):
            return reply
        return msgspec.structs.replace(reply, late=(self._coordinator.name,))

    async def _undo(
        self, step: Verb, reply: ControlReply, before: Weights, deadline: float
    ) -> ControlReply:
        """Lead all parts back where some cannot follow; who is only late may follow yet.

        New weights are not used until every part has them ready, so there a late one cannot.
        """
        back = self._way_back(step, reply, before)
        if back is None:
            return reply
        self._lifecycle.begin(back)
        answer = await self.relay(back, deadline - trio.current_time())
        if answer.done:
            self._lifecycle.reach(back)
        return _kept(reply, before, answer) if isinstance(back, UpdateWeights) else reply

    def _way_back(self, step: Verb, reply: ControlReply, before: Weights) -> Verb | None:
        match step:
            case UpdateWeights(phase=UpdatePhase.PREPARE):
                return msgspec.structs.replace(step, phase=UpdatePhase.CANCEL)
            case UpdateWeights() if reply.refused:
                return msgspec.structs.replace(
                    step, source=before.source, version=before.version, keep_kv=False
                )
            case Resume() if reply.refused:
                return self._lifecycle.suspended
            case _:
                return None

    def _tell_hosts(self, event: Said | Joined | Left) -> None:
        """Pass on what concerns a host; one that says more than is read of it has to leave."""
        if self._hosts is None or event.peer not in self._host_peers:
            return
        if isinstance(event, Left):
            self._host_peers.remove(event.peer)
        try:
            self._hosts.tell_nowait(event)
        except MailboxFull:
            self.listener.drop(event.peer, "it says more than is read of it")

    async def _answer(self, said: Said) -> None:
        answer = await self._obey_operator(said)
        try:
            self.listener.answer(said.peer, said.message_id, answer)
        except WireError as error:  # some part has told of more than can be passed on
            self.listener.answer(said.peer, said.message_id, error)
        if self._lifecycle.state is State.STOPPED:
            self.stopped_by_verb.set()

    async def _obey_operator(self, said: Said) -> object:
        timeout = a_little_less(VERB_TIMEOUT_S if said.timeout_s is None else said.timeout_s)
        match said.message:
            case GetStatus():
                return await self.status(timeout)
            case AbortRequests() as abort:
                return await self._abort(abort, timeout)
            case verb if isinstance(verb, Verb):
                return await self.control(verb, timeout)
            case other:
                raise AssertionError(f"the listener let {other} through")

    async def _abort(self, abort: AbortRequests, timeout: float) -> AbortReply | CallboardError:
        if self._lifecycle.state is State.STOPPED:
            return AbortReply(aborted=0)  # the coordinator may be gone, and has ended all
        try:
            return await self._coordinator.ask(abort, timeout=timeout)
        except CallboardError as error:
            return error

    async def _start_tree(self) -> None:
        """Start the children; where one does not start, say so in `start_failure` and end."""
        with self._start_scope:
            try:
                await self.start_children()
            except CallboardError as error:
                self.start_failure = error
                self.cell.post(StopActor())
                return
            if self._lifecycle.state is State.STARTING:  # else it was stopped meanwhile
                self._lifecycle.state = State.RUNNING
            self.started.set()

    def _fit(self, verb: Verb) -> Verb:
        """Requests that cannot run have no use for time to drain."""
        if isinstance(verb, Stop) and self._desired.paused:
            return msgspec.structs.replace(verb, drain_s=0.0)
        return verb

    def _reply(self, verb: Verb, *, refused: str = "") -> ControlReply:
        return ControlReply(verb=verb_name(verb), state=self._lifecycle.state, refused=refused)

    def _welcome(self, session: str) -> Welcome:
        return Welcome(
            name=self.name,
            session=session,
            max_frame_bytes=self.listener.max_frame_bytes,
            control_endpoint=self.control_endpoint,
            model=self._model,
        )


def _replica_nodes(tree: NodeStatus) -> tuple[NodeStatus, ...]:
    """Return the replicas, those of the hosts that have joined behind the tree's own."""
    parts = {node.name: node.children for node in tree.children}
    hosts = parts.get(JOINED, ())
    return (*parts.get(REPLICAS, ()), *(node for host in hosts for node in host.children))


def _summary(node: NodeStatus) -> ReplicaStatus:
    """Pick what an operator asks for first out of a replica's part of the tree."""
    wanted = set(ReplicaStatus.__struct_fields__)
    found = {
        name: value
        for part in _walk(node)
        for name, value in part.details.items()
        if name in wanted and isinstance(value, int)
    }
    return ReplicaStatus(
        name=node.name, state=node.state, pid=node.pid, restarts=node.restarts, **found
    )


def _walk(node: NodeStatus) -> list[NodeStatus]:
    return [node, *(below for child in node.children for below in _walk(child))]


def _time_for(step: Verb, deadline: float) -> float:
    """Return how long a step may take; what prepares another leaves time for that."""
    left = deadline - trio.current_time()
    prepares = isinstance(step, UpdateWeights) and step.phase is UpdatePhase.PREPARE
    return left * PREPARE_SHARE if prepares else left


def _kept(reply: ControlReply, weights: Weights, back: ControlReply) -> ControlReply:
    """Return the answer to an update that was undone, by what was answered to its undoing."""
    late = f"no answer in time from {', '.join(reply.late)}"
    kept = f"weights {weights.version} stay in use"
    if back.refused:
        kept = f"not all replicas have weights {weights.version} again: {back.refused}"
    why = f"{reply.refused or late}; {kept}"
    return msgspec.structs.replace(
        reply,
        refused=why,
        failure=Failure.of(WeightsError(why)),
        late=tuple(dict.fromkeys((*reply.late, *back.late))),
    )


def _sum(so_far: ControlReply, part: ControlReply) -> ControlReply:
    """Add what one relayed verb did to the reply of the verb it was part of."""
    return msgspec.structs.replace(
        so_far,
        refused=part.refused,
        failure=part.failure,
        late=part.late,
        children=part.children,
        bytes_freed=so_far.bytes_freed + part.bytes_freed,
        requests=part.requests,
        steps=part.steps,
    )
