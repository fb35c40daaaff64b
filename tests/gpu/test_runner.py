"""The runner with a small random model, driven the way a scheduler drives it."""

import math
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.overrides import TorchFunctionMode

from callboard.gpu.admission import RowMismatch
from callboard.gpu.attention.sdpa import SdpaAttention
from callboard.gpu.blocks import BlockPool
from callboard.gpu.device import resident_bytes
from callboard.gpu.memory import blocks_for
from callboard.gpu.model_slot import NotReady
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.messages.base import pack_ids, unpack_floats, unpack_ids
from callboard.messages.errors import ConfigError, OutOfMemory
from callboard.messages.steps import Admit, Continue, Grant, RowSampling, RunStep, StepDone

BLOCK_TOKENS = 4


def make_config(
    *,
    num_blocks: int | None = 200,
    kv_cache_gb: float | None = None,
    block_tokens: int = BLOCK_TOKENS,
    max_rows: int | None = 16,
    max_model_len: int | None = 128,
    max_tokens: int = 512,
    threads: int | None = None,
    dtype: str = "auto",
    batch_invariant: bool = False,
    num_graph_sizes: int | None = None,
) -> RunnerConfig:
    return RunnerConfig(
        model="random:tiny",
        device="cpu",
        dtype=dtype,
        num_blocks=num_blocks,
        kv_cache_gb=kv_cache_gb,
        block_tokens=block_tokens,
        max_rows=max_rows,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        threads=threads,
        batch_invariant=batch_invariant,
        num_graph_sizes=num_graph_sizes,
    )


def make_runner(config: RunnerConfig | None = None) -> ModelRunner:
    runner = ModelRunner(config or make_config())
    runner.load()
    runner.allocate()
    return runner


@pytest.fixture(scope="module")
def loaded_runner() -> ModelRunner:
    return make_runner()


@pytest.fixture
def runner(loaded_runner: ModelRunner) -> Iterator[ModelRunner]:
    yield loaded_runner
    loaded_runner.drop(range(10_000))


def make_sampling(
    *,
    max_tokens: int = 12,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    first_position: int = 0,
    logprobs: int = -1,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
    bad: tuple[tuple[int, ...], ...] = (),
    processed: bool = False,
) -> RowSampling:
    return RowSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        first_position=first_position,
        logprobs=logprobs,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias or {},
        bad_token_ids=bad,
        processed_logprobs=processed,
    )


@dataclass
class Request:
    prompt: list[int]
    sampling: RowSampling
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    ending: str = ""


@dataclass
class Row:
    request: Request
    num_fed: int  # tokens of its prompt that were asked for
    prompt: list[int]
    blocks: list[int]
    num_cached: int = 0


