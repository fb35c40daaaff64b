"""Any schedule gives each request the tokens of its solo run.

A schedule is drawn from one number: the limits of the device, the options of the scheduler, the
requests, and all that happens to them. It is played by the real parts of a replica: scheduler,
allocator and executor, each in its cell, with the order in which they get to their mail drawn, too.
A failing test names the number; to play that schedule alone:

    pytest 'tests/end_to_end/test_schedules.py::test_with_a_scripted_device[17]'

The device's model is a hash of all tokens of a row. Under `ScriptedRunner` it is given them; under
`ModelRunner` it finds them where a model finds keys and values, in the blocks of the KV cache. It
is computed in integers, so that no batch changes it, and what depends on it, drawn tokens and
log-probs included, is compared bit for bit. A few schedules have a real decoder, in float64.
"""

import dataclasses
import enum
import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Actor, Cell
from callboard.actors.executor import Executor, Runner
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import Phase
from callboard.actors.mailbox import Letter, Reply
from callboard.actors.policy import MAX_OVERTAKEN
from callboard.actors.ref import LocalRef
from callboard.actors.scheduler import Scheduler
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.testing import ScriptedRunner
from callboard.gpu.attention.base import AttentionMetadata
from callboard.gpu.loading import LoadedModel, load_model
from callboard.gpu.memory import blocks_for
from callboard.gpu.models.decoder import LayerCaches
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.gpu.text import TextStream
from callboard.messages.base import Call, Message, pack_ids, unpack_floats, unpack_ids
from callboard.messages.blocks import BlocksGranted, ReserveBlocks
from callboard.messages.codec import decode_body, encode_body
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    Step,
    Suspend,
    Unpause,
    Verb,
    WeightsLevel,
)
from callboard.messages.errors import OutOfMemory, RequestError
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    Enqueue,
    EventKind,
    FinishReason,
    Refused,
    TokensOut,
    Usage,
)
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import (
    Admit,
    RowId,
    RowSampling,
    RunStep,
    StepDone,
)
from callboard.supervision.app import ReplicaParts
from callboard.supervision.engine import Engine, open_engine

SCRIPTED = range(120)
REAL = range(120, 200)
EMBEDDED = range(200, 212)
FLOATS = range(212, 224)

EOS = 39
TOKENS = [bytes([code]) for code in b"abcdefghijklmnopqrstuvwxyz  "] + [
    b"th", b"er", b"ing", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"on", b". ", b"x"
]  # fmt: skip
VOCABULARY = len(TOKENS) + 1


# The model.


def scripted_token(tokens: list[int]) -> int:
    return zlib.crc32(pack_ids(tokens)) % VOCABULARY


UNREAL_WEIGHTS = (WeightsLevel.KEEP, WeightsLevel.DISCARD)
"""What can be done with the weights of a model that has none."""


class HashDecoder:
    """A decoder whose logits are a hash of all tokens of the row, kept where keys would be."""

    def forward(
        self, input_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: LayerCaches
    ) -> Tensor:
        """Write tokens and places into the cache, and return int64 [T, 1] hashes of prefixes."""
        ids, places = (cache.flatten(0, 1)[:, 0, 0] for cache in kv_cache.layer(0))
        ids[metadata.slot_mapping] = input_ids_T.to(ids.dtype)
        places[metadata.slot_mapping] = metadata.positions.to(places.dtype)
        place_L = torch.arange(metadata.max_seqlen_k)
        block_tokens = kv_cache.layer(0)[0].shape[1]
        slots_RL = metadata.block_table[:, place_L // block_tokens].long() * block_tokens
        slots_RL += place_L % block_tokens
        is_known_RL = place_L < metadata.seqlens_k[:, None]
        in_place_RL = places[slots_RL] == place_L
        assert (in_place_RL | ~is_known_RL).all(), "somebody else wrote to this block"
        sums_RL = ((ids[slots_RL].long() + 1) * mixed(place_L + 1)).cumsum(1)
        row_T = torch.repeat_interleave(metadata.cu_seqlens_q.diff())
        hash_T = torch.zeros(len(input_ids_T), dtype=torch.int64)  # of padding, too
        hash_T[: len(row_T)] = sums_RL[row_T, metadata.positions[: len(row_T)]]
        return hash_T[:, None]

    def logits(self, hash_R1: Tensor) -> Tensor:
        """Return float32 [R, V], each a multiple of 2^-17 from 0 to 8; seldom a row of NaN."""
        bits_RV = mixed(mixed(hash_R1) + torch.arange(VOCABULARY))
        logits_RV = ((bits_RV >> 40) & 0xFFFFF).float() / 2**17
        return logits_RV.masked_fill(hash_R1 % 301 == 0, torch.nan)


def mixed(x: Tensor) -> Tensor:
    """Spread the bits of int64 numbers; products wrap."""
    x = x * -7046029254386353131
    x = (x ^ (x >> 29)) * -4658895280553007687
    return x ^ (x >> 32)


class Vocabulary:
    """Letters, pieces of words, and bytes that are characters only together."""

    special_token_ids = frozenset({EOS})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id % len(TOKENS)]

    def encode(self, text: str) -> list[int]:
        return [TOKENS.index(character.encode()) for character in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return " ".join(message["content"] for message in messages)


def text_for(params: SamplingParams) -> TextStream:
    return TextStream(
        Vocabulary(),
        stop=params.stop,
        include_stop=params.include_stop,
        min_tokens=params.min_tokens,
    )


# A schedule.


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a schedule."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    delivered: float = 0.0  # the part of its output that its client already has


class Leave(msgspec.Struct, frozen=True):
    """A request is given up: one that stands there, as soon as there is one."""

    phase: Phase


class Jump(msgspec.Struct, frozen=True):
    """Time passes."""

    seconds: float


class Operate(msgspec.Struct, frozen=True):
    """The operator does something, or sees that what was asked is done."""


class Fault(enum.Enum):
    """What fails next, and takes all rows along."""

    STEP = enum.auto()
    MEMORY = enum.auto()  # which a step needs
    ALLOCATOR = enum.auto()


class Crash(msgspec.Struct, frozen=True):
    """The device fails."""

    fault: Fault


Event = Ask | Leave | Jump | Operate | Crash


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """What is drawn from a number."""

    seed: int
    limits: dict[str, int]
    num_graph_sizes: int | None  # how finely the real context pads its steps
    options: dict[str, Any]  # the scheduler's
    asks: list[Ask]
    events: list[tuple[int, Event]]  # each with the letters that are read before it
    speeds: tuple[int, int, int]  # of scheduler, allocator, executor


SPEEDS = ((1, 1, 1), (5, 5, 1), (1, 5, 5), (1000, 1000, 1), (1, 1000, 1000))


def draw(seed: int, *, has_logits: bool) -> Schedule:
    """Draw a schedule, for a device that has logits or for one that has only tokens."""
    rng = random.Random(seed)
    block_tokens = rng.choice((1, 2, 3, 4, 8, 16))
    max_model_len = rng.randint(16, 64)
    starts = [draw_tokens(rng, max_model_len) for _ in range(rng.choice((1, 1, 3)))]
    num_asks = rng.choice((2, 4, 8, 14))
    has_text = rng.random() < 0.5
    asks = [
        draw_ask(rng, str(number), max_model_len, starts, has_text=has_text, has_logits=has_logits)
        for number in range(num_asks)
    ]
    if rng.random() < 0.3:
        asks = [like_first(rng, ask, asks[0]) for ask in asks]
    max_rows = rng.randint(1, 8)
    needed = max(blocks_for(len(ask.prompt) + most_tokens(ask) - 1, block_tokens) for ask in asks)
    return Schedule(
        seed=seed,
        limits={
            "block_tokens": block_tokens,
            "num_blocks": rng.choice(
                (max(1, needed - 1), needed, needed, needed + 2, needed + 5, 200)
            ),
            "max_rows": max_rows,
            "max_step_tokens": max_rows + rng.choice((0, 3, 17, 200)),
            "max_model_len": max_model_len,
        },
        num_graph_sizes=rng.choice((None, 3)),
        options=draw_options(rng, has_text=has_text),
        asks=asks,
        events=draw_events(rng, asks),
        speeds=rng.choice(SPEEDS),
    )


def like_first(rng: random.Random, ask: Ask, first: Ask) -> Ask:
    """Return the first request again, with the same prompt or one as long: they meet at corners."""
    prompt = rng.choice((first.prompt, draw_tokens(rng, len(first.prompt))))
    return msgspec.structs.replace(first, request_id=ask.request_id, prompt=prompt)


def most_tokens(ask: Ask) -> int:
    return ask.params.max_tokens or 1


def draw_options(rng: random.Random, *, has_text: bool) -> dict[str, Any]:
    return {
        "prefill_chunk_tokens": rng.choice((None, None, 1, 5, 16)),
        "prefix_caching": rng.random() < 0.6,
        "paused_limit": rng.choice((None, None, 0, 2, 5)),
        "pipeline_depth": rng.choice((1, 2)),
        "text_for": text_for if has_text else None,
    }


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(EOS) for _ in range(count)]


