import enum
import importlib
import os
import pkgutil
import random
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, Union

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

import callboard.messages
from callboard.messages.base import Call, Message
from callboard.messages.codec import (
    MAX_FRAME_BYTES,
    Answer,
    decode_body,
    decode_frame,
    decoder,
    describe,
    encode_body,
    encode_frame,
    members,
    reply_type,
    schema_hash,
)
from callboard.messages.control import ControlReply, GetNode, GetStatus, NodeStatus, Pause, State
from callboard.messages.envelope import Envelope
from callboard.messages.errors import Failure, WireError
from callboard.messages.membership import PROTOCOL_VERSION
from callboard.messages.requests import Abort, Submit, TextPrompt, TokenPrompt
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import RunStep

ABSTRACT = (Message, Call, Envelope, Answer)


def modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.iter_modules(callboard.messages.__path__):
        yield importlib.import_module(f"callboard.messages.{found.name}")


def structs() -> list[Any]:
    """Every struct of every module: messages, and what they are made of."""
    found = {
        kind
        for module in modules()
        for kind in vars(module).values()
        if msgspec.inspect.is_struct_type(kind) and kind not in ABSTRACT
    }
    return sorted(found, key=lambda kind: kind.__qualname__)


STRUCTS = structs()
MESSAGES = [kind for kind in STRUCTS if issubclass(kind, Message)]
EVERY_MESSAGE: Any = Union[tuple(MESSAGES)]  # noqa: UP007  # the list is known only at run time


def instances(kind: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field's type; `depth` ends recursive types."""
    if msgspec.inspect.is_struct_type(kind):
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, **{field.name: instances(field.type, depth - 1) for field in fields})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    arguments = typing.get_args(kind)
    most = 2 if depth > 0 else 0
    match typing.get_origin(kind):
        case None:
            return SCALARS[kind]
        case types.UnionType | typing.Union:
            return st.one_of(*(instances(argument, depth) for argument in arguments))
        case origin if origin is dict:
            return st.dictionaries(*(instances(one, depth) for one in arguments), max_size=most)
        case origin if origin is tuple and arguments[-1] is Ellipsis:
            item = instances(arguments[0], depth) if most else st.nothing()
            return st.lists(item, max_size=most).map(tuple)
        case origin if origin is tuple:
            return st.tuples(*(instances(argument, depth) for argument in arguments))
    raise TypeError(f"no strategy for {kind}")


SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
}

SUBMIT = Submit(
    request_id="r1",
    prompt=TextPrompt(text="Once upon a time"),
    params=SamplingParams(stop=("\n",), seed=3),
)


def frame_of(message: Any, **header: Any) -> bytes:
    return encode_frame(encode_body(message), message_id=7, **header)


def read(frame: bytes) -> object:
    return decode_body(decode_frame(frame).body, EVERY_MESSAGE)


# Round trips


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_struct_survives_the_wire(kind: Any) -> None:
    @settings(max_examples=15, deadline=None, database=None, derandomize=True)
    @given(instances(kind))
    def survives(value: Any) -> None:
        assert decode_body(encode_body(value), kind) == value

    survives()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_found_by_its_tag_among_all_others(kind: Any) -> None:
    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(instances(kind))
    def is_found(message: Any) -> None:
        found = read(frame_of(message))
        assert type(found) is kind
        assert found == message

    is_found()


def test_no_two_messages_have_the_same_tag() -> None:
    tags = [msgspec.inspect.type_info(kind).tag for kind in MESSAGES]  # type: ignore[attr-defined]

    assert len(set(tags)) == len(tags)
    assert len(MESSAGES) > 20


def test_every_message_is_frozen_and_array_like() -> None:
    """An array and a map cannot be told apart by tag, so one stray map would break a union."""
    for kind in MESSAGES:
        assert kind.__struct_config__.frozen, kind
        assert kind.__struct_config__.array_like, kind


