"""The two shapes everything an actor can be told is built from, and packed token ids."""

from array import array
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

import msgspec

ReplyT = TypeVar("ReplyT")

TokenIds = bytes
"""Token ids on the wire: little-endian int32, four bytes an id (a list costs ten times as much)."""

BYTES_PER_ID = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Base of everything an actor can be told.

    Array-like, all of them, because msgspec cannot decode a union that mixes arrays and maps: so a
    message grows only by optional fields at its end. `urgent` messages travel in a mailbox's
    control lane, ahead of everything else.
    """

    urgent: ClassVar[bool] = False


class Call(Message, Generic[ReplyT], frozen=True):
    """Base of the messages that are asked: `ask(Call[R])` waits for one R."""


def pack_ids(ids: Iterable[int]) -> TokenIds:
    """Pack token ids for the wire; raises OverflowError for an id outside int32."""
    return array("i", ids).tobytes()


def id_array(packed: TokenIds = b"") -> "array[int]":
    """Unpack token ids into the compact form that grows, in which requests keep theirs.

    Raises ValueError when the length is not a multiple of four.
    """
    ids = array("i")
    ids.frombytes(packed)
    return ids


def unpack_ids(packed: TokenIds) -> list[int]:
    """Unpack token ids; raises ValueError when the length is not a multiple of four."""
    return id_array(packed).tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Pack log-probabilities for the wire: little-endian float32."""
    return array("f", values).tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    """Unpack float32 values; raises ValueError when the length is not a multiple of four."""
    values = array("f")
    values.frombytes(packed)
    return values.tolist()