def draw_ask(
    rng: random.Random,
    request_id: str,
    max_model_len: int,
    starts: Sequence[list[int]],
    *,
    has_text: bool,
    has_logits: bool,
) -> Ask:
    """Draw a request; two of three begin like others, and a few do not fit."""
    length = rng.choice((1, rng.randint(1, 8), rng.randint(1, max_model_len - 8)))
    prompt = rng.choice(starts)[: rng.choice((0, length // 2, length))]
    prompt = prompt + draw_tokens(rng, length - len(prompt))
    room = max_model_len - length
    max_tokens = rng.choice((None, 0, 1, *(rng.randint(1, room) for _ in range(12)), room + 1))
    params = draw_params(rng, max_tokens, has_text=has_text, has_logits=has_logits)
    return Ask(
        request_id=request_id,
        prompt=prompt,
        params=params,
        priority=rng.choice((0, 0, 0, -1, 1)),
        timeout_s=rng.choice((None, None, rng.uniform(0.1, 5))),
        delivered=0.0 if params.seed is None else rng.choice((0.0, 0.0, 0.0, rng.random())),
    )


def draw_params(
    rng: random.Random, max_tokens: int | None, *, has_text: bool, has_logits: bool
) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        top_k=rng.choice((0, 0, 0, 0, 5)),
        top_p=rng.choice((1.0, 1.0, 1.0, 1.0, 0.8)),
        min_p=rng.choice((0.0, 0.0, 0.0, 0.0, 0.05)),
        seed=rng.choice((None, rng.randrange(2**63))),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 4 if max_tokens is None else min(4, max_tokens))),
        stop=rng.choice(((), ("a",), ("e ", "ing", "€"))) if has_text else (),
        stop_token_ids=rng.choice(((), (), (3, 7, 11))),
        include_stop=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice((None, None, 0, 3)) if has_logits else None,
        prompt_logprobs=rng.choice((None, None, 0, 3)) if has_logits else None,
        repetition_penalty=rng.choice((1.0, 1.0, 1.5)),
        presence_penalty=rng.choice((0.0, 0.0, 0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.3)),
        logit_bias=rng.choice(({}, {}, {5: 3.0, 6: -2.0})),
        bad_token_ids=rng.choice(((), (), ((8,), (1, 2), (9, 9)))),
    )


def draw_events(rng: random.Random, asks: list[Ask]) -> list[tuple[int, Event]]:
    """Mix the requests with aborts, control, failures and time that passes."""
    others: list[Event] = [
        *(Leave(rng.choice(list(Phase))) for _ in range(rng.choice((0, 2, 6)))),
        *(Jump(rng.uniform(0.1, 2.0)) for _ in range(rng.choice((0, 3, 6)))),
        *(Operate() for _ in range(rng.choice((0, 0, 20, 60)))),
        *(Crash(rng.choice(list(Fault))) for _ in range(rng.choice((0, 0, 2)))),
    ]
    events: list[Event] = [*asks]
    for other in others:
        events.insert(rng.randint(0, len(events)), other)
    letters = rng.choice((0.1, 3.0, 10.0))
    return [(int(rng.expovariate(1 / letters)), event) for event in events]


