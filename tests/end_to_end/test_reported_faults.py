"""Faults that users reported of other engines, tried on the whole tree: none of them may happen.

A script stands where the model would be, or random weights where log-probabilities matter.
"""

import gc
import random
import threading
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.session import PING_INTERVAL_S
from callboard.actors.testing import ScriptedRunner
from callboard.gpu.text import TextStream
from callboard.messages.base import unpack_floats, unpack_ids
from callboard.messages.control import KVLevel, NodeStatus, WeightsLevel
from callboard.messages.errors import RequestError, RequestFailed
from callboard.messages.requests import FinishReason
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion
from callboard.supervision.stream import RequestStream

VOCAB = 1000
EOS = 999


@pytest.fixture
def clock() -> MockClock:
    """Jumps once nothing has happened for long enough that no job is on the device's thread."""
    return MockClock(autojump_threshold=0.03)


# The engine of a test, and what is looked at.


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + tokens[-1] * 7 + len(tokens)) % 900


def alone(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request generates when nothing else happens."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Device:
    """A scripted device that says what it was given, and does something at the steps it is told."""

    def __init__(self, token: Callable[[list[int]], int] = next_token, **limits: int) -> None:
        self.steps = 0
        self.at_step: dict[int, Callable[[], object]] = {}
        self.fed: list[RunStep] = []
        self.taking_memory: Callable[[], object] = lambda: None
        self._token = token
        self._limits = limits

    def make_runner(self) -> ScriptedRunner:
        device = self

        class Runner(ScriptedRunner):
            def allocate(self) -> None:
                device.taking_memory()
                super().allocate()

            def execute(self, step: RunStep) -> StepDone:
                device.steps += 1
                device.fed.append(step)
                device.at_step.pop(device.steps, lambda: None)()
                return super().execute(step)

        return Runner(self._token, **self._limits)

    def prompts(self) -> list[list[int]]:
        """Return every prompt that was admitted."""
        return [unpack_ids(admit.prompt) for step in self.fed for admit in step.admits]


class Letters:
    """A tokenizer for prompts: one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(turn["content"] for turn in messages)


class Words:
    """A vocabulary for outputs, of texts and bytes; the last id ends a text and is not shown."""

    strips_leading_space = False
    special_token_ids = frozenset({EOS})

    def __init__(self, *words: str | bytes) -> None:
        self._words = [word.encode() if isinstance(word, str) else word for word in words]

    def token_bytes(self, token_id: int) -> bytes:
        return self._words[token_id] if token_id < len(self._words) else b""

    def stream(self, params: SamplingParams) -> TextStream:
        return TextStream(
            self,
            stop=params.stop,
            include_stop=params.include_stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )


@asynccontextmanager
async def engine_on(
    device: Device, words: Words | None = None, **settings: Any
) -> AsyncGenerator[Engine]:
    parts = ReplicaParts(
        make_runner=device.make_runner,
        codec=None if words is None else Letters(),
        text_for=None if words is None else words.stream,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
    )
    with trio.fail_after(100_000):  # of the clock that jumps
        async with open_engine(parts=parts, **settings) as engine:
            yield engine
            assert await is_idle(engine)


def kill(engine: Engine, name: str) -> None:
    """End the present life of a part by an error."""

    async def die() -> None:
        raise RuntimeError("on purpose")

    engine._system.cells[name].nursery.start_soon(die)


async def is_idle(engine: Engine) -> bool:
    """Whether no request holds anything, waits anywhere, or is still known."""
    status = await engine.status()
    [replica] = status.replicas
    coordinator = next(node for node in status.tree.children if node.name == "coordinator")
    return (
        (replica.running, replica.waiting, replica.paused) == (0, 0, 0)
        and replica.blocks_free == replica.blocks_total
        and coordinator.details["open_requests"] == 0
    )


async def details(engine: Engine, name: str) -> dict[str, int | float | str]:
    def nodes(tree: NodeStatus) -> Iterator[NodeStatus]:
        yield tree
        for child in tree.children:
            yield from nodes(child)

    tree = (await engine.status()).tree
    return next(node.details for node in nodes(tree) if node.name == name)


class Read:
    """What a stream said, delta by delta."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.finishes: list[FinishReason] = []

    async def all_of(self, stream: RequestStream, up_to: int | None = None) -> "Read":
        """Read to the end, or until there are so many tokens."""
        while up_to is None or len(self.token_ids) < up_to:
            try:
                delta = await anext(stream)
            except StopAsyncIteration:
                break
            assert delta.start == len(self.token_ids), "a gap, or a token twice"
            assert not self.finishes, "a delta behind the terminal one"
            self.token_ids += unpack_ids(delta.token_ids)
            self.text += delta.text
            self.logprobs += unpack_floats(delta.logprobs)
            self.top_logprobs += delta.top_logprobs
            self.finishes += [delta.finish] if delta.finish else []
        return self

    @property
    def ending(self) -> FinishReason:
        [finish] = self.finishes
        return finish


async def answer(engine: Engine, prompt: Any, **options: Any) -> Completion:
    completions: list[Completion] = await engine.generate([prompt], **options)
    return completions[0]


# Aborts, at any time, of anything.


@pytest.mark.parametrize("number", range(1, 9))
async def test_a_request_aborted_while_any_of_its_steps_runs_ends_at_once_and_alone(
    clock: MockClock, number: int
) -> None:
    device = Device()
    token, step_runs, aborted = trio.lowlevel.current_trio_token(), trio.Event(), threading.Event()

    def wait_for_the_abort() -> None:
        token.run_sync_soon(step_runs.set)
        assert aborted.wait(10), "the abort did not come through while the step ran"

    device.at_step[number] = wait_for_the_abort
    prompt, others = list(range(1, 11)), []
    async with engine_on(device, prefill_chunk_tokens=4) as engine, trio.open_nursery() as nursery:

        async def be_another() -> None:
            others.append(await answer(engine, [7], max_tokens=12))

        nursery.start_soon(be_another)
        async with engine.submit(prompt, max_tokens=12, request_id="a") as stream:
            await step_runs.wait()
            assert (await engine.abort("a")).aborted == 1
            await engine.abort("a")
            assert (await engine.abort("never there")).aborted == 0
            read = await Read().all_of(stream)
            aborted.set()
    assert read.ending is FinishReason.ABORT
    assert read.token_ids == alone(prompt, 12)[: len(read.token_ids)]
    assert [other.token_ids for other in others] == [alone([7], 12)]


async def test_aborts_that_come_late_or_twice_or_for_nobody_are_answered_and_change_nothing(
    clock: MockClock,
) -> None:
    async with engine_on(Device()) as engine:
        async with engine.submit([1], max_tokens=2, request_id="a") as stream:
            await Read().all_of(stream)
        for name in ("a", "a", "never there", "x" * 10_000):
            assert (await engine.abort(name)).aborted == 0
        assert (await engine.abort(all=True)).aborted == 0
        assert (await answer(engine, [5], max_tokens=4)).token_ids == alone([5], 4)


async def test_an_abort_of_no_id_aborts_nobody(clock: MockClock) -> None:
    async with engine_on(Device()) as engine, engine.submit([1], max_tokens=30) as stream:
        with pytest.raises(RequestError, match="say which request"):
            await engine.abort("")
        assert (await Read().all_of(stream)).token_ids == alone([1], 30)


async def test_no_token_is_computed_of_a_request_aborted_in_the_queue(clock: MockClock) -> None:
    device = Device(max_rows=1)
    async with engine_on(device) as engine:
        async with (
            engine.submit([1], max_tokens=20, request_id="runs") as runs,
            engine.submit([2, 2], max_tokens=20, request_id="waits") as waits,
        ):
            await engine.abort("waits")
            assert (await Read().all_of(waits)).token_ids == []
            assert (await Read().all_of(runs)).token_ids == alone([1], 20)
        await answer(engine, [3], max_tokens=1)
    assert device.prompts() == [[1], [3]]


async def test_at_most_one_more_chunk_is_computed_of_a_prompt_that_is_aborted(
    clock: MockClock,
) -> None:
    device = Device()
    token, step_runs, aborted = trio.lowlevel.current_trio_token(), trio.Event(), threading.Event()

    def wait_for_the_abort() -> None:
        token.run_sync_soon(step_runs.set)
        assert aborted.wait(10)

    device.at_step[2] = wait_for_the_abort
    async with (
        engine_on(device, prefill_chunk_tokens=16) as engine,
        engine.submit([1] * 200, max_tokens=2, request_id="a") as stream,
    ):
        await step_runs.wait()
        await engine.abort("a")
        await Read().all_of(stream)
        aborted.set()
    begun = [admit.num_tokens for step in device.fed for admit in step.admits]
    continued = [chunk.num_tokens for step in device.fed for chunk in step.continues]
    assert sum(begun + continued) <= 3 * 16


@pytest.mark.parametrize("suspended", [None, *KVLevel])
async def test_a_request_aborted_while_nothing_runs_never_runs_again(
    clock: MockClock, suspended: KVLevel | None
) -> None:
    device = Device(max_rows=1)
    async with engine_on(device) as engine:
        async with (
            engine.submit([1], max_tokens=200, request_id="running") as running,
            engine.submit([2], max_tokens=200, request_id="waiting") as waiting,
        ):
            read = await Read().all_of(running, up_to=3)
            await (engine.pause() if suspended is None else engine.suspend(kv=suspended))
            steps = device.steps
            for name in ("running", "waiting", "running"):
                await engine.abort(name)
            assert (await read.all_of(running)).ending is FinishReason.ABORT
            assert (await Read().all_of(waiting)).ending is FinishReason.ABORT
            assert await is_idle(engine)
            if suspended is not None:
                await engine.resume()
            await engine.unpause()
        assert device.steps == steps
        assert (await answer(engine, [5], max_tokens=4)).token_ids == alone([5], 4)


@pytest.mark.parametrize("how", ["resuming", "device restarting"])
async def test_a_request_aborted_while_the_device_takes_its_memory_ends_at_once(
    clock: MockClock, how: str
) -> None:
    device = Device(max_rows=1)
    token, begun, aborted = trio.lowlevel.current_trio_token(), trio.Event(), threading.Event()

    def wait_for_the_aborts() -> None:
        token.run_sync_soon(begun.set)
        assert aborted.wait(10), "the aborts did not come through while memory was taken"

    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        async with (
            engine.submit([1], max_tokens=200, request_id="running") as running,
            engine.submit([2], max_tokens=200, request_id="waiting") as waiting,
        ):
            read = await Read().all_of(running, up_to=3)
            device.taking_memory = wait_for_the_aborts
            if how == "resuming":
                await engine.suspend()
                nursery.start_soon(engine.resume)
            else:
                kill(engine, "replica-0/executor")
            await begun.wait()
            for name in ("running", "waiting", "running"):
                await engine.abort(name)
            assert (await read.all_of(running)).ending is FinishReason.ABORT
            assert (await Read().all_of(waiting)).ending is FinishReason.ABORT
            aborted.set()
        assert (await answer(engine, [5], max_tokens=4)).token_ids == alone([5], 4)
    assert read.token_ids == alone([1], 200)[: len(read.token_ids)]


async def test_requests_aborted_at_random_leave_nothing_behind(clock: MockClock) -> None:
    """Beginnings are shared, and there is room for a third of the rows only."""
    rng = random.Random(0)
    shared = [rng.randrange(900) for _ in range(20)]
    device = Device(num_blocks=24)
    async with engine_on(device, prefill_chunk_tokens=7) as engine:

        async def ask_and_abort(index: int, delay: float, up_to: int) -> None:
            prompt = [*shared[: index % 21], index % 900]
            await trio.sleep(delay)
            async with engine.submit(prompt, max_tokens=30, request_id=str(index)) as stream:
                read = await Read().all_of(stream, up_to)
                if index % 3:  # else the block that is left aborts it
                    await engine.abort(str(index))
                    await read.all_of(stream)
            assert stream.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert read.token_ids == alone(prompt, 30)[: len(read.token_ids)]

        async with trio.open_nursery() as nursery:
            for index in range(300):
                nursery.start_soon(ask_and_abort, index, rng.randrange(8), rng.randrange(25))


# Admission: ids and lengths.


async def test_an_id_is_free_again_however_its_request_ended(clock: MockClock) -> None:
    async with engine_on(Device()) as engine:
        for _ in range(3):
            async with engine.submit([1], max_tokens=2, request_id="x") as stream:
                assert (await Read().all_of(stream)).ending is FinishReason.LENGTH
            async with engine.submit([1], max_tokens=200, request_id="x") as stream:
                await engine.abort("x")
                assert (await Read().all_of(stream)).ending is FinishReason.ABORT
            async with engine.submit([1], max_tokens=200, request_id="x"):
                pass
            with pytest.raises(RequestError):
                async with engine.submit([VOCAB], request_id="x"):
                    pass


async def test_an_empty_prompt_among_others_is_refused_alone(clock: MockClock) -> None:
    async with engine_on(Device()) as engine, trio.open_nursery() as nursery:
        answers: dict[int, list[int]] = {}

        async def ask(index: int) -> None:
            answers[index] = (await answer(engine, [index], max_tokens=5)).token_ids

        for index in range(3):
            nursery.start_soon(ask, index)
        with pytest.raises(RequestError, match="empty"):
            await answer(engine, [])
    assert answers == {index: alone([index], 5) for index in range(3)}


async def test_without_a_limit_a_request_ends_where_the_context_does(clock: MockClock) -> None:
    async with engine_on(Device(max_model_len=32)) as engine:
        whole = await answer(engine, [1, 2, 3, 4])
        assert whole.token_ids == alone([1, 2, 3, 4], 28)
        assert whole.finish_reason is FinishReason.LENGTH
        assert (await answer(engine, [1] * 31)).token_ids == alone([1] * 31, 1)


@pytest.mark.parametrize("length", [32, 33, 900])
async def test_a_prompt_as_long_as_the_context_is_refused_with_both_lengths(
    clock: MockClock, length: int
) -> None:
    async with engine_on(Device(max_model_len=32)) as engine:
        with pytest.raises(RequestError, match=rf"\b{length} tokens.*\b32\b"):
            await answer(engine, [1] * length)
        assert (await answer(engine, [1] * 31, max_tokens=1)).token_ids == alone([1] * 31, 1)


async def test_what_fits_the_context_but_not_the_pool_is_refused_and_holds_up_nobody(
    clock: MockClock,
) -> None:
    async with engine_on(Device(max_model_len=256, num_blocks=8)) as engine:
        with pytest.raises(RequestError, match=r"needs 10 KV blocks.*has 8"):
            await answer(engine, [1] * 40, max_tokens=1)
        assert (await answer(engine, [1] * 4, max_tokens=4)).token_ids == alone([1] * 4, 4)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_a_tiny_limit_is_kept_exactly(clock: MockClock, limit: int) -> None:
    async with engine_on(Device()) as engine:
        one = await answer(engine, [1] * 4, max_tokens=limit, ignore_eos=True)
        assert one.token_ids == alone([1] * 4, limit)
        assert one.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_the_limits_are_every_request_ends_right_or_is_refused(
    clock: MockClock, seed: int
) -> None:
    """Blocks of one token, one block, one row, steps of one token: nothing hangs or leaks."""
    rng = random.Random(seed)
    max_rows = rng.randint(1, 4)
    device = Device(
        block_tokens=rng.randint(1, 5),
        num_blocks=rng.randint(1, 12),
        max_rows=max_rows,
        max_step_tokens=rng.randint(max_rows, 8),
        max_model_len=rng.randint(2, 40),
    )
    settings: dict[str, Any] = {
        "prefill_chunk_tokens": rng.randint(0, 5),
        "prefix_caching": seed % 3 > 0,
    }
    ends: list[str] = []

    async def ask(prompt: list[int], limit: int | None, priority: int, up_to: int | None) -> None:
        try:
            async with engine.submit(prompt, max_tokens=limit, priority=priority) as stream:
                read = await Read().all_of(stream, up_to)
            assert read.token_ids == alone(prompt, len(read.token_ids))
            assert limit is None or up_to is not None or len(read.token_ids) == limit
            ends.append("ended")
        except RequestError:
            ends.append("refused")

    async with engine_on(device, **settings) as engine, trio.open_nursery() as nursery:
        for _ in range(30):
            prompt = [1] * rng.randint(0, 10) + rng.choices(range(3), k=rng.randint(1, 12))
            limit = rng.choice([None, rng.randint(1, 12)])
            up_to = rng.choice([None, None, None, rng.randint(0, 5)])
            nursery.start_soon(ask, prompt, limit, rng.randint(0, 1), up_to)
    assert len(ends) == 30


async def test_memory_does_not_grow_with_the_requests_there_were(clock: MockClock) -> None:
    device = saying(0, 0, 1)
    async with engine_on(device, Words("ab", "END")) as engine:

        async def ask_all() -> None:
            for index in range(6):
                stops = ["END", f"never {index}", "y", "zz"]
                await engine.generate([[900]] * 20, max_tokens=5, stop=stops, timeout_s=50.0)
                async with engine.submit([900], max_tokens=100, request_id=f"{index}"):
                    await engine.abort(f"{index}")
                with pytest.raises(RequestError):
                    await answer(engine, [VOCAB])
                device.fed.clear()
            await trio.sleep(2 * PING_INTERVAL_S)  # by then what was read is known to be
            await engine.generate([[900]], max_tokens=1)

        await ask_all()
        tracemalloc.start()
        await ask_all()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3):
            await ask_all()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Trio keeps up to a thousand deadlines that are over; a request would leave a kilobyte.
    assert after - before < 150_000, "378 requests left more than 400 bytes each"


