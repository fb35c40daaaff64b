"""A conversation between two processes: who is there, is it compatible, alive, and keeping up.

On top of a transport that may lose a peer at any moment, a session gives: a handshake that refuses
other versions and other message types by name, pings, credit (so that a slow reader is noticed
before anything fills up), asks that are answered or fail, and typed refusals of what is no message.

`Listener` is the listening side and `Connection` the connecting one. Both run as a task of whoever
they serve and hand what arrives to its `deliver`, an actor's mailbox for most. What there is no
room for waits here, within the credit given, and holds up neither pings nor credit nor answers.
"""

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any, TypeVar, cast

import msgspec
import trio

from callboard.actors.mailbox import Reply
from callboard.actors.patience import Patience, Rarely
from callboard.actors.ref import current_cell
from callboard.actors.system import ActorSystem
from callboard.actors.transport import ClientPort, Inlet, Network, PeerKey, ServerPort
from callboard.actors.zmq_socket import PeerGone
from callboard.logs import get_logger
from callboard.messages.base import Call, Message
from callboard.messages.codec import (
    MAX_FRAME_BYTES,
    Answer,
    decode_body,
    decode_frame,
    encode_body,
    encode_frame,
    members,
    reply_type,
    schema_hash,
)
from callboard.messages.envelope import Envelope
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    Failure,
    NameInUse,
    ProtocolMismatch,
    TooManyPeers,
    Unreachable,
    WireError,
)
from callboard.messages.membership import (
    PROTOCOL_VERSION,
    Bye,
    Credit,
    FrameRefused,
    Hello,
    Ping,
    Pong,
    Role,
    Unwelcome,
    Welcome,
    WhoAreYou,
)

R = TypeVar("R")

SESSION = Hello | Welcome | Unwelcome | WhoAreYou | Ping | Pong | Credit | Bye | FrameRefused

WINDOW = 1024
"""Frames a side may have under way that the other has not taken yet."""

OUTBOX = 32 * 1024
"""Frames kept for a peer that is out of credit, before it is given up as too slow.

A replica takes requests more slowly than clients submit them, and a coordinator may have 16,384
open, each with an abort behind it.
"""

PING_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 15.0
HANDSHAKE_TIMEOUT_S = 5.0
LONGEST_S = 9e9
"""What is said of a longer time to answer: an int64 of nanoseconds ends soon after."""

MAX_PEERS = 512
"""How many peers of one role a listener welcomes: together with those under way they need not all
of the 1,024 descriptors that a process has by default."""

WHO_ARE_YOU_PER_S = 10.0
"""How often a peer without a session is asked who it is, after the first few times."""

LOG_INTERVAL_S = 1.0
"""One line in so many seconds is logged about frames that are refused."""

GOODBYE_S = 1.0
"""How long peers may take to read their last words."""

log = get_logger()


class Said(Message, frozen=True):
    """Session → its actor: a peer said this. `message_id` is what an ask is answered by."""

    peer: PeerKey
    message: Any
    message_id: int
    timeout_s: float | None = None  # what was left of the sender's deadline


class Joined(Message, frozen=True):
    """Session → its actor: a peer is there, or is there again as a new incarnation."""

    peer: PeerKey
    hello: Any  # Hello at a listener, Welcome at a connection
    session: str = ""  # what `Listener.send` takes, so that nothing gets into a later one


class Left(Message, frozen=True):
    """Session → its actor: a peer is gone, and why."""

    peer: PeerKey
    reason: str
    for_good: bool = False  # a server that was told to stop, or a peer that said goodbye


SERVER: PeerKey = b""
"""The peer of whoever has only one."""

Event = Said | Joined | Left
Deliver = Callable[[Event], Awaitable[None]]


class PeerTooSlow(CallboardError):
    """A peer did not take its frames for so long that its outbox is full."""


