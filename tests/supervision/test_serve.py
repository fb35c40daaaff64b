"""The server, whole: sockets, signals and replica processes whose model is a script."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.session import Connection
from callboard.actors.system import open_system
from callboard.actors.transport import open_zmq_network
from callboard.messages.base import unpack_ids
from callboard.messages.control import NodeStatus, ReplicaStatus, State, StatusReply
from callboard.messages.errors import (
    AccessDenied,
    ActorStopped,
    CallboardError,
    ConfigError,
    DeadlineExceeded,
    StartFailed,
    Unreachable,
)
from callboard.messages.membership import Role
from callboard.messages.requests import FinishReason
from callboard.supervision import process
from callboard.supervision.engine import Engine, connect
from callboard.supervision.keys import add_key, make_keys
from callboard.supervision.root import REPLICAS
from callboard.supervision.serve import serve
from callboard.supervision.settings import Settings
from callboard.supervision.stream import RequestStream

pytestmark = pytest.mark.usefixtures("scripted_replicas")


class Server:
    """A running server: what it said, and how it ended."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.said: list[str] = []
        self.news = trio.Event()
        self.ended = trio.Event()

    async def run(self) -> None:
        await serve(self.settings, announce=self._announce)
        self.ended.set()

    def _announce(self, line: str) -> None:
        self.said.append(line)
        self.news.set()

    async def says(self, words: str) -> None:
        """Wait until it says something."""
        while not any(words in line for line in self.said):
            self.news = trio.Event()
            await self.news.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a server may put temporary files into."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