# Stop strings and text.


def saying(*script: int, **limits: int) -> Device:
    """Return a device that says these tokens behind a prompt of one, then the last for ever."""
    return Device(lambda tokens: script[min(len(tokens), len(script)) - 1], **limits)


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP

STOPS = [
    # what the tokens say, the stop strings, the text, how many tokens there are, how it ends
    pytest.param(["END!! more"], ["END"], "", 1, STOP, id="at the first character"),
    pytest.param(["a", "b END!! more"], ["END"], "ab ", 2, STOP, id="inside a token"),
    pytest.param(["a", "b END"], ["END"], "ab ", 2, STOP, id="at the last character"),
    pytest.param(["aE", "N", "Db"], ["END"], "a", 3, STOP, id="across tokens"),
    pytest.param(["aE", "N", "Nb", "c"], ["END"], "aENNbccc", 6, LENGTH, id="begun and not ended"),
    pytest.param(["a", "zz"], ["zzzzzzzzzzzz"], "azzzzzzzzzz", 6, LENGTH, id="begun at the end"),
    pytest.param(["abc", "d"], ["zzz"], "abcddddd", 6, LENGTH, id="never"),
    pytest.param(["xabcy"], ["abcd", "bc", "abc"], "x", 1, STOP, id="one in another"),
    pytest.param(["a", "bab", "c"], ["babc", "ab"], "", 2, STOP, id="the first to end"),
    pytest.param(["x", "aab", "z"], ["aab", "ab", "b"], "x", 2, STOP, id="the longest at one end"),
    pytest.param(["a", "a", "ab"], ["aab"], "a", 3, STOP, id="a false start within"),
    pytest.param(["日".encode()[:2], "日".encode()[2:] + b"x"], ["日"], "", 2, STOP, id="in bytes"),
    pytest.param(["é".encode()[:1], "é".encode()[1:]], ["e"], "é\ufffd\ufffd", 4, LENGTH, id="é"),
    pytest.param([b"\xff\xfe\xc3(", "x"], ["("], "\ufffd\ufffd\ufffd", 1, STOP, id="bad bytes"),
    pytest.param(["a", b"\xc3", "END"], ["END"], "a\ufffd", 3, STOP, id="behind half a character"),
]


