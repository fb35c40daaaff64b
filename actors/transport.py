"""Frames between processes, or between actors of one process that pretend to be.

A `Network` is where one listens and connects. The ZMQ one is for real; the memory one carries the
very same bytes inside one trio run, so that an embedded engine and a test run the code a server
runs. Neither knows what a frame says: `session` does.
"""

import itertools
import math
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import trio
import zmq

from callboard.actors.curve import (
    KEY_CHARS,
    AllowList,
    ClientKeys,
    ServerKeys,
    ZapAnswer,
    answer_zap,
    roles_of,
)
from callboard.actors.door import Door
from callboard.actors.patience import Rarely
from callboard.actors.zmq_socket import (
    EndpointError,
    PeerGone,
    SocketEvent,
    ZmqContext,
    ZmqSocket,
    open_zmq_context,
)
from callboard.logs import get_logger
from callboard.messages.errors import AccessDenied
from callboard.messages.membership import Role

T = TypeVar("T")

DOOR_INTERVAL_S = 1.0
LOG_INTERVAL_S = 1.0

log = get_logger()

FRAMES_PER_RECEIVE = 64
LINGER_S = 1.0
"""How long last words may take to get out after a port was closed."""

HIGH_WATER_MARK = 16384
"""Above any credit a session gives, so that ZMQ's own limit is never reached."""

PeerKey = bytes


class ServerPort(Protocol):
    """The listening end: frames come with the key of the peer they came from."""

    @property
    def endpoint(self) -> str:
        """Where peers connect."""
        ...

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        """Wait for a frame, return what is there. Raises ClosedResourceError."""
        ...

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        """Send to one peer; raises PeerGone, or WouldBlock when its queue is full."""
        ...

    async def keep_door(self) -> None:
        """End connections that begin no session, until the port is closed."""
        ...

    def check_role(self, peer: PeerKey, role: Role) -> None:
        """Raise AccessDenied when the peer's key, if there are keys, does not have this role."""
        ...

    def admit(self, peer: PeerKey) -> None:
        """The peer has a session: its connection may stay."""
        ...

    def dismiss(self, peer: PeerKey) -> None:
        """The peer's session is over: it may begin another one soon."""
        ...

    def cut(self, peer: PeerKey) -> None:
        """End the peer's connection soon. It may connect again, and is another peer then."""
        ...

    def close(self) -> None:
        """Stop listening; harmless when done before."""
        ...


class ClientPort(Protocol):
    """The connecting end."""

    async def receive(self) -> list[bytes]:
        """Wait for a frame, return what is there. Raises ClosedResourceError."""
        ...

    def send_nowait(self, frame: bytes) -> None:
        """Send to the server; raises WouldBlock when there is none, or its queue is full."""
        ...

    async def send(self, frame: bytes) -> None:
        """Send to the server, waiting until there is one with room."""
        ...

    async def refusal(self) -> AccessDenied:
        """Wait until the server does not let this connection in, and return why."""
        ...

    def close(self) -> None:
        """Disconnect; harmless when done before."""
        ...


class Network(Protocol):
    """Where one listens and connects."""

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> ServerPort:
        """Listen at an endpoint. Raises EndpointError when it is taken or cannot be."""
        ...

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> ClientPort:
        """Connect to an endpoint, whether or not somebody listens yet. Raises EndpointError."""
        ...


class ZmqNetwork:
    """TCP and ipc endpoints through ZMQ: one ROUTER a server, one DEALER a client.

    Keys are for tcp alone, and there encryption is not optional for whoever has them; an ipc
    endpoint is guarded by the folder it is in. `open_zmq_network` opens one that has a server's.
    """

    def __init__(
        self,
        context: ZmqContext,
        *,
        server_keys: ServerKeys | None = None,
        client_keys: ClientKeys | None = None,
    ) -> None:
        self._context = context
        self._server_keys = server_keys
        self._client_keys = client_keys

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> ServerPort:
        """Bind a ROUTER; see `Network.listen`."""
        keys = self._server_keys if endpoint.startswith("tcp://") else None
        router = self._context.router(
            max_message_bytes=max_frame_bytes,
            send_hwm=HIGH_WATER_MARK,
            receive_hwm=HIGH_WATER_MARK,
            keys=None if keys is None else keys.own,
        )
        try:
            return _ZmqServerPort(router, endpoint, None if keys is None else keys.allowed)
        except EndpointError:
            router.close()
            raise

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> ClientPort:
        """Connect a DEALER; see `Network.connect`."""
        keys = self._client_keys if endpoint.startswith("tcp://") else None
        dealer = self._context.dealer(
            max_message_bytes=max_frame_bytes,
            send_hwm=HIGH_WATER_MARK,
            receive_hwm=HIGH_WATER_MARK,
            keys=keys,
        )
        try:
            return _ZmqClientPort(dealer, endpoint, keys)
        except EndpointError:
            dealer.close()
            raise