@asynccontextmanager
async def running(folder: Path, **overrides: object) -> AsyncIterator[Server]:
    """Run a server until it ends by itself or the block does."""
    listen = f"ipc://{folder / 'server'}"
    server = Server(Settings(**{"listen": listen, **overrides}))  # type: ignore[arg-type]
    with trio.fail_after(30.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            yield server
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def ready(folder: Path, **overrides: object) -> AsyncIterator[tuple[Server, Engine]]:
    """Run a server that has started, and connect to it."""
    async with running(folder, **overrides) as server:
        await server.says("ready at")
        async with connect(server.settings.listen) as engine:
            yield server, engine


async def replica(engine: Engine) -> ReplicaStatus:
    [one] = (await engine.status()).replicas
    return one


def part(status: StatusReply, name: str) -> NodeStatus:
    """Return a part of the tree right below root."""
    return next(node for node in status.tree.children if node.name == name)


async def read(stream: RequestStream, num_tokens: int) -> list[int]:
    """Read so many tokens of a stream."""
    tokens: list[int] = []
    async for delta in stream:
        tokens += unpack_ids(delta.token_ids)
        if len(tokens) >= num_tokens:
            break
    return tokens


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Start and stop


async def test_a_server_says_where_it_is_ready_serves_and_stops_when_told(folder: Path) -> None:
    async with ready(folder) as (server, engine):
        answers = await engine.generate([[n] for n in range(8)], max_tokens=5)
        pid = (await replica(engine)).pid
        stopped = await engine.stop()
        await server.ended.wait()

    assert [answer.token_ids[-1] for answer in answers] == [n + 5 for n in range(8)]
    assert server.said == [f"callboard: ready at {server.settings.listen}"]
    assert pid != os.getpid()
    assert stopped.state is State.STOPPED
    assert not is_alive(pid)
    assert left_in(folder) == []


async def test_the_processes_of_all_replicas_step(folder: Path) -> None:
    async with ready(folder, replicas=2) as (_, engine):
        await engine.pause()
        requests = [await engine.add_request(f"{n}", [n], max_tokens=9) for n in range(4)]

        reply = await engine.step(3)

        assert (reply.steps, reply.requests, reply.state) == (6, 4, State.PAUSED)
        assert [await read(request, 3) for request in requests] == [
            [n + 1, n + 2, n + 3] for n in range(4)
        ]


async def test_a_port_of_zero_is_filled_in(folder: Path) -> None:
    async with running(folder, listen="tcp://127.0.0.1:0") as server:
        await server.says("ready at tcp://127.0.0.1:")
        endpoint = server.said[0].split()[-1]

        async with connect(endpoint) as engine:
            assert (await engine.status()).endpoint == endpoint
            assert (await engine.pause()).done


async def test_a_server_open_to_all_tells_each_client_where_it_may_send_verbs(
    folder: Path,
) -> None:
    async with running(folder, listen="tcp://0.0.0.0:0", insecure=True) as server:
        await server.says("ready at tcp://0.0.0.0:")
        port = server.said[0].rpartition(":")[2]

        async with connect(f"tcp://127.0.0.1:{port}") as engine:
            assert (await engine.pause()).done


async def test_clients_of_a_server_that_stopped_get_typed_errors(folder: Path) -> None:
    async with ready(folder) as (server, engine):
        await engine.stop()
        await server.ended.wait()

        for attempt in (engine.pause(), engine.status(), engine.generate([[5]])):
            with pytest.raises((ActorStopped, Unreachable)):
                await attempt


async def test_status_can_be_had_while_the_replica_starts(folder: Path) -> None:
    async with running(folder) as server, connect(server.settings.listen) as engine:
        began = time.monotonic()
        status = await engine.status()
        took = time.monotonic() - began

        [one] = status.replicas
        assert status.state is one.state is State.STARTING
        assert one.pid != os.getpid()
        assert took < 1.0
        assert (await engine.wait_for(State.RUNNING, timeout=10.0)).state is State.RUNNING


async def test_an_endpoint_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        with pytest.raises(StartFailed, match=f"in use: '{endpoint}'"):
            await serve(Settings(listen=endpoint), announce=lambda line: None)

    assert left_in(folder) == []


async def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(StartFailed, match="nowhere/server"):
        await serve(Settings(listen=f"ipc://{folder}/nowhere/server"), announce=lambda line: None)


async def test_a_replica_that_does_not_start_is_the_reason_the_server_does_not(
    folder: Path,
) -> None:
    settings = Settings(listen=f"ipc://{folder / 'server'}", model="missing.gguf")

    with pytest.raises(StartFailed) as failed:
        await serve(settings, announce=lambda line: None)

    assert str(failed.value) == "replica-0 did not start: missing.gguf: no such file"
    assert left_in(folder) == []


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_lets_open_requests_finish(
    folder: Path, number: signal.Signals
) -> None:
    async with ready(folder) as (server, engine):
        async with engine.submit([0], max_tokens=150) as stream:
            await read(stream, 1)
            signal.raise_signal(number)
            answer = await stream.completion()
        await server.ended.wait()

    assert answer.token_ids == list(range(1, 151))
    assert any(number.name in line for line in server.said)


async def test_the_second_signal_ends_open_requests_now(folder: Path) -> None:
    async with ready(folder) as (server, engine):
        async with engine.submit([0], max_tokens=200, timeout_s=600) as stream:
            await engine.pause()
            await engine.unpause()
            signal.raise_signal(signal.SIGINT)
            await server.says("SIGINT, stopping")
            signal.raise_signal(signal.SIGINT)
            answer = await stream.completion()
        await server.ended.wait()

    assert answer.finish_reason is FinishReason.ABORT
    assert server.said[-1] == "callboard: SIGINT again, stopping now"


async def test_a_signal_to_a_paused_server_does_not_wait_for_what_cannot_run(
    folder: Path,
) -> None:
    async with ready(folder) as (server, engine):
        await engine.pause()
        async with engine.submit([0], max_tokens=50) as stream:
            began = time.monotonic()
            signal.raise_signal(signal.SIGTERM)
            answer = await stream.completion()
        await server.ended.wait()

    assert answer.finish_reason is FinishReason.ABORT
    assert time.monotonic() - began < 5.0


async def test_a_signal_while_the_server_starts_ends_it_promptly(folder: Path) -> None:
    async with running(folder) as server:
        async with connect(server.settings.listen) as engine:
            assert (await engine.status()).state is State.STARTING
        began = time.monotonic()
        signal.raise_signal(signal.SIGINT)
        await server.ended.wait()

    assert time.monotonic() - began < 3.0
    assert not any("ready" in line for line in server.said)
    assert left_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_replica_leaves_signals_to_its_root(folder: Path, number: signal.Signals) -> None:
    async with ready(folder) as (_, engine):
        pid = (await replica(engine)).pid
        os.kill(pid, number)

        [answer] = await engine.generate([[5]], max_tokens=5)

        assert answer.token_ids == [6, 7, 8, 9, 10]
        assert (await replica(engine)).pid == pid


# Replicas that die


async def test_a_verb_sent_while_a_replica_is_replaced_waits_for_it(folder: Path) -> None:
    async with ready(folder) as (_, engine):
        os.kill((await replica(engine)).pid, signal.SIGKILL)

        reply = await engine.pause()

        assert reply.done
        assert any(child.name == "replica-0/scheduler" for child in reply.children)


async def test_a_replica_that_does_not_react_is_named_and_asked_again(folder: Path) -> None:
    async with ready(folder) as (_, engine):
        pid = (await replica(engine)).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match="replica-0"):
                await engine.pause(timeout=0.5)
            began = time.monotonic()
            status = await engine.status()
            took = time.monotonic() - began
        finally:
            os.kill(pid, signal.SIGCONT)

        assert took < 3.0
        assert status.state is State.PAUSING
        assert [(one.name, one.pid) for one in status.replicas] == [("replica-0", pid)]
        assert status.late == ("replica-0",)
        assert (await engine.pause()).state is State.PAUSED


