"""What only a real GPU can show: its kernels agree with the CPU, and nothing is read too early.

Without CUDA all of it is skipped; `docs/benchmarks/gpu_check.py` runs it where there is some.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from callboard.gpu.attention import flash
from callboard.gpu.attention.base import AttentionBackend, AttentionMetadata, build_metadata
from callboard.gpu.attention.flash import FlashAttention
from callboard.gpu.attention.sdpa import SdpaAttention
from callboard.gpu.device import resident_bytes
from callboard.gpu.dimensions import AUTOMATIC
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, load_model
from callboard.gpu.memory import blocks_for
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.gpu.sampling import SampleResult, SamplingRows, sample, uniforms
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.control import State, Weights
from callboard.messages.errors import ConfigError
from callboard.messages.steps import Admit, Continue, Grant, RowSampling, RunStep
from callboard.supervision.default_model import default_model
from callboard.supervision.engine import Engine, open_engine
from callboard.supervision.record import Completion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_flash = pytest.mark.skipif(not flash.available(), reason="no flash-attn for this GPU")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20

# How far numbers of order 1 may be from float32 ones computed in another order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

HALVES = [torch.float16, torch.bfloat16]

ROWS = [  # (tokens of this step, tokens cached after it)
    pytest.param([(300, 300)], id="a prefill"),
    pytest.param([(5, 260)], id="a chunk behind cached tokens"),
    pytest.param([(1, 300)] * 3, id="decodes of one length"),
    pytest.param([(1, 700), (1, 256), (1, 1), (1, 257)], id="decodes of many lengths"),
    pytest.param([(1, 511), (1, 3), (9, 9), (40, 600), (2, 2)], id="all in one call"),
]


# Attention


class Step:
    """Random queries, and caches in which only the slots of cached tokens hold numbers."""

    def __init__(self, rows: list[tuple[int, int]], block_tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = rows
        self.block_tokens = block_tokens
        blocks_each = max(blocks_for(kv_len, block_tokens) for _, kv_len in rows)
        num_blocks = len(rows) * blocks_each
        self.blocks = torch.randperm(num_blocks, generator=generator).view(len(rows), blocks_each)
        shape = (2, num_blocks, block_tokens, 3, 64)
        self.caches = torch.full(shape, torch.nan)
        for (_, kv_len), blocks in zip(rows, self.blocks, strict=True):
            position = torch.arange(kv_len)
            slot = blocks[position // block_tokens] * block_tokens + position % block_tokens
            numbers = torch.randn(2, kv_len, *shape[3:], generator=generator)
            self.caches.flatten(1, 2)[:, slot] = numbers
        num_tokens = sum(query_len for query_len, _ in rows)
        self.q = torch.randn(num_tokens, 9, 64, generator=generator)

    def metadata(self, device: torch.device) -> AttentionMetadata:
        queries, lengths = zip(*self.rows, strict=True)
        return build_metadata(
            queries, lengths, self.blocks.numpy(), block_tokens=self.block_tokens, device=device
        )

    def rounded_to(self, dtype: torch.dtype) -> "Step":
        """Make the numbers ones that the dtype has, so that only the computing differs."""
        self.caches = self.caches.to(dtype).float()
        self.q = self.q.to(dtype).float()
        return self

    def attend(self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> Tensor:
        keys, values = self.caches.to(device, dtype)
        q = self.q.to(device, dtype)
        return backend.attend(q, keys, values, self.metadata(device), 0.125).float().cpu()

    def attend_padded(
        self, backend: AttentionBackend, device: torch.device, dtype: torch.dtype, *, padding: int
    ) -> Tensor:
        """Attend with so many tokens and rows of padding behind the others; return the others'."""
        keys, values = self.caches.to(device, dtype)
        q = F.pad(self.q, (0, 0, 0, 0, 0, padding)).to(device, dtype)
        metadata = self.metadata(device)
        block = int(self.blocks[0, 0])
        padded = replace(
            metadata,
            cu_seqlens_q=F.pad(metadata.cu_seqlens_q, (0, padding), value=len(self.q)),
            seqlens_k=F.pad(metadata.seqlens_k, (0, padding), value=0),
            block_table=F.pad(metadata.block_table, (0, 0, 0, padding), value=block),
        )
        out = backend.attend(q, keys, values, padded, 0.125)
        return out[: len(self.q)].float().cpu()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_sdpa_on_cuda_computes_what_it_computes_on_the_cpu(
    rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    step = Step(rows, block_tokens=64).rounded_to(dtype)

    on_cuda = step.attend(SdpaAttention(), CUDA, dtype)

    on_cpu = step.attend(SdpaAttention(), CPU, torch.float32)
    torch.testing.assert_close(on_cuda, on_cpu, rtol=0, atol=TOLERANCE[dtype])


@needs_flash
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_flash_computes_what_sdpa_computes(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = Step(rows, block_tokens=FlashAttention.block_multiple)

    by_flash = step.attend(FlashAttention(), CUDA, dtype)

    by_sdpa = step.attend(SdpaAttention(), CUDA, dtype)
    torch.testing.assert_close(by_flash, by_sdpa, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", ROWS)
def test_padding_does_not_reach_others_by_sdpa(rows: list[tuple[int, int]]) -> None:
    step = Step(rows, block_tokens=64)

    padded = step.attend_padded(SdpaAttention(), CUDA, torch.float32, padding=5)

    plain = step.attend(SdpaAttention(), CUDA, torch.float32)
    torch.testing.assert_close(padded, plain, rtol=0, atol=TOLERANCE[torch.float32])


@needs_flash
@pytest.mark.parametrize("rows", ROWS)
def test_padding_does_not_reach_others_by_flash(rows: list[tuple[int, int]]) -> None:
    step = Step(rows, block_tokens=FlashAttention.block_multiple)

    padded = step.attend_padded(FlashAttention(), CUDA, torch.bfloat16, padding=5)

    plain = step.attend(FlashAttention(), CUDA, torch.bfloat16)
    torch.testing.assert_close(padded, plain, rtol=0, atol=TOLERANCE[torch.bfloat16])


# The decoder


def load_tiny(device: torch.device, dtype: torch.dtype, attention: str) -> LoadedModel:
    with torch.inference_mode():
        return load_model("random:tiny", device=device, dtype=dtype, attention=attention)


def make_cache(model: LoadedModel, device: torch.device, dtype: torch.dtype) -> KVCache:
    decoder = model.config.decoder
    return KVCache(
        num_layers=decoder.num_layers,
        num_blocks=4,
        block_tokens=256,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
        device=device,
    )


def logits_of_two_steps(device: torch.device, dtype: torch.dtype, attention: str) -> Tensor:
    """Prefill a prompt, then feed a decode, another prompt and a chunk; [5, V] on the CPU."""
    model = load_tiny(device, dtype, attention)
    ids = [(7 * index + 3) % 320 for index in range(400)]
    steps = [([280, 9], [280, 9]), ([1, 30, 90], [281, 39, 90])]
    logits = []
    with torch.inference_mode():
        cache = make_cache(model, device, dtype)
        for queries, lengths in steps:
            blocks = [[0, 1], [2, 3], [3, 3]][: len(queries)]
            metadata = build_metadata(queries, lengths, blocks, block_tokens=256, device=device)
            input_ids = torch.tensor(ids[: sum(queries)], device=device)
            hidden_TD = model.decoder.forward(input_ids, metadata, cache)
            last_R = metadata.cu_seqlens_q[1:].long() - 1
            logits.append(model.decoder.logits(hidden_TD[last_R]).cpu())
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    [
        (torch.float32, "sdpa", 1e-4),
        (torch.float16, "sdpa", 0.02),
        (torch.bfloat16, "sdpa", 0.15),
        pytest.param(torch.float16, "flash", 0.02, marks=needs_flash),
        pytest.param(torch.bfloat16, "flash", 0.15, marks=needs_flash),
    ],
    ids=str,
)
def test_the_decoder_gives_the_logits_it_gives_on_the_cpu(
    dtype: torch.dtype, attention: str, tolerance: float
) -> None:
    on_cuda = logits_of_two_steps(CUDA, dtype, attention)

    on_cpu = logits_of_two_steps(CPU, torch.float32, "sdpa")
    torch.testing.assert_close(on_cuda, on_cpu, rtol=0, atol=tolerance)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise where a call waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("flash", marks=needs_flash)])