def test_every_struct_is_frozen() -> None:
    assert [kind for kind in STRUCTS if not kind.__struct_config__.frozen] == []


def test_a_newer_peer_may_append_optional_fields() -> None:
    class Abort2(Message, frozen=True, tag="Abort"):
        request_id: str
        why: str = ""

    newer, older = Abort2(request_id="r1", why="bored"), Abort(request_id="r1")

    assert decode_body(encode_body(newer), Abort) == older
    assert decode_body(encode_body(older), Abort2) == Abort2(request_id="r1")


def test_an_answer_carries_a_value_or_a_failure() -> None:
    value = Answer(msgspec.Raw(encode_body(ControlReply(verb="pause", state=State.PAUSED))))
    failure = Answer(msgspec.Raw(encode_body(None)), Failure(code="MailboxFull", message="full"))

    got = decode_body(encode_body(value), Answer)
    assert decode_body(got.value, ControlReply).state is State.PAUSED
    assert decode_body(encode_body(failure), Answer).failure == failure.failure


# The envelope


def test_the_envelope_keeps_what_is_written_on_it() -> None:
    frame = frame_of(
        SUBMIT, answers=3, cause=5, sender="client", receiver="coordinator", timeout_ns=10**9
    )

    envelope = decode_frame(frame)

    assert (envelope.version, envelope.message_id) == (PROTOCOL_VERSION, 7)
    assert (envelope.answers, envelope.cause) == (3, 5)
    assert (envelope.sender, envelope.receiver) == ("client", "coordinator")
    assert envelope.timeout_ns == 10**9
    assert bytes(envelope.body) == encode_body(SUBMIT)


def test_an_envelope_says_nothing_it_was_not_told() -> None:
    envelope = decode_frame(frame_of(SUBMIT))

    assert (envelope.answers, envelope.cause, envelope.timeout_ns) == (0, 0, -1)
    assert (envelope.sender, envelope.receiver) == ("", "")


def test_whoever_routes_may_pass_on_a_body_it_does_not_understand() -> None:
    first = decode_frame(encode_frame(encode_body(["a", "stranger", {"x": 1}]), message_id=1))

    second = decode_frame(encode_frame(bytes(first.body), message_id=2))

    assert bytes(second.body) == bytes(first.body)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1])
def test_another_protocol_version_is_refused_by_number(version: int) -> None:
    envelope = Envelope(version, 1, 0, 0, "", "", -1, msgspec.Raw(encode_body(SUBMIT)))

    with pytest.raises(WireError, match=f"version {version} is not spoken here"):
        decode_frame(encode_body(envelope))


# Limits


def test_a_frame_of_just_the_limit_passes_and_one_byte_more_does_not() -> None:
    size = len(frame_of(SUBMIT))

    assert read(frame_of(SUBMIT, max_bytes=size)) == SUBMIT
    with pytest.raises(WireError, match=f"{size} bytes is over the limit of {size - 1}"):
        frame_of(SUBMIT, max_bytes=size - 1)


def test_a_frame_over_the_limit_is_not_even_looked_at() -> None:
    frame = frame_of(SUBMIT)

    assert decode_frame(frame, max_bytes=len(frame)).message_id == 7
    with pytest.raises(WireError, match="over the limit of 10"):
        decode_frame(frame, max_bytes=10)
    with pytest.raises(WireError, match="over the limit"):
        decode_frame(b"\xff" * 11, max_bytes=10)


def test_there_is_a_limit_when_nobody_names_one() -> None:
    with pytest.raises(WireError, match=f"over the limit of {MAX_FRAME_BYTES}"):
        decode_frame(bytes(MAX_FRAME_BYTES + 1))


