"""`callboard serve` as its users have it: real processes, sockets and signals, a tiny model."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

from callboard.messages.base import unpack_ids
from callboard.messages.codec import decode_body, decode_frame
from callboard.messages.control import ControlReply, ReplicaStatus, State, StatusReply
from callboard.messages.errors import WeightsError
from callboard.messages.membership import FrameRefused
from callboard.messages.requests import FinishReason
from callboard.supervision.engine import Engine, connect, open_engine
from callboard.supervision.stream import RequestStream

CALLBOARD = [sys.executable, "-m", "callboard"]
START_S = 60.0
PROMPTS = [[number + 1, 2 * number + 3, 7] for number in range(8)]
SMALL = ("--model", "random:tiny", "--kv-cache-gb", "0.02", "--listen", "tcp://127.0.0.1:0")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600}


class Server:
    """A server in a process of its own, and what it wrote."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.endpoint = ""
        self._errors = (folder / "errors").open("w+")
        (folder / "tmp").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*CALLBOARD, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            env=environment(TMPDIR=str(folder / "tmp")),
        )
        assert self.process.stdout is not None
        self._out = self.process.stdout

    def wait_ready(self) -> None:
        """Wait for the line that says where the server is ready."""
        self.wait_line("ready at")
        self.endpoint = self.lines[-1].split()[-1]

    def wait_line(self, words: str) -> None:
        """Wait for a line with these words."""
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while not (self.lines and words in self.lines[-1]):
                left = deadline - time.monotonic()
                assert selector.select(max(0.0, left)), f"no line with {words!r} in time"
                line = self._out.readline()
                assert line, f"it ended: {self.errors()}"
                self.lines.append(line.rstrip())

    def wait(self, timeout: float = 20.0) -> int:
        return self.process.wait(timeout)

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def leftovers(self) -> list[str]:
        return [path.name for path in (self.folder / "tmp").iterdir()]

    def has_replica(self) -> bool:
        """Whether the line to a replica process is there, and so the process, or almost."""
        return any((self.folder / "tmp").glob("*/replica-0.control"))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10.0)
        self._out.close()
        self._errors.close()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *(arguments or SMALL))
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for all tests that leave it as they found it."""
    with serve(tmp_path_factory.mktemp("shared")) as shared:
        shared.wait_ready()
        yield shared


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two replicas for all tests about weights."""
    with serve(tmp_path_factory.mktemp("pair"), *SMALL, "--replicas", "2") as shared:
        shared.wait_ready()
        yield shared


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, still starting."""
    with serve(tmp_path) as own:
        yield own


def run(*arguments: str, endpoint: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*CALLBOARD, *arguments],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        env=environment(CALLBOARD_ENDPOINT=endpoint),
    )


async def replica(engine: Engine) -> ReplicaStatus:
    [one] = (await engine.status()).replicas
    return one


async def new_replica(engine: Engine, old: int) -> ReplicaStatus:
    """Wait until another process has taken a replica's place, and is up."""
    while True:
        one = await replica(engine)
        if one.pid != old and one.blocks_total:
            return one
        await trio.sleep(0.05)


async def read(stream: RequestStream, num_tokens: int) -> list[int]:
    """Read so many tokens of a stream."""
    tokens: list[int] = []
    async for delta in stream:
        tokens += unpack_ids(delta.token_ids)
        if len(tokens) >= num_tokens:
            break
    return tokens


def executor(status: StatusReply) -> dict[str, int | float | str]:
    """Return what the executor of the only replica says of itself."""
    nodes = [status.tree]
    while nodes:
        node = nodes.pop()
        if node.name.endswith("/executor"):
            return node.details
        nodes += node.children
    raise AssertionError("the tree has no executor")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only waiting for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def all_ended(pids: Sequence[int]) -> None:
    while not all(has_ended(pid) for pid in pids):  # noqa: ASYNC110  # no child of ours
        await trio.sleep(0.05)


# Replica processes that die


