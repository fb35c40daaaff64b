"""A client that does not read, over real sockets, among others that do."""

import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from callboard.actors.clients import MAX_UNREAD_BYTES
from callboard.actors.coordinator import Coordinator
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.metrics import Metrics
from callboard.actors.placement import LeastLoaded
from callboard.actors.ref import LocalRef
from callboard.actors.session import Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import Network, ZmqNetwork
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.base import pack_ids
from callboard.messages.membership import Role
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    FinishReason,
    Submit,
    TokensOut,
)
from callboard.supervision.engine import Engine

CLIENT = """
import sys, trio, callboard
from callboard.messages.errors import CallboardError

async def main():
    async with callboard.connect(sys.argv[1]) as engine:
        async with engine.submit([1], max_tokens=1000000, request_id="slow") as stream:
            print("accepted", flush=True)
            try:
                await stream.completion()
            except CallboardError as error:
                print(type(error).__name__, flush=True)

trio.run(main)
"""
OTHERS = 16
TEXT = "x" * 100_000


class Source:
    """A replica that accepts everything, and says as much of a request as it is told to."""

    def __init__(self, system: ActorSystem, network: Network, endpoint: str) -> None:
        self.requests: dict[str, Submit] = {}  # by what their client has in its prompt
        self.said: dict[str, int] = {}
        self.aborted = trio.Event()
        self.connection = Connection(
            system,
            network,
            endpoint,
            role=Role.REPLICA,
            name="replica-0",
            inbox=ToReplica,
            outbox=FromReplica,
            deliver=self._deliver,
        )

    async def say(self, *requests: str, text: str = "", finish: FinishReason | None = None) -> None:
        """Say one token of each request, as a step does."""
        deltas = tuple(
            Delta(
                request_id=name,
                start=self.said[name],
                token_ids=pack_ids((self.said[name] % 1000,)),
                text=text,
                finish=finish,
            )
            for name in requests
        )
        for name in requests:
            self.said[name] += 1
        await self.connection.send(TokensOut(deltas=deltas))

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said(message=Submit(request_id=name) as request):
                self.requests[name], self.said[name] = request, 0
                accepted = Accepted(request_id=name, prompt_token_ids=pack_ids((1,)), seed=1)
                self.connection.send_nowait(accepted)
            case Said(message=Abort()):
                self.aborted.set()


class Hall:
    """A coordinator at a real address, the source behind it, and how to become its client."""

    def __init__(self, system: ActorSystem, network: Network, nursery: trio.Nursery) -> None:
        self.system, self.network, self.nursery = system, network, nursery
        self.cell = system.cell("coordinator")
        self.endpoint = "tcp://127.0.0.1:*"
        self.source: Source

    async def start(self) -> None:
        metrics = self.system.cell("metrics")
        await self.nursery.start(metrics.run, Metrics)
        await self.nursery.start(self.cell.run, lambda: self._coordinator(LocalRef(metrics)))
        self.source = Source(self.system, self.network, self.endpoint)
        self.nursery.start_soon(self.source.connection.run)
        await self.source.connection.wait_welcome()

    async def client(self) -> Engine:
        engine = Engine(self.system, self.network, self.endpoint)
        await engine._run(self.nursery, 10.0)
        return engine

    def details(self) -> dict[str, Any]:
        return dict(self.cell.status().details)

    def _coordinator(self, metrics: LocalRef[Any]) -> Coordinator:
        return Coordinator(
            self.system,
            self.network,
            self.endpoint,
            metrics=metrics,
            placement=LeastLoaded(),
            control_endpoint=lambda: "",
            model="",
            bound=self._bound,
        )

    def _bound(self, endpoint: str) -> None:
        self.endpoint = endpoint


@asynccontextmanager
async def open_hall() -> AsyncGenerator[Hall]:
    async with (
        open_zmq_context() as context,
        open_system() as system,
        trio.open_nursery() as nursery,
    ):
        hall = Hall(system, ZmqNetwork(context), nursery)
        await hall.start()
        yield hall
        nursery.cancel_scope.cancel()


async def stream_to_all(hall: Hall, slow: str, others: list[str]) -> int:
    """Have every request stream until the slow one is given up; returns how many steps it took."""
    steps = 0
    while not hall.source.aborted.is_set():
        await hall.source.say(slow, text=TEXT)
        await hall.source.say(*others)
        steps += 1
        assert steps < 10 * MAX_UNREAD_BYTES // len(TEXT), "nobody gave it up"
    return steps


async def line_of(process: trio.Process) -> str:
    """Wait for the next line that a process prints."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        some = await process.stdout.receive_some(1)
        assert some, "it printed nothing more"
        line += some
    return line.decode().rstrip()


async def others_of(hall: Hall) -> list[Any]:
    """Open a stream at each of sixteen clients that read."""
    streams = []
    for number in range(OTHERS):
        engine = await hall.client()
        stream = engine.submit([number], max_tokens=10**6)
        streams.append(await stream.__aenter__())
    return streams


async def check_others(hall: Hall, streams: list[Any], names: list[str], steps: int) -> None:
    """End the others' streams, which have every token."""
    await hall.source.say(*names, finish=FinishReason.STOP)
    for stream in streams:
        completion = await stream.completion()
        assert completion.token_ids == [number % 1000 for number in range(steps + 1)]
    assert hall.details()["slow_readers_ended"] == 1
    assert hall.details()["open_requests"] == 0


async def test_a_client_that_does_not_take_its_frames_is_ended_and_sixteen_others_are_not() -> None:
    with trio.fail_after(60):
        async with open_hall() as hall:
            streams = await others_of(hall)
            names = list(hall.source.requests)
            slow = await hall.client()
            stream = await slow.submit([99], max_tokens=10**6).__aenter__()
            (name,) = hall.source.requests.keys() - set(names)
            gate, deliver = trio.Event(), slow._connection._deliver

            async def held_up(event: Said | Joined | Left) -> None:
                await gate.wait()
                await deliver(event)

            slow._connection._deliver = held_up
            steps = await stream_to_all(hall, name, names)
            assert hall.details()["open_requests"] == OTHERS
            gate.set()
            await stream.wait_ended()
            assert stream.failure is not None
            assert stream.failure.code == "SlowReader"
            assert stream.record.token_ids == [
                n % 1000 for n in range(len(stream.record.text) // len(TEXT))
            ]
            await check_others(hall, streams, names, steps)


async def test_a_client_whose_process_stands_still_is_ended_and_told_so_when_it_goes_on(
    tmp_path: Path,
) -> None:
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    with trio.fail_after(60):
        async with open_hall() as hall:
            streams = await others_of(hall)
            names = list(hall.source.requests)
            process = await trio.lowlevel.open_process(
                [sys.executable, str(script), hall.endpoint], stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            try:
                assert await line_of(process) == "accepted"
                (name,) = hall.source.requests.keys() - set(names)
                process.send_signal(signal.SIGSTOP)
                steps = await stream_to_all(hall, name, names)
                await check_others(hall, streams, names, steps)
                process.send_signal(signal.SIGCONT)
                assert await line_of(process) == "SlowReader"
                assert await process.wait() == 0
            finally:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
                await process.stdout.aclose()
