"""From what a caller may write to a request that can be sent, or to an error that says why not."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from callboard.messages.base import pack_ids
from callboard.messages.codec import decode_body, encode_body
from callboard.messages.errors import RequestError, WireError
from callboard.messages.requests import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from callboard.messages.sampling import MAX_SEED, SamplingParams, check

PromptLike = str | Sequence[int] | Sequence[ChatMessage] | Prompt
"""Text, token ids, or a conversation."""

MAX_CHOICES = 128
"""Choices a prompt may have."""

_ANY_ID = 2**31
_TYPES = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_PLACE = re.compile(r"at `\$(?:\[(\d+)\])?(?:\.(\w+))?")


def as_prompt(prompt: PromptLike) -> Prompt:
    """Turn what a caller may write into a prompt. Raises RequestError for anything else."""
    match prompt:
        case TextPrompt() | TokenPrompt() | ChatPrompt():
            return prompt
        case str():
            return TextPrompt(text=prompt)
        case bytes() | Mapping():
            raise _no_prompt(f"{type(prompt).__name__} is none of these")
        case Iterable():
            return _from_items(list(prompt))
        case _:
            raise _no_prompt(f"{type(prompt).__name__} is none of these")


def check_prompts(prompts: Sequence[PromptLike]) -> None:
    """Raise RequestError for what is a prompt itself, and would be taken for one a character."""
    if isinstance(prompts, str | bytes):
        raise RequestError("prompts is one text", field="prompts", allowed="a list of prompts")


def as_params(params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
    """Put options on top of parameters. Raises RequestError naming what does not exist or fit."""
    values = {} if params is None else msgspec.structs.asdict(params)
    for name in options.keys() - _FIELDS:
        raise RequestError(
            f"there is no option {name}", field=name, allowed=", ".join(sorted(_FIELDS))
        )
    plain = {name: _plain(value) for name, value in options.items()}
    try:
        return msgspec.convert({**values, **plain}, SamplingParams)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error


def _plain(value: Any) -> Any:
    """Return a number of NumPy's or torch's as one of Python's, and anything else as it is."""
    is_number = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_number else value


def checked(submit: Submit) -> Submit:
    """Return the request as the server will read it. Raises RequestError where it could not.

    What is of the right type and out of range is for the server to refuse.
    """
    try:
        return decode_body(encode_body(submit), Submit)
    except (WireError, TypeError) as error:
        if _PLACE.search(str(error)):
            raise _wrong_type(str(error)) from error
        check(submit.params, vocab_size=_ANY_ID)
        raise RequestError(str(error), field=_unsendable(submit), allowed=_SENDABLE) from error


def choices_of(submit: Submit, n: int) -> list[Submit]:
    """Return `n` independent requests for one prompt: ID, ID#1, ID#2, …

    With a seed, choice i has seed + i (modulo 2^63), and is what a request with that seed gives.
    Raises RequestError when there are none or too many.
    """
    check_n(n)
    return [submit, *(_choice(submit, choice) for choice in range(1, n))]


def check_n(n: int) -> None:
    """Raise RequestError when a prompt cannot have so many choices."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_CHOICES:
        raise RequestError(
            f"n is {n!r}, and must be 1 to {MAX_CHOICES}", field="n", allowed=f"1 to {MAX_CHOICES}"
        )


def _choice(submit: Submit, choice: int) -> Submit:
    request_id, params = f"{submit.request_id}#{choice}", submit.params
    # One that is out of range stays so, and is refused by the server.
    if params.seed is not None and 0 <= params.seed <= MAX_SEED:
        seed = (params.seed + choice) % (MAX_SEED + 1)
        params = msgspec.structs.replace(params, seed=seed)
    return msgspec.structs.replace(submit, request_id=request_id, params=params)


_FIELDS = set(SamplingParams.__struct_fields__)
_SENDABLE = "integers of 64 bits and valid Unicode"


def _from_items(items: list[Any]) -> Prompt:
    if items and all(isinstance(item, ChatMessage) for item in items):
        return ChatPrompt(messages=tuple(items))
    try:
        return TokenPrompt(token_ids=pack_ids(items))
    except (TypeError, OverflowError) as error:
        raise _no_prompt(str(error)) from error


def _no_prompt(reason: str) -> RequestError:
    return RequestError(
        f"a prompt cannot be made of this: {reason}",
        field="prompt",
        allowed="text, token ids, or chat messages",
    )


def _wrong_type(message: str) -> RequestError:
    """Make an error of msgspec's words, with the field they point at."""
    place, types = _PLACE.search(message), _TYPES.search(message)
    index, name = (None, None) if place is None else place.groups()
    if index is not None:
        part = Submit.__struct_fields__[int(index) - 1]  # behind the tag
        name = name if part == "params" and name else part
    if name is None or types is None:
        return RequestError(message, field=name or "params")
    wanted, found = types.groups()
    return RequestError(f"{name} must be {wanted}, not {found}", field=name, allowed=wanted)


def _unsendable(submit: Submit) -> str:
    for name in Submit.__struct_fields__:
        try:
            encode_body(getattr(submit, name))
        except (WireError, TypeError):
            return name
    return ""