class _Asks:
    """Questions under way, by who was asked and the id of the frame that asked."""

    def __init__(self) -> None:
        self._open: dict[tuple[PeerKey, int], tuple[Reply, Any]] = {}

    def add(self, peer: PeerKey, message_id: int, call: Call[Any]) -> Reply:
        reply = Reply()
        self._open[peer, message_id] = (reply, reply_type(type(call)))
        return reply

    def forget(self, peer: PeerKey, message_id: int) -> None:
        self._open.pop((peer, message_id), None)

    def settle(self, peer: PeerKey, envelope: Envelope) -> None:
        """Hand an answer to who waits for it; one nobody waits for any more is dropped."""
        asked = self._open.pop((peer, envelope.answers), None)
        if asked is None:
            return
        reply, kind = asked
        try:
            answer = decode_body(envelope.body, Answer)
            if answer.failure is None:
                reply.send(decode_body(answer.value, kind))
            else:
                reply.fail(answer.failure.error())
        except WireError as error:
            reply.fail(error)

    def fail_all(self, error: CallboardError) -> None:
        for reply, _ in self._open.values():
            reply.fail(error)
        self._open.clear()

    def fail_of(self, peer: PeerKey, error: CallboardError) -> None:
        for key in [key for key in self._open if key[0] == peer]:
            reply, _ = self._open.pop(key)
            reply.fail(error)


