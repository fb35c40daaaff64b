"""A device of one simulation: a thread without a thread, a model that is a function, and faults.

The model's next token depends on all tokens before it and, where it samples, on the request's seed
and the position, as that of the real one does. So what a request should have generated can be said
without running anything (`alone`).
"""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import trio

from callboard.actors.mailbox import Reply
from callboard.actors.testing import ScriptedRunner
from callboard.gpu.text import TextStream
from callboard.messages.base import pack_floats, pack_ids, unpack_ids
from callboard.messages.logprobs import PromptLogprobs
from callboard.messages.requests import FinishReason
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import RowFailure, RowId, RowSampling, RunStep, StepDone
from tests.simulation.scenario import EOS, VOCABULARY, DeviceFault

if TYPE_CHECKING:
    from tests.simulation.processes import Process

T = TypeVar("T")

FOREVER = math.inf


class DeviceBroken(RuntimeError):
    """A simulated error in a forward pass."""


class OutOfDeviceMemory(RuntimeError):
    """What a device says that has no memory left."""


# The model.


def next_token(tokens: list[int], position: int, *, temperature: float, seed: int) -> int:
    """Return the token behind these."""
    draw = (seed * 2654435761 + position * 40503) if temperature > 0 else 0
    return (sum(tokens) * 31 + tokens[-1] * 7 + len(tokens) * 13 + draw) % VOCABULARY


def logprob(tokens: list[int]) -> float:
    """Return the log-probability the model gives the last of these tokens."""
    return -float(sum(tokens) % 64) / 8


class Letters:
    """A tokenizer of which every token is one letter; see `callboard.gpu.text.TokenBytes`."""

    special_token_ids = frozenset({EOS})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        """Return a letter."""
        return bytes([97 + token_id % 26])


