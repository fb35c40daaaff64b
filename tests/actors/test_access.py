"""Who gets in, as what, and for how long: keys, roles and limits over real sockets."""

import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from callboard.actors import transport
from callboard.actors.curve import AllowedKey, ClientKeys, KeyPair, ServerKeys
from callboard.actors.door import Door
from callboard.actors.patience import BURST
from callboard.actors.session import Connection, Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import ZmqNetwork, open_zmq_network
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.base import Message
from callboard.messages.codec import decode_body, decode_frame
from callboard.messages.errors import (
    AccessDenied,
    CallboardError,
    TooManyPeers,
    Unreachable,
)
from callboard.messages.membership import FrameRefused, Role, Welcome

TIMEOUT_S = 10.0
SERVER = KeyPair.make()
CLIENT, OPERATOR, REPLICA, STRANGER = (KeyPair.make() for _ in range(4))


class Note(Message, frozen=True):
    """Either way."""

    text: str


class Guests:
    """An allow-list that a test changes."""

    def __init__(self) -> None:
        self.keys = {
            pair.public: AllowedKey(name, pair.public, role)
            for name, pair, role in (
                ("carol", CLIENT, Role.CLIENT),
                ("oscar", OPERATOR, Role.OPERATOR),
                ("rob", REPLICA, Role.REPLICA),
            )
        }
        self.refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1

    def find(self, public: str) -> AllowedKey | None:
        return self.keys.get(public)