class _Flow:
    """Credit in both directions of one connection, counted in application frames."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._sent = 0
        self._acknowledged = 0
        self._arrived = 0
        self._taken = 0
        self._told = 0
        self.outbox: deque[bytes] = deque()
        self.room = trio.Event()

    @property
    def unread(self) -> int:
        """How many frames the peer was given, sent or not, and has not taken."""
        return self._sent + len(self.outbox) - self._acknowledged

    @property
    def given(self) -> int:
        """How many frames the peer was given in all, sent or not."""
        return self._sent + len(self.outbox)

    @property
    def blocked(self) -> bool:
        """Whether a frame sent now would have to wait for credit."""
        return bool(self.outbox) or self._sent - self._acknowledged >= WINDOW

    def post(self, frame: bytes) -> None:
        """Send a frame, or keep it until there is credit. Raises PeerTooSlow, PeerGone."""
        if self.blocked:
            if len(self.outbox) >= OUTBOX:
                raise PeerTooSlow(f"{len(self.outbox)} frames wait for a peer that takes none")
            self.outbox.append(frame)
            return
        self._send(frame)
        self._sent += 1

    def acknowledge(self, taken: int) -> None:
        """The peer has taken so many in all: send what waited for that. Raises PeerGone."""
        # Of what was not sent it cannot have taken anything, whatever it says.
        self._acknowledged = max(self._acknowledged, min(taken, self._sent))
        while self.outbox and self._sent - self._acknowledged < WINDOW:
            self._send(self.outbox.popleft())
            self._sent += 1
        if not self.blocked:
            self.wake()

    def wake(self) -> None:
        """Let everybody who waits for room look again."""
        self.room.set()
        self.room = trio.Event()

    def arrive(self) -> bool:
        """Count a frame that came; False when the peer takes no notice of its credit."""
        self._arrived += 1
        return self._arrived - self._taken <= 2 * WINDOW

    def take(self) -> Credit | None:
        """Count a frame taken; returns the credit to tell the peer about, now and then."""
        self._taken += 1
        return self.tell() if self._taken - self._told >= WINDOW // 4 else None

    def tell(self) -> Credit | None:
        """Return the credit that the peer has not been told about, if there is any."""
        if self._taken == self._told:
            return None
        self._told = self._taken
        return Credit(taken=self._taken)


class _Peer:
    """A peer a listener has welcomed."""

    def __init__(self, key: PeerKey, hello: Hello, flow: _Flow) -> None:
        self.key = key
        self.hello = hello
        self.flow = flow
        self.session = secrets.token_hex(8)
        self.heard_at = trio.current_time()


class _Speaker(ABC):
    """What both sides share: frames from messages, with ids and causes; events to the actor."""

    def __init__(
        self, system: ActorSystem, name: str, max_frame_bytes: int, deliver: Deliver
    ) -> None:
        self._system = system
        self._name = name
        self.max_frame_bytes = max_frame_bytes
        self.asks = _Asks()
        self.frames_refused = 0
        self._closed = False
        self._deliver = deliver
        self._events = Inlet[tuple[Event, _Flow | None]]()

    def _tell(self, event: Event, flow: _Flow | None = None) -> None:
        """Let the actor hear of something, in order; `flow` is what it takes credit from."""
        self._events.put((event, flow))

    async def _deliver_all(self) -> None:
        while True:
            for event, flow in await self._events.take():
                await self._deliver(event)
                if flow is not None:
                    self._count(event.peer, flow)

    @abstractmethod
    def _count(self, peer: PeerKey, flow: _Flow) -> None:
        """A frame has been taken; tell the peer now and then, if that is its session still."""

    def _frame(self, message: Message, *, timeout: float | None = None) -> tuple[int, bytes]:
        cell = current_cell.get()
        message_id = self._system.next_message_id()
        frame = encode_frame(
            encode_body(message),
            message_id=message_id,
            cause=0 if cell is None else cell.handling,
            sender=self._name,
            timeout_ns=-1 if timeout is None else int(min(timeout, LONGEST_S) * 1e9),
            max_bytes=self.max_frame_bytes,
        )
        return message_id, frame

    def _answer_frame(self, message_id: int, value: object) -> bytes:
        if isinstance(value, CallboardError):
            answer = Answer(msgspec.Raw(b"\xc0"), Failure.of(value))
        else:
            answer = Answer(msgspec.Raw(encode_body(value)))
        return encode_frame(
            encode_body(answer),
            message_id=self._system.next_message_id(),
            answers=message_id,
            sender=self._name,
            max_bytes=self.max_frame_bytes,
        )

    async def _ask(
        self, peer: PeerKey, call: Call[R], timeout: float, post: Callable[[bytes], None]
    ) -> R:
        expired = DeadlineExceeded(f"no answer to {type(call).__name__} in {timeout:g} s")
        if timeout <= 0:
            raise expired
        message_id, frame = self._frame(call, timeout=timeout)
        reply = self.asks.add(peer, message_id, call)
        timer = self._system.timers.at(trio.current_time() + timeout, lambda: reply.fail(expired))
        try:
            post(frame)
            return cast(R, await reply.wait())
        finally:
            timer.cancel()
            self.asks.forget(peer, message_id)


class Listener(_Speaker):
    """The listening side: many peers, each welcomed by its role."""

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        endpoint: str,
        *,
        name: str,
        inboxes: Mapping[Role, Any],
        outboxes: Mapping[Role, Any],
        welcome: Callable[[str], Welcome],
        deliver: Deliver,
        admit: Callable[[Hello], None] | None = None,
        unique: Container[Role] = (),
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_peers: int = MAX_PEERS,
    ) -> None:
        """`inboxes` and `outboxes` say, by role, what a peer may say and what it may be told.

        `welcome` makes the Welcome for a session id; `max_peers` holds for each role. `admit`
        raises why somebody is not welcome, or not any more: it is asked again every second. Of a
        role in `unique` no two peers have a name at once: the second is refused for as long as the
        first is there.
        """
        super().__init__(system, name, max_frame_bytes, deliver)
        self._port: ServerPort = network.listen(endpoint, max_frame_bytes=max_frame_bytes)
        self._allowed = {role: members(union) for role, union in inboxes.items()}
        self._schemas = {role: schema_hash(inboxes[role], outboxes[role]) for role in inboxes}
        kinds = {kind for union in inboxes.values() for kind in members(union)}
        self._union = _union([*members(SESSION), *sorted(kinds, key=str)])
        self._welcome = welcome
        self._admit = admit or _admit_all
        self._unique = unique
        self._peers: dict[PeerKey, _Peer] = {}
        self._max_peers = max_peers
        self._patience = Patience()
        self._strangers = Patience(regained_per_s=WHO_ARE_YOU_PER_S)
        self._log_rarely = Rarely(LOG_INTERVAL_S)
        self.peers_cut_off = 0
        self._departure = trio.Event()

    @property
    def endpoint(self) -> str:
        """Where peers connect, with the real port."""
        return self._port.endpoint

    def hello(self, peer: PeerKey) -> Hello | None:
        """Return what a present peer said of itself."""
        found = self._peers.get(peer)
        return None if found is None else found.hello

    def heard_at(self, peer: PeerKey) -> float | None:
        """Return when a present peer last said anything; a silent one is pinged each second."""
        found = self._peers.get(peer)
        return None if found is None else found.heard_at

    async def run(self) -> None:
        """Read until closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_peers)
            nursery.start_soon(self._deliver_all)
            nursery.start_soon(self._port.keep_door)
            while not self._closed:
                for key, frame in await self._frames():
                    self._take(key, frame)
            nursery.cancel_scope.cancel(f"{self._name} was closed")

    def close(self) -> None:
        """Say goodbye to everybody and stop listening; `run` returns."""
        if self._closed:
            return
        self._closed = True
        for key in list(self._peers):
            self._reply(key, Bye())
        self._peers.clear()
        self.asks.fail_all(ActorStopped(f"{self._name} stopped"))
        self._port.close()

    async def say_goodbye(self, timeout: float = GOODBYE_S) -> None:
        """Tell every peer that this is the end, and wait until it has read all that was sent.

        A port that closes takes along what its peers have not read yet, linger or not.
        """
        for peer in list(self._peers.values()):
            self._post(peer, self._frame(Bye(for_good=True))[1])
        with trio.move_on_after(timeout):
            while self._peers:
                await self._departure.wait()

    def send(self, peer: PeerKey, message: Message, *, session: str = "") -> bool:
        """Send, or queue for lack of credit; False when the peer is gone (or given up just now).

        Or when it is in another session than the one that is given.
        """
        found = self._peers.get(peer)
        if found is None or (session and found.session != session):
            return False
        return self._post(found, self._frame(message)[1])

    def frames(self, peer: PeerKey) -> tuple[int, int]:
        """Return how many frames a peer was given in this session, and has not taken of them."""
        found = self._peers.get(peer)
        return (0, 0) if found is None else (found.flow.given, found.flow.unread)

    def answer(self, peer: PeerKey, message_id: int, value: object) -> bool:
        """Answer a peer's ask with a value, or with an error."""
        found = self._peers.get(peer)
        return found is not None and self._post(found, self._answer_frame(message_id, value))

    async def ask(self, peer: PeerKey, call: Call[R], *, timeout: float) -> R:
        """Ask a peer. Raises ActorStopped when it is not there, DeadlineExceeded, what it says."""
        found = self._peers.get(peer)
        if found is None:
            raise ActorStopped("the peer is not connected")
        known = found

        def post(frame: bytes) -> None:
            if not self._post(known, frame):
                raise ActorStopped("the peer is gone")

        return await self._ask(peer, call, timeout, post)

    def drop(self, peer: PeerKey, reason: str, *, for_good: bool = False) -> None:
        """Forget a peer and tell the actor.

        Whatever the peer says next makes it say Hello again, and begin a new session.
        """
        known = self._peers.pop(peer, None)
        if known is not None:
            log.info("peer dropped", peer=known.hello.name, reason=reason)
            self.asks.fail_of(peer, ActorStopped(f"the peer is gone: {reason}"))
            self._port.dismiss(peer)
            self._tell(Left(peer=peer, reason=reason, for_good=for_good))
            self._departure.set()
            self._departure = trio.Event()

    def dismiss(self, peer: PeerKey, error: CallboardError) -> None:
        """Tell a peer why it is not welcome any more, and forget it."""
        if peer in self._peers:
            self._reply(peer, Unwelcome(failure=Failure.of(error)))
            self.drop(peer, str(error))

    def drop_all(self, role: Role, reason: str) -> None:
        """Forget every peer of a role."""
        for peer in list(self._peers.values()):
            if peer.hello.role is role:
                self.drop(peer.key, reason)

    def _post(self, peer: _Peer, frame: bytes) -> bool:
        try:
            peer.flow.post(frame)
        except (PeerGone, PeerTooSlow, trio.WouldBlock) as error:
            self.drop(peer.key, _reason(error))
            return False
        return True

    async def _frames(self) -> list[tuple[PeerKey, bytes]]:
        try:
            return await self._port.receive()
        except trio.ClosedResourceError:
            if not self._closed:
                raise
            return []

    def _take(self, key: PeerKey, frame: bytes) -> None:
        if self._patience.has_given_up(key):
            self.frames_refused += 1  # it was cut off, and this was under way
            return
        peer = self._peers.get(key)
        try:
            envelope = decode_frame(frame, max_bytes=self.max_frame_bytes)
            if peer is not None:
                peer.heard_at = trio.current_time()
                if envelope.answers:
                    peer.flow.arrive()
                    self._count(key, peer.flow)
                    self.asks.settle(key, envelope)
                    return
            message = decode_body(envelope.body, self._union)
        except WireError as error:
            self._refuse(key, error)
            return
        self._dispatch(key, peer, message, envelope)

    def _dispatch(
        self, key: PeerKey, peer: _Peer | None, message: Message, envelope: Envelope
    ) -> None:
        match message:
            case Hello():
                self._greet(key, message)
            case _ if peer is None:
                self._ask_who(key)
            case Ping():
                self._reply(key, Pong())
            case Credit(taken=taken):
                self._acknowledge(peer, taken)
            case Bye():
                self.drop(key, "left", for_good=True)
            case _ if isinstance(message, self._allowed[peer.hello.role]):
                self._hear(peer, message, envelope)
            case Pong():
                pass
            case _:
                self._refuse(
                    key,
                    WireError(f"{type(message).__name__} is not for a {peer.hello.role} to say"),
                )

    def _hear(self, peer: _Peer, message: Message, envelope: Envelope) -> None:
        if peer.flow.arrive():
            self._tell(_said(peer.key, message, envelope), peer.flow)
        else:
            self.drop(peer.key, "it sends more than it has credit for")

    def _greet(self, key: PeerKey, hello: Hello) -> None:
        known = self._peers.get(key)
        try:
            self._check(key, hello, known)
        except CallboardError as error:
            self.drop(key, "it is not welcome any more")
            self._answer_nonsense(key, Unwelcome(failure=Failure.of(error)))
            return
        taken = self._name_in_use(key, hello)
        if taken is not None:
            self._reply(key, Unwelcome(failure=Failure.of(taken)))
            return
        if known is not None and known.hello.incarnation == hello.incarnation:
            self._reply(key, self._welcome(known.session))
            return
        if known is not None and not self._spend_patience(key):
            return
        self.asks.fail_of(key, ActorStopped("the peer began anew"))
        flow = _Flow(lambda frame: self._port.send_nowait(key, frame))
        peer = self._peers[key] = _Peer(key, hello, flow)
        self._port.admit(key)
        self._tell(Joined(peer=key, hello=hello, session=peer.session))
        # Before the actor can say anything to it, which would belong to no session.
        self._reply(key, self._welcome(peer.session))

    def _name_in_use(self, key: PeerKey, hello: Hello) -> NameInUse | None:
        """Return why somebody cannot be welcomed under that name now, if that is so."""
        holder = self._holder(key, hello)
        if holder is None:
            return None
        if hello.instance and hello.instance == holder.hello.instance:
            self.drop(holder.key, "it is here again by another way")
        else:
            self._reply(holder.key, Ping())  # which drops it, if it is gone unnoticed
        if holder.key not in self._peers:
            return None
        return NameInUse(f"a {hello.role} named {hello.name} is there already")

    def _holder(self, key: PeerKey, hello: Hello) -> _Peer | None:
        if hello.role not in self._unique:
            return None
        who = (hello.role, hello.name)
        others = (peer for peer in self._peers.values() if peer.key != key)
        return next((peer for peer in others if (peer.hello.role, peer.hello.name) == who), None)

    def _check(self, key: PeerKey, hello: Hello, known: _Peer | None) -> None:
        """Raise why a peer is not welcome, if it is not."""
        self._port.check_role(key, hello.role)
        mismatch = _mismatch(hello, self._schemas.get(hello.role), self._name)
        if mismatch is not None:
            raise mismatch
        self._admit(hello)
        if known is None and self._num_peers(hello.role) >= self._max_peers:
            raise TooManyPeers(
                f"{self._name} has {self._max_peers} peers that are {hello.role}, and takes no more"
            )

    def _num_peers(self, role: Role) -> int:
        return sum(peer.hello.role is role for peer in self._peers.values())

    def _acknowledge(self, peer: _Peer, taken: int) -> None:
        try:
            peer.flow.acknowledge(taken)
        except (PeerGone, trio.WouldBlock) as error:
            self.drop(peer.key, _reason(error))

    def _count(self, peer: PeerKey, flow: _Flow) -> None:
        known, credit = self._peers.get(peer), flow.take()
        if credit is not None and known is not None and known.flow is flow:
            self._reply(peer, credit)

    def _refuse(self, key: PeerKey, error: WireError) -> None:
        self.frames_refused += 1
        left_out = self._log_rarely.due(trio.current_time())
        if left_out is not None:
            count = self.frames_refused
            log.info("frame refused", reason=str(error), count=count, lines_left_out=left_out)
        self._answer_nonsense(key, FrameRefused(failure=Failure.of(error)))

    def _ask_who(self, key: PeerKey) -> None:
        """Answer a peer without a session: it may have many frames under way, which say no more."""
        if self._strangers.spend(key, trio.current_time()):
            self._reply(key, WhoAreYou())

    def _answer_nonsense(self, key: PeerKey, answer: Message) -> None:
        if self._spend_patience(key):
            self._reply(key, answer)

    def _spend_patience(self, key: PeerKey) -> bool:
        """Count a frame that led to nothing; after too many the peer is cut off."""
        if self._patience.spend(key, trio.current_time()):
            return True
        self.peers_cut_off += 1
        self._patience.give_up(key)
        self.drop(key, "too much of what it says is no message for us")
        self._port.cut(key)
        return False

    def _reply(self, key: PeerKey, message: Message) -> None:
        """Send a session message; a peer that cannot take it is dropped."""
        try:
            self._port.send_nowait(key, self._frame(message)[1])
        except (PeerGone, trio.WouldBlock, trio.ClosedResourceError) as error:
            self.drop(key, _reason(error))

    async def _watch_peers(self) -> None:
        while True:
            await trio.sleep(PING_INTERVAL_S)
            for peer in list(self._peers.values()):
                self._watch(peer, trio.current_time() - peer.heard_at)

    def _watch(self, peer: _Peer, silence: float) -> None:
        try:
            self._port.check_role(peer.key, peer.hello.role)
            self._admit(peer.hello)
        except CallboardError as error:
            self.dismiss(peer.key, error)
            return
        if silence > SILENCE_LIMIT_S:
            self.drop(peer.key, f"it was silent for {silence:.0f} s")
        elif silence > PING_INTERVAL_S:
            self._reply(peer.key, Ping())