class Scheduler:
    """As simple as a scheduler can be: decodes, one chunk, then admissions, and preemption."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        chunk: int = 1000,
        num_blocks: int | None = None,
        grants_a_step: int = 1000,
        drops_seed: int | None = None,
    ) -> None:
        self.runner = runner
        self.pool = BlockPool(num_blocks or runner.num_blocks)
        self.chunk = chunk
        self.grants_a_step = grants_a_step
        self.drops = None if drops_seed is None else random.Random(drops_seed)
        self.rows: dict[int, Row] = {}
        self.waiting: list[Request] = []
        self.next_row = 0
        self.num_preempted = 0

    def run(self, requests: list[Request]) -> None:
        self.waiting = list(requests)
        for step in range(500):
            if not self.waiting and not self.rows:
                self.pool.audit()
                assert self.pool.held == 0
                return
            if self.drops is not None and self.rows and self.drops.random() < 0.2:
                self.preempt(self.drops.choice(sorted(self.rows)))
            done = self.runner.execute(self.next_step(step))
            assert self.runner._context is not None
            self.runner._context.check()
            if done.num_tokens == 0:
                self.preempt(max(self.rows))
            self.take(done)
        raise AssertionError("the requests did not end")

    def next_step(self, step: int) -> RunStep:
        grants = self.grants()
        continues = self.continues()
        half = any(row.num_fed < len(row.prompt) for row in self.rows.values())
        admits = () if half else self.admits()
        return RunStep(step=step, grants=grants, continues=continues, admits=admits)

    def grants(self) -> tuple[Grant, ...]:
        grants: list[Grant] = []
        for row_id, row in self.rows.items():
            decoding = row.num_cached >= len(row.prompt)
            is_full = row.num_cached == len(row.blocks) * self.runner_block_tokens
            if decoding and is_full and self.pool.free and len(grants) < self.grants_a_step:
                [block] = self.pool.allocate(1)
                row.blocks.append(block)
                grants.append(Grant(row=row_id, block=block))
        return tuple(grants)

    @property
    def runner_block_tokens(self) -> int:
        return int(self.runner.describe()["block_tokens"])

    def continues(self) -> tuple[Continue, ...]:
        for row_id, row in self.rows.items():
            rest = len(row.prompt) - row.num_fed
            num_tokens = min(self.chunk, rest)
            if rest and (blocks := self.blocks(row.num_fed, num_tokens)) is not None:
                row.num_fed += num_tokens
                row.blocks += blocks
                return (Continue(row=row_id, num_tokens=num_tokens, blocks=tuple(blocks)),)
        return ()

    def admits(self) -> tuple[Admit, ...]:
        admits: list[Admit] = []
        while self.waiting and len(self.rows) < 16:
            request = self.waiting[0]
            prompt = request.prompt + request.output
            num_tokens = min(self.chunk, len(prompt))
            blocks = self.blocks(0, num_tokens)
            if blocks is None:
                break
            self.waiting.pop(0)
            self.next_row += 1
            self.rows[self.next_row] = Row(request, num_tokens, prompt, blocks)
            admits.append(self.admit(self.next_row, num_tokens))
            if num_tokens < len(prompt):
                break
        return tuple(admits)

    def admit(self, row_id: int, num_tokens: int) -> Admit:
        row = self.rows[row_id]
        return Admit(
            row=row_id,
            prompt=pack_ids(row.prompt),
            num_tokens=num_tokens,
            blocks=tuple(row.blocks),
            sampling=msgspec.structs.replace(
                row.request.sampling, first_position=len(row.request.output)
            ),
        )

    def blocks(self, num_cached: int, num_tokens: int) -> list[int] | None:
        size = self.runner_block_tokens
        count = blocks_for(num_cached + num_tokens, size) - blocks_for(num_cached, size)
        return self.pool.allocate(count) if count <= self.pool.free else None

    def preempt(self, row_id: int) -> None:
        self.num_preempted += 1
        self.runner.drop([row_id])
        row = self.rows.pop(row_id)
        self.pool.release(row.blocks)
        self.waiting.insert(0, row.request)

    def take(self, done: StepDone) -> None:
        for row in self.rows.values():
            if row.num_cached < len(row.prompt):
                row.num_cached = row.num_fed
        tokens = unpack_ids(done.token_ids)
        logprobs = unpack_floats(done.logprobs) or [0.0] * len(tokens)
        for row_id, token, logprob in zip(done.rows, tokens, logprobs, strict=True):
            row = self.rows[row_id]
            row.request.output.append(token)
            row.request.logprobs.append(logprob)
            row.request.top_logprobs.append(done.top_logprobs.get(row_id, ()))
            row.num_cached = len(row.request.prompt + row.request.output) - 1
        self.end("stopped", done.stopped)
        self.end("full", done.full)
        self.end("failed", tuple(failure.row for failure in done.failed))

    def end(self, reason: str, rows: tuple[int, ...]) -> None:
        for row_id in rows:
            row = self.rows.pop(row_id)
            row.request.ending = reason
            self.pool.release(row.blocks)


def make_requests(*, temperature: float = 0.0) -> list[Request]:
    """Prompts of many lengths, around the edges of blocks."""
    return [
        Request(
            prompt=[(17 * number + 5 * index) % 320 for index in range(length)],
            sampling=make_sampling(
                max_tokens=3 + 3 * number, temperature=temperature, seed=number, logprobs=0
            ),
        )
        for number, length in enumerate([1, 3, 4, 5, 8, 13, 2])
    ]


def run_alone(runner: ModelRunner, *, temperature: float) -> list[Request]:
    requests = make_requests(temperature=temperature)
    for request in requests:
        Scheduler(runner).run([request])
    return requests


def assert_same(some: list[Request], others: list[Request]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.output == other.output
        assert one.ending == other.ending == "full"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


SCHEDULES = [
    pytest.param({}, id="batched"),
    pytest.param({"chunk": 3}, id="in chunks of 3"),
    pytest.param({"chunk": 1}, id="in chunks of 1"),
    pytest.param({"grants_a_step": 1}, id="one grant a step"),
    pytest.param({"num_blocks": 11, "chunk": 3}, id="short of blocks"),
    pytest.param({"drops_seed": 1}, id="preempted"),
    pytest.param({"drops_seed": 2, "chunk": 3, "num_blocks": 20}, id="all of it"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_request_gets_the_same_tokens_whatever_the_schedule(
    runner: ModelRunner, schedule: dict[str, int], temperature: float
) -> None:
    alone = run_alone(runner, temperature=temperature)
    together = make_requests(temperature=temperature)
    scheduler = Scheduler(runner, **schedule)

    scheduler.run(together)

    assert_same(alone, together)
    assert [len(request.output) for request in together] == [3, 6, 9, 12, 15, 18, 21]
    assert runner.num_rows == 0
    if "num_blocks" in schedule or "drops_seed" in schedule:
        assert scheduler.num_preempted > 0


def test_in_float64_log_probs_are_the_same_too_whatever_the_schedule() -> None:
    """Their errors are far below the float32 that they are told in."""
    runner = make_runner(make_config(dtype="float64"))
    alone = run_alone(runner, temperature=0.0)

    for schedule in ({}, {"chunk": 1}, {"chunk": 3}, {"drops_seed": 2, "chunk": 3}):
        together = make_requests()
        Scheduler(runner, **schedule).run(together)

        assert [request.output for request in together] == [request.output for request in alone]
        assert [request.logprobs for request in together] == [request.logprobs for request in alone]


class DtypesSeen(TorchFunctionMode):
    """Notes the dtype of every tensor that torch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.dtypes.add(result.dtype)
        return result