def max_tokens_of(ask: Ask, limits: dict[str, int]) -> int:
    """Return how many tokens the request may generate: without a limit of its own, what fits."""
    if ask.params.max_tokens is not None:
        return ask.params.max_tokens
    in_pool = limits["num_blocks"] * limits["block_tokens"] + 1
    return max(1, min(limits["max_model_len"], in_pool) - len(ask.prompt))


def fits(ask: Ask, limits: dict[str, int]) -> bool:
    max_tokens = max_tokens_of(ask, limits)
    needed = blocks_for(len(ask.prompt) + max(1, max_tokens) - 1, limits["block_tokens"])
    is_short = len(ask.prompt) + max_tokens <= limits["max_model_len"]
    return is_short and needed <= limits["num_blocks"]


# The replica.


class Broken(Exception):
    """What the device breaks with."""


class Watched:
    """A runner that counts what steps bring, and breaks when told to."""

    def __init__(self, runner: ModelRunner | ScriptedRunner, seen: Counter[str]) -> None:
        self.runner = runner
        self.is_stopped = False
        self.next_fault: Fault | None = None
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def drop(self, rows: tuple[RowId, ...]) -> None:
        self.runner.drop(rows)

    def execute(self, step: RunStep) -> StepDone:
        assert not self.is_stopped, "a step between the pause and the unpause"
        if self.next_fault is Fault.STEP:
            raise Broken
        if self.next_fault is Fault.MEMORY:
            self.next_fault = None
            self._seen["steps too large"] += 1
            raise OutOfMemory("on purpose")
        self._seen["steps"] += 1
        self._seen["chunks that continue a prompt"] += len(step.continues)
        self._seen["prompts found in part"] += sum(admit.cached_tokens > 0 for admit in step.admits)
        done = self.runner.execute(step)
        if isinstance(self.runner, ModelRunner):
            assert self.runner._context is not None
            self.runner._context.check()
        return done

    @property
    def num_rows(self) -> int:
        if isinstance(self.runner, ModelRunner):
            return self.runner.num_rows
        return len(self.runner.rows)


MakeRunner = Callable[[dict[str, int], int | None], ModelRunner | ScriptedRunner]


class Voice:
    """A ref whose letters are on their way until they are delivered, and arrive as copies."""

    def __init__(self, cell: Cell, said: deque[tuple[Cell, Message]]) -> None:
        self.name = cell.name
        self._cell = cell
        self._said = said

    async def tell(self, message: Message) -> None:
        self.tell_nowait(message)

    def tell_nowait(self, message: Message) -> None:
        copy = decode_body(encode_body(message), type(message))
        assert copy == message
        self._said.append((self._cell, copy))

    async def ask(self, call: Call[Any], *, timeout: float = 5.0) -> Any:
        raise NotImplementedError


