"""The coordinator: where clients and replicas meet, and the ledger of who is owed what.

It is the one that guarantees a client exactly one terminal delta a request: a replica may die at
any point, and the request is given to another (or to the next life of the same) with the tokens
that were delivered, so that the stream goes on behind them.
"""

from collections import defaultdict
from collections.abc import Callable

import trio

from callboard.actors.actor import Actor
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.mailbox import Reply
from callboard.actors.ref import ActorRef
from callboard.actors.routing import OpenRequest, PeerKey, Routing
from callboard.actors.session import Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem, Timer
from callboard.actors.transport import Network
from callboard.actors.zmq_socket import EndpointError
from callboard.messages.base import Message
from callboard.messages.control import AbortReply, AbortRequests, ControlReply, Stop
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    Failure,
    MailboxFull,
    RequestError,
    WireError,
)
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.membership import Hello, Role, Welcome
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    FinishReason,
    Refused,
    Submit,
    TokensOut,
)

FromClient = Submit | Abort
ToClient = Accepted | Refused | TokensOut

PORT_TIMEOUT_S = 2.0
PORT_INTERVAL_S = 0.02


class _DrainOver(Message, frozen=True):
    """Coordinator → itself: the open requests have had their time."""


class _Overdue(Message, frozen=True):
    """Coordinator → itself: some request's deadline passed; it may not have found a replica."""


CoordinatorInbox = Said | Joined | Left | AbortRequests | _DrainOver | _Overdue


