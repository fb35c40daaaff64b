"""The whole tree inside one trio program, with a script where the model would be.

The clock jumps when there is nothing to do for a moment; the device's thread is real.
"""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from callboard.actors.routing import MAX_ATTEMPTS
from callboard.actors.testing import ScriptedRunner
from callboard.messages.base import unpack_ids
from callboard.messages.control import KVLevel, NodeStatus, State, WeightsLevel
from callboard.messages.errors import RequestError, RequestFailed
from callboard.messages.requests import FinishReason
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.stream import RequestStream

EOS = 999


@pytest.fixture
def clock() -> MockClock:
    """Jumps once nothing has happened for long enough that no job is on the device's thread."""
    return MockClock(autojump_threshold=0.03)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + tokens[-1] * 7 + len(tokens)) % 900


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request generates when nothing else happens."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device:
    """Makes the runners of one test, and does something to them at the steps it names."""

    def __init__(self, token: Callable[[list[int]], int] = next_token, **limits: int) -> None:
        self.runners: list[Runner] = []
        self.steps = 0
        self.at_step: dict[int, Callable[[], object]] = {}
        self._token = token
        self._limits = limits

    def parts(self) -> ReplicaParts:
        return ReplicaParts(
            make_runner=self._make,
            codec=None,
            text_for=None,
            vocab_size=1000,
            eos_token_ids=(EOS,),
        )

    def before_step(self) -> None:
        self.steps += 1
        self.at_step.pop(self.steps, lambda: None)()

    @property
    def runner(self) -> "Runner":
        return self.runners[-1]

    def _make(self) -> "Runner":
        self.runners.append(Runner(self, self._token, **self._limits))
        return self.runner


class Runner(ScriptedRunner):
    def __init__(self, device: Device, token: Callable[[list[int]], int], **limits: int) -> None:
        super().__init__(token, **limits)
        self._device = device

    def execute(self, step: RunStep) -> StepDone:
        self._device.before_step()
        return super().execute(step)


class Broken(Exception):
    """What a test breaks things with."""


def fail() -> None:
    raise Broken("on purpose")


@asynccontextmanager
async def engine_on(device: Device, **settings: Any) -> AsyncGenerator[Engine]:
    with trio.fail_after(100_000):  # of the clock that jumps
        async with open_engine(parts=device.parts(), **settings) as engine:
            yield engine


def kill(engine: Engine, name: str) -> None:
    """End the present life of a part by an error."""

    async def die() -> None:
        fail()

    cell = engine._system.cells[name]
    if cell.actor is not None and cell.state is not State.STARTING:
        cell.nursery.start_soon(die)


async def node(engine: Engine, name: str) -> NodeStatus:
    def find(tree: NodeStatus) -> NodeStatus | None:
        if tree.name == name:
            return tree
        return next((found for child in tree.children if (found := find(child))), None)

    found = find((await engine.status()).tree)
    assert found is not None
    return found


async def blocks(engine: Engine) -> tuple[Any, Any]:
    """Blocks free, and blocks there are."""
    details = (await node(engine, "replica-0/kv_allocator")).details
    return details["blocks_free"], details["blocks_total"]


async def restarted(engine: Engine, name: str) -> None:
    """Wait until a part is in a later life."""
    cell = engine._system.cells[name]
    while True:
        if cell.lives > 1 and cell.state is not State.STARTING and cell.actor is not None:
            return
        await trio.sleep(0.1)  # the clock jumps


async def read(stream: RequestStream) -> list[int]:
    """Read a stream to its end, looking at every delta."""
    tokens: list[int] = []
    async for delta in stream:
        assert delta.start == len(tokens), "a gap, or a token twice"
        tokens += unpack_ids(delta.token_ids)
    return tokens


