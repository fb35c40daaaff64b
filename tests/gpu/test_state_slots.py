import pytest

from callboard.gpu.state_slots import StateSlots
from callboard.messages.errors import OutOfStateSlots


def test_every_slot_is_taken_once() -> None:
    slots = StateSlots(3)

    assert sorted(slots.take() for _ in range(3)) == [0, 1, 2]
    assert slots.free == 0


def test_no_slot_is_left_for_one_row_more_than_there_are() -> None:
    slots = StateSlots(1)
    slots.take()

    with pytest.raises(OutOfStateSlots, match="1 recurrent states wanted, 0 of 1 slots are free"):
        slots.take()


def test_the_dummy_is_nobodys() -> None:
    slots = StateSlots(2)

    assert slots.dummy == 2
    assert slots.dummy not in [slots.take(), slots.take()]


def test_a_slot_that_was_given_back_is_taken_next() -> None:
    slots = StateSlots(4)
    taken = [slots.take() for _ in range(3)]

    slots.give_back([taken[1]])

    assert slots.take() == taken[1]


@pytest.mark.parametrize("wrong", [[0, 0], [1], [2], [-1]], ids=["twice", "free", "dummy", "none"])
def test_what_nobody_took_is_not_given_back(wrong: list[int]) -> None:
    slots = StateSlots(2)
    taken = slots.take()
    assert taken == 0

    with pytest.raises(ValueError, match="are not taken"):
        slots.give_back(wrong)
    assert slots.free == 1
