"""The coordinator: where clients and replicas meet, and the ledger of who is owed what.

It is the one that guarantees a client exactly one terminal delta a request: a replica may die at
any point, and the request is given to another (or to the next life of the same) with the tokens
that were delivered, so that the stream goes on behind them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import ClassVar

import trio

from callboard.actors.actor import Actor
from callboard.actors.clients import (
    LOST,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_FRAMES,
    Client,
    ClientKey,
    Clients,
    Ended,
    Kept,
    News,
)
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.mailbox import Reply
from callboard.actors.placement import PeerKey, Placement
from callboard.actors.ref import ActorRef
from callboard.actors.routing import RETRY_AFTER_S, OpenRequest, Routing, check, repeats
from callboard.actors.session import Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem, Timer
from callboard.actors.tickets import Tickets
from callboard.actors.transport import Network
from callboard.actors.zmq_socket import EndpointError
from callboard.messages.base import BYTES_PER_ID, Message, TokenIds
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    KVLevel,
    State,
    Stop,
    Suspend,
)
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    Failure,
    MailboxFull,
    RequestError,
    SlowReader,
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
    RequestId,
    Submit,
    TokensOut,
)

FromClient = Submit | Abort
ToClient = Accepted | Refused | TokensOut

PORT_TIMEOUT_S = 2.0
PORT_INTERVAL_S = 0.02

LAST_WORDS_S = 1.0
"""How long replicas have to say the last words of requests that a STOP aborts."""

GRACE_S = 5.0
"""How long the requests of a client that lost its connection go on without it.

Connections are made anew in a second or two. A client that is away for longer submits again what
it has open, and that goes on behind the tokens it has; only work is lost.
"""


class _Timer(Message, frozen=True):
    """Urgent, since there is always room in the control lane: none of these may be lost."""

    urgent: ClassVar[bool] = True


class _DrainOver(_Timer, frozen=True):
    """Coordinator → itself: the open requests have had their time."""


class _AbortOver(_Timer, frozen=True):
    """Coordinator → itself: the replicas have had their time to end what was aborted for a STOP."""


class _Overdue(_Timer, frozen=True):
    """Coordinator → itself: some request's deadline passed; it may not have found a replica."""


class _GraceOver(_Timer, frozen=True):
    """Coordinator → itself: what a client has not asked for again by now, nobody waits for.

    It is about the client as it was after so many sessions.
    """

    client: ClientKey
    sessions: int


class _Released(_Timer, frozen=True):
    """Tickets → coordinator: some replicas are held no more."""


COUNTED = ("requests_aborted", "requests_retried", "requests_resumed", "slow_readers_ended")
"""What is counted besides refusals, which are by the name of their error: `refused_MailboxFull`."""

_Aborting = tuple[AbortReply, Reply, list[OpenRequest]]
"""What to answer, to whom, when these have ended."""

