"""A conversation between two processes: who is there, is it compatible, alive, and keeping up.

On top of a transport that may lose a peer at any moment, a session gives: a handshake that refuses
other versions and other message types by name, pings, credit (so that a slow reader is noticed
before anything fills up), asks that are answered or fail, and typed refusals of what is no message.

`Listener` is the listening side and `Connection` the connecting one. Both run as a task of the
actor they serve and put what arrives into its mailbox.
"""

import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
import trio

from callboard.actors.mailbox import Reply
from callboard.actors.ref import current_cell
from callboard.actors.system import ActorSystem
from callboard.actors.transport import ClientPort, Network, PeerKey, ServerPort
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
    ProtocolMismatch,
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

OUTBOX = 4096
"""Frames kept for a peer that is out of credit, before it is given up as too slow."""

PING_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 15.0
HANDSHAKE_TIMEOUT_S = 5.0

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


class Left(Message, frozen=True):
    """Session → its actor: a peer is gone, and why."""

    peer: PeerKey
    reason: str


Deliver = Callable[[Said | Joined | Left], Awaitable[None]]


class PeerTooSlow(CallboardError):
    """A peer did not take its frames for so long that its outbox is full."""


class _Asks:
    """Questions under way over a connection, by the id of the frame that asked."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Reply, Any]] = {}

    def add(self, message_id: int, call: Call[Any]) -> Reply:
        reply = Reply()
        self._open[message_id] = (reply, reply_type(type(call)))
        return reply

    def forget(self, message_id: int) -> None:
        self._open.pop(message_id, None)

    def settle(self, envelope: Envelope) -> None:
        """Hand an answer to who waits for it; one nobody waits for any more is dropped."""
        asked = self._open.pop(envelope.answers, None)
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


class _Flow:
    """Credit in both directions of one connection, counted in application frames."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._sent = 0
        self._acknowledged = 0
        self._taken = 0
        self._told = 0
        self.outbox: deque[bytes] = deque()
        self.room = trio.Event()

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
        self._acknowledged = max(self._acknowledged, taken)
        while self.outbox and self._sent - self._acknowledged < WINDOW:
            self._send(self.outbox.popleft())
            self._sent += 1
        if not self.blocked:
            self.room.set()
            self.room = trio.Event()

    def take(self) -> Credit | None:
        """Count a frame taken; returns the credit to tell the peer about, now and then."""
        self._taken += 1
        if self._taken - self._told < WINDOW // 4:
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


