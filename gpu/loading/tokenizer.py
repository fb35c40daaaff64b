"""Tokenizers from a Hugging Face folder or a GGUF file: text to token ids, and what ids stand for.

No tensor is read and torch is not imported: a process that only handles text starts fast.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from callboard.gpu.loading.chat_template import ChatTemplate, ChatTemplateError
from callboard.gpu.loading.errors import ModelError
from callboard.gpu.loading.gguf_file import read_gguf
from callboard.gpu.loading.weight_file import WeightFile
from callboard.gpu.text import token_decoder
from callboard.logs import get_logger

log = get_logger()


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot do what it is asked; the message names the file."""


class TextTokenizer:
    """One model's tokenizer, its special tokens and its chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`; `name` stands in error messages.

        `special_tokens` maps "bos_token", "eos_token" and so on to their text, as chat templates
        know them. Raises TokenizerError for a decoder that `token_decoder` does not know.
        """
        self.name = name
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        decoder = tokenizer.decoder
        try:
            self._decoder = token_decoder(decoder and json.loads(decoder.__getstate__()))
        except ValueError as error:
            raise TokenizerError(f"{name}: {error}") from error
        self.strips_leading_space = self._decoder.strips_leading_space
        self.vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_ids = self._known_ids(eos_token_ids, self._special_id("eos_token"))
        self._bytes: dict[int, bytes] = {}

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        `add_bos` None does what the tokenizer's files say; a text that starts with the
        beginning-of-sequence token never gets a second one. With `parse_special` False, what looks
        like a control token is text: use it for text that must not command the model.
        """
        tokenizer = self._tokenizer if parse_special else self._plain_tokenizer
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=add_bos is None).ids
        except TypeError as error:
            raise TokenizerError(f"{self.name}: the text is not valid Unicode: {error}") from error
        if add_bos:
            ids.insert(0, self._required_bos())
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD."""
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        raw = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to a text; nothing for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if not 0 <= token_id < self.vocab_size:
            return b""
        token = self._tokenizer.id_to_token(token_id)
        self._bytes[token_id] = b"" if token is None else self._decoder.to_bytes(token)
        return self._bytes[token_id]

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation by the model's own template.

        It is encoded with control tokens parsed. Raises ChatTemplateError when the model has no
        template, the messages are malformed, or the template refuses them.
        """
        return self._compiled_template.render(messages, add_generation_prompt=add_generation_prompt)

    @property
    def longest_token(self) -> int:
        """The most characters of text that one token can stand for."""
        return max(map(len, self._tokenizer.get_vocab()), default=0)

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.name} has no chat template: send a plain prompt")
        return ChatTemplate(self.chat_template, special_tokens=self._special_tokens)

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """A copy that reads special tokens as text: to switch the shared one is not thread-safe."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    def _special_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _known_ids(self, claimed: Iterable[int], eos_token_id: int | None) -> frozenset[int]:
        ids = {*claimed} if eos_token_id is None else {*claimed, eos_token_id}
        known = frozenset(i for i in ids if 0 <= i < self.vocab_size)
        if known != ids:
            log.warning("eos_outside_vocabulary", tokenizer=self.name, ids=sorted(ids - known))
        if not known:
            log.warning("no_eos_token", tokenizer=self.name, ends_by="max_tokens")
        return known

    def _required_bos(self) -> int:
        if self.bos_token_id is None:
            raise TokenizerError(
                f"{self.name} has no beginning-of-sequence token: leave add_bos out"
            )
        return self.bos_token_id


def load_tokenizer(source: str | Path) -> TextTokenizer:
    """Load the tokenizer of a model: a Hugging Face folder or a GGUF file.

    Raises TokenizerError naming the file when there is none or it cannot be understood.
    """
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return _load_gguf(path)
    raise TokenizerError(f"{path}: no such folder or .gguf file")


# A Hugging Face folder