CoordinatorInbox = (
    Said
    | Joined
    | Left
    | AbortRequests
    | _DrainOver
    | _AbortOver
    | _Overdue
    | _GraceOver
    | _Released
)


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
        placement: Placement,
        control_endpoint: Callable[[], str],
        model: str,
        bound: Callable[[str], None],
        tickets: Tickets | None = None,
    ) -> None:
        """`bound` is told the endpoint with its real port, for the next life and for replicas.

        Without `tickets` whoever says that it is a replica is taken for one.
        """
        self._system = system
        self._network = network
        self._endpoint = endpoint
        self._metrics = metrics
        self._control_endpoint = control_endpoint
        self._bound = bound
        self._tickets = tickets
        self._held: dict[PeerKey, Joined] = {}  # replicas that are here and get no requests yet
        self._model = model
        self._routing = Routing(placement)
        self._listener: Listener | None = None
        self._stopping: list[tuple[Stop, Reply]] = []
        self._aborting: list[_Aborting] = []
        self._taken = 0
        self._counts: Counter[str] = Counter()
        self._clients = Clients()
        self._replicas: dict[PeerKey, str] = {}  # the session of each
        self._overdue: Timer | None = None  # for the first deadline among those without a replica

    async def on_start(self) -> None:
        """Listen."""
        self._listener = await self._listen()
        self._bound(self._listener.endpoint)
        self.spawn(self._listener.run)
        if self._tickets is not None:
            self._tickets.on_release = lambda: self.cell.post(_Released())

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
            self._abort_all()
        self._acknowledge_stop()
        return None

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Forget where prefixes are, when the replicas are to forget them."""
        if verb.kv is KVLevel.DROP:
            self._routing.forget_prefixes()
        return self.ack(verb)

    async def receive(self, message: CoordinatorInbox) -> object:
        """Handle one message; the answer of AbortRequests is how many there were."""
        answer: object = None
        match message:
            case Said(peer=peer, message=said):
                self._hear(peer, said)
            case Joined():
                self._join(message)
            case Left():
                self._leave(message)
            case AbortRequests():
                answer = self._abort_requests(message)
            case _DrainOver():
                self._abort_all()
            case _AbortOver():
                self._end(self._routing.open_requests(), FinishReason.ABORT)
            case _Overdue():
                self._end_overdue()
            case _GraceOver():
                self._end_unclaimed(message)
            case _Released():
                self._let_in()
        self._assign_waiting()
        self._acknowledge_stop()
        if self._aborting:
            self._acknowledge_aborts()
        return answer

    def details(self) -> dict[str, int | float | str]:
        """Return the counters `status` shows."""
        counts = {name: self._counts[name] for name in COUNTED}
        refused = {name: count for name, count in self._counts.items() if name not in counts}
        return {
            "open_requests": self._routing.num_open,
            "requests_taken": self._taken,
            "replicas": self._routing.num_replicas,
            "clients": len(self._clients),
            **counts,
            **dict(sorted(refused.items())),
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
                    deliver=self._deliver,
                    admit=None if self._tickets is None else self._tickets.check,
                    unique=(Role.REPLICA,),
                )
            except EndpointError:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(PORT_INTERVAL_S)

    async def _deliver(self, event: Said | Joined | Left) -> None:
        """Put an event into the own mailbox; without a task switch where there is room."""
        try:
            self.ref.tell_nowait(event)
        except MailboxFull:
            await self.ref.tell(event)

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
                client = self._clients.at(peer)
                request = client and self._routing.of_client(client.key, request_id)
                if request:
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
        client = self._clients.at(peer)
        if client is None:
            return
        try:
            if not self._goes_on(client, submit):
                self._take(client, submit)
        except (RequestError, MailboxFull, ActorStopped) as error:
            self._refuse(client, submit.request_id, Failure.of(error))

    def _take(self, client: Client, submit: Submit) -> None:
        """Take a new request in. Raises what it is refused for."""
        if self._stopping:
            raise ActorStopped("the engine is stopping and takes no new requests")
        if client.slow and self._is_behind(client):
            raise MailboxFull("read what was sent first", retry_after_s=RETRY_AFTER_S)
        request = self._routing.submit(client.key, submit, trio.current_time())
        client.slow = False
        self._taken += 1
        self._assign_waiting()
        if request.replica is None:
            self._watch_deadline(request.deadline)

    def _goes_on(self, client: Client, submit: Submit) -> bool:
        """Whether it is a request that was submitted before; if so, its client is up to date.

        Within a session it is already, and nothing is said twice. Raises RequestError for another
        request of the same id.
        """
        request = self._routing.of_client(client.key, submit.request_id)
        if request is None:
            return self._ended_before(client, submit)
        if not repeats(submit, request.fingerprint):
            raise RequestError(
                f"the request id {submit.request_id} is in use",
                field="request_id",
                allowed="a new id, or the same request again",
            )
        check(submit)
        if not request.claimed:
            self._claim(client, request, submit.delivered)
        return True

    def _claim(self, client: Client, request: OpenRequest, delivered: TokenIds) -> None:
        """Go on with a request whose client was away: with what it missed, or behind what it has.

        Some of it may be gone that was under way; then that is computed again.
        """
        self._counts["requests_resumed"] += 1
        request.claimed = True
        kept = client.unread.claim(request.client_id)
        if kept is None or kept.has_end:  # this one is open: an earlier one of its id has ended
            kept = Kept()
        missed = None
        if request.has_begun_with(delivered):
            missed = kept.behind(len(delivered) // BYTES_PER_ID, len(request.output))
        self._tell(client, [(request, one) for one in kept.news(missed or [], delivered)])
        if missed is None and self._routing.is_open(request):
            self._restart(request, delivered)

    def _restart(self, request: OpenRequest, delivered: TokenIds) -> None:
        if request.replica is not None:
            self._say(request.replica, Abort(request_id=request.wire_id))
        self._routing.restart(request, delivered)
        if request.aborting:
            self._end([request], FinishReason.ABORT)
        else:
            self._watch_deadline(request.deadline)

    def _ended_before(self, client: Client, submit: Submit) -> bool:
        """Whether the request has ended and its client may not know; if so, it is told."""
        kept = client.unread.claim(submit.request_id)
        if kept is None or kept.ended is None or not repeats(submit, kept.ended):
            return False
        missed = kept.behind(len(submit.delivered) // BYTES_PER_ID, LOST)
        if missed is None:
            return False
        self._counts["requests_resumed"] += 1
        self._send(client, [(one, kept.ended) for one in kept.news(missed, submit.delivered)])
        return True

    def _refuse(self, client: Client, request_id: RequestId, failure: Failure) -> None:
        self._counts[f"refused_{failure.code}"] += 1
        if client.peer is not None:
            refused = Refused(request_id=request_id, failure=failure)
            self._listening.send(client.peer, refused, session=client.session)

    # What clients and replicas are told.

    def _say(self, replica: PeerKey, message: Submit | Abort) -> None:
        """Tell a replica; one that is gone by now says so with a Left, and all it has with it."""
        session = self._replicas.get(replica)
        if session is not None:
            self._listening.send(replica, message, session=session)

    def _tell(self, client: Client, news: Iterable[tuple[OpenRequest, News]]) -> None:
        """Tell a client, or keep for it what it has not asked for again since it was away."""
        now: list[tuple[News, Ended | None]] = []
        for request, one in news:
            is_end = isinstance(one, Delta) and one.finish is not None
            ended = request.fingerprint if is_end else None
            if request.claimed:
                now.append((one, ended))
            else:
                client.unread.keep(one, ended)
        self._send(client, now)
        self._check_that_it_reads(client)

    def _send(self, client: Client, news: list[tuple[News, Ended | None]]) -> None:
        deltas = tuple(one for one, _ in news if isinstance(one, Delta))
        messages: list[Message] = [one for one, _ in news if isinstance(one, Accepted)]
        if deltas:
            messages.append(TokensOut(deltas=deltas))
        peer, frame = client.peer, LOST
        for message in messages:
            if peer is not None and self._listening.send(peer, message, session=client.session):
                frame, _ = self._listening.frames(peer)
        for one, ended in news:
            client.unread.sent(frame, one, ended)

    def _is_behind(self, client: Client) -> bool:
        frames = 0
        if client.peer is not None:
            given, frames = self._listening.frames(client.peer)
            client.unread.taken(given - frames)
        return frames > MAX_UNREAD_FRAMES or client.unread.num_bytes > MAX_UNREAD_BYTES

    def _check_that_it_reads(self, client: Client) -> None:
        """End the requests of a client that does not read, before its unread fills the memory."""
        if client.slow or not self._is_behind(client):
            return
        client.slow = True
        if client.peer is None:
            self._forget_client(client)
            return
        self._counts["slow_readers_ended"] += 1
        requests = self._routing.requests_of(client.key)
        self.log.warning("client does not read", requests=len(requests))
        failure = Failure.of(SlowReader("the client did not read what it was sent"))
        self._end(requests, FinishReason.ERROR, failure)

    def _assign_waiting(self) -> None:
        while (request := self._routing.next_to_assign()) is not None:
            self._assign(request)

    def _assign(self, request: OpenRequest) -> None:
        replica = self._routing.assign(request)
        assert replica is not None
        try:
            self._say(replica, request.for_replica(trio.current_time()))
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
            self._tell(self._client_of(request), [(request, news)])

    def _refused(self, replica: PeerKey, refused: Refused) -> None:
        request = self._routing.find(replica, refused.request_id)
        if request is None:
            return
        if request.accepted:
            self._end([request], FinishReason.ERROR, refused.failure)
            return
        self._routing.close(request)
        failure = request.for_client(refused.failure)
        self._refuse(self._client_of(request), request.client_id, failure)

    def _tokens(self, replica: PeerKey, tokens: TokensOut) -> None:
        by_client: defaultdict[ClientKey, list[tuple[OpenRequest, Delta]]] = defaultdict(list)
        for delta in tokens.deltas:
            request = self._routing.find(replica, delta.request_id)
            if request is None:
                continue
            told = self._routing.deliver(request, delta)
            by_client[request.client].append((request, told))
            if told.finish is not delta.finish:  # ended here, over nonsense; the replica goes on
                self._say(replica, Abort(request_id=delta.request_id))
        for told_of in by_client.values():
            self._tell(self._client_of(told_of[0][0]), told_of)

    def _client_of(self, request: OpenRequest) -> Client:
        client = self._clients.get(request.client)
        assert client is not None, "a request outlives its client"
        return client

    # Who comes and goes.

    def _join(self, joined: Joined) -> None:
        self._leave(Left(peer=joined.peer, reason="said hello again"))
        hello: Hello = joined.hello
        if self._tickets is not None and self._tickets.holds(hello):
            self._held[joined.peer] = joined
        elif hello.role is Role.REPLICA:
            self._replicas[joined.peer] = joined.session
            self._routing.replica_joined(joined.peer, hello.name)
            self.log.info("replica joined", replica=hello.name)
        else:
            self._join_client(joined, hello)

    def _let_in(self) -> None:
        held, self._held = self._held, {}
        for joined in held.values():
            self._join(joined)

    def _join_client(self, joined: Joined, hello: Hello) -> None:
        key = hello.instance.encode() or joined.peer
        known = self._clients.get(key)
        if known is not None and known.peer is not None:
            # Its earlier connection is lost, and nobody has noticed.
            self._listening.drop(known.peer, "it is here again by another way")
            self._lose_client(known)
        client = self._clients.enter(key, joined.peer, joined.session)
        if known is not None:
            self._give_grace(client)

    def _leave(self, left: Left) -> None:
        client = self._clients.at(left.peer)
        self._held.pop(left.peer, None)
        if client is None:
            self._lose_replica(left.peer, left.reason)
        elif left.for_good:
            self._forget_client(client)
        else:
            self._lose_client(client)

    def _lose_replica(self, peer: PeerKey, reason: str) -> None:
        self._replicas.pop(peer, None)
        # In a paused tree it has run nothing, and none of its requests can be the cause.
        counts = self.cell.state not in (State.PAUSED, State.SUSPENDED)
        again, hopeless = self._routing.replica_left(peer, counts=counts)
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
                self._counts["requests_retried"] += 1
                self._watch_deadline(request.deadline)

    def _lose_client(self, client: Client) -> None:
        """A client may be back soon: its requests go on, and what is said of them is kept."""
        self._clients.leave(client)
        for request in self._routing.requests_of(client.key):
            request.claimed = False
        self._give_grace(client)

    def _give_grace(self, client: Client) -> None:
        if not client.unread and not self._routing.requests_of(client.key):
            if client.peer is None:
                self._clients.forget(client)
            return
        over = _GraceOver(client=client.key, sessions=client.sessions)
        self.tell_self_at(trio.current_time() + GRACE_S, over)

    def _end_unclaimed(self, over: _GraceOver) -> None:
        client = self._clients.get(over.client)
        if client is None or client.sessions != over.sessions:
            return
        if client.peer is None:
            self._forget_client(client)
            return
        for request in self._routing.requests_of(client.key):
            if not request.claimed:
                self._forget(request)
        client.unread.forget()

    def _forget_client(self, client: Client) -> None:
        for request in self._routing.requests_of(client.key):
            self._forget(request)
        self._clients.forget(client)

    def _abort(self, requests: list[OpenRequest]) -> None:
        """Abort requests; those at a replica end when it says so, and has freed what they hold."""
        for request in requests:
            if request.replica is None:
                self._end([request], FinishReason.ABORT)
            elif not request.aborting:
                self._counts["requests_aborted"] += 1
                request.aborting = True
                self._say(request.replica, Abort(request_id=request.wire_id))

    def _abort_all(self) -> None:
        """Abort all requests; what no replica ends in time is ended here, as far as it is known."""
        self._abort(self._routing.open_requests())
        self.tell_self_at(trio.current_time() + LAST_WORDS_S, _AbortOver())

    def _end(
        self, requests: list[OpenRequest], reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """Send terminal deltas made here, and tell the replicas to free what they hold."""
        by_client: defaultdict[ClientKey, list[tuple[OpenRequest, Delta]]] = defaultdict(list)
        for request in requests:
            if not self._routing.is_open(request):
                continue  # its client was found not to read while another was ended
            self._forget(request, is_abort=reason is FinishReason.ABORT)
            by_client[request.client].append((request, request.terminal(reason, failure)))
        for told_of in by_client.values():
            self._tell(self._client_of(told_of[0][0]), told_of)

    def _forget(self, request: OpenRequest, *, is_abort: bool = True) -> None:
        """Have nothing more to do with a request, nor any replica that runs it."""
        if is_abort and not request.aborting:
            self._counts["requests_aborted"] += 1
        if request.replica is not None and not request.aborting:
            self._say(request.replica, Abort(request_id=request.wire_id))
        self._routing.close(request)

    def _abort_requests(self, message: AbortRequests) -> CallboardError | None:
        """Abort requests; answered when all of them have ended."""
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
        self._aborting.append((AbortReply(aborted=len(requests)), self.defer(), requests))
        return None

    def _acknowledge_aborts(self) -> None:
        still: list[_Aborting] = []
        for answer, reply, requests in self._aborting:
            left = [request for request in requests if self._routing.is_open(request)]
            if reply.settled:  # who asked has given up
                continue
            if left:
                still.append((answer, reply, left))
            else:
                reply.send(answer)
        self._aborting = still

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
