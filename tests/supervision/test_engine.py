"""The embedded engine, whole, over a runner that counts up instead of computing."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
import trio.testing

import callboard
from callboard.actors.actor import start_in_order
from callboard.actors.session import Joined, Left, Said
from callboard.actors.testing import ScriptedRunner
from callboard.actors.transport import MemoryNetwork
from callboard.messages.base import unpack_ids
from callboard.messages.control import (
    KVLevel,
    Pause,
    PauseMode,
    State,
    StatusReply,
    Step,
    Unpause,
    Weights,
    WeightsLevel,
)
from callboard.messages.errors import (
    ActorStopped,
    ConfigError,
    ControlRefused,
    DeadlineExceeded,
    RequestError,
    RequestFailed,
    SequenceOverflow,
    StartFailed,
    UnknownRequest,
    Unreachable,
    WrongThread,
)
from callboard.messages.requests import ChatMessage, Delta, FinishReason, TextPrompt, TokenPrompt
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, connect, open_engine
from callboard.supervision.settings import Settings

MODEL_LEN = 1024


class GatedRunner(ScriptedRunner):
    """A runner whose steps wait, on the device thread, while the gate is closed."""

    def __init__(self) -> None:
        super().__init__(max_model_len=MODEL_LEN)
        self.gate = threading.Event()
        self.gate.set()
        self.poison: int | None = None
        self.fails_once = False

    def execute(self, step: RunStep) -> StepDone:
        assert self.gate.wait(10.0), "the test forgot to open the gate"
        if any(self.poison in unpack_ids(admit.prompt) for admit in step.admits):
            raise RuntimeError("the device is on fire")
        if self.fails_once:
            self.fails_once = False
            raise RuntimeError("the device is out of order")
        return super().execute(step)


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{turn['role'][0]}{turn['content']}" for turn in messages)


def parts(runner: ScriptedRunner, codec: Letters | None = None) -> ReplicaParts:
    def anew() -> ScriptedRunner:
        runner.free_kv()  # a device that starts knows no row
        return runner

    return ReplicaParts(
        make_runner=anew,
        codec=codec,
        text_for=None,
        vocab_size=1000,
        eos_token_ids=(),
    )


@asynccontextmanager
async def opened(
    runner: ScriptedRunner | None = None, codec: Letters | None = None
) -> AsyncIterator[Engine]:
    async with open_engine(parts=parts(runner or GatedRunner(), codec)) as engine:
        yield engine


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
async def engine(runner: GatedRunner) -> AsyncIterator[Engine]:
    with trio.fail_after(20.0):
        async with opened(runner) as open_:
            yield open_


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


async def replica(engine: Engine) -> Any:
    """Return what status says of the one replica."""
    [found] = (await engine.status()).replicas
    return found


async def all_is_free(engine: Engine) -> bool:
    """Whether no request holds anything."""
    found = await replica(engine)
    return (found.running, found.waiting, found.paused) == (0, 0, 0) and (
        found.blocks_free == found.blocks_total
    )


async def eventually_free(engine: Engine) -> bool:
    """Wait until no request holds anything; the test's time is the limit."""
    while not await all_is_free(engine):
        await trio.lowlevel.checkpoint()
    return True


# Requests


async def test_generate_returns_the_tokens_behind_each_prompt_in_order(engine: Engine) -> None:
    answers = await engine.generate([[5], [100, 200], [7]], max_tokens=3)

    assert [answer.token_ids for answer in answers] == [[6, 7, 8], [201, 202, 203], [8, 9, 10]]
    assert [answer.prompt_token_ids for answer in answers] == [[5], [100, 200], [7]]
    assert {answer.finish_reason for answer in answers} == {FinishReason.LENGTH}


async def test_generate_has_no_more_requests_open_than_can_well_wait(
    engine: Engine, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callboard.supervision.engine.MAX_AT_ONCE", 3)
    answers: list[callboard.Completion] = []

    async def generate() -> None:
        answers.extend(await engine.generate([[n] for n in range(20)], max_tokens=2))

    runner.gate.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert engine.num_open == 3
        runner.gate.set()

    assert [answer.token_ids for answer in answers] == [[n + 1, n + 2] for n in range(20)]


@pytest.mark.parametrize("prompts", ["several words", b"bytes"])
async def test_one_text_is_no_list_of_prompts(engine: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts is one text"):
        await engine.generate(prompts, max_tokens=1)


async def test_generate_of_nothing_is_nothing(engine: Engine) -> None:
    assert await engine.generate([]) == []


async def test_a_stream_brings_tokens_as_they_come_and_ends_after_the_last(
    engine: Engine,
) -> None:
    async with engine.submit([5], max_tokens=3) as stream:
        deltas = [delta async for delta in stream]

    assert [unpack_ids(delta.token_ids) for delta in deltas] == [[6], [7], [8]]
    assert [delta.start for delta in deltas] == [0, 1, 2]
    assert stream.finish_reason is FinishReason.LENGTH


async def test_a_stream_knows_its_prompt_and_seed_once_it_is_accepted(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=1, seed=77) as stream:
        assert stream.prompt_token_ids == [5]
        assert stream.seed == 77


async def test_a_stream_shows_what_is_known_before_it_is_read(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=3) as stream:
        await stream.wait_ended()

        assert stream.record.token_ids == [6, 7, 8]
        assert [unpack_ids(delta.token_ids) async for delta in stream] == [[6], [7], [8]]


async def test_a_completion_is_whole_also_where_some_of_it_had_been_read(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=3) as stream:
        await anext(stream)

        answer = await stream.completion()

    assert answer.token_ids == [6, 7, 8]


async def test_a_completion_says_what_it_took(engine: Engine) -> None:
    [answer] = await engine.generate([[5, 6]], max_tokens=3)

    usage = answer.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (2, 3)
    assert answer.time_to_first_token_s is not None
    assert answer.time_per_output_token_s is not None
    to_last = answer.time_to_first_token_s + 2 * answer.time_per_output_token_s
    assert 0 < answer.time_to_first_token_s < to_last <= answer.latency_s < 20


async def test_a_completion_says_what_happened_to_it_in_order(engine: Engine) -> None:
    before = time.time()
    answers = await engine.generate([[5], [6, 7]], max_tokens=3)

    for answer in answers:
        kinds = [event.kind for event in answer.events]
        assert kinds == ["queued", "admitted", "first_token", "finished"]
        times = [event.at for event in answer.events]
        assert times == sorted(times)
        assert before - 1 < times[0]  # the two clocks are read at different times
        assert times[-1] < time.time() + 1


async def test_a_request_that_waited_and_was_evicted_says_so() -> None:
    runner = ScriptedRunner(num_blocks=4, max_model_len=MODEL_LEN)
    async with open_engine(parts=parts(runner), paused_limit_blocks=0) as engine:
        await engine.pause()
        requests = [
            await engine.add_request(name, prompt, max_tokens=9)
            for name, prompt in (("old", [1, 2, 3, 4]), ("new", [5, 6, 7, 8]))
        ]
        await engine.unpause()
        old, new = [await request.completion() for request in requests]

    kinds = [event.kind for event in new.events]
    assert [event.kind for event in old.events][-1] == "finished"
    assert kinds == [
        "queued",
        "admitted",
        "first_token",
        "paused",
        "evicted",
        "admitted",
        "finished",
    ]
    assert (old.token_ids, new.token_ids) == (list(range(5, 14)), list(range(9, 18)))


async def test_a_server_that_talks_nonsense_fails_the_request_and_is_told_to_free_it(
    engine: Engine,
) -> None:
    await engine.pause()
    async with engine.submit([5], max_tokens=3, request_id="mine") as stream:
        engine._take(Delta(request_id="mine", start=7, token_ids=b"\x05\0\0\0"))

        with pytest.raises(RequestFailed, match="tokens 7 to 8 does not go on from 0"):
            await stream.completion()
    await engine.unpause()

    assert await eventually_free(engine)


async def test_options_go_on_top_of_parameters(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, seed=1)

    [answer] = await engine.generate([[5]], params, max_tokens=2)

    assert answer.token_ids == [6, 7]
    assert answer.seed == 1


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [97, 98]),
        (TextPrompt(text="ab"), [97, 98]),
        ([97, 98], [97, 98]),
        ((97, 98), [97, 98]),
        (TokenPrompt(token_ids=b"\x61\0\0\0"), [97]),
        ([ChatMessage(role="user", content="hi")], [ord("u"), ord("h"), ord("i")]),
    ],
)
async def test_a_prompt_may_be_text_ids_or_a_conversation(prompt: Any, ids: list[int]) -> None:
    async with opened(codec=Letters()) as engine:
        [answer] = await engine.generate([prompt], max_tokens=1)

    assert answer.prompt_token_ids == ids


