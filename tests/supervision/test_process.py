"""The root's side of a replica process, with processes that do as little as the test needs."""

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from callboard.actors.session import Joined, Left
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import ZmqNetwork
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.control import State, Suspend, Weights, WeightsLevel
from callboard.messages.errors import ConfigError, StartFailed, SupervisionError
from callboard.supervision.process import ReplicaOrder, ReplicaProcess
from callboard.supervision.settings import Settings

Play = Callable[[str], None]


class Place:
    """Where one replica process lives."""

    def __init__(self, system: ActorSystem, network: ZmqNetwork, folder: Path) -> None:
        self.folder = folder
        self.cell = system.cell("replica-0")
        self._system = system
        self._network = network

    async def live(self, *, start_timeout_s: float = 10.0, model: str = "a-model") -> None:
        settings = Settings(model=model, start_timeout_s=start_timeout_s)
        await self.cell.run(lambda: self.process(settings))

    def process(self, settings: Settings | None = None) -> ReplicaProcess:
        return ReplicaProcess(
            self._system,
            self._network,
            settings or Settings(),
            coordinator="tcp://127.0.0.1:1",
            run_folder=self.folder,
        )

    async def pid(self) -> int:
        """Return the process id that a played replica has written down."""
        return int(await self.written("pid"))

    async def written(self, name: str) -> str:
        """Return what a played replica writes into a file, when it has."""
        path = self.folder / name
        with trio.fail_after(5.0):
            while not (path.exists() and path.read_text().endswith("\n")):  # noqa: ASYNC110  # a file wakes nobody
                await trio.sleep(0.01)
        return path.read_text()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    with trio.fail_after(20.0):
        async with open_zmq_context() as context, open_system() as system:
            yield Place(system, ZmqNetwork(context), folder)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("exit 3", "exited with code 3"),
        ("kill -9 $$", "was killed by signal 9"),
        ("read order; exit 0", "exited with code 0"),
    ],
)
async def test_a_process_that_ends_while_it_starts_is_a_failure_that_says_how(
    place: Place, play_replica: Play, command: str, complaint: str
) -> None:
    play_replica(command)

    with pytest.raises(SupervisionError, match=rf"replica-0 \(pid \d+\) {complaint}"):
        await place.live()

    assert place.cell.state is State.FAILED


async def test_a_process_that_does_not_come_up_in_time_is_killed(
    place: Place, play_replica: Play
) -> None:
    play_replica(f"echo $$ > {place.folder}/pid; exec sleep 100")

    with pytest.raises(StartFailed, match=r"replica-0 was not up in 0\.3 s"):
        await place.live(start_timeout_s=0.3)

    assert not is_alive(await place.pid())


async def test_a_process_that_is_still_starting_is_killed_at_once_by_a_stop(
    place: Place, play_replica: Play
) -> None:
    play_replica(f"echo $$ > {place.folder}/pid; exec sleep 100")

    async def live() -> None:
        with pytest.raises(StartFailed, match="stopped before it had started"):
            await place.live()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        pid = await place.pid()
        began = time.monotonic()
        await place.cell.stop(10.0)

    assert time.monotonic() - began < 2.0
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("paused", "suspended", "weights"),
    [
        (False, None, None),
        (True, None, None),
        (True, Suspend(weights=WeightsLevel.DISCARD), None),
        (False, None, Weights(source="new", version=3)),
    ],
)
async def test_a_process_is_told_what_it_is_to_be_on_its_standard_input(
    place: Place,
    play_replica: Play,
    paused: bool,
    suspended: Suspend | None,
    weights: Weights | None,
) -> None:
    play_replica(f"head -n 1 > {place.folder}/order; exec sleep 100")
    place.cell.paused, place.cell.suspended, place.cell.weights = paused, suspended, weights

    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.live)
        order = msgspec.json.decode(await place.written("order"), type=ReplicaOrder)
        nursery.cancel_scope.cancel()

    assert (order.name, order.coordinator) == ("replica-0", "tcp://127.0.0.1:1")
    assert order.settings.model == "a-model"
    assert (order.paused, order.suspended, order.weights) == (paused, suspended, weights)
    assert order.control == f"ipc://{place.folder / 'replica-0.control'}"


async def test_a_cancelled_owner_leaves_no_process(place: Place, play_replica: Play) -> None:
    play_replica(f"echo $$ > {place.folder}/pid; exec sleep 100")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(place.live)
        pid = await place.pid()
        nursery.cancel_scope.cancel()

    assert not is_alive(pid)


async def test_an_earlier_line_that_ends_late_does_not_take_the_present_one_along(
    place: Place,
) -> None:
    process = place.process()
    for peer in (b"earlier", b"present"):
        await process._deliver(Joined(peer=peer, hello=None))

    await process._deliver(Left(peer=b"earlier", reason="it was silent"))
    assert process._connected.is_set()

    await process._deliver(Left(peer=b"present", reason="it was silent"))
    assert not process._connected.is_set()


@pytest.mark.usefixtures("scripted_replicas")
async def test_a_replica_that_cannot_start_says_why_before_it_exits(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"missing\.gguf: no such file"):
        await place.live(model="missing.gguf")


@pytest.mark.usefixtures("scripted_replicas")
def test_a_replica_whose_parent_is_gone_before_it_reads_its_order_just_ends() -> None:
    done = subprocess.run(
        [sys.executable], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