STUCK, LOST, LOOP_STUCK = 900, 901, 902


@pytest.mark.parametrize(
    ("culprit", "timeouts", "reason"),
    [
        (STUCK, {"step_timeout_s": 0.5}, "a step has not ended in 0.5 s"),
        (LOST, {}, "its context is dead"),
        (LOOP_STUCK, {"loop_timeout_s": 1.0}, "its event loop had been stuck for 1 s"),
    ],
)
async def test_a_replica_whose_device_or_loop_is_gone_is_replaced(
    folder: Path,
    culprit: int,
    timeouts: dict[str, float],
    reason: str,
) -> None:
    ends: dict[int, list[int]] = {}

    async def generate(engine: Engine, first: int) -> None:
        async with engine.submit([first], max_tokens=90) as stream:
            ends[first] = (await stream.completion()).token_ids

    async with ready(folder, **timeouts) as (_, engine):
        pid = (await replica(engine)).pid
        async with trio.open_nursery() as nursery:
            for first in (0, culprit):
                nursery.start_soon(generate, engine, first)

        [node] = part(await engine.status(), REPLICAS).children
        assert node.restarts == 1
        assert reason in node.ends[0].reason
        assert not is_alive(pid)
    assert ends == {first: list(range(first + 1, first + 91)) for first in (0, culprit)}