WRONG = [
    # prompt, options, the field that is named, and a part of what is allowed
    pytest.param([5], {"temprature": 1.0}, "temprature", "temperature", id="unknown option"),
    pytest.param([5], {"temperature": "hot"}, "temperature", "float", id="wrong type"),
    pytest.param([5], {"stop": "text"}, "stop", "array", id="one stop string"),
    pytest.param([5], {"temperature": float("nan")}, "temperature", "0", id="NaN"),
    pytest.param([5], {"temperature": float("inf")}, "temperature", "100", id="infinite"),
    pytest.param([5], {"temperature": -1.0}, "temperature", "0", id="negative"),
    pytest.param([5], {"top_k": -1}, "top_k", "0", id="negative top_k"),
    pytest.param([5], {"top_p": 0.0}, "top_p", "above 0", id="top_p of zero"),
    pytest.param([5], {"min_p": 2.0}, "min_p", "0.0 to 1.0", id="min_p above one"),
    pytest.param([5], {"max_tokens": -1}, "max_tokens", "to 2147483647", id="minus one token"),
    pytest.param(
        [5], {"max_tokens": 2**63}, "max_tokens", "to 2147483647", id="tokens without end"
    ),
    pytest.param([5], {"max_tokens": 1.5}, "max_tokens", "int", id="half a token"),
    pytest.param([5], {"max_tokens": "8"}, "max_tokens", "int", id="tokens in words"),
    pytest.param([5], {"max_tokens": True}, "max_tokens", "int", id="tokens as a flag"),
    pytest.param([5], {"max_tokens": float("nan")}, "max_tokens", "int", id="NaN tokens"),
    pytest.param([5], {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "3", id="min over max"),
    pytest.param([5], {"logprobs": 21}, "logprobs", "20", id="many logprobs"),
    pytest.param([5], {"stop_token_ids": [1000]}, "stop_token_ids", "999", id="foreign stop id"),
    pytest.param([5], {"stop": ["x"]}, "stop", "none", id="stop string without tokenizer"),
    pytest.param([5], {"seed": 2**70}, "seed", "0 to", id="seed over 63 bits"),
    pytest.param([5], {"seed": -1}, "seed", "0 to", id="negative seed"),
    pytest.param([5], {"priority": "high"}, "priority", "int", id="priority in words"),
    pytest.param([5], {"priority": 2**70}, "priority", "64 bits", id="priority over 64 bits"),
    pytest.param([5], {"timeout_s": 0.0}, "timeout_s", "above 0", id="no time"),
    pytest.param([5], {"timeout_s": float("nan")}, "timeout_s", "above 0", id="NaN seconds"),
    pytest.param([5], {"request_id": 5}, "request_id", "str", id="id that is no text"),
    pytest.param([5], {"request_id": ""}, "request_id", "1 to 256", id="empty id"),
    pytest.param([5], {"request_id": 0}, "request_id", "str", id="zero for an id"),
    pytest.param([5], {"request_id": "x" * 257}, "request_id", "256", id="long id"),
    pytest.param([], {}, "prompt", "at least 1", id="empty prompt"),
    pytest.param([1000], {}, "prompt", "0 to 999", id="id behind the vocabulary"),
    pytest.param([-1], {}, "prompt", "0 to 999", id="negative id"),
    pytest.param([10**12], {}, "prompt", "token ids", id="id over 32 bits"),
    pytest.param([1.5], {}, "prompt", "token ids", id="half an id"),
    pytest.param(["a", "b"], {}, "prompt", "token ids", id="list of texts"),
    pytest.param(b"abc", {}, "prompt", "text", id="bytes"),
    pytest.param(None, {}, "prompt", "text", id="nothing"),
    pytest.param({"text": "a"}, {}, "prompt", "text", id="dictionary"),
    pytest.param("text", {}, "prompt", "token ids", id="text without tokenizer"),
    pytest.param("\ud800", {}, "prompt", "Unicode", id="half a character"),
    pytest.param([5] * MODEL_LEN, {}, "prompt", "1 to", id="prompt as long as the context"),
    pytest.param([5], {"max_tokens": MODEL_LEN}, "max_tokens", "1 to", id="output too long"),
]


@pytest.mark.parametrize(("prompt", "options", "field", "allowed"), WRONG)
async def test_a_wrong_request_is_refused_alone_with_the_field_and_what_is_allowed(
    engine: Engine, prompt: Any, options: dict[str, Any], field: str, allowed: str
) -> None:
    async with engine.submit([7], max_tokens=50) as other:
        with pytest.raises(RequestError) as refused:
            async with engine.submit(prompt, **{"max_tokens": 3, **options}):
                pass

        answer = await other.completion()

    assert refused.value.field == field
    assert allowed in refused.value.allowed
    assert len(answer.token_ids) == 50
    assert await all_is_free(engine)


async def test_a_request_that_can_never_fit_is_refused_with_the_limit_it_meets(
    engine: Engine,
) -> None:
    with pytest.raises(SequenceOverflow) as refused:
        async with engine.submit([5], max_tokens=MODEL_LEN, request_id="mine"):
            pass

    assert not refused.value.transient
    assert refused.value.request_id == "mine"
    assert str(refused.value).startswith("request mine: 1 prompt tokens and max_tokens")


async def test_an_id_that_is_in_use_is_refused_and_its_user_is_not_disturbed(
    engine: Engine,
) -> None:
    await engine.pause()
    async with engine.submit([5], max_tokens=3, request_id="mine") as first:
        with pytest.raises(RequestError) as refused:
            async with engine.submit([9], max_tokens=3, request_id="mine"):
                pass
        await engine.unpause()

        answer = await first.completion()

    assert refused.value.field == "request_id"
    assert answer.token_ids == [6, 7, 8]


async def test_an_id_can_be_used_again_when_its_request_has_ended(engine: Engine) -> None:
    for _ in range(2):
        async with engine.submit([5], max_tokens=1, request_id="mine") as stream:
            assert (await stream.completion()).id == "mine"


async def test_a_request_made_once_more_under_its_id_does_not_end_as_the_one_before(
    engine: Engine,
) -> None:
    async with engine.submit([5], max_tokens=200, request_id="mine") as first:
        async for _ in first:
            break
    engine._connection._lose("on purpose")
    engine._connection._say_hello()

    async with engine.submit([5], max_tokens=200, request_id="mine") as second:
        answer = await second.completion()

    assert first.finish_reason is FinishReason.ABORT
    assert answer.finish_reason is FinishReason.LENGTH


async def test_generate_raises_the_first_error_plain_and_aborts_the_others(
    engine: Engine,
) -> None:
    await engine.pause()

    with pytest.raises(RequestError) as refused:
        await engine.generate([[5], [1000], [2000], [6]], max_tokens=3)

    assert refused.value.field == "prompt"
    assert await all_is_free(engine)


async def test_leaving_a_stream_early_frees_what_it_held(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=250) as stream:
        async for _ in stream:
            break

    assert await all_is_free(engine)


async def test_a_request_that_is_cancelled_before_it_is_sent_waits_for_no_end(
    engine: Engine, runner: GatedRunner
) -> None:
    began = trio.current_time()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with engine.submit([5], request_id="mine"):
            raise AssertionError("it was never sent")

    assert trio.current_time() - began < 5.0
    assert runner.steps == 0
    async with engine.submit([5], max_tokens=1, request_id="mine") as stream:
        assert (await stream.completion()).token_ids == [6]


async def test_a_stream_is_for_one_request(engine: Engine) -> None:
    stream = engine.submit([5], max_tokens=1)
    async with stream:
        with pytest.raises(RequestError, match="entered before"):
            await stream.__aenter__()
        assert (await stream.completion()).token_ids == [6]
    with pytest.raises(RequestError, match="entered before"):
        await stream.__aenter__()


async def test_an_error_inside_a_stream_comes_out_and_frees_what_it_held(engine: Engine) -> None:
    with pytest.raises(KeyError):
        async with engine.submit([5], max_tokens=250):
            raise KeyError

    assert await all_is_free(engine)


async def test_cancelling_whoever_reads_a_stream_frees_what_it_held(engine: Engine) -> None:
    await engine.pause()
    with trio.move_on_after(0.05) as scope:
        await engine.generate([[5], [6]], max_tokens=250)

    assert scope.cancelled_caught
    assert await all_is_free(engine)


async def coordinator(engine: Engine) -> dict[str, Any]:
    """Return what status says of the coordinator."""
    tree = (await engine.status()).tree
    return next(dict(node.details) for node in tree.children if node.name == "coordinator")


async def test_streams_go_on_when_their_connection_broke_and_nothing_runs_twice(
    engine: Engine,
) -> None:
    async with (
        engine.submit([5], max_tokens=200) as stream,
        engine.submit([300], max_tokens=200) as other,
    ):
        for _ in range(3):
            await anext(stream)
            engine._connection._lose("cut off")
            engine._connection._say_hello()  # which it does within a second by itself

        assert (await stream.completion()).token_ids == list(range(6, 206))
        assert (await other.completion()).token_ids == list(range(301, 501))
    counts = await coordinator(engine)
    assert counts["requests_taken"] == 2
    assert counts["requests_resumed"] >= 2
    assert await all_is_free(engine)


async def test_a_stream_that_was_left_while_the_connection_was_broken_is_aborted(
    engine: Engine, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callboard.actors.coordinator.GRACE_S", 0.05)
    runner.gate.clear()
    async with engine.submit([5], max_tokens=250):
        engine._connection._lose("cut off")
    engine._connection._say_hello()

    while not (await coordinator(engine))["requests_aborted"]:
        await trio.lowlevel.checkpoint()
    runner.gate.set()
    assert await eventually_free(engine)


async def test_cancelling_who_waits_to_be_heard_takes_no_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_credit(message: Any) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(engine._connection, "send", no_credit)

    with trio.fail_after(5.0), trio.move_on_after(0.05):
        await engine.generate([[5], [6]], n=3, max_tokens=3)

    assert engine.num_open == 0


async def test_a_request_can_be_aborted_by_its_id(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit([5], request_id="mine") as stream, engine.submit([6]) as other:
        aborted = await engine.abort("mine")

        answer = await stream.completion()

        assert aborted.aborted == 1
        assert answer.finish_reason is FinishReason.ABORT
        assert other.finish_reason is None


async def test_all_requests_can_be_aborted(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit([5]) as one, engine.submit([6]) as two:
        aborted = await engine.abort(all=True)

        answers = [await one.completion(), await two.completion()]

    assert aborted.aborted == 2
    assert [answer.finish_reason for answer in answers] == [FinishReason.ABORT] * 2


async def test_an_unknown_id_aborts_nothing(engine: Engine) -> None:
    assert (await engine.abort("nobody's")).aborted == 0


async def test_abort_must_say_what_is_meant(engine: Engine) -> None:
    with pytest.raises(RequestError) as refused:
        await engine.abort()

    assert refused.value.field == "request_id"


async def test_a_request_whose_time_is_over_ends_with_what_it_has(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit([5], timeout_s=0.05) as stream:
        answer = await stream.completion()

    assert answer.finish_reason is FinishReason.DEADLINE


async def test_a_request_that_keeps_killing_the_device_is_failed_by_name(
    engine: Engine, runner: GatedRunner
) -> None:
    runner.poison = 13
    async with engine.submit([20], max_tokens=10) as other:
        with pytest.raises(RequestFailed, match="the device failed"):
            await engine.generate([[13]], max_tokens=2)
        answer = await other.completion()

    assert answer.token_ids == list(range(21, 31))


# Choices


@pytest.fixture
def seeds() -> "SeedRunner":
    return SeedRunner()


class SeedRunner(ScriptedRunner):
    """A runner whose every token is drawn with the request's seed."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1024, max_rows=256, max_step_tokens=1024)
        self.seeds: list[int] = []

    def execute(self, step: RunStep) -> StepDone:
        self.seeds += [admit.sampling.seed for admit in step.admits]
        return super().execute(step)


async def test_several_choices_of_each_prompt_come_in_order(seeds: "SeedRunner") -> None:
    async with opened(seeds) as engine:
        answers = await engine.generate([[5], [9]], n=3, seed=40, max_tokens=2)

    assert [(one.choice, one.seed, one.token_ids) for one in answers] == [
        (choice, 40 + choice, [first, first + 1]) for first in (6, 10) for choice in range(3)
    ]
    assert sorted(seeds.seeds) == [40, 40, 41, 41, 42, 42]


async def test_choices_without_a_seed_get_one_each(engine: Engine) -> None:
    answers = await engine.generate([[5]], n=4, max_tokens=1)

    assert len({one.seed for one in answers}) == 4


async def test_choices_stream_as_they_come_and_have_ids_of_their_own(engine: Engine) -> None:
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async with engine.submit_choices([5], n=3, request_id="mine", max_tokens=3) as choices:
        async for choice, delta in choices:
            tokens[choice] += unpack_ids(delta.token_ids)

    assert tokens == {choice: [6, 7, 8] for choice in range(3)}
    assert choices.request_ids == ["mine", "mine#1", "mine#2"]
    assert [record.token_ids for record in choices.records] == [[6, 7, 8]] * 3


async def test_the_completions_of_choices_are_whole_and_in_order(engine: Engine) -> None:
    async with engine.submit_choices([5], n=3, max_tokens=3, seed=2**63 - 2) as choices:
        await anext(choices)
        answers = await choices.completions()

    assert [one.choice for one in answers] == [0, 1, 2]
    assert [one.seed for one in answers] == [2**63 - 2, 2**63 - 1, 0]
    assert [one.token_ids for one in answers] == [[6, 7, 8]] * 3


async def test_leaving_the_choices_early_aborts_them_all(engine: Engine) -> None:
    async with engine.submit_choices([5], n=5, max_tokens=200) as choices:
        async for _ in choices:
            break

    assert engine.num_open == 0
    assert {record.finish_reason for record in choices.records} == {FinishReason.ABORT}
    assert await all_is_free(engine)


async def test_cancelling_whoever_opens_choices_aborts_them_all(
    engine: Engine, runner: GatedRunner
) -> None:
    await engine.pause()
    with trio.move_on_after(0.05) as scope:
        async with engine.submit_choices([5], n=5, max_tokens=200) as choices:
            await choices.completions()

    assert scope.cancelled_caught
    assert await all_is_free(engine)


async def test_a_choice_that_fails_ends_the_choices(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit_choices([5], n=3, request_id="mine", max_tokens=200) as choices:
        engine._take(Delta(request_id="mine#1", start=9, token_ids=b"\x05\0\0\0"))
        with pytest.raises(RequestFailed, match="does not go on"):
            await choices.completions()

    assert engine.num_open == 0
    await engine.unpause()
    assert await eventually_free(engine)


async def test_choices_are_refused_together(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit([7], request_id="mine#2", max_tokens=3) as other:
        with pytest.raises(RequestError, match="mine#2 is in use"):
            async with engine.submit_choices([5], n=4, request_id="mine", max_tokens=3):
                pass
        assert engine.num_open == 1
        await engine.unpause()

        assert (await other.completion()).token_ids == [8, 9, 10]


@pytest.mark.parametrize("seed", [-1, 2**63])
async def test_no_choice_of_a_wrong_seed_runs(engine: Engine, seed: int) -> None:
    answers = await engine.generate([[5]], n=3, seed=seed, max_tokens=1, return_errors=True)

    assert [getattr(answer, "field", None) for answer in answers] == ["seed"] * 3


@pytest.mark.parametrize("n", [0, -1, 129, 512, 1.5, True, "two"])
async def test_a_prompt_has_a_bounded_number_of_choices(engine: Engine, n: Any) -> None:
    with pytest.raises(RequestError) as refused:
        await engine.generate([[5]], n=n)
    with pytest.raises(RequestError) as again:
        engine.submit_choices([5], n=n)

    assert (refused.value.field, refused.value.allowed) == ("n", "1 to 128")
    assert again.value.field == "n"


async def test_many_choices_of_one_prompt_all_come(seeds: "SeedRunner") -> None:
    with trio.fail_after(20.0):
        async with opened(seeds) as engine:
            answers = await engine.generate([list(range(30))], n=128, seed=0, max_tokens=5)

    assert [one.choice for one in answers] == list(range(128))
    assert [one.seed for one in answers] == list(range(128))
    assert {tuple(one.token_ids) for one in answers} == {(30, 31, 32, 33, 34)}


# The facade


async def test_a_bad_prompt_can_leave_the_others_alone(engine: Engine) -> None:
    prompts: list[Any] = [[5], [1000], "text", None, [6]]

    first, *bad, last = await engine.generate(prompts, n=2, max_tokens=2, return_errors=True)

    assert isinstance(last, callboard.Completion)
    assert isinstance(first, callboard.Completion)
    assert (first.token_ids, last.token_ids) == ([6, 7], [7, 8])
    assert isinstance(bad[0], callboard.Completion)
    assert isinstance(bad[-1], callboard.Completion)
    assert [getattr(error, "field", None) for error in bad[1:-1]] == ["prompt"] * 6


async def test_an_added_request_runs_without_a_reader(engine: Engine) -> None:
    request = await engine.add_request("mine", [5], max_tokens=200)

    await request.wait_ended()

    assert request.record.token_ids == list(range(6, 206))
    assert (await request.completion()).id == "mine"


async def test_an_added_request_has_been_accepted_or_refused_on_return(engine: Engine) -> None:
    await engine.pause()

    request = await engine.add_request("mine", [5], SamplingParams(max_tokens=3), seed=77)
    for prompt, request_id in (([1000], "other"), ([5], "mine"), ([5], "")):
        with pytest.raises(RequestError):
            await engine.add_request(request_id, prompt)

    assert (request.prompt_token_ids, request.seed) == ([5], 77)
    assert engine.num_open == 1


async def test_an_added_request_can_be_closed(engine: Engine) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=3)

    await request.aclose()
    await request.aclose()

    assert request.finish_reason is FinishReason.ABORT
    assert await all_is_free(engine)


async def test_an_open_request_is_found_by_its_id(engine: Engine) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=3)

    assert engine.get_request("mine") is request
    assert (engine.num_open, engine.has_unfinished_requests()) == (1, True)


async def test_a_request_that_is_not_open_is_a_key_error_that_says_so(engine: Engine) -> None:
    request = await engine.add_request("mine", [5], max_tokens=3)
    await request.wait_ended()

    with pytest.raises(UnknownRequest, match="no request 'mine' is open here") as unknown:
        engine.get_request("mine")

    assert isinstance(unknown.value, KeyError)
    assert str(unknown.value).startswith("no request")
    assert (engine.num_open, engine.has_unfinished_requests()) == (0, False)


async def cached_blocks(engine: Engine) -> Any:
    """Return how many blocks hold prefixes that others may find."""
    tree = (await engine.status()).tree
    nodes = [tree]
    for node in nodes:
        nodes += node.children
    [allocator] = [node for node in nodes if node.name.endswith("kv_allocator")]
    return allocator.details["blocks_cached"]


async def test_a_reset_ends_every_request_and_forgets_what_is_cached(engine: Engine) -> None:
    await engine.generate([list(range(40))], max_tokens=2)
    assert await cached_blocks(engine) > 0
    requests = [await engine.add_request(f"{n}", [n], max_tokens=250) for n in range(30)]

    ended = await engine.reset()

    assert ended == 30
    assert {request.finish_reason for request in requests} == {FinishReason.ABORT}
    assert await cached_blocks(engine) == 0
    assert await all_is_free(engine)
    assert (await engine.status()).state is State.RUNNING
    assert (await engine.generate([[5]], max_tokens=2))[0].token_ids == [6, 7]


async def test_a_paused_engine_is_paused_after_a_reset(engine: Engine) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=250)

    ended = await engine.reset()

    assert (ended, request.finish_reason) == (1, FinishReason.ABORT)
    assert (await engine.status()).state is State.PAUSED
    assert await all_is_free(engine)


async def test_a_suspended_engine_is_not_reset(engine: Engine) -> None:
    await engine.suspend()
    request = await engine.add_request("mine", [5], max_tokens=3)

    with pytest.raises(ControlRefused, match="reset: the tree is suspended: resume first"):
        await engine.reset()
    await engine.resume()

    assert (await request.completion()).token_ids == [6, 7, 8]


async def test_a_reset_whose_time_is_over_says_so(engine: Engine, runner: GatedRunner) -> None:
    runner.gate.clear()
    request = await engine.add_request("mine", [5], max_tokens=3)

    with pytest.raises(DeadlineExceeded):
        await engine.reset(timeout=0.3)
    runner.gate.set()
    await engine.resume()

    assert request.finish_reason is FinishReason.ABORT
    assert (await engine.status()).state is State.RUNNING


# Control


async def test_no_step_runs_while_paused_and_requests_queue(
    engine: Engine, runner: GatedRunner
) -> None:
    reply = await engine.pause()
    steps = runner.steps
    async with engine.submit([5], max_tokens=3) as stream:
        assert (await replica(engine)).waiting == 1
        assert runner.steps == steps

        await engine.unpause()

        assert (await stream.completion()).token_ids == [6, 7, 8]
    assert reply.state is State.PAUSED


async def test_verbs_are_harmless_when_repeated(engine: Engine) -> None:
    for verb in (engine.pause, engine.suspend, engine.resume, engine.unpause):
        first, again = await verb(), await verb()

        assert first.state is again.state


async def test_suspend_frees_memory_and_says_how_much_and_resume_goes_on(
    engine: Engine, runner: GatedRunner
) -> None:
    async with engine.submit([5], max_tokens=200) as stream:
        suspended = await engine.suspend(weights=WeightsLevel.DISCARD)
        assert (runner.allocated, runner.loaded) == (False, False)

        resumed = await engine.resume()

        answer = await stream.completion()
    assert suspended.bytes_freed == 3000
    assert resumed.state is State.RUNNING
    assert answer.token_ids == list(range(6, 206))


async def test_an_update_changes_the_weights_and_tokens_say_which_made_them(
    engine: Engine, runner: GatedRunner
) -> None:
    async with engine.submit([5], max_tokens=50) as stream:
        await engine.pause()
        before = stream.record.num_tokens
        await engine.update_weights("new", version=3)
        await engine.unpause()
        answer = await stream.completion()

    assert runner.weights == Weights(source="new", version=3)
    assert answer.weights_version == 3
    assert (answer.weights_versions or [3] * 50)[before:] == [3] * (50 - before)
    assert (await engine.status()).weights_version == 3


async def test_an_update_without_a_version_is_one_more(engine: Engine, runner: GatedRunner) -> None:
    await engine.pause()

    for _ in range(2):
        await engine.update_weights("new")

    assert runner.weights.version == 2


async def test_levels_can_be_given_as_words(engine: Engine, runner: GatedRunner) -> None:
    await engine.suspend(kv="keep", weights="keep")

    assert runner.allocated
    with pytest.raises(ControlRefused, match="kv=keep, weights=keep"):
        await engine.suspend(kv=KVLevel.DROP)


async def test_a_paused_engine_is_paused_after_suspend_and_resume(engine: Engine) -> None:
    await engine.pause()
    await engine.suspend()

    assert (await engine.resume()).state is State.PAUSED


async def test_unpause_is_refused_while_suspended(engine: Engine) -> None:
    await engine.suspend()

    with pytest.raises(ControlRefused, match="unpause: the tree is suspended: resume first"):
        await engine.unpause()


async def test_pause_can_let_running_requests_finish(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=100) as stream:
        reply = await engine.pause(PauseMode.DRAIN)

        assert stream.finish_reason is FinishReason.LENGTH
        assert reply.state is State.PAUSED


async def test_pause_can_abort_what_runs(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=250) as stream:
        await engine.pause("abort")

        assert (await stream.completion()).finish_reason is FinishReason.ABORT


async def test_a_mode_that_does_not_exist_is_a_value_error(engine: Engine) -> None:
    with pytest.raises(ValueError, match="nicely"):
        await engine.pause("nicely")


async def test_who_does_not_answer_a_verb_in_time_is_named(
    engine: Engine, runner: GatedRunner
) -> None:
    runner.gate.clear()
    async with engine.submit([5], max_tokens=3) as stream:
        with pytest.raises(DeadlineExceeded, match="replica-0/scheduler"):
            await engine.pause(timeout=0.3)
        assert (await engine.status()).state is State.PAUSING
        runner.gate.set()

        assert (await engine.pause()).state is State.PAUSED
        await engine.unpause()

        assert (await stream.completion()).token_ids == [6, 7, 8]


async def test_status_shows_the_tree(engine: Engine) -> None:
    await engine.generate([[5]], max_tokens=3)

    reply = await engine.status()

    found = await replica(engine)
    assert reply.state is State.RUNNING
    assert [child.name for child in reply.tree.children] == ["metrics", "coordinator", "replicas"]
    assert found.steps == 3
    assert found.blocks_total == found.blocks_free == 64


async def test_status_is_answered_at_once_while_a_step_hangs_and_says_for_how_long(
    engine: Engine, runner: GatedRunner
) -> None:
    def executor(status: StatusReply) -> dict[str, Any]:
        nodes = [status.tree]
        while not nodes[0].name.endswith("/executor"):
            nodes = [*nodes[1:], *nodes[0].children]
        return nodes[0].details

    assert "step_s" not in executor(await engine.status())
    runner.gate.clear()
    async with engine.submit([5], max_tokens=3) as stream:
        with trio.fail_after(5.0):
            while "step_s" not in (details := executor(await engine.status())):
                await trio.lowlevel.checkpoint()
        runner.gate.set()
        await stream.completion()

    assert details["step_s"] >= 0


async def test_wait_for_returns_when_the_state_is_reached(engine: Engine) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.pause)

        reply = await engine.wait_for(State.PAUSED, timeout=5.0)

    assert reply.state is State.PAUSED


async def test_wait_for_says_what_it_saw_when_the_time_is_over(engine: Engine) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not paused within 1 s, but running"):
        await engine.wait_for(State.PAUSED, timeout=1.0)


# Step by step


async def test_a_step_runs_one_forward_pass_and_the_engine_is_paused_again(
    engine: Engine, runner: GatedRunner
) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=3)

    reply = await engine.step()

    assert unpack_ids((await anext(request)).token_ids) == [6]
    assert (reply.steps, reply.requests, reply.state) == (1, 1, State.PAUSED)
    assert (runner.steps, (await engine.status()).state) == (1, State.PAUSED)


async def test_an_engine_can_be_stepped_until_nothing_is_open(engine: Engine) -> None:
    await engine.pause()
    requests = [await engine.add_request(f"{n}", [n], max_tokens=n) for n in (1, 5, 3)]
    steps = 0
    while engine.has_unfinished_requests():
        steps += (await engine.step()).steps

    assert steps == 5
    assert [request.record.num_tokens for request in requests] == [1, 5, 3]
    assert await all_is_free(engine)


async def test_as_many_steps_run_as_there_is_work_for(engine: Engine) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=3)

    replies = [await engine.step(100), await engine.step(100)]

    await request.wait_ended()
    assert [(reply.steps, reply.requests) for reply in replies] == [(3, 0), (0, 0)]


async def test_stepping_and_running_make_the_same(engine: Engine) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=100)
    await engine.step(40)
    await engine.unpause()

    assert (await request.completion()).token_ids == list(range(6, 106))


async def test_a_running_engine_is_not_stepped(engine: Engine) -> None:
    with pytest.raises(ControlRefused, match="step: the tree is running: pause first"):
        await engine.step()


async def test_a_suspended_engine_is_not_stepped(engine: Engine) -> None:
    await engine.pause()
    await engine.suspend()

    with pytest.raises(ControlRefused, match="step: the tree is suspended: resume first"):
        await engine.step()

    await engine.resume()
    assert (await engine.step()).done


@pytest.mark.parametrize("count", [0, -3])
async def test_a_number_of_steps_is_one_or_more(engine: Engine, count: int) -> None:
    await engine.pause()

    with pytest.raises(ControlRefused, match=f"count is {count}, and must be 1 or more"):
        await engine.step(count)


async def test_verbs_that_come_during_a_step_are_answered_after_it(
    engine: Engine, runner: GatedRunner
) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=5)
    runner.gate.clear()
    replies: dict[str, Any] = {}

    async def send(name: str, verb: Any) -> None:
        replies[name] = await verb()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, "step", lambda: engine.step(2))
        await engine.wait_for(State.PAUSING, timeout=5.0)
        for name, verb in (
            ("pause", engine.pause),
            ("unpause", engine.unpause),
            ("status", engine.status),
        ):
            nursery.start_soon(send, name, verb)
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert list(replies) == ["status"]
        runner.gate.set()

    assert (replies["step"].steps, replies["step"].state) == (2, State.PAUSED)
    assert replies["pause"].state is State.PAUSED
    assert replies["unpause"].state is State.RUNNING
    assert (await request.completion()).token_ids == [6, 7, 8, 9, 10]


async def test_a_device_that_fails_in_a_step_is_back_and_paused_when_that_is_answered(
    engine: Engine, runner: GatedRunner
) -> None:
    await engine.pause()
    request = await engine.add_request("mine", [5], max_tokens=5)
    await engine.step()
    runner.fails_once = True

    reply = await engine.step(1)

    assert (reply.done, reply.steps, reply.requests) == (True, 0, 1)
    assert reply.state is State.PAUSED
    assert (await engine.step(2)).steps == 2
    await engine.unpause()
    assert (await request.completion()).token_ids == [6, 7, 8, 9, 10]


async def test_who_does_not_step_in_time_is_named_and_pauses_after_what_is_under_way(
    engine: Engine, runner: GatedRunner
) -> None:
    await engine.pause()
    await engine.add_request("mine", [5], max_tokens=50)
    runner.gate.clear()

    with pytest.raises(DeadlineExceeded, match="replica-0/scheduler"):
        await engine.step(30, timeout=0.3)
    assert (await engine.status()).state is State.PAUSING
    with pytest.raises(ControlRefused, match="the tree is pausing: pause first"):
        await engine.step()
    runner.gate.set()

    assert (await engine.pause()).state is State.PAUSED
    assert runner.steps == 1


async def test_every_replica_steps() -> None:
    made = ReplicaParts(
        make_runner=GatedRunner, codec=None, text_for=None, vocab_size=1000, eos_token_ids=()
    )

    async with open_engine(parts=made, replicas=3) as engine:
        await engine.pause()
        for n in range(6):
            await engine.add_request(f"{n}", [n], max_tokens=9)
        reply = await engine.step(2)

        steps = {child.name: child.steps for child in reply.children if child.steps}
        assert steps == {f"replica-{n}/scheduler": 2 for n in range(3)}
        assert (reply.steps, reply.requests) == (6, 6)


# Stop


async def test_stop_ends_open_requests_with_their_terminal_delta(engine: Engine) -> None:
    await engine.pause()
    async with engine.submit([5], max_tokens=3) as stream:
        reply = await engine.stop()

        assert (await stream.completion()).finish_reason is FinishReason.ABORT
    assert reply.state is State.STOPPED


async def test_stop_gives_open_requests_their_time(engine: Engine) -> None:
    async with engine.submit([5], max_tokens=200) as stream:
        await engine.stop(drain_s=10.0)

        assert (await stream.completion()).finish_reason is FinishReason.LENGTH


async def test_a_stopped_engine_refuses_with_typed_errors_and_says_so(engine: Engine) -> None:
    await engine.stop()

    with pytest.raises(ActorStopped, match="stopping"):
        await engine.generate([[5]])
    with pytest.raises(ControlRefused, match="stopped"):
        await engine.pause()
    assert (await engine.stop()).state is State.STOPPED
    assert (await engine.status()).state is State.STOPPED


# The block


async def test_an_exception_of_the_block_comes_out_as_it_was_raised() -> None:
    cause, context = KeyError("cause"), KeyError("context")
    error = ValueError("mine")
    error.__cause__, error.__context__ = cause, context

    with pytest.raises(ValueError, match="mine") as caught:
        async with opened():
            raise error

    assert caught.value is error
    assert (error.__cause__, error.__context__) == (cause, context)


async def test_a_group_of_the_callers_own_stays_a_group() -> None:
    error = ValueError("one")

    with pytest.raises(ExceptionGroup, match="mine") as caught:
        async with opened():
            raise ExceptionGroup("mine", [error])

    assert caught.value.exceptions == (error,)


async def test_an_error_of_a_request_comes_out_of_the_block_plain() -> None:
    with pytest.raises(RequestError):
        async with opened() as engine:
            await engine.generate([[1000]])


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "callboard device"]


async def test_cancelling_the_callers_scope_closes_everything() -> None:
    with trio.fail_after(10.0), trio.CancelScope() as scope:
        async with opened() as engine, engine.submit([5], max_tokens=250) as stream:
            async for _ in stream:
                scope.cancel()

    assert scope.cancelled_caught
    assert device_threads() == []


async def test_leaving_the_block_closes_everything() -> None:
    async with opened() as engine:
        await engine.generate([[5]], max_tokens=2)
        assert len(device_threads()) == 1

    assert device_threads() == []


async def test_two_engines_can_run_side_by_side() -> None:
    async with opened() as one, opened() as two:
        await one.pause()
        [answer] = await two.generate([[5]], max_tokens=2)

        assert answer.token_ids == [6, 7]
        assert (await one.status()).state is State.PAUSED
        assert (await two.status()).state is State.RUNNING


async def test_an_engine_can_be_opened_after_another() -> None:
    for _ in range(2):
        async with opened() as engine:
            [answer] = await engine.generate([[5]], max_tokens=1)
            assert answer.token_ids == [6]


async def test_an_engine_used_after_its_block_says_that_it_is_closed() -> None:
    async with opened() as engine:
        pass

    with trio.fail_after(5.0):
        with pytest.raises(ActorStopped, match="closed"):
            await engine.generate([[5]])
        with pytest.raises(ActorStopped, match="closed"):
            await engine.pause()
        with pytest.raises(ActorStopped, match="closed"):
            await engine.status()


async def test_a_stream_that_outlives_its_engine_is_told() -> None:
    async def read(
        engine: Engine, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with engine.submit([5], max_tokens=3) as stream:
            task_status.started()
            with pytest.raises(ActorStopped, match="closed"):
                await stream.completion()

    with trio.fail_after(10.0):
        async with trio.open_nursery() as nursery, opened() as engine:
            await engine.pause()
            await nursery.start(read, engine)


async def use_elsewhere(use: Callable[[], Awaitable[object]]) -> None:
    """Use an engine in a thread with a trio run of its own."""

    async def run() -> None:
        await use()

    await trio.to_thread.run_sync(trio.run, run)


async def test_an_engine_is_refused_to_other_threads_by_name(engine: Engine) -> None:
    async def enter() -> None:
        async with engine.submit([5], max_tokens=2):
            pass

    for use in (
        enter,
        lambda: engine.generate([[5]], max_tokens=2),
        lambda: engine.add_request("a", [5], max_tokens=2),
        engine.pause,
        engine.status,
        lambda: engine.abort("a"),
    ):
        with pytest.raises(WrongThread, match="from_thread"):
            await use_elsewhere(use)

    [answer] = await engine.generate([[5]], max_tokens=2)
    assert answer.token_ids == [6, 7]


async def test_an_engine_is_refused_to_an_asyncio_program_by_name(engine: Engine) -> None:
    async def use() -> None:
        await engine.generate([[5]], max_tokens=2)

    with pytest.raises(WrongThread):
        await trio.to_thread.run_sync(asyncio.run, use())


async def test_another_thread_can_send_its_call_to_the_engines(engine: Engine) -> None:
    token = trio.lowlevel.current_trio_token()

    def use() -> Any:
        return trio.from_thread.run(lambda: engine.generate([[5]], max_tokens=2), trio_token=token)

    [answer] = await trio.to_thread.run_sync(use)

    assert answer.token_ids == [6, 7]


def test_an_engine_can_be_opened_in_any_thread_and_leaves_signals_alone() -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def use() -> list[Any]:
        async with opened() as engine:
            during = handlers()
            [answer] = await engine.generate([[5]], max_tokens=2)
        assert answer.token_ids == [6, 7]
        return during

    before = handlers()
    with ThreadPoolExecutor() as pool:
        during = pool.submit(trio.run, use).result(20)

    assert during == handlers() == before
    assert device_threads() == []


class CancelsAt(trio.abc.Instrument):
    """Cancels a scope when so many turns of tasks have been made."""

    def __init__(self, scope: trio.CancelScope, turns: int) -> None:
        self.turns = 0
        self._scope = scope
        self._at = turns

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.turns += 1
        if self.turns == self._at:
            self._scope.cancel("the test's instrument")


async def use_until(turns: int) -> int:
    """Open an engine and use it, cancelled after so many turns; returns how many there were."""
    scope = trio.CancelScope()
    cancels = CancelsAt(scope, turns)
    trio.lowlevel.add_instrument(cancels)
    try:
        with scope:
            async with opened() as engine:
                async with engine.submit([5], max_tokens=3) as stream:
                    await stream.completion()
                await engine.pause()
    finally:
        trio.lowlevel.remove_instrument(cancels)
    return cancels.turns


async def test_an_engine_can_be_cancelled_at_any_moment_and_nothing_of_it_is_left() -> None:
    with trio.fail_after(60.0):
        whole = await use_until(10**9)
        tasks = trio.lowlevel.current_statistics().tasks_living
        for turns in range(1, whole, max(1, whole // 150)):
            await use_until(turns)

            assert device_threads() == []
            assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_an_exception_of_the_caller_at_any_moment_comes_out_and_nothing_is_left() -> None:
    class Mine(Exception):
        pass

    async def use(place: int) -> None:
        async with opened() as engine:
            if place == 0:
                raise Mine
            async with engine.submit([5], max_tokens=200) as stream:
                if place == 1:
                    raise Mine
                async for _ in stream:
                    raise Mine

    for place in range(3):
        with pytest.raises(Mine):
            await use(place)

        assert device_threads() == []


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_pause_that_aborts_does_so_where_nothing_ran_any_more(
    engine: Engine, suspended: bool
) -> None:
    await engine.pause()
    requests = [await engine.add_request(str(n), [n], max_tokens=100) for n in range(3)]
    await engine.step(2)
    requests.append(await engine.add_request("queued", [9], max_tokens=100))
    if suspended:
        await engine.suspend()

    reply = await engine.pause("abort")

    assert reply.state is (State.SUSPENDED if suspended else State.PAUSED)
    assert [request.finish_reason for request in requests] == [FinishReason.ABORT] * 4


async def test_numbers_of_numpy_and_torch_are_numbers(engine: Engine) -> None:
    [answer] = await engine.generate(
        [[5]], max_tokens=np.int64(3), temperature=np.float32(0.0), seed=torch.tensor(7)
    )

    assert answer.token_ids == [6, 7, 8]


async def test_settings_and_their_fields_are_not_given_together() -> None:
    with pytest.raises(ConfigError, match="not both"):
        async with open_engine(Settings(), replicas=2):
            pass


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"replicsa": 2}, "replicsa is no setting"),
        ({"replicas": "two"}, "replicas"),
        ({"kv_cache_gb": -1.0}, "kv_cache_gb is -1.0"),
        ({"replicas": 0}, "replicas is 0, and nobody can join an embedded engine"),
    ],
)
async def test_a_wrong_setting_is_named(overrides: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        async with open_engine(**overrides):
            pass


async def test_a_device_that_does_not_come_up_is_named_with_the_reason() -> None:
    class Broken(ScriptedRunner):
        def load(self) -> None:
            raise MemoryError("not enough")

    with pytest.raises(StartFailed) as failed:
        async with opened(Broken()):
            pass

    assert str(failed.value) == "replica-0/executor did not start: MemoryError: not enough"
    assert device_threads() == []


async def test_several_replicas_can_share_the_process() -> None:
    made = ReplicaParts(
        make_runner=GatedRunner, codec=None, text_for=None, vocab_size=1000, eos_token_ids=()
    )

    async with open_engine(parts=made, replicas=3) as engine:
        answers = await engine.generate([[n] for n in range(12)], max_tokens=2)
        reply = await engine.status()

    assert [answer.token_ids for answer in answers] == [[n + 1, n + 2] for n in range(12)]
    assert [one.name for one in reply.replicas] == ["replica-0", "replica-1", "replica-2"]
    assert all(one.steps > 0 for one in reply.replicas)


# Far away


async def test_nobody_at_an_endpoint_is_a_plain_error_within_the_time(tmp_path: Path) -> None:
    with trio.fail_after(5.0), pytest.raises(Unreachable, match="nobody"):
        async with connect(f"ipc://{tmp_path / 'nobody'}", timeout=0.1):
            pass


async def test_a_verb_is_given_up_in_its_time_when_nobody_is_reached(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with opened(ScriptedRunner()) as engine:
        network = engine._network
        assert isinstance(network, MemoryNetwork)
        network._servers.clear()
        began = trio.current_time()

        with pytest.raises(Unreachable, match="nobody answers"):
            await engine.status(timeout=5.0)

        assert trio.current_time() - began <= 5.01


async def test_verbs_that_wait_for_their_connection_are_sent_in_the_order_of_their_calls() -> None:
    answers: list[str] = []

    async def say(engine: Engine, verb: Pause | Step | Unpause) -> None:
        answers.append((await engine.ask_tree(verb, 10.0)).refused)

    for turns in range(8):
        async with opened(ScriptedRunner()) as engine, trio.open_nursery() as nursery:
            await start_in_order(nursery, say, engine, Pause())
            await start_in_order(nursery, say, engine, Step())  # refused where nothing is paused
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            await start_in_order(nursery, say, engine, Unpause())

    assert answers == [""] * 24


async def test_a_verb_without_any_time_is_late_and_its_server_not_unreachable() -> None:
    async with opened(ScriptedRunner()) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.pause(timeout=0)


async def test_a_verb_that_waits_for_a_server_that_is_gone_goes_to_the_next_one() -> None:
    answers: list[StatusReply] = []

    async def ask(engine: Engine) -> None:
        answers.append(await engine.status(timeout=30.0))

    with trio.fail_after(10.0):
        async with opened(ScriptedRunner()) as engine, trio.open_nursery() as nursery:
            welcome = engine._connection.welcome
            assert welcome is not None
            gone = msgspec.structs.replace(welcome, control_endpoint="memory://gone")
            engine._connection.welcome = gone
            nursery.start_soon(ask, engine)
            await trio.testing.wait_all_tasks_blocked()
            engine._connection.welcome = welcome
            engine._meet(welcome)

    assert [answer.state for answer in answers] == [State.RUNNING]


async def test_a_request_made_as_a_session_begins_is_said_in_it_once() -> None:
    answers: list[list[int]] = []
    asked = trio.Event()

    async def make(engine: Engine) -> None:
        async with engine.submit([5], max_tokens=200) as stream:
            answers.append((await stream.completion()).token_ids)

    with trio.fail_after(20.0):
        async with opened(ScriptedRunner()) as engine, trio.open_nursery() as nursery:
            connection = engine._connection
            original = connection._deliver

            async def deliver(event: Said | Joined | Left) -> None:
                if isinstance(event, Joined) and not asked.is_set():
                    nursery.start_soon(make, engine)
                    asked.set()
                    await trio.testing.wait_all_tasks_blocked()
                await original(event)

            connection._deliver = deliver
            connection._lose("on purpose")
            connection._say_hello()
            await asked.wait()

    assert answers == [list(range(6, 206))]


async def test_an_endpoint_that_is_none_is_an_os_error() -> None:
    with pytest.raises(OSError, match="nonsense"):
        async with connect("nonsense"):
            pass


def test_the_public_names_are_these() -> None:
    assert callboard.open_engine is open_engine
    assert callboard.connect is connect
