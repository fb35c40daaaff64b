"""The tokenizer: checks what clients submit and turns texts, conversations and bad words into ids.

(The way back, ids to text, is part of a request's state and lives in the scheduler's ledger.)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec
import trio

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.messages.base import TokenIds, pack_ids, unpack_ids
from callboard.messages.errors import Failure, RequestError, SequenceOverflow
from callboard.messages.requests import (
    Abort,
    ChatPrompt,
    Enqueue,
    ForgetAll,
    Refused,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from callboard.messages.sampling import (
    MAX_BAD_SEQUENCE_TOKENS,
    SamplingParams,
    check,
    check_ids,
)

T = TypeVar("T")

TokenizerInbox = Submit | Abort | ForgetAll

LONG_TEXT_CHARS = 4096
"""Longer texts are encoded in a worker thread; shorter ones take less time than the hand-over."""


class TextCodec(Protocol):
    """A tokenizer with its chat template; `callboard.gpu.loading.tokenizer.TextTokenizer`.

    Both methods raise ValueError for text that cannot be encoded or rendered.
    """

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which control tokens count as such."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt of a conversation."""
        ...


class Tokenizer(Actor[TokenizerInbox]):
    """One message at a time, so an abort cannot overtake the request it is for."""

    def __init__(
        self,
        codec: TextCodec | None,
        *,
        vocab_size: int,
        scheduler: ActorRef[Enqueue | Abort | ForgetAll],
        out: ActorRef[Refused],
        max_prompt_chars: int | None = None,
    ) -> None:
        """Without a codec only token ids are taken.

        Longer texts than `max_prompt_chars` are refused before they are encoded, which would take
        seconds and hold up the requests behind them: no tokenisation of them fits the context.
        """
        self._codec = codec
        self._vocab_size = vocab_size
        self._max_prompt_chars = max_prompt_chars
        self._scheduler = scheduler
        self._out = out

    async def receive(self, message: TokenizerInbox) -> None:
        """Handle one message."""
        match message:
            case Submit():
                await self._submit(message)
            case Abort() | ForgetAll():
                await self._scheduler.tell(message)

    async def _submit(self, submit: Submit) -> None:
        try:
            check(submit.params, vocab_size=self._vocab_size)
            self._check_text_fields(submit.params)
            self._check_packed("delivered", submit.delivered)
            token_ids = await self._encode(submit)
            params = await self._encode_bad_words(submit.params)
        except RequestError as error:
            await self._out.tell(Refused(request_id=submit.request_id, failure=Failure.of(error)))
            return
        await self._scheduler.tell(
            Enqueue(
                request_id=submit.request_id,
                prompt_token_ids=token_ids,
                params=params,
                priority=submit.priority,
                timeout_s=submit.timeout_s,
                delivered=submit.delivered,
                continues_text=not isinstance(submit.prompt, ChatPrompt),
            )
        )

    async def _encode(self, submit: Submit) -> TokenIds:
        match submit.prompt:
            case TokenPrompt(token_ids=packed):
                self._check_packed("prompt", packed)
            case TextPrompt(text=text):
                packed = await self._encode_text(submit, "prompt", len(text), lambda codec: text)
            case ChatPrompt(messages=messages):
                turns = [{"role": turn.role, "content": turn.content} for turn in messages]
                size = sum(len(turn.content) for turn in messages)
                packed = await self._encode_text(
                    submit, "messages", size, lambda codec: codec.render_chat(turns)
                )
        if not packed:
            raise RequestError("the prompt is empty", field="prompt", allowed="at least 1 token")
        return packed

    async def _encode_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Put the bad words behind the bad token ids, each as all that it is tokenised to."""
        words = params.bad_words
        if not words:
            return params
        size = sum(map(len, words)) * len(_BEFORE)
        found = await self._use_codec("bad_words", size, lambda codec: _sequences(codec, words))
        # A token the model does not know, as some that were added to a tokenizer, cannot come.
        known = [ids for ids in found if max(ids) < self._vocab_size]
        return msgspec.structs.replace(
            params, bad_words=(), bad_token_ids=(*params.bad_token_ids, *known)
        )

    def _check_text_fields(self, params: SamplingParams) -> None:
        for field, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if self._codec is None and texts:
                raise RequestError(f"{field} needs a tokenizer", field=field, allowed="none")

    def _check_packed(self, field: str, packed: TokenIds) -> None:
        try:
            ids = unpack_ids(packed)
        except ValueError as error:
            raise RequestError(
                f"{field} is {len(packed)} bytes of packed ids",
                field=field,
                allowed="4 bytes an id",
            ) from error
        check_ids(field, ids, self._vocab_size)

    async def _encode_text(
        self, submit: Submit, field: str, size: int, text_of: Callable[[TextCodec], str]
    ) -> TokenIds:
        most = self._max_prompt_chars
        if most is not None and size > most:
            raise SequenceOverflow(
                f"the text has {size} characters, and of no more than {most} the tokens fit the "
                "context",
                request_id=submit.request_id,
                field=field,
                allowed=f"at most {most} characters",
            )
        ids = await self._use_codec(field, size, lambda codec: codec.encode(text_of(codec)))
        return pack_ids(ids)

    async def _use_codec(self, field: str, size: int, work: Callable[[TextCodec], T]) -> T:
        codec = self._codec
        if codec is None:
            raise RequestError(
                "this model has no tokenizer", field="prompt", allowed="token ids only"
            )
        try:
            if size < LONG_TEXT_CHARS:
                return work(codec)
            return await trio.to_thread.run_sync(lambda: work(codec))
        except ValueError as error:
            raise RequestError(
                str(error), field=field, allowed="what the model's tokenizer takes"
            ) from error


_BEFORE = ("", " ", "\n")
"""What a word is looked at behind: nothing, a space, and the end of a line.

The last shows what a word within a text is to tokenizers that begin every text with a space; to
others it is what it is behind nothing.
"""


def _sequences(codec: TextCodec, words: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the sequences of token ids, each once, that words come as. Raises RequestError."""
    beginning = codec.encode("")  # what the tokenizer puts before every text, if anything
    before = dict(zip(_BEFORE, (beginning, beginning, codec.encode("\n")), strict=True))
    sequences = list(dict.fromkeys(ids for word in words for ids in _ways(codec, word, before)))
    longest = max(map(len, sequences))
    if longest > MAX_BAD_SEQUENCE_TOKENS:
        raise RequestError(
            f"a bad word has {longest} tokens",
            field="bad_words",
            allowed=f"words of at most {MAX_BAD_SEQUENCE_TOKENS} tokens",
        )
    return sequences


def _ways(codec: TextCodec, word: str, before: Mapping[str, list[int]]) -> list[tuple[int, ...]]:
    """Return the token ids of a word behind each of these texts, of which the ids are given."""
    bare = word.lstrip(" ") or word
    ways = [_behind(start, codec.encode(text + bare)) for text, start in before.items()]
    found = [tuple(ids) for ids in ways if ids]
    if not found:
        raise RequestError(
            f"the bad word {word!r} has no tokens", field="bad_words", allowed="words with tokens"
        )
    return found


def _behind(start: list[int], ids: list[int]) -> list[int]:
    """Return the ids behind a start; none where they have another start."""
    return ids[len(start) :] if ids[: len(start)] == start else []
