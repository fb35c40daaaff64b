"""A network of one simulation: TCP connections under ZMQ sockets, as far as actors can tell.

Frames of one connection and direction arrive in order, after a delay that is drawn for each, and at
most once: neither TCP nor ZMQ repeats what it has delivered, so nothing is ever doubled here. What
is between two processes can be cut (a connection is reset, and some frames under way are lost) or
held up (a partition: frames wait, and arrive or are lost when it heals). A process can die, with or
without its peers' kernels hearing of it.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from callboard.actors.system import Timers
from callboard.actors.transport import (
    FRAMES_PER_RECEIVE,
    HIGH_WATER_MARK,
    PeerKey,
    TrustedClientPort,
    TrustingServerPort,
)
from callboard.actors.zmq_socket import EndpointError, PeerGone

T = TypeVar("T")

Owner = str
"""The process a port belongs to: its name, and `#` and a number where it is not the first."""

RECONNECT_S = (0.01, 0.1)
"""How long a client's socket waits before it dials again."""

PORT_IN_USE_S = 0.05
"""How long the port of a dead server may stay in use."""


class Inlet(Generic[T]):
    """Frames that have arrived, for one reader."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = trio.Event()
        self._closed = False
        self._silent = False

    def put(self, item: T) -> None:
        """Add a frame, unless nobody will read it."""
        if not self._closed and not self._silent:
            self._items.append(item)
            self._arrived.set()

    async def take(self) -> list[T]:
        """Wait for a frame and return what is there. Raises ClosedResourceError."""
        if self._items and not self._closed:
            await trio.lowlevel.checkpoint()
        while not self._items and not self._closed:
            self._arrived = trio.Event()
            await self._arrived.wait()
        if self._closed:
            raise trio.ClosedResourceError
        return [self._items.popleft() for _ in range(min(len(self._items), FRAMES_PER_RECEIVE))]

    def close(self) -> None:
        """Let the reader go."""
        self._closed = True
        self._arrived.set()

    def go_silent(self) -> None:
        """Let nothing arrive any more, and the reader wait until it is cancelled."""
        self._silent = True
        self._items.clear()


class Pipe:
    """One direction of one connection: in order, each frame after its own delay."""

    def __init__(self, network: "SimNetwork", deliver: Callable[[bytes], None]) -> None:
        self._network = network
        self._deliver = deliver
        self._under_way: deque[bytes] = deque()
        self._due = 0.0
        self._held_up = 0  # frames whose time has come, but not the way free
        self.stalled = False
        self.closed = False

    def send(self, frame: bytes) -> None:
        """Put a frame on its way. Raises WouldBlock when too many are."""
        if self.closed:
            return
        if len(self._under_way) >= HIGH_WATER_MARK:
            raise trio.WouldBlock
        now = trio.current_time()
        due = max(self._due, now + self._network.delay())
        if due <= now and not self._under_way and not self.stalled:
            self._deliver(frame)
            return
        self._due = due
        self._under_way.append(frame)
        self._network.timers.at(due, self._arrive)

    def flow(self) -> None:
        """Go on after a stall."""
        self.stalled = False
        held_up, self._held_up = self._held_up, 0
        for _ in range(held_up):
            self._arrive()

    def cut(self, num_delivered: int) -> None:
        """End: of what is under way, so many frames still arrive, and the others never."""
        if self.closed:
            return
        for _ in range(num_delivered):
            self._deliver(self._under_way.popleft())
        self.closed = True
        self._under_way.clear()

    @property
    def num_under_way(self) -> int:
        """How many frames have been sent and have not arrived."""
        return len(self._under_way)

    @property
    def empty_at(self) -> float:
        """When everything that is under way now has arrived."""
        return self._due

    def _arrive(self) -> None:
        if self.closed:
            return
        if self.stalled:
            self._held_up += 1
        else:
            self._deliver(self._under_way.popleft())


class Line:
    """One connection between a client's port and a server's, under a key that is used once."""

    def __init__(self, network: "SimNetwork", client: "SimClientPort", server: "SimServerPort"):
        self.key: PeerKey = network.next_key()
        self.client = client
        self.server = server
        self.up = Pipe(network, lambda frame: server.inlet.put((self.key, frame)))
        self.down = Pipe(network, client.inlet.put)
        self._network = network

    def joins(self, one: Owner, other: Owner) -> bool:
        """Whether it is between these two processes."""
        return are(self.client.owner, self.server.owner, one, other)

    def cut(self) -> None:
        """Break the connection; the client's socket dials again, and neither side is told."""
        rng = self._network.rng
        self.up.cut(rng.randint(0, self.up.num_under_way))
        self.down.cut(rng.randint(0, self.down.num_under_way))
        self.server.lines.pop(self.key, None)
        if self.client.line is self:
            self.client.line = None
            self._network.dial(self.client)


