"""What any network promises to a session, over memory and over real sockets; then own ways."""

import errno
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import zmq
from trio.testing import wait_all_tasks_blocked

from callboard.actors.transport import (
    FRAMES_PER_RECEIVE,
    ClientPort,
    MemoryNetwork,
    Network,
    PeerKey,
    ServerPort,
    ZmqNetwork,
)
from callboard.actors.zmq_socket import EndpointError, PeerGone, open_zmq_context

MAX_FRAME_BYTES = 1024
TIMEOUT_S = 5

ENDPOINTS = {"memory": "memory://here", "zmq": "tcp://127.0.0.1:*"}


@pytest.fixture(params=["memory", "zmq"])
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    if request.param == "memory":
        yield MemoryNetwork()
    else:
        async with open_zmq_context() as context:
            yield ZmqNetwork(context)


@asynccontextmanager
async def listening(network: Network) -> AsyncGenerator[ServerPort]:
    kind = "memory" if isinstance(network, MemoryNetwork) else "zmq"
    server = network.listen(ENDPOINTS[kind], max_frame_bytes=MAX_FRAME_BYTES)
    try:
        with trio.fail_after(TIMEOUT_S):
            yield server
    finally:
        server.close()


def free_endpoint(network: Network) -> str:
    if isinstance(network, MemoryNetwork):
        return ENDPOINTS["memory"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


async def listen_when_free(network: Network, endpoint: str) -> ServerPort:
    """Listen where another port was closed just now; a TCP port takes a moment to be free."""
    with trio.fail_after(TIMEOUT_S):
        while True:
            try:
                return network.listen(endpoint, max_frame_bytes=MAX_FRAME_BYTES)
            except EndpointError:
                await trio.lowlevel.checkpoint()


def connect(network: Network, endpoint: str) -> ClientPort:
    return network.connect(endpoint, max_frame_bytes=MAX_FRAME_BYTES)


async def hear(server: ServerPort, count: int) -> list[tuple[PeerKey, bytes]]:
    heard: list[tuple[PeerKey, bytes]] = []
    while len(heard) < count:
        heard += await server.receive()
    return heard


async def read(client: ClientPort, count: int) -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        got += await client.receive()
    return got


async def test_frames_go_both_ways_in_order(network: Network) -> None:
    async with listening(network) as server:
        client = connect(network, server.endpoint)
        sent = [b"%d" % number for number in range(200)]
        for frame in sent:
            await client.send(frame)
        heard = await hear(server, 200)
        assert [frame for _, frame in heard] == sent
        (key,) = {key for key, _ in heard}
        for frame in sent:
            server.send_nowait(key, frame)
        assert await read(client, 200) == sent
        client.close()


async def test_each_client_has_a_key_of_its_own(network: Network) -> None:
    async with listening(network) as server:
        clients = [connect(network, server.endpoint) for _ in range(3)]
        for number, client in enumerate(clients):
            await client.send(b"%d" % number)
        keys = {frame: key for key, frame in await hear(server, 3)}
        assert len(set(keys.values())) == 3
        for number, client in enumerate(clients):
            server.send_nowait(keys[b"%d" % number], b"to %d" % number)
            assert await read(client, 1) == [b"to %d" % number]
            client.close()


async def test_a_receive_returns_what_is_there_up_to_a_limit(network: Network) -> None:
    async with listening(network) as server:
        client = connect(network, server.endpoint)
        for _ in range(FRAMES_PER_RECEIVE + 10):
            await client.send(b"x")
        counts: list[int] = []
        while sum(counts) < FRAMES_PER_RECEIVE + 10:
            counts.append(len(await server.receive()))
        assert max(counts) <= FRAMES_PER_RECEIVE
        client.close()


async def test_sending_to_nobody_is_an_error(network: Network) -> None:
    async with listening(network) as server:
        with pytest.raises(PeerGone):
            server.send_nowait(b"nobody here", b"x")


async def test_without_a_server_a_client_waits_or_is_told_that_it_would(network: Network) -> None:
    endpoint = free_endpoint(network)
    client = connect(network, endpoint)
    with pytest.raises(trio.WouldBlock):
        client.send_nowait(b"now")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send, b"later")
        await wait_all_tasks_blocked()
        with trio.fail_after(TIMEOUT_S):
            server = network.listen(endpoint, max_frame_bytes=MAX_FRAME_BYTES)
            assert [frame for _, frame in await hear(server, 1)] == [b"later"]
    client.close()
    server.close()