class Coordinator(Actor[CoordinatorInbox]):
    """Owns the listening socket. Clients and replicas are told apart by their Hello."""

    capacity = 16 * 1024

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        endpoint: str,
        *,
        metrics: ActorRef[StepStats | RequestStats],
        control_endpoint: Callable[[], str],
        model: str,
        bound: Callable[[str], None],
    ) -> None:
        """`bound` is told the endpoint with its real port, for the next life and for replicas."""
        self._system = system
        self._network = network
        self._endpoint = endpoint
        self._metrics = metrics
        self._control_endpoint = control_endpoint
        self._bound = bound
        self._model = model
        self._routing = Routing()
        self._listener: Listener | None = None
        self._stopping: list[tuple[Stop, Reply]] = []
        self._taken = 0
        self._replicas: dict[str, PeerKey] = {}  # the latest of each name
        self._overdue: Timer | None = None  # for the first deadline among those without a replica

    async def on_start(self) -> None:
        """Listen."""
        self._listener = await self._listen()
        self._bound(self._listener.endpoint)
        self.spawn(self._listener.run)

    async def on_stopping(self) -> None:
        """End every stream, and see to it that each client hears of it."""
        self._end_streams()
        await self._listening.say_goodbye()

    async def on_stop(self) -> None:
        """Stop listening. A crash ends no stream: the next life goes on with them."""
        if self._listener is None:
            return
        if not self.cell.crashed:
            self._end_streams()
        self._listener.close()

    async def on_drain(self, verb: Stop) -> ControlReply | None:
        """Refuse new requests; acknowledged when every open one has its terminal delta."""
        self._stopping.append((verb, self.defer()))
        if verb.drain_s > 0:
            self.tell_self_at(trio.current_time() + verb.drain_s, _DrainOver())
        else:
            self._end(self._routing.open_requests(), FinishReason.ABORT)
        self._acknowledge_stop()
        return None

    async def receive(self, message: CoordinatorInbox) -> object:
        """Handle one message; the answer of AbortRequests is how many there were."""
        answer: object = None
        match message:
            case Said(peer=peer, message=said):
                self._hear(peer, said)
            case Joined(peer=peer, hello=hello):
                self._join(peer, hello)
            case Left(peer=peer, reason=reason):
                self._leave(peer, reason)
            case AbortRequests():
                answer = self._abort_requests(message)
            case _DrainOver():
                self._end(self._routing.open_requests(), FinishReason.ABORT)
            case _Overdue():
                self._end_overdue()
        self._assign_waiting()
        self._acknowledge_stop()
        return answer

    def details(self) -> dict[str, int | float | str]:
        """Return the counters `status` shows."""
        return {
            "open_requests": self._routing.num_open,
            "requests_taken": self._taken,
            "replicas": self._routing.num_replicas,
            "frames_refused": 0 if self._listener is None else self._listener.frames_refused,
            "peers_cut_off": 0 if self._listener is None else self._listener.peers_cut_off,
        }

    async def _listen(self) -> Listener:
        """Open the socket; the port of the life before may take a moment to become free."""
        give_up_at = trio.current_time() + (PORT_TIMEOUT_S if self.cell.lives > 1 else 0.0)
        while True:
            try:
                return Listener(
                    self._system,
                    self._network,
                    self._endpoint,
                    name=self.name,
                    inboxes={Role.CLIENT: FromClient, Role.REPLICA: FromReplica},
                    outboxes={Role.CLIENT: ToClient, Role.REPLICA: ToReplica},
                    welcome=self._welcome,
                    deliver=self.ref.tell,
                )
            except EndpointError:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(PORT_INTERVAL_S)

    def _welcome(self, session: str) -> Welcome:
        return Welcome(
            name=self.name,
            session=session,
            max_frame_bytes=self._listening.max_frame_bytes,
            control_endpoint=self._control_endpoint(),
            model=self._model,
        )

    @property
    def _listening(self) -> Listener:
        assert self._listener is not None
        return self._listener

    def _hear(self, peer: PeerKey, said: Message) -> None:
        match said:
            case Submit():
                self._submit(peer, said)
            case Abort(request_id=request_id):
                request = self._routing.of_client(peer, request_id)
                if request is not None:
                    self._abort([request])
            case Accepted():
                self._accepted(peer, said)
            case Refused():
                self._refused(peer, said)
            case TokensOut():
                self._tokens(peer, said)
            case StepStats() | RequestStats():
                self._metrics.tell_nowait(said)

    def _submit(self, peer: PeerKey, submit: Submit) -> None:
        try:
            if self._stopping:
                raise ActorStopped("the engine is stopping and takes no new requests")
            request = self._routing.submit(peer, submit, trio.current_time())
        except (RequestError, MailboxFull, ActorStopped) as error:
            refused = Refused(request_id=submit.request_id, failure=Failure.of(error))
            self._listening.send(peer, refused)
            return
        self._taken += 1
        self._assign_waiting()
        if request.replica is None:
            self._watch_deadline(request.deadline)

    def _assign_waiting(self) -> None:
        while (request := self._routing.next_to_assign()) is not None:
            self._assign(request)

    def _assign(self, request: OpenRequest) -> None:
        replica = self._routing.assign(request)
        assert replica is not None
        try:
            # A replica that is gone by now says so with a Left, which brings the request back.
            self._listening.send(replica, request.for_replica(trio.current_time()))
        except WireError as error:  # as long as a client may send, and ours is a little longer
            self._end([request], FinishReason.ERROR, Failure.of(error))

    def _watch_deadline(self, deadline: float) -> None:
        """Wake up at the earliest deadline of a request without a replica; one timer for all."""
        due = float("inf") if self._overdue is None else self._overdue.due
        if deadline >= due:
            return
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = self.tell_self_at(deadline, _Overdue())

    def _end_overdue(self) -> None:
        now = trio.current_time()
        unassigned = self._routing.unassigned()
        late = [request for request in unassigned if request.deadline <= now]
        self._end(late, FinishReason.DEADLINE)
        self._overdue = None
        rest = [request.deadline for request in unassigned if request.deadline > now]
        self._watch_deadline(min(rest, default=float("inf")))

    def _accepted(self, replica: PeerKey, accepted: Accepted) -> None:
        request = self._routing.find(replica, accepted.request_id)
        if request is None:
            return
        news = self._routing.accept(request, accepted)
        if news is not None:
            self._listening.send(request.client, news)

    def _refused(self, replica: PeerKey, refused: Refused) -> None:
        request = self._routing.find(replica, refused.request_id)
        if request is None:
            return
        if request.accepted:
            self._end([request], FinishReason.ERROR, refused.failure)
            return
        self._routing.close(request)
        failure = request.for_client(refused.failure)
        self._listening.send(request.client, Refused(request_id=request.client_id, failure=failure))

    def _tokens(self, replica: PeerKey, tokens: TokensOut) -> None:
        by_client: defaultdict[PeerKey, list[Delta]] = defaultdict(list)
        for delta in tokens.deltas:
            request = self._routing.find(replica, delta.request_id)
            if request is None:
                continue
            told = self._routing.deliver(request, delta)
            by_client[request.client].append(told)
            if told.finish is not delta.finish:  # ended here, over nonsense; the replica goes on
                self._listening.send(replica, Abort(request_id=delta.request_id))
        for client, deltas in by_client.items():
            self._listening.send(client, TokensOut(deltas=tuple(deltas)))

    def _join(self, peer: PeerKey, hello: Hello) -> None:
        self._leave(peer, "said hello again")
        if hello.role is Role.REPLICA:
            earlier = self._replicas.get(hello.name)
            if earlier is not None and earlier != peer:
                # A process that was killed says nothing; that its next life is here says enough.
                self._listening.drop(earlier, "its next life has joined")
            self._replicas[hello.name] = peer
            self._routing.replica_joined(peer)
            self.log.info("replica joined", replica=hello.name)

    def _leave(self, peer: PeerKey, reason: str) -> None:
        again, hopeless = self._routing.replica_left(peer)
        if again or hopeless:
            self.log.warning("replica lost", reason=reason, open=len(again), given_up=len(hopeless))
        failure = Failure(
            code="RequestFailed",
            message="every replica that ran this request was lost",
        )
        self._end(hopeless, FinishReason.ERROR, failure)
        for request in again:
            if request.aborting:
                self._end([request], FinishReason.ABORT)
            else:
                self._watch_deadline(request.deadline)
        # At once, not when a replica has said so: the client may be back already, with these ids.
        for request in self._routing.client_left(peer):
            self._forget(request)

    def _abort(self, requests: list[OpenRequest]) -> None:
        """Abort requests; those at a replica end when it says so, and has freed what they hold."""
        for request in requests:
            if request.replica is None:
                self._end([request], FinishReason.ABORT)
            elif not request.aborting:
                request.aborting = True
                self._listening.send(request.replica, Abort(request_id=request.wire_id))

    def _end(
        self, requests: list[OpenRequest], reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """Send terminal deltas made here, and tell the replicas to free what they hold."""
        for request in requests:
            self._forget(request)
            terminal = TokensOut(deltas=(request.terminal(reason, failure),))
            self._listening.send(request.client, terminal)

    def _forget(self, request: OpenRequest) -> None:
        """Have nothing more to do with a request, nor any replica that runs it."""
        if request.replica is not None:
            self._listening.send(request.replica, Abort(request_id=request.wire_id))
        self._routing.close(request)

    def _abort_requests(self, message: AbortRequests) -> AbortReply | CallboardError:
        if bool(message.request_id) == message.all:
            return RequestError(
                "say which request to abort, or that all are meant",
                field="request_id",
                allowed="one id, or the flag for all",
            )
        requests = (
            self._routing.open_requests()
            if message.all
            else self._routing.by_client_id(message.request_id)
        )
        self._abort(requests)
        return AbortReply(aborted=len(requests))

    def _end_streams(self) -> None:
        failure = Failure(code="ActorStopped", message="the engine stopped")
        self._end(self._routing.open_requests(), FinishReason.ABORT, failure)

    def _acknowledge_stop(self) -> None:
        """Answer every STOP once nothing is open; the list stays, and says that we are stopping."""
        if self._routing.num_open:
            return
        for verb, reply in self._stopping:
            if not reply.settled:
                reply.send(self.ack(verb))