class Replica:
    """Scheduler, allocator and executor; who of them gets on next is the caller's say.

    A turn of a part is to deliver one letter, or, when it has delivered all that it wrote, to read
    one. So another part may get on between any two letters, as where each has a task.
    """

    def __init__(
        self, system: ActorSystem, schedule: Schedule, make_runner: MakeRunner, seen: Counter[str]
    ) -> None:
        self.seen = seen
        self._question: ReserveBlocks | None = None
        self._make_runner = make_runner
        self._schedule = schedule
        self._out = system.cell("link")
        self._cells = [system.cell(name) for name in ("scheduler", "allocator", "executor")]
        self._said: list[deque[tuple[Cell, Message]]] = [deque() for _ in self._cells]
        self._is_down = False  # allocator and executor
        self.scheduler = Scheduler(
            allocator=self._voice(0, to=1),
            executor=self._voice(0, to=2),
            out=LocalRef(self._out),
            eos_token_ids=(EOS,),
            **schedule.options,
        )
        self.runner: Watched
        self.allocator: KVAllocator
        self._executor: Executor

    async def start(self) -> None:
        await self._begin(self._cells[0], self.scheduler)
        await self.start_device()
        while self.is_saying(2):  # or requests that do not fit would be accepted at first
            await self.turn(2)

    async def start_device(self) -> None:
        """Begin a life of the allocator and the executor."""
        self._is_down = False
        self.allocator = KVAllocator(self._voice(1, to=0))
        self._executor = Executor(
            self._runner, scheduler=self._voice(2, to=0), allocator=self._voice(2, to=1)
        )
        await self._begin(self._cells[1], self.allocator)
        await self._begin(self._cells[2], self._executor)

    async def stop(self) -> None:
        await self._executor.on_stop()

    @property
    def next_fault(self) -> Fault | None:
        """What is going to fail."""
        return self.runner.next_fault

    @next_fault.setter
    def next_fault(self, fault: Fault) -> None:
        self.runner.next_fault = fault

    def put(self, message: Message, part: int = 0) -> Reply:
        reply = Reply()
        self._cells[part].mailbox.put_nowait(Letter(message, reply=reply))
        return reply

    async def turn(self, part: int) -> None:
        """Let a part get on: see the class."""
        if self._said[part]:
            cell, message = self._said[part].popleft()
            LocalRef[Message](cell).tell_nowait(message)
        elif self._is_down and part == 2:
            await self.start_device()
        else:
            await self._read_letter(part)

    async def _read_letter(self, part: int) -> None:
        cell = self._cells[part]
        letter, actor = cell.mailbox.take_nowait(), cell.actor
        assert letter is not None
        assert actor is not None
        before = self.phases()
        try:
            if self.next_fault is Fault.ALLOCATOR and isinstance(letter.message, ReserveBlocks):
                raise Broken
            await cell._handle(actor, letter)
        except Broken:
            self.seen["failures of the device"] += 1
            self._is_down = True
            self._said[1].clear()
            await self.stop()
        self._note_changes(letter.message, before)
        self._check_requests(letter.message)
        self._check_blocks()

    @property
    def busy(self) -> list[int]:
        """The parts that can get on."""
        return [part for part in range(3) if self._is_busy(part)]

    def _is_busy(self, part: int) -> bool:
        if self._is_down and part > 0:
            return part == 2
        return self.is_saying(part) or bool(mail(self._cells[part]))

    @property
    def is_coming_up(self) -> bool:
        """Whether the device fails to be there, or not everybody knows that it is."""
        return self._is_down or self.expects("DeviceReady")

    def is_saying(self, part: int) -> bool:
        """Whether letters of it are on their way."""
        return bool(self._said[part])

    def expects(self, kind: str) -> bool:
        """Whether such a message has been written and not read."""
        return any(type(message).__name__ == kind for message in self._on_their_way())

    def _on_their_way(self) -> list[Message]:
        written = [message for said in self._said for _, message in said]
        return written + [message for cell in self._cells for message in mail(cell)]

    def news(self) -> list[Message]:
        """Return what the scheduler has told the world since the last time."""
        messages = []
        while (letter := self._out.mailbox.take_nowait()) is not None:
            messages.append(letter.message)
        return messages

    def phases(self) -> dict[str, Phase]:
        return {request.request_id: request.phase for request in self.scheduler._policy.ledger}

    def _check_requests(self, message: Message) -> None:
        """Each stands in one place, in the order in which they came; who is aborted has ended."""
        policy = self.scheduler._policy
        rows, waiting = policy.ledger.rows(), policy._waiting
        assert len(rows) + len(waiting) == len(policy.ledger)
        assert {request.request_id for request in (*rows, *waiting)} == self.phases().keys()
        assert waiting == sorted(waiting, key=lambda request: request.order)
        assert all(request in rows for request in policy._starved)
        assert sum(request.phase is Phase.PREFILLING for request in rows) <= 1
        if isinstance(message, Abort):
            assert message.request_id not in policy.ledger

    def _check_blocks(self) -> None:
        """None is lost or given away twice, and without a cache none is shared."""
        if self.allocator._pool is None:
            return
        self.allocator._pool.audit()
        held = [block for blocks in self.allocator._held.values() for block in blocks]
        assert len(set(held)) == len(held) or self._schedule.options["prefix_caching"]

    def check_empty(self) -> None:
        """Nothing of a request is left anywhere."""
        pool = self.allocator._pool
        assert pool is not None
        pool.audit()
        self.seen["cached blocks given up"] += pool.statistics().evictions
        assert pool.free == pool.usable
        assert self.allocator._held == {}
        assert self.runner.num_rows == 0
        assert len(self.scheduler._policy.ledger) == 0
        assert self.scheduler._timers == {}

    async def _begin(self, cell: Cell, actor: Actor[Any]) -> None:
        actor.cell, cell.actor = cell, actor
        cell.lives += 1
        cell.mailbox.capacity = actor.capacity
        await actor.on_start()

    def _voice(self, part: int, *, to: int) -> Voice:
        return Voice(self._cells[to], self._said[part])

    def _runner(self) -> Runner:
        runner = self._make_runner(self._schedule.limits, self._schedule.num_graph_sizes)
        self.runner = Watched(runner, self.seen)
        return self.runner

    def _note_changes(self, message: Message, before: dict[str, Phase]) -> None:
        if isinstance(message, ReserveBlocks):
            self._question = message
        if isinstance(message, BlocksGranted):
            self._note_plan(message)
        after = self.phases()
        cause = type(message).__name__.strip("_")
        for name, phase in before.items():
            now = after.get(name, Phase.DONE)
            if now is not phase:
                self.seen[f"{cause}: {phase.name.lower()} to {now.name.lower()}"] += 1

    def _note_plan(self, granted: BlocksGranted) -> None:
        steps = [message for message in self._on_their_way() if isinstance(message, RunStep)]
        overtaken = [request for request in self.scheduler._policy.ledger if request.overtaken]
        assert all(request.overtaken <= MAX_OVERTAKEN for request in overtaken)
        self.seen["steps planned ahead"] += len(steps) > 1
        self.seen["requests overtaken"] += len(overtaken)
        self.seen["waits for a prefix under way"] += self._num_put_off(granted)

    def _num_put_off(self, granted: BlocksGranted) -> int:
        """How many new rows got nothing, though there was budget, and blocks as far as is known."""
        question = self._question
        if question is None or question.step != granted.step or not granted.chunks:
            return 0
        if sum(granted.chunks.values()) == question.budget or granted.denied:
            return 0
        whole = [new for new in question.admit if new.prompt_tokens <= new.chunk_tokens]
        return sum(new.row not in granted.blocks for new in whole)


def mail(cell: Cell) -> list[Message]:
    return [letter.message for letter in (*cell.mailbox._control, *cell.mailbox._data)]


class Operator:
    """Pauses, suspends, resumes and unpauses, part by part as supervisors do."""

    def __init__(self, replica: Replica, rng: random.Random) -> None:
        self.state = State.RUNNING
        self.may_abort = False  # whether there was a verb that may end requests
        self.drains = False  # whether the verb under way takes its time
        self._replica = replica
        self._rng = rng
        self._next: State = State.RUNNING
        self._to_tell: deque[tuple[int, Verb]] = deque()
        self._told = 0  # the part told last
        self._reply: Reply | None = None

    @property
    def is_done(self) -> bool:
        return self.state is State.RUNNING and self._reply is None

    @property
    def is_waiting(self) -> bool:
        if self._reply is None:
            return False
        return not self._reply.settled or self._replica.is_saying(self._told)

    async def act(self) -> None:
        """Take the next step of the verb under way, or of the next one."""
        if self.is_waiting:
            if self._next is State.PAUSED and self.state is State.RUNNING:
                self._perhaps_change_its_mind()
            return
        if self._reply is not None:
            answer: ControlReply = await self._reply.wait()
            self._reply = None
            if answer.refused:
                assert answer.refused == "unpaused meanwhile"
            self._replica.seen["steps by hand"] += answer.steps
        elif not self._to_tell:
            self._choose()
        if self._to_tell:
            self._tell()
        else:
            self._reach()

    def _choose(self) -> None:
        match self.state:
            case State.RUNNING:
                mode = self._rng.choice((PauseMode.KEEP, PauseMode.KEEP, *PauseMode))
                self._relay(Pause(mode=mode, drain_s=self._rng.uniform(0.1, 2)), State.PAUSED)
                self.may_abort |= mode is not PauseMode.KEEP
                self.drains = mode is PauseMode.DRAIN
            case State.PAUSED if self._rng.random() < 0.5:
                kv, weights = self._rng.choice(list(KVLevel)), self._rng.choice(UNREAL_WEIGHTS)
                self._relay(Suspend(kv=kv, weights=weights), State.SUSPENDED)
            case State.PAUSED if self._rng.random() < 0.4:
                self._relay(Step(count=self._rng.randint(1, 4)), State.PAUSED)
            case State.PAUSED:
                self._relay(Unpause(), State.RUNNING)
            case State.SUSPENDED:
                self._relay(Resume(), State.PAUSED)

    def _relay(self, verb: Verb, to: State) -> None:
        """Prepare to tell each part: down to pause, up to go on."""
        parts = [2, 1, 0] if isinstance(verb, Unpause | Resume) else [0, 1, 2]
        self._to_tell = deque((part, verb) for part in parts)
        self._next = to

    def _tell(self) -> None:
        part, verb = self._to_tell.popleft()
        if isinstance(verb, Unpause | Step):
            self._replica.runner.is_stopped = False
        self._told, self._reply = part, self._replica.put(verb, part)

    def _reach(self) -> None:
        self.state = self._next
        self._replica.runner.is_stopped = self.state is not State.RUNNING
        self._replica.seen[f"{self.state} reached"] += 1

    def _perhaps_change_its_mind(self) -> None:
        if self._rng.random() < 0.2:
            self._replica.seen["pauses taken back"] += 1
            self._relay(Unpause(), State.RUNNING)
            self._tell()


