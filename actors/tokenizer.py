"""The tokenizer: checks what clients submit and turns text and conversations into token ids.

(The way back, ids to text, is part of a request's state and lives in the scheduler's ledger.)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import trio

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.errors import Failure, RequestError
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
from callboard.messages.sampling import check, check_ids

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
    ) -> None:
        """Without a codec only token ids are taken."""
        self._codec = codec
        self._vocab_size = vocab_size
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
            if self._codec is None and submit.params.stop:
                raise RequestError("stop strings need a tokenizer", field="stop", allowed="none")
            self._check_packed("delivered", submit.delivered)
            token_ids = await self._encode(submit)
        except RequestError as error:
            await self._out.tell(Refused(request_id=submit.request_id, failure=Failure.of(error)))
            return
        await self._scheduler.tell(
            Enqueue(
                request_id=submit.request_id,
                prompt_token_ids=token_ids,
                params=submit.params,
                priority=submit.priority,
                timeout_s=submit.timeout_s,
                delivered=submit.delivered,
            )
        )

    async def _encode(self, submit: Submit) -> bytes:
        match submit.prompt:
            case TokenPrompt(token_ids=packed):
                ids = self._check_packed("prompt", packed)
            case TextPrompt(text=text):
                ids = await self._encode_text("prompt", len(text), lambda codec: text)
            case ChatPrompt(messages=messages):
                turns = [{"role": turn.role, "content": turn.content} for turn in messages]
                size = sum(len(turn.content) for turn in messages)
                ids = await self._encode_text(
                    "messages", size, lambda codec: codec.render_chat(turns)
                )
        if not ids:
            raise RequestError("the prompt is empty", field="prompt", allowed="at least 1 token")
        return pack_ids(ids)

    def _check_packed(self, field: str, packed: bytes) -> list[int]:
        try:
            ids = unpack_ids(packed)
        except ValueError as error:
            raise RequestError(
                f"{field} is {len(packed)} bytes of packed ids",
                field=field,
                allowed="4 bytes an id",
            ) from error
        check_ids(field, ids, self._vocab_size)
        return ids

    async def _encode_text(
        self, field: str, size: int, text_of: Callable[[TextCodec], str]
    ) -> list[int]:
        codec = self._codec
        if codec is None:
            raise RequestError(
                "this model has no tokenizer", field="prompt", allowed="token ids only"
            )
        try:
            if size < LONG_TEXT_CHARS:
                return codec.encode(text_of(codec))
            return await trio.to_thread.run_sync(lambda: codec.encode(text_of(codec)))
        except ValueError as error:
            raise RequestError(
                str(error), field=field, allowed="what the model's tokenizer takes"
            ) from error
