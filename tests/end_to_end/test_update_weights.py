"""New weights for the whole tree, inside one program: in all replicas or in none."""

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from callboard.actors.testing import ScriptedRunner
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    NodeStatus,
    State,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
    WeightsLevel,
)
from callboard.messages.errors import ControlRefused, DeadlineExceeded, WeightsError
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion
from callboard.supervision.root import Root

OLD, NEW = "random:tiny", "random:tiny#2"
PROMPTS = [[3 * number + 1, 7, 11 + number] for number in range(4)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offloaded waits for the disk, which these tests are not about."""
    if Path("/dev/shm").is_dir():
        monkeypatch.setattr("callboard.gpu.offload._FOLDER", Path("/dev/shm"))


@asynccontextmanager
async def small_engine(model: str = OLD, **settings: Any) -> AsyncGenerator[Engine]:
    with trio.fail_after(60):
        async with open_engine(
            model=model, device="cpu", threads=1, kv_cache_gb=0.01, block_tokens=4, **settings
        ) as engine:
            yield engine


async def ids(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [one.token_ids for one in await engine.generate(prompts, **GREEDY)]


def find(tree: NodeStatus, kind: str) -> list[NodeStatus]:
    below = [found for child in tree.children for found in find(child, kind)]
    return [tree, *below] if tree.kind == kind else below


async def versions(engine: Engine) -> list[int]:
    return [one.weights_version for one in (await engine.status()).replicas]


# With a small random model


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_updated_engine_is_what_one_started_with_the_new_weights_is(
    replicas: int,
) -> None:
    async with small_engine(NEW) as engine:
        wanted = await ids(engine)
    async with small_engine(replicas=replicas) as engine:
        old = await ids(engine)
        await engine.pause()
        reply = await engine.update_weights(NEW)
        status = await engine.status()
        await engine.unpause()

        assert old != wanted == await ids(engine)
        assert reply.state is State.PAUSED
        assert (status.model, status.weights_version) == (NEW, 1)
        assert await versions(engine) == [1] * replicas
        executors = find(status.tree, "Executor")
        assert [one.details["model"] for one in executors] == [NEW] * replicas


async def half_way(engine: Engine, num_steps: int = 10) -> list[Any]:
    """Have requests in the middle of their output, and the engine paused."""
    await engine.pause()
    streams = [await engine.add_request(f"{p}", p, **GREEDY) for p in PROMPTS]
    await engine.step(num_steps)
    return streams


async def finish(engine: Engine, streams: list[Any]) -> list[Completion]:
    await engine.unpause()
    return [await stream.completion() for stream in streams]


async def test_running_requests_go_on_as_if_the_new_weights_had_read_all_there_is() -> None:
    async with small_engine() as engine:
        streams = await half_way(engine)
        await engine.update_weights(NEW)
        answers = await finish(engine, streams)
    async with small_engine(NEW) as engine:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            [rest] = await engine.generate(
                [prompt + answer.token_ids[:10]], temperature=0.0, max_tokens=20
            )
            assert rest.token_ids == answer.token_ids[10:]
            assert answer.weights_versions == [0] * 10 + [1] * 20
            assert answer.weights_version == 1


async def test_running_requests_may_keep_the_old_keys_and_values() -> None:
    async def run(**options: Any) -> tuple[list[list[int]], int]:
        async with small_engine() as engine:
            streams = await half_way(engine)
            await engine.update_weights(NEW, **options)
            answers = await finish(engine, streams)
            [metrics] = find((await engine.status()).tree, "Metrics")
            computed = int(metrics.details["tokens_computed"])
            return [one.token_ids for one in answers], computed

    kept, few = await run(keep_kv=True)
    dropped, many = await run()

    assert many == few + len(PROMPTS) * (3 + 9)
    assert kept != dropped
    assert [tokens[:10] for tokens in kept] == [tokens[:10] for tokens in dropped]


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_no_prefix_of_old_weights_is_ever_found(keep_kv: bool) -> None:
    prompt = list(range(1, 14))
    cached = []
    async with small_engine() as engine:
        for version in range(4):
            if version:
                streams = await half_way(engine)
                await engine.update_weights(f"random:tiny#{version}", keep_kv=keep_kv)
                await finish(engine, streams)
            answers = [
                answer
                for _ in range(2)
                for answer in await engine.generate([prompt], temperature=0.0, max_tokens=8)
            ]
            async with small_engine(f"random:tiny#{version}") as fresh:
                [alone] = await fresh.generate([prompt], temperature=0.0, max_tokens=8)
            assert [one.token_ids for one in answers] == [alone.token_ids] * 2
            cached.append([one.usage.cached_tokens for one in answers])
    assert cached == [[0, 12]] * 4


@pytest.mark.parametrize("kv", KVLevel)
@pytest.mark.parametrize("weights", WeightsLevel)
async def test_a_suspended_engine_has_the_new_weights_when_it_resumes(
    kv: KVLevel, weights: WeightsLevel
) -> None:
    async with small_engine(NEW) as engine:
        wanted = await ids(engine, [list(range(1, 14))])
    async with small_engine() as engine:
        await ids(engine, [list(range(1, 14))])  # whose blocks are cached
        await engine.suspend(kv=kv, weights=weights)
        reply = await engine.update_weights(NEW, version=7)
        [executor] = find((await engine.status()).tree, "Executor")
        resumed = await engine.resume()

        assert (reply.state, resumed.state) == (State.SUSPENDED, State.RUNNING)
        assert bool(executor.details["weights_bytes"]) is (weights is WeightsLevel.KEEP)
        assert executor.details["weights_version"] == 7
        [answer] = await engine.generate([list(range(1, 14))], **GREEDY)
        assert ([answer.token_ids], answer.usage.cached_tokens) == (wanted, 0)


@pytest.mark.parametrize("weights", WeightsLevel)
async def test_weights_that_cannot_be_used_leave_everything_as_it_was(
    weights: WeightsLevel,
) -> None:
    async with small_engine(replicas=2) as engine:
        old = await ids(engine)
        streams = await half_way(engine)
        for suspended in (False, True):
            if suspended:
                await engine.suspend(kv="keep", weights=weights)
            with pytest.raises(WeightsError, match="missing: no such file or folder"):
                await engine.update_weights("missing")
            assert await versions(engine) == [0, 0]
        assert (await engine.resume()).state is State.PAUSED

        assert [one.token_ids for one in await finish(engine, streams)] == old


async def test_versions_grow_and_an_update_may_be_repeated() -> None:
    async with small_engine() as engine:
        with pytest.raises(ControlRefused, match="the tree is running: pause first"):
            await engine.update_weights(NEW)
        await engine.pause()
        for _ in range(2):
            await engine.update_weights(NEW, version=5)
        for source, version in ((NEW, 4), (OLD, 5)):
            with pytest.raises(ControlRefused, match="must be above 5"):
                await engine.update_weights(source, version=version)
        await engine.update_weights(OLD)

        assert await versions(engine) == [6]


async def test_a_device_and_a_replica_that_fail_afterwards_come_back_with_the_new_weights() -> None:
    async with small_engine(NEW) as engine:
        wanted = await ids(engine)
    async with small_engine() as engine:
        await engine.pause()
        await engine.update_weights(NEW)
        await engine.unpause()
        for part in ("replica-0/executor", "replica-0/scheduler", "replica-0"):
            kill(engine, part)

            assert await ids(engine) == wanted
            assert await versions(engine) == [1]


def kill(engine: Engine, name: str) -> None:
    """End the present life of a part by an error."""

    async def die() -> None:
        raise RuntimeError("on purpose")

    engine._system.cells[name].nursery.start_soon(die)


# With scripts for devices: what goes wrong in one of two replicas


class Device:
    """Makes the runners; `trouble` is what happens to the one that is made second."""

    def __init__(self, **trouble: Callable[[], None]) -> None:
        self.runners: list[Runner] = []
        self.trouble = trouble

    def parts(self) -> ReplicaParts:
        return ReplicaParts(
            make_runner=self._make, codec=None, text_for=None, vocab_size=1000, eos_token_ids=()
        )

    def _make(self) -> "Runner":
        self.runners.append(Runner(self.trouble if len(self.runners) == 1 else {}))
        return self.runners[-1]


class Runner(ScriptedRunner):
    """Counts up by one more than its weights' version, and meets with what a test has for it."""

    def __init__(self, trouble: dict[str, Callable[[], None]]) -> None:
        super().__init__(lambda tokens: (tokens[-1] + 1 + self.weights.version) % 1000)
        self._trouble = trouble

    def prepare_weights(self, weights: Weights) -> None:
        self._trouble.get("prepare", lambda: None)()
        super().prepare_weights(weights)

    def commit_weights(self, weights: Weights) -> None:
        self._trouble.get("commit", lambda: None)()
        super().commit_weights(weights)
        self._trouble.get("committed", lambda: None)()

    def execute(self, step: RunStep) -> StepDone:
        assert self.prepared is None, "what was prepared was forgotten"
        return super().execute(step)


def crash() -> None:
    raise RuntimeError("on purpose")


def refuse() -> None:
    raise WeightsError("new.safetensors: tensor 'a' is missing")


def once(trouble: Callable[[], None]) -> Callable[[], None]:
    """Have the trouble the first time only."""
    left = [trouble]
    return lambda: left.pop()() if left else None


@pytest.fixture
def clock() -> MockClock:
    """Jumps once nothing has happened for long enough that no job is on the device's thread."""
    return MockClock(autojump_threshold=0.03)


@asynccontextmanager
async def two_replicas(device: Device) -> AsyncGenerator[Engine]:
    with trio.fail_after(10_000):  # of the clock that jumps
        async with open_engine(parts=device.parts(), replicas=2) as engine:
            yield engine


async def counts(engine: Engine) -> set[tuple[int, ...]]:
    """What comes of the same prompt from all replicas: one answer, or they are not all alike."""
    return {tuple(one.token_ids) for one in await engine.generate([[10]] * 4, max_tokens=3)}


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"prepare": refuse}, "replica-1/executor: new.safetensors: tensor 'a' is missing"),
        ({"prepare": crash}, "replica-1/executor failed: RuntimeError: on purpose"),
        ({"commit": refuse}, "replica-1/executor: new.safetensors: tensor 'a' is missing"),
    ],
)
async def test_what_one_replica_cannot_do_none_does(
    clock: MockClock, trouble: dict[str, Callable[[], None]], reason: str
) -> None:
    device = Device(**{when: once(what) for when, what in trouble.items()})
    async with two_replicas(device) as engine, trio.open_nursery() as nursery:
        open_before: list[Completion] = []

        async def ask(number: int) -> None:
            open_before.extend(await engine.generate([[number]], max_tokens=100))

        for number in range(4):
            nursery.start_soon(ask, number)
        await engine.pause()
        with pytest.raises(WeightsError) as caught:
            await engine.update_weights("new")
        assert reason in str(caught.value)
        assert str(caught.value).endswith("; weights 0 stay in use")
        assert (await engine.status()).state is State.PAUSED
        await engine.unpause()
        assert await counts(engine) == {(11, 12, 13)}

        await engine.pause()
        await engine.update_weights("new")
        await engine.unpause()
        assert await counts(engine) == {(12, 14, 16)}
    assert [len(one.token_ids) for one in open_before] == [100] * 4