# What is no message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",  # a byte msgpack never uses
        b"\x90",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # an array that claims four thousand million items
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n",
        encode_body({"version": 1}),
        encode_body([1, 2, 3]),
        encode_body([1, "x", 0, 0, "", "", -1, None]),
        encode_body([1, 2**63, 0, 0, b"\xff", "", -1, None]),
        frame_of(SUBMIT) + b"\x00",
    ],
)
def test_what_is_no_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_frame(frame)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        encode_body(["Nonsense"]),
        encode_body([]),
        encode_body(["Abort"]),
        encode_body(["Abort", 7]),
        encode_body({"type": "Abort", "request_id": "r1"}),
        encode_body("Abort"),
        encode_body(None),
        encode_body(["Submit", "r1", {"type": "TextPrompt", "text": "x", "more": 1}, {}]),
        encode_body(["Submit", "r1", {"type": "TextPrompt", "text": "x"}, {"temprature": 1}]),
        encode_body(["Pause", "gently"]),
        b"\x92\xa5Abort\xa2\xff\xfe",  # a string that is not UTF-8
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not a message for this receiver"):
        decode_body(body, Submit | Abort | Pause)  # type: ignore[arg-type]


def test_a_message_for_somebody_else_is_refused_with_its_tag() -> None:
    with pytest.raises(WireError, match="Invalid value 'Pause'"):
        decode_body(encode_body(Pause()), Submit | Abort)  # type: ignore[arg-type]


def test_a_message_nested_too_deep_is_refused() -> None:
    """Sixty thousand nodes in each other, as a hostile peer would send them."""
    node = encode_body({"name": "a", "kind": "b", "state": "running", "children": []})
    opening, closing = node[:-1] + b"\x91", node[-1:]

    with pytest.raises(WireError):
        decode_body(opening * 60_000 + node[:-1] + closing, NodeStatus)


def test_a_node_of_reasonable_depth_is_read() -> None:
    node = NodeStatus(name="leaf", kind="Actor", state=State.RUNNING)
    for _ in range(20):
        node = NodeStatus(name="x", kind="Supervisor", state=State.RUNNING, children=(node,))

    assert decode_body(encode_body(node), NodeStatus) == node


def test_every_beginning_of_a_frame_is_refused() -> None:
    frame = frame_of(SUBMIT)

    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode_frame(frame[:length])


def test_every_beginning_of_a_body_is_refused() -> None:
    body = encode_body(SUBMIT)

    for length in range(len(body)):
        with pytest.raises(WireError):
            decode_body(body[:length], Submit)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(frame: bytes) -> None:
    refused_or_read(frame)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_tampered_frames_raise_nothing_but_wire_errors(kind: Any) -> None:
    dice = random.Random(kind.__name__)

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(instances(kind))
    def holds(message: Any) -> None:
        frame = frame_of(message, sender="client", receiver="coordinator")
        for _ in range(40):
            tampered = bytearray(frame)
            for _ in range(dice.randrange(1, 4)):
                tampered[dice.randrange(len(tampered))] = dice.randrange(256)
            refused_or_read(bytes(tampered))

    holds()


def refused_or_read(frame: bytes) -> None:
    try:
        message = read(frame)
    except WireError:
        return
    assert isinstance(message, Message)


# Types


class Unrelated(Message, frozen=True):
    pass


class Ask(Call[int], frozen=True):
    urgent: ClassVar[bool] = True


class AskMore(Ask, frozen=True):
    pass


def test_the_type_of_an_answer_follows_from_the_call() -> None:
    assert reply_type(Pause) is ControlReply
    assert reply_type(GetNode) is NodeStatus
    assert reply_type(Ask) is int
    assert reply_type(AskMore) is int


@pytest.mark.parametrize("kind", [Abort, Message, Unrelated])
def test_what_is_not_a_call_has_no_answer(kind: type) -> None:
    with pytest.raises(TypeError, match="cannot be asked"):
        reply_type(kind)


def test_a_union_has_members_and_a_type_is_its_own() -> None:
    assert members(Submit | Abort) == (Submit, Abort)
    assert members(Union[Submit, Abort]) == (Submit, Abort)  # noqa: UP007  # both spellings
    assert members(Abort) == (Abort,)


