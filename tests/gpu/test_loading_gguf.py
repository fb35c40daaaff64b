"""GGUF files: written here by the gguf package, whole and damaged, and read by our loader."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from callboard.gpu.attention.base import build_metadata
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, ModelError, check_model, load_model, read_config
from callboard.gpu.loading.gguf import GgufCheckpoint, GgufSource
from callboard.gpu.loading.gguf_file import GgufFile, read_gguf
from callboard.gpu.loading.weight_file import WeightFile
from callboard.gpu.models.config import FrequencyFactors, LinearScaling

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Edit = Callable[[dict[str, Any], dict[str, np.ndarray[Any, Any]]], None]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Bring the halves of each head together in pairs, as files of the llama architecture do."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(model: Any, *, permuted: bool) -> dict[str, np.ndarray[Any, Any]]:
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if permuted and ("q_proj" in name or "k_proj" in name):
            values = permute(values, 4 if "q_proj" in name else 2)
        tensors[gguf_name(name)] = values
    return tensors


def metadata_of(architecture: str) -> dict[str, Any]:
    return {
        f"{architecture}.block_count": 2,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 96,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": 16,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["a", "b", "ü"],
    }


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray[Any, Any]],
    encoding: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
            case _:
                writer.add_uint32(key, value)
    for name, values in tensors.items():
        if values.ndim == 2 and values.dtype == np.float32:
            packed = gguf.quants.quantize(values, encoding)
            writer.add_tensor(name, packed, raw_dtype=encoding)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_model(family: str, **options: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def our_logits(model: LoadedModel, tokens: Tensor) -> Tensor:
    config = model.config.decoder
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=1,
        block_tokens=len(tokens),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    metadata = build_metadata([len(tokens)], [len(tokens)], [[0]], block_tokens=len(tokens))
    with torch.inference_mode():
        return model.decoder.logits(model.decoder.forward(tokens, metadata, cache))


def header_of(path: Path) -> GgufFile:
    with WeightFile(path) as file:
        return read_gguf(file)


def load(path: Path) -> LoadedModel:
    return load_model(path, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model("Llama")


@pytest.fixture
def write(tmp_path: Path, llama: Any) -> Callable[..., Path]:
    """Write the llama model after an edit of its metadata and tensors."""

    def write_edited(edit: Edit | None = None, architecture: str = "llama") -> Path:
        metadata, tensors = metadata_of(architecture), tensors_of(llama, permuted=True)
        if edit is not None:
            edit(metadata, tensors)
        return write_gguf(tmp_path / "model.gguf", architecture, metadata, tensors)

    return write_edited


@pytest.mark.parametrize(
    ("architecture", "family", "options"),
    [
        ("llama", "Llama", {}),
        ("llama", "Llama", {"tie_word_embeddings": True}),
        ("llama", "Llama", {"attention_bias": True}),
        ("qwen2", "Qwen2", {}),
        ("qwen3", "Qwen3", {}),
    ],
)
def test_a_file_gives_the_logits_of_the_model_it_was_made_from(
    architecture: str, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_model(family, **options)
    tensors = tensors_of(reference, permuted=architecture == "llama")
    path = write_gguf(tmp_path / "m.gguf", architecture, metadata_of(architecture), tensors)
    tokens = torch.arange(0, 90, 3)

    model = load(path)

    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=0, atol=1e-4)
    assert model.unused_tensors == ()
    assert (model.config.format, model.config.architecture) == ("gguf", architecture)


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_become_what_the_gguf_package_makes_of_them(
    encoding: str, llama: Any, tmp_path: Path
) -> None:
    kind = gguf.GGMLQuantizationType[encoding]
    tensors = tensors_of(llama, permuted=True)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        if values.ndim == 2
        else values
        for name, values in tensors.items()
    }
    packed = write_gguf(tmp_path / "q.gguf", "llama", metadata_of("llama"), tensors, kind)
    plain = write_gguf(tmp_path / "f.gguf", "llama", metadata_of("llama"), rounded)
    tokens = torch.arange(20)

    torch.testing.assert_close(
        our_logits(load(packed), tokens), our_logits(load(plain), tokens), rtol=0, atol=0
    )


def test_a_file_of_llama3_carries_its_rope_factors_as_a_tensor(
    write: Callable[..., Path],
) -> None:
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]

    def add_factors(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)

    model = load(write(add_factors))

    assert model.config.decoder.rope_scaling == FrequencyFactors(factors=tuple(factors))
    assert model.unused_tensors == ()
    frequencies = model.decoder._rotary._inverse_frequencies
    torch.testing.assert_close(
        frequencies, 10000.0 ** (-torch.arange(8) / 8) / torch.tensor(factors)
    )


def test_linear_rope_scaling_is_read(write: Callable[..., Path]) -> None:
    def scale(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["llama.rope.scaling.type"] = "linear"
        metadata["llama.rope.scaling.factor"] = 4.0

    assert read_config(write(scale)).decoder.rope_scaling == LinearScaling(factor=4.0)


def test_every_id_that_ends_a_text_or_a_turn_ends_a_generation(
    write: Callable[..., Path],
) -> None:
    def add_ids(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.eot_token_id"] = 7
        metadata["tokenizer.ggml.eom_token_id"] = 2**32 - 1  # some files write -1 for none

    config = read_config(write(add_ids))

    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1


def test_the_length_is_cut_at_a_sliding_window(write: Callable[..., Path]) -> None:
    def slide(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["llama.attention.sliding_window"] = 50

    assert read_config(write(slide)).decoder.max_sequence_length == 50


def test_tensors_without_a_use_are_reported(write: Callable[..., Path]) -> None:
    def add_extra(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_rot_embd.weight"] = np.ones(8, dtype=np.float32)

    assert load(write(add_extra)).unused_tensors == ("blk.0.attn_rot_embd.weight",)


def drop(name: str) -> Edit:
    return lambda metadata, tensors: tensors.__delitem__(name)


def put(name: str, values: np.ndarray[Any, Any]) -> Edit:
    return lambda metadata, tensors: tensors.update({name: values})


def say(key: str, value: Any) -> Edit:
    return lambda metadata, tensors: metadata.update({key: value})


def forget(key: str) -> Edit:
    return lambda metadata, tensors: metadata.__delitem__(key)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("blk.1.ffn_up.weight"), r"'blk.1.ffn_up.weight' of shape \(96, 64\) is missing"),
        (drop("token_embd.weight"), "'token_embd.weight' is missing"),
        (drop("output_norm.weight"), "'output_norm.weight' of shape"),
        (
            put("blk.0.attn_k.weight", np.ones((64, 64), np.float32)),
            r"'blk.0.attn_k.weight' has shape \(64, 64\), but .* asks for \(32, 64\)",
        ),
        (
            put("blk.0.attn_norm.weight", np.ones(64, np.int32)),
            "'blk.0.attn_norm.weight' is stored as I32, which weights are not read from",
        ),
        (
            put("blk.0.attn_norm.weight", np.ones(64, np.float64)),
            "'blk.0.attn_norm.weight' is stored as F64",
        ),
        (put("rope_freqs.weight", np.ones(3, np.float32)), r"'rope_freqs.weight' has shape \(3,\)"),
        (forget("llama.block_count"), r"metadata llama.\*: .*missing.*`block_count`"),
        (say("llama.attention.head_count", 0), "attention.head_count"),
        (say("llama.attention.head_count", "four"), "Expected `int`, got `str`"),
        (say("llama.attention.head_count_kv", [2, 2]), "attention.head_count_kv"),
        (
            say("llama.attention.head_count_kv", 3),
            "num_heads 4 is not a multiple of num_kv_heads 3",
        ),
        (say("llama.rope.dimension_count", 8), "rope.dimension_count is 8; .* the head size, 16"),
        (say("llama.rope.scaling.type", "yarn"), "rope.scaling.type 'yarn' is not supported"),
        (say("llama.expert_count", 8), "mixtures of experts are not supported"),
        (say("split.count", 3), "part of a split model"),
        (say("general.alignment", 0), "general.alignment is 0"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_the_fault(
    edit: Edit, message: str, write: Callable[..., Path]
) -> None:
    path = write(edit)

    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert str(caught.value).count(str(path)) == 1


def test_an_unknown_architecture_is_named_with_the_known_ones(write: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"'falcon' is not supported.*llama, qwen2, qwen3"):
        read_config(write(architecture="falcon"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip archive", b"\x80\x04 a pickle"])
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match="not a GGUF file"):
        read_config(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))

    with pytest.raises(ModelError, match="GGUF version 1 is not one of"):
        read_config(path)


def header(num_values: int, values: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, num_values) + values


def value(key: bytes, kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + content


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (header(1), "cut off or damaged"),
        (header(2**60), "cut off or damaged"),
        (header(1, struct.pack("<Q", 2**63)), "cut off or damaged"),
        (header(1, value(b"k", 8, struct.pack("<Q", 2**40) + b"short")), "cut off or damaged"),
        (header(1, value(b"k", 9, struct.pack("<IQ", 4, 2**60))), "cut off or damaged"),
        (header(1, value(b"k", 9, struct.pack("<IQ", 8, 2**60))), "cut off or damaged"),
        (header(1, value(b"k", 9, struct.pack("<IQ", 9, 1) + b"\0" * 9)), "unknown value type 9"),
        (header(1, value(b"k", 99, b"")), "unknown value type 99"),
        (header(1, value(b"\xff", 4, b"\0\0\0\0")), "string at byte 32 is not UTF-8"),
    ],
)
def test_a_damaged_header_is_refused_by_name_and_no_length_in_it_is_trusted(
    content: bytes, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=rf"bad\.gguf: .*{fault}"):
        header_of(path)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))

    with pytest.raises(ModelError, match=r"no model: it has no general\.architecture"):
        read_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf: no such file or folder"):
        read_config(tmp_path / "nothing.gguf")


def test_a_header_cut_off_anywhere_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    whole = write()
    end_of_header = min(tensor.offset for tensor in header_of(whole).tensors.values())
    path = tmp_path / "cut.gguf"

    for length in range(4, end_of_header - 32, 29):
        path.write_bytes(whole.read_bytes()[:length])
        with pytest.raises(ModelError, match=r"cut off|cannot be read"):
            header_of(path)


def test_tensors_cut_off_are_refused_before_any_is_read(write: Callable[..., Path]) -> None:
    path = write()
    last = max(header_of(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[: last.offset + 8])

    with pytest.raises(ModelError, match=f"cut off: tensor {last.name!r} ends beyond the file"):
        load(path)


def test_a_header_with_a_byte_changed_is_read_or_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    whole = write()
    header = min(tensor.offset for tensor in header_of(whole).tensors.values())
    content = whole.read_bytes()
    generator = np.random.default_rng(0)
    path = tmp_path / "changed.gguf"
    refused = 0

    for position in generator.integers(0, header, 150):
        changed = bytearray(content)
        changed[position] ^= int(generator.integers(1, 256))
        path.write_bytes(changed)
        try:
            load(path)
        except ModelError:
            refused += 1

    assert refused > 75


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("llama.feed_forward_length", r"asks for \(1073741824, 64\)"),
        ("llama.block_count", "'blk.2.attn_norm.weight' of shape"),
    ],
)
def test_a_model_said_to_be_enormous_is_refused_without_being_allocated(
    key: str, message: str, write: Callable[..., Path]
) -> None:
    path = write(say(key, 2**30))

    with pytest.raises(ModelError, match=message):
        load(path)


# Files that change while they are read


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def save_over(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"GGUF")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)


def is_open(path: Path) -> bool:
    """Whether this process has a file open."""
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    return str(path) in [os.readlink(link) for link in links if link.is_symlink()]


@pytest.mark.parametrize("change", [cut, save_over, overwrite])
def test_a_file_that_changes_while_it_is_read_is_refused_with_the_tensor(
    change: Callable[[Path], None], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    os.utime(path, (0, 0))  # the clock of files is too coarse to tell a new one's last changes
    read_into = GgufCheckpoint.read_into

    def read_and_change(checkpoint: GgufCheckpoint, name: str, weight: Tensor) -> None:
        monkeypatch.undo()
        read_into(checkpoint, name, weight)
        change(path)

    monkeypatch.setattr(GgufCheckpoint, "read_into", read_and_change)

    with pytest.raises(ModelError, match=f"{path}: tensor 'blk.*: the file changed while it was"):
        load(path)
    assert not is_open(path)


def test_a_file_renamed_over_one_whose_header_was_read_changes_nothing(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["output.weight"] = tensors["output.weight"] / 2

    path = write()
    path = path.rename(path.with_name("old.gguf"))
    new = write(shrink)
    tokens = torch.arange(20)
    expected = our_logits(load(path), tokens)
    open_checkpoint = GgufSource.open

    def rename_and_open(source: GgufSource) -> GgufCheckpoint:
        new.rename(path)
        return open_checkpoint(source)

    monkeypatch.setattr(GgufSource, "open", rename_and_open)
    model = load(path)
    monkeypatch.undo()

    torch.testing.assert_close(our_logits(model, tokens), expected, rtol=0, atol=0)
    torch.testing.assert_close(our_logits(load(path), tokens), expected / 2, rtol=0, atol=0)


@pytest.mark.parametrize("use", [load, check_model, read_config])
def test_no_file_is_left_open(use: Callable[[Path], object], write: Callable[..., Path]) -> None:
    path = write()

    use(path)

    assert not is_open(path)


def test_a_file_that_is_refused_is_not_left_open(write: Callable[..., Path]) -> None:
    path = write(forget("llama.block_count"))

    with pytest.raises(ModelError) as caught:
        load(path)

    assert not is_open(path)
    assert "block_count" in str(caught.value)
