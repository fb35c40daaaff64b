"""Replicas that another process brings along, as another machine would: a tiny model."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from callboard.messages.control import State, StatusReply
from callboard.messages.membership import Role
from callboard.supervision.engine import Engine, connect
from callboard.supervision.keys import add_key, make_keys
from tests.end_to_end.test_processes import (
    CALLBOARD,
    GREEDY,
    PROMPTS,
    SMALL,
    START_S,
    Server,
    environment,
    has_ended,
    serve,
    undisturbed_and_disturbed,
)


class Host:
    """A host in a process of its own, and what it wrote."""

    def __init__(self, folder: Path, endpoint: str, *arguments: str) -> None:
        self._out = (folder / "out").open("w+")
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*CALLBOARD, "replica", "--join", endpoint, "--name", "box", *arguments],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            env=environment(TMPDIR=str(folder / "tmp")),
        )

    def said(self) -> str:
        return (self.folder / "out").read_text()

    async def says(self, words: str) -> None:
        while words not in self.said():  # noqa: ASYNC110  # a file wakes nobody
            await trio.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(START_S)

    def leftovers(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").iterdir()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        self._out.close()


@contextmanager
def host(folder: Path, endpoint: str, *arguments: str) -> Iterator[Host]:
    folder.mkdir(exist_ok=True)
    own = Host(folder, endpoint, *arguments)
    try:
        yield own
    finally:
        own.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server without replicas of its own."""
    (tmp_path / "s").mkdir()
    with serve(tmp_path / "s", *SMALL, "--replicas", "0") as own:
        own.wait_ready()
        yield own


async def replicas(engine: Engine, count: int, *, state: State = State.RUNNING) -> StatusReply:
    """Wait until there are so many replicas, in a state."""
    while True:
        status = await engine.status()
        up = [one for one in status.replicas if one.state is state and one.blocks_total]
        if len(status.replicas) == len(up) == count:
            return status
        await trio.sleep(0.05)


async def test_replicas_of_a_host_run_what_waits_obey_verbs_and_leave_with_the_server(
    server: Server, tmp_path: Path
) -> None:
    with host(tmp_path / "h", server.endpoint, "--replicas", "2") as box, trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            early = await engine.generate(PROMPTS, **GREEDY)  # submitted before anybody was there
            status = await replicas(engine, 2)
            assert [one.name for one in status.replicas] == ["box-0", "box-1"]

            async with engine.submit(PROMPTS[0], **GREEDY) as stream:
                paused = await engine.pause()
                steps = [one.steps for one in (await engine.status()).replicas]
                assert paused.state is State.PAUSED
                await engine.suspend()
                await engine.update_weights("random:tiny#1")
                assert [one.steps for one in (await engine.status()).replicas] == steps
                await engine.resume()
                await engine.unpause()
                await stream.completion()
            versions = {one.weights_version for one in (await engine.status()).replicas}
            pids = [one.pid for one in status.replicas]
            await engine.stop()
        assert await trio.to_thread.run_sync(box.wait) == 0

        assert all(len(answer.token_ids) == GREEDY["max_tokens"] for answer in early)
        assert versions == {1}
        assert all(has_ended(pid) for pid in pids)
        assert box.leftovers() == []


@pytest.mark.parametrize("farewell", [signal.SIGTERM, signal.SIGKILL])
async def test_streams_go_on_elsewhere_when_their_host_leaves_or_is_killed(
    server: Server, tmp_path: Path, farewell: signal.Signals
) -> None:
    with (
        host(tmp_path / "h", server.endpoint) as box,
        host(tmp_path / "i", server.endpoint, "--name", "crate") as crate,
        trio.fail_after(START_S),
    ):
        async with connect(server.endpoint) as engine:
            status = await replicas(engine, 2)
            pid = next(one.pid for one in status.replicas if one.name == "box-0")

            async def leave() -> None:
                box.process.send_signal(farewell)

            undisturbed, disturbed = await undisturbed_and_disturbed(engine, leave)
            code = await trio.to_thread.run_sync(box.wait)
            while not has_ended(pid):  # noqa: ASYNC110  # no child of ours
                await trio.sleep(0.05)

            assert disturbed == undisturbed
            assert code == (0 if farewell is signal.SIGTERM else -signal.SIGKILL)
            assert box.leftovers() == []
            if farewell is signal.SIGTERM:
                names = [one.name for one in (await replicas(engine, 1)).replicas]
                assert names == ["crate-0"]
        assert crate.process.poll() is None


