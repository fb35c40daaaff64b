"""Sessions over a network in memory, whose clock is the test's; then a few over real sockets."""

import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.patience import BURST
from callboard.actors.session import (
    OUTBOX,
    PING_INTERVAL_S,
    SESSION,
    SILENCE_LIMIT_S,
    WINDOW,
    Connection,
    Joined,
    Left,
    Listener,
    Said,
)
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import (
    ClientPort,
    MemoryNetwork,
    Network,
    PeerKey,
    ServerPort,
    ZmqNetwork,
)
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.base import Call, Message
from callboard.messages.codec import (
    decode_body,
    decode_frame,
    encode_body,
    encode_frame,
    schema_hash,
)
from callboard.messages.envelope import Envelope
from callboard.messages.errors import (
    AccessDenied,
    ActorStopped,
    CallboardError,
    DeadlineExceeded,
    Failure,
    NameInUse,
    ProtocolMismatch,
    RequestError,
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

ENDPOINT = "memory://server"


class Note(Message, frozen=True):
    """Client → server, and back."""

    number: int


class Question(Call[int], frozen=True):
    """Client → server, and back."""

    number: int


class Secret(Message, frozen=True):
    """Replica → server: not for clients to say."""


ANYTHING: Any = SESSION
ToServer = Note | Question
ToClient = Note | Question
Event = Said | Joined | Left


class Mail:
    """Where a side's events go, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open = trio.Event()
        self.open.set()
        self._news = trio.Event()

    async def deliver(self, event: Event) -> None:
        await self.open.wait()
        self.events.append(event)
        self._news.set()

    async def wait_for(self, found: Callable[[], bool]) -> None:
        with trio.fail_after(120):
            while not found():
                self._news = trio.Event()
                await self._news.wait()

    async def joined(self, count: int = 1) -> PeerKey:
        """Wait for so many Joined in all; returns the last one's peer."""
        await self.wait_for(lambda: self.count(Joined) >= count)
        return next(event.peer for event in reversed(self.events) if isinstance(event, Joined))

    async def left(self, count: int = 1) -> str:
        """Wait for so many Left in all; returns the last one's reason."""
        await self.wait_for(lambda: self.count(Left) >= count)
        return next(event.reason for event in reversed(self.events) if isinstance(event, Left))

    async def said(self, count: int = 1) -> list[Said]:
        """Wait for so many Said in all, and return them."""
        await self.wait_for(lambda: self.count(Said) >= count)
        return [event for event in self.events if isinstance(event, Said)]

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    @property
    def numbers(self) -> list[int]:
        return [event.message.number for event in self.events if isinstance(event, Said)]


class World:
    """A system and a network, on which listeners and connections run until the test ends."""

    def __init__(self, system: ActorSystem, network: Network, nursery: trio.Nursery) -> None:
        self.system = system
        self.network = network
        self.endpoint = ENDPOINT
        self._nursery = nursery

    def listener(self, mail: Mail, **options: Any) -> Listener:
        listener = Listener(
            self.system,
            self.network,
            self.endpoint,
            name="server",
            inboxes={Role.CLIENT: ToServer, Role.REPLICA: Secret},
            outboxes={Role.CLIENT: ToClient, Role.REPLICA: Note},
            welcome=lambda session: Welcome(name="server", session=session, max_frame_bytes=9),
            deliver=mail.deliver,
            **options,
        )
        self.endpoint = listener.endpoint
        self._nursery.start_soon(listener.run)
        return listener

    def connection(self, mail: Mail, **options: Any) -> Connection:
        kinds = {"role": Role.CLIENT, "inbox": ToClient, "outbox": ToServer, **options}
        connection = Connection(
            self.system, self.network, self.endpoint, name="client", deliver=mail.deliver, **kinds
        )
        self._nursery.start_soon(connection.run)
        return connection

    def raw(self) -> "Raw":
        return Raw(self.network.connect(self.endpoint, max_frame_bytes=2**26))

    async def pair(self) -> "Pair":
        here, there = Mail(), Mail()
        listener, connection = self.listener(here), self.connection(there)
        await connection.wait_welcome()
        key = await here.joined()
        await there.joined()
        return Pair(listener, here, key, connection, there)


class Pair:
    """A listener and a connection that have greeted each other, and the mail of both."""

    def __init__(
        self,
        listener: Listener,
        at_listener: Mail,
        key: PeerKey,
        connection: Connection,
        at_connection: Mail,
    ) -> None:
        self.listener = listener
        self.at_listener = at_listener
        self.key = key
        self.connection = connection
        self.at_connection = at_connection


class Raw:
    """A client that says whatever the test wants, and reads only when asked to."""

    def __init__(self, port: ClientPort) -> None:
        self.port = port
        self._ids = 0
        self._read: list[bytes] = []

    def frame(self, message: Message, **envelope: Any) -> bytes:
        self._ids += 1
        return encode_frame(encode_body(message), **{"message_id": self._ids, **envelope})

    async def say(self, message: Message, **envelope: Any) -> None:
        await self.port.send(self.frame(message, **envelope))

    async def hello(self, **fields: Any) -> Any:
        """Say hello; returns the answer."""
        await self.say(hello(**fields))
        return await self.hear()

    async def hear(self, kind: Any = SESSION | ToClient) -> Any:
        return decode_body((await self.envelope()).body, kind)

    async def envelope(self) -> Envelope:
        if not self._read:
            with trio.fail_after(120):
                self._read = await self.port.receive()
        return decode_frame(self._read.pop(0))

    async def waiting(self) -> int:
        """How many frames have arrived and were not heard yet."""
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            while True:
                self._read += await self.port.receive()
        return len(self._read)


def hello(**fields: Any) -> Hello:
    return Hello(
        **{
            "version": PROTOCOL_VERSION,
            "role": Role.CLIENT,
            "name": "raw",
            "incarnation": 1,
            "schema": schema_hash(ToServer, ToClient),
            **fields,
        }
    )


@asynccontextmanager
async def running(network: Network) -> AsyncGenerator[World]:
    async with open_system() as system, trio.open_nursery() as nursery:
        yield World(system, network, nursery)
        nursery.cancel_scope.cancel()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(MemoryNetwork()) as world:
        yield world


# The handshake.


async def test_both_sides_hear_who_is_there(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()
    (joined,) = pair.at_listener.events
    assert isinstance(joined, Joined)
    assert (joined.hello.name, joined.hello.role) == ("client", Role.CLIENT)
    assert pair.listener.hello(pair.key) == joined.hello
    (welcomed,) = pair.at_connection.events
    assert isinstance(welcomed, Joined)
    assert welcomed.hello == pair.connection.welcome
    assert pair.connection.present
    assert pair.listener.hello(b"somebody else") is None


async def test_another_protocol_version_is_unwelcome(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    answer = await world.raw().hello(version=2)
    assert isinstance(answer, Unwelcome)
    assert answer.failure.code == "ProtocolMismatch"
    assert answer.failure.message == "server speaks protocol version 1, not 2"
    assert mail.events == []


async def test_other_message_types_are_unwelcome_and_both_are_named(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(Mail())
    connection = world.connection(Mail(), inbox=Note | Secret)
    here, there = schema_hash(ToServer, ToClient), schema_hash(ToServer, Note, Secret)
    with pytest.raises(ProtocolMismatch, match=f"client: {here} here, {there} there"):
        await connection.wait_welcome()
    assert not connection.present


async def test_whoever_is_not_admitted_is_told_why_and_whoever_is_not_any_more_has_to_leave(
    autojump_clock: MockClock, world: World
) -> None:
    admitted = {"good"}

    def admit(hello: Hello) -> None:
        if hello.ticket not in admitted:
            raise AccessDenied(f"{hello.name} has no ticket")

    world.listener(here := Mail(), admit=admit)
    with pytest.raises(AccessDenied, match="client has no ticket"):
        await world.connection(Mail(), ticket="bad").wait_welcome()
    connection = world.connection(there := Mail(), ticket="good")
    await connection.wait_welcome()
    await here.joined()

    admitted.clear()

    assert await there.left() == "client has no ticket"
    assert await here.left() == "client has no ticket"
    with pytest.raises(AccessDenied):
        await connection.wait_welcome()
    assert here.count(Joined) == 1


async def test_a_role_nobody_expects_is_unwelcome(autojump_clock: MockClock, world: World) -> None:
    world.listener(Mail())
    connection = world.connection(Mail(), role=Role.OPERATOR)
    with pytest.raises(ProtocolMismatch, match="server takes no operator"):
        await connection.wait_welcome()


async def test_whoever_speaks_another_wire_is_told_at_once(
    autojump_clock: MockClock, world: World
) -> None:
    """The envelope itself may be of another version; then no Hello can be read in it."""
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refuse_all, server)
        began = trio.current_time()
        with pytest.raises(WireError, match="only version 7"):
            await connection.wait_welcome()
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()


async def refuse_all(server: ServerPort) -> None:
    refused = FrameRefused(failure=Failure.of(WireError("only version 7")))
    while True:
        for key, _ in await server.receive():
            server.send_nowait(key, encode_frame(encode_body(refused), message_id=1))


async def test_a_server_that_talks_nonsense_is_told_from_one_that_is_not_there(
    autojump_clock: MockClock,
    world: World,
) -> None:
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(Mail())
    async with trio.open_nursery() as nursery:

        async def nonsense() -> None:
            for key, _ in await server.receive():
                server.send_nowait(key, b"HTTP/1.1 400 Bad Request")

        nursery.start_soon(nonsense)
        with pytest.raises(WireError, match="no message"):
            await connection.wait_welcome()
    assert connection.frames_refused == 1


async def test_nobody_there_is_unreachable_after_the_timeout(
    autojump_clock: MockClock, world: World
) -> None:
    connection = world.connection(Mail())
    began = trio.current_time()
    with pytest.raises(Unreachable, match="nobody answers at memory://server"):
        await connection.wait_welcome(3.0)
    assert trio.current_time() - began == pytest.approx(3.0)


async def test_who_waits_for_a_welcome_is_told_when_the_connection_is_closed(
    autojump_clock: MockClock, world: World
) -> None:
    connection = world.connection(Mail())
    async with trio.open_nursery() as nursery:
        began = trio.current_time()

        async def wait() -> None:
            with pytest.raises(ActorStopped, match="was closed"):
                await connection.wait_welcome(3.0)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        connection.close()
    assert trio.current_time() == began
    with pytest.raises(ActorStopped, match="was closed"):
        await connection.wait_welcome(3.0)


async def test_a_hello_that_was_lost_is_said_again(autojump_clock: MockClock, world: World) -> None:
    deaf = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_welcome)
        await deaf.receive()
        deaf.close()
        world.listener(Mail())
    assert connection.present


async def test_the_same_hello_again_is_the_same_session(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    first, second = await raw.hello(), await raw.hello()
    assert first == second
    assert mail.kinds == ["Joined"]


async def test_a_new_incarnation_is_a_new_session(autojump_clock: MockClock, world: World) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    first, second = await raw.hello(), await raw.hello(incarnation=2)
    assert first.session != second.session
    await mail.joined(2)
    assert mail.kinds == ["Joined", "Joined"]


async def test_the_welcome_comes_before_anything_the_actor_says_to_who_joined(
    autojump_clock: MockClock,
    world: World,
) -> None:
    class Eager(Mail):
        async def deliver(self, event: Event) -> None:
            if isinstance(event, Joined):
                listener.send(event.peer, Note(number=1))

    listener = world.listener(Eager())
    raw = world.raw()
    assert isinstance(await raw.hello(), Welcome)
    assert await raw.hear() == Note(number=1)


async def test_a_stranger_that_says_anything_else_is_asked_who_it_is(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    for message in (Note(number=1), Ping(), Pong(), Credit(taken=5), Bye(), Secret()):
        await raw.say(message)
        assert isinstance(await raw.hear(), WhoAreYou)
    assert (mail.events, listener.frames_refused) == ([], 0)


# What is said.


async def test_what_is_said_arrives_in_order_on_both_sides(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    for number in range(3 * WINDOW):
        await pair.connection.send(Note(number=number))
        pair.listener.send(pair.key, Note(number=-number))
    await pair.at_listener.said(3 * WINDOW)
    await pair.at_connection.said(3 * WINDOW)
    assert pair.at_listener.numbers == list(range(3 * WINDOW))
    assert pair.at_connection.numbers == [-number for number in range(3 * WINDOW)]


async def test_saying_something_to_a_stranger_is_not_possible(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    assert not pair.listener.send(b"stranger", Note(number=1))
    assert not pair.listener.answer(b"stranger", 1, 2)


async def test_what_is_too_large_for_a_frame_is_the_senders_error(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(Mail(), max_frame_bytes=100)
    raw = world.raw()
    await raw.hello()
    key = next(iter(listener._peers))
    with pytest.raises(WireError, match="over the limit of 100"):
        listener.send(key, hello(name="x" * 100))
    assert listener.send(key, Note(number=1))


def envelope(body: bytes, **fields: Any) -> bytes:
    return encode_frame(body, **{"message_id": 1, **fields})


NESTED = b"\x91" * 5_000 + b"\xc0"
GARBAGE = {
    "nothing": b"",
    "one byte": b"\x00",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "all ones": b"\xff" * 100,
    "an empty list": b"\x90",
    "a map": b"\x80",
    "a short envelope": msgspec.msgpack.encode([1, 2]),
    "an envelope of strings": msgspec.msgpack.encode(["1"] * 8),
    "another version": msgspec.msgpack.encode([2, 1, 0, 0, "", "", -1, None]),
    "a torn frame": envelope(encode_body(Note(number=1)))[:-3],
    "a frame with a tail": envelope(encode_body(Note(number=1))) + b"\x00",
    "bytes that are no text": msgspec.msgpack.encode([1, 1, 0, 0, "", "", -1, None]).replace(
        b"\xa0", b"\xa1\xff", 1
    ),
    "no body": envelope(b"\xc0"),
    "a body that is no message": envelope(msgspec.msgpack.encode([1, 2, 3])),
    "an unknown message": envelope(msgspec.msgpack.encode(["Fireworks", 1])),
    "a field too few": envelope(msgspec.msgpack.encode(["Note"])),
    "a field of another type": envelope(msgspec.msgpack.encode(["Note", "one"])),
    "a body within bodies": envelope(NESTED),
    "an envelope within envelopes": NESTED,
    "what a replica says": envelope(encode_body(Secret())),
    "what a server says": envelope(encode_body(WhoAreYou())),
    "a hello of no role": envelope(msgspec.msgpack.encode(["Hello", 1, "god", "me", 1, "schema"])),
    "a credit of text": envelope(msgspec.msgpack.encode(["Credit", "much"])),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_garbage_is_refused_by_type_and_counted_and_changes_nothing(
    autojump_clock: MockClock, world: World, kind: str
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    await raw.port.send(GARBAGE[kind])
    answer = await raw.hear()
    assert isinstance(answer, FrameRefused)
    assert answer.failure.code == "WireError"
    assert listener.frames_refused == 1
    await raw.say(Note(number=7))
    await mail.said()
    assert mail.kinds == ["Joined", "Said"]


async def test_a_frame_over_the_limit_is_refused(autojump_clock: MockClock, world: World) -> None:
    listener = world.listener(Mail(), max_frame_bytes=200)
    raw = world.raw()
    await raw.hello()
    await raw.say(hello(name="x" * 200))
    answer = await raw.hear()
    assert isinstance(answer, FrameRefused)
    assert "over the limit of 200" in answer.failure.message
    assert listener.frames_refused == 1


async def test_garbage_from_a_stranger_is_refused_too(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.port.send(b"\xff")
    assert isinstance(await raw.hear(), FrameRefused)
    assert (listener.frames_refused, mail.events) == (1, [])


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_bytes_come_the_others_do_not_notice(
    autojump_clock: MockClock, world: World, seed: int
) -> None:
    """Frames with bytes changed, cut and doubled, from strangers and from peers."""
    rng = random.Random(seed)
    pair = await world.pair()
    raw = world.raw()
    await raw.hello()
    valid = [
        raw.frame(message)
        for message in (Note(number=1), Question(number=2), Ping(), Credit(taken=1), hello())
    ]
    for _ in range(200):
        frame = bytearray(rng.choice(valid))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(frame))
            match rng.randrange(3):
                case 0:
                    frame[at] = rng.randrange(256)
                case 1:
                    del frame[at:]
                    frame += b"\x00"
                case 2:
                    frame[at:at] = frame[: rng.randrange(8)]
        await raw.port.send(bytes(frame))
    await pair.connection.send(Note(number=4711))
    await pair.at_listener.wait_for(lambda: 4711 in pair.at_listener.numbers)
    assert pair.listener.hello(pair.key) is not None


@pytest.mark.parametrize("kind", ["nothing", "text", "an unknown message", "a torn frame"])
async def test_a_connection_counts_a_servers_garbage_and_goes_on(
    autojump_clock: MockClock, world: World, kind: str
) -> None:
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(mail := Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_welcome)
        ((key, _),) = await server.receive()
        welcome = Welcome(name="server", session="s", max_frame_bytes=9)
        for frame in (
            envelope(encode_body(welcome)),
            GARBAGE[kind],
            envelope(encode_body(Note(number=7))),
        ):
            server.send_nowait(key, frame)
    await mail.said()
    assert connection.frames_refused == 1
    assert connection.present


# Names that are taken.


REPLICA: dict[str, Any] = {"role": Role.REPLICA, "schema": schema_hash(Secret, Note)}


async def test_a_name_of_a_role_that_has_each_once_is_refused_while_its_holder_is_there(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail(), unique=(Role.REPLICA,))
    first, second = world.raw(), world.raw()
    assert isinstance(await first.hello(**REPLICA, instance="a"), Welcome)
    answer = await second.hello(**REPLICA, instance="b")
    assert isinstance(answer, Unwelcome)
    assert answer.failure.code == "NameInUse"
    assert answer.failure.message == "a replica named raw is there already"
    assert isinstance(await second.hello(**REPLICA | {"name": "another"}), Welcome)
    await mail.joined(2)
    assert mail.kinds == ["Joined", "Joined"]
    await first.say(Bye())
    await mail.left()
    assert isinstance(await second.hello(**REPLICA | {"incarnation": 2}), Welcome)
    listener.close()


async def test_a_holder_that_died_without_a_word_is_replaced(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail(), unique=(Role.REPLICA,))
    first, second = world.raw(), world.raw()
    await first.hello(**REPLICA)
    first.port.close()
    assert isinstance(await second.hello(**REPLICA), Welcome)
    await mail.joined(2)
    assert mail.kinds == ["Joined", "Left", "Joined"]


async def test_a_holder_that_is_silent_for_long_is_replaced_then(
    autojump_clock: MockClock, world: World
) -> None:
    """Its machine may have died: nothing says so but the silence."""
    world.listener(mail := Mail(), unique=(Role.REPLICA,))
    first, second = world.raw(), world.raw()
    await first.hello(**REPLICA)
    assert isinstance(await second.hello(**REPLICA), Unwelcome)
    await mail.left()
    assert isinstance(await second.hello(**REPLICA), Welcome)


async def test_a_holder_that_is_here_again_by_another_way_replaces_itself(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail(), unique=(Role.REPLICA,))
    first, second = world.raw(), world.raw()
    await first.hello(**REPLICA, instance="a")
    assert isinstance(await second.hello(**REPLICA, instance="a"), Welcome)
    await mail.joined(2)
    assert mail.kinds == ["Joined", "Left", "Joined"]


async def test_other_roles_may_have_a_name_twice(autojump_clock: MockClock, world: World) -> None:
    world.listener(Mail(), unique=(Role.REPLICA,))
    for _ in range(2):
        assert isinstance(await world.raw().hello(), Welcome)


async def test_who_is_refused_may_wait_for_its_welcome_again(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(Mail(), unique=(Role.CLIENT,))
    first, second = world.connection(Mail()), world.connection(there := Mail())
    await first.wait_welcome()
    for _ in range(2):
        with pytest.raises(NameInUse, match="a client named client is there already"):
            await second.wait_welcome()
    first.close()
    assert (await second.wait_welcome()).name == "server"
    assert second.present
    await there.joined()
    assert there.kinds == ["Joined"]


async def test_who_has_a_place_keeps_it_when_it_begins_anew(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail(), max_peers=2)
    raws = [world.raw() for _ in range(3)]
    answers = [await raw.hello() for raw in raws]
    assert [type(answer) for answer in answers] == [Welcome, Welcome, Unwelcome]
    assert answers[2].failure.code == "TooManyPeers"
    assert isinstance(await raws[0].hello(incarnation=2), Welcome)  # it has its place already
    await raws[1].say(Bye())
    await mail.left()
    assert isinstance(await raws[2].hello(), Welcome)


async def test_who_says_goodbye_has_left_for_good_and_who_is_lost_has_not(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    listener.drop(await mail.joined(), "cut off")
    await raw.hello(incarnation=2)
    await raw.say(Bye())
    await mail.left(2)
    assert [event.for_good for event in mail.events if isinstance(event, Left)] == [False, True]


async def test_what_is_for_one_session_does_not_get_into_the_next(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    await raw.hello(incarnation=2)
    await mail.joined(2)
    first, second = [event.session for event in mail.events if isinstance(event, Joined)]
    assert not listener.send(key, Note(number=1), session=first)
    assert listener.send(key, Note(number=2), session=second)
    assert (await raw.hear()).number == 2


async def test_a_connection_has_one_secret_in_all_its_sessions(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    one, other = world.connection(Mail()), world.connection(Mail())
    await one.wait_welcome()
    await other.wait_welcome()
    one._lose("cut off")
    await mail.joined(3)
    first, second, again = [event.hello for event in mail.events if isinstance(event, Joined)]
    assert again.incarnation != first.incarnation
    assert again.instance == first.instance != second.instance
    assert len(first.instance) == 32


# Credit.


async def test_how_much_a_peer_has_not_taken_is_known(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    for number in range(WINDOW + 100):
        listener.send(key, Note(number=number))
    assert listener.frames(key) == (WINDOW + 100, WINDOW + 100)
    await raw.say(Credit(taken=60))
    await wait_all_tasks_blocked()
    assert listener.frames(key) == (WINDOW + 100, WINDOW + 40)
    await raw.say(Credit(taken=10**9))  # it cannot have taken what was not sent
    await wait_all_tasks_blocked()
    assert listener.frames(key) == (WINDOW + 100, 40)
    assert listener.frames(b"somebody else") == (0, 0)


async def test_no_more_than_a_window_is_under_way_until_credit_comes(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    for number in range(WINDOW + 100):
        assert listener.send(key, Note(number=number))
    assert await raw.waiting() == WINDOW
    await raw.say(Credit(taken=60))
    assert await raw.waiting() == WINDOW + 60
    await raw.say(Credit(taken=WINDOW))
    assert await raw.waiting() == WINDOW + 100
    heard = [await raw.hear() for _ in range(WINDOW + 100)]
    assert [note.number for note in heard] == list(range(WINDOW + 100))


async def test_credit_that_goes_back_or_comes_twice_changes_nothing(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    for number in range(WINDOW + 100):
        listener.send(key, Note(number=number))
    for taken in (50, 50, 10, -7):
        await raw.say(Credit(taken=taken))
    assert await raw.waiting() == WINDOW + 50


async def test_credit_once_given_is_not_taken_back(autojump_clock: MockClock, world: World) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    for number in range(WINDOW):
        listener.send(key, Note(number=number))
    await raw.say(Credit(taken=100))
    await raw.say(Credit(taken=10))
    await wait_all_tasks_blocked()
    for number in range(100):
        listener.send(key, Note(number=number))
    assert await raw.waiting() == WINDOW + 100


async def test_frames_of_an_old_session_give_no_credit_in_a_new_one(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    await mail.joined()
    mail.open = trio.Event()  # its actor takes nothing for a while
    for number in range(WINDOW // 4):
        await raw.say(Note(number=number))
    await raw.hello(incarnation=2)
    mail.open.set()
    await mail.said(WINDOW // 4)
    assert await raw.waiting() == 0


async def test_frames_of_a_servers_old_session_give_it_no_credit_in_a_new_one(
    autojump_clock: MockClock, world: World
) -> None:
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(mail := Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_welcome)
        ((key, _),) = await server.receive()
        welcome = Welcome(name="server", session="1", max_frame_bytes=9)
        server.send_nowait(key, envelope(encode_body(welcome)))
    await mail.joined()
    mail.open = trio.Event()
    for number in range(WINDOW // 4):
        server.send_nowait(key, envelope(encode_body(Note(number=number))))
    again = msgspec.structs.replace(welcome, session="2")
    server.send_nowait(key, envelope(encode_body(again)))
    await wait_all_tasks_blocked()
    mail.open.set()
    await mail.joined(2)
    said = [decode_body(decode_frame(frame).body, ANYTHING) for frame in await drained(server)]
    assert not any(isinstance(message, Credit) for message in said)


async def test_a_taker_tells_its_credit_four_times_a_window(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    for number in range(WINDOW):
        await raw.say(Note(number=number))
    await mail.said(WINDOW)
    credits = [await raw.hear() for _ in range(4)]
    assert [credit.taken for credit in credits] == [WINDOW * part // 4 for part in (1, 2, 3, 4)]


async def test_a_connection_tells_what_it_has_taken_within_a_moment(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    for number in range(5):
        pair.listener.send(pair.key, Note(number=number))
    await wait_all_tasks_blocked()
    assert pair.listener.frames(pair.key) == (5, 5)
    await trio.sleep(PING_INTERVAL_S + 0.1)
    assert pair.listener.frames(pair.key) == (5, 0)


async def test_a_peer_that_takes_nothing_is_given_up_and_what_waits_for_it_is_bounded(
    autojump_clock: MockClock,
    world: World,
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    sent = 0
    while listener.send(key, Note(number=1)):
        sent += 1
    assert sent == WINDOW + OUTBOX
    assert not listener.send(key, Note(number=1))
    assert "wait for a peer that takes none" in await mail.left()
    assert listener.hello(key) is None


async def test_a_peer_that_was_given_up_stays_so_whatever_it_says_next(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    while listener.send(key, Note(number=1)):
        pass
    await raw.say(Credit(taken=WINDOW))  # too late: frames are lost, and nobody may miss them
    await raw.say(Ping())
    await mail.left()
    await raw.waiting()
    heard = [await raw.hear() for _ in range(WINDOW + 2)]
    assert heard[-2:] == [WhoAreYou(), WhoAreYou()]


async def test_a_peer_that_was_given_up_has_left_before_it_joins_again(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    while listener.send(key, Note(number=1)):
        pass
    await raw.hello()
    await mail.joined(2)
    assert mail.kinds == ["Joined", "Left", "Joined"]


async def test_a_sender_waits_for_credit_and_goes_on_in_order(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.at_listener.open = trio.Event()  # the listener's actor takes nothing
    async with trio.open_nursery() as nursery:

        async def send_all() -> None:
            for number in range(3 * WINDOW):
                await pair.connection.send(Note(number=number))

        nursery.start_soon(send_all)
        await wait_all_tasks_blocked()
        pair.at_listener.open.set()
    await pair.at_listener.said(3 * WINDOW)
    assert pair.at_listener.numbers == list(range(3 * WINDOW))


async def test_a_sender_that_does_not_wait_fills_the_outbox_and_ends_the_session(
    autojump_clock: MockClock,
    world: World,
) -> None:
    pair = await world.pair()
    pair.at_listener.open = trio.Event()
    for number in range(WINDOW + OUTBOX):
        pair.connection.send_nowait(Note(number=number))
    with pytest.raises(Unreachable, match="takes no messages"):
        pair.connection.send_nowait(Note(number=-1))
    assert not pair.connection.present
    pair.at_listener.open.set()
    assert "takes no messages" in await pair.at_connection.left()
    await pair.at_connection.joined(2)


async def test_a_peer_that_takes_no_notice_of_its_credit_is_dropped(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    await mail.joined()
    mail.open = trio.Event()  # its actor takes nothing
    for number in range(2 * WINDOW + 1):
        await raw.say(Note(number=number))
    await wait_all_tasks_blocked()
    mail.open.set()
    assert await mail.left() == "it sends more than it has credit for"
    assert mail.count(Said) == 2 * WINDOW


async def test_a_server_that_takes_no_notice_of_its_credit_is_lost(
    autojump_clock: MockClock, world: World
) -> None:
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(mail := Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_welcome)
        ((key, _),) = await server.receive()
        welcome = Welcome(name="server", session="s", max_frame_bytes=9)
        server.send_nowait(key, envelope(encode_body(welcome)))
    await mail.joined()
    mail.open = trio.Event()
    note = envelope(encode_body(Note(number=1)))
    for _ in range(2 * WINDOW + 2):
        server.send_nowait(key, note)
    await wait_all_tasks_blocked()
    mail.open.set()
    assert await mail.left() == "the server sends more than it has credit for"


async def test_credit_pings_and_answers_pass_by_an_actor_that_takes_nothing(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.at_connection.open = trio.Event()
    for number in range(WINDOW):
        pair.listener.send(pair.key, Note(number=number))
    for number in range(3 * WINDOW):  # needs the listener's credit
        await pair.connection.send(Note(number=number))
    await pair.at_listener.said(3 * WINDOW)
    await trio.sleep(2 * SILENCE_LIMIT_S)
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            said = await pair.at_listener.said(3 * WINDOW + 1)
            pair.listener.answer(pair.key, said[-1].message_id, 42)

        nursery.start_soon(answer)
        # The answer is behind a full window; it has credit of its own once the notes are taken.
        pair.at_connection.open.set()
        assert await pair.connection.ask(Question(number=1), timeout=5) == 42


# Asks.


async def answer_questions(listener: Listener, mail: Mail, answer: object) -> None:
    (said,) = await mail.said()
    listener.answer(said.peer, said.message_id, answer)


async def test_a_question_is_answered(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_questions, pair.listener, pair.at_listener, 42)
        assert await pair.connection.ask(Question(number=1), timeout=5) == 42


async def test_an_answer_may_be_an_error(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()
    error = RequestError("no such thing", field="number", allowed="2")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_questions, pair.listener, pair.at_listener, error)
        with pytest.raises(RequestError, match="no such thing") as caught:
            await pair.connection.ask(Question(number=1), timeout=5)
    assert (caught.value.field, caught.value.allowed) == ("number", "2")


async def test_an_answer_of_another_type_is_an_error_at_who_asked(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_questions, pair.listener, pair.at_listener, "many")
        with pytest.raises(WireError):
            await pair.connection.ask(Question(number=1), timeout=5)
    assert pair.connection.present


async def test_a_question_nobody_answers_fails_at_its_deadline(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    began = trio.current_time()
    with pytest.raises(DeadlineExceeded, match="no answer to Question in 5 s"):
        await pair.connection.ask(Question(number=1), timeout=5)
    assert trio.current_time() - began == pytest.approx(5)
    await answer_questions(pair.listener, pair.at_listener, 42)  # too late, and dropped
    await pair.connection.send(Note(number=1))
    await pair.at_listener.said(2)


async def test_the_time_left_for_an_answer_travels_with_the_question(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    with pytest.raises(DeadlineExceeded):
        await pair.connection.ask(Question(number=1), timeout=5)
    await pair.connection.send(Note(number=1))
    question, note = await pair.at_listener.said(2)
    assert question.timeout_s == pytest.approx(5)
    assert note.timeout_s is None


@pytest.mark.parametrize("timeout", [0.0, -1.0])
async def test_a_question_without_time_for_an_answer_is_not_asked(
    autojump_clock: MockClock, world: World, timeout: float
) -> None:
    pair = await world.pair()
    with pytest.raises(DeadlineExceeded):
        await pair.connection.ask(Question(number=1), timeout=timeout)
    await pair.connection.send(Note(number=2))
    (said,) = await pair.at_listener.said()
    assert said.message == Note(number=2)


@pytest.mark.parametrize("timeout", [1e10, 1e300, float("inf")])
async def test_a_question_may_wait_for_ever(
    autojump_clock: MockClock, world: World, timeout: float
) -> None:
    pair = await world.pair()
    answers = []

    async def ask() -> None:
        answers.append(await pair.connection.ask(Question(number=1), timeout=timeout))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        (said,) = await pair.at_listener.said()
        assert said.timeout_s is not None
        assert said.timeout_s > 1e9
        pair.listener.answer(said.peer, said.message_id, 42)
    assert answers == [42]


async def test_a_server_can_ask_too(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()

    async def answer() -> None:
        (said,) = await pair.at_connection.said()
        pair.connection.answer(said.message_id, 42)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        assert await pair.listener.ask(pair.key, Question(number=1), timeout=5) == 42


async def test_asking_a_stranger_or_without_a_session_fails_at_once(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    with pytest.raises(ActorStopped):
        await pair.listener.ask(b"stranger", Question(number=1), timeout=5)
    pair.connection.close()
    with pytest.raises(Unreachable):
        await pair.connection.ask(Question(number=1), timeout=5)


async def ask_until_it_fails(ask: Callable[[], Any], failed: list[CallboardError]) -> None:
    try:
        await ask()
    except CallboardError as error:
        failed.append(error)


@pytest.mark.parametrize("who", ["connection", "listener"])
async def test_questions_fail_at_once_when_the_one_asked_leaves(
    autojump_clock: MockClock, world: World, who: str
) -> None:
    pair, failed = await world.pair(), list[CallboardError]()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            if who == "connection":
                await pair.connection.ask(Question(number=1), timeout=100)
            else:
                await pair.listener.ask(pair.key, Question(number=1), timeout=100)

        nursery.start_soon(ask_until_it_fails, ask, failed)
        await wait_all_tasks_blocked()
        if who == "connection":
            pair.listener.close()
        else:
            pair.connection.close()
    assert [type(error) for error in failed] == [ActorStopped]
    assert trio.current_time() == began


async def test_questions_to_a_peer_that_begins_anew_fail_at_once(
    autojump_clock: MockClock, world: World
) -> None:
    listener, failed = world.listener(mail := Mail()), list[CallboardError]()
    raw = world.raw()
    await raw.hello()
    key = await mail.joined()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            await listener.ask(key, Question(number=1), timeout=100)

        nursery.start_soon(ask_until_it_fails, ask, failed)
        await wait_all_tasks_blocked()
        await raw.say(hello(incarnation=2))
    assert [type(error) for error in failed] == [ActorStopped]
    assert trio.current_time() == began


async def test_nobody_can_answer_for_somebody_else(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()
    raw = world.raw()
    await raw.hello()
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            (said,) = await pair.at_connection.said()
            body = msgspec.msgpack.encode([13, None])
            await raw.port.send(encode_frame(body, message_id=1, answers=said.message_id))
            await wait_all_tasks_blocked()
            pair.connection.answer(said.message_id, 42)

        nursery.start_soon(answer)
        assert await pair.listener.ask(pair.key, Question(number=1), timeout=5) == 42


# Silence.


async def test_a_silent_peer_is_pinged_and_then_dropped(
    autojump_clock: MockClock, world: World
) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    began = trio.current_time()
    assert "silent for" in await mail.left()
    assert trio.current_time() - began == pytest.approx(SILENCE_LIMIT_S, abs=PING_INTERVAL_S + 0.1)
    assert isinstance(await raw.hear(), Ping)


async def test_a_pong_is_a_sign_of_life(autojump_clock: MockClock, world: World) -> None:
    world.listener(mail := Mail())
    raw = world.raw()
    await raw.hello()
    until = trio.current_time() + 3 * SILENCE_LIMIT_S
    while trio.current_time() < until:
        if isinstance(await raw.hear(), Ping):
            await raw.say(Pong())
    assert mail.kinds == ["Joined"]


async def test_two_sides_with_nothing_to_say_stay_together(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    await trio.sleep(10 * SILENCE_LIMIT_S)
    assert (pair.at_listener.kinds, pair.at_connection.kinds) == (["Joined"], ["Joined"])


async def test_a_silent_server_is_lost_once_and_looked_for_every_second(
    autojump_clock: MockClock, world: World
) -> None:
    server = world.network.listen(ENDPOINT, max_frame_bytes=2**26)
    connection = world.connection(mail := Mail())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.wait_welcome)
        ((key, _),) = await server.receive()
        welcome = Welcome(name="server", session="s", max_frame_bytes=9)
        server.send_nowait(key, envelope(encode_body(welcome)))
    assert "silent for 16 s" in await mail.left()
    await trio.sleep(3 * SILENCE_LIMIT_S)
    assert mail.kinds == ["Joined", "Left"]
    last = decode_body(decode_frame((await drained(server))[-1]).body, Hello)
    assert last.incarnation == connection._incarnation
    with pytest.raises(Unreachable):
        connection.send_nowait(Note(number=1))


async def drained(server: ServerPort) -> list[bytes]:
    frames: list[bytes] = []
    with trio.move_on_after(0.01):
        while True:
            frames += [frame for _, frame in await server.receive()]
    return frames


async def test_a_session_one_side_believes_lost_is_begun_anew_by_both(
    autojump_clock: MockClock, world: World
) -> None:
    """The client alone was cut off for a while; the server never noticed."""
    pair = await world.pair()
    pair.connection._heard_at -= 2 * SILENCE_LIMIT_S
    await pair.at_connection.joined(2)
    await pair.at_listener.joined(2)
    assert pair.at_connection.kinds == ["Joined", "Left", "Joined"]


async def test_a_reader_that_is_held_up_by_its_own_actor_is_not_deaf(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.at_connection.open = trio.Event()
    pair.listener.send(pair.key, Note(number=1))
    await trio.sleep(5 * SILENCE_LIMIT_S)
    pair.at_connection.open.set()
    await trio.sleep(2 * SILENCE_LIMIT_S)
    assert pair.at_connection.kinds == ["Joined", "Said"]
    assert pair.at_listener.kinds == ["Joined"]


# Leaving, and coming back.


async def test_a_goodbye_is_heard_at_once(autojump_clock: MockClock, world: World) -> None:
    pair = await world.pair()
    began = trio.current_time()
    pair.connection.close()
    assert await pair.at_listener.left() == "left"
    assert trio.current_time() == began


async def test_a_closed_listener_says_goodbye_to_everybody(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.listener.close()
    pair.listener.close()
    assert await pair.at_connection.left() == "the server left"
    assert not pair.connection.present


async def test_a_closed_connection_says_nothing_more(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.connection.close()
    pair.connection.close()
    for say in (pair.connection.send_nowait, lambda note: pair.connection.answer(1, 2)):
        with pytest.raises(Unreachable):
            say(Note(number=1))
    with pytest.raises(Unreachable):
        await pair.connection.send(Note(number=1))


async def test_a_server_that_was_restarted_is_found_again(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    first = pair.connection.welcome
    pair.listener.close()
    await pair.at_connection.left()
    with pytest.raises(Unreachable):
        await pair.connection.send(Note(number=1))
    listener = world.listener(mail := Mail())
    await pair.at_connection.joined(2)
    second = pair.connection.welcome
    assert first is not None
    assert second is not None
    assert first.session != second.session
    await pair.connection.send(Note(number=2))
    listener.send(await mail.joined(), Note(number=3))
    await mail.said()
    await pair.at_connection.said()
    assert (mail.numbers, pair.at_connection.numbers) == ([2], [3])


async def test_a_server_that_died_without_a_word_is_found_again(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.listener._closed = True  # it reads no more, and says no goodbye
    pair.listener._port.close()
    world.listener(mail := Mail())
    await mail.joined()
    await pair.at_connection.joined(2)
    assert pair.at_connection.kinds == ["Joined", "Left", "Joined"]


async def test_a_peer_that_was_dropped_joins_again_in_a_new_session(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    pair.listener.drop(pair.key, "to see what happens")
    await pair.connection.send(Note(number=1))  # is lost with the session
    await pair.at_listener.joined(2)
    await pair.at_connection.joined(2)
    assert pair.at_listener.kinds == ["Joined", "Left", "Joined"]
    assert pair.at_connection.kinds == ["Joined", "Left", "Joined"]
    await pair.connection.send(Note(number=2))
    await pair.at_listener.said()
    assert pair.at_listener.numbers == [2]


async def test_a_sender_that_waits_for_credit_hears_when_the_session_ends(
    autojump_clock: MockClock, world: World
) -> None:
    pair, failed = await world.pair(), list[CallboardError]()
    pair.at_listener.open = trio.Event()

    async def send_all() -> None:
        for number in range(2 * WINDOW):
            await pair.connection.send(Note(number=number))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_until_it_fails, send_all, failed)
        await wait_all_tasks_blocked()
        pair.listener.close()
    assert [type(error) for error in failed] == [Unreachable]
    pair.at_listener.open.set()


async def test_credit_is_counted_from_nothing_in_a_new_session(
    autojump_clock: MockClock, world: World
) -> None:
    pair = await world.pair()
    for session in range(1, 4):
        for number in range(WINDOW - 1):
            await pair.connection.send(Note(number=number))
        await pair.at_listener.said(session * (WINDOW - 1))
        pair.listener.drop(pair.key, "to begin anew")
        await pair.at_connection.joined(session + 1)
    for number in range(3 * WINDOW):
        await pair.connection.send(Note(number=number))
    await pair.at_listener.said(3 * (WINDOW - 1) + 3 * WINDOW)


# Real sockets.


@pytest.fixture
async def zmq_world() -> AsyncIterator[World]:
    async with open_zmq_context() as context, running(ZmqNetwork(context)) as world:
        world.endpoint = "tcp://127.0.0.1:*"
        yield world


async def test_over_sockets_everything_arrives_in_order_both_ways(zmq_world: World) -> None:
    pair = await zmq_world.pair()
    for number in range(3 * WINDOW):
        await pair.connection.send(Note(number=number))
        pair.listener.send(pair.key, Note(number=-number))
    await pair.at_listener.said(3 * WINDOW)
    await pair.at_connection.said(3 * WINDOW)
    assert pair.at_listener.numbers == list(range(3 * WINDOW))
    assert pair.at_connection.numbers == [-number for number in range(3 * WINDOW)]


async def test_over_sockets_questions_are_answered_and_goodbyes_heard(zmq_world: World) -> None:
    pair = await zmq_world.pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_questions, pair.listener, pair.at_listener, 42)
        assert await pair.connection.ask(Question(number=1), timeout=5) == 42
    pair.connection.close()
    assert await pair.at_listener.left() == "left"


async def test_over_sockets_garbage_is_refused(zmq_world: World) -> None:
    listener = zmq_world.listener(Mail())
    raw = zmq_world.raw()
    await raw.hello()
    some = list(GARBAGE.values())[-BURST:]
    for frame in some:
        await raw.port.send(frame)
    answers = [await raw.hear() for _ in some]
    assert all(isinstance(answer, FrameRefused) for answer in answers)
    assert listener.frames_refused == len(some)
    raw.port.close()


async def test_over_sockets_a_dropped_peer_begins_a_new_session(zmq_world: World) -> None:
    pair = await zmq_world.pair()
    pair.listener.drop(pair.key, "to see what happens")
    await pair.connection.send(Note(number=1))
    await pair.at_connection.joined(2)
    await pair.connection.send(Note(number=2))
    await pair.at_listener.said()
    assert pair.at_listener.numbers == [2]


async def test_over_sockets_last_words_arrive_before_the_port_closes(zmq_world: World) -> None:
    """Without a goodbye that is answered, what a peer has not read yet goes with the socket."""
    pair = await zmq_world.pair()
    for number in range(500):
        pair.listener.send(pair.key, Note(number=number))

    await pair.listener.say_goodbye()
    pair.listener.close()

    await pair.at_connection.left()
    assert pair.at_connection.numbers == list(range(500))


async def test_a_goodbye_waits_no_longer_than_it_may_for_a_peer_that_does_not_read(
    autojump_clock: MockClock, world: World
) -> None:
    listener = world.listener(Mail())
    raw = world.raw()
    await raw.hello()
    began = trio.current_time()

    await listener.say_goodbye(timeout=2.0)

    assert trio.current_time() - began == pytest.approx(2.0)
    raw.port.close()