def _load_folder(folder: Path) -> TextTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{file}: no such file (slow tokenizers are not supported)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself, whatever is wrong
        raise TokenizerError(f"{file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    try:
        _add_tokens(tokenizer, config, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is malformed: {error!r}"
        ) from error
    _set_add_bos(tokenizer, config.get("add_bos_token"), special_tokens.get("bos_token"))
    return TextTokenizer(
        tokenizer,
        name=str(folder),
        special_tokens=special_tokens,
        eos_token_ids=[
            *_eos_ids(folder / "config.json"),
            *_eos_ids(folder / "generation_config.json"),
        ],
        chat_template=_chat_template(folder, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Read an object; a file that is not there is an empty one."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: an object is expected, not {type(content).__name__}")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return role to text of entries such as "bos_token"; a token is a string or an object."""
    tokens = {}
    for role, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            tokens[role] = text
    return tokens


def _add_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add what tokenizer_config.json alone knows: further tokens, and which ones are special."""
    entries = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if tokenizer.token_to_id(entry["content"]) is None:
            tokenizer.add_tokens([AddedToken(**entry)])
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in special_tokens.values():
        token = added.get(text, AddedToken(text, normalized=False))
        # One that the vocabulary lacks would get an id that the model has no embedding for.
        if not token.special and tokenizer.token_to_id(text) is not None:
            token.special = True
            tokenizer.add_special_tokens([token])


def _set_add_bos(tokenizer: Tokenizer, add_bos: object, bos_token: str | None) -> None:
    """Let encode add the beginning-of-sequence token or not; None leaves it to tokenizer.json."""
    if not isinstance(add_bos, bool):
        return
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    if add_bos and bos_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos_token, "$A"], special_tokens=[(bos_token, bos_id)]
        )
    elif not add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=["$A"])


def _eos_ids(file: Path) -> list[int]:
    """Return the end-of-sequence ids of a config, which may name none, one or several."""
    config = _read_json(file)
    ids = config.get("eos_token_id")
    if ids is None:
        ids = (config.get("text_config") or {}).get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise TokenizerError(f"{file}: eos_token_id is {ids}, and must be ids")
    return ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template


# A GGUF file

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that make an added token."""

_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2_splits(*, single_digits: bool) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if not single_digits:
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _gpt4_splits(*, digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GPT4_SPLIT % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {
    "gpt-2": partial(_gpt2_splits, single_digits=False),
    "smollm": partial(_gpt2_splits, single_digits=True),
    "starcoder": partial(_gpt2_splits, single_digits=True),
    "llama-bpe": partial(_gpt4_splits, digits="{1,3}"),
    "qwen2": partial(_gpt4_splits, digits=""),
}
"""How byte-level BPE cuts a text into words first, by the name in tokenizer.ggml.pre."""


def _load_gguf(file: Path) -> TextTokenizer:
    try:
        with WeightFile(file) as opened:
            metadata = read_gguf(opened).metadata
        return _from_metadata(file, metadata)
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    except KeyError as error:
        raise TokenizerError(f"{file}: its metadata has no {error.args[0]}") from error


def _from_metadata(file: Path, metadata: Mapping[str, Any]) -> TextTokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special_tokens = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            special_tokens[f"{role}_token"] = tokens[token_id]
    tokenizer = _byte_level_bpe(file, metadata)
    # The one kind here that adds a beginning-of-sequence token when the file does not say.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", _pre(metadata) == "llama-bpe")
    _set_add_bos(tokenizer, add_bos, special_tokens.get("bos_token"))
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return TextTokenizer(
        tokenizer,
        name=str(file),
        special_tokens=special_tokens,
        eos_token_ids=[token_id for token_id in ends if token_id is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(file: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    model, pre = metadata["tokenizer.ggml.model"], _pre(metadata)
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{file}: its tokenizer is of kind {model!r} with pre-tokenizer {pre!r}; supported is "
            f"'gpt2' with {', '.join(_PRE_TOKENIZERS)}: load the model from its Hugging Face folder"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever the merges make of it.
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises Exception itself, whatever is wrong
        raise TokenizerError(f"{file}: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    for text, kind in zip(tokens, kinds, strict=False):
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(text, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, normalized=False)])
    return tokenizer


def _pre(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", ""))