class Place:
    """A listener, what it hears, and connections to it that are closed in the end."""

    def __init__(self, system: ActorSystem, network: ZmqNetwork, nursery: trio.Nursery) -> None:
        self.system = system
        self.network = network
        self.guests = Guests()
        self.events: list[Said | Joined | Left] = []
        self.heard_there: list[Said | Joined | Left] = []
        self.listener: Listener
        self.nursery = nursery
        self._news = trio.Event()

    def listen(self, endpoint: str = "tcp://127.0.0.1:*", **options: Any) -> None:
        self.listener = Listener(
            self.system,
            self.network,
            endpoint,
            name="server",
            inboxes=dict.fromkeys(Role, Note),
            outboxes=dict.fromkeys(Role, Note),
            welcome=lambda session: Welcome(name="server", session=session, max_frame_bytes=9),
            deliver=self._hear,
            **options,
        )
        self.nursery.start_soon(self.listener.run)

    def connect(self, network: ZmqNetwork, role: Role = Role.CLIENT, name: str = "c") -> Connection:
        async def hear(event: Said | Joined | Left) -> None:
            self.heard_there.append(event)
            self._news.set()

        connection = Connection(
            self.system,
            network,
            self.listener.endpoint,
            role=role,
            name=name,
            inbox=Note,
            outbox=Note,
            deliver=hear,
        )
        self.nursery.start_soon(connection.run)
        return connection

    async def until(self, found: Callable[[], bool]) -> None:
        while not found():
            self._news = trio.Event()
            await self._news.wait()

    def heard(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def _hear(self, event: Said | Joined | Left) -> None:
        self.events.append(event)
        self._news.set()


@asynccontextmanager
async def open_place(*, keyed: bool = True) -> AsyncGenerator[Place]:
    guests = Guests()
    keys = ServerKeys(SERVER, guests) if keyed else None
    with trio.fail_after(TIMEOUT_S):
        async with (
            open_zmq_network(server_keys=keys) as network,
            open_system() as system,
            trio.open_nursery() as nursery,
        ):
            place = Place(system, network, nursery)
            place.guests = guests
            yield place
            if hasattr(place, "listener"):
                place.listener.close()
            nursery.cancel_scope.cancel("the test is over")


@asynccontextmanager
async def dialing(pair: KeyPair | None, server: str = SERVER.public) -> AsyncGenerator[ZmqNetwork]:
    """Open the network of another process that has these keys."""
    keys = None if pair is None else ClientKeys(pair, server)
    async with open_zmq_network(client_keys=keys) as network:
        yield network


async def refusal(place: Place, pair: KeyPair | None, role: Role = Role.CLIENT) -> CallboardError:
    """Say hello, and return why that is refused."""
    async with dialing(pair) as network:
        connection = place.connect(network, role)
        with pytest.raises(CallboardError) as caught:
            await connection.wait_welcome(TIMEOUT_S)
        connection.close()
    return caught.value


# Keys.


@pytest.mark.parametrize(
    ("pair", "role"),
    [
        (CLIENT, Role.CLIENT),
        (OPERATOR, Role.CLIENT),
        (OPERATOR, Role.OPERATOR),
        (REPLICA, Role.REPLICA),
    ],
    ids=["client", "operator as client", "operator", "replica"],
)
async def test_a_key_opens_what_its_role_is_for(pair: KeyPair, role: Role) -> None:
    async with open_place() as place, dialing(pair) as network:
        place.listen()
        connection = place.connect(network, role)

        await connection.wait_welcome()
        await connection.send(Note(text="hello"))
        await place.until(lambda: bool(place.heard(Said)))

        assert place.heard(Said)[0].message == Note(text="hello")
        connection.close()


@pytest.mark.parametrize(
    ("pair", "name", "has", "wants"),
    [
        (CLIENT, "carol", Role.CLIENT, Role.OPERATOR),
        (CLIENT, "carol", Role.CLIENT, Role.REPLICA),
        (OPERATOR, "oscar", Role.OPERATOR, Role.REPLICA),
        (REPLICA, "rob", Role.REPLICA, Role.OPERATOR),
    ],
)
async def test_a_role_that_a_key_does_not_have_is_refused_with_both_names(
    pair: KeyPair, name: str, has: Role, wants: Role
) -> None:
    async with open_place() as place:
        place.listen()

        error = await refusal(place, pair, wants)

    assert isinstance(error, AccessDenied)
    assert error.message == (
        f"the key {pair.public} ({name}) has the role {has} and may not be used as {wants}"
    )
    assert place.events == []


async def test_a_key_that_is_not_on_the_list_is_refused_by_name() -> None:
    async with open_place() as place:
        place.listen()

        error = await refusal(place, STRANGER)

    assert isinstance(error, AccessDenied)
    assert f"does not let in the key {STRANGER.public}" in error.message
    assert place.guests.refreshed > 0


async def test_whoever_has_no_key_is_told_that_one_is_needed() -> None:
    async with open_place() as place:
        place.listen()

        error = await refusal(place, None)

    assert isinstance(error, AccessDenied)
    assert "lets in nobody without keys" in error.message


async def test_whoever_has_keys_says_nothing_in_the_clear() -> None:
    async with open_place(keyed=False) as place:
        place.listen()

        error = await refusal(place, CLIENT)

    assert isinstance(error, AccessDenied)
    assert "has no keys, and with keys set nothing is sent in the clear" in error.message


async def test_a_server_with_another_key_is_not_the_one_that_is_meant() -> None:
    async with open_place() as place:
        place.listen()
        async with dialing(CLIENT, server=STRANGER.public) as network:
            connection = place.connect(network)
            with pytest.raises(Unreachable):
                await connection.wait_welcome(0.3)
            connection.close()


async def test_without_an_authenticator_nobody_gets_in() -> None:
    """libzmq would let everybody in who knows the server's public key."""
    async with open_place() as place, open_zmq_context() as context, dialing(CLIENT) as network:
        place.network = ZmqNetwork(context, server_keys=ServerKeys(SERVER, place.guests))
        place.listen()
        connection = place.connect(network)

        with pytest.raises(Unreachable):
            await connection.wait_welcome(0.3)
        connection.close()
        place.listener.close()


async def test_an_ipc_endpoint_needs_no_keys_beside_one_that_does(tmp_path: Path) -> None:
    async with open_place() as place, dialing(CLIENT) as network:
        place.listen(f"ipc://{tmp_path / 'socket'}")
        connection = place.connect(network, Role.REPLICA)

        await connection.wait_welcome()
        connection.close()


async def test_what_is_said_cannot_be_read_on_the_way() -> None:
    async with open_place() as place, dialing(CLIENT) as network:
        place.listen()
        wire: list[bytes] = []
        relay = await place.nursery.start(
            pass_on, int(place.listener.endpoint.split(":")[-1]), wire
        )
        place.listener._port.endpoint = relay  # type: ignore[misc]  # where the client connects
        connection = place.connect(network)
        await connection.wait_welcome()
        await connection.send(Note(text="attack at dawn"))
        await place.until(lambda: bool(place.heard(Said)))

        assert len(wire) > 3
        assert b"attack at dawn" not in b"".join(wire)
        connection.close()


async def pass_on(port: int, wire: list[bytes], task_status: trio.TaskStatus[str]) -> None:
    """Relay TCP connections to a port, and write down what is said."""

    async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        with trio.CancelScope():
            async for chunk in source:
                wire.append(bytes(chunk))
                await sink.send_all(chunk)

    async def relay(near: trio.SocketStream) -> None:
        async with (
            await trio.open_tcp_stream("127.0.0.1", port) as far,
            trio.open_nursery() as both,
        ):
            both.start_soon(copy, near, far)
            both.start_soon(copy, far, near)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(f"tcp://127.0.0.1:{listener.socket.getsockname()[1]}")
    await trio.serve_listeners(relay, [listener])


# Keys that are taken away.


async def test_a_key_that_is_taken_away_ends_its_sessions_and_no_other() -> None:
    async with open_place() as place, dialing(CLIENT) as one, dialing(OPERATOR) as other:
        place.listen()
        gone, kept = place.connect(one, name="gone"), place.connect(other, name="kept")
        await gone.wait_welcome()
        await kept.wait_welcome()

        del place.guests.keys[CLIENT.public]
        await place.until(lambda: bool(place.heard(Left)))

        await place.until(lambda: any(isinstance(event, Left) for event in place.heard_there))
        [left] = [event for event in place.heard_there if isinstance(event, Left)]
        assert left.for_good
        assert left.reason == f"the key {CLIENT.public} is not on the list of this server"
        assert isinstance(await refusal(place, CLIENT), AccessDenied)
        await kept.send(Note(text="I am"))
        await place.until(lambda: Note(text="I am") in [said.message for said in place.heard(Said)])
        gone.close()
        kept.close()


async def test_a_key_that_is_put_on_the_list_gets_in_at_once() -> None:
    async with open_place() as place:
        place.listen()
        assert isinstance(await refusal(place, STRANGER), AccessDenied)

        place.guests.keys[STRANGER.public] = AllowedKey("new", STRANGER.public, Role.CLIENT)

        async with dialing(STRANGER) as network:
            connection = place.connect(network)
            await connection.wait_welcome()
            connection.close()


async def test_a_routing_id_of_another_key_is_another_peer() -> None:
    async with open_place() as place:
        place.listen()
        port: Any = place.listener._port
        peers = []
        for pair in (CLIENT, OPERATOR):
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.routing_id = b"just me"
                dealer.curve_serverkey = SERVER.public.encode()
                dealer.curve_publickey = pair.public.encode()
                dealer.curve_secretkey = pair.secret.encode()
                dealer.connect(place.listener.endpoint)
                dealer.send(b"\xc1")
                assert await trio.to_thread.run_sync(dealer.poll, 5000)
                peers.append(next(reversed(port._fds)))

    assert peers == [b"just me" + pair.public.encode() for pair in (CLIENT, OPERATOR)]


# Limits.


@pytest.fixture
def hasty_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers get half a second, and there is room for four."""
    monkeypatch.setattr(transport, "Door", lambda: Door(max_newcomers=4, newcomer_s=0.5))
    monkeypatch.setattr(transport, "DOOR_INTERVAL_S", 0.02)


def dial(endpoint: str) -> trio.SocketStream:
    """Connect to a TCP endpoint as no ZMQ socket would."""
    raw = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    return trio.SocketStream(trio.socket.from_stdlib_socket(raw))


async def ended(stream: trio.SocketStream) -> bool:
    """Read until the other side ends the connection."""
    try:
        while await stream.receive_some():
            pass
    except trio.BrokenResourceError:
        pass
    await stream.aclose()
    return True


@pytest.mark.usefixtures("hasty_door")
@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
async def test_who_connects_and_says_nothing_is_cut_off(keyed: bool) -> None:
    async with open_place(keyed=keyed) as place, dialing(CLIENT if keyed else None) as network:
        place.listen()
        connection = place.connect(network)
        await connection.wait_welcome()

        assert await ended(dial(place.listener.endpoint))

        await connection.send(Note(text="I am here"))
        await place.until(lambda: bool(place.heard(Said)))
        assert place.heard(Left) == []
        connection.close()


@pytest.mark.usefixtures("hasty_door")
async def test_who_speaks_zmq_and_never_says_hello_is_cut_off(tmp_path: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:*", f"ipc://{tmp_path / 'socket'}"):
        async with open_place(keyed=False) as place, open_zmq_context() as context:
            place.listen(endpoint)
            with context.dealer(max_message_bytes=2048, send_hwm=9, receive_hwm=9) as dealer:
                monitor = dealer.monitor(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
                dealer.connect(place.listener.endpoint)

                kinds = [(await monitor.receive()).kind for _ in range(2)]

            assert kinds == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]


@pytest.mark.usefixtures("hasty_door")
@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "no keys"])
async def test_noise_that_passes_for_an_old_protocol_is_no_harm(keyed: bool) -> None:
    """To libzmq a length, flags and so many bytes are a routing id, and then a message."""
    async with open_place(keyed=keyed) as place, dialing(CLIENT if keyed else None) as network:
        place.listen()
        noise = dial(place.listener.endpoint)
        await noise.send_all(b"\x01\x00" + b"\x04\x00abc" * 3)

        assert await ended(noise)

        assert place.listener.frames_refused == (0 if keyed else 3)
        connection = place.connect(network)
        await connection.wait_welcome()
        connection.close()


@pytest.mark.usefixtures("hasty_door")
async def test_a_crowd_that_says_nothing_keeps_nobody_out() -> None:
    async with open_place(keyed=False) as place, dialing(None) as network:
        place.listen()
        crowd = [dial(place.listener.endpoint) for _ in range(20)]

        connection = place.connect(network)
        await connection.wait_welcome()

        door: Door = place.listener._port._door  # type: ignore[attr-defined]
        assert all([await ended(stream) for stream in crowd])
        assert door.num_guests == 1
        assert connection.present
        connection.close()


@pytest.mark.usefixtures("hasty_door")
async def test_whose_session_is_over_may_begin_another_one() -> None:
    async with open_place(keyed=False) as place, dialing(None) as network:
        place.listen()
        connection = place.connect(network)
        await connection.wait_welcome()
        await place.until(lambda: len(place.heard(Joined)) == 1)

        place.listener.drop(place.heard(Joined)[0].peer, "to see what happens")
        await connection.send(Note(text="lost"))

        await place.until(lambda: len(place.heard(Joined)) == 2)
        assert place.heard(Joined)[1].peer == place.heard(Joined)[0].peer
        connection.close()


async def test_who_has_much_under_way_when_its_session_ends_is_not_cut_off() -> None:
    async with open_place(keyed=False) as place, dialing(None) as network:
        place.listen()
        connection = place.connect(network)
        await connection.wait_welcome()
        await place.until(lambda: len(place.heard(Joined)) == 1)

        place.listener.drop(place.heard(Joined)[0].peer, "to see what happens")
        for _ in range(500):
            connection.send_nowait(Note(text="lost"))

        await place.until(lambda: len(place.heard(Joined)) == 2)
        await place.until(lambda: connection.present)
        await connection.send(Note(text="not lost"))
        await place.until(lambda: bool(place.heard(Said)))
        assert place.heard(Joined)[1].peer == place.heard(Joined)[0].peer
        assert place.listener.peers_cut_off == 0
        connection.close()


async def test_who_sends_garbage_is_answered_some_times_and_then_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "DOOR_INTERVAL_S", 0.5)
    async with open_place(keyed=False) as place, dialing(None) as network:
        place.listen()
        good = place.connect(network, name="good")
        await good.wait_welcome()
        async with open_zmq_context() as context:
            with context.dealer(max_message_bytes=2048, send_hwm=5000, receive_hwm=99) as dealer:
                monitor = dealer.monitor(zmq.EVENT_DISCONNECTED)
                dealer.connect(place.listener.endpoint)
                for _ in range(1000):
                    await dealer.send([b"\xc1garbage"])
                answers: list[bytes] = []
                while len(answers) < BURST:
                    answers += [frames[0] for frames in await dealer.receive_batch(100)]
                await monitor.receive()
                await good.send(Note(text="still served"))
                await place.until(lambda: bool(place.heard(Said)))

        assert len(answers) == BURST
        assert all(
            isinstance(decode_body(decode_frame(answer).body, FrameRefused), FrameRefused)
            for answer in answers
        )
        assert place.listener.peers_cut_off == 1
        assert BURST < place.listener.frames_refused <= 1000
        assert good.present
        good.close()


async def test_no_more_peers_of_a_role_are_welcome_than_there_is_room_for() -> None:
    async with open_place(keyed=False) as place, dialing(None) as network:
        place.listen(max_peers=2)
        first = [place.connect(network, name=f"{number}") for number in range(2)]
        for connection in first:
            await connection.wait_welcome()

        error = await refusal(place, None)
        other_role = place.connect(network, Role.REPLICA)
        await other_role.wait_welcome()
        first[0].close()
        await place.until(lambda: bool(place.heard(Left)))
        late = place.connect(network)
        await late.wait_welcome()

        assert isinstance(error, TooManyPeers)
        assert error.message == "server has 2 peers that are client, and takes no more"
        for connection in (first[1], other_role, late):
            connection.close()
