"""Hugging Face folders: saved by transformers, edited, damaged. Logits are in test_decoder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from callboard.gpu.loading import LoadedModel, ModelError, check_model, load_model, read_config
from callboard.gpu.loading.huggingface import SafetensorsCheckpoint
from callboard.gpu.models.config import LinearScaling, Llama3Scaling, YarnScaling

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def load(folder: Path) -> LoadedModel:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model of the Llama kind."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    return tmp_path


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` takes one out."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    kept = {key: value for key, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept))


def test_a_model_in_several_files_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")

    one, several = load(folder), load(sharded)

    assert len(list(sharded.glob("*.safetensors"))) > 2
    hidden = torch.randn(3, SHAPE["hidden_size"])
    assert several.weights_bytes == one.weights_bytes > 0
    assert torch.equal(several.decoder.logits(hidden), one.decoder.logits(hidden))


def test_nothing_of_the_files_stays_in_use(folder: Path) -> None:
    model = load(folder)
    hidden = torch.randn(3, SHAPE["hidden_size"])
    before = model.decoder.logits(hidden)

    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:  # in place, as a new version of the weights may come
        file.write(b"\0" * weights.stat().st_size)

    assert torch.equal(model.decoder.logits(hidden), before)


def test_half_precision_files_are_loaded_in_the_dtype_asked_for(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: w.bfloat16() for name, w in weights.items()}, folder / "model.safetensors")

    model = load(folder)

    norm = model.decoder._final_norm._weight
    assert norm.dtype == torch.float32
    assert torch.equal(norm, weights["model.norm.weight"].bfloat16().float())


def test_eos_ids_come_from_both_configurations_and_the_vocabulary_has_them(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=2, bos_token_id=1)
    edit_json(folder / "generation_config.json", eos_token_id=[7, 2, 500, -1])

    config = read_config(folder)

    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1


def test_a_model_may_name_no_eos_id(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=None, bos_token_id=...)
    (folder / "generation_config.json").unlink()

    config = read_config(folder)

    assert config.eos_token_ids == ()
    assert config.bos_token_id is None


def test_keys_left_out_have_the_defaults_of_transformers(folder: Path) -> None:
    edit_json(
        folder / "config.json",
        num_key_value_heads=...,
        head_dim=...,
        rope_parameters=...,
        rms_norm_eps=...,
        tie_word_embeddings=...,
    )

    decoder = read_config(folder).decoder

    assert (decoder.num_kv_heads, decoder.head_dim) == (4, 8)
    assert (decoder.rope_theta, decoder.rms_norm_eps) == (10000.0, 1e-6)
    assert not decoder.tie_word_embeddings


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, LinearScaling(factor=2.0)),
        ({"rope_type": "default"}, None),
        (
            {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 64,
            },
            Llama3Scaling(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        (
            {"type": "yarn", "factor": 4.0},
            YarnScaling(factor=4.0, original_max_position_embeddings=128),
        ),
    ],
)
def test_rope_scaling_is_read_as_older_configurations_write_it(
    rope: dict[str, Any], expected: object, folder: Path
) -> None:
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=500.0, rope_scaling=rope)

    decoder = read_config(folder).decoder

    assert decoder.rope_theta == 500.0
    assert decoder.rope_scaling == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "length"),
    [
        ("MistralForCausalLM", {"sliding_window": 40}, 40),
        ("MistralForCausalLM", {"sliding_window": None}, 128),
        ("MistralForCausalLM", {"max_position_embeddings": 9000}, 4096),
        ("Qwen2ForCausalLM", {"sliding_window": 40, "use_sliding_window": True}, 40),
        ("Qwen2ForCausalLM", {"sliding_window": 40, "use_sliding_window": False}, 128),
    ],
)
def test_the_length_is_cut_at_a_sliding_window_that_is_used(
    architecture: str, changes: dict[str, Any], length: int, folder: Path
) -> None:
    edit_json(folder / "config.json", architectures=[architecture], **changes)

    assert read_config(folder).decoder.max_sequence_length == length


def test_tensors_without_a_use_are_reported(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")

    assert load(folder).unused_tensors == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; .*LlamaFor"),
        ({"architectures": None}, "architecture '' is not supported"),
        ({"vocab_size": ...}, "missing required field `vocab_size`"),
        ({"hidden_size": "32"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_attention_heads": 0}, r">= 1 - at `\$.num_attention_heads`"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope parameters: Expected `float"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported; default"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            r"rope parameters: .*`\$.factor`",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "unknown field `mscale`",
        ),
    ],
)
def test_a_configuration_that_cannot_be_run_is_refused_with_the_reason(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)

    with pytest.raises(ModelError, match=message) as caught:
        read_config(folder)
    assert str(caught.value).count(str(folder / "config.json")) == 1


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{'not': json}")


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_weights(folder: Path) -> None:
    torch.save({"a": torch.ones(3)}, folder / "model.safetensors")


def name_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_a_shard_outside(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_config, r"config\.json: JSON is malformed"),
        (remove_config, r"config\.json: cannot be read: No such file"),
        (remove_weights, r"has neither model\.safetensors nor .* not read"),
        (cut_weights, r"model\.safetensors: not a whole safetensors file"),
        (pickle_weights, r"model\.safetensors: not a whole safetensors file"),
        (name_a_missing_shard, r"model-00001-of-00002\.safetensors: cannot be read"),
        (name_a_shard_outside, r"names the file '\.\./elsewhere\.safetensors', which is not in"),
        (damage_index, r"index\.json: Expected `object`, got `array`"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(
    damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    damage(folder)

    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"of shape \(48, 32\) is missing"),
        ("lm_head.weight", None, "'lm_head.weight' of shape"),
        (
            "model.layers.0.self_attn.k_proj.weight",
            torch.ones(32, 32),
            r"k_proj.weight' has shape \(32, 32\), but .* asks for \(16, 32\)",
        ),
        (
            "model.norm.weight",
            torch.ones(32, dtype=torch.int64),
            "'model.norm.weight' is stored as I64, which weights are not read from",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, replacement: torch.Tensor | None, message: str, folder: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    if replacement is not None:
        weights[name] = replacement
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ModelError, match=message):
        load(folder)


# Files that change while they are read


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def save_over(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"the beginning of")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)


def after_the_first_tensor(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    read_into = SafetensorsCheckpoint.read_into

    def read_and_change(checkpoint: SafetensorsCheckpoint, name: str, weight: torch.Tensor) -> None:
        monkeypatch.undo()
        read_into(checkpoint, name, weight)
        change()

    monkeypatch.setattr(SafetensorsCheckpoint, "read_into", read_and_change)


def open_files(folder: Path) -> list[str]:
    """Which files of a folder this process has open."""
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    return [target for target in targets if target.startswith(f"{folder}/")]


@pytest.mark.parametrize("change", [cut, save_over, overwrite])
def test_a_file_that_changes_while_it_is_read_is_refused_with_the_tensor(
    change: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    os.utime(path, (0, 0))  # the clock of files is too coarse to tell a new one's last changes
    after_the_first_tensor(monkeypatch, lambda: change(path))

    with pytest.raises(ModelError, match=f"{path}: tensor 'model.*: the file changed while it was"):
        load(folder)
    assert open_files(folder) == []


@pytest.mark.parametrize("part", [1, 2, 3])
def test_one_file_of_several_that_changes_is_named(
    part: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    sharded = folder / "sharded"
    model.save_pretrained(sharded, max_shard_size="20KB")
    path = sorted(sharded.glob("*.safetensors"))[part]
    after_the_first_tensor(monkeypatch, lambda: cut(path))

    with pytest.raises(ModelError, match=f"{path}: tensor '.*: the file changed"):
        load(sharded)
    assert open_files(sharded) == []


def test_a_file_renamed_over_the_one_that_is_read_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, new = folder / "model.safetensors", folder / "new.safetensors"
    hidden = torch.randn(3, SHAPE["hidden_size"])
    expected = load(folder).decoder.logits(hidden)
    save_file({name: torch.ones_like(w) for name, w in load_file(path).items()}, new)
    after_the_first_tensor(monkeypatch, lambda: new.rename(path))

    model = load(folder)

    assert torch.equal(model.decoder.logits(hidden), expected)
    assert not torch.equal(load(folder).decoder.logits(hidden), expected)


@pytest.mark.parametrize("use", [load, check_model, read_config])
def test_no_file_is_left_open(use: Callable[[Path], object], folder: Path) -> None:
    use(folder)

    assert open_files(folder) == []


CUT_IN_A_THREAD = """
import os, sys, threading
import torch
from callboard.gpu.loading import ModelError, load_model
from callboard.gpu.loading.huggingface import SafetensorsCheckpoint

folder = sys.argv[1]
begun, done = threading.Event(), threading.Event()
read_into = SafetensorsCheckpoint.read_into

def read_and_wait(checkpoint, name, weight):
    read_into(checkpoint, name, weight)
    begun.set()
    done.wait()

def cut():
    begun.wait()
    os.truncate(f"{folder}/model.safetensors", 4096)
    done.set()

SafetensorsCheckpoint.read_into = read_and_wait
threading.Thread(target=cut).start()
try:
    load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
except ModelError as error:
    print(error)
    sys.exit(3)
"""


def test_a_file_cut_short_by_somebody_else_does_not_kill_the_process(folder: Path) -> None:
    """It did, by SIGBUS, when files were mapped into memory."""
    ended = subprocess.run(
        [sys.executable, "-c", CUT_IN_A_THREAD, folder],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 3, ended.stderr
    assert "the file changed while it was read" in ended.stdout
