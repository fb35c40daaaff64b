"""Tokenizers of GGUF files and Hugging Face folders: same ids as the model was trained with."""

import json
import logging
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from callboard.gpu.loading.chat_template import ChatTemplateError
from callboard.gpu.loading.tokenizer import TextTokenizer, TokenizerError, load_tokenizer
from callboard.gpu.text import TextStream

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, "he", "12", "<tool>"]
MERGES = ["h e", "1 2"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = "smollm",
    merges: list[str] = MERGES,
    add_bos: bool | None = None,
    **more: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in more.items():
        getattr(writer, key)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_folder(folder: Path, *, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """Write tokenizer.json and, of each keyword, KEY.json."""
    (tokenizer or byte_bpe()).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_bpe() -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(TOKENS[:-1])}
    merges = [("h", "e"), ("1", "2")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    return tokenizer


def texts(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


# GGUF


def test_a_gguf_file_gives_the_tokenizer_it_describes(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "m.gguf",
        add_bos_token_id=1,
        add_eot_token_id=0,
        add_chat_template=TEMPLATE,
    )

    tokenizer = load_tokenizer(str(file))

    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.chat_template == TEMPLATE
    assert texts(tokenizer, tokenizer.encode("<|im_start|>hehe<tool>é")) == [
        *("<|im_start|>", "he", "he", "<tool>"),
        *("\ufffd", "\ufffd"),
    ]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "2", " ", "1", "2"]),
        ("starcoder", ["1", "2", "2", " ", "1", "2"]),
        ("gpt-2", ["12", "2", " ", "12"]),
        ("llama-bpe", ["12", "2", " ", "12"]),
        ("qwen2", ["1", "2", "2", " ", "1", "2"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre))

    assert texts(tokenizer, tokenizer.encode("122 12")) == expected


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("smollm", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_gguf_file_decides_about_the_beginning_of_sequence(
    tmp_path: Path, pre: str, says: bool | None, adds: bool
) -> None:
    file = write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=says, add_bos_token_id=1)

    ids = load_tokenizer(file).encode("he")

    assert (ids[0] == 1) is adds


@pytest.mark.parametrize(
    ("model", "pre", "named"),
    [("llama", "default", "'llama'"), ("gpt2", "tekken", "'tekken'"), ("gpt2", None, "''")],
)
def test_a_gguf_tokenizer_of_another_kind_is_refused_by_name(
    tmp_path: Path, model: str, pre: str | None, named: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model=model, pre=pre)

    with pytest.raises(TokenizerError, match=rf"m\.gguf.*{named}"):
        load_tokenizer(file)


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", merges=["h nothing"])

    with pytest.raises(TokenizerError, match=r"m\.gguf.*nothing"):
        load_tokenizer(file)


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF\3\0\0\0 cut off"])
def test_a_foreign_or_damaged_gguf_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)

    with pytest.raises(TokenizerError, match=r"bad\.gguf: (not a GGUF file|cut off or damaged)"):
        load_tokenizer(file)


def test_a_gguf_file_without_a_tokenizer_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))

    with pytest.raises(TokenizerError, match=r"m\.gguf.*tokenizer\.ggml\.tokens"):
        load_tokenizer(file)


# Hugging Face folders


def test_a_folder_gives_the_tokenizer_it_describes(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}},
        special_tokens_map={"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    )

    tokenizer = load_tokenizer(folder)

    assert tokenizer.vocab_size == len(TOKENS) - 1
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_end|>") == [2]


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, {2}),
        ({"eos_token_id": 0}, {}, {0, 2}),
        ({"eos_token_id": None}, {"eos_token_id": [0, 1]}, {0, 1, 2}),
        ({"text_config": {"eos_token_id": 1}}, {}, {1, 2}),
    ],
)
def test_ends_of_sequence_are_the_union_of_what_the_files_say(
    tmp_path: Path, config: Any, generation_config: Any, expected: set[int]
) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config={"eos_token": "<|im_end|>"},
        config=config,
        generation_config=generation_config,
    )

    assert load_tokenizer(folder).eos_token_ids == expected


def test_a_model_without_an_end_of_sequence_is_loaded_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))

    assert tokenizer.eos_token_ids == frozenset()
    assert caplog.record_tuples == [("callboard", logging.WARNING, "no_eos_token")]