async def undisturbed_and_disturbed(
    engine: Engine, disturb: Callable[[], Awaitable[None]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of PROMPTS without and with something that happens under the streams."""
    disturbed: dict[int, list[int]] = {}

    async def generate(number: int, begun: trio.Event) -> None:
        async with engine.submit(PROMPTS[number], **GREEDY) as stream:
            await read(stream, 5)
            begun.set()
            disturbed[number] = (await stream.completion()).token_ids

    begun = [trio.Event() for _ in PROMPTS]
    async with trio.open_nursery() as nursery:
        for number, event in enumerate(begun):
            nursery.start_soon(generate, number, event)
        for event in begun:
            await event.wait()
        await disturb()
    undisturbed = await engine.generate(PROMPTS, **GREEDY)
    return [answer.token_ids for answer in undisturbed], [disturbed[n] for n in range(len(PROMPTS))]


async def test_a_replica_killed_while_requests_stream_is_replaced_and_no_token_is_lost(
    server: Server,
) -> None:
    with trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            before = await replica(engine)

            async def kill() -> None:
                os.kill(before.pid, signal.SIGKILL)

            undisturbed, disturbed = await undisturbed_and_disturbed(engine, kill)
            after = await new_replica(engine, before.pid)

    assert after.restarts == before.restarts + 1
    assert disturbed == undisturbed


def test_streams_go_on_with_the_server_that_follows_a_killed_one(
    fresh: Server, tmp_path: Path
) -> None:
    fresh.wait_ready()
    (tmp_path / "n").mkdir()

    async def kill_and_follow() -> tuple[list[list[int]], list[list[int]]]:
        with trio.fail_after(START_S):
            async with connect(fresh.endpoint) as engine:

                async def follow() -> None:
                    fresh.process.kill()
                    fresh.wait()
                    again = stack.enter_context(serve(tmp_path / "n", *SMALL[:-1], fresh.endpoint))
                    await trio.to_thread.run_sync(again.wait_ready)

                return await undisturbed_and_disturbed(engine, follow)

    with ExitStack() as stack:
        undisturbed, disturbed = trio.run(kill_and_follow)

    assert disturbed == undisturbed


async def test_a_replica_killed_while_paused_comes_back_paused(server: Server) -> None:
    with trio.fail_after(START_S):
        async with (
            connect(server.endpoint) as engine,
            engine.submit(PROMPTS[0], **GREEDY) as stream,
        ):
            await read(stream, 5)
            await engine.pause()
            before = await replica(engine)
            os.kill(before.pid, signal.SIGKILL)
            await new_replica(engine, before.pid)
            while True:
                after = await replica(engine)
                if after.waiting:
                    break
                await trio.sleep(0.05)

            assert (after.state, after.steps) == (State.PAUSED, 0)
            await engine.unpause()
            answer = await stream.completion()
    assert len(answer.token_ids) == GREEDY["max_tokens"]


async def test_a_replica_killed_while_suspended_comes_back_without_its_kv_memory(
    server: Server,
) -> None:
    with trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            kv_bytes = executor(await engine.status())["kv_bytes"]
            await engine.suspend()
            before = await replica(engine)
            async with engine.submit([5], max_tokens=3) as stream:
                os.kill(before.pid, signal.SIGKILL)
                await new_replica(engine, before.pid)
                status = await engine.wait_for(State.SUSPENDED, timeout=START_S)

                assert executor(status)["kv_bytes"] == 0
                assert (await engine.resume()).state is State.RUNNING
                assert executor(await engine.status())["kv_bytes"] == kv_bytes
                assert len((await stream.completion()).token_ids) == 3


async def test_streams_go_on_after_their_replica_stood_still(server: Server) -> None:
    with trio.fail_after(START_S):
        async with (
            connect(server.endpoint) as engine,
            engine.submit(PROMPTS[0], **GREEDY) as stream,
        ):
            await read(stream, 5)
            pid = (await replica(engine)).pid
            os.kill(pid, signal.SIGSTOP)
            await trio.sleep(2.0)
            os.kill(pid, signal.SIGCONT)
            answer = await stream.completion()

            assert (await replica(engine)).pid == pid
    assert len(answer.token_ids) == GREEDY["max_tokens"]


async def test_streams_go_on_after_their_server_stood_still(server: Server) -> None:
    with trio.fail_after(START_S):
        async with (
            connect(server.endpoint) as engine,
            engine.submit(PROMPTS[0], **GREEDY) as stream,
        ):
            await read(stream, 5)
            pid = (await replica(engine)).pid
            server.process.send_signal(signal.SIGSTOP)
            await trio.sleep(2.0)
            server.process.send_signal(signal.SIGCONT)
            answer = await stream.completion()

            assert (await replica(engine)).pid == pid
    assert len(answer.token_ids) == GREEDY["max_tokens"]


# New weights


async def test_two_processes_change_their_weights_under_open_requests_and_keep_them(
    pair: Server,
) -> None:
    with trio.fail_after(2 * START_S):
        command = partial(run, endpoint=pair.endpoint)
        refused = await trio.to_thread.run_sync(command, "update-weights", "random:tiny#2")
        async with connect(pair.endpoint) as engine:
            streams = [
                await engine.add_request(f"{number}", prompt, temperature=0.0, max_tokens=600)
                for number, prompt in enumerate(PROMPTS)
            ]
            for stream in streams:
                await read(stream, 5)
            await engine.pause()
            missing = await trio.to_thread.run_sync(command, "update-weights", "missing")
            done = await trio.to_thread.run_sync(
                command, "update-weights", "random:tiny#2", "--version", "4"
            )
            status = await engine.status()
            await engine.unpause()
            answers = [await stream.completion() for stream in streams]

            os.kill(status.replicas[1].pid, signal.SIGKILL)
            again = await engine.generate(PROMPTS[:4], temperature=0.0, max_tokens=20)
            after = await engine.status()

    assert (refused.returncode, missing.returncode, done.returncode) == (1, 1, 0)
    assert refused.stderr == (
        "callboard: update-weights refused: the tree is running: pause first\n"
    )
    assert "missing: no such file or folder; weights 0 stay in use" in missing.stderr
    assert done.stdout.startswith("update-weights: now paused (")
    assert (status.model, status.weights_version) == ("random:tiny#2", 4)
    assert [one.weights_version for one in status.replicas] == [4, 4]
    for answer in answers:
        assert len(answer.token_ids) == 600
        assert sorted(set(answer.weights_versions or ())) == [0, 4]
    async with open_engine(model="random:tiny#2", kv_cache_gb=0.02, threads=1) as fresh:
        wanted = await fresh.generate(PROMPTS[:4], temperature=0.0, max_tokens=20)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in wanted]
    assert {answer.weights_version for answer in again} == {4}
    assert after.weights_version == 4


async def test_a_process_that_stands_still_keeps_all_from_new_weights_and_goes_on_with_the_old(
    pair: Server,
) -> None:
    with trio.fail_after(2 * START_S):
        async with connect(pair.endpoint) as engine:
            [before] = await engine.generate([[5, 6]], temperature=0.0, max_tokens=20)
            await engine.pause()
            status = await engine.status()
            os.kill(status.replicas[0].pid, signal.SIGSTOP)
            try:
                with pytest.raises(WeightsError, match="no answer in time from replica-0"):
                    await engine.update_weights("random:tiny#3", timeout=2.0)
            finally:
                os.kill(status.replicas[0].pid, signal.SIGCONT)
            await engine.unpause()
            after = await engine.generate([[5, 6]] * 4, temperature=0.0, max_tokens=20)

            assert [one.token_ids for one in after] == [before.token_ids] * 4
            now = await engine.status()
    assert now.weights_version == status.weights_version
    assert [one.weights_version for one in now.replicas] == [now.weights_version] * 2


# Strangers


async def test_a_frame_that_is_no_message_is_refused_by_name_and_harms_nobody(
    server: Server,
) -> None:
    with trio.fail_after(START_S):
        async with (
            connect(server.endpoint) as engine,
            engine.submit([5], max_tokens=200) as stream,
        ):
            answer = await trio.to_thread.run_sync(send_garbage, server.endpoint)
            completed = await stream.completion()

    refused = decode_body(decode_frame(answer).body, FrameRefused)
    assert refused.failure.code == "WireError"
    assert len(completed.token_ids) == 200


def send_garbage(endpoint: str) -> bytes:
    """Send what is no message, and return what comes back."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send(b"\x00garbage\xff")
        assert dealer.poll(10_000), "no answer to a frame that is no message"
        return bytes(dealer.recv())


# Commands


def test_commands_change_a_servers_state_and_say_so(server: Server) -> None:
    paused, again = (run("pause", "--json", endpoint=server.endpoint) for _ in range(2))
    unpaused = run("unpause", "--json", endpoint=server.endpoint)

    done = [paused, again, unpaused]
    shown = [json.loads(result.stdout) for result in done]
    assert [result.returncode for result in done] == [0, 0, 0]
    assert [reply["state"] for reply in shown] == ["paused", "paused", "running"]
    assert all(set(reply) == set(ControlReply.__struct_fields__) for reply in shown)


def test_status_as_json_tells_what_each_replica_does(server: Server) -> None:
    shown = json.loads(run("status", "--json", endpoint=server.endpoint).stdout)

    assert set(shown) == set(StatusReply.__struct_fields__)
    [one] = shown["replicas"]
    assert set(one) == set(ReplicaStatus.__struct_fields__)
    assert one["blocks_free"] == one["blocks_total"] > 0
    assert one["pid"] not in (0, server.process.pid)


def test_a_wrong_command_line_is_code_64_and_nobody_at_the_endpoint_code_2() -> None:
    wrong = run("pause", "--nope")
    nobody = run("pause", "--connect", "tcp://127.0.0.1:1", "--timeout", "0.2")

    assert wrong.returncode == 64
    assert nobody.returncode == 2
    assert "nobody answers at tcp://127.0.0.1:1" in nobody.stderr


# Servers that end


def test_a_command_can_wait_for_a_server_that_drains_when_it_is_told_to_end(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    waiting = subprocess.Popen(
        [*CALLBOARD, "status", "--wait", "running", "--connect", endpoint], stdout=subprocess.PIPE
    )

    with serve(tmp_path, "--model", "random:tiny", "--listen", endpoint) as fresh:
        fresh.endpoint = endpoint
        out, _ = waiting.communicate(timeout=START_S)
        assert waiting.returncode == 0
        assert b": running" in out

        ends = trio.run(signal_while_streaming, fresh, signal.SIGTERM)

        assert ends == [FinishReason.LENGTH] * 4
        assert fresh.wait() == 0
        assert fresh.errors() == ""
        assert fresh.leftovers() == []


def test_a_second_interrupt_ends_open_requests_now(fresh: Server) -> None:
    fresh.wait_ready()

    began = time.monotonic()
    ends = trio.run(signal_while_streaming, fresh, signal.SIGINT, signal.SIGINT)

    assert ends == [FinishReason.ABORT] * 4
    assert fresh.wait() == 0
    assert time.monotonic() - began < 10.0
    assert fresh.leftovers() == []


async def signal_while_streaming(server: Server, *signals: signal.Signals) -> list[FinishReason]:
    """Send signals to a server while four requests stream; returns how those ended."""
    ends: list[FinishReason] = []

    async def generate(engine: Engine, begun: trio.Event) -> None:
        async with engine.submit([5, 6], temperature=0.0, max_tokens=1000) as stream:
            await read(stream, 1)
            begun.set()
            ends.append((await stream.completion()).finish_reason)

    with trio.fail_after(START_S):
        async with connect(server.endpoint) as engine:
            begun = [trio.Event() for _ in range(4)]
            async with trio.open_nursery() as nursery:
                for event in begun:
                    nursery.start_soon(generate, engine, event)
                for event in begun:
                    await event.wait()
                for number in signals:
                    server.process.send_signal(number)
                    await trio.to_thread.run_sync(server.wait_line, number.name)
    return ends


def test_no_replica_outlives_a_root_that_is_killed(fresh: Server) -> None:
    fresh.wait_ready()

    async def kill_root() -> None:
        with trio.fail_after(START_S):
            async with connect(fresh.endpoint) as engine:
                pids = [one.pid for one in (await engine.status()).replicas]
            fresh.process.kill()
            await all_ended(pids)

    trio.run(kill_root)
    assert fresh.wait() == -signal.SIGKILL
    assert fresh.leftovers() == []


def test_no_replica_outlives_a_root_that_is_killed_while_it_stands_still(fresh: Server) -> None:
    fresh.wait_ready()

    async def stop_and_kill_root() -> None:
        with trio.fail_after(START_S):
            async with connect(fresh.endpoint) as engine:
                pids = [one.pid for one in (await engine.status()).replicas]
            fresh.process.send_signal(signal.SIGSTOP)
            fresh.process.kill()
            await all_ended(pids)

    trio.run(stop_and_kill_root)
    assert fresh.leftovers() == []


def test_no_replica_outlives_a_server_that_was_detached_and_is_killed(tmp_path: Path) -> None:
    """A server that has been forked twice is nobody's child, as under a service manager."""
    out, temp = tmp_path / "out", tmp_path / "tmp"
    temp.mkdir()
    command = f"{' '.join(CALLBOARD)} serve --model random:tiny --listen tcp://127.0.0.1:0"
    shell = f"(setsid {command} > {out} 2>&1 < /dev/null & echo $! > {tmp_path}/pid) &"
    subprocess.run(["sh", "-c", shell], check=True, env=environment(TMPDIR=str(temp)))

    async def kill_it() -> None:
        with trio.fail_after(START_S):
            while not (out.exists() and "ready at" in out.read_text()):  # noqa: ASYNC110  # a file
                await trio.sleep(0.05)
            async with connect(out.read_text().split()[-1]) as engine:
                status = await engine.status()
            os.kill(status.tree.pid, signal.SIGKILL)
            await all_ended([status.tree.pid, *(one.pid for one in status.replicas)])

    trio.run(kill_it)
    assert list(temp.iterdir()) == []


def test_what_is_left_when_all_are_killed_is_removed_by_the_next_server(
    fresh: Server, tmp_path: Path
) -> None:
    fresh.wait_ready()

    async def kill_all() -> None:
        with trio.fail_after(START_S):
            async with connect(fresh.endpoint) as engine:
                [one] = (await engine.status()).replicas
            os.kill(one.pid, signal.SIGSTOP)
            fresh.process.kill()
            os.kill(one.pid, signal.SIGKILL)
            await all_ended([one.pid])

    trio.run(kill_all)
    fresh.wait()
    [left] = fresh.leftovers()

    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "tmp").symlink_to(tmp_path / "tmp")
    with serve(tmp_path / "n") as another:
        another.wait_ready()
        assert left not in another.leftovers()
        another.process.terminate()
        assert another.wait() == 0
    assert fresh.leftovers() == []


def test_requests_get_the_time_to_drain_that_was_asked_for(tmp_path: Path) -> None:
    small = ("--model", "random:tiny", "--listen", "tcp://127.0.0.1:0")
    with serve(tmp_path, *small, "--drain-s", "0") as hurried:
        hurried.wait_ready()

        ends = trio.run(signal_while_streaming, hurried, signal.SIGTERM)

        assert ends == [FinishReason.ABORT] * 4
        assert hurried.wait() == 0
        assert hurried.leftovers() == []


def test_a_server_to_which_nobody_listens_any_more_drains_all_the_same(fresh: Server) -> None:
    fresh.wait_ready()
    assert fresh.process.stdout is not None
    fresh.process.stdout.close()

    async def end() -> FinishReason:
        with trio.fail_after(START_S):
            async with (
                connect(fresh.endpoint) as engine,
                engine.submit([5, 6], temperature=0.0, max_tokens=300) as stream,
            ):
                await read(stream, 1)
                fresh.process.terminate()
                return (await stream.completion()).finish_reason

    assert trio.run(end) is FinishReason.LENGTH
    assert fresh.wait() == 0
    assert fresh.errors() == ""


@pytest.mark.parametrize("output", [">&-", "> /dev/full", ">&- 2>&- <&-"])
def test_a_server_that_can_print_nothing_runs_and_drains_all_the_same(
    tmp_path: Path, output: str
) -> None:
    endpoint = f"ipc://{tmp_path}/server"
    command = f"exec {' '.join(CALLBOARD)} serve --model random:tiny --kv-cache-gb 0.02"
    process = subprocess.Popen(
        ["sh", "-c", f"{command} --listen {endpoint} {output}"], env=environment()
    )

    async def drain() -> list[int]:
        with trio.fail_after(START_S):
            async with (
                await_server(endpoint) as engine,
                engine.submit(PROMPTS[0], **GREEDY) as stream,
            ):
                await read(stream, 5)
                process.terminate()
                return (await stream.completion()).token_ids

    try:
        assert len(trio.run(drain)) == GREEDY["max_tokens"]
        assert process.wait(20.0) == 0
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def await_server(endpoint: str) -> AsyncIterator[Engine]:
    """Connect to a server that says to nobody when it is ready."""
    async with connect(endpoint, timeout=START_S) as engine:
        await engine.wait_for(State.RUNNING, timeout=START_S)
        yield engine


def test_a_third_interrupt_ends_a_server_at_once(fresh: Server) -> None:
    fresh.wait_ready()

    async def interrupt() -> None:
        with trio.fail_after(START_S):
            async with connect(fresh.endpoint) as engine:
                pids = [one.pid for one in (await engine.status()).replicas]
                os.kill(pids[0], signal.SIGSTOP)  # so that nothing ends by itself
                for _ in range(3):
                    fresh.process.send_signal(signal.SIGINT)
                    await trio.sleep(0.3)
            await all_ended(pids)

    trio.run(interrupt)
    assert fresh.wait() == 0
    assert fresh.leftovers() == []


def test_an_interrupt_during_the_start_ends_it_promptly(fresh: Server) -> None:
    deadline = time.monotonic() + START_S
    while not fresh.has_replica():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()

    fresh.process.send_signal(signal.SIGINT)

    assert fresh.wait() == 0
    assert time.monotonic() - began < 5.0
    assert fresh.leftovers() == []


def test_a_port_that_is_in_use_is_code_1_and_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        with serve(tmp_path, "--model", "random:tiny", "--listen", endpoint) as refused:
            code = refused.wait(START_S)

            assert code == 1
            assert refused.errors().count("\n") == 1
            assert f"in use: '{endpoint}'" in refused.errors()


def test_a_model_file_that_is_missing_or_foreign_is_code_1_and_named(tmp_path: Path) -> None:
    missing, foreign = tmp_path / "missing.gguf", tmp_path / "foreign.gguf"
    foreign.write_bytes(b"this is no model")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()

    listen = ("--listen", "tcp://127.0.0.1:0")
    with (
        serve(tmp_path / "a", "--model", str(missing), *listen) as one,
        serve(tmp_path / "b", "--model", str(foreign), *listen) as other,
    ):
        for refused, file in ((one, missing), (other, foreign)):
            assert refused.wait(START_S) == 1
            assert refused.errors().count("\n") == 1
            assert str(file) in refused.errors()
            assert refused.leftovers() == []