class Client:
    """Hears what the scheduler tells the world."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.refused: set[str] = set()
        self.deltas: defaultdict[str, list[Delta]] = defaultdict(list)
        self.num_delivered: dict[str, int] = {}
        self.num_tokens: dict[str, int] = {}

    def begin(self, request_id: str, num_delivered: int) -> None:
        """Expect a request of which so many tokens are here already."""
        self.num_tokens[request_id] = self.num_delivered[request_id] = num_delivered

    def hear(self, message: Message) -> None:
        match message:
            case Accepted(request_id=request_id, seed=seed):
                assert request_id not in self.seeds
                self.seeds[request_id] = seed
            case Refused(request_id=request_id):
                self.refused.add(request_id)
            case TokensOut(deltas=deltas):
                for delta in deltas:
                    self._take(delta)
            case StepStats() | RequestStats():
                pass

    def _take(self, delta: Delta) -> None:
        name = delta.request_id
        assert name in self.seeds, "a delta before the acceptance"
        assert self.end(name) is None, "a delta behind the terminal one"
        assert delta.start == self.num_tokens[name], "a gap, or a token twice"
        self.num_tokens[name] += len(delta.token_ids) // 4
        self.deltas[name].append(delta)

    def end(self, request_id: str) -> FinishReason | None:
        deltas = self.deltas[request_id]
        return deltas[-1].finish if deltas else None


class Outcome(msgspec.Struct, kw_only=True):
    """What a request got."""

    token_ids: list[int]
    text: str
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    finish: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Outcome":
        scored = [delta.prompt_logprobs for delta in deltas]
        assert sum(scores is not None for scores in scored) <= 1
        for delta in deltas:
            for token, logprob, top in delta_scores(delta):
                assert dict(top).get(token, logprob) == logprob
        return cls(
            token_ids=[token for delta in deltas for token in unpack_ids(delta.token_ids)],
            text="".join(delta.text for delta in deltas),
            logprobs=[value for delta in deltas for value in unpack_floats(delta.logprobs)],
            top_logprobs=[top for delta in deltas for top in delta.top_logprobs],
            finish=deltas[-1].finish if deltas else None,
            prompt_logprobs=next((scores for scores in scored if scores), None),
        )

    def cut(
        self, start: int, end: int, finish: FinishReason | None, text: TextStream | None
    ) -> "Outcome":
        """Return what there is of this behind one token and up to another."""
        shown = "" if text is None else text_of(text, self.token_ids, start, end, finish)
        return Outcome(
            token_ids=self.token_ids[start:end],
            text=shown,
            logprobs=self.logprobs[start:end],
            top_logprobs=self.top_logprobs[start:end],
            finish=finish,
            prompt_logprobs=None if start else self.prompt_logprobs,
        )

    def near(self, other: "Outcome") -> "Outcome":
        """Return this with the other's log-probs, which may differ by how floats are rounded."""
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        return msgspec.structs.replace(
            self,
            logprobs=other.logprobs,
            top_logprobs=other.top_logprobs,
            prompt_logprobs=other.prompt_logprobs,
        )


def delta_scores(delta: Delta) -> Iterator[tuple[int, float, TopLogprobs]]:
    """Yield each token that has a log-probability, with that and with the likeliest ones."""
    logprobs = unpack_floats(delta.logprobs)
    tops = delta.top_logprobs or ((),) * len(logprobs)
    if logprobs:
        yield from zip(unpack_ids(delta.token_ids), logprobs, tops, strict=True)


def text_of(
    text: TextStream, token_ids: list[int], start: int, end: int, finish: FinishReason | None
) -> str:
    shown = [text.push(token) for token in token_ids[:end]]
    return "".join(shown[start:]) + (text.finish() if finish else "")


# The solo run.