class SimServerPort(TrustingServerPort):
    """The listening end."""

    def __init__(self, network: "SimNetwork", owner: Owner, endpoint: str) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.inlet = Inlet[tuple[PeerKey, bytes]]()
        self.lines: dict[PeerKey, Line] = {}
        self._network = network

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        """Wait for frames."""
        return await self.inlet.take()

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        """Send to one peer; raises PeerGone."""
        line = self.lines.get(peer)
        if line is None:
            raise PeerGone(f"no peer {peer.hex()}")
        line.down.send(frame)

    def close(self) -> None:
        """Stop listening; some of the last words are lost."""
        self._network.unlisten(self)
        self.inlet.close()


class SimClientPort(TrustedClientPort):
    """The connecting end; like a DEALER that sends only when it is connected."""

    def __init__(self, network: "SimNetwork", owner: Owner, endpoint: str) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.inlet = Inlet[bytes]()
        self.line: Line | None = None
        self.closed = False
        self.connected = trio.Event()
        self._network = network

    async def receive(self) -> list[bytes]:
        """Wait for frames."""
        return await self.inlet.take()

    def send_nowait(self, frame: bytes) -> None:
        """Send to the server; raises WouldBlock when there is no connection."""
        if self._network.is_dead(self.owner):
            return
        if self.closed:
            raise trio.ClosedResourceError
        if self.line is None:
            raise trio.WouldBlock
        self.line.up.send(frame)

    async def send(self, frame: bytes) -> None:
        """Send to the server once there is a connection."""
        await trio.lowlevel.checkpoint()
        while self.line is None and not self.closed:
            self.connected = trio.Event()
            await self.connected.wait()
        self.send_nowait(frame)

    def close(self) -> None:
        """Disconnect; what was sent before arrives, if nothing else happens to it."""
        if self.closed:
            return
        self.closed = True
        self.connected.set()
        self.inlet.close()
        self._network.hang_up(self)


class ProcessNetwork:
    """The network as one process sees it."""

    def __init__(self, network: "SimNetwork", owner: Owner) -> None:
        self._network = network
        self._owner = owner

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> SimServerPort:
        """Listen. Raises EndpointError when somebody does already."""
        return self._network.listen(self._owner, endpoint)

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> SimClientPort:
        """Connect, whether or not somebody listens yet."""
        return self._network.connect(self._owner, endpoint)