@pytest.mark.parametrize("when", ["commit", "committed"])
async def test_a_device_that_crashes_when_it_commits_comes_back_with_the_new_weights(
    clock: MockClock, when: str
) -> None:
    device = Device(**{when: once(crash)})
    async with two_replicas(device) as engine:
        await engine.pause()
        reply = await engine.update_weights("new")
        await engine.unpause()

        assert reply.done
        assert len(device.runners) == 3
        assert await counts(engine) == {(12, 14, 16)}


async def test_a_device_that_crashes_between_the_phases_reads_the_weights_itself(
    clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    async with two_replicas(device) as engine:
        await engine.pause()
        root = engine._system.cells["root"].actor
        assert isinstance(root, Root)
        relay = root.relay

        async def crash_before_commit(verb: Verb, timeout: float) -> ControlReply:
            if isinstance(verb, UpdateWeights) and verb.phase is UpdatePhase.COMMIT:
                assert device.runners[0].prepared == verb.weights
                kill(engine, "replica-0/executor")
                await engine._system.cells["replica-0/executor"].stopped.wait()
            return await relay(verb, timeout)

        monkeypatch.setattr(root, "relay", crash_before_commit)
        reply = await engine.update_weights("new")
        await engine.unpause()

        assert reply.done
        assert len(device.runners) == 3
        assert await counts(engine) == {(12, 14, 16)}


@pytest.mark.parametrize("phase", ["prepare", "commit"])
async def test_a_replica_that_is_late_is_named_and_replicas_never_differ(
    clock: MockClock, phase: str
) -> None:
    go_on = threading.Event()

    def wait() -> None:
        assert go_on.wait(10)

    device = Device(**{phase: once(wait)})
    async with two_replicas(device) as engine:
        await engine.pause()
        with pytest.raises((WeightsError, DeadlineExceeded)) as caught:
            await engine.update_weights("new", version=1, timeout=5.0)
        assert "replica-1/executor" in str(caught.value)
        if phase == "commit":
            with pytest.raises(ControlRefused, match="repeat update-weights"):
                await engine.unpause()
        go_on.set()
        if phase == "commit":
            await engine.update_weights("new", version=1)
        await engine.unpause()

        assert await counts(engine) == {(12, 14, 16) if phase == "commit" else (11, 12, 13)}


async def test_weights_that_cannot_be_read_at_resume_leave_the_tree_suspended(
    clock: MockClock,
) -> None:
    class Forgetful(Runner):
        def load(self) -> None:
            if self.weights.source == "gone":
                raise WeightsError("gone.safetensors: no such file")
            super().load()

    device = Device()
    device._make = lambda: device.runners.append(Forgetful({})) or device.runners[-1]  # type: ignore[func-returns-value,method-assign]
    async with two_replicas(device) as engine:
        await engine.suspend(weights="discard")
        await engine.update_weights("gone")
        with pytest.raises(WeightsError, match=r"executor: gone.safetensors: no such file"):
            await engine.resume()
        assert (await engine.status()).state is State.SUSPENDED
        assert not any(runner.loaded for runner in device.runners)

        await engine.update_weights("new")
        assert (await engine.resume()).state is State.RUNNING
        assert await counts(engine) == {(13, 16, 19)}


async def test_an_update_that_is_undone_while_all_are_aborted_disturbs_nobody(
    clock: MockClock,
) -> None:
    async with two_replicas(Device()) as engine:
        streams = [
            await engine.add_request(f"{number}", [number], max_tokens=200) for number in range(8)
        ]
        await engine.pause()
        await engine.abort(all=True)
        await engine.update_weights("new")
        await engine.unpause()

        assert [str((await stream.completion()).finish_reason) for stream in streams] == [
            "abort"
        ] * 8
        assert await counts(engine) == {(12, 14, 16)}
