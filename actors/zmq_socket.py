"""ZeroMQ sockets for trio: no asyncio, no thread, no message lost to a cancellation.

What makes this hard: a libzmq socket has one file descriptor, which is readable exactly while
*commands* wait in its mailbox ("a pipe has something to read", "a pipe has room again"). Messages
do not touch it, and any call on the socket may process the commands, so that one task's send eats
the notification another task's receive waits for. Hence the rules that the code below keeps:

1. A task sleeps only straight after reading EVENTS (which processes every waiting command) with
   its own bit down; nothing is called in between. The next change makes the descriptor readable.
2. Whoever called libzmq while others wait reads EVENTS again and wakes them by level.
3. One of the sleepers, the leader, waits on the descriptor; the others are parked. A leader that
   leaves for any reason unparks one of each direction, and one of those becomes the leader.
4. A woken task tests again; it never trusts the wake.

The leader is woken by `trio.lowlevel.notify_closing`: a CancelScope around each wait would cost
more than the wait.

A message is one body frame, at a ROUTER behind the routing id: a longer one can lose its tail when
the peer goes. Linger is 0: what is unsent when a socket closes is dropped, so it is the protocol on
top that acknowledges.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import trio
import zmq

from callboard.actors.curve import ZAP_ANSWER_FRAMES, ClientKeys, KeyPair

T = TypeVar("T")

# Plain ints: an operation on zmq's enum flags costs about as much as the call it is for.
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_DONTWAIT = int(zmq.DONTWAIT)
_DONTWAIT_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)

_RETRY_S = 0.002
_KEEPALIVE_IDLE_S = 30
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HANDSHAKE_MS = 5000
"""How long a connection may take to greet in ZMQ's own protocol, before libzmq closes it."""

_MIN_MAX_MESSAGE_BYTES = 1024
_MAX_IPC_PATH_BYTES = 107
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"callboard"
_ZAP_MAX_BYTES = 4096

_Options = dict[zmq.SocketOption, int | bytes]


class EndpointError(OSError):
    """An endpoint cannot be bound or connected; `errno` says why and `filename` is the endpoint."""


class PeerGone(Exception):
    """A ROUTER has no peer of this routing id, or has lost it; the message was not queued."""


class FrameTooLarge(ValueError):
    """A body is larger than the socket's `max_message_bytes`; nothing was queued.

    A receiver with that limit would drop the connection without a word to the sender.
    """


class SocketStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a socket has done so far, and who waits on it now."""

    num_sends: int
    num_receives: int
    num_sleeps: int
    num_kicks: int
    num_waiting_readers: int
    num_waiting_writers: int


class SocketEvent(msgspec.Struct, frozen=True):
    """What a monitor tells: one of zmq's EVENT numbers, and a descriptor or an error's number."""

    kind: int
    value: int


class _Direction:
    """Those who wait for one bit of EVENTS and are not the leader."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.parked = trio.lowlevel.ParkingLot()