def test_a_float64_model_computes_in_nothing_less(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_config(dtype="float64"))
    seen = DtypesSeen()

    def watched(compute: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        def compute_and_look(of: Any) -> torch.Tensor:
            with seen:
                return compute(of)

        return compute_and_look

    monkeypatch.setattr(runner, "_hidden", watched(runner._hidden))
    monkeypatch.setattr(runner, "_logits", watched(runner._logits))

    Scheduler(runner).run(make_requests())

    assert {dtype for dtype in seen.dtypes if dtype.is_floating_point} == {torch.float64}


@pytest.fixture(scope="module", params=[-1, 3], ids=["all graphs", "3 sizes"])
def padding_runner(request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(make_config(num_graph_sizes=request.param))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_changes_no_token_whatever_the_schedule(
    runner: ModelRunner, padding_runner: ModelRunner, schedule: dict[str, int]
) -> None:
    plain, padded = make_requests(), make_requests()

    Scheduler(runner, **schedule).run(plain)
    Scheduler(padding_runner, **schedule).run(padded)

    assert_same(padded, plain)
    padding_runner.drop(range(10_000))


def test_padding_and_computing_each_token_alone_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="num_graph_sizes is 3, and must be None"):
        make_config(num_graph_sizes=3, batch_invariant=True)


def test_seeds_and_not_neighbours_decide_what_is_drawn(runner: ModelRunner) -> None:
    first = [Request([1, 2, 3], make_sampling(temperature=1.0, seed=seed)) for seed in (1, 2, 1)]

    Scheduler(runner).run(first)

    assert first[0].output == first[2].output != first[1].output


# Penalties, bias and bad words


def make_ruled_requests(*, temperature: float = 0.0) -> list[Request]:
    """One request of each kind, among them plain ones and one that asks for everything."""
    asked: list[dict[str, Any]] = [
        {},
        {"repetition": 1.5},
        {"frequency": -1.0, "presence": 0.4},
        {"bias": {7: 2.5, 19: 2.5}},
        {},
        {"presence": 0.2, "bad": ((7,), (19, 20))},
        {"repetition": 1.2, "presence": 0.1, "frequency": 0.1, "bias": {7: 1.0}, "bad": ((7, 7),)},
        {"bias": {8: 1.0, 9: 1.0}, "bad": ((8, 8), (9, 9), (8, 9, 8), (9, 8))},
        {"repetition": 1.1, "processed": True},
    ]
    return [
        Request(
            prompt=[(17 * number + 5 * index) % 320 for index in range(length)],
            sampling=make_sampling(
                max_tokens=8 + 2 * number, temperature=temperature, seed=number, logprobs=0, **rules
            ),
        )
        for number, (length, rules) in enumerate(
            zip([1, 3, 4, 5, 8, 13, 2, 6, 7], asked, strict=True)
        )
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rules_count_the_same_whatever_the_schedule(
    runner: ModelRunner, schedule: dict[str, int], temperature: float
) -> None:
    """Rules that slipped to other rows."""
    alone = make_ruled_requests(temperature=temperature)
    for request in alone:
        Scheduler(runner).run([request])
    together = make_ruled_requests(temperature=temperature)
    scheduler = Scheduler(runner, **schedule)

    scheduler.run(together)

    assert_same(alone, together)
    assert [len(request.output) for request in together] == list(range(8, 26, 2))
    assert runner.num_rows == 0
    if "num_blocks" in schedule or "drops_seed" in schedule:
        assert scheduler.num_preempted > 0


def slow_choice(request: Request, output: list[int], logits_V: torch.Tensor) -> int:
    """What a greedy row chooses of these logits, token by token."""
    sampling, tokens = request.sampling, request.prompt + output
    scores = logits_V.tolist()
    for token in range(len(scores)):
        scores[token] += sampling.logit_bias.get(token, 0.0)
        penalty = sampling.repetition_penalty if token in tokens else 1.0
        scores[token] *= 1 / penalty if scores[token] > 0 else penalty
        scores[token] -= sampling.frequency_penalty * output.count(token)
        scores[token] -= sampling.presence_penalty * (token in output)
    for *before, last in sampling.bad_token_ids:
        if output[max(0, len(output) - len(before)) :] == before:
            scores[last] = -math.inf
    return scores.index(max(scores))


def test_rules_choose_what_the_slow_rule_chooses(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, seen = runner._logits, list[torch.Tensor]()

    def compute_and_keep(hidden_RD: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden_RD).clone())
        return seen[-1]

    monkeypatch.setattr(runner, "_logits", compute_and_keep)

    for number, request in enumerate(make_ruled_requests()):
        seen.clear()
        Scheduler(runner).run([request])

        chosen = [
            slow_choice(request, request.output[:position], logits_1V[0])
            for position, logits_1V in enumerate(seen)
        ]
        assert request.output == chosen
        likeliest = [int(logits_1V[0].argmax()) for logits_1V in seen]
        assert (chosen == likeliest) is (number in (0, 4)), "a rule that changed nothing"


def test_no_bad_word_ever_comes(runner: ModelRunner) -> None:
    bad = tuple((first, second) for first in (3, 4, 5) for second in (3, 4, 5))
    bias = {3: 90.0, 4: 70.0, 5: 50.0}
    request = Request([3, 3], make_sampling(max_tokens=12, bias=bias, bad=bad))

    Scheduler(runner, drops_seed=3).run([request])

    assert request.output[::2] == [3] * 6  # what the prompt ends with forbids nothing
    assert not {3, 4, 5} & set(request.output[1::2])


def test_rows_that_left_leave_no_rules_behind(runner: ModelRunner) -> None:
    everything = make_sampling(
        max_tokens=3, repetition=2.0, presence=2.0, frequency=2.0, bias={5: 9.0}, bad=((6,), (1, 2))
    )
    free = run_one(runner, make_sampling()).output
    for _ in range(3):
        Scheduler(runner, drops_seed=1).run([Request([1, 2], everything) for _ in range(4)])

    assert run_one(runner, make_sampling()).output == free


def test_rules_hold_again_after_the_cache_was_freed(runner: ModelRunner) -> None:
    whole = run_one(runner, make_sampling(repetition=1.5, frequency=0.1)).output
    runner.free_kv()
    runner.allocate()
    again = Request([1, 2], make_sampling(repetition=1.5, frequency=0.1), output=whole[:5])

    Scheduler(runner).run([again])

    assert again.output == whole


# Batch-invariant mode


@pytest.fixture(scope="module")
def loaded_invariant_runner() -> ModelRunner:
    return make_runner(make_config(batch_invariant=True))


@pytest.fixture
def invariant_runner(loaded_invariant_runner: ModelRunner) -> Iterator[ModelRunner]:
    yield loaded_invariant_runner
    loaded_invariant_runner.drop(range(10_000))


def make_telling_requests(*, temperature: float = 0.0) -> list[Request]:
    """Requests with and without rules that want the likeliest tokens too, as many as no other."""
    requests = make_ruled_requests(temperature=temperature)
    for number, request in enumerate(requests):
        request.sampling = msgspec.structs.replace(
            request.sampling, logprobs=number, top_k=number % 3 and 30, top_p=1 - number % 2 / 10
        )
    return requests


def bits(requests: list[Request]) -> list[Any]:
    """All that a request is told, as numbers that are equal where every bit is."""
    return [(one.output, one.logprobs, one.top_logprobs, one.ending) for one in requests]


CHUNKS = [pytest.param({"chunk": chunk}, id=f"in chunks of {chunk}") for chunk in (2, 5)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("schedule", SCHEDULES + CHUNKS)
def test_a_batch_invariant_row_gets_the_same_bits_whatever_the_schedule(
    invariant_runner: ModelRunner, schedule: dict[str, int], temperature: float
) -> None:
    alone = make_telling_requests(temperature=temperature)
    for request in alone:
        Scheduler(invariant_runner).run([request])
    together = make_telling_requests(temperature=temperature)
    scheduler = Scheduler(invariant_runner, **schedule)

    scheduler.run(together)

    assert bits(together) == bits(alone)
    if "num_blocks" in schedule or "drops_seed" in schedule:
        assert scheduler.num_preempted > 0


def test_without_that_mode_the_schedule_shows_in_the_last_bits(runner: ModelRunner) -> None:
    """Or else the test above proves nothing: here every schedule changes a third of them."""
    alone = run_alone(runner, temperature=0.0)
    together = make_requests()

    Scheduler(runner, chunk=3).run(together)

    assert_same(alone, together)
    assert bits(together) != bits(alone)


def test_a_batch_invariant_row_gets_the_same_bits_behind_a_shared_prefix(
    invariant_runner: ModelRunner,
) -> None:
    prompt = list(range(3, 3 + 2 * BLOCK_TOKENS + 3))
    sampling = make_sampling(max_tokens=3, logprobs=4)
    alone = Request(prompt, sampling)
    Scheduler(invariant_runner).run([alone])
    first = Admit(
        row=1, prompt=pack_ids(prompt), num_tokens=11, blocks=(4, 5, 6), sampling=sampling
    )
    second = Admit(
        row=2,
        prompt=pack_ids(prompt),
        num_tokens=1,
        blocks=(4, 5, 7),
        sampling=sampling,
        cached_tokens=2 * BLOCK_TOKENS,
    )

    steps = [
        invariant_runner.execute(RunStep(step=1, admits=(first,))),
        invariant_runner.execute(RunStep(step=2, admits=(second,))),
        invariant_runner.execute(
            RunStep(step=3, continues=(Continue(row=2, num_tokens=2, blocks=()),))
        ),
    ]

    told = [
        (row, token, logprob, done.top_logprobs[row])
        for done in steps
        for row, token, logprob in zip(
            done.rows, unpack_ids(done.token_ids), unpack_floats(done.logprobs), strict=True
        )
    ]
    whole = list(zip(alone.output, alone.logprobs, alone.top_logprobs, strict=True))
    assert [what for row, *what in told if row == 2] == [list(whole[0])]
    assert [what for row, *what in told if row == 1] == [list(each) for each in whole[:2]]


def test_a_batch_invariant_row_gets_the_same_bits_of_weights_that_were_loaded_again() -> None:
    runner = make_runner(make_config(batch_invariant=True))
    before = run_alone(runner, temperature=0.9)

    runner.free_kv()
    runner.free_weights()
    runner.load()
    runner.allocate()

    assert bits(run_alone(runner, temperature=0.9)) == bits(before)


def test_which_of_equal_logits_a_batch_invariant_row_is_told_is_its_own_affair() -> None:
    """torch's topk orders ties by how many are wanted, and in bfloat16 there are many ties."""
    runner = make_runner(make_config(dtype="bfloat16", batch_invariant=True))
    few, many = make_sampling(logprobs=5), make_sampling(logprobs=20)
    admits = [admit(row, few, prompt=(row, row + 1)) for row in range(12)]
    alone = dict[int, Any]()
    for each in admits:
        alone |= runner.execute(RunStep(step=1, admits=(each,))).top_logprobs
        runner.drop([each.row])

    beside = admit(12, many, prompt=(99,))
    together = runner.execute(RunStep(step=1, admits=(*admits, beside))).top_logprobs

    assert {row: together[row] for row in alone} == alone


def test_batch_invariant_rows_that_want_no_log_probs_are_sent_none(
    invariant_runner: ModelRunner,
) -> None:
    none = run_step(invariant_runner, make_sampling(), make_sampling())
    invariant_runner.drop([0, 1])
    one = run_step(invariant_runner, make_sampling(), make_sampling(logprobs=1))

    assert (none.logprobs, none.top_logprobs) == (b"", {})
    assert math.isfinite(unpack_floats(one.logprobs)[1])
    assert list(one.top_logprobs) == [1]


def test_a_batch_invariant_row_whose_logits_are_no_numbers_fails_alone() -> None:
    runner = make_runner(make_config(batch_invariant=True))
    damage(runner, token=13)
    good, bad = Request([1, 2, 3], make_sampling()), Request([1, 13, 3], make_sampling())

    Scheduler(runner).run([bad, good])

    assert (bad.ending, bad.output) == ("failed", [])
    assert (good.ending, len(good.output)) == ("full", 12)


# When a row ends


def run_one(
    runner: ModelRunner, sampling: RowSampling, prompt: tuple[int, ...] = (1, 2)
) -> Request:
    request = Request(list(prompt), sampling)
    Scheduler(runner).run([request])
    return request


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_row_gets_exactly_its_tokens(runner: ModelRunner, max_tokens: int) -> None:
    request = run_one(runner, make_sampling(max_tokens=max_tokens))

    assert len(request.output) == max_tokens
    assert request.ending == "full"


def test_a_row_ends_with_the_first_stop_id(runner: ModelRunner) -> None:
    free = run_one(runner, make_sampling()).output
    stop = free[4]

    request = run_one(runner, make_sampling(stop_token_ids=(319, stop)))

    assert request.output == free[: free.index(stop) + 1]
    assert request.ending == "stopped"


def test_a_stop_id_is_not_chosen_before_min_tokens(runner: ModelRunner) -> None:
    free = run_one(runner, make_sampling()).output

    request = run_one(runner, make_sampling(min_tokens=5, stop_token_ids=tuple(free)))

    assert not set(request.output[:5]) & set(free)
    assert len(request.output) >= 5


# What a step tells


def admit(row: int, sampling: RowSampling, *, prompt: tuple[int, ...] = (5, 6, 7)) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=len(prompt),
        blocks=(row,),
        sampling=sampling,
    )


def run_step(runner: ModelRunner, *samplings: RowSampling) -> StepDone:
    admits = tuple(admit(row, sampling) for row, sampling in enumerate(samplings))
    return runner.execute(RunStep(step=3, admits=admits))


def test_each_row_gets_the_log_probs_it_asked_for(runner: ModelRunner) -> None:
    none, chosen = make_sampling(), make_sampling(logprobs=0)
    two, three = make_sampling(logprobs=2), make_sampling(logprobs=3)

    done = run_step(runner, none, chosen, two, three)

    assert done.rows == (0, 1, 2, 3)
    logprobs = unpack_floats(done.logprobs)
    assert len(logprobs) == 4
    assert {row: len(top) for row, top in done.top_logprobs.items()} == {2: 2, 3: 3}
    [token, logprob] = done.top_logprobs[2][0]
    assert token == unpack_ids(done.token_ids)[2]
    assert logprob == pytest.approx(logprobs[2])
    assert done.top_logprobs[3][:2] == done.top_logprobs[2]
    assert done.top_logprobs[3][0][1] > done.top_logprobs[3][2][1]


def test_a_row_that_shares_blocks_goes_on_as_one_that_computed_them(runner: ModelRunner) -> None:
    prompt = tuple(range(3, 3 + 2 * BLOCK_TOKENS + 2))
    sampling = make_sampling(max_tokens=4, logprobs=0)
    first = Admit(
        row=1, prompt=pack_ids(prompt), num_tokens=len(prompt), blocks=(4, 5, 6), sampling=sampling
    )
    second = Admit(
        row=2,
        prompt=pack_ids(prompt),
        num_tokens=2,
        blocks=(4, 5, 7),
        sampling=sampling,
        cached_tokens=2 * BLOCK_TOKENS,
    )

    whole = runner.execute(RunStep(step=1, admits=(first,)))
    shared = runner.execute(RunStep(step=2, admits=(second,)))
    rest = [runner.execute(RunStep(step=step)) for step in (3, 4)]

    by_row: dict[int, list[int]] = {1: [], 2: []}
    for done in (whole, shared, *rest):
        for row, token in zip(done.rows, unpack_ids(done.token_ids), strict=True):
            by_row[row].append(token)
    assert shared.num_tokens == 3  # two of the new row, and the first one's next
    assert by_row[1][:3] == by_row[2][:3]
    logprob = unpack_floats(shared.logprobs)[shared.rows.index(2)]
    assert logprob == pytest.approx(unpack_floats(whole.logprobs)[0], abs=1e-5)


@pytest.mark.parametrize(("cached", "blocks"), [(3, (4, 5)), (BLOCK_TOKENS, (4,))])
def test_a_row_that_shares_part_of_a_block_or_brings_too_few_is_refused(
    runner: ModelRunner, cached: int, blocks: tuple[int, ...]
) -> None:
    row = Admit(
        row=1,
        prompt=pack_ids(range(3, 5 + BLOCK_TOKENS)),
        num_tokens=2,
        blocks=blocks,
        sampling=make_sampling(),
        cached_tokens=cached,
    )
    with pytest.raises(RowMismatch):
        runner.execute(RunStep(step=1, admits=(row,)))


def test_no_log_probs_are_sent_when_no_row_wants_them(runner: ModelRunner) -> None:
    done = run_step(runner, make_sampling(), make_sampling())

    assert done.logprobs == b""
    assert done.top_logprobs == {}


def test_log_probs_are_those_of_the_raw_logits_at_any_temperature(runner: ModelRunner) -> None:
    plain = make_sampling(logprobs=20)
    drawn = make_sampling(logprobs=20, temperature=3.0, top_k=2, seed=1)

    done = run_step(runner, plain, drawn)

    for (_, one), (_, other) in zip(*done.top_logprobs.values(), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_processed_log_probs_are_those_of_what_could_be_drawn(runner: ModelRunner) -> None:
    rules: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "bias": {7: 40.0, 8: 39.0, 9: 38.0}}
    processed = make_sampling(logprobs=5, processed=True, **rules)
    raw = make_sampling(logprobs=5, **rules)

    done = run_step(runner, processed, raw, make_sampling(logprobs=5))

    top = done.top_logprobs[0]
    assert {token for token, _ in top} <= {7, 8, 9}  # fewer than were asked for, since no more can
    assert sum(math.exp(logprob) for _, logprob in top) == pytest.approx(1.0)
    assert dict(top)[unpack_ids(done.token_ids)[0]] == pytest.approx(
        unpack_floats(done.logprobs)[0]
    )
    assert len(done.top_logprobs[1]) == 5
    assert dict(done.top_logprobs[1]) == pytest.approx(dict(done.top_logprobs[2]), abs=1e-5)


def test_a_step_tells_its_number_tokens_and_time(runner: ModelRunner) -> None:
    done = run_step(runner, make_sampling(), make_sampling())
    idle = runner.execute(RunStep(step=4))

    assert (done.step, done.num_tokens) == (3, 6)
    assert 0 < done.seconds < 60
    assert (idle.step, idle.num_tokens) == (4, 2)


def test_a_step_without_rows_does_nothing(runner: ModelRunner) -> None:
    done = runner.execute(RunStep(step=9))

    assert (done.step, done.rows, done.token_ids, done.num_tokens) == (9, (), b"", 0)


def test_what_a_step_tells_survives_the_wire(runner: ModelRunner) -> None:
    done = run_step(runner, make_sampling(logprobs=2), make_sampling(max_tokens=1))

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(done), type=StepDone) == done


def test_a_chunk_before_the_last_samples_nothing(runner: ModelRunner) -> None:
    first_chunk = Admit(
        row=1,
        prompt=pack_ids([1, 2, 3, 4, 5]),
        num_tokens=3,
        blocks=(0,),
        sampling=make_sampling(stop_token_ids=tuple(range(320)), max_tokens=1, logprobs=2),
    )

    done = runner.execute(RunStep(step=1, admits=(first_chunk,)))
    idle = runner.execute(RunStep(step=2))
    last = runner.execute(RunStep(step=3, continues=(Continue(row=1, num_tokens=2, blocks=(1,)),)))

    assert (done.rows, done.num_tokens, done.stopped, done.full) == ((), 3, (), ())
    assert (done.logprobs, done.top_logprobs) == (b"", {})
    assert (idle.rows, idle.num_tokens) == ((), 0)
    assert (last.rows, last.num_tokens, last.stopped) == ((1,), 2, (1,))


# What goes wrong


def damage(runner: ModelRunner, *, token: int) -> None:
    """Make a token's embedding no number, as it is in a damaged checkpoint."""
    with torch.inference_mode():
        runner._slot.model.decoder._embedding_VD[token] = torch.nan


def test_a_row_whose_logits_are_no_numbers_fails_alone() -> None:
    runner = make_runner()
    damage(runner, token=13)
    good, bad = Request([1, 2, 3], make_sampling()), Request([1, 13, 3], make_sampling(logprobs=2))
    alone = run_one(runner, make_sampling(), prompt=(1, 2, 3))

    Scheduler(runner).run([bad, good])

    assert (bad.ending, bad.output) == ("failed", [])
    assert (good.ending, good.output) == ("full", alone.output)
    assert runner.num_rows == 0


def test_log_probs_stay_with_their_rows_when_one_before_them_fails() -> None:
    runner = make_runner()
    alone = run_step(runner, make_sampling(logprobs=2))
    runner.drop([0])
    damage(runner, token=13)

    done = runner.execute(
        RunStep(
            step=1,
            admits=(
                admit(0, make_sampling(logprobs=3), prompt=(13,)),
                admit(1, make_sampling(logprobs=2)),
            ),
        )
    )

    assert [failure.row for failure in done.failed] == [0]
    assert done.rows == (1,)
    assert unpack_floats(done.logprobs) == pytest.approx(unpack_floats(alone.logprobs))
    [(row, top)] = done.top_logprobs.items()
    assert row == 1
    assert [token for token, _ in top] == [token for token, _ in alone.top_logprobs[0]]


def test_blocks_a_failed_row_left_behind_do_not_harm_the_next() -> None:
    runner = make_runner(make_config(num_blocks=4))
    damage(runner, token=13)
    alone = run_one(runner, make_sampling(max_tokens=3), prompt=(1, 2, 3))
    bad = Request([13] * 12, make_sampling(max_tokens=1))
    good = Request([1, 2, 3], make_sampling(max_tokens=3))

    Scheduler(runner).run([bad, good])

    assert bad.ending == "failed"
    assert good.output == alone.output


def test_a_step_that_contradicts_the_rows_is_refused_and_the_rows_can_be_dropped(
    runner: ModelRunner,
) -> None:
    run_step(runner, make_sampling())

    with pytest.raises(RowMismatch, match="wait for none"):
        runner.execute(RunStep(step=4, grants=(Grant(row=0, block=9),)))
    runner.drop([0, 77])

    assert runner.num_rows == 0
    assert run_step(runner, make_sampling()).rows == (0,)


# What it holds


def test_nothing_runs_before_weights_and_cache_are_there() -> None:
    runner = ModelRunner(make_config())

    with pytest.raises(NotReady, match="call load first"):
        runner.allocate()
    with pytest.raises(NotReady, match="call load first"):
        runner.execute(RunStep(step=1))
    runner.load()
    with pytest.raises(NotReady, match="call allocate first"):
        runner.execute(RunStep(step=1))
    runner.drop([1])
    assert (runner.free_kv(), runner.kv_bytes) == (0, 0)


def test_a_cache_in_gib_holds_as_many_blocks_as_fit() -> None:
    runner = ModelRunner(make_config(num_blocks=None, kv_cache_gb=0.001, block_tokens=16))
    runner.load()

    block_bytes = 2 * 2 * 16 * 2 * 16 * 4
    assert runner.num_blocks == int(0.001 * 2**30) // block_bytes
    runner.allocate()
    assert runner.kv_bytes == runner.num_blocks * block_bytes


@pytest.mark.parametrize(
    ("num_blocks", "kv_cache_gb", "reason"),
    [
        (None, None, "num_blocks is None and kv_cache_gb is None, and one"),
        (5, 1.0, "num_blocks is 5 and kv_cache_gb is 1.0, and one"),
    ],
)
def test_the_cache_is_sized_in_one_way(
    num_blocks: int | None, kv_cache_gb: float | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(num_blocks=num_blocks, kv_cache_gb=kv_cache_gb)


def test_settings_below_one_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="max_rows is 0, and must be at least 1"):
        make_config(max_rows=0)


def test_settings_the_model_has_no_room_for_are_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 4096, and the model's context is 2048"):
        ModelRunner(make_config(max_model_len=4096)).load()
    with pytest.raises(ConfigError, match="room for 0 blocks of 2 KiB, and must for at least 2"):
        ModelRunner(make_config(num_blocks=None, kv_cache_gb=1e-9)).load()


def test_without_a_number_of_rows_there_are_as_many_as_pool_and_step_are_for() -> None:
    by_blocks = ModelRunner(make_config(max_rows=None, num_blocks=15)).room()
    by_tokens = ModelRunner(make_config(max_rows=None, max_tokens=9)).room()

    assert (by_blocks.max_rows, by_tokens.max_rows) == (12, 8)


def test_more_rows_than_a_step_has_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 16, and must be at most max_tokens \(8\)"):
        ModelRunner(make_config(max_tokens=8))


def test_its_room_does_not_count_the_block_for_padding(runner: ModelRunner) -> None:
    room = runner.room()

    assert (room.num_blocks, room.block_tokens) == (runner.num_blocks - 1, BLOCK_TOKENS)
    assert (room.max_rows, room.max_step_tokens, room.max_model_len) == (16, 512, 128)


def test_blocks_that_the_attention_backend_cannot_take_are_refused_at_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SdpaAttention, "block_multiple", 3)

    with pytest.raises(ConfigError, match=r"block_tokens is 4, and .* sdpa needs a multiple of 3"):
        ModelRunner(make_config()).load()


