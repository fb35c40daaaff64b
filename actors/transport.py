"""Frames between processes, or between actors of one process that pretend to be.

A `Network` is where one listens and connects. The ZMQ one is for real; the memory one carries the
very same bytes inside one trio run, so that an embedded engine and a test run the code a server
runs. Neither knows what a frame says: `session` does.
"""

import itertools
import math
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import trio

from callboard.actors.zmq_socket import EndpointError, PeerGone, ZmqContext, ZmqSocket

T = TypeVar("T")

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
    """TCP and ipc endpoints through ZMQ: one ROUTER a server, one DEALER a client."""

    def __init__(self, context: ZmqContext) -> None:
        self._context = context

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> ServerPort:
        """Bind a ROUTER; see `Network.listen`."""
        socket = self._context.router(
            max_message_bytes=max_frame_bytes,
            send_hwm=HIGH_WATER_MARK,
            receive_hwm=HIGH_WATER_MARK,
        )
        try:
            return _ZmqServerPort(socket, socket.bind(endpoint))
        except EndpointError:
            socket.close()
            raise

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> ClientPort:
        """Connect a DEALER; see `Network.connect`."""
        socket = self._context.dealer(
            max_message_bytes=max_frame_bytes,
            send_hwm=HIGH_WATER_MARK,
            receive_hwm=HIGH_WATER_MARK,
        )
        try:
            socket.connect(endpoint)
        except EndpointError:
            socket.close()
            raise
        return _ZmqClientPort(socket)


class _ZmqServerPort:
    def __init__(self, socket: ZmqSocket, endpoint: str) -> None:
        self._socket = socket
        self.endpoint = endpoint

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        frames = await self._socket.receive_batch(FRAMES_PER_RECEIVE)
        # Whoever sends more or fewer parts than one body is not one of ours; the session refuses
        # the empty frame this becomes.
        return [(parts[0], parts[1] if len(parts) == 2 else b"") for parts in frames]

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        self._socket.send_nowait([peer, frame])

    def close(self) -> None:
        self._socket.close(linger_s=LINGER_S)


class _ZmqClientPort:
    def __init__(self, socket: ZmqSocket) -> None:
        self._socket = socket

    async def receive(self) -> list[bytes]:
        frames = await self._socket.receive_batch(FRAMES_PER_RECEIVE)
        return [parts[0] if len(parts) == 1 else b"" for parts in frames]

    def send_nowait(self, frame: bytes) -> None:
        self._socket.send_nowait([frame])

    async def send(self, frame: bytes) -> None:
        await self._socket.send([frame])

    def close(self) -> None:
        self._socket.close(linger_s=LINGER_S)


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
        key = next(self._keys).to_bytes(5, "big")
        return _MemoryClientPort(self, endpoint, key)


class _Inlet(Generic[T]):
    """An unbounded queue of frames for one reader: the session's credit is what bounds it."""

    def __init__(self) -> None:
        self._writer: trio.MemorySendChannel[T]
        self._reader: trio.MemoryReceiveChannel[T]
        self._writer, self._reader = trio.open_memory_channel(math.inf)

    def put(self, item: T) -> None:
        self._writer.send_nowait(item)

    async def take(self) -> list[T]:
        items = [await self._reader.receive()]
        try:
            while len(items) < FRAMES_PER_RECEIVE:
                items.append(self._reader.receive_nowait())
        except trio.WouldBlock:
            pass
        return items

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class _MemoryServerPort:
    def __init__(self, endpoint: str, *, on_close: Callable[[], object]) -> None:
        self.endpoint = endpoint
        self.inlet = _Inlet[tuple[PeerKey, bytes]]()
        self.clients: dict[PeerKey, _Inlet[bytes]] = {}
        self._on_close = on_close
        self._closed = False

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        return await self.inlet.take()

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        client = self.clients.get(peer)
        if client is None:
            raise PeerGone(f"no peer {peer.hex()}")
        client.put(frame)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close()
            self.inlet.close()


class _MemoryClientPort:
    def __init__(self, network: MemoryNetwork, endpoint: str, key: PeerKey) -> None:
        self._network = network
        self._endpoint = endpoint
        self._key = key
        self._inlet = _Inlet[bytes]()
        self._closed = False

    async def receive(self) -> list[bytes]:
        return await self._inlet.take()

    def send_nowait(self, frame: bytes) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        server = self._network.server(self._endpoint)
        if server is None:
            raise trio.WouldBlock
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
