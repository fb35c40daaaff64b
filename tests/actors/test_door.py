from callboard.actors.door import Door


def test_a_newcomer_has_some_time_to_begin_a_session() -> None:
    door = Door(newcomer_s=10.0)

    assert door.accept(5, now=0.0) == []
    assert door.overdue(now=9.9) == []
    assert door.overdue(now=10.0) == [5]


def test_who_has_a_session_may_stay() -> None:
    door = Door(newcomer_s=10.0)
    door.accept(5, now=0.0)

    door.admit(5)

    assert door.overdue(now=1e9) == []
    assert (door.num_newcomers, door.num_guests) == (0, 1)


def test_whose_session_is_over_is_a_newcomer_again() -> None:
    door = Door(newcomer_s=10.0)
    door.accept(5, now=0.0)
    door.admit(5)

    door.dismiss(5, now=100.0)

    assert door.overdue(now=109.0) == []
    assert door.overdue(now=110.0) == [5]


def test_the_oldest_newcomers_make_room_for_the_newest() -> None:
    door = Door(max_newcomers=3)
    for fd in (1, 2, 3):
        assert door.accept(fd, now=float(fd)) == []
    door.admit(2)

    assert door.accept(4, now=4.0) == []
    assert door.accept(5, now=5.0) == [1]


def test_what_is_to_be_cut_is_known_until_it_is_closed() -> None:
    door = Door(max_newcomers=1)
    door.accept(1, now=0.0)

    assert door.accept(2, now=0.0) == [1]
    assert 1 in door
    door.close(1)

    assert 1 not in door
    assert door.accept(3, now=0.0) == [2]


def test_a_number_that_is_used_again_is_another_connection() -> None:
    door = Door(newcomer_s=10.0)
    door.accept(7, now=0.0)
    door.admit(7)

    door.accept(7, now=50.0)

    assert (door.num_newcomers, door.num_guests) == (1, 0)
    assert door.overdue(now=60.0) == [7]


def test_what_is_closed_already_is_not_admitted() -> None:
    door = Door()
    door.accept(7, now=0.0)
    door.close(7)

    door.admit(7)
    door.dismiss(7, now=0.0)

    assert 7 not in door
    assert (door.num_newcomers, door.num_guests) == (0, 0)


def test_who_is_expelled_has_no_time_and_makes_room_first() -> None:
    door = Door(max_newcomers=2)
    for fd in (1, 2, 3):
        door.accept(fd, now=0.0)
    door.admit(2)
    door.admit(3)

    door.expel(3)
    door.expel(99)

    assert door.overdue(now=0.0) == [3]
    assert door.accept(5, now=0.0) == [3]
    assert 99 not in door
