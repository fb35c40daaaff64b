"""What docs/explanation/failure.md promises, shown with a real model that is tiny.

Whatever fails, each stream goes on with the tokens it would have had, greedy or sampled, none of
them twice and none missing. It is computed in float64, so that no rounding shows in a token.
"""

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch
import trio

from callboard.actors.device_thread import num_left_behind
from callboard.gpu.runner import ModelRunner
from callboard.gpu.step_inputs import StepInputs
from callboard.messages.base import unpack_ids
from callboard.messages.control import NodeStatus
from callboard.messages.errors import DeviceLost, RequestFailed
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.model import replica_parts
from callboard.supervision.settings import Settings

SETTINGS = Settings(
    model="random:tiny", dtype="float64", threads=1, kv_cache_gb=0.02, max_model_len=256
)
PROMPTS = [[number + 1, 2 * number + 3, 7] for number in range(8)]
MAX_TOKENS = 40


def sampling(number: int) -> dict[str, Any]:
    """Every other request is greedy; the others have a seed each."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    return {"max_tokens": MAX_TOKENS, **drawn}


class Device:
    """What a test does to the device's steps: a call before each, with the step's inputs."""

    def __init__(self) -> None:
        self.steps = 0
        self.before: Callable[[StepInputs], object] = lambda inputs: None


class FailingRunner(ModelRunner):
    """A real runner, disturbed in the middle of a step."""

    device: Device

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        self.device.steps += 1
        self.device.before(inputs)
        return super()._hidden(inputs)


class Broken(Exception):
    """What a test breaks things with."""


@asynccontextmanager
async def engine_on(device: Device, **changes: Any) -> AsyncGenerator[Engine]:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    real = replica_parts(settings)

    def make_runner() -> ModelRunner:
        runner = real.make_runner()
        assert isinstance(runner, ModelRunner)
        runner.__class__ = FailingRunner
        runner.device = device  # type: ignore[attr-defined]  # which its class has now
        return runner

    with trio.fail_after(60):
        parts = msgspec.structs.replace(real, make_runner=make_runner)
        async with open_engine(settings, parts=parts) as engine:
            yield engine


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


def kill(engine: Engine, name: str) -> None:
    """End the present life of a part by an error."""

    async def die() -> None:
        raise Broken("on purpose")

    engine._system.cells[name].nursery.start_soon(die)


class Audience:
    """Eight streams at once, every delta of which is looked at."""

    def __init__(self, engine: Engine) -> None:
        self.outputs: dict[int, list[int]] = {}
        self.errors: dict[int, RequestFailed] = {}
        self.heard = trio.Event()  # once each stream has some tokens
        self._silent = set(range(len(PROMPTS)))
        self._engine = engine

    async def listen(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(len(PROMPTS)):
                nursery.start_soon(self._listen, number)

    async def _listen(self, number: int) -> None:
        tokens = self.outputs[number] = []
        try:
            async with self._engine.submit(PROMPTS[number], **sampling(number)) as stream:
                async for delta in stream:
                    assert delta.start == len(tokens), "a gap, or a token twice"
                    tokens += unpack_ids(delta.token_ids)
                    self._note(number, len(tokens))
        except RequestFailed as error:
            self.errors[number] = error

    def _note(self, number: int, num_tokens: int) -> None:
        if num_tokens >= 5:
            self._silent.discard(number)
        if not self._silent:
            self.heard.set()


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[int]]:
    """What each stream says when nothing fails."""

    async def listen() -> dict[int, list[int]]:
        async with engine_on(Device()) as engine:
            audience = Audience(engine)
            await audience.listen()
        return audience.outputs

    return trio.run(listen)


def find(tree: NodeStatus, name: str) -> NodeStatus:
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if node.name == name:
            return node
        nodes += node.children
    raise AssertionError(f"the tree has no {name}")


async def part(engine: Engine, name: str) -> NodeStatus:
    return find((await engine.status()).tree, name)


# A part that crashes


@pytest.mark.parametrize(
    "name",
    [
        "replica-0/executor",
        "replica-0/kv_allocator",
        "replica-0/scheduler",
        "replica-0/tokenizer",
        "replica-0/link",
        "replica-0",
        "coordinator",
    ],
)
@pytest.mark.parametrize("pipeline_depth", [1, 2])
async def test_streams_go_on_when_a_part_crashes(
    undisturbed: dict[int, list[int]], name: str, pipeline_depth: int
) -> None:
    async with engine_on(Device(), pipeline_depth=pipeline_depth) as engine:
        audience = Audience(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(audience.listen)
            await audience.heard.wait()
            kill(engine, name)

        assert engine._system.cells[name].lives == 2
    assert audience.outputs == undisturbed


async def test_streams_go_on_when_a_step_crashes(undisturbed: dict[int, list[int]]) -> None:
    def fail(inputs: StepInputs) -> None:
        if device.steps in (3, 20):
            raise RuntimeError("on purpose")

    device = Device()
    device.before = fail
    async with engine_on(device) as engine:
        audience = Audience(engine)
        await audience.listen()

        assert (await part(engine, "replica-0/executor")).restarts == 2
    assert audience.outputs == undisturbed


# Memory


@pytest.mark.parametrize("pipeline_depth", [1, 2])
async def test_streams_go_on_when_a_step_has_not_the_memory_it_needs(
    undisturbed: dict[int, list[int]], pipeline_depth: int
) -> None:
    def fail(inputs: StepInputs) -> None:
        if inputs.num_tokens > 5:
            raise torch.OutOfMemoryError("5 tokens fit")

    device = Device()
    device.before = fail
    async with engine_on(device, pipeline_depth=pipeline_depth) as engine:
        audience = Audience(engine)
        await audience.listen()

        executor = await part(engine, "replica-0/executor")
        assert executor.restarts == 0
        assert int(executor.details["out_of_memory"]) >= 1
        assert int((await part(engine, "replica-0/scheduler")).details["max_tokens"]) <= 5
        allocator = (await part(engine, "replica-0/kv_allocator")).details
        assert allocator["blocks_free"] == allocator["blocks_total"]
    assert audience.outputs == undisturbed


async def test_a_request_for_which_there_is_never_the_memory_is_failed_by_name() -> None:
    def fail(inputs: StepInputs) -> None:
        if 9 in inputs.input_ids_T.tolist():
            raise torch.OutOfMemoryError("not for this one")

    device = Device()
    async with engine_on(device) as engine:
        [before] = await engine.generate([[5]], temperature=0.0, max_tokens=3)
        device.before = fail
        with pytest.raises(RequestFailed, match="ran out of memory 4 times"):
            await engine.generate([[9, 9]], max_tokens=3)
        device.before = lambda inputs: None
        [after] = await engine.generate([[5]], temperature=0.0, max_tokens=3)

        assert (await part(engine, "replica-0/executor")).restarts == 0
    assert after.token_ids == before.token_ids


# A step that does not end


async def test_streams_go_on_when_a_step_does_not_end(undisturbed: dict[int, list[int]]) -> None:
    let_go = threading.Event()

    def hang(inputs: StepInputs) -> None:
        if device.steps == 10:
            let_go.wait(30)

    device = Device()
    device.before = hang
    try:
        async with engine_on(device, step_timeout_s=0.5) as engine:
            audience = Audience(engine)
            await audience.listen()

            executor = await part(engine, "replica-0/executor")
            assert (executor.restarts, executor.details["threads_left_behind"]) == (1, 1)
        assert audience.outputs == undisturbed
    finally:
        let_go.set()
    with trio.fail_after(10):
        while num_left_behind():  # noqa: ASYNC110  # the end of a thread wakes nobody
            await trio.sleep(0.001)


async def test_the_request_in_which_steps_do_not_end_is_found_and_failed_by_name() -> None:
    let_go = threading.Event()

    device = Device()
    device.before = lambda inputs: 9 in inputs.input_ids_T.tolist() and let_go.wait(30)
    try:
        async with engine_on(device, step_timeout_s=0.2) as engine:
            with pytest.raises(RequestFailed, match="the device failed 4 times"):
                await engine.generate([[9, 9]], max_tokens=3)
            [answer] = await engine.generate([[5]], temperature=0.0, max_tokens=3)
    finally:
        let_go.set()
    assert len(answer.token_ids) == 3


# A device that is lost


async def test_an_embedded_engine_whose_device_is_lost_says_so_and_ends() -> None:
    def fail(inputs: StepInputs) -> None:
        raise DeviceLost("cuda:0: an illegal memory access was encountered")

    async def use() -> None:
        async with engine_on(device) as engine:
            device.before = fail
            await engine.generate([[5]], temperature=0.0, max_tokens=3)

    device = Device()
    with pytest.raises(DeviceLost, match="illegal memory access"):
        await use()
    assert device.steps == 1