@asynccontextmanager
async def open_zmq_network(
    *, server_keys: ServerKeys | None = None, client_keys: ClientKeys | None = None
) -> AsyncGenerator[ZmqNetwork]:
    """Open a network of its own context; with a server's keys it lets in whom their list names."""
    async with open_zmq_context() as context:
        network = ZmqNetwork(context, server_keys=server_keys, client_keys=client_keys)
        if server_keys is None:
            yield network
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_authenticate, context.authenticator(), server_keys.allowed)
            yield network
            nursery.cancel_scope.cancel("the network was closed")


async def _authenticate(authenticator: ZmqSocket, allowed: AllowList) -> None:
    """Answer libzmq's question about every client that connects."""
    rarely = Rarely(LOG_INTERVAL_S)
    with authenticator:
        while True:
            requests = await authenticator.receive_batch(FRAMES_PER_RECEIVE)
            allowed.refresh()
            for request in requests:
                answer = answer_zap(request, allowed)
                if answer is not None:
                    _log_refused(answer, rarely)
                    _answer(authenticator, answer.frames)


def _log_refused(answer: ZapAnswer, rarely: Rarely) -> None:
    if answer.is_allowed:
        return
    left_out = rarely.due(trio.current_time())
    if left_out is not None:
        key, address = answer.public, answer.address
        log.warning("key refused", key=key, address=address, lines_left_out=left_out)


def _answer(authenticator: ZmqSocket, answer: list[bytes]) -> None:
    try:
        authenticator.send_nowait(answer)
    except (PeerGone, trio.WouldBlock):
        return  # whom it is about has gone


class TrustingServerPort:
    """The part of a server's port that has nothing to guard: all peers are of this trio run."""

    async def keep_door(self) -> None:
        """End no connection."""

    def check_role(self, peer: PeerKey, role: Role) -> None:
        """Believe what a peer says of itself."""

    def admit(self, peer: PeerKey) -> None:
        """Nobody is waiting at the door."""

    def dismiss(self, peer: PeerKey) -> None:
        """Nobody has to leave."""

    def cut(self, peer: PeerKey) -> None:
        """There is no connection to end."""


class TrustedClientPort:
    """The part of a client's port that is let in everywhere."""

    async def refusal(self) -> AccessDenied:
        """Wait for ever."""
        await trio.sleep_forever()
        raise AssertionError("nobody is refused here")


