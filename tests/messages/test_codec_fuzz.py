"""Every message with one thing about it wrong: each is refused by type, and read by nobody.

What tests/messages/test_codec.py does at random, this does one by one.
"""

import enum
import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any, Union

import msgspec
import pytest

import callboard.messages
from callboard.messages.base import Call, Message
from callboard.messages.codec import decode_body, decode_frame, encode_body, encode_frame
from callboard.messages.envelope import Envelope
from callboard.messages.errors import WireError

VALUES: dict[str, Any] = {
    "nil": None,
    "bool": True,
    "int": 7,
    "large int": 2**63,
    "float": 1.5,
    "text": "text",
    "bytes": b"\x00\x01",
    "list": [1],
    "map": {"a": 1},
}
"""A value of each type that msgpack has."""

FITS: dict[Any, set[str]] = {
    int: {"int", "large int"},  # any of 64 bits, with or without a sign
    float: {"int", "large int", "float"},
    str: {"text"},
    bytes: {"bytes", "text"},  # text is taken where it is Base64
    bool: {"bool"},
    type(None): {"nil"},
}

HEADERS = {
    "array": b"\xdd",
    "map": b"\xdf",
    "text": b"\xdb",
    "bytes": b"\xc6",
}


def messages() -> list[type[Message]]:
    found = {
        kind
        for module in pkgutil.iter_modules(callboard.messages.__path__)
        for kind in vars(importlib.import_module(f"callboard.messages.{module.name}")).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind not in (Message, Call)
    }
    return sorted(found, key=lambda kind: kind.__name__)


MESSAGES = messages()
ANY_MESSAGE: Any = Union[tuple(MESSAGES)]  # noqa: UP007  # the list is known only at run time


def sample(kind: Any) -> Any:
    """Return a value of a field's type, with something in everything."""
    if msgspec.inspect.is_struct_type(kind):
        fields = msgspec.structs.fields(kind)
        return kind(**{field.name: sample(field.type) for field in fields if field.required})
    if isinstance(kind, enum.EnumMeta):
        return next(iter(kind))
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case None:
            return {int: 1, float: 0.5, str: "x", bytes: b"x", bool: True, type(None): None}[kind]
        case types.UnionType | typing.Union:
            return sample(arguments[0])
        case origin if origin is dict:
            return {sample(arguments[0]): sample(arguments[1])}
        case origin if origin is tuple and arguments[-1] is Ellipsis:
            recursive = msgspec.inspect.is_struct_type(arguments[0]) and any(
                arguments[0] in typing.get_args(field.type)
                for field in msgspec.structs.fields(arguments[0])
            )
            return () if recursive else (sample(arguments[0]),)
        case _:
            return tuple(map(sample, arguments))


def fitting(kind: Any) -> set[str]:
    """Return the VALUES that a field of this type may take, or may where its content is right."""
    if kind in FITS:
        return FITS[kind]
    if isinstance(kind, enum.EnumMeta):
        return {"text"}
    if msgspec.inspect.is_struct_type(kind):
        return {"list"} if kind.__struct_config__.array_like else {"map"}
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return set().union(*map(fitting, arguments))
        case origin if origin is dict:
            return {"map"}
        case origin if origin is tuple:
            return {"list"}
    raise TypeError(f"nothing is known about {kind}")


def full(kind: type[Message]) -> list[Any]:
    """Return a message of this kind as the array that travels, with every field in it."""
    fields = msgspec.structs.fields(kind)
    message = kind(**{field.name: sample(field.type) for field in fields})
    plain = msgspec.msgpack.decode(encode_body(message))
    assert len(plain) == 1 + len(fields)
    return list(plain)


def read(body: bytes) -> object:
    frame = encode_frame(body, message_id=1)
    return decode_body(decode_frame(frame).body, ANY_MESSAGE)


def refused(body: bytes) -> bool:
    try:
        read(body)
    except WireError:
        return True
    return False


def cases() -> Iterator[Any]:
    for kind in MESSAGES:
        for place, field in enumerate(msgspec.structs.fields(kind), start=1):
            yield pytest.param(kind, place, field.type, id=f"{kind.__name__}.{field.name}")


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_the_message_that_is_tampered_with_is_good_before(kind: type[Message]) -> None:
    assert type(read(encode_body(full(kind)))) is kind


@pytest.mark.parametrize(("kind", "place", "field"), list(cases()))
def test_a_field_of_any_other_type_is_refused(kind: type[Message], place: int, field: Any) -> None:
    for name, value in VALUES.items():
        body = full(kind)
        body[place] = value
        if name not in fitting(field):
            assert refused(encode_body(body)), f"{name} was taken"
        else:
            refused(encode_body(body))  # raises nothing else


@pytest.mark.parametrize(("kind", "place", "field"), list(cases()))
def test_a_field_that_claims_to_be_huge_is_refused(
    kind: type[Message], place: int, field: Any
) -> None:
    """And nobody makes room for it."""
    plain = full(kind)
    begin = encode_body(plain)[: 1 if len(plain) < 16 else 3]
    before, after = (
        b"".join(map(encode_body, part)) for part in (plain[:place], plain[place + 1 :])
    )

    for header in HEADERS.values():
        assert refused(begin + before + header + b"\xff\xff\xff\xff" + after)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_cut_off_anywhere_is_refused(kind: type[Message]) -> None:
    frame = encode_frame(encode_body(full(kind)), message_id=1, sender="client")

    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode_body(decode_frame(frame[:length]).body, ANY_MESSAGE)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_without_its_tag_or_with_a_strangers_is_refused(kind: type[Message]) -> None:
    plain = full(kind)

    assert refused(encode_body(plain[1:]))
    strangers = (None, 1, "", "Stranger", kind.__name__.lower(), kind.__name__ + "\x00", [1])
    for tag in strangers:
        assert refused(encode_body([tag, *plain[1:]]))
    names = ["type", *(field.name for field in msgspec.structs.fields(kind))]
    assert refused(encode_body(dict(zip(names, plain, strict=True))))


@pytest.mark.parametrize("place", range(len(msgspec.structs.fields(Envelope)) - 1))
def test_an_envelope_with_a_field_of_another_type_is_refused(place: int) -> None:
    frame = encode_frame(encode_body(full(MESSAGES[0])), message_id=1, sender="a", receiver="b")
    kind = msgspec.structs.fields(Envelope)[place].type
    for name, value in VALUES.items():
        fields = msgspec.msgpack.decode(frame)
        fields[place] = value
        if name not in fitting(kind):
            with pytest.raises(WireError):
                decode_frame(encode_body(fields))