class Connection(_Speaker):
    """The connecting side: one server, found again when it comes back.

    A session ends when the server leaves, falls silent, forgets us or takes no more frames. From
    then on nothing is sent but Hello, as a new incarnation, until a new session has begun: so
    whatever is lost is lost with its session, never from the middle of one.
    """

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        endpoint: str,
        *,
        role: Role,
        name: str,
        inbox: Any,
        outbox: Any,
        deliver: Deliver,
        ticket: str = "",
        once: bool = False,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`inbox` is what the server may say, `outbox` what it may be told.

        With `once` there is no second session: after the first nothing more is said.
        """
        super().__init__(system, name, max_frame_bytes, deliver)
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._role = role
        self._incarnation = time.time_ns()
        self._instance = secrets.token_hex(16)
        self._ticket = ticket
        self._once = once
        self._schema = schema_hash(outbox, inbox)
        self._union = _union([*members(SESSION), *members(inbox)])
        self._port: ClientPort = network.connect(endpoint, max_frame_bytes=max_frame_bytes)
        self._flow = _Flow(self._port.send_nowait)
        self._present = False
        self._turn = trio.Lock()  # of those who wait for credit
        self._heard_at = trio.current_time()
        self._welcomed = trio.Event()
        self._handshake = trio.CancelScope()
        self._refusal: CallboardError | None = None

    @property
    def present(self) -> bool:
        """Whether there is a session now."""
        return self._present

    @property
    def refusal(self) -> CallboardError | None:
        """Why the server does not want us, or not any more, if it has said so."""
        return self._refusal

    @property
    def session(self) -> str:
        """The name of the session there is now; "" without one."""
        return self.welcome.session if self._present and self.welcome is not None else ""

    async def run(self) -> None:
        """Read until closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence)
            nursery.start_soon(self._deliver_all)
            nursery.start_soon(self._heed_refusals)
            while not self._closed:
                for frame in await self._frames():
                    self._take(frame)
            nursery.cancel_scope.cancel(f"the connection to {self.endpoint} was closed")

    async def wait_welcome(self, timeout: float = HANDSHAKE_TIMEOUT_S) -> Welcome:
        """Wait for the handshake. Raises Unreachable, or why the server does not welcome us.

        That may be ProtocolMismatch, AccessDenied, TooManyPeers or NameInUse; try again then.
        Raises ActorStopped when the connection is closed, be it meanwhile.
        """
        if self._refusal is None and not self._closed:
            with (
                trio.move_on_after(timeout) as self._handshake,
                contextlib.suppress(trio.ClosedResourceError),  # that is told below
            ):
                await self._port.send(self._hello())
                await self._welcomed.wait()
        if self._closed:
            raise self._was_closed()
        if self._refusal is not None:
            refusal, self._refusal, self._welcomed = self._refusal, None, trio.Event()
            raise refusal
        if self.welcome is None:
            raise Unreachable(f"nobody answers at {self.endpoint} ({timeout:g} s)")
        return self.welcome

    async def send(self, message: Message) -> None:
        """Send, waiting while the server is out of credit.

        Raises Unreachable without a session, and when the session there was ends meanwhile.
        """
        _, frame = self._frame(message)
        flow = self._flow
        async with self._turn:
            while self._present and flow is self._flow and flow.blocked:
                await flow.room.wait()
            if flow is not self._flow:
                raise Unreachable(f"the session with {self.endpoint} ended")
            self._post(frame)

    def send_nowait(self, message: Message) -> None:
        """Send, or queue for lack of credit. Raises Unreachable without a session."""
        self._post(self._frame(message)[1])

    def answer(self, message_id: int, value: object) -> None:
        """Answer the server's ask with a value, or with an error."""
        self._post(self._answer_frame(message_id, value))

    async def ask(self, call: Call[R], *, timeout: float) -> R:
        """Ask the server. Raises Unreachable, DeadlineExceeded, or what it answers."""
        return await self._ask(SERVER, call, timeout, self._post)

    def close(self, *, goodbye: bool = True) -> None:
        """Say goodbye, if it is to be known that we left, and disconnect; `run` returns."""
        if self._closed:
            return
        self._closed = True
        if goodbye:
            self._say(Bye())
        self._present = False
        self._flow.wake()
        self._handshake.cancel("the connection is closed")
        self.asks.fail_all(self._was_closed())
        self._port.close()

    def _was_closed(self) -> ActorStopped:
        return ActorStopped(f"the connection to {self.endpoint} was closed")

    async def _heed_refusals(self) -> None:
        """Let who waits for a welcome know at once that the transport will never bring one."""
        while not self._closed:
            try:
                self._be_refused(await self._port.refusal())
            except trio.ClosedResourceError:
                return

    async def _frames(self) -> list[bytes]:
        try:
            return await self._port.receive()
        except trio.ClosedResourceError:
            if not self._closed:
                raise
            return []

    def _take(self, frame: bytes) -> None:
        self._heard_at = trio.current_time()
        try:
            envelope = decode_frame(frame, max_bytes=self.max_frame_bytes)
            if envelope.answers:
                self._flow.arrive()
                self._count(SERVER, self._flow)
                self.asks.settle(SERVER, envelope)
                return
            message = decode_body(envelope.body, self._union)
        except WireError as error:
            self.frames_refused += 1
            log.warning("frame refused", endpoint=self.endpoint, reason=str(error))
            self._be_refused(error)
            return
        self._dispatch(message, envelope)

    def _dispatch(self, message: Message, envelope: Envelope) -> None:
        match message:
            case Welcome():
                self._be_welcomed(message)
            case Unwelcome(failure=failure):
                self._lose(failure.message, for_good=True)
                self._be_refused(failure.error())
            case WhoAreYou():
                self._lose("the server does not know us any more")
                self._say_hello()
            case Ping():
                self._say(Pong())
            case Pong():
                pass
            case Credit(taken=taken):
                self._acknowledge(taken)
            case Bye(for_good=for_good):
                self._say(Bye())  # all before it has been read
                self._lose("the server left", for_good=for_good)
            case FrameRefused(failure=failure):
                log.warning("server refused a frame", reason=failure.message)
                self._be_refused(failure.error())
            case _ if self._flow.arrive():
                self._tell(_said(SERVER, message, envelope), self._flow)
            case _:
                self._lose("the server sends more than it has credit for")

    def _be_welcomed(self, welcome: Welcome) -> None:
        known, self.welcome = self.welcome, welcome
        self._refusal = None
        self._welcomed.set()
        if known is not None and known.session == welcome.session:
            return
        self._lose("the server began anew")
        self._flow = _Flow(self._port.send_nowait)
        self._present = True
        self._tell(Joined(peer=SERVER, hello=welcome))

    def _be_refused(self, error: CallboardError) -> None:
        """Before the handshake is over, a refusal is the answer to it."""
        if not self._present:
            self._refusal = error
            self._welcomed.set()
            self._handshake.cancel("the server refused it")

    def _lose(self, reason: str, *, for_good: bool = False) -> None:
        """End the session, if there is one."""
        if not self._present:
            return
        self._present = False
        self._incarnation += 1  # so that the server begins anew, too
        self._flow.wake()
        self.asks.fail_all(ActorStopped(reason))
        self._tell(Left(peer=SERVER, reason=reason, for_good=for_good))

    def _hello(self) -> bytes:
        hello = Hello(
            version=PROTOCOL_VERSION,
            role=self._role,
            name=self._name,
            incarnation=self._incarnation,
            schema=self._schema,
            instance=self._instance,
            ticket=self._ticket,
        )
        return self._frame(hello)[1]

    def _acknowledge(self, taken: int) -> None:
        try:
            self._flow.acknowledge(taken)
        except trio.WouldBlock:
            self._lose(f"{self.endpoint} takes no messages")

    def _count(self, peer: PeerKey, flow: _Flow) -> None:
        credit = flow.take()
        if credit is not None and flow is self._flow:
            self._say(credit)

    def _post(self, frame: bytes) -> None:
        if not self._present:
            raise Unreachable(f"nobody is there at {self.endpoint}")
        try:
            self._flow.post(frame)
        except (trio.WouldBlock, PeerTooSlow) as error:
            self._lose(f"{self.endpoint} takes no messages")
            raise Unreachable(f"{self.endpoint} takes no messages") from error

    def _say(self, message: Message) -> None:
        """Send a session message if there is somebody to take it."""
        self._send_frame(self._frame(message)[1])

    def _say_hello(self) -> None:
        if self.welcome is None or not self._once:
            self._send_frame(self._hello())

    def _send_frame(self, frame: bytes) -> None:
        try:
            self._port.send_nowait(frame)
        except (trio.WouldBlock, trio.ClosedResourceError):
            return

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(PING_INTERVAL_S)
            silence = trio.current_time() - self._heard_at
            if silence > SILENCE_LIMIT_S:
                self._lose(f"{self.endpoint} was silent for {silence:.0f} s")
            if not self._present:
                self._say_hello()
                continue
            # So that the server need not keep for long what it would say again to who was lost.
            credit = self._flow.tell()
            if credit is not None:
                self._say(credit)
            elif silence > PING_INTERVAL_S:
                self._say(Ping())


def _admit_all(hello: Hello) -> None:
    """Welcome everybody."""


def _said(peer: PeerKey, message: Message, envelope: Envelope) -> Said:
    return Said(
        peer=peer,
        message=message,
        message_id=envelope.message_id,
        timeout_s=None if envelope.timeout_ns < 0 else envelope.timeout_ns / 1e9,
    )


def _reason(error: Exception) -> str:
    return str(error) or "its queue is full"


def _union(kinds: list[Any]) -> Any:
    union = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return union


def _mismatch(hello: Hello, expected: str | None, name: str) -> ProtocolMismatch | None:
    if hello.version != PROTOCOL_VERSION:
        return ProtocolMismatch(
            f"{name} speaks protocol version {PROTOCOL_VERSION}, not {hello.version}"
        )
    if expected is None:
        return ProtocolMismatch(f"{name} takes no {hello.role}")
    if expected != hello.schema:
        return ProtocolMismatch(
            f"{name} and {hello.name} differ in the message types of a {hello.role}: "
            f"{expected} here, {hello.schema} there"
        )
    return None