async def test_an_endpoint_is_taken_until_it_is_closed(network: Network) -> None:
    async with listening(network) as server:
        with pytest.raises(EndpointError) as caught:
            network.listen(server.endpoint, max_frame_bytes=MAX_FRAME_BYTES)
        assert caught.value.errno == errno.EADDRINUSE
    (await listen_when_free(network, server.endpoint)).close()


async def test_closing_ends_a_receive_and_is_harmless_when_repeated(network: Network) -> None:
    async with listening(network) as server:
        client = connect(network, server.endpoint)

        async def until_closed(port: ServerPort | ClientPort) -> None:
            with pytest.raises(trio.ClosedResourceError):
                await port.receive()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_closed, server)
            nursery.start_soon(until_closed, client)
            await wait_all_tasks_blocked()
            client.close()
            server.close()
        client.close()
        server.close()
        for port in (client, server):
            await until_closed(port)


# Memory's own ways.


async def test_a_memory_client_that_closed_is_gone_at_once() -> None:
    network = MemoryNetwork()
    async with listening(network) as server:
        client = connect(network, server.endpoint)
        await client.send(b"x")
        ((key, _),) = await hear(server, 1)
        client.close()
        with pytest.raises(PeerGone):
            server.send_nowait(key, b"y")
        with pytest.raises(trio.ClosedResourceError):
            client.send_nowait(b"z")


async def test_a_memory_client_is_a_stranger_to_a_server_that_was_restarted() -> None:
    network = MemoryNetwork()
    async with listening(network) as server:
        client = connect(network, server.endpoint)
        await client.send(b"x")
        ((key, _),) = await hear(server, 1)
    async with listening(network) as server:
        with pytest.raises(PeerGone):
            server.send_nowait(key, b"y")
        await client.send(b"z")
        assert await hear(server, 1) == [(key, b"z")]
        server.send_nowait(key, b"y")
        assert await read(client, 1) == [b"y"]


async def test_memory_networks_know_nothing_of_each_other() -> None:
    async with listening(MemoryNetwork()) as server:
        stranger = connect(MemoryNetwork(), server.endpoint)
        with pytest.raises(trio.WouldBlock):
            stranger.send_nowait(b"x")


# ZMQ's own ways.


@pytest.mark.parametrize("parts", [[b"", b"x"], [b"a", b"b", b"c"]])
async def test_a_message_of_several_parts_is_no_frame(parts: list[bytes]) -> None:
    async with open_zmq_context() as context, listening(ZmqNetwork(context)) as server:
        with zmq.Context() as foreign, foreign.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(server.endpoint)
            dealer.send_multipart(parts)
            assert [frame for _, frame in await hear(server, 1)] == [b""]


async def test_a_tcp_server_says_which_port_it_got() -> None:
    async with open_zmq_context() as context, listening(ZmqNetwork(context)) as server:
        assert int(server.endpoint.removeprefix("tcp://127.0.0.1:")) > 0


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://nowhere.invalid:1", "tcp://127.0.0.1:x"])
async def test_an_endpoint_that_cannot_be_is_refused_and_nothing_stays_open(endpoint: str) -> None:
    async with open_zmq_context() as context:
        with pytest.raises(EndpointError):
            ZmqNetwork(context).listen(endpoint, max_frame_bytes=MAX_FRAME_BYTES)