class Audience:
    """Requests under way at once, and what came of each."""

    def __init__(self, engine: Engine, nursery: trio.Nursery) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.errors: dict[int, Exception] = {}
        self.tokens_seen = trio.Event()
        self._engine = engine
        self._nursery = nursery

    def ask_for(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> None:
        for index, prompt in enumerate(prompts):
            self._nursery.start_soon(self._listen, index, prompt, max_tokens, options)

    async def _listen(
        self, index: int, prompt: Sequence[int], max_tokens: int, options: dict[str, Any]
    ) -> None:
        tokens: list[int] = []
        try:
            async with self._engine.submit(prompt, max_tokens=max_tokens, **options) as stream:
                async for delta in stream:
                    assert delta.start == len(tokens), "a gap, or a token twice"
                    tokens += unpack_ids(delta.token_ids)
                    self.tokens_seen.set()
        except RequestFailed as error:
            self.errors[index] = error
        self.outputs[index] = tokens


def prompts_of(count: int) -> list[list[int]]:
    return [[index % 900, index // 7, 3] for index in range(count)]


def check(audience: Audience, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    assert audience.errors == {}
    for index, prompt in enumerate(prompts):
        assert audience.outputs[index] == alone(prompt, max_tokens)


# When nothing goes wrong.


async def test_many_requests_at_once_each_get_what_they_would_get_alone(clock: MockClock) -> None:
    device = Device()
    async with engine_on(device) as engine:
        prompts = prompts_of(100)
        completions = await engine.generate(prompts, max_tokens=20)
        assert [one.token_ids for one in completions] == [alone(prompt, 20) for prompt in prompts]
        assert {one.finish_reason for one in completions} == {FinishReason.LENGTH}
        assert await blocks(engine) == (64, 64)
    assert len(device.runners) == 1


async def test_prompts_of_all_lengths_in_parts_too(clock: MockClock) -> None:
    async with engine_on(Device(), prefill_chunk_tokens=7) as engine:
        prompts = [list(range(1, length)) for length in (2, 7, 8, 9, 64, 65, 200)]
        completions = await engine.generate(prompts, max_tokens=30)
        assert [one.token_ids for one in completions] == [alone(prompt, 30) for prompt in prompts]


async def test_the_end_of_sequence_ends_a_request(clock: MockClock) -> None:
    async with engine_on(Device(token=lambda tokens: tokens[-1] + 1)) as engine:
        (one,) = await engine.generate([[996]], max_tokens=20)
        assert (one.token_ids, one.finish_reason) == ([997, 998, 999], FinishReason.STOP)


async def test_several_replicas_share_the_work(clock: MockClock) -> None:
    device = Device()
    async with engine_on(device, replicas=3) as engine:
        prompts = prompts_of(30)
        completions = await engine.generate(prompts, max_tokens=10)
        assert [one.token_ids for one in completions] == [alone(prompt, 10) for prompt in prompts]
        assert all(runner.steps > 0 for runner in device.runners)
    assert len(device.runners) == 3


async def test_more_requests_at_once_than_a_mailbox_holds(clock: MockClock) -> None:
    async with engine_on(Device(max_rows=64, max_step_tokens=256)) as engine:
        prompts = [[index % 900] for index in range(4_500)]
        completions = await engine.generate(prompts, max_tokens=1)
        assert [one.token_ids for one in completions] == [alone(prompt, 1) for prompt in prompts]


async def test_a_wrong_request_is_refused_and_the_others_do_not_notice(clock: MockClock) -> None:
    async with engine_on(Device()) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(5), 20)
        for wrong in ([1001], list(range(1, 900)) * 2):
            with pytest.raises(RequestError):
                await engine.generate([wrong])
        with pytest.raises(RequestError):
            await engine.generate(["text"])
    check(audience, prompts_of(5), 20)


async def test_leaving_a_stream_early_frees_all_it_held_before_the_block_is_left(
    clock: MockClock,
) -> None:
    async with engine_on(Device()) as engine:
        for tokens_read in (0, 1, 10):
            async with engine.submit([1, 2, 3], max_tokens=200) as stream:
                for _ in range(tokens_read):
                    await anext(stream)
            assert stream.finish_reason is FinishReason.ABORT
            assert await blocks(engine) == (64, 64)


async def test_a_cancelled_reader_frees_all_it_held(clock: MockClock) -> None:
    async with engine_on(Device()) as engine:
        with trio.CancelScope() as scope:
            async with engine.submit([1, 2, 3], max_tokens=200) as stream:
                async for _ in stream:
                    scope.cancel()
        assert scope.cancelled_caught
        assert await blocks(engine) == (64, 64)


# Control.


async def test_no_step_runs_between_the_pause_and_the_unpause(clock: MockClock) -> None:
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(20), 30)
        for _ in range(5):
            await audience.tokens_seen.wait()
            await engine.pause()
            steps = device.steps
            await trio.sleep(3)
            assert device.steps == steps
            audience.tokens_seen = trio.Event()
            await engine.unpause()
    check(audience, prompts_of(20), 30)


@pytest.mark.parametrize("kv", KVLevel)
@pytest.mark.parametrize("weights", WeightsLevel)
async def test_a_suspension_gives_the_memory_back_and_loses_nothing(
    clock: MockClock, kv: KVLevel, weights: WeightsLevel
) -> None:
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(20), 30)
        await audience.tokens_seen.wait()
        reply = await engine.suspend(kv=kv, weights=weights)
        assert reply.bytes_freed == 2000 * (kv is not KVLevel.KEEP) + 1000 * (
            weights is not WeightsLevel.KEEP
        )
        assert device.runner.allocated is (kv is KVLevel.KEEP)
        assert device.runner.loaded is (weights is WeightsLevel.KEEP)
        await trio.sleep(3)
        await engine.resume()
    check(audience, prompts_of(20), 30)


async def test_stopping_lets_the_open_requests_finish(clock: MockClock) -> None:
    async with engine_on(Device()) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(10), 30)
        await audience.tokens_seen.wait()
        assert (await engine.stop(drain_s=60)).state is State.STOPPED
        check(audience, prompts_of(10), 30)