async def test_a_host_joins_the_server_that_follows_a_killed_one_and_streams_go_on(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "n").mkdir()
    with host(tmp_path / "h", server.endpoint) as box, trio.fail_after(2 * START_S):
        async with connect(server.endpoint) as engine:
            await replicas(engine, 1)
            again: list[Any] = []

            async def follow() -> None:
                server.process.kill()
                server.wait()
                arguments = (*SMALL[:-1], server.endpoint, "--replicas", "0")
                again.append(Server(tmp_path / "n", *arguments))
                await trio.to_thread.run_sync(again[0].wait_ready)

            try:
                undisturbed, disturbed = await undisturbed_and_disturbed(engine, follow)
                assert disturbed == undisturbed
                assert "it is tried again" in box.said()
                assert box.said().count("joined") == 2
            finally:
                again[0].close()


async def test_a_host_that_joins_a_paused_server_is_paused(server: Server, tmp_path: Path) -> None:
    with host(tmp_path / "h", server.endpoint), trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            await engine.pause()
            await replicas(engine, 1, state=State.PAUSED)
            async with engine.submit(PROMPTS[0], **GREEDY) as stream:
                [one] = (await engine.status()).replicas
                assert (one.steps, one.waiting) == (0, 1)
                await engine.unpause()
                answer = await stream.completion()
            assert len(answer.token_ids) == GREEDY["max_tokens"]


async def test_a_host_joins_with_the_key_of_a_replica_and_with_no_other(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    add_key(keys, "box", Role.REPLICA)
    (tmp_path / "s").mkdir()
    with (
        serve(tmp_path / "s", *SMALL, "--replicas", "0", "--keys", str(keys)) as server,
        trio.fail_after(START_S),
    ):
        server.wait_ready()
        with host(tmp_path / "c", server.endpoint, "--keys", str(keys / "client.key")) as wrong:
            assert await trio.to_thread.run_sync(wrong.wait) == 1
            assert "may not be used as replica" in wrong.said()
        with host(tmp_path / "h", server.endpoint, "--keys", str(keys / "box.key")) as right:
            async with connect(server.endpoint, keys=keys / "operator.key") as engine:
                await replicas(engine, 1)
                [answer] = await engine.generate(PROMPTS[:1], max_tokens=3)
            (keys / "allowed" / "box.pub").unlink()
            assert await trio.to_thread.run_sync(right.wait) == 1
            assert "is not on the list of this server" in right.said()
    assert len(answer.token_ids) == 3


async def test_a_host_that_is_told_twice_to_leave_waits_for_nothing(
    server: Server, tmp_path: Path
) -> None:
    with host(tmp_path / "h", server.endpoint) as box, trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            [one] = (await replicas(engine, 1)).replicas
            box.process.terminate()
            await box.says("SIGTERM, leaving")
            box.process.terminate()
            assert await trio.to_thread.run_sync(box.wait) == 0
            while not has_ended(one.pid):  # noqa: ASYNC110  # no child of ours
                await trio.sleep(0.05)
    assert "Traceback" not in box.said()
    assert box.leftovers() == []


async def test_a_host_that_cannot_start_says_why_and_ends(server: Server, tmp_path: Path) -> None:
    with (
        host(tmp_path / "h", server.endpoint, "--model", "nowhere.gguf") as box,
        trio.fail_after(START_S),
    ):
        assert await trio.to_thread.run_sync(box.wait) == 1
        assert "nowhere.gguf" in box.said()
        async with connect(server.endpoint) as engine:
            assert (await engine.status()).replicas == ()


async def test_a_second_host_of_a_name_is_refused(server: Server, tmp_path: Path) -> None:
    with host(tmp_path / "h", server.endpoint), trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            await replicas(engine, 1)
            with host(tmp_path / "i", server.endpoint) as second:
                await second.says("a replica named box is there already")
                second.process.terminate()
                assert await trio.to_thread.run_sync(second.wait) == 0
            await replicas(engine, 1)


async def test_a_host_waits_for_a_server_that_is_not_there_yet(tmp_path: Path) -> None:
    with host(tmp_path / "h", "tcp://127.0.0.1:9") as box, trio.fail_after(START_S):
        await box.says("nobody answers at tcp://127.0.0.1:9")
        box.process.terminate()
        assert await trio.to_thread.run_sync(box.wait) == 0