def test_there_is_one_decoder_for_a_type() -> None:
    assert decoder(Abort) is decoder(Abort)
    assert decoder(Abort) is not decoder(Submit)


def test_a_type_is_described_by_its_fields_in_order() -> None:
    assert describe(Abort) == ["Abort", "  request_id: str"]
    assert describe(RunStep)[:2] == ["RunStep", "  step: int"]
    assert "  admits: tuple[steps.Admit, ...]" in describe(RunStep)


# Schema hashes


def made(name: str, *fields: Any, base: type = Message) -> Any:
    return msgspec.defstruct(name, fields, bases=(base,), frozen=True)


def test_a_schema_hash_is_the_same_however_the_union_is_written() -> None:
    assert schema_hash(Submit | Abort) == schema_hash(Abort | Submit)
    assert schema_hash(Submit | Abort) == schema_hash(Abort, Submit)
    assert schema_hash(Submit | Abort, Abort) == schema_hash(Abort, Submit)


def test_a_schema_hash_differs_when_a_type_is_missing() -> None:
    assert schema_hash(Submit | Abort) != schema_hash(Submit)


@pytest.mark.parametrize(
    "other",
    [
        made("Thing", ("size", int), ("name", str), ("more", bool, False)),
        made("Thing", ("size", int)),
        made("Thing", ("size", float), ("name", str)),
        made("Thing", ("length", int), ("name", str)),
        made("Thing", ("name", str), ("size", int)),
        made("Things", ("size", int), ("name", str)),
        made("Thing", ("size", int | None), ("name", str)),
    ],
    ids=["added", "removed", "type", "name", "order", "tag", "optional"],
)
def test_a_schema_hash_differs_when_a_field_does(other: Any) -> None:
    thing = made("Thing", ("size", int), ("name", str))

    assert schema_hash(thing) == schema_hash(made("Thing", ("size", int), ("name", str)))
    assert schema_hash(thing) != schema_hash(other)


def test_a_schema_hash_differs_when_a_part_inside_does() -> None:
    """A peer whose sampling parameters have one field more cannot be talked to either."""

    def holder(inner: Any) -> Any:
        return made("Holder", ("inner", tuple[inner, ...]))

    def color(*names: str) -> Any:
        return enum.StrEnum("Color", names)

    small = made("Inner", ("size", int), base=msgspec.Struct)
    large = made("Inner", ("size", int), ("name", str), base=msgspec.Struct)

    assert schema_hash(holder(small)) != schema_hash(holder(large))
    assert schema_hash(holder(color("RED"))) != schema_hash(holder(color("RED", "GREEN")))


def test_a_schema_hash_can_be_taken_of_types_that_contain_themselves() -> None:
    assert len(schema_hash(NodeStatus | GetStatus)) == 16


def test_a_schema_hash_is_the_same_in_every_process() -> None:
    """Sets of types are ordered by where in memory the types are, which must not matter."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module('callboard.messages.' + name)\n"
        "from callboard.messages.codec import schema_hash\n"
        "from callboard.messages import control, requests, steps\n"
        "print(schema_hash(control.Verb, requests.Submit | requests.TokensOut, steps.StepDone))"
    )

    def hash_after(*imports: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code, *imports],
            env={**os.environ, "PYTHONHASHSEED": str(len(imports))},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout

    first = hash_after()
    assert len(first.strip()) == 16
    assert hash_after("steps", "blocks") == first
    assert hash_after("requests", "membership", "control") == first


# Sizes that were chosen on purpose


def test_packed_token_ids_take_four_bytes_each() -> None:
    prompt = TokenPrompt(token_ids=bytes(4 * 200))
    empty = TokenPrompt(token_ids=b"")

    assert len(encode_body(prompt)) - len(encode_body(empty)) <= 4 * 200 + 2
