"""Tensors that leave device memory for the host and come back as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from callboard.gpu.device import release_memory, resident_bytes
from callboard.gpu.linear import repacked
from callboard.gpu.loading import LoadedModel, load_model
from callboard.gpu.offload import HostCopy, OffloadedModel, host_copies
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.steps import Admit, Grant, RowSampling, RunStep
from tests.gpu import own_process

CPU = torch.device("cpu")
MIB = 2**20


def back(copies: list[HostCopy]) -> list[Tensor]:
    return [copy.tensor(CPU) for copy in copies]


def test_tensors_of_any_kind_come_back_to_the_bit() -> None:
    torch.manual_seed(1)
    tensors = [
        torch.randn(5, 3, dtype=torch.bfloat16),
        torch.tensor(7.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.randint(-(2**40), 2**40, (2, 3, 4)),
        torch.tensor([True, False, True]),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ]

    copies = host_copies(tensors)

    for tensor, again in zip(tensors, back(copies), strict=True):
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert again.flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8))


def test_what_is_0_for_long_stretches_comes_back_too() -> None:
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8)
    tensor[MIB + 5] = 1

    [again] = back(host_copies([tensor]))

    assert again.equal(tensor)


def test_a_tensor_that_is_written_over_is_what_was_copied() -> None:
    tensor = torch.arange(10.0)
    [copy] = host_copies([tensor])
    tensor.zero_()

    copy.write_to(tensor)

    assert tensor.equal(torch.arange(10.0))


def test_a_repacked_weight_is_repacked_again() -> None:
    weight = torch.randn(64, 48)

    [again] = back(host_copies([repacked(weight)]))

    assert again.is_mkldnn
    assert again.to_dense().equal(weight)


def test_no_tensors_are_no_copies() -> None:
    assert host_copies([]) == []


def test_the_file_is_made_in_the_temporary_folder_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    copies = host_copies([torch.ones(MIB)])

    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    assert len(mapped) == 1
    assert "(deleted)" in mapped[0]
    assert list(tmp_path.iterdir()) == []
    assert back(copies)[0].equal(torch.ones(MIB))


def test_copies_take_no_memory_of_the_process() -> None:
    tensor = torch.ones(16 * MIB)
    release_memory(CPU)
    before = resident_bytes(CPU)

    copies = host_copies([tensor])
    del tensor
    release_memory(CPU)

    assert before - resident_bytes(CPU) >= 0.9 * 64 * MIB
    assert back(copies)[0].equal(torch.ones(16 * MIB))


# Models


def tiny() -> LoadedModel:
    return load_model("random:tiny", device=CPU, dtype=torch.float32)


def test_an_offloaded_model_holds_no_tensor_and_is_whole_again_when_restored() -> None:
    model = tiny()
    frequencies = model.decoder._rotary._inverse_frequencies.clone()
    embedding = model.decoder._embedding_VD.clone()

    offloaded = OffloadedModel(model)

    assert tensors_of(model.decoder) == 0
    with pytest.raises(AttributeError):
        _ = model.decoder._rotary._inverse_frequencies
    assert offloaded.restore() is model
    assert model.decoder._rotary._inverse_frequencies.equal(frequencies)
    assert model.decoder._embedding_VD.equal(embedding)


def test_a_tied_embedding_is_one_tensor_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(f"random:{tmp_path / 'config.json'}", device=CPU, dtype=torch.float32)

    OffloadedModel(model).restore()

    assert model.decoder._embedding_VD is model.decoder._head._weight


def test_a_model_that_finds_no_room_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    model = tiny()
    before = tensors_of(model.decoder)

    with pytest.raises(OSError, match="gone"):
        OffloadedModel(model)

    assert tensors_of(model.decoder) == before > 10


def tensors_of(part: object) -> int:
    if isinstance(part, Tensor):
        return 1
    if isinstance(part, tuple):
        return sum(map(tensors_of, part))
    return sum(map(tensors_of, getattr(part, "__dict__", {}).values()))


# The runner: rows in the middle of their output


BLOCK_TOKENS = 4


def make_runner(*, num_blocks: int = 64, dtype: str = "float32") -> ModelRunner:
    runner = ModelRunner(
        RunnerConfig(
            model="random:tiny",
            device="cpu",
            dtype=dtype,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            max_rows=4,
            threads=1,
        )
    )
    runner.load()
    runner.allocate()
    return runner


def admit(row: int) -> Admit:
    prompt = [row, 7, 5 * row, 11, 13]
    return Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=len(prompt),
        blocks=(2 * row, 2 * row + 1),
        sampling=RowSampling(
            temperature=0.8,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=row,
            max_tokens=100,
            min_tokens=0,
            stop_token_ids=(),
            logprobs=0,
        ),
    )


def generate(
    runner: ModelRunner, between: Callable[[], None] = lambda: None
) -> list[tuple[list[int], bytes, int]]:
    """Run three rows for twelve steps; returns tokens, log-probs and tokens fed, step by step."""
    done = [runner.execute(RunStep(step=0, admits=tuple(admit(row) for row in (1, 2, 3))))]
    for step in range(1, 12):
        if step == 6:
            between()
        grants = tuple(
            Grant(row=row, block=12 + 3 * row + step // BLOCK_TOKENS)
            for row in (1, 2, 3)
            if (5 + step - 1) % BLOCK_TOKENS == 0 and step > 3
        )
        done.append(runner.execute(RunStep(step=step, grants=grants)))
    runner.drop([1, 2, 3])
    return [(unpack_ids(one.token_ids), one.logprobs, one.num_tokens) for one in done]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_rows_go_on_as_if_nothing_had_been_offloaded(dtype: str, kv: bool, weights: bool) -> None:
    runner = make_runner(dtype=dtype)
    undisturbed = generate(runner)

    def offload_and_back() -> None:
        if kv:
            runner.offload_kv()
            assert (runner.kv_bytes, runner.num_rows) == (0, 3)
        if weights:
            runner.offload_weights()
            assert runner.weights_bytes == 0
        runner.load()
        runner.allocate()

    disturbed = generate(runner, offload_and_back)

    assert disturbed == undisturbed
    assert [fed for _, _, fed in disturbed[1:]] == [3] * 11  # a token a row: no prefill


def test_offloaded_memory_goes_back_to_the_system_each_time(tmp_path: Path) -> None:
    own_process.run(offload_twice, str(tmp_path))


def offload_twice(folder: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"vocab_size": 320, "num_attention_heads": 8, "max_position_embeddings": 2048}
    config = {"architectures": ["LlamaForCausalLM"], **sizes}
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(config))
    runner = ModelRunner(
        RunnerConfig(
            model=f"random:{path}",
            device="cpu",
            num_blocks=1024,
            block_tokens=4,
            max_rows=4,
            threads=1,
        )
    )
    for _ in range(2):
        runner.load()
        runner.allocate()
        kv_bytes, weights_bytes = runner.kv_bytes, runner.weights_bytes
        assert min(kv_bytes, weights_bytes) > 40 * 10**6

        assert runner.offload_kv() >= 0.9 * kv_bytes
        assert runner.offload_weights() >= 0.9 * weights_bytes
        assert (runner.offload_kv(), runner.offload_weights()) == (0, 0)


def test_what_was_offloaded_can_be_freed_and_rows_are_forgotten_then() -> None:
    runner = make_runner()
    runner.execute(RunStep(step=0, admits=(admit(1),)))
    runner.offload_kv()
    runner.offload_weights()

    runner.free_kv()
    runner.free_weights()
    runner.load()
    runner.allocate()

    assert runner.num_rows == 0
    assert len(generate(runner)) == 12


def test_a_row_dropped_while_its_cache_is_offloaded_stays_away() -> None:
    runner = make_runner()
    undisturbed = generate(runner)
    runner.execute(RunStep(step=0, admits=(admit(1),)))
    runner.offload_kv()

    runner.drop([1])
    runner.allocate()

    assert runner.num_rows == 0
    assert generate(runner) == undisturbed
