"""Messages to bytes and back: one msgpack blob a frame, `[envelope fields…, body]`."""

import enum
import functools
import hashlib
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar, Union

import msgspec

from callboard.messages.envelope import Envelope
from callboard.messages.errors import Failure, WireError
from callboard.messages.membership import PROTOCOL_VERSION

M = TypeVar("M")

MAX_FRAME_BYTES = 64 * 2**20

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The body of a reply: the value asked for, encoded, or the failure."""

    value: msgspec.Raw
    failure: Failure | None = None


def encode_body(message: Any) -> bytes:
    """Encode a message, or the value of a reply.

    Raises WireError for text that is no Unicode (lone surrogates), integers beyond 64 bits, and
    what is nested too deeply.
    """
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise WireError(f"this cannot be put on the wire: {error}") from error


def encode_frame(
    body: bytes,
    *,
    message_id: int,
    answers: int = 0,
    cause: int = 0,
    sender: str = "",
    receiver: str = "",
    timeout_ns: int = -1,
    max_bytes: int = MAX_FRAME_BYTES,
) -> bytes:
    """Put an encoded body into its envelope; raises WireError when the frame is too large."""
    frame = _encoder.encode(
        Envelope(
            PROTOCOL_VERSION,
            message_id,
            answers,
            cause,
            sender,
            receiver,
            timeout_ns,
            msgspec.Raw(body),
        )
    )
    if len(frame) > max_bytes:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {max_bytes}")
    return frame


def decode_frame(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES) -> Envelope:
    """Read the envelope and leave the body raw; raises WireError for anything else."""
    if len(frame) > max_bytes:
        raise WireError(f"a frame of {len(frame)} bytes is over the limit of {max_bytes}")
    try:
        envelope = _envelopes.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"these bytes are no message: {error}") from error
    if envelope.version != PROTOCOL_VERSION:
        raise WireError(
            f"protocol version {envelope.version} is not spoken here, only {PROTOCOL_VERSION}"
        )
    return envelope


def decode_body(body: msgspec.Raw | bytes, kind: type[M]) -> M:
    """Decode a body as one of the types of a union; raises WireError when it is none of them."""
    try:
        return typing.cast(M, decoder(typing.cast(Any, kind)).decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message for this receiver: {error}") from error


@functools.cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the one decoder of a type or union of types."""
    return msgspec.msgpack.Decoder(kind)


def reply_type(call: Any) -> Any:
    """Return R for a message class that derives from Call[R]."""
    for base in getattr(call, "__orig_bases__", ()):
        arguments = typing.get_args(base)
        if arguments:
            return arguments[0]
    raise TypeError(f"{call.__name__} is not a Call and cannot be asked")


def members(union: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type it is."""
    if isinstance(union, types.UnionType) or typing.get_origin(union) is Union:
        return typing.get_args(union)
    return (union,)


def schema_hash(*unions: Any) -> str:
    """Return a short hash over every field of every type, to compare both ends of a connection."""
    digest = hashlib.sha256()
    for kind in sorted(_reachable(unions), key=str):
        for line in describe(kind):
            digest.update(line.encode())
    return digest.hexdigest()[:16]


def describe(kind: Any) -> list[str]:
    """Return a type as lines of text: its name, then its fields in order, or an enum's values."""
    if isinstance(kind, enum.EnumMeta):
        values: list[enum.Enum] = list(kind)
        return [kind.__name__, *(f"  {member.value}" for member in values)]
    fields = msgspec.structs.fields(kind)
    return [kind.__name__, *(f"  {field.name}: {_type_name(field.type)}" for field in fields)]


def _reachable(kinds: Iterable[Any]) -> set[Any]:
    # Structs and enums, also those that are only the type of a field.
    found: set[Any] = set()
    todo = list(kinds)
    while todo:
        kind = todo.pop()
        if kind in found:
            continue
        if isinstance(kind, enum.EnumMeta):
            found.add(kind)
        elif msgspec.inspect.is_struct_type(kind):
            found.add(kind)
            todo.extend(field.type for field in msgspec.structs.fields(kind))
        else:
            todo.extend(typing.get_args(kind))
    return found


def _type_name(kind: Any) -> str:
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    return str(kind).replace("callboard.messages.", "")