def test_decoding_and_sampling_do_not_wait_for_the_device(attention: str) -> None:
    dtype = torch.float32 if attention == "sdpa" else torch.float16
    model = load_tiny(CUDA, dtype, attention)
    cache = make_cache(model, CUDA, dtype)
    input_ids = torch.tensor([5, 6], device=CUDA)
    rows = make_rows(2, top_k=9, top_p=0.9, min_p=0.01).to(CUDA)
    first, second = (
        build_metadata([1, 1], [20, 20], [[0], [1]], block_tokens=256, device=CUDA)
        for _ in range(2)
    )

    def step(metadata: AttentionMetadata) -> SampleResult:
        hidden_RD = model.decoder.forward(input_ids, metadata, cache)
        return sample(model.decoder.logits(hidden_RD), rows)

    with torch.inference_mode():
        step(first)  # loads kernels, and may wait for that
        torch.cuda.synchronize()
        with no_waiting():
            result = step(second)

    assert not result.nan_rows_R.any()


# Sampling


def make_rows(count: int, *, top_k: int, top_p: float, min_p: float) -> SamplingRows:
    """Return rows of which every third is greedy, each with a seed of its own."""
    return SamplingRows.build(
        temperature=[0.0 if row % 3 == 0 else 0.5 + row / count for row in range(count)],
        top_k=[top_k] * count,
        top_p=[top_p] * count,
        min_p=[min_p] * count,
        seed=[row * 2**55 for row in range(count)],
        position=list(range(count)),
        banned=([0, 1], [3, 4]),
    )