class Solo:
    """Runs one request at a time, without a scheduler, in a single block that has room for it."""

    def __init__(self, make_runner: MakeRunner, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self.runner = make_runner(
            {
                "block_tokens": 256,
                "num_blocks": 1,
                "max_rows": 1,
                "max_step_tokens": 256,
                "max_model_len": 256,
            },
            None,
        )
        self.runner.load()
        self.runner.allocate()
        self._steps = 0

    def run(self, ask: Ask, seed: int, max_tokens: int, *, has_text: bool) -> Outcome:
        """Return what the request gets, but for the text, which only ends it."""
        text = text_for(ask.params) if has_text else None
        outcome = Outcome(token_ids=[], text="", logprobs=[], top_logprobs=[], finish=None)
        admit = Admit(
            row=self._steps + 1,
            prompt=pack_ids(ask.prompt),
            num_tokens=len(ask.prompt),
            blocks=(0,),
            sampling=row_sampling(ask.params, seed, max_tokens),
        )
        done = self._step(admit)
        outcome.prompt_logprobs = done.prompt_logprobs.get(admit.row)
        if len(ask.prompt) == 1 and ask.params.prompt_logprobs is not None:  # nothing precedes it
            num_top = ask.params.prompt_logprobs
            outcome.prompt_logprobs = PromptLogprobs(start=1, logprobs=b"", num_top=num_top)
        while self._goes_on(outcome, done, ask.params, text):
            done = self._step()
        self.runner.drop((admit.row,))
        return outcome

    def _step(self, *admits: Admit) -> StepDone:
        self._steps += 1
        return self.runner.execute(RunStep(step=self._steps, admits=admits))

    def _goes_on(
        self, outcome: Outcome, done: StepDone, params: SamplingParams, text: TextStream | None
    ) -> bool:
        """Take what a step brought; returns whether it was not the last."""
        for row, token in zip(done.rows, unpack_ids(done.token_ids), strict=True):
            outcome.token_ids.append(token)
            if text is not None:
                text.push(token)
            if params.logprobs is not None:
                outcome.logprobs += unpack_floats(done.logprobs)
            if params.logprobs:
                outcome.top_logprobs.append(done.top_logprobs.get(row, ()))
        if done.failed:
            outcome.finish = FinishReason.ERROR
        elif done.stopped or (text is not None and text.stopped is not None):
            outcome.finish = FinishReason.STOP
        elif done.full:
            outcome.finish = FinishReason.LENGTH
        return outcome.finish is None


def row_sampling(params: SamplingParams, seed: int, max_tokens: int) -> RowSampling:
    eos = () if params.ignore_eos else (EOS,)
    return RowSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=(*eos, *params.stop_token_ids),
        logprobs=-1 if params.logprobs is None else params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        bad_token_ids=params.bad_token_ids,
        prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


# Playing a schedule.

MOST_TURNS = 40_000
"""Of all parts together, to end what is open; more, and nothing comes of it any more."""


class Play:
    """A schedule, and how far it has come."""

    def __init__(self, schedule: Schedule, replica: Replica, solo: Solo, clock: MockClock) -> None:
        self.schedule = schedule
        self.replica = replica
        self.client = Client()
        self.asked: dict[str, Ask] = {}
        self.aborted: set[str] = set()
        self._leaving: list[Phase] = []
        self._solo = solo
        self._steps_before = replica.seen["steps"]
        self._clock = clock
        self._rng = random.Random(-1 - schedule.seed)
        self._operator = Operator(replica, self._rng)

    async def run(self) -> None:
        """Play to the end; AssertionError where the replica does not get there."""
        await self.replica.start()
        for letters, event in self.schedule.events:
            await self._read_some(letters)
            await self._happen(event)
        await self._read_all()
        while not self._operator.is_done:
            if self._operator.is_waiting:
                await self._pass(10.0)  # a pause that drains comes to its end
            await self._read_all()
            assert not self._operator.is_waiting, "a verb that is never acknowledged"
            await self._operator.act()
            await self._read_all()
        await self.replica.stop()

    async def _read_some(self, letters: int) -> None:
        """Let parts have so many turns; fewer while the device comes up, when more can go wrong."""
        for _ in range(letters):
            parts = self.replica.busy
            if not parts or (self.replica.is_coming_up and self._rng.random() < 0.3):
                return
            await self._read(parts)

    async def _read_all(self) -> None:
        for _ in range(MOST_TURNS):
            parts = self.replica.busy
            if not parts:
                return
            await self._read(parts)
        raise AssertionError("no progress")

    async def _read(self, parts: list[int]) -> None:
        speeds = [self.schedule.speeds[part] for part in parts]
        await self.replica.turn(self._rng.choices(parts, speeds)[0])
        for message in self.replica.news():
            self.client.hear(message)
        if self._leaving:
            self._let_leave()

    async def _happen(self, event: Event) -> None:
        match event:
            case Ask():
                self._submit(event)
            case Leave(phase=phase):
                self._leaving.append(phase)
            case Jump(seconds=seconds):
                await self._pass(seconds)
            case Operate():
                if self._operator.is_waiting and self._operator.drains:
                    await self._pass(0.5)
                await self._operator.act()
            case Crash():
                self.replica.next_fault = event.fault

    def _submit(self, ask: Ask) -> None:
        self.asked[ask.request_id] = ask
        delivered: list[int] = []
        if ask.delivered and fits(ask, self.schedule.limits):
            whole = self._whole(ask).token_ids
            delivered = whole[: int(ask.delivered * len(whole))]
        self.client.begin(ask.request_id, len(delivered))
        self.replica.put(
            Enqueue(
                request_id=ask.request_id,
                prompt_token_ids=pack_ids(ask.prompt),
                params=ask.params,
                priority=ask.priority,
                timeout_s=ask.timeout_s,
                delivered=pack_ids(delivered),
            )
        )

    def _whole(self, ask: Ask) -> Outcome:
        """Return what the request gets by itself."""
        seed = self.client.seeds.get(ask.request_id, ask.params.seed)
        assert seed is not None
        return self._solo.run(
            ask,
            seed,
            max_tokens_of(ask, self.schedule.limits),
            has_text=self.schedule.options["text_for"] is not None,
        )

    def _let_leave(self) -> None:
        for name, phase in self._phases().items():
            if phase in self._leaving:
                self._leaving.remove(phase)
                self._abort(name)

    def _phases(self) -> dict[str, Phase]:
        """Return where all requests stand, those that have ended too."""
        return dict.fromkeys(self.asked, Phase.DONE) | self.replica.phases()

    def _abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.replica.put(Abort(request_id=request_id))
        for kind in ("ReserveBlocks", "BlocksGranted", "RunStep", "StepDone"):
            self.replica.seen[f"aborts beside {kind}"] += self.replica.expects(kind)

    async def _pass(self, seconds: float) -> None:
        self._clock.jump(seconds)
        await wait_all_tasks_blocked()

    def check(self) -> None:
        """Everybody got what the solo run gives, or the beginning of it, in not too many steps."""
        self.replica.check_empty()
        num_tokens = sum(
            len(ask.prompt) + self.client.num_tokens[name] for name, ask in self.asked.items()
        )
        assert self.replica.seen["steps"] - self._steps_before <= 4 * num_tokens, "steps in vain"
        for name, ask in self.asked.items():
            assert (name in self.client.refused) is not fits(ask, self.schedule.limits)
            self.replica.seen["refused"] += name in self.client.refused
            if name not in self.client.refused:
                self._check_outcome(name, ask)

    def _check_outcome(self, name: str, ask: Ask) -> None:
        got = Outcome.of(self.client.deltas[name])
        self.replica.seen[f"ended by {got.finish}"] += 1
        assert got.finish is not None, f"request {name} never ended"
        if got.finish is FinishReason.ABORT:
            assert name in self.aborted or self._operator.may_abort
        start = self.client.num_delivered[name]
        self._check_story(ask, self.client.deltas[name])
        self.replica.seen["continued from another life"] += start > 0
        wanted = like(got, self._whole(ask), ask, start, self.schedule)
        assert got == (wanted if self._solo.is_exact else wanted.near(got))

    def _check_story(self, ask: Ask, deltas: Sequence[Delta]) -> None:
        """Its events make sense, and what it took is what it was and got."""
        stands: EventKind | None = None
        for event in (event for delta in deltas for event in delta.events):
            if event.kind is EventKind.FIRST_TOKEN:
                assert EventKind.PAUSED in FOLLOWS[stands] | {stands}, "it has no row"
                continue
            assert event.kind in FOLLOWS[stands]
            stands = event.kind
        assert FOLLOWS[stands] == set()
        usage = deltas[-1].usage
        assert usage is not None
        assert usage == Usage(
            prompt_tokens=len(ask.prompt),
            cached_tokens=usage.cached_tokens,
            output_tokens=self.client.num_tokens[ask.request_id],
        )
        assert 0 <= usage.cached_tokens <= len(ask.prompt)


_ENDS = {EventKind.FINISHED, EventKind.ABORTED, EventKind.FAILED}

FOLLOWS: dict[EventKind | None, set[EventKind]] = {
    None: {EventKind.QUEUED},
    EventKind.QUEUED: {EventKind.ADMITTED, *_ENDS},
    EventKind.ADMITTED: {EventKind.PAUSED, EventKind.EVICTED, *_ENDS},
    EventKind.PAUSED: {EventKind.RESUMED, EventKind.EVICTED, *_ENDS},
    EventKind.RESUMED: {EventKind.PAUSED, EventKind.EVICTED, *_ENDS},
    EventKind.EVICTED: {EventKind.ADMITTED, *_ENDS},
    EventKind.FINISHED: set(),
    EventKind.ABORTED: set(),
    EventKind.FAILED: set(),
}
"""What may happen to a request after what, but for its first token."""


def like(got: Outcome, whole: Outcome, ask: Ask, start: int, schedule: Schedule) -> Outcome:
    """Return the part of the whole that should have come, up to where it was given up if it was."""
    end, finish = len(whole.token_ids), whole.finish
    if got.finish in (FinishReason.ABORT, FinishReason.DEADLINE, None):
        end, finish = start + len(got.token_ids), got.finish
        if not got.token_ids and got.prompt_logprobs is None:
            whole = msgspec.structs.replace(whole, prompt_logprobs=None)
    has_text = schedule.options["text_for"] is not None
    return whole.cut(start, end, finish, text_for(ask.params) if has_text else None)


class InPlace:
    """A device thread that is none: its jobs are done where they are asked for."""

    def __init__(self, name: str) -> None:
        pass

    def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def run(self, job: Callable[[], Any]) -> Any:
        return job()


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand no jobs from thread to thread: it takes time, and most of it on a busy machine."""
    monkeypatch.setattr("callboard.actors.executor.DeviceThread", InPlace)


async def play(
    seed: int, make_runner: MakeRunner, solo: Solo, seen: Counter[str], clock: MockClock
) -> None:
    schedule = draw(seed, has_logits=isinstance(solo.runner, ModelRunner))
    async with open_system() as system:
        played = Play(schedule, Replica(system, schedule, make_runner, seen), solo, clock)
        await played.run()
        played.check()
    seen["schedules"] += 1


# Two kinds of device.


def scripted(limits: dict[str, int], num_graph_sizes: int | None) -> ScriptedRunner:
    """Return a device that knows no padding."""
    return ScriptedRunner(scripted_token, **limits)


def real(
    limits: dict[str, int], num_graph_sizes: int | None, *, dtype: str = "float32"
) -> ModelRunner:
    return ModelRunner(
        RunnerConfig(
            model="random:tiny",
            device="cpu",
            dtype=dtype,
            threads=1,
            block_tokens=limits["block_tokens"],
            num_blocks=limits["num_blocks"] + 1,
            max_rows=limits["max_rows"],
            max_tokens=limits["max_step_tokens"],
            max_model_len=limits["max_model_len"],
            num_graph_sizes=num_graph_sizes,
        )
    )


in_floats = partial(real, dtype="float64")
"""With a real decoder: in float64, batches change less than could ever change a token."""


@pytest.fixture(scope="module")
def hash_model() -> LoadedModel:
    loaded = load_model("random:tiny", device=torch.device("cpu"), dtype=torch.float32)
    hashing: Any = HashDecoder()
    return dataclasses.replace(loaded, decoder=hashing)


@pytest.fixture
def hash_decoder(monkeypatch: pytest.MonkeyPatch, hash_model: LoadedModel) -> None:
    """Let every model that is loaded have the decoder that hashes."""
    monkeypatch.setattr("callboard.gpu.model_slot.load_model", lambda *args, **options: hash_model)


@pytest.fixture
def lazy_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look through all objects of the process: a tenth of a second each time."""
    monkeypatch.setattr("callboard.gpu.runner.release_memory", lambda device: None)


@pytest.fixture(scope="module")
def solo_scripted() -> Solo:
    return Solo(scripted)


@pytest.fixture
def solo_real(hash_decoder: None, lazy_release: None) -> Solo:
    return Solo(real)


@pytest.fixture(scope="module")
def solo_in_floats() -> Solo:
    return Solo(in_floats, is_exact=False)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What happened in all schedules together."""
    return Counter()


@pytest.mark.parametrize("seed", SCRIPTED)
async def test_with_a_scripted_device(
    seed: int, in_place: None, solo_scripted: Solo, seen: Counter[str], mock_clock: MockClock
) -> None:
    await play(seed, scripted, solo_scripted, seen, mock_clock)


@pytest.mark.parametrize("seed", REAL)
async def test_with_the_real_context(
    seed: int, in_place: None, solo_real: Solo, seen: Counter[str], mock_clock: MockClock
) -> None:
    await play(seed, real, solo_real, seen, mock_clock)


@pytest.mark.parametrize("seed", FLOATS)
async def test_with_a_real_decoder(
    seed: int, in_place: None, lazy_release: None, solo_in_floats: Solo, mock_clock: MockClock
) -> None:
    await play(seed, in_floats, solo_in_floats, Counter(), mock_clock)


def test_the_schedules_together_had_everything_in_them(seen: Counter[str]) -> None:
    if seen["schedules"] < len(SCRIPTED) + len(REAL):
        pytest.skip("not all of them were played")
    missing = [what for what in EXPECTED if seen[what] == 0]
    assert missing == []


EXPECTED = [
    "BlocksGranted: decoding to starved",
    "BlocksGranted: starved to decoding",
    # Evictions.
    "BlocksGranted: starved to waiting",
    "BlocksGranted: prefilling to waiting",
    "chunks that continue a prompt",
    "prompts found in part",
    "waits for a prefix under way",
    "requests overtaken",
    "steps planned ahead",
    "cached blocks given up",
    "Abort: waiting to done",
    "Abort: prefilling to done",
    "Abort: decoding to done",
    "Abort: starved to done",
    "aborts beside ReserveBlocks",
    "aborts beside BlocksGranted",
    "aborts beside RunStep",
    "aborts beside StepDone",
    "DeadlinePassed: waiting to done",
    "DeadlinePassed: decoding to done",
    "Pause: waiting to done",
    "Pause: decoding to done",
    "DrainOver: decoding to done",
    "Suspend: prefilling to waiting",
    "Suspend: decoding to waiting",
    "DeviceReady: decoding to waiting",
    "failures of the device",
    "steps too large",
    "pauses taken back",
    "paused reached",
    "suspended reached",
    "running reached",
    "steps by hand",
    "ended by stop",
    "ended by length",
    "ended by error",
    "continued from another life",
    "refused",
]


# The whole engine.


class Audience:
    """Plays a schedule with the embedded engine, and hears what its requests get."""

    def __init__(self, engine: Engine, schedule: Schedule, runners: list[Watched]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.seeds: dict[str, int] = {}
        self.refused: set[str] = set()
        self._engine = engine
        self._schedule = schedule
        self._runners = runners
        self._rng = random.Random(schedule.seed)
        self._state = State.RUNNING
        self._listening: dict[str, trio.CancelScope] = {}

    async def play(self) -> None:
        async with trio.open_nursery() as nursery:
            for _, event in self._schedule.events:
                match event:
                    case Ask():
                        nursery.start_soon(self._listen, event)
                    case Leave() if self._listening:
                        self._rng.choice(list(self._listening.values())).cancel()
                    case Jump(seconds=seconds):
                        await trio.sleep(seconds)
                    case Operate():
                        await self._operate()
                    case Crash(fault=fault):
                        self._runners[-1].next_fault = fault
                for _ in range(self._rng.randrange(300)):
                    await trio.lowlevel.checkpoint()
            while self._state is not State.RUNNING:
                await self._operate()

    async def _listen(self, ask: Ask) -> None:
        name, deltas = ask.request_id, []
        with trio.CancelScope() as self._listening[name]:
            try:
                async with self._engine.submit(
                    ask.prompt, ask.params, priority=ask.priority, timeout_s=ask.timeout_s
                ) as stream:
                    self.seeds[name] = stream.seed
                    async for delta in stream:
                        deltas.append(delta)  # noqa: PERF401  # what came before it was left
            except RequestError:
                self.refused.add(name)
        self.outcomes[name] = Outcome.of(deltas)
        del self._listening[name]

    async def _operate(self) -> None:
        match self._state:
            case State.RUNNING:
                mode = self._rng.choice(list(PauseMode))
                reply = await self._engine.pause(mode, drain_s=3)
            case State.PAUSED if self._rng.random() < 0.5:
                kv, weights = self._rng.choice(list(KVLevel)), self._rng.choice(list(WeightsLevel))
                reply = await self._engine.suspend(kv=kv, weights=weights)
            case State.PAUSED:
                reply = await self._engine.unpause()
            case _:
                reply = await self._engine.resume()
        self._state = reply.state


@pytest.fixture
def jumping_clock() -> MockClock:
    """Jumps once nothing has happened for long enough that no job is on the device's thread."""
    return MockClock(autojump_threshold=0.03)


@pytest.mark.parametrize("seed", EMBEDDED)
async def test_through_the_whole_engine(
    seed: int, solo_scripted: Solo, jumping_clock: MockClock
) -> None:
    """Here threads and tasks take turns as they like: the same number may play differently."""
    schedule = draw(seed, has_logits=False)
    runners: list[Watched] = []

    def make_runner() -> Runner:
        runners.append(Watched(scripted(schedule.limits, None), Counter()))
        return runners[-1]

    options = dict(schedule.options)
    parts = ReplicaParts(
        make_runner=make_runner,
        codec=Vocabulary() if options["text_for"] else None,
        text_for=options.pop("text_for"),
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
    )
    options["prefill_chunk_tokens"] = options["prefill_chunk_tokens"] or 0
    paused_limit = options.pop("paused_limit")
    options["paused_limit_blocks"] = -1 if paused_limit is None else paused_limit
    async with open_engine(parts=parts, **options) as engine:
        audience = Audience(engine, schedule, runners)
        await audience.play()
        # Behind its last token all the mail about the others has been read.
        await engine.generate([[1]], max_tokens=1)
        await wait_all_tasks_blocked()
        allocator = engine._system.cells["replica-0/kv_allocator"].actor
        assert isinstance(allocator, KVAllocator)
        pool = allocator._pool
        assert pool is not None
        pool.audit()
        assert (pool.free, runners[-1].num_rows) == (pool.usable, 0)
    for ask in schedule.asks:
        name = ask.request_id
        assert name not in audience.refused or not fits(ask, schedule.limits)
        if name in audience.seeds:
            whole = solo_scripted.run(
                ask,
                audience.seeds[name],
                max_tokens_of(ask, schedule.limits),
                has_text=parts.text_for is not None,
            )
            got = audience.outcomes[name]
            assert got == like(got, whole, ask, 0, schedule)