@pytest.mark.parametrize(("words", "stop", "text", "num_tokens", "finish"), STOPS)
@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_ends_the_text_wherever_it_stands(
    clock: MockClock,
    words: list[str | bytes],
    stop: list[str],
    text: str,
    num_tokens: int,
    finish: FinishReason,
    include_stop: bool,
) -> None:
    if words[0] == "é".encode()[:1]:
        script = [0, 1, 0, 0]
    else:
        script = [min(index, len(words) - 1) for index in range(6)]
    async with engine_on(saying(*script), Words(*words)) as engine:
        options: dict[str, Any] = {"max_tokens": len(script), "stop": stop}
        options["include_stop"] = include_stop
        async with engine.submit([900], **options) as stream:
            read = await Read().all_of(stream)
        whole = await answer(engine, [900], **options)
    assert read.token_ids == script[:num_tokens]
    assert read.ending is finish
    if finish is STOP and include_stop:
        assert read.text.startswith(text)
        assert any(read.text == text + one for one in stop)
    else:
        assert read.text == text
    assert (whole.token_ids, whole.text) == (read.token_ids, read.text)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Completion) == whole


async def test_a_stop_string_waits_for_the_least_number_of_tokens(clock: MockClock) -> None:
    async with engine_on(saying(0, 1, 0, 1, 0, 1), Words("EN", "D.")) as engine:
        one = await answer(engine, [900], max_tokens=6, min_tokens=3, stop=["END"])
        assert (one.text, len(one.token_ids), one.finish_reason) == ("END.", 4, STOP)