class _Speaker:
    """What both sides share: frames from messages, with ids and causes."""

    def __init__(self, system: ActorSystem, name: str, max_frame_bytes: int) -> None:
        self._system = system
        self._name = name
        self.max_frame_bytes = max_frame_bytes
        self.asks = _Asks()
        self.frames_refused = 0
        self._closed = False

    def _frame(self, message: Message, *, timeout: float | None = None) -> tuple[int, bytes]:
        cell = current_cell.get()
        message_id = self._system.next_message_id()
        frame = encode_frame(
            encode_body(message),
            message_id=message_id,
            cause=0 if cell is None else cell.handling,
            sender=self._name,
            timeout_ns=-1 if timeout is None else int(timeout * 1e9),
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

    async def _wait(self, message_id: int, reply: Reply, what: str, timeout: float) -> Any:
        expired = DeadlineExceeded(f"no answer to {what} in {timeout:g} s")
        timer = self._system.timers.at(trio.current_time() + timeout, lambda: reply.fail(expired))
        try:
            return await reply.wait()
        finally:
            timer.cancel()
            self.asks.forget(message_id)


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
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`inboxes` and `outboxes` say, by role, what a peer may say and what it may be told.

        `welcome` makes the Welcome for a session id.
        """
        super().__init__(system, name, max_frame_bytes)
        self._port: ServerPort = network.listen(endpoint, max_frame_bytes=max_frame_bytes)
        self._allowed = {role: members(union) for role, union in inboxes.items()}
        self._schemas = {role: schema_hash(inboxes[role], outboxes[role]) for role in inboxes}
        kinds = {kind for union in inboxes.values() for kind in members(union)}
        self._union = _union([*members(SESSION), *sorted(kinds, key=str)])
        self._welcome = welcome
        self._deliver = deliver
        self._peers: dict[PeerKey, _Peer] = {}

    @property
    def endpoint(self) -> str:
        """Where peers connect, with the real port."""
        return self._port.endpoint

    def hello(self, peer: PeerKey) -> Hello | None:
        """Return what a present peer said of itself."""
        found = self._peers.get(peer)
        return None if found is None else found.hello

    async def run(self) -> None:
        """Read until closed; one task."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence)
            while not self._closed:
                for key, frame in await self._frames():
                    await self._take(key, frame)
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

    def send(self, peer: PeerKey, message: Message) -> bool:
        """Send, or queue for lack of credit; False when the peer is gone (or given up just now)."""
        found = self._peers.get(peer)
        if found is None:
            return False
        return self._post(found, self._frame(message)[1])

    def answer(self, peer: PeerKey, message_id: int, value: object) -> bool:
        """Answer a peer's ask with a value, or with an error."""
        found = self._peers.get(peer)
        return found is not None and self._post(found, self._answer_frame(message_id, value))

    async def ask(self, peer: PeerKey, call: Call[R], *, timeout: float) -> R:
        """Ask a peer. Raises ActorStopped when it is not there, DeadlineExceeded, what it says."""
        found = self._peers.get(peer)
        if found is None:
            raise ActorStopped("the peer is not connected")
        message_id, frame = self._frame(call, timeout=timeout)
        reply = self.asks.add(message_id, call)
        if not self._post(found, frame):
            self.asks.forget(message_id)
            raise ActorStopped("the peer is gone")
        return cast(R, await self._wait(message_id, reply, type(call).__name__, timeout))

    async def drop(self, peer: PeerKey, reason: str) -> None:
        """Forget a peer and tell the actor."""
        if self._peers.pop(peer, None) is not None:
            await self._deliver(Left(peer=peer, reason=reason))

    def _post(self, peer: _Peer, frame: bytes) -> bool:
        try:
            peer.flow.post(frame)
        except (PeerGone, PeerTooSlow, trio.WouldBlock) as error:
            # The silence watch delivers the Left, from its own task: a sender must not wait here.
            log.info("peer given up", peer=peer.hello.name, reason=str(error))
            peer.heard_at = float("-inf")
            return False
        return True

    async def _frames(self) -> list[tuple[PeerKey, bytes]]:
        try:
            return await self._port.receive()
        except trio.ClosedResourceError:
            if not self._closed:
                raise
            return []

    async def _take(self, key: PeerKey, frame: bytes) -> None:
        peer = self._peers.get(key)
        try:
            envelope = decode_frame(frame, max_bytes=self.max_frame_bytes)
            if peer is not None:
                peer.heard_at = trio.current_time()
                if envelope.answers:
                    self._count(peer)
                    self.asks.settle(envelope)
                    return
            message = decode_body(envelope.body, self._union)
        except WireError as error:
            self._refuse(key, error)
            return
        await self._dispatch(key, peer, message, envelope)

    async def _dispatch(
        self, key: PeerKey, peer: _Peer | None, message: Message, envelope: Envelope
    ) -> None:
        match message:
            case Hello():
                await self._greet(key, message)
            case _ if peer is None:
                self._reply(key, WhoAreYou())
            case Ping():
                self._reply(key, Pong())
            case Credit(taken=taken):
                self._acknowledge(peer, taken)
            case Bye():
                await self.drop(key, "left")
            case _ if isinstance(message, self._allowed[peer.hello.role]):
                self._count(peer)
                await self._deliver(Said(peer=key, message=message, message_id=envelope.message_id))
            case Pong():
                pass
            case _:
                self._refuse(
                    key,
                    WireError(f"{type(message).__name__} is not for a {peer.hello.role} to say"),
                )

    async def _greet(self, key: PeerKey, hello: Hello) -> None:
        expected = self._schemas.get(hello.role)
        mismatch = _mismatch(hello, expected, self._name)
        if mismatch is not None:
            self._reply(key, Unwelcome(failure=Failure.of(mismatch)))
            return
        known = self._peers.get(key)
        if known is None or known.hello.incarnation != hello.incarnation:
            flow = _Flow(lambda frame: self._port.send_nowait(key, frame))
            known = self._peers[key] = _Peer(key, hello, flow)
            await self._deliver(Joined(peer=key, hello=hello))
        self._reply(key, self._welcome(known.session))

    def _acknowledge(self, peer: _Peer, taken: int) -> None:
        try:
            peer.flow.acknowledge(taken)
        except (PeerGone, trio.WouldBlock):
            peer.heard_at = float("-inf")

    def _count(self, peer: _Peer) -> None:
        credit = peer.flow.take()
        if credit is not None:
            self._reply(peer.key, credit)

    def _refuse(self, key: PeerKey, error: WireError) -> None:
        self.frames_refused += 1
        log.info("frame refused", reason=str(error), count=self.frames_refused)
        self._reply(key, FrameRefused(failure=Failure.of(error)))

    def _reply(self, key: PeerKey, message: Message) -> None:
        """Send a session message; a peer that cannot take it is left to the silence watch."""
        try:
            self._port.send_nowait(key, self._frame(message)[1])
        except (PeerGone, trio.WouldBlock, trio.ClosedResourceError):
            peer = self._peers.get(key)
            if peer is not None:
                peer.heard_at = float("-inf")

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(PING_INTERVAL_S)
            now = trio.current_time()
            for key, peer in list(self._peers.items()):
                if now - peer.heard_at > SILENCE_LIMIT_S:
                    await self.drop(key, "silent for too long, or gone")
                elif now - peer.heard_at > PING_INTERVAL_S:
                    self._reply(key, Ping())


class Connection(_Speaker):
    """The connecting side: one server, found again when it comes back."""

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
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`inbox` is what the server may say, `outbox` what it may be told."""
        super().__init__(system, name, max_frame_bytes)
        self.endpoint = endpoint
        self.welcome: Welcome | None = None
        self._role = role
        self._incarnation = time.time_ns()
        self._schema = schema_hash(outbox, inbox)
        self._union = _union([*members(SESSION), *members(inbox)])
        self._deliver = deliver
        self._port: ClientPort = network.connect(endpoint, max_frame_bytes=max_frame_bytes)
        self._flow = _Flow(self._port.send_nowait)
        self._heard_at = trio.current_time()
        self._welcomed = trio.Event()
        self._refusal: CallboardError | None = None

    async def run(self) -> None:
        """Say hello and read until closed; one task."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_silence)
            while not self._closed:
                for frame in await self._frames():
                    await self._take(frame)
            nursery.cancel_scope.cancel(f"the connection to {self.endpoint} was closed")

    async def wait_welcome(self, timeout: float = HANDSHAKE_TIMEOUT_S) -> Welcome:
        """Wait for the handshake. Raises Unreachable, or ProtocolMismatch as the server says."""
        with trio.move_on_after(timeout):
            await self._say_hello()
            await self._welcomed.wait()
        if self._refusal is not None:
            raise self._refusal
        if self.welcome is None:
            raise Unreachable(f"nobody answers at {self.endpoint} ({timeout:g} s)")
        return self.welcome

    async def send(self, message: Message) -> None:
        """Send, waiting while the server is out of credit."""
        _, frame = self._frame(message)
        while self._flow.blocked:
            await self._flow.room.wait()
        self._post(frame)
        await trio.lowlevel.checkpoint()

    def send_nowait(self, message: Message) -> None:
        """Send, or queue for lack of credit. Raises Unreachable when there is no server."""
        self._post(self._frame(message)[1])

    def answer(self, message_id: int, value: object) -> None:
        """Answer the server's ask with a value, or with an error."""
        self._post(self._answer_frame(message_id, value))

    async def ask(self, call: Call[R], *, timeout: float) -> R:
        """Ask the server. Raises Unreachable, DeadlineExceeded, or what it answers."""
        message_id, frame = self._frame(call, timeout=timeout)
        reply = self.asks.add(message_id, call)
        try:
            self._post(frame)
        except Unreachable:
            self.asks.forget(message_id)
            raise
        return cast(R, await self._wait(message_id, reply, type(call).__name__, timeout))

    def close(self) -> None:
        """Say goodbye and disconnect; `run` returns."""
        if self._closed:
            return
        self._closed = True
        self._say(Bye())
        self.asks.fail_all(ActorStopped(f"the connection to {self.endpoint} was closed"))
        self._port.close()

    async def _frames(self) -> list[bytes]:
        try:
            return await self._port.receive()
        except trio.ClosedResourceError:
            if not self._closed:
                raise
            return []

    async def _take(self, frame: bytes) -> None:
        self._heard_at = trio.current_time()
        try:
            envelope = decode_frame(frame, max_bytes=self.max_frame_bytes)
            if envelope.answers:
                self._count()
                self.asks.settle(envelope)
                return
            message = decode_body(envelope.body, self._union)
        except WireError as error:
            self.frames_refused += 1
            log.warning("frame refused", endpoint=self.endpoint, reason=str(error))
            return
        await self._dispatch(message, envelope)

    async def _dispatch(self, message: Message, envelope: Envelope) -> None:
        match message:
            case Welcome():
                await self._be_welcomed(message)
            case Unwelcome(failure=failure):
                self._refusal = failure.error()
                self._welcomed.set()
            case WhoAreYou():
                await self._say_hello()
            case Ping():
                self._say(Pong())
            case Pong():
                pass
            case Credit(taken=taken):
                self._flow.acknowledge(taken)
            case Bye():
                await self._lose("the server left")
            case FrameRefused(failure=failure):
                log.warning("server refused a frame", reason=failure.message)
            case _:
                self._count()
                await self._deliver(Said(peer=b"", message=message, message_id=envelope.message_id))

    async def _be_welcomed(self, welcome: Welcome) -> None:
        known = self.welcome
        self.welcome = welcome
        self._welcomed.set()
        if known is None or known.session != welcome.session:
            if known is not None:
                self._flow.room.set()  # who waits there goes on with the new count
                self._flow = _Flow(self._port.send_nowait)
            await self._deliver(Joined(peer=b"", hello=welcome))

    async def _say_hello(self) -> None:
        hello = Hello(
            version=PROTOCOL_VERSION,
            role=self._role,
            name=self._name,
            incarnation=self._incarnation,
            schema=self._schema,
        )
        await self._port.send(self._frame(hello)[1])

    async def _lose(self, reason: str) -> None:
        self.asks.fail_all(ActorStopped(reason))
        await self._deliver(Left(peer=b"", reason=reason))

    def _count(self) -> None:
        credit = self._flow.take()
        if credit is not None:
            self._say(credit)

    def _post(self, frame: bytes) -> None:
        try:
            self._flow.post(frame)
        except (trio.WouldBlock, PeerTooSlow) as error:
            raise Unreachable(f"{self.endpoint} takes no messages") from error

    def _say(self, message: Message) -> None:
        """Send a session message if there is somebody to take it."""
        try:
            self._port.send_nowait(self._frame(message)[1])
        except (trio.WouldBlock, trio.ClosedResourceError):
            return

    async def _watch_silence(self) -> None:
        lost = False
        while True:
            await trio.sleep(PING_INTERVAL_S)
            silence = trio.current_time() - self._heard_at
            if silence > PING_INTERVAL_S:
                self._say(Ping())
            if silence > SILENCE_LIMIT_S and not lost:
                await self._lose(f"{self.endpoint} was silent for {silence:.0f} s")
            lost = silence > SILENCE_LIMIT_S


def _said(peer: PeerKey, message: Message, envelope: Envelope) -> Said:
    return Said(
        peer=peer,
        message=message,
        message_id=envelope.message_id,
        timeout_s=None if envelope.timeout_ns < 0 else envelope.timeout_ns / 1e9,
    )


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