def test_the_models_context_is_the_default() -> None:
    runner = ModelRunner(make_config(max_model_len=None))
    runner.load()

    assert runner.max_model_len == 2048


def test_freed_cache_memory_goes_back_to_the_system_and_comes_again() -> None:
    runner = make_runner(make_config(num_blocks=2**15))
    alone = run_one(runner, make_sampling()).output
    run_step(runner, make_sampling())
    size = runner.kv_bytes
    before = resident_bytes(torch.device("cpu"))

    freed = runner.free_kv()

    assert size == 64 * 2**20
    assert freed >= 0.9 * size
    assert before - resident_bytes(torch.device("cpu")) >= 0.9 * size
    assert (runner.kv_bytes, runner.num_rows) == (0, 0)
    assert runner.free_kv() == 0
    runner.allocate()
    assert run_one(runner, make_sampling()).output == alone


def test_freed_weights_go_back_to_the_system_each_time(tmp_path: Path) -> None:
    """The second time the allocator would keep them: freeing the first has taught it to."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"vocab_size": 320, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"max_position_embeddings": 2048}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    runner = ModelRunner(
        msgspec.structs.replace(make_config(), model=f"random:{tmp_path / 'config.json'}")
    )

    for _ in range(2):
        runner.load()
        size = runner.weights_bytes
        freed = runner.free_weights()
        assert size > 40 * 10**6
        assert freed >= 0.9 * size


def test_weights_are_freed_and_loaded_again() -> None:
    runner = make_runner()
    alone = run_one(runner, make_sampling()).output
    size = runner.weights_bytes

    runner.free_weights()
    assert runner.weights_bytes == 0
    with pytest.raises(NotReady, match="weights are not loaded"):
        runner.execute(RunStep(step=1))
    runner.load()
    runner.load()

    assert runner.weights_bytes == size > 0
    assert run_one(runner, make_sampling()).output == alone


def test_it_describes_where_and_with_what_it_runs(runner: ModelRunner) -> None:
    run_step(runner, make_sampling())

    description = runner.describe()

    assert description["device"] == "cpu"
    assert description["dtype"] == "float32"
    assert description["attention"] == "sdpa"
    assert description["batch_invariant"] == 0
    assert description["rows"] == 1
    assert description["kv_bytes"] == runner.kv_bytes


def test_it_runs_on_a_thread_of_its_own_with_that_many_threads() -> None:
    outputs: list[list[int]] = []
    num_threads = torch.get_num_threads() + 1

    def work() -> None:
        runner = make_runner(make_config(threads=num_threads))
        outputs.append([torch.get_num_threads(), int(runner.describe()["threads"])])
        outputs.append(run_one(runner, make_sampling(max_tokens=3)).output)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=30)

    assert outputs[0] == [num_threads, num_threads]
    assert outputs[1] == run_one(make_runner(), make_sampling(max_tokens=3)).output


def test_a_runner_starts_over_after_a_step_it_had_not_the_memory_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(inputs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    runner = make_runner()
    before = run_step(runner, make_sampling()).token_ids
    with monkeypatch.context() as broken:
        broken.setattr(runner, "_hidden", fail)
        with pytest.raises(OutOfMemory, match="no memory"):
            runner.execute(RunStep(step=2))

    runner.start_over()

    assert runner.num_rows == 0
    assert runner.kv_bytes > 0
    assert run_step(runner, make_sampling()).token_ids == before