@pytest.mark.parametrize("step", range(2, 7))
@pytest.mark.parametrize("how", ["fails", "suspended", "scheduler killed"])
async def test_text_held_back_for_a_stop_string_survives_whatever_happens_to_its_row(
    clock: MockClock, step: int, how: str
) -> None:
    """The word begins a stop string twice, and has half a character in the middle."""
    words = Words("aE", "N日".encode()[:2], "N日".encode()[2:] + b"EN", "D!")
    device = saying(0, 1, 2, 0, 1, 2, 3)
    async with engine_on(device, words) as engine:
        undisturbed = await answer(engine, [900], max_tokens=9, stop=["END"])
    assert undisturbed.text == "aEN日ENaEN日"

    device = saying(0, 1, 2, 0, 1, 2, 3)
    token, now = trio.lowlevel.current_trio_token(), trio.Event()

    def fail() -> None:
        if how == "fails":
            raise RuntimeError("on purpose")
        token.run_sync_soon(now.set)

    device.at_step[step] = fail
    async with engine_on(device, words) as engine, trio.open_nursery() as nursery:

        async def disturb() -> None:
            await now.wait()
            if how == "suspended":
                await engine.suspend()
                await engine.resume()
            else:
                kill(engine, "replica-0/scheduler")

        if how != "fails":
            nursery.start_soon(disturb)
        async with engine.submit([900], max_tokens=9, stop=["END"]) as stream:
            read = await Read().all_of(stream)
        now.set()
    assert (read.text, read.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert read.ending is STOP


async def test_the_end_of_sequence_is_a_token_and_no_text(clock: MockClock) -> None:
    async with engine_on(saying(0, EOS), Words("a")) as engine:
        one = await answer(engine, [900], max_tokens=9)
        assert (one.token_ids, one.text, one.finish_reason) == ([0, EOS], "a", STOP)
        one = await answer(engine, [900], max_tokens=4, ignore_eos=True)
        assert (one.token_ids, one.text, one.finish_reason) == ([0, EOS, EOS, EOS], "a", LENGTH)


# Log-probabilities and sampling, by a small model with random weights.


@asynccontextmanager
async def random_model(*, num_blocks: int = 100, **settings: Any) -> AsyncGenerator[Engine]:
    """Open an engine on real tensors with room for `num_blocks` blocks of four tokens."""
    with trio.fail_after(60):
        async with open_engine(
            model="random:tiny",
            device="cpu",
            threads=1,
            block_tokens=4,
            kv_cache_gb=(num_blocks + 1) * 2048 / 2**30,
            max_model_len=128,
            **{"max_rows": 8, "max_step_tokens": 32, **settings},
        ) as engine:
            yield engine
            assert await is_idle(engine)


async def answers(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> list[Completion]:
    """Run requests at once."""
    found: dict[int, Completion] = {}

    async def ask(index: int, request: Mapping[str, Any]) -> None:
        found[index] = await answer(engine, **request)

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            nursery.start_soon(ask, index, request)
    return [found[index] for index in range(len(requests))]


async def test_there_are_log_probs_for_just_the_tokens_however_a_request_ends() -> None:
    async with random_model() as engine:
        natural = (await answer(engine, [1, 2, 3], max_tokens=30, temperature=0.0)).token_ids
        third = next(one for one in natural if natural.index(one) >= 3)
        for logprobs in (0, 3):
            for options, up_to in (
                ({"max_tokens": 1}, None),
                ({"max_tokens": 12}, None),
                ({"max_tokens": 30, "stop_token_ids": [third]}, None),
                ({"max_tokens": 30, "stop_token_ids": [natural[0]]}, None),
                ({"max_tokens": 30, "stop_token_ids": [natural[0]], "min_tokens": 5}, None),
                ({"max_tokens": 120}, 0),  # aborted behind so many tokens
                ({"max_tokens": 120}, 1),
                ({"max_tokens": 120}, 7),
                ({"max_tokens": 120, "timeout_s": 0.02}, None),
            ):
                async with engine.submit(
                    [1, 2, 3], temperature=0.0, logprobs=logprobs, request_id="a", **options
                ) as stream:
                    read = await Read().all_of(stream, up_to)
                    if up_to is not None:
                        await engine.abort("a")
                        await read.all_of(stream)
                assert len(read.logprobs) == len(read.token_ids)
                assert len(read.top_logprobs) == (len(read.token_ids) if logprobs else 0)
                for chosen, logprob, top in zip(
                    read.token_ids, read.logprobs, read.top_logprobs, strict=False
                ):
                    assert len(top) == logprobs
                    if "min_tokens" not in options:
                        assert top[0][0] == chosen
                        assert top[0][1] == pytest.approx(logprob, abs=1e-6)


async def test_log_probs_survive_eviction_suspension_and_a_new_device() -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": [index] * 8, "max_tokens": 20, "temperature": 1.0, "seed": 7, "logprobs": 2}
        for index in range(1, 6)
    ]
    async with random_model() as engine:
        expected = [await answer(engine, **request) for request in requests]
    async with random_model(num_blocks=12) as engine, trio.open_nursery() as nursery:

        async def disturb() -> None:
            for levels in (
                {"kv": KVLevel.DROP},
                {"kv": KVLevel.KEEP},
                {"kv": KVLevel.OFFLOAD, "weights": WeightsLevel.OFFLOAD},
                {"kv": KVLevel.DROP, "weights": WeightsLevel.DISCARD},
            ):
                await trio.sleep(0.01)
                await engine.suspend(**levels)
                await engine.resume()
            kill(engine, "replica-0/executor")

        nursery.start_soon(disturb)
        for one, alone_ in zip(await answers(engine, requests), expected, strict=True):
            assert one.token_ids == alone_.token_ids
            assert one.logprobs == pytest.approx(alone_.logprobs, abs=1e-4)
            assert len(one.top_logprobs or ()) == len(one.token_ids)


async def test_log_probs_are_finite_in_json_at_any_temperature_and_behind_any_filter() -> None:
    async with random_model() as engine:
        for options in (
            {"temperature": 1e-4},
            {"temperature": 1e-45, "logprobs_mode": "processed"},
            {"temperature": 0.0, "logprobs_mode": "processed"},
            {"temperature": 1.0, "top_k": 2, "logprobs_mode": "processed"},
            {"temperature": 1.0, "top_p": 1e-50, "logprobs_mode": "processed"},
            {"temperature": 1.0, "bad_token_ids": [[one] for one in range(300)]},
        ):
            one = await answer(engine, [1, 2, 3], max_tokens=6, logprobs=20, **options)
            numbers = [*(one.logprobs or ())]
            numbers += [logprob for top in one.top_logprobs or () for _, logprob in top]
            assert len(one.logprobs or ()) == 6
            assert all(-1e6 < number <= 1e-5 for number in numbers)
            assert msgspec.json.decode(msgspec.json.encode(one), type=Completion) == one


async def test_what_a_seed_draws_does_not_depend_on_who_else_is_there_or_in_what_order() -> None:
    """Neighbours without a seed, with penalties, that are greedy, and that leave early."""
    seeded: list[dict[str, Any]] = [
        {"prompt": [1, 2], "seed": 1, "max_tokens": 3},
        {"prompt": [3], "seed": 2, "max_tokens": 20, "top_p": 0.9, "presence_penalty": 1.5},
        {"prompt": [4, 5, 6], "seed": 3, "max_tokens": 20, "bad_token_ids": [[7], [9, 11]]},
        {"prompt": [4, 5, 6], "seed": 0, "max_tokens": 20, "repetition_penalty": 1.3},
    ]
    others: list[dict[str, Any]] = [
        {"prompt": [8], "max_tokens": 9},
        {"prompt": [9], "max_tokens": 9, "temperature": 0.0, "logit_bias": {5: 50.0}},
    ]
    async with random_model() as engine:
        expected = [(await answer(engine, **one)).token_ids for one in seeded]
        for order in ((0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)):
            found = await answers(engine, [others[0], *(seeded[i] for i in order), others[1]])
            assert [one.token_ids for one in found[1:-1]] == [expected[i] for i in order]
            assert found[-1].token_ids == [5] * 9


async def test_temperature_zero_is_greedy_whatever_the_filters() -> None:
    async with random_model() as engine:
        greedy = (await answer(engine, [1, 2, 3], max_tokens=8, temperature=0.0)).token_ids
        for top_p in (1e-50, 0.1, 0.9, 1.0):
            for top_k in (0, 1, 5):
                for seed in (0, 1):
                    options = {"temperature": 0.0, "top_p": top_p, "top_k": top_k, "seed": seed}
                    one = await answer(engine, [1, 2, 3], max_tokens=8, **options)
                    assert one.token_ids == greedy


async def test_a_request_to_which_no_token_is_left_fails_alone_and_says_so() -> None:
    """All ids are stop ids or banned, and none may come yet."""
    everything = {"stop_token_ids": list(range(200)), "min_tokens": 3}
    banned = {"bad_token_ids": [[one] for one in range(200, 320)]}
    async with random_model() as engine, trio.open_nursery() as nursery:
        found: list[Completion] = []

        async def be_another() -> None:
            found.append(await answer(engine, [5], max_tokens=20, temperature=0.0))

        nursery.start_soon(be_another)
        with pytest.raises(RequestFailed, match="no token"):
            await answer(engine, [1], max_tokens=5, **everything, **banned)
    assert len(found[0].token_ids) == 20


# KV blocks, eviction, the prefix cache, prompts in parts.


@pytest.mark.parametrize("kv", KVLevel)
async def test_a_prompt_suspended_between_its_parts_goes_on_before_the_others(
    clock: MockClock, kv: KVLevel
) -> None:
    device = Device()
    token, begun = trio.lowlevel.current_trio_token(), trio.Event()
    device.at_step[2] = lambda: token.run_sync_soon(begun.set)
    long, short = list(range(1, 121)), [5]
    async with (
        engine_on(device, prefill_chunk_tokens=4) as engine,
        engine.submit(long, max_tokens=3) as first,
        engine.submit(short, max_tokens=3) as second,
    ):
        await begun.wait()
        await engine.suspend(kv=kv)
        assert device.steps < 30, "the prompt was whole before the suspension"
        await engine.resume()
        assert (await Read().all_of(first)).token_ids == alone(long, 3)
        assert (await Read().all_of(second)).token_ids == alone(short, 3)


async def test_no_text_of_another_prompt_appears_however_often_all_is_suspended(
    clock: MockClock,
) -> None:
    device = Device(num_blocks=40)
    async with engine_on(device) as engine, trio.open_nursery() as nursery:
        outputs: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            prompt = [number] * (number + 3)
            outputs[number] = (await answer(engine, prompt, max_tokens=60)).token_ids

        for number in range(8):
            nursery.start_soon(ask, number)
        for round_ in range(20):
            await engine.suspend(kv=list(KVLevel)[round_ % 3])
            await engine.resume()
    assert outputs == {number: alone([number] * (number + 3), 60) for number in range(8)}


async def test_an_idle_engine_keeps_what_it_has_cached_and_a_suspended_one_does_not(
    clock: MockClock,
) -> None:
    device = Device()

    def cached() -> list[int]:
        found = [admit.cached_tokens for step in device.fed for admit in step.admits]
        device.fed.clear()
        return found

    async with engine_on(device) as engine:
        await answer(engine, list(range(16)), max_tokens=1)
        assert cached() == [0]
        await trio.sleep(30)
        await answer(engine, list(range(16)), max_tokens=1)
        assert cached() == [12]
        await engine.suspend(kv=KVLevel.DROP)
        await engine.resume()
        one = await answer(engine, list(range(16)), max_tokens=2)
        assert (one.token_ids, cached()) == (alone(list(range(16)), 2), [0])


async def test_a_prompt_that_was_aborted_before_its_first_step_is_not_in_the_cache(
    clock: MockClock,
) -> None:
    device = Device()
    async with engine_on(device) as engine:
        await engine.pause()
        async with engine.submit(list(range(12)), max_tokens=1):
            pass
        await engine.unpause()
        one = await answer(engine, list(range(12)), max_tokens=3)
    assert one.token_ids == alone(list(range(12)), 3)
    assert [admit.cached_tokens for step in device.fed for admit in step.admits] == [0]


async def test_an_evicted_request_says_each_token_once_and_goes_on_before_younger_ones(
    clock: MockClock,
) -> None:
    device = Device(num_blocks=10)
    async with engine_on(device) as engine, trio.open_nursery() as nursery:

        async def ask(index: int) -> None:
            one = await answer(engine, [index] * 8, max_tokens=12)
            assert one.token_ids == alone([index] * 8, 12)

        await engine.pause()
        for index in range(6):
            nursery.start_soon(ask, index)
            await wait_all_tasks_blocked(0.01)
        await engine.unpause()
    admitted = [prompt[0] for prompt in device.prompts()]
    assert len(admitted) > 6, "nobody was evicted"
    assert set(admitted[admitted.index(5) :]) == {5}, "the youngest did not wait for the evicted"
