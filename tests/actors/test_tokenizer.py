import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from callboard.actors.actor import Cell
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.actors.tokenizer import LONG_TEXT_CHARS, Tokenizer
from callboard.messages.base import Message, pack_ids, unpack_ids
from callboard.messages.errors import RequestError, SequenceOverflow
from callboard.messages.requests import (
    Abort,
    ChatMessage,
    ChatPrompt,
    Enqueue,
    ForgetAll,
    Prompt,
    Refused,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from callboard.messages.sampling import SamplingParams


class Letters:
    """A codec whose tokens are characters; a question mark cannot be encoded."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if "?" in text:
            raise ValueError("questions are not answered")
        return [ord(letter) for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        if messages[0]["role"] == "nobody":
            raise ValueError("the template knows no role nobody")
        return "".join(f"{turn['role'][0]}:{turn['content']};" for turn in messages)


class Pieces(Letters):
    """A codec as SentencePiece's: every text begins with token 1, then with a blank if it can."""

    def encode(self, text: str) -> list[int]:
        blank = text and not text.startswith(" ")
        return [1, *super().encode(f" {text}" if blank else text)]


class Desk:
    """A tokenizer, and the mailboxes of the scheduler and of the link."""

    def __init__(self, cell: Cell, scheduler: Cell, link: Cell) -> None:
        self.ref: LocalRef[Message] = LocalRef(cell)
        self.scheduler = scheduler
        self.link = link

    async def enqueued(self, prompt: Prompt, **fields: Any) -> Enqueue:
        await self.ref.tell(submit(prompt, **fields))
        message = await hear(self.scheduler)
        assert isinstance(message, Enqueue)
        return message

    async def refused(self, prompt: Prompt, **fields: Any) -> Refused:
        await self.ref.tell(submit(prompt, **fields))
        message = await hear(self.link)
        assert isinstance(message, Refused)
        assert message.request_id == "a"
        assert isinstance(message.failure.error(), RequestError)
        assert self.scheduler.mailbox.take_nowait() is None
        return message


def submit(prompt: Prompt, **fields: Any) -> Submit:
    return Submit(request_id="a", prompt=prompt, **{"params": SamplingParams(), **fields})


async def hear(cell: Cell) -> Any:
    with trio.fail_after(10):
        await cell.mailbox.wait()
    letter = cell.mailbox.take_nowait()
    assert letter is not None
    return letter.message


@asynccontextmanager
async def desk(
    codec: Letters | None, *, max_prompt_chars: int | None = None
) -> AsyncGenerator[Desk]:
    async with open_system() as system, trio.open_nursery() as nursery:
        cell, scheduler, link = (system.cell(name) for name in ("tokenizer", "scheduler", "link"))
        actor = Tokenizer(
            codec,
            vocab_size=1000,
            scheduler=LocalRef(scheduler),
            out=LocalRef(link),
            max_prompt_chars=max_prompt_chars,
        )
        await nursery.start(cell.run, lambda: actor)
        yield Desk(cell, scheduler, link)
        assert cell.actor is actor, "the tokenizer died"
        nursery.cancel_scope.cancel()


def ids(*token_ids: int) -> TokenPrompt:
    return TokenPrompt(token_ids=pack_ids(token_ids))


async def test_token_ids_are_passed_on_as_they_are_with_all_that_was_asked_for() -> None:
    async with desk(None) as one:
        params = SamplingParams(temperature=0.5, max_tokens=7)
        enqueue = await one.enqueued(
            ids(1, 2, 3), params=params, priority=4, timeout_s=5.0, delivered=pack_ids((9,))
        )
        assert enqueue == Enqueue(
            request_id="a",
            prompt_token_ids=pack_ids((1, 2, 3)),
            params=params,
            priority=4,
            timeout_s=5.0,
            delivered=pack_ids((9,)),
            continues_text=True,
        )


async def test_text_is_encoded() -> None:
    async with desk(Letters()) as one:
        enqueue = await one.enqueued(TextPrompt(text="abc"))
        assert unpack_ids(enqueue.prompt_token_ids) == [97, 98, 99]
        assert enqueue.continues_text


async def test_text_that_cannot_fit_the_context_is_refused_before_it_is_encoded() -> None:
    async with desk(Letters(), max_prompt_chars=10) as one:
        await one.enqueued(TextPrompt(text="x" * 10))
        refused = await one.refused(TextPrompt(text="x" * 11))
        long_turns = (ChatMessage(role="user", content="x" * 6),) * 2
        await one.refused(ChatPrompt(messages=long_turns))

    assert isinstance(refused.failure.error(), SequenceOverflow)
    assert "11 characters" in refused.failure.message
    assert refused.failure.allowed == "at most 10 characters"


async def test_a_conversation_is_rendered_then_encoded() -> None:
    async with desk(Letters()) as one:
        turns = (ChatMessage(role="user", content="hi"), ChatMessage(role="bot", content="ho"))
        enqueue = await one.enqueued(ChatPrompt(messages=turns))
        assert not enqueue.continues_text
        assert "".join(map(chr, unpack_ids(enqueue.prompt_token_ids))) == "u:hi;b:ho;"


@pytest.mark.parametrize("size", [LONG_TEXT_CHARS - 1, LONG_TEXT_CHARS])
async def test_only_long_text_is_encoded_in_a_thread_of_its_own(size: int) -> None:
    codec = Letters()
    async with desk(codec) as one:
        await one.enqueued(TextPrompt(text="x" * size))
        here = codec.threads == [threading.current_thread().name]
        assert here is (size < LONG_TEXT_CHARS)


async def test_a_long_conversation_is_rendered_in_a_thread_too() -> None:
    codec = Letters()
    async with desk(codec) as one:
        turn = ChatMessage(role="user", content="x" * (LONG_TEXT_CHARS // 2))
        await one.enqueued(ChatPrompt(messages=(turn, turn)))
        assert codec.threads != [threading.current_thread().name]


async def test_an_abort_does_not_overtake_its_request() -> None:
    async with desk(Letters()) as one:
        await one.ref.tell(submit(TextPrompt(text="x" * LONG_TEXT_CHARS)))
        await one.ref.tell(Abort(request_id="a"))
        await one.ref.tell(ForgetAll())
        kinds = [type(await hear(one.scheduler)) for _ in range(3)]
        assert kinds == [Enqueue, Abort, ForgetAll]


@pytest.mark.parametrize(
    ("prompt", "fields", "field", "says"),
    [
        (ids(), {}, "prompt", "empty"),
        (TextPrompt(text=""), {}, "prompt", "empty"),
        (TextPrompt(text="why?"), {}, "prompt", "questions are not answered"),
        (ids(5, 1000), {}, "prompt", "the id 1000"),
        (ids(-1), {}, "prompt", "the id -1"),
        (TokenPrompt(token_ids=b"12345"), {}, "prompt", "5 bytes"),
        (ids(1), {"delivered": pack_ids((1000,))}, "delivered", "the id 1000"),
        (ids(1), {"delivered": b"123"}, "delivered", "3 bytes"),
        (ids(1), {"params": SamplingParams(temperature=-1.0)}, "temperature", "-1.0"),
        (ids(1), {"params": SamplingParams(top_p=0.0)}, "top_p", "0.0"),
        (ids(1), {"params": SamplingParams(stop_token_ids=(1000,))}, "stop_token_ids", "1000"),
        (ids(1), {"params": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty", "0.0"),
        (ids(1), {"params": SamplingParams(logit_bias={1000: 1.0})}, "logit_bias", "1000"),
        (ids(1), {"params": SamplingParams(bad_token_ids=((1, 1000),))}, "bad_token_ids", "1000"),
        (ids(1), {"params": SamplingParams(bad_words=("why?",))}, "bad_words", "not answered"),
        (ids(1), {"params": SamplingParams(bad_words=("x" * 65,))}, "bad_words", "66 tokens"),
        (
            ChatPrompt(messages=(ChatMessage(role="nobody", content=""),)),
            {},
            "messages",
            "no role nobody",
        ),
    ],
)
async def test_a_wrong_request_is_refused_naming_field_and_value(
    prompt: Prompt, fields: dict[str, Any], field: str, says: str
) -> None:
    async with desk(Letters()) as one:
        failure = (await one.refused(prompt, **fields)).failure
        assert failure.field == field
        assert says in failure.message
        assert failure.allowed


async def test_a_wrong_request_leaves_the_next_one_alone() -> None:
    async with desk(Letters()) as one:
        await one.refused(TextPrompt(text="why?"))
        await one.enqueued(TextPrompt(text="because"))


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        (TextPrompt(text="abc"), SamplingParams(), "prompt"),
        (
            ChatPrompt(messages=(ChatMessage(role="user", content="hi"),)),
            SamplingParams(),
            "prompt",
        ),
        (ids(1), SamplingParams(stop=("x",)), "stop"),
        (ids(1), SamplingParams(bad_words=("x",)), "bad_words"),
    ],
)
async def test_without_a_codec_nothing_about_text_is_taken(
    prompt: Prompt, params: SamplingParams, field: str
) -> None:
    async with desk(None) as one:
        assert (await one.refused(prompt, params=params)).failure.field == field


# Bad words


def bad(*words: str, token_ids: tuple[tuple[int, ...], ...] = ()) -> SamplingParams:
    return SamplingParams(bad_words=words, bad_token_ids=token_ids, top_k=3)


def letters(*texts: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(ord, text)) for text in texts)


async def test_a_bad_word_becomes_its_tokens_with_and_without_a_space() -> None:
    async with desk(Letters()) as one:
        enqueue = await one.enqueued(ids(1), params=bad("to be", "or"))
        found = letters("to be", " to be", "or", " or")
        assert enqueue.params == SamplingParams(bad_token_ids=found, top_k=3)


async def test_bad_words_come_behind_bad_token_ids_and_each_once() -> None:
    async with desk(Letters()) as one:
        params = bad("or", " or", "or", token_ids=((5, 6), (7,)))
        enqueue = await one.enqueued(ids(1), params=params)
        assert enqueue.params.bad_token_ids == ((5, 6), (7,), *letters("or", " or"))


async def test_white_space_can_be_a_bad_word() -> None:
    async with desk(Letters()) as one:
        enqueue = await one.enqueued(ids(1), params=bad("\n", " "))
        assert enqueue.params.bad_token_ids == letters("\n", " \n", " ", "  ")


async def test_what_a_tokenizer_puts_before_every_text_is_no_part_of_a_bad_word() -> None:
    """Within a text there is no blank before the word, which only its third way shows."""
    async with desk(Pieces()) as one:
        enqueue = await one.enqueued(ids(1), params=bad("or"))
        assert enqueue.params.bad_token_ids == letters(" or", "or")


async def test_a_bad_word_with_a_token_the_model_does_not_know_is_left_out() -> None:
    async with desk(Letters()) as one:
        enqueue = await one.enqueued(ids(1), params=bad("o\u2019er", "or"))
        assert enqueue.params == SamplingParams(bad_token_ids=letters("or", " or"), top_k=3)


async def test_a_word_of_which_no_token_is_left_is_refused() -> None:
    class Deaf(Letters):
        def encode(self, text: str) -> list[int]:
            return []

    async with desk(Deaf()) as one:
        failure = (await one.refused(ids(1), params=bad("or"))).failure
        assert (failure.field, "'or' has no tokens" in failure.message) == ("bad_words", True)


@pytest.mark.parametrize("count", [1, 60])
async def test_many_bad_words_are_encoded_in_a_thread_of_their_own(count: int) -> None:
    codec = Letters()
    async with desk(codec) as one:
        await one.enqueued(ids(1), params=bad(*(f"{number:030}" for number in range(count))))
        here = threading.current_thread().name
        assert set(codec.threads) == {here} if count == 1 else here not in codec.threads