# When something fails.


async def test_a_step_that_fails_costs_no_request_a_token(clock: MockClock) -> None:
    device = Device()
    device.at_step = dict.fromkeys((1, 10, 25), fail)
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(30), 20)
    check(audience, prompts_of(30), 20)
    assert len(device.runners) == 4


async def test_a_request_that_kills_the_device_fails_by_name_and_no_other(
    clock: MockClock,
) -> None:
    def token(tokens: list[int]) -> int:
        if tokens[0] == 666:
            fail()
        return next_token(tokens)

    device = Device(token)
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        prompts = prompts_of(20)
        prompts[7] = [666]
        audience.ask_for(prompts, 10)
    assert list(audience.errors) == [7]
    assert "the device failed 4 times while it ran this request" in str(audience.errors[7])
    for index in {*range(20)} - {7}:
        assert audience.outputs[index] == alone(prompts[index], 10)
    assert len(device.runners) == 5


@pytest.mark.parametrize("name", ["replica-0/executor", "replica-0/scheduler", "replica-0"])
async def test_what_fails_while_paused_comes_back_paused(clock: MockClock, name: str) -> None:
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(10), 30)
        await audience.tokens_seen.wait()
        await engine.pause()
        steps = device.steps
        kill(engine, name)
        await restarted(engine, name)
        await trio.sleep(3)
        assert device.steps == steps
        assert len(device.runners) == 2
        await engine.unpause()
    check(audience, prompts_of(10), 30)


@pytest.mark.parametrize("name", ["replica-0/executor", "replica-0/scheduler", "replica-0"])
async def test_what_fails_while_suspended_takes_no_memory_until_resumed(
    clock: MockClock, name: str
) -> None:
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(10), 30)
        await audience.tokens_seen.wait()
        await engine.suspend(weights=WeightsLevel.DISCARD)
        steps = device.steps
        kill(engine, name)
        await restarted(engine, name)
        await trio.sleep(3)
        assert device.steps == steps
        assert len(device.runners) == 2
        assert not device.runner.allocated
        assert not device.runner.loaded
        await engine.resume()
    check(audience, prompts_of(10), 30)


PARTS = [
    "metrics",
    "coordinator",
    "replicas",
    "replica-0",
    "replica-0/scheduler",
    "replica-0/device",
    "replica-0/kv_allocator",
    "replica-0/executor",
    "replica-0/tokenizer",
    "replica-0/link",
]


@pytest.mark.parametrize("name", PARTS)
async def test_whichever_part_fails_the_streams_go_on(clock: MockClock, name: str) -> None:
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(40), 30)
        await audience.tokens_seen.wait()
        kill(engine, name)
        await restarted(engine, name)
    check(audience, prompts_of(40), 30)


# Each of these takes the replica's requests along, which after some such losses are given up.
REPLICA_PARTS = ["replica-0/scheduler", "replica-0/tokenizer", "replica-0/link"]
OTHER_PARTS = ["coordinator", "metrics", "replica-0/kv_allocator", "replica-0/executor"]


@pytest.mark.parametrize("seed", range(6))
async def test_two_hundred_requests_under_random_failures_all_come_out_right(
    clock: MockClock, seed: int
) -> None:
    rng = random.Random(seed)
    device = Device()
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        token = trio.lowlevel.current_trio_token()

        def killer(name: str) -> Callable[[], object]:
            return lambda: token.run_sync_soon(kill, engine, name)

        # Five failures of the device are as many as its supervisor bears before it fails, too.
        names = rng.choices(REPLICA_PARTS, k=MAX_ATTEMPTS - 1) + rng.choices(OTHER_PARTS, k=3)
        faults = [*map(killer, names), fail, fail]
        rng.shuffle(faults)
        device.at_step = dict(zip(rng.sample(range(3, 140), len(faults)), faults, strict=True))
        audience = Audience(engine, nursery)
        audience.ask_for(prompts_of(200), 12)
    check(audience, prompts_of(200), 12)
    assert device.at_step == {}


async def test_a_request_submitted_while_the_coordinator_is_away_waits_for_its_return(
    autojump_clock: MockClock,
) -> None:
    async with engine_on(Device()) as engine:
        [before] = await engine.generate([[1, 2, 3]], max_tokens=5)
        kill(engine, "coordinator")
        while engine._connection.present:
            await trio.lowlevel.checkpoint()

        [after] = await engine.generate([[1, 2, 3]], max_tokens=5)

        assert engine._system.cells["coordinator"].lives == 2
    assert after.token_ids == before.token_ids