class ZmqSocket:
    """One ROUTER, DEALER or PAIR, for any number of tasks of the trio run that opened it.

    Every async method is a checkpoint; a cancelled send queued nothing and a cancelled receive lost
    nothing. Once closed, all but `close` and `statistics` raise `trio.ClosedResourceError`; a use
    from another run or thread raises RuntimeError.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._is_router = socket.type == zmq.ROUTER
        self._num_frames = 1 + self._is_router
        self._monitor: ZmqMonitor | None = None
        self._max_message_bytes = int(socket.getsockopt(zmq.MAXMSGSIZE))
        self._fd = int(socket.getsockopt(zmq.FD))
        self._token = trio.lowlevel.current_trio_token()
        self._claims: list[_IpcClaim] = []
        self._readers = _Direction(_POLLIN)
        self._writers = _Direction(_POLLOUT)
        self._leader: _Direction | None = None
        self._closed = False
        self._num_sends = self._num_receives = self._num_sleeps = self._num_kicks = 0

    def bind(self, endpoint: str) -> str:
        """Listen at `endpoint` and return the real one, in which a port 0 or `*` is filled in.

        An `ipc://` path that is bound already is refused; libzmq by itself would take it over.
        Raises EndpointError.
        """
        self._check_usable()
        if endpoint.startswith("ipc://"):
            self._bind_ipc(endpoint)
        else:
            self._attach(self._socket.bind, endpoint)
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoint: str) -> None:
        """Connect to `endpoint` in the background, trying until somebody is there.

        Raises EndpointError.
        """
        self._check_usable()
        self._attach(self._socket.connect, endpoint)

    # Interrupts are held back in what follows: one between the two frames of a message would make
    # the next message a part of it, and one after a receive would lose what was received.

    @trio.lowlevel.enable_ki_protection
    async def send(self, frames: Sequence[bytes]) -> None:
        """Queue one message, waiting for room: `[body]`, or `[routing_id, body]` at a ROUTER.

        A DEALER without a live peer has no room. Raises PeerGone and FrameTooLarge; ValueError and
        TypeError for frames that are no message.
        """
        self._check_usable()
        self._check_frames(frames)
        await trio.lowlevel.checkpoint_if_cancelled()
        slept = False
        while not self._send_now(frames):
            await self._sleep_until_room()
            slept = True
        if not slept:
            await trio.lowlevel.cancel_shielded_checkpoint()

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Queue one message, or raise `trio.WouldBlock` where `send` would wait."""
        self._check_usable()
        self._check_frames(frames)
        if not self._send_now(frames):
            raise trio.WouldBlock

    @trio.lowlevel.enable_ki_protection
    async def receive(self) -> list[bytes]:
        """Wait for one message; at a ROUTER its first frame is the sender's routing id."""
        (message,) = await self.receive_batch(1)
        return message

    @trio.lowlevel.enable_ki_protection
    def receive_nowait(self) -> list[bytes]:
        """Return one message, or raise `trio.WouldBlock` where there is none."""
        self._check_usable()
        if not (messages := self._receive_now(1, self._read_bytes)):
            raise trio.WouldBlock
        return messages[0]

    @trio.lowlevel.enable_ki_protection
    async def receive_batch(self, max_messages: int) -> list[list[bytes]]:
        """Wait for a message; return it and those there by then, `max_messages` at most."""
        return await self._receive(max_messages, self._read_bytes)

    @trio.lowlevel.enable_ki_protection
    async def receive_frames(self, max_messages: int) -> list[list[zmq.Frame]]:
        """Receive as `receive_batch` does, with what libzmq knows of each frame.

        `frame.get(zmq.SRCFD)` is the descriptor of the connection it came over, and
        `frame.get("User-Id")` whom the authentication found at its other end.
        """
        return await self._receive(max_messages, self._read_frames)

    def monitor(self, events: int) -> "ZmqMonitor":
        """Tell of these EVENTs of this socket's connections from now on; closed with the socket.

        It has to be there before `bind` or `connect` to tell of everything.
        """
        self._check_usable()
        if self._monitor is None:
            self._monitor = ZmqMonitor(self._socket, events)
        return self._monitor

    @trio.lowlevel.enable_ki_protection
    def close(self, *, linger_s: float = 0.0) -> None:
        """Close at once; whoever waits gets `trio.ClosedResourceError`.

        What was queued before may still be sent for `linger_s` seconds, by libzmq's own thread, as
        long as the context lives. Closing again does nothing.
        """
        if self._closed:
            return
        self._check_usable()
        # In this order: libzmq's reaper closes the descriptor some time after, and its number may
        # be used again.
        self._closed = True
        trio.lowlevel.notify_closing(self._fd)
        self._readers.parked.unpark_all()
        self._writers.parked.unpark_all()
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=int(linger_s * 1000))
        for claim in self._claims:
            claim.release()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def statistics(self) -> SocketStatistics:
        """Count what was done and who waits; also after closing."""
        return SocketStatistics(
            num_sends=self._num_sends,
            num_receives=self._num_receives,
            num_sleeps=self._num_sleeps,
            num_kicks=self._num_kicks,
            num_waiting_readers=self._num_waiting(self._readers),
            num_waiting_writers=self._num_waiting(self._writers),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        self._check_open()
        try:
            is_ours = trio.lowlevel.current_trio_token() is self._token
        except RuntimeError:
            is_ours = False
        if not is_ours:
            raise RuntimeError("a ZeroMQ socket can be used only in the trio run that opened it")

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this ZeroMQ socket is closed")

    def _check_frames(self, frames: Sequence[bytes]) -> None:
        # Before the first frame is handed over: a half message would swallow the next one.
        if len(frames) != self._num_frames:
            wanted = "[routing_id, body]" if self._is_router else "[body]"
            raise ValueError(f"a message is {wanted} here, not {len(frames)} frames")
        body = frames[-1]
        if type(body) is not bytes:
            raise TypeError(f"a body is bytes, not {type(body).__name__}")
        if len(body) > self._max_message_bytes:
            raise FrameTooLarge(
                f"the body has {len(body)} bytes, of at most {self._max_message_bytes}"
            )

    def _bind_ipc(self, endpoint: str) -> None:
        with ExitStack() as on_failure:
            claim = _IpcClaim.take(endpoint)
            on_failure.callback(claim.release)
            self._attach(self._socket.bind, endpoint)
            claim.note_bound()
            on_failure.pop_all()
        self._claims.append(claim)

    def _attach(self, attach: Callable[[str], object], endpoint: str) -> None:
        if endpoint.startswith("tcp://["):  # else IPv4 endpoints would be told in IPv6's words
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            attach(endpoint)
        except zmq.ZMQError as error:
            number = error.errno or errno.EINVAL
            reason = "no such name or address" if number == errno.ENODEV else zmq.strerror(number)
            raise EndpointError(number, reason, endpoint) from error
        finally:
            self._wake_by_level()

    def _send_now(self, frames: Sequence[bytes]) -> bool:
        """Queue the message if there is room; if not, the caller may sleep straight away."""
        if not self._try_send(frames):
            # A send looks at the commands once in a millisecond only: reading them may make room.
            if not self._drain() & _POLLOUT:
                return False
            if not self._try_send(frames):
                self._drain()  # because of rule 1
                return False
        self._wake_by_level()
        return True

    def _try_send(self, frames: Sequence[bytes]) -> bool:
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _DONTWAIT_MORE)
            self._socket.send(frames[-1], _DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._wake_by_level()
            if error.errno == errno.EHOSTUNREACH:
                raise PeerGone(f"no peer has the routing id {frames[0].hex()}") from None
            raise
        self._num_sends += 1
        return True

    async def _receive(self, max_messages: int, read: Callable[[], T]) -> list[T]:
        self._check_usable()
        if max_messages < 1:
            raise ValueError(f"max_messages is {max_messages}; it must be at least 1")
        await trio.lowlevel.checkpoint_if_cancelled()
        slept = False
        while not (messages := self._receive_now(max_messages, read)):
            await self._sleep(self._readers)
            slept = True
        if not slept:
            await trio.lowlevel.cancel_shielded_checkpoint()
        return messages

    def _receive_now(self, max_messages: int, read: Callable[[], T]) -> list[T]:
        """Take what is there; if that is nothing, the caller may sleep straight away."""
        messages: list[T] = []
        while not messages:
            # EVENTS first: it costs less than the exception of a receive that finds nothing.
            level = self._read_events()
            if not level & _POLLIN:
                self._wake_others(level)
                return messages
            messages = self._take(max_messages, read)
        self._wake_by_level()
        return messages

    def _take(self, max_messages: int, read: Callable[[], T]) -> list[T]:
        messages: list[T] = []
        while len(messages) < max_messages:
            try:
                messages.append(read())
            except zmq.Again:
                break
        self._num_receives += len(messages)
        return messages

    def _read_bytes(self) -> list[bytes]:
        return self._socket.recv_multipart(_DONTWAIT)

    def _read_frames(self) -> list[zmq.Frame]:
        frames = [self._socket.recv(_DONTWAIT, copy=False)]
        while frames[-1].more:
            frames.append(self._socket.recv(_DONTWAIT, copy=False))
        return frames

    async def _sleep_until_room(self) -> None:
        if not self._is_router:
            await self._sleep(self._writers)
            return
        # EVENTS speaks of any peer and the message is for one: POLLOUT can be up while this peer
        # is full, and stay down when it goes. So a ROUTER's sender also looks by the clock.
        with trio.move_on_after(_RETRY_S):
            await self._sleep(self._writers)

    async def _sleep(self, direction: _Direction) -> None:
        """Wait until it is worth trying again. Only after a drain that showed the bit down."""
        self._num_sleeps += 1
        if self._leader is None:
            await self._lead(direction)
        else:
            await direction.parked.park()
        self._check_open()

    async def _lead(self, direction: _Direction) -> None:
        self._leader = direction
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except trio.ClosedResourceError:
            pass  # a kick, or the end; the caller looks which
        finally:
            self._leader = None
            self._unpark_one_of_each()

    def _read_events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _drain(self) -> int:
        """Process all commands, wake those whose bit is up, and return EVENTS."""
        level = self._read_events()
        self._wake_others(level)
        return level

    def _wake_by_level(self) -> None:
        """Make good for the commands that a call just made may have eaten."""
        if not self._closed and self._anyone_waits():
            self._wake_others(self._read_events())

    def _anyone_waits(self) -> bool:
        return self._leader is not None or bool(self._readers.parked or self._writers.parked)

    def _wake_others(self, level: int) -> None:
        if self._leader is None:
            self._unpark_one_of_each()
            return
        for direction in (self._readers, self._writers):
            if level & direction.bit:
                direction.parked.unpark()
                if self._leader is direction:
                    self._kick_leader()

    def _kick_leader(self) -> None:
        self._num_kicks += 1
        trio.lowlevel.notify_closing(self._fd)

    def _unpark_one_of_each(self) -> None:
        self._readers.parked.unpark()
        self._writers.parked.unpark()

    def _num_waiting(self, direction: _Direction) -> int:
        return len(direction.parked) + (self._leader is direction)


class ZmqMonitor:
    """The events of one socket's connections, for one task of the trio run that opened it.

    It must be closed before its socket, which sees to that: in another order libzmq leaks it, or
    its thread waits for a reader for ever. For the same reason it takes any number of events.
    """

    def __init__(self, of: zmq.Socket[bytes], events: int) -> None:
        endpoint = f"inproc://monitor-{int(of.getsockopt(zmq.FD))}"
        of.monitor(endpoint, events)
        self._of = of
        pair = of.context.socket(zmq.PAIR)
        pair.setsockopt(zmq.LINGER, 0)
        pair.setsockopt(zmq.RCVHWM, 0)
        pair.connect(endpoint)
        self._socket = ZmqSocket(pair)

    async def receive(self) -> SocketEvent:
        """Wait for the next event. Raises `trio.ClosedResourceError` when the socket closes."""
        return _socket_event(await self._socket.receive())

    def receive_all_nowait(self) -> list[SocketEvent]:
        """Return the events that are there."""
        events: list[SocketEvent] = []
        while True:
            try:
                events.append(_socket_event(self._socket.receive_nowait()))
            except trio.WouldBlock:
                return events

    def close(self) -> None:
        """Tell nothing more."""
        if not self._socket.closed:
            self._of.disable_monitor()
            self._socket.close()


def _socket_event(frames: list[bytes]) -> SocketEvent:
    return SocketEvent(*struct.unpack("=HI", frames[0]))


class _IpcClaim:
    """The right to bind one ipc path: a lock on `PATH.lock`, held until the socket closes.

    libzmq deletes whatever file is at the path before it binds, and never its own socket.
    """

    def __init__(self, path: Path, lock_path: Path, lock_fd: int) -> None:
        self._path = path
        self._lock_path = lock_path
        self._lock_fd = lock_fd
        self._socket_id: tuple[int, int] | None = None

    @classmethod
    def take(cls, endpoint: str) -> Self:
        """Lock the path of `endpoint`; EndpointError if it is too long, live, or not our socket."""
        name = endpoint.removeprefix("ipc://")
        if not name or name[0] in "*@":
            raise EndpointError(errno.EINVAL, "an ipc endpoint must be a path of a file", endpoint)
        if (num_bytes := len(os.fsencode(name))) > _MAX_IPC_PATH_BYTES:
            reason = f"the path has {num_bytes} bytes, of at most {_MAX_IPC_PATH_BYTES}"
            raise EndpointError(errno.ENAMETOOLONG, reason, endpoint)
        path = Path(name).absolute()
        lock_path = path.with_name(path.name + ".lock")
        try:
            claim = cls(path, lock_path, _lock(lock_path))
        except BlockingIOError:
            reason = "another socket is bound to this path"
            raise EndpointError(errno.EADDRINUSE, reason, endpoint) from None
        except OSError as error:
            reason = f"cannot lock {lock_path}: {error.strerror}"
            raise EndpointError(error.errno or errno.EINVAL, reason, endpoint) from error
        if not claim._may_replace():
            claim.release()
            reason = "what is at this path is not a socket of this user"
            raise EndpointError(errno.EEXIST, reason, endpoint)
        return claim

    def note_bound(self) -> None:
        """Remember the socket file that is at the path now as the one to delete."""
        found = self._path.lstat()
        self._socket_id = found.st_dev, found.st_ino

    def release(self) -> None:
        """Delete our socket file and the lock. The lock goes last: with it the path is free."""
        try:
            if self._socket_id is not None and _file_id(self._path) == self._socket_id:
                self._path.unlink()
            self._lock_path.unlink(missing_ok=True)
        finally:
            os.close(self._lock_fd)

    def _may_replace(self) -> bool:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return True
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> int:
    """Create and lock a file and return its descriptor; BlockingIOError if another has the lock."""
    while True:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have deleted it between our two calls: then nobody else sees it.
            held = os.fstat(lock_fd)
            if (held.st_dev, held.st_ino) == _file_id(path):
                return lock_fd
        except BaseException:
            os.close(lock_fd)
            raise
        os.close(lock_fd)


class ZmqContext:
    """Owner of a libzmq context and of its sockets; `open_zmq_context` opens one."""

    def __init__(self, *, grace_s: float) -> None:
        self._context = zmq.Context()
        self._grace_s = grace_s
        self._sockets: list[ZmqSocket] = []
        self._closing = False

    def router(
        self,
        *,
        max_message_bytes: int,
        send_hwm: int,
        receive_hwm: int,
        keys: KeyPair | None = None,
    ) -> ZmqSocket:
        """Open a ROUTER that raises (PeerGone, WouldBlock) where a plain one drops a message.

        `max_message_bytes` holds for a frame sent or received; the high-water marks count messages
        per peer. With keys it takes encrypted connections alone, of those whom the answers at the
        `authenticator` let in; without one, nobody.
        """
        options: _Options = {zmq.ROUTER_MANDATORY: 1}
        if keys is not None:
            options |= {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: keys.secret.encode(),
                zmq.ZAP_DOMAIN: _ZAP_DOMAIN,
                zmq.ZAP_ENFORCE_DOMAIN: 1,  # or libzmq lets everybody in when nobody answers
            }
        return self._open(zmq.ROUTER, options, max_message_bytes, send_hwm, receive_hwm)

    def dealer(
        self,
        *,
        max_message_bytes: int,
        send_hwm: int,
        receive_hwm: int,
        keys: ClientKeys | None = None,
    ) -> ZmqSocket:
        """Open a DEALER that queues for live peers only; the limits are those of `router`.

        It reconnects after 50 ms, then ever more slowly, up to 2 s. With keys it talks only to the
        server that has the other half of `keys.server`, and encrypted.
        """
        options: _Options = {
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
        }
        if keys is not None:
            options |= {
                zmq.CURVE_SERVERKEY: keys.server.encode(),
                zmq.CURVE_PUBLICKEY: keys.own.public.encode(),
                zmq.CURVE_SECRETKEY: keys.own.secret.encode(),
            }
        return self._open(zmq.DEALER, options, max_message_bytes, send_hwm, receive_hwm)

    def authenticator(self) -> ZmqSocket:
        """Open the socket where libzmq asks whom to let in, by ZeroMQ's RFC 27 (ZAP).

        There is one in a context, and it has to be there before the sockets that need it.
        """
        socket = self._open(zmq.ROUTER, {zmq.ROUTER_MANDATORY: 1}, _ZAP_MAX_BYTES, 1000, 1000)
        # More than one frame behind the routing id, and yet none is lost: libzmq's own end of this
        # takes a message whole, and where it goes, whom the answer is about has gone.
        socket._num_frames = ZAP_ANSWER_FRAMES
        socket.bind(_ZAP_ENDPOINT)
        return socket

    async def aclose(self) -> None:
        """Close every socket and end the context in a worker thread.

        A cancellation waits for it, `grace_s` seconds at most; after that it raises
        `trio.TooSlowError` and leaves the context and the thread behind.
        """
        self._closing = True
        for socket in self._sockets:
            socket.close()
        with trio.fail_after(self._grace_s, shield=True):
            await trio.to_thread.run_sync(self._context.term, abandon_on_cancel=True)

    def _open(
        self,
        kind: zmq.SocketType,
        options: Mapping[zmq.SocketOption, int | bytes],
        max_message_bytes: int,
        send_hwm: int,
        receive_hwm: int,
    ) -> ZmqSocket:
        if self._closing:
            raise trio.ClosedResourceError("this ZeroMQ context is closed")
        # Below it the frames of libzmq's own handshake are too large, and nobody ever connects.
        if max_message_bytes < _MIN_MAX_MESSAGE_BYTES:
            raise ValueError(f"{max_message_bytes=} must be at least {_MIN_MAX_MESSAGE_BYTES}")
        # To libzmq 0 means no limit.
        if min(send_hwm, receive_hwm) < 1:
            raise ValueError(f"{send_hwm=} and {receive_hwm=} must be at least 1")
        limits: _Options = {
            zmq.LINGER: 0,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.MAXMSGSIZE: max_message_bytes,
            zmq.SNDHWM: send_hwm,
            zmq.RCVHWM: receive_hwm,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE_IDLE_S,
        }
        with ExitStack() as on_failure:
            raw_socket = on_failure.enter_context(self._context.socket(kind))
            for option, value in {**limits, **options}.items():
                raw_socket.setsockopt(option, value)
            socket = ZmqSocket(raw_socket)
            on_failure.pop_all()
        self._sockets = [other for other in self._sockets if not other.closed] + [socket]
        return socket


@asynccontextmanager
async def open_zmq_context(*, grace_s: float = 2.0) -> AsyncIterator[ZmqContext]:
    """Open a context; on leaving, every socket is closed and the context ended within `grace_s`."""
    context = ZmqContext(grace_s=grace_s)
    try:
        yield context
    finally:
        await context.aclose()