class Codec:
    """The other way, for `callboard.actors.tokenizer.TextCodec`."""

    def encode(self, text: str) -> list[int]:
        """Return a token a letter."""
        return [ord(letter) % VOCABULARY for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the turns behind each other."""
        return "".join(turn["content"] for turn in messages)


def text_for(params: SamplingParams) -> TextStream:
    """Return the text of one request."""
    return TextStream(
        Letters(),
        stop=params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
    )


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a request generates when nothing else happens."""

    tokens: list[int]
    text: str
    finish: FinishReason
    logprobs: list[float]


def alone(prompt: list[int], params: SamplingParams, seed: int) -> Generation:
    """Return what a request generates on a device of its own."""
    tokens, text, shown = list(prompt), text_for(params), ""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    finish, logprobs = FinishReason.LENGTH, []
    for position in range(params.max_tokens or 0):
        token = next_token(tokens, position, temperature=params.temperature, seed=seed)
        tokens.append(token)
        logprobs.append(logprob(tokens))
        shown += text.push(token)
        if text.stopped is not None or token in stops:
            finish = FinishReason.STOP
            break
    return Generation(
        tokens=tokens[len(prompt) :],
        text=shown + ("" if text.stopped is not None else text.finish()),
        finish=finish,
        logprobs=logprobs,
    )


def texts_of(tokens: list[int], params: SamplingParams) -> tuple[str, str]:
    """Return the text of an output cut short, without what is held back for a stop, and with it."""
    text = text_for(params)
    shown = "".join(text.push(token) for token in tokens)
    return shown, shown + text.finish()


def prompt_scores(prompt: list[int]) -> list[float]:
    """Return the log-probabilities of all tokens of a prompt but the first."""
    return [logprob(prompt[:end]) for end in range(2, len(prompt) + 1)]


# The thread.


class SimThread:
    """`callboard.actors.device_thread.DeviceThread`, with time that passes where work would be.

    A job has its effect when it begins, and is over after the time it takes; it goes on when the
    actor that waits for it does not, and ends with its process.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._process = device.process
        self._jobs: deque[tuple[Callable[[], Any], Reply]] = deque()
        self._is_busy = False
        self._idle = trio.Event()

    def start(self) -> None:
        """Begin to take jobs."""

    async def aclose(self) -> None:
        """Wait for the job in hand."""
        while self._is_busy and self._process.alive:
            self._idle = trio.Event()
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    async def run(self, job: Callable[[], T]) -> T:
        """Do a job and return what it returns, or raise what it raises."""
        reply = Reply()
        self._jobs.append((job, reply))
        if not self._is_busy:
            self._next()
        return cast(T, await reply.wait())

    def _next(self) -> None:
        while self._jobs and self._process.alive:
            job, reply = self._jobs.popleft()
            self._device.busy_s = 0.0
            settle = _do(job, reply)
            if self._device.busy_s > 0.0:
                self._is_busy = True
                self._wait_for(settle)
                return
            self._device.step_is_over()
            settle()

    def _wait_for(self, settle: Callable[[], None]) -> None:
        if self._device.busy_s < FOREVER:
            due = trio.current_time() + self._device.busy_s
            self._process.timers.at(due, lambda: self._over(settle))

    def _over(self, settle: Callable[[], None]) -> None:
        if not self._process.alive:
            return
        self._device.step_is_over()
        settle()
        self._is_busy = False
        self._idle.set()
        self._next()


def _do(job: Callable[[], Any], reply: Reply) -> Callable[[], None]:
    """Do a job at once; returns what tells who waits for it how it went."""
    try:
        result = job()
    except Exception as error:
        return _later(reply.fail, error)
    return _later(reply.send, result)


def _later(settle: Callable[[Any], None], value: object) -> Callable[[], None]:
    return lambda: settle(value)


# The runner.


class Device:
    """What the lives of one replica's runners have in common."""

    def __init__(
        self, process: "Process", replica: int, faults: list[DeviceFault], rng: random.Random
    ) -> None:
        self.process = process
        self.name = f"replica-{replica}"
        self.replica = replica
        self.busy_s = 0.0  # what the job that runs now takes
        self.runner: SimRunner | None = None
        self._faults = faults
        self._rng = rng

    def make_runner(self) -> "SimRunner":
        """Return a new runner, which takes the place of the one before."""
        self.step_is_over()  # if one was under way, it is with a device that was given up
        self.runner = SimRunner(self)
        return self.runner

    def begin_step(self, step: RunStep) -> DeviceFault | None:
        """A forward pass begins; says what will be wrong with it."""
        world = self.process.world
        if not self.process.is_orphan:
            world.checks.forward_begins(self.name, step)
        low, high = world.scenario.step_s
        self.busy_s = self._rng.uniform(low, high)
        if not world.faulty:
            return None
        number = world.count_step(self.replica)
        faults = (fault for fault in self._faults if fault.kind != "load")
        return next((fault for fault in faults if fault.step == number), None)

    def load_weights(self) -> None:
        """Weights are loaded; raises OutOfDeviceMemory when the scenario says so."""
        self.load()
        world = self.process.world
        if not self.process.is_orphan:
            world.checks.takes_weights(self.name)
        number = world.count_load(self.replica)
        for fault in self._faults:
            if fault.kind == "load" and world.may_fail_to_load(fault, number):
                world.weights_do_not_load(fault)
                raise OutOfDeviceMemory("out of memory: tried to allocate the weights")

    def allocate(self) -> None:
        """A cache is allocated."""
        self.load()
        if not self.process.is_orphan:
            self.process.world.checks.takes_cache(self.name)

    def load(self) -> None:
        """Something is loaded or allocated, which takes its time."""
        self.busy_s = self._rng.uniform(*self.process.world.scenario.load_s)

    def step_is_over(self) -> None:
        """A forward pass has ended, one way or the other."""
        if not self.process.is_orphan:
            self.process.world.checks.forward_ends(self.name)

    def hang(self, fault: DeviceFault) -> None:
        """The pass never ends; somebody will notice and kill it."""
        self.busy_s = FOREVER
        self.process.world.watch_hanging(self.replica, fault)


class SimRunner(ScriptedRunner):
    """A runner with faults, log-probs and sampling."""

    def __init__(self, device: Device) -> None:
        room = device.process.world.scenario.room
        super().__init__(**msgspec.structs.asdict(room))
        self._device = device
        self._lengths: dict[RowId, int] = {}  # tokens in the cache before the step

    def load(self) -> None:
        """Pretend to load, where that is allowed."""
        if not self.loaded:
            self._device.load_weights()
        super().load()

    def allocate(self) -> None:
        """Pretend to allocate, where that is allowed."""
        if not self.allocated:
            self._device.allocate()
        super().allocate()

    def choose(self, tokens: list[int], position: int, sampling: RowSampling) -> int:
        """Return the next token of a row."""
        return next_token(tokens, position, temperature=sampling.temperature, seed=sampling.seed)

    def execute(self, step: RunStep) -> StepDone:
        """Run one step, or fail as planned."""
        fault = self._device.begin_step(step)
        kind = "" if fault is None else fault.kind
        if kind == "error":
            raise DeviceBroken("a planned error")
        if kind == "out_of_memory":
            raise OutOfDeviceMemory("out of memory: tried to allocate 2.00 GiB")
        self._lengths = {row: self._rows[row].length for row in self.rows}
        self._lengths.update((admit.row, admit.cached_tokens) for admit in step.admits)
        done = super().execute(step)
        if kind == "error_behind":
            raise DeviceBroken("a planned error behind a step")
        if fault is not None and kind == "hang":
            self._device.hang(fault)
        if kind == "nan":
            done = self._with_nan(done)
        return msgspec.structs.replace(done, seconds=min(self._device.busy_s, 1e3))

    def _sample(self, step: int, prefilled: set[RowId], num_tokens: int) -> StepDone:
        present = dict(self._rows)
        done = super()._sample(step, prefilled, num_tokens)
        logprobs = b""
        if any(present[row].sampling.logprobs >= 0 for row in done.rows):
            logprobs = pack_floats([logprob(present[row].tokens) for row in done.rows])
        scores = {
            row: self._scores_of_chunk(present[row], self._lengths[row])
            for row in sorted(prefilled)
            if present[row].sampling.prompt_logprobs >= 0
        }
        return msgspec.structs.replace(done, logprobs=logprobs, prompt_logprobs=scores)

    def _scores_of_chunk(self, row: Any, cached_before: int) -> PromptLogprobs:
        start, end = cached_before + 1, min(row.length, row.target - 1)
        scores = [logprob(row.tokens[: index + 1]) for index in range(start, end + 1)]
        return PromptLogprobs(start=start, logprobs=pack_floats(scores))

    def _with_nan(self, done: StepDone) -> StepDone:
        """Let the first row that goes on fail, as one whose logits are not numbers does."""
        ended = {*done.stopped, *done.full}
        victim = next((row for row in done.rows if row not in ended), None)
        if victim is None:
            return done
        self._left.add(victim)
        self.drop((victim,))
        place = done.rows.index(victim)
        token_ids = unpack_ids(done.token_ids)
        message = self._device.process.world.checks.nan_injected()
        return msgspec.structs.replace(
            done,
            rows=(*done.rows[:place], *done.rows[place + 1 :]),
            token_ids=pack_ids([*token_ids[:place], *token_ids[place + 1 :]]),
            logprobs=done.logprobs[: 4 * place] + done.logprobs[4 * place + 4 :],
            failed=(RowFailure(row=victim, message=message),),
        )