def test_an_end_of_sequence_outside_the_vocabulary_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such an id once masked a token of the next row."""
    tokenizer = load_tokenizer(write_folder(tmp_path, config={"eos_token_id": [0, 99_999, -1]}))

    assert tokenizer.eos_token_ids == {0}
    assert caplog.record_tuples == [("callboard", logging.WARNING, "eos_outside_vocabulary")]
    assert caplog.records[0].__dict__["ids"] == [-1, 99_999]


def test_a_special_token_the_vocabulary_lacks_gets_no_new_id(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, tokenizer_config={"bos_token": "<new>"}))

    assert tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == len(TOKENS) - 1


def test_tokens_only_the_config_knows_are_added(tmp_path: Path) -> None:
    added = {str(len(TOKENS) - 1): {"content": "<tool>", "special": False, "normalized": False}}
    tokenizer = load_tokenizer(
        write_folder(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    )

    assert tokenizer.encode("<tool>") == [len(TOKENS) - 1]
    assert len(TOKENS) - 1 not in tokenizer.special_token_ids


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)

    assert len(load_tokenizer(write_folder(tmp_path, tokenizer=tokenizer)).encode("abcd")) == 4


def test_the_chat_template_comes_from_its_own_file_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": "from the config"})
    assert load_tokenizer(folder).chat_template == "from the config"

    (folder / "chat_template.jinja").write_text("from the file")

    assert load_tokenizer(folder).chat_template == "from the file"


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": several})

    assert load_tokenizer(folder).chat_template == "plain"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {"type": "Unheard"}}'),
        ("tokenizer_config.json", "{'a'}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [true]}'),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    folder = write_folder(tmp_path)
    (folder / file).write_text(content)

    with pytest.raises(TokenizerError, match=file.replace(".", r"\.")):
        load_tokenizer(folder)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    tokenizer.decoder = decoders.WordPiece()

    with pytest.raises(TokenizerError, match="WordPiece"):
        load_tokenizer(write_folder(tmp_path, tokenizer=tokenizer))


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


# Encoding and decoding


def wrapped(tokenizer: Tokenizer, **special_tokens: str) -> TextTokenizer:
    return TextTokenizer(
        tokenizer, name="test", special_tokens={"eos_token": "<|endoftext|>", **special_tokens}
    )


def adding_bos() -> Tokenizer:
    tokenizer = byte_bpe()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def test_add_bos_gives_exactly_one() -> None:
    """NVIDIA/Megatron-LM commit 18f8b2e5."""
    for tokenizer in (byte_bpe(), adding_bos()):
        text = wrapped(tokenizer, bos_token="<|im_start|>")
        (he,) = text.encode("he", add_bos=False)

        assert text.encode("he", add_bos=True) == [1, he]
        assert text.encode("<|im_start|>he", add_bos=True) == [1, he]
        assert text.encode("<|im_start|>he", add_bos=False) == [1, he]
        assert text.encode("<|im_start|>he") == [1, he]


def test_without_a_wish_the_files_decide_about_bos() -> None:
    bos = {"bos_token": "<|im_start|>"}

    assert wrapped(byte_bpe(), **bos).encode("he")[0] != 1
    assert wrapped(adding_bos(), **bos).encode("he")[0] == 1


def test_the_config_overrides_what_tokenizer_json_says_about_bos(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "add_bos_token": False}
    folder = write_folder(tmp_path, tokenizer=adding_bos(), tokenizer_config=config)
    assert load_tokenizer(folder).encode("he")[0] != 1

    write_folder(folder, tokenizer_config=config | {"add_bos_token": True})

    assert load_tokenizer(folder).encode("he")[0] == 1


def test_add_bos_without_such_a_token_is_refused() -> None:
    """NVIDIA/Megatron-LM commit 18f8b2e5."""
    with pytest.raises(TokenizerError, match="no beginning-of-sequence token"):
        wrapped(byte_bpe()).encode("he", add_bos=True)


def test_control_tokens_in_plain_text_can_be_kept_plain() -> None:
    tokenizer = wrapped(byte_bpe())

    plain = tokenizer.encode("<|im_start|>he", parse_special=False)

    assert 1 not in plain
    assert tokenizer.decode(plain, skip_special_tokens=True) == "<|im_start|>he"
    assert tokenizer.encode("<|im_start|>") == [1]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        wrapped(byte_bpe()).encode("a\ud800")


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = wrapped(byte_bpe())
    (he,) = tokenizer.encode("he")

    assert tokenizer.decode([he, 10**6, -1, 2**40], skip_special_tokens=False) == "he"


def test_any_text_survives_the_way_there_and_back() -> None:
    tokenizer = wrapped(byte_bpe())
    text = " \t\r\n\x00 naïve 日本語 🙂👩‍👩‍👧 नमस्ते e\u0301 \ufeff \ufffd"

    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("") == []


# Chats


def test_a_chat_is_rendered_with_the_models_special_tokens(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", add_bos_token_id=1, add_chat_template=TEMPLATE)

    prompt = load_tokenizer(file).render_chat([{"role": "user", "content": "he"}])

    assert prompt == "<|im_start|>user: he\n"


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="test has no chat template"):
        wrapped(byte_bpe()).render_chat([{"role": "user", "content": "he"}])


def test_a_broken_chat_template_does_not_stop_plain_prompts(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", add_chat_template="{% broken")
    tokenizer = load_tokenizer(file)

    assert tokenizer.encode("he")
    with pytest.raises(ChatTemplateError, match="does not compile"):
        tokenizer.render_chat([{"role": "user", "content": "he"}])


# The real model


def test_the_real_model_gives_the_ids_and_texts_of_the_reference(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    tokenizer = load_tokenizer(default_model)
    for record in reference.values():
        stream = TextStream(tokenizer, skip_special_tokens=False)

        assert tokenizer.encode(record.prompt) == record.prompt_ids
        pieces = [stream.push(token_id) for token_id in record.output_ids]
        assert "".join(pieces) + stream.finish() == record.output_text


def test_the_real_model_renders_the_chat_of_the_reference(
    default_model: Path, reference: Mapping[str, Any]
) -> None:
    tokenizer = load_tokenizer(default_model)

    prompt = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])

    assert prompt == reference["chat"].prompt
    assert tokenizer.encode(prompt) == reference["chat"].prompt_ids


def test_the_real_model_is_described_as_its_metadata_says_and_soon(default_model: Path) -> None:
    start = time.process_time()

    tokenizer = load_tokenizer(default_model)

    assert time.process_time() - start < 1.5
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert len(tokenizer.special_token_ids) == 17


def test_loading_a_tokenizer_does_not_import_torch() -> None:
    program = "import sys, callboard.gpu.loading.tokenizer; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