def test_random_numbers_are_the_same_on_cuda_to_the_last_bit() -> None:
    seeds = torch.tensor([0, 1, 2**31, 2**63 - 1, -1] * 20)
    positions = torch.arange(100)
    runners = torch.arange(64)[None, :]

    on_cuda = uniforms(seeds.to(CUDA), positions.to(CUDA), runners.to(CUDA))

    assert on_cuda.dtype == torch.float64
    assert torch.equal(on_cuda.cpu(), uniforms(seeds, positions, runners))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.8, 0.0), (50, 0.9, 0.02)]
)
def test_the_same_logits_give_the_same_tokens_on_cuda(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits = 3 * torch.randn(60, 5000, generator=torch.Generator().manual_seed(1))
    rows = make_rows(60, top_k=top_k, top_p=top_p, min_p=min_p)

    on_cuda = sample(logits.to(CUDA), rows.to(CUDA))

    on_cpu = sample(logits, rows)
    assert torch.equal(on_cuda.token_ids_R.cpu(), on_cpu.token_ids_R)
    torch.testing.assert_close(on_cuda.logprobs_R.cpu(), on_cpu.logprobs_R, rtol=0, atol=1e-5)


# The runner

NUM_BLOCKS = 64
NUM_NEW = 12
PROMPTS = [
    [(17 * row + 5 * index) % 320 for index in range(length)]
    for row, length in enumerate([1, 40, 256, 300, 16, 2])
]


def make_runner(device: str, **settings: Any) -> ModelRunner:
    values: dict[str, Any] = {
        "model": "random:tiny",
        "dtype": "float32",
        "attention": "sdpa",
        "block_tokens": 16,
        "num_blocks": NUM_BLOCKS,
        "max_tokens": 2048,
        "max_model_len": 512,
    }
    runner = ModelRunner(RunnerConfig(device=device, **{**values, **settings}))
    runner.load()
    runner.allocate()
    return runner


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner("cuda")


def keep_device_busy() -> None:
    """Make it begin what comes next about a tenth of a second from now."""
    torch.cuda._sleep(2 * 10**8)  # type: ignore[no-untyped-call]  # untyped in torch


class Rows:
    """A batch of prompts on its way through a runner, with one block after another for them."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], temperature: float) -> None:
        self.runner = runner
        self.prompts = prompts
        self.temperature = temperature
        self.block_tokens = int(runner.describe()["block_tokens"])
        self.blocks = iter(range(runner.num_blocks - 1))
        self.num_fed = [0] * len(prompts)
        self.outputs: list[list[int]] = [[] for _ in prompts]

    def run(self, *, chunk: int, slow: bool) -> list[list[int]]:
        for number in itertools.count():
            if all(len(output) == NUM_NEW for output in self.outputs):
                return self.outputs
            grants = self.grants()
            admits, continues = self.prefills(chunk)
            if slow:
                keep_device_busy()
            done = self.runner.execute(
                RunStep(step=number, grants=grants, admits=admits, continues=continues)
            )
            for row, token in zip(done.rows, unpack_ids(done.token_ids), strict=True):
                self.outputs[row].append(token)
        raise AssertionError

    def grants(self) -> tuple[Grant, ...]:
        return tuple(
            Grant(row=row, block=next(self.blocks))
            for row, output in enumerate(self.outputs)
            if 0 < len(output) < NUM_NEW
            and (len(self.prompts[row]) + len(output) - 1) % self.block_tokens == 0
        )

    def prefills(self, chunk: int) -> tuple[tuple[Admit, ...], tuple[Continue, ...]]:
        """Feed prompts in order, up to the first that does not fit its chunk."""
        admits, continues = [], []
        for row, prompt in enumerate(self.prompts):
            start = self.num_fed[row]
            num_tokens = min(chunk, len(prompt) - start)
            if num_tokens and start:
                blocks = self.blocks_for(start, num_tokens)
                continues.append(Continue(row=row, num_tokens=num_tokens, blocks=blocks))
            elif num_tokens:
                admits.append(self.admit(row, num_tokens))
            self.num_fed[row] += num_tokens
            if self.num_fed[row] < len(prompt):
                break
        return tuple(admits), tuple(continues)

    def admit(self, row: int, num_tokens: int) -> Admit:
        return Admit(
            row=row,
            prompt=pack_ids(self.prompts[row]),
            num_tokens=num_tokens,
            blocks=self.blocks_for(0, num_tokens),
            sampling=make_sampling(seed=len(self.prompts[row]), temperature=self.temperature),
        )

    def blocks_for(self, start: int, num_tokens: int) -> tuple[int, ...]:
        count = blocks_for(start + num_tokens, self.block_tokens)
        return tuple(itertools.islice(self.blocks, count - blocks_for(start, self.block_tokens)))


def make_sampling(*, seed: int = 0, temperature: float = 0.0) -> RowSampling:
    return RowSampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        max_tokens=NUM_NEW,
        min_tokens=0,
        stop_token_ids=(),
    )


def generate(
    runner: ModelRunner,
    prompts: list[list[int]],
    *,
    chunk: int = 2048,
    temperature: float = 0.0,
    slow: bool = False,
) -> list[list[int]]:
    outputs = Rows(runner, prompts, temperature).run(chunk=chunk, slow=slow)
    assert runner.num_rows == 0
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_prompt_gets_the_same_tokens_alone_batched_chunked_and_on_the_cpu(
    runner: ModelRunner, temperature: float
) -> None:
    alone = [generate(runner, [prompt], temperature=temperature)[0] for prompt in PROMPTS]

    batched = generate(runner, PROMPTS, temperature=temperature)
    chunked = generate(runner, PROMPTS, temperature=temperature, chunk=7)

    on_cpu = generate(make_runner("cpu"), PROMPTS, temperature=temperature)
    assert alone == batched == chunked == on_cpu


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="sdpa"),
        pytest.param({"dtype": "bfloat16"}, id="sdpa in bfloat16"),
        pytest.param(
            {"dtype": "bfloat16", "attention": "flash", "block_tokens": 256},
            id="flash",
            marks=needs_flash,
        ),
    ],
)
def test_a_batch_invariant_row_gets_the_same_bits_alone_and_batched(
    settings: dict[str, Any],
) -> None:
    runner = make_runner("cuda", batch_invariant=True, **settings)
    block_tokens = int(runner.describe()["block_tokens"])
    blocks = iter(range(NUM_BLOCKS - 1))
    admits = [
        Admit(
            row=row,
            prompt=pack_ids(prompt),
            num_tokens=len(prompt),
            blocks=tuple(itertools.islice(blocks, blocks_for(len(prompt), block_tokens))),
            sampling=msgspec.structs.replace(make_sampling(), logprobs=20),
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    alone: dict[int, Any] = {}
    for admit in admits:
        alone |= runner.execute(RunStep(step=0, admits=(admit,))).top_logprobs
        runner.drop([admit.row])

    together = runner.execute(RunStep(step=1, admits=tuple(admits))).top_logprobs

    assert together == alone
    assert len(alone) == len(PROMPTS)


@pytest.mark.parametrize("chunk", [2048, 7])
def test_padding_changes_no_token(runner: ModelRunner, chunk: int) -> None:
    padding = make_runner("cuda", num_graph_sizes=AUTOMATIC)

    assert generate(padding, PROMPTS, chunk=chunk) == generate(runner, PROMPTS, chunk=chunk)


def test_chunks_do_not_overtake_a_slow_device(runner: ModelRunner) -> None:
    """A chunk that samples nothing reads nothing back: the next must not replace its inputs."""
    prompts = [PROMPTS[3]]

    assert generate(runner, prompts, chunk=50, slow=True) == generate(runner, prompts)


def test_a_step_has_ended_on_the_device_when_it_has_ended(runner: ModelRunner) -> None:
    chunk = Admit(
        row=0, prompt=pack_ids(PROMPTS[1]), num_tokens=16, blocks=(0,), sampling=make_sampling()
    )
    keep_device_busy()

    done = runner.execute(RunStep(step=0, admits=(chunk,)))

    assert torch.cuda.current_stream().query()
    assert done.rows == ()
    runner.drop([0])


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("float16", "sdpa"),
        ("bfloat16", "sdpa"),
        pytest.param("float16", "flash", marks=needs_flash),
        pytest.param("bfloat16", "flash", marks=needs_flash),
    ],
)
def test_it_runs_in_half_precision_with_every_backend(dtype: str, attention: str) -> None:
    runner = make_runner("cuda", dtype=dtype, attention=attention, block_tokens=256)

    outputs = generate(runner, PROMPTS, chunk=100)

    assert [len(output) for output in outputs] == [NUM_NEW] * len(PROMPTS)
    assert runner.describe()["attention"] == attention


# Memory


def driver_free_bytes() -> int:
    """Return what the driver says is free on the device, for whichever process."""
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(CUDA)[0]


def write_config(folder: Path) -> str:
    """Write the configuration of a random model of about 200 MB; return its name."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3}
    sizes |= {"vocab_size": 320, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, **sizes}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return f"random:{folder / 'config.json'}"


def test_what_is_freed_is_free_by_the_drivers_count_and_comes_again(tmp_path: Path) -> None:
    runner = make_runner("cuda", model=write_config(tmp_path), num_blocks=1024)
    before = generate(runner, PROMPTS)
    kv_bytes, weights_bytes = runner.kv_bytes, runner.weights_bytes
    assert min(kv_bytes, weights_bytes) > 128 * MIB

    free = [driver_free_bytes()]
    freed_kv = runner.free_kv()
    free.append(driver_free_bytes())
    freed_weights = runner.free_weights()
    free.append(driver_free_bytes())

    assert freed_kv >= 0.95 * kv_bytes
    assert free[1] - free[0] >= 0.95 * kv_bytes
    assert freed_weights >= 0.95 * weights_bytes
    assert free[2] - free[1] >= 0.95 * weights_bytes
    runner.load()
    runner.allocate()
    assert generate(runner, PROMPTS) == before


def test_what_is_offloaded_is_free_by_the_drivers_count_and_comes_back_to_the_bit(
    tmp_path: Path,
) -> None:
    runner = make_runner("cuda", model=write_config(tmp_path), num_blocks=1024)
    before = generate(runner, PROMPTS)
    kv_bytes, weights_bytes = runner.kv_bytes, runner.weights_bytes
    assert runner._context is not None
    k_cache, v_cache = (cache.clone().cpu() for cache in runner._context.caches.layer(1))

    free = [driver_free_bytes()]
    freed_kv = runner.offload_kv()
    free.append(driver_free_bytes())
    freed_weights = runner.offload_weights()
    free.append(driver_free_bytes())

    assert freed_kv >= 0.95 * kv_bytes
    assert free[1] - free[0] >= 0.95 * kv_bytes
    assert freed_weights >= 0.95 * weights_bytes
    assert free[2] - free[1] >= 0.95 * weights_bytes
    runner.load()
    runner.allocate()
    again = runner._context.caches.layer(1)
    assert again[0].cpu().equal(k_cache)
    assert again[1].cpu().equal(v_cache)
    assert generate(runner, PROMPTS) == before


@pytest.mark.parametrize("room", [1.1, 1e6])
def test_new_weights_take_the_old_ones_place_with_room_for_both_and_without(
    monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    monkeypatch.setattr("callboard.gpu.model_slot.ROOM", room)
    new = Weights(source="random:tiny#2", version=1)
    runner = make_runner("cuda", model="random:tiny", num_blocks=64)
    before = generate(runner, PROMPTS)

    runner.prepare_weights(new)
    runner.cancel_weights()
    assert generate(runner, PROMPTS) == before
    runner.prepare_weights(new)
    runner.commit_weights(new)

    wanted = generate(make_runner("cuda", model=new.source, num_blocks=64), PROMPTS)
    assert before != wanted == generate(runner, PROMPTS)


def test_a_cache_that_does_not_fit_fails_when_it_is_allocated() -> None:
    free_gib = driver_free_bytes() / 2**30
    before = resident_bytes(CUDA)
    runner = ModelRunner(
        RunnerConfig(model="random:tiny", device="cuda", kv_cache_gb=math.ceil(2 * free_gib))
    )
    runner.load()

    with pytest.raises(torch.OutOfMemoryError):
        runner.allocate()

    assert resident_bytes(CUDA) - before < 64 * MIB


# The whole engine


async def ask(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    return await engine.generate(prompts, temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


async def test_the_embedded_engine_generates_suspends_and_resumes() -> None:
    settings: dict[str, Any] = {"model": "random:tiny", "dtype": "float32", "attention": "sdpa"}
    async with open_engine(device="cpu", kv_cache_gb=0.01, **settings) as engine:
        on_cpu = await ask(engine, PROMPTS)

    async with open_engine(device="cuda", kv_cache_gb=0.25, **settings) as engine:
        first = await ask(engine, PROMPTS)
        free = driver_free_bytes()
        suspended = await engine.suspend(weights="discard")
        freed = driver_free_bytes() - free
        await engine.resume()
        second = await ask(engine, PROMPTS)

    outputs = [[answer.token_ids for answer in answers] for answers in (on_cpu, first, second)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert suspended.state is State.SUSPENDED
    assert suspended.bytes_freed >= 0.95 * 256 * MIB
    assert freed >= 0.95 * 256 * MIB


async def test_the_default_model_says_what_it_says_on_the_cpu(reference: Mapping[str, Any]) -> None:
    try:
        model = default_model()
    except ConfigError:
        pytest.skip("the default model has not been fetched")
    entries = [reference[name] for name in ("completion", "chat", "code", "unicode")]

    async with open_engine(model=str(model), device="cuda", dtype="float32") as engine:
        answers = [
            await engine.generate(
                [entry.prompt_ids], temperature=0.0, max_tokens=len(entry.output_ids), logprobs=0
            )
            for entry in entries
        ]

    for [answer], entry in zip(answers, entries, strict=True):
        assert answer.token_ids == entry.output_ids
        assert answer.logprobs == pytest.approx(entry.logprobs, abs=1e-3)
