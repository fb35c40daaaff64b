"""Token ids back to text, one token at a time, up to a stop string.

A token is bytes, not characters: a character may take several tokens, and bytes that are not UTF-8
come out as U+FFFD. Text is therefore decoded by one incremental UTF-8 decoder over the bytes of the
tokens. It holds back at most three bytes, costs the same for every token, and joined up gives the
text of all ids decoded at once.

Knows nothing of models and requests. The same ids give the same pieces of text, always; so a
stream is continued elsewhere by feeding its ids again and skipping the characters delivered.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TokenBytes(Protocol):
    """What a text stream asks of a tokenizer."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens, which are left out of the text on request."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space is dropped at the very start of a text: see `continue_from`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to a text; nothing for an id outside the vocabulary."""


class TextStream:
    """The text of one request as its tokens come, held back only as far as it could yet change.

    Held back are half characters, and an end of the text that may be the start of a stop string.
    A stop string counts wherever it ends, also inside a token or across several: the text is cut
    before it (after it with `include_stop`), while the ids keep the token in which it ended. Of
    several, the one that ends first counts, and of those that end together the longest. One that
    ends before token number `min_tokens` is text like any other.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._stop_starts = frozenset(text[0] for text in stop)
        self._include_stop = include_stop
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.strips_leading_space
        self._held = ""
        self.num_tokens = 0
        """Tokens taken, up to and including the one in which a stop string ended."""
        self.num_characters = 0
        """Characters given out so far."""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def continue_from(self, token_id: int) -> None:
        """Let the text go on behind that of a prompt, which ends with this token.

        Then its first space is one between words, unless the token is a special one, behind which
        a text begins.
        """
        if token_id not in self._tokenizer.special_token_ids:
            self._drops_space = False

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that can no longer change; "" once stopped."""
        if self.stopped is not None:
            return ""
        self.num_tokens += 1
        if token_id in self._hidden:
            return ""
        return self._release(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return what was held back: no more tokens will come; "" once stopped."""
        if self.stopped is not None:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if self.stopped is None:
            text += self._held
            self.num_characters += len(self._held)
            self._held = ""
        return text

    def _release(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        if self._stop and text and (self._held or not self._stop_starts.isdisjoint(text)):
            text = self._up_to_stop(text)
        self.num_characters += len(text)
        return text

    def _up_to_stop(self, text: str) -> str:
        window = self._held + text
        found = None
        if self.num_tokens >= self._min_tokens:
            found = _first_stop(window, len(self._held), self._stop)
        if found is not None:
            start, self.stopped = found
            end = start + len(self.stopped)
            self._held = ""
            return window[: end if self._include_stop else start]
        released = len(window) - max(_open_length(window, stop) for stop in self._stop)
        self._held = window[released:]
        return window[:released]


def _first_stop(window: str, num_old: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return (start, stop string) of the match that ends first, and after `num_old` characters."""
    found: tuple[int, int, str] | None = None
    for stop in stops:
        start = window.find(stop, max(0, num_old - len(stop) + 1))
        if start >= 0:
            match = (start + len(stop), start, stop)
            found = match if found is None else min(found, match)
    return None if found is None else found[1:]


def _open_length(window: str, stop: str) -> int:
    """Return how long an end of the window is the beginning, but not all, of the stop string."""
    start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
    while start >= 0 and not stop.startswith(window[start:]):
        start = window.find(stop[0], start + 1)
    return len(window) - start if start >= 0 else 0


@dataclass(frozen=True)
class TokenDecoder:
    """How the strings in a vocabulary stand for bytes."""

    to_bytes: Callable[[str], bytes]
    strips_leading_space: bool = False


def token_decoder(spec: Mapping[str, Any] | None) -> TokenDecoder:
    """Return the decoder that the "decoder" entry of a tokenizer.json describes.

    The two kinds that language models have are known, byte-level BPE and SentencePiece with byte
    fallback: in both, what a token adds does not depend on its neighbours. Bytes that are not UTF-8
    come out as Unicode recommends, one U+FFFD for each ill-formed sequence, also where the
    `tokenizers` library replaces the well-formed characters around them. Raises ValueError naming
    any other kind.
    """
    match spec:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return TokenDecoder(_from_byte_alphabet)
        case {"type": "Sequence", "decoders": steps} if steps == _SENTENCEPIECE:
            return TokenDecoder(_from_sentencepiece)
        case {"type": "Sequence", "decoders": steps} if steps == [*_SENTENCEPIECE, _STRIP]:
            return TokenDecoder(_from_sentencepiece, strips_leading_space=True)
    raise ValueError(f"the decoder {spec} is not supported")


_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"

_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]

_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _from_sentencepiece(token: str) -> bytes:
    """Return the bytes of a piece: of its text, with blanks as spaces, or the one that it names."""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_BLANK, " ").encode()


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level BPE writes bytes as.

    A byte that is a visible Latin-1 character is that character; the others, in order, are the
    characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token may be in plain text instead."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()