class SimNetwork:
    """All endpoints, connections and what is in their way."""

    def __init__(self, timers: Timers, rng: random.Random, delays: tuple[float, float]) -> None:
        """Delays are drawn between the two, in seconds; most are close to the first."""
        self.timers = timers
        self.rng = rng
        self._low, self._high = delays
        self._servers: dict[str, SimServerPort] = {}
        self._clients: list[SimClientPort] = []
        self._apart: list[tuple[Owner, Owner]] = []
        self._in_use_until: dict[str, float] = {}
        self._dead: set[Owner] = set()
        self._num_lines = 0

    def of(self, owner: Owner) -> ProcessNetwork:
        """Return the network as a process sees it."""
        return ProcessNetwork(self, owner)

    def delay(self) -> float:
        """Draw the delay of one frame."""
        if self._high == 0.0:
            return 0.0
        return self._low + (self._high - self._low) * self.rng.random() ** 4

    def next_key(self) -> PeerKey:
        """Return a key no other connection has."""
        self._num_lines += 1
        return self._num_lines.to_bytes(5, "big")

    # What ports do.

    def listen(self, owner: Owner, endpoint: str) -> SimServerPort:
        """See `ProcessNetwork.listen`."""
        now = trio.current_time()
        if endpoint in self._servers or self._in_use_until.get(endpoint, 0.0) > now:
            raise EndpointError(98, "already in use", endpoint)
        server = self._servers[endpoint] = SimServerPort(self, owner, endpoint)
        for client in self._clients:
            if client.endpoint == endpoint and client.line is None:
                self.dial(client)
        return server

    def connect(self, owner: Owner, endpoint: str) -> SimClientPort:
        """See `ProcessNetwork.connect`."""
        client = SimClientPort(self, owner, endpoint)
        if owner in self._dead:
            return client
        self._clients.append(client)
        self.dial(client)
        return client

    def dial(self, client: SimClientPort) -> None:
        """Connect a client's port in a moment, if that is possible then."""
        due = trio.current_time() + self.rng.uniform(*RECONNECT_S) * (self._high > 0)
        self.timers.at(due, lambda: self._establish(client))

    def hang_up(self, client: SimClientPort) -> None:
        """A client's port closes: the server's end goes once it has read everything."""
        if client in self._clients:
            self._clients.remove(client)
        line = client.line
        if line is None:
            return
        line.down.cut(0)
        at = max(trio.current_time(), line.up.empty_at)
        self.timers.at(at, lambda: self._close_behind(line))

    def unlisten(self, server: SimServerPort) -> None:
        """A server's port closes."""
        if self._servers.get(server.endpoint) is not server:
            return
        del self._servers[server.endpoint]
        if self._high > 0 and not server.endpoint.startswith("ipc:"):
            until = trio.current_time() + self.rng.uniform(0.0, PORT_IN_USE_S)
            self._in_use_until[server.endpoint] = until
        for line in list(server.lines.values()):
            line.cut()

    def is_dead(self, owner: Owner) -> bool:
        """Whether a process was killed, so that nothing it does is seen."""
        return owner in self._dead

    # What happens to them.

    def lines(self, one: Owner, other: Owner) -> list[Line]:
        """Return the connections between two processes."""
        lines = [client.line for client in self._clients]
        return [line for line in lines if line is not None and line.joins(one, other)]

    def cut(self, one: Owner, other: Owner) -> int:
        """Reset the connections between two processes; returns how many there were."""
        lines = self.lines(one, other)
        for line in lines:
            line.cut()
        return len(lines)

    def part(self, one: Owner, other: Owner, *, one_way: bool = False) -> None:
        """Let nothing through between two processes, or nothing from clients to servers."""
        self._apart.append((one, other))
        for line in self.lines(one, other):
            line.up.stalled = True
            line.down.stalled = not one_way

    def heal(self) -> None:
        """Let everything through again; connections that were held up may be reset by then."""
        apart, self._apart = self._apart, []
        for one, other in apart:
            for line in self.lines(one, other):
                if self.rng.random() < 0.4:
                    line.cut()
                else:
                    line.up.flow()
                    line.down.flow()
        for client in self._clients:
            if client.line is None:
                self.dial(client)

    def kill(self, owner: Owner, *, silently: bool = False) -> None:
        """A process is gone; silently when no kernel is left to say so, as of a machine."""
        self._dead.add(owner)
        for client in [client for client in self._clients if client.owner == owner]:
            self._clients.remove(client)
            client.closed = True
            client.inlet.go_silent()
            if client.line is None:
                continue
            if silently:
                client.line.up.cut(0)
                client.line.down.stalled = True
            else:
                client.line.cut()
        for server in [server for server in self._servers.values() if server.owner == owner]:
            self.unlisten(server)
            server.inlet.go_silent()

    def _establish(self, client: SimClientPort) -> None:
        server = self._servers.get(client.endpoint)
        if client.closed or client.line is not None or server is None:
            return
        if any(are(client.owner, server.owner, one, other) for one, other in self._apart):
            return
        line = client.line = Line(self, client, server)
        server.lines[line.key] = line
        client.connected.set()

    def _close_behind(self, line: Line) -> None:
        if line.up.num_under_way and not line.up.closed:  # held up
            self.timers.at(trio.current_time() + 0.1, lambda: self._close_behind(line))
            return
        line.up.cut(0)
        line.server.lines.pop(line.key, None)


def are(first: Owner, second: Owner, one: str, other: str) -> bool:
    """Whether two ports belong to the processes of these names, in any life."""
    return {first.partition("#")[0], second.partition("#")[0]} == {one, other}


NO_DELAY = (0.0, 0.0)
SAME_ROOM = (0.0001, 0.003)
FAR_AWAY = (0.005, math.pi / 10)
