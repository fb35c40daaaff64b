import struct
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from callboard.messages.base import Message, pack_floats, pack_ids, unpack_floats, unpack_ids

int32 = st.integers(-(2**31), 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False)
quiet = settings(deadline=None, database=None, derandomize=True)


class Note(Message, frozen=True):
    number: int


class Alarm(Message, frozen=True):
    urgent: ClassVar[bool] = True


@quiet
@given(st.lists(int32))
def test_packed_ids_come_back_as_they_were(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_ids_are_packed_as_little_endian_int32() -> None:
    assert pack_ids([1, 2, -1]) == struct.pack("<3i", 1, 2, -1)
    assert unpack_ids(struct.pack("<2i", 7, 2**31 - 1)) == [7, 2**31 - 1]


def test_ids_may_come_from_any_iterable() -> None:
    assert unpack_ids(pack_ids(number for number in range(3))) == [0, 1, 2]


@pytest.mark.parametrize("token_id", [2**31, -(2**31) - 1, 2**64])
def test_an_id_that_does_not_fit_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([1, token_id])


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_packed_values_of_a_broken_length_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        unpack_ids(bytes(length))
    with pytest.raises(ValueError, match="multiple of"):
        unpack_floats(bytes(length))


@quiet
@given(st.lists(float32))
def test_packed_floats_come_back_as_they_were(values: list[float]) -> None:
    assert unpack_floats(pack_floats(values)) == values


def test_floats_are_packed_as_little_endian_float32() -> None:
    assert pack_floats([1.5, -0.25]) == struct.pack("<2f", 1.5, -0.25)


def test_a_message_cannot_be_changed() -> None:
    note = Note(1)

    with pytest.raises(AttributeError):
        note.number = 2  # type: ignore[misc]  # that is the point


def test_a_message_is_an_array_led_by_its_name() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Note(7))) == ["Note", 7]


def test_messages_are_urgent_only_when_their_class_says_so() -> None:
    assert not Note(1).urgent
    assert Alarm().urgent
    assert msgspec.structs.fields(Alarm) == ()


def test_equal_messages_are_equal() -> None:
    assert Note(1) == Note(1)
    assert Note(1) != Note(2)
