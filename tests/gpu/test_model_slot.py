"""One model takes another's place: prepared beside it, then used, or forgotten."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from callboard.gpu.loading.checkpoint import expected_shapes
from callboard.gpu.loading.loader import read_config
from callboard.gpu.model_slot import ModelSlot, NotReady
from callboard.gpu.runner import ModelRunner, RunnerConfig
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.control import Weights
from callboard.messages.errors import WeightsError
from callboard.messages.steps import Admit, RowSampling, RunStep

CPU = torch.device("cpu")
OLD = Weights(source="random:tiny", version=0)
NEW = Weights(source="random:tiny#2", version=1)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def make_slot(weights: Weights = OLD, *, loaded: bool = True) -> ModelSlot:
    slot = ModelSlot(
        weights,
        shape=read_config(weights.source).decoder,
        max_model_len=128,
        device=CPU,
        dtype=torch.float32,
        attention="auto",
    )
    if loaded:
        slot.load()
    return slot


def embedding(slot: ModelSlot) -> torch.Tensor:
    return slot.model.decoder._embedding_VD


def is_seed(slot: ModelSlot, weights: Weights) -> bool:
    return embedding(slot).equal(embedding(make_slot(weights)))


def write_model(folder: Path, seed: int = 1, **changes: Any) -> Weights:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    torch.manual_seed(seed)
    shapes = expected_shapes(read_config(folder).decoder)
    save_file({name: torch.randn(shape) for name, shape in shapes}, folder / "model.safetensors")
    return Weights(source=str(folder), version=seed)


# Two halves


def test_what_is_prepared_is_used_from_the_commit_on() -> None:
    slot = make_slot()

    slot.prepare(NEW)
    assert slot.weights == OLD
    assert is_seed(slot, OLD)
    slot.commit(NEW)

    assert slot.weights == NEW
    assert is_seed(slot, NEW)


def test_what_is_cancelled_is_not_used() -> None:
    slot = make_slot()
    slot.prepare(NEW)

    slot.cancel()
    slot.cancel()

    assert slot.weights == OLD
    assert is_seed(slot, OLD)


def test_preparing_and_committing_twice_is_harmless() -> None:
    slot = make_slot()

    for _ in range(2):
        slot.prepare(NEW)
    for _ in range(2):
        slot.commit(NEW)
    slot.prepare(NEW)

    assert slot.weights == NEW
    assert is_seed(slot, NEW)


def test_weights_that_were_not_prepared_are_read_by_the_commit() -> None:
    slot = make_slot()
    slot.prepare(Weights(source="random:tiny#9", version=1))

    slot.commit(NEW)

    assert is_seed(slot, NEW)


@pytest.mark.parametrize("commits", [False, True])
def test_where_there_is_no_room_for_two_the_old_weights_wait_on_the_host(
    monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    slot = make_slot()
    monkeypatch.setattr("callboard.gpu.model_slot.ROOM", 1e12)

    slot.prepare(NEW)
    assert not slot.loaded
    (slot.commit if commits else lambda _: slot.cancel())(NEW)

    assert is_seed(slot, NEW if commits else OLD)
    assert slot.weights == (NEW if commits else OLD)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room at all"),
        torch.OutOfMemoryError("no room at all"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory, no room at all"),  # as torch says
    ],
)
def test_old_weights_that_made_room_for_nothing_come_back(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    slot = make_slot()
    monkeypatch.setattr("callboard.gpu.model_slot.ROOM", 1e12)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("callboard.gpu.model_slot.load_model", fail)
    with pytest.raises(WeightsError, match="no room at all"):
        slot.prepare(NEW)

    monkeypatch.undo()
    assert is_seed(slot, OLD)


# Where weights are not there


@pytest.mark.parametrize("leave", [ModelSlot.free, ModelSlot.offload])
def test_weights_that_are_not_there_are_changed_when_they_are_loaded(
    leave: Callable[[ModelSlot], None],
) -> None:
    slot = make_slot()
    leave(slot)

    slot.prepare(NEW)
    slot.commit(NEW)

    assert not slot.loaded
    with pytest.raises(NotReady):
        _ = slot.model
    slot.load()
    assert is_seed(slot, NEW)


@pytest.mark.parametrize("leave", [ModelSlot.free, ModelSlot.offload])
def test_an_update_cancelled_where_they_are_not_there_loads_the_old_ones(
    leave: Callable[[ModelSlot], None],
) -> None:
    slot = make_slot()
    leave(slot)
    slot.prepare(NEW)

    slot.cancel()
    slot.load()

    assert is_seed(slot, OLD)


def test_a_slot_that_has_loaded_nothing_yet_loads_what_was_committed() -> None:
    slot = make_slot(loaded=False)

    slot.commit(NEW)
    slot.load()

    assert is_seed(slot, NEW)


@pytest.mark.parametrize("leave", [ModelSlot.free, ModelSlot.offload])
def test_what_is_freed_or_offloaded_holds_nothing_that_was_prepared(
    leave: Callable[[ModelSlot], None],
) -> None:
    slot = make_slot()
    slot.prepare(NEW)

    leave(slot)
    slot.load()

    assert is_seed(slot, OLD)


# What cannot take its place


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 65}, "vocab_size is 65, and must be 64 as before"),
        ({"hidden_size": 64}, "hidden_size is 64, and must be 32 as before"),
        ({"num_hidden_layers": 2}, "num_layers is 2, and must be 1 as before"),
        ({"num_key_value_heads": 2}, "num_kv_heads is 2, and must be 4 as before"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, and must be False"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "qk_norm is True, and must be False"),
        ({"max_position_embeddings": 64}, "its context is 64 tokens long, and must be 128"),
    ],
)
def test_a_model_of_another_shape_is_refused_by_name(
    tmp_path: Path, loaded: bool, changes: dict[str, Any], reason: str
) -> None:
    old = write_model(tmp_path / "old")
    slot = make_slot(old, loaded=loaded)
    new = write_model(tmp_path / "new", seed=2, **changes)

    with pytest.raises(WeightsError, match=f"{new.source}: {reason}"):
        slot.prepare(new)

    assert slot.weights == old
    slot.load()
    assert is_seed(slot, old)


def damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(7, 32)


def damage_presence(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def damage_kind(tensors: dict[str, torch.Tensor]) -> None:
    name = "lm_head.weight"
    tensors[name] = tensors[name].to(torch.int32)


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_shape, r"model.safetensors: tensor '.*up_proj.weight' has shape \(7, 32\)"),
        (damage_presence, "tensor 'model.norm.weight' of shape .* is missing"),
        (damage_kind, "model.safetensors: tensor 'lm_head.weight' is stored as I32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file_and_nothing_changes(
    tmp_path: Path, loaded: bool, damage: Callable[[dict[str, torch.Tensor]], None], reason: str
) -> None:
    old = write_model(tmp_path / "old")
    slot = make_slot(old, loaded=loaded)
    new = write_model(tmp_path / "new", seed=2)
    file = tmp_path / "new" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)

    with pytest.raises(WeightsError, match=reason):
        slot.prepare(new)
    if loaded:
        with pytest.raises(WeightsError, match=reason):
            slot.commit(new)

    assert slot.weights == old
    slot.load()
    assert is_seed(slot, old)


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    slot = make_slot(write_model(tmp_path / "old"))
    new = write_model(tmp_path / "new", seed=2)
    file = tmp_path / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(WeightsError, match=f"{file}: not a whole safetensors file"):
        slot.prepare(new)


def test_a_source_that_is_not_there_is_named() -> None:
    slot = make_slot()

    with pytest.raises(WeightsError, match=r"missing: no such file or folder"):
        slot.prepare(Weights(source="missing", version=1))


def test_files_may_go_once_their_weights_are_prepared(tmp_path: Path) -> None:
    slot = make_slot(write_model(tmp_path / "old"))
    new = write_model(tmp_path / "new", seed=2)
    expected = embedding(make_slot(new))
    slot.prepare(new)
    (tmp_path / "new" / "model.safetensors").write_bytes(b"gone")

    slot.commit(new)

    assert embedding(slot).equal(expected)


def test_weights_that_went_while_they_were_freed_are_missed_and_the_rest_stays(
    tmp_path: Path,
) -> None:
    old = write_model(tmp_path / "old")
    slot = make_slot(old)
    slot.free()
    file = tmp_path / "old" / "model.safetensors"
    kept = file.read_bytes()
    file.unlink()

    with pytest.raises(WeightsError, match="old"):
        slot.load()

    file.write_bytes(kept)
    slot.load()
    assert is_seed(slot, old)


# The runner


def make_runner(source: str = "random:tiny") -> ModelRunner:
    runner = ModelRunner(
        RunnerConfig(
            model=source, device="cpu", num_blocks=32, block_tokens=16, max_rows=4, threads=1
        )
    )
    runner.load()
    runner.allocate()
    return runner


def admit(row: int, prompt: list[int]) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=len(prompt),
        blocks=(row,),
        sampling=RowSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=100,
            min_tokens=0,
            stop_token_ids=(),
        ),
    )


def generate(runner: ModelRunner, row: int, num_steps: int = 6) -> list[int]:
    steps = [RunStep(step=0, admits=(admit(row, [1, 2, 3]),))]
    steps += [RunStep(step=step) for step in range(1, num_steps)]
    tokens = [unpack_ids(runner.execute(step).token_ids)[0] for step in steps]
    runner.drop([row])
    return tokens


def test_a_runner_computes_with_the_new_weights_and_says_so() -> None:
    runner = make_runner()
    old = generate(runner, 1)

    runner.prepare_weights(NEW)
    assert generate(runner, 2) == old
    runner.commit_weights(NEW)
    new = generate(runner, 3)

    assert old != new == generate(make_runner("random:tiny#2"), 1)
    assert runner.execute(RunStep(step=0, admits=(admit(4, [5]),))).weights_version == 1
    described = runner.describe()
    assert (described["model"], described["weights_version"]) == ("random:tiny#2", 1)


def test_rows_that_are_there_go_on_with_the_new_weights_and_the_old_keys() -> None:
    runner = make_runner()
    runner.execute(RunStep(step=0, admits=(admit(1, [1, 2, 3]),)))

    runner.commit_weights(NEW)
    done = runner.execute(RunStep(step=1))

    assert (done.rows, done.num_tokens, done.weights_version) == ((1,), 1, 1)


def test_weights_of_no_source_are_those_the_runner_was_made_with() -> None:
    runner = make_runner()
    old = generate(runner, 1)
    runner.commit_weights(NEW)

    runner.commit_weights(Weights(source="", version=0))

    assert generate(runner, 2) == old
    assert runner.describe()["model"] == "random:tiny"