class _ZmqServerPort:
    """A ROUTER. With keys, a peer is its routing id and its key, so that none speaks as another."""

    def __init__(self, router: ZmqSocket, endpoint: str, allowed: AllowList | None) -> None:
        self._router = router
        self._allowed = allowed
        self._door = Door()
        self._fds: dict[PeerKey, int] = {}  # the descriptor of each peer's connection
        self._peers: dict[int, PeerKey] = {}
        self._monitor = router.monitor(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.endpoint = router.bind(endpoint)

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        messages = await self._router.receive_frames(FRAMES_PER_RECEIVE)
        return [(self._sender(frames), _body(frames)) for frames in messages]

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        routing_id = peer if self._allowed is None else peer[:-KEY_CHARS]
        self._router.send_nowait([routing_id, frame])

    async def keep_door(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_connections)
            while not self._router.closed:
                await trio.sleep(DOOR_INTERVAL_S)
                if self._allowed is not None:
                    self._allowed.refresh()
                self._cut_all(self._door.overdue(trio.current_time()))
            nursery.cancel_scope.cancel("the port was closed")

    def check_role(self, peer: PeerKey, role: Role) -> None:
        if self._allowed is None:
            return
        public = peer[-KEY_CHARS:].decode()
        key = self._allowed.find(public)
        if key is None:
            raise AccessDenied(f"the key {public} is not on the list of this server")
        if role not in roles_of(key.role):
            raise AccessDenied(
                f"the key {public} ({key.name}) has the role {key.role} and may not be used as "
                f"{role}"
            )

    def admit(self, peer: PeerKey) -> None:
        self._note_events()
        if peer in self._fds:
            self._door.admit(self._fds[peer])

    def dismiss(self, peer: PeerKey) -> None:
        self._note_events()
        if peer in self._fds:
            self._door.dismiss(self._fds[peer], trio.current_time())

    def cut(self, peer: PeerKey) -> None:
        self._note_events()
        if peer in self._fds:
            # The next look at the door ends it: until then it can read what it was told last.
            self._door.expel(self._fds[peer])

    def close(self) -> None:
        self._router.close(linger_s=LINGER_S)

    def _sender(self, frames: list[zmq.Frame]) -> PeerKey:
        peer = frames[0].bytes
        if self._allowed is not None:
            peer += str(frames[-1].get("User-Id")).encode()
        if peer not in self._fds:
            self._note_events()
            self._note_fd(peer, _source_fd(frames[-1]))
        return peer

    def _note_fd(self, peer: PeerKey, fd: int | None) -> None:
        if fd is None:
            return
        self._forget(fd)
        self._fds[peer] = fd
        self._peers[fd] = peer

    def _forget(self, fd: int) -> None:
        peer = self._peers.pop(fd, None)
        if peer is not None:
            del self._fds[peer]

    async def _watch_connections(self) -> None:
        while True:
            try:
                self._note(await self._monitor.receive())
            except trio.ClosedResourceError:
                return

    def _note_events(self) -> None:
        """Take note of what happened before what was received last, such as its being accepted."""
        if not self._router.closed:
            for event in self._monitor.receive_all_nowait():
                self._note(event)

    def _note(self, event: SocketEvent) -> None:
        self._forget(event.value)
        if event.kind == zmq.EVENT_ACCEPTED:
            self._cut_all(self._door.accept(event.value, trio.current_time()))
        else:
            self._door.close(event.value)

    def _cut_all(self, fds: list[int]) -> None:
        for fd in fds:
            if fd in self._door:
                _shut_down(fd, self.endpoint)


def _body(frames: list[zmq.Frame]) -> bytes:
    # Whoever sends more or fewer parts than one body is not one of ours; the session refuses the
    # empty frame this becomes.
    return frames[1].bytes if len(frames) == 2 else b""


def _source_fd(frame: zmq.Frame) -> int | None:
    """Return the descriptor of the connection a frame came over.

    libzmq does not know it of peers that speak a version of its protocol from before 2013, or noise
    that can pass for it: they have no session that lasts, since nobody can vouch for them. Where
    there are keys, libzmq does not take them.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _shut_down(fd: int, endpoint: str) -> None:
    """End a connection that libzmq owns, which then sees it end as if by the peer.

    libzmq may have closed it by now and its number be somebody else's, so it is looked at before:
    through a duplicate, which cannot become another one.
    """
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if _is_at(connection, endpoint):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended


def _is_at(connection: socket.socket, endpoint: str) -> bool:
    name = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return endpoint == f"ipc://{name}"
    return endpoint.rpartition(":")[2] == str(name[1])


class _ZmqClientPort:
    """A DEALER, and over tcp a monitor of its handshake."""

    def __init__(self, dealer: ZmqSocket, endpoint: str, keys: ClientKeys | None) -> None:
        self._dealer = dealer
        self._endpoint = endpoint
        self._keys = keys
        self._monitor = dealer.monitor(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        dealer.connect(endpoint)

    async def receive(self) -> list[bytes]:
        frames = await self._dealer.receive_batch(FRAMES_PER_RECEIVE)
        return [parts[0] if len(parts) == 1 else b"" for parts in frames]

    def send_nowait(self, frame: bytes) -> None:
        self._dealer.send_nowait([frame])

    async def send(self, frame: bytes) -> None:
        await self._dealer.send([frame])

    async def refusal(self) -> AccessDenied:
        while True:
            event = await self._monitor.receive()
            if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._keys is not None:
                return AccessDenied(
                    f"the server at {self._endpoint} does not let in the key "
                    f"{self._keys.own.public}: it is not on its list"
                )
            if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                return AccessDenied(
                    f"the server at {self._endpoint} lets in nobody without keys, and none are set"
                    if self._keys is None
                    else f"the server at {self._endpoint} has no keys, and with keys set nothing "
                    "is sent in the clear"
                )

    def close(self) -> None:
        self._dealer.close(linger_s=LINGER_S)


class MemoryNetwork:
    """Endpoints that exist only inside one trio run; `memory://anything` by convention."""

    def __init__(self) -> None:
        self._servers: dict[str, _MemoryServerPort] = {}
        self._keys = itertools.count(1)
        self._listeners_changed = trio.Event()

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> ServerPort:
        """Listen; see `Network.listen`."""
        if endpoint in self._servers:
            raise EndpointError(98, "already in use", endpoint)
        server = _MemoryServerPort(endpoint, on_close=lambda: self._servers.pop(endpoint, None))
        self._servers[endpoint] = server
        self._listeners_changed.set()
        self._listeners_changed = trio.Event()
        return server

    def server(self, endpoint: str) -> "_MemoryServerPort | None":
        """Return who listens there now."""
        return self._servers.get(endpoint)

    async def wait_for_listener(self) -> None:
        """Wait until somebody starts to listen somewhere."""
        await self._listeners_changed.wait()

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> ClientPort:
        """Connect; see `Network.connect`."""
        return _MemoryClientPort(self, endpoint)

    def new_key(self) -> PeerKey:
        """Return the key of a new connection."""
        return next(self._keys).to_bytes(5, "big")


class Inlet(Generic[T]):
    """An unbounded queue for one reader: the session's credit is what bounds it."""

    def __init__(self) -> None:
        self._writer: trio.MemorySendChannel[T]
        self._reader: trio.MemoryReceiveChannel[T]
        self._writer, self._reader = trio.open_memory_channel(math.inf)

    def put(self, item: T) -> None:
        """Add an item; whoever reads is woken."""
        self._writer.send_nowait(item)

    async def take(self) -> list[T]:
        """Wait for an item, and return what is there: to wait for each costs a task switch."""
        items = [await self._reader.receive()]
        try:
            while len(items) < FRAMES_PER_RECEIVE:
                items.append(self._reader.receive_nowait())
        except trio.WouldBlock:
            pass
        return items

    def close(self) -> None:
        """End it: who reads gets a ClosedResourceError."""
        self._reader.close()
        self._writer.close()


class _MemoryServerPort(TrustingServerPort):
    def __init__(self, endpoint: str, *, on_close: Callable[[], object]) -> None:
        self.endpoint = endpoint
        self.inlet = Inlet[tuple[PeerKey, bytes]]()
        self.clients: dict[PeerKey, Inlet[bytes]] = {}
        self.been_cut: set[PeerKey] = set()
        self._on_close = on_close
        self._closed = False

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        return await self.inlet.take()

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        client = self.clients.get(peer)
        if client is None:
            raise PeerGone(f"no peer {peer.hex()}")
        client.put(frame)

    def cut(self, peer: PeerKey) -> None:
        self.clients.pop(peer, None)
        self.been_cut.add(peer)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close()
            self.inlet.close()


class _MemoryClientPort(TrustedClientPort):
    def __init__(self, network: MemoryNetwork, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint
        self._key = network.new_key()
        self._inlet = Inlet[bytes]()
        self._closed = False

    async def receive(self) -> list[bytes]:
        return await self._inlet.take()

    def send_nowait(self, frame: bytes) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        server = self._network.server(self._endpoint)
        if server is None:
            raise trio.WouldBlock
        if self._key in server.been_cut:
            server.been_cut.remove(self._key)
            self._key = self._network.new_key()
        server.clients[self._key] = self._inlet
        server.inlet.put((self._key, frame))

    async def send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()
        while not self._closed and self._network.server(self._endpoint) is None:
            await self._network.wait_for_listener()
        self.send_nowait(frame)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        server = self._network.server(self._endpoint)
        if server is not None:
            server.clients.pop(self._key, None)
        self._inlet.close()