async def test_a_replica_that_is_stopped_for_good_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENCE_GRACE_S", 3.0)  # a living one is heard of each second
    async with ready(folder, loop_timeout_s=0.5) as (_, engine):
        async with engine.submit([0], max_tokens=200) as stream:
            await read(stream, 1)
            pid = (await replica(engine)).pid
            os.kill(pid, signal.SIGSTOP)

            answer = await stream.completion()

        assert (await replica(engine)).restarts == 1
        assert not is_alive(pid)
    assert answer.token_ids == list(range(1, 201))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_server_is_found_at_every_kind_of_loopback_address(folder: Path, host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with running(folder, listen=f"tcp://{host}:0") as server:
        await server.says("ready at")
        async with connect(server.said[0].split()[-1]) as engine:
            [answer] = await engine.generate([[5]], max_tokens=3)
            assert (await engine.pause()).state is State.PAUSED

    assert answer.token_ids == [6, 7, 8]


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


async def test_who_is_no_replica_of_the_server_does_not_register_as_one(folder: Path) -> None:
    async with (
        ready(folder) as (server, engine),
        open_zmq_network() as network,
        open_system() as system,
        trio.open_nursery() as nursery,
    ):
        stranger = Connection(
            system,
            network,
            server.settings.listen,
            role=Role.REPLICA,
            name="replica-1",
            inbox=ToReplica,
            outbox=FromReplica,
            deliver=nobody,
        )
        nursery.start_soon(stranger.run)
        with pytest.raises(AccessDenied, match="replica-1 is no replica of this server"):
            await stranger.wait_welcome()
        nursery.cancel_scope.cancel("it was refused")

        [answer] = await engine.generate([[5]], max_tokens=3)
        assert answer.token_ids == [6, 7, 8]
        assert len((await engine.status()).replicas) == 1


async def nobody(event: object) -> None:
    pytest.fail(f"a stranger was told {event}")


async def test_a_server_that_is_cancelled_leaves_no_process_and_no_file(folder: Path) -> None:
    async with ready(folder) as (_, engine):
        pid = (await replica(engine)).pid

    assert not is_alive(pid)
    assert left_in(folder) == []


async def test_a_stop_with_streams_open_gives_each_its_terminal_delta(folder: Path) -> None:
    reasons: list[FinishReason | CallboardError] = []

    async def generate(engine: Engine, begun: trio.Event) -> None:
        async with engine.submit([0], max_tokens=200) as stream:
            begun.set()
            reasons.append((await stream.completion()).finish_reason)

    async with ready(folder) as (server, engine):
        begun = [trio.Event() for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for event in begun:
                nursery.start_soon(generate, engine, event)
            for event in begun:
                await event.wait()
            await engine.stop()
        await server.ended.wait()

    assert reasons == [FinishReason.ABORT] * 4


# Keys


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[tuple[str, Path]]:
    """Run a server that has keys; yields its endpoint and their folder."""
    keys = folder / "keys"
    make_keys(keys)
    async with running(folder, listen="tcp://127.0.0.1:0", keys=str(keys)) as server:
        await server.says("ready at")
        yield server.said[0].split()[-1], keys


async def test_with_keys_a_client_may_generate_and_an_operator_say_verbs_too(folder: Path) -> None:
    async with guarded(folder) as (endpoint, keys):
        async with connect(endpoint, keys=keys / "client.key") as client:
            [answer] = await client.generate([[5]], max_tokens=3)
            with pytest.raises(AccessDenied, match="has the role client and may not be used as op"):
                await client.pause()
            [again] = await client.generate([[5]], max_tokens=3)
        async with connect(endpoint, keys=keys / "operator.key") as operator:
            assert (await operator.pause()).done
            assert (await operator.unpause()).done
            [other] = await operator.generate([[5]], max_tokens=3)

    assert answer.token_ids == again.token_ids == other.token_ids == [6, 7, 8]


async def test_with_keys_nobody_gets_in_without_one_or_with_a_strangers(folder: Path) -> None:
    make_keys(folder / "others")
    async with guarded(folder) as (endpoint, keys):
        with pytest.raises(AccessDenied, match="lets in nobody without keys"):
            async with connect(endpoint):
                pass
        with pytest.raises(Unreachable):
            async with connect(endpoint, keys=folder / "others" / "client.key", timeout=0.5):
                pass
        (keys / "allowed" / "client.pub").unlink()
        with pytest.raises(AccessDenied, match="it is not on its list"):
            async with connect(endpoint, keys=keys / "client.key"):
                pass


async def test_a_key_can_be_rotated_while_the_server_runs(folder: Path) -> None:
    async with guarded(folder) as (endpoint, keys):
        add_key(keys, "newer", Role.CLIENT)
        async with connect(endpoint, keys=keys / "newer.key") as new:
            (keys / "allowed" / "client.pub").unlink()
            with pytest.raises(AccessDenied):
                async with connect(endpoint, keys=keys / "client.key"):
                    pass
            [answer] = await new.generate([[5]], max_tokens=3)

    assert answer.token_ids == [6, 7, 8]


async def test_a_replica_that_is_killed_comes_back_with_its_key(folder: Path) -> None:
    async with (
        guarded(folder) as (endpoint, keys),
        connect(endpoint, keys=keys / "operator.key") as engine,
        engine.submit([5], max_tokens=200) as stream,
    ):
        await read(stream, 10)
        os.kill((await replica(engine)).pid, signal.SIGKILL)

        assert len((await stream.completion()).token_ids) == 200


async def test_an_address_that_others_reach_needs_keys(folder: Path) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        await serve(Settings(listen="tcp://0.0.0.0:0"), announce=pytest.fail)


async def test_keys_that_are_not_there_keep_a_server_from_starting(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/server.key: No such file"):
        await serve(Settings(keys=str(folder / "nowhere")), announce=pytest.fail)
