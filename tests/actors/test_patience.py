from callboard.actors.patience import BURST, MAX_KNOWN, REGAINED_PER_S, Patience, Rarely


def test_some_nonsense_is_answered_and_then_no_more() -> None:
    patience = Patience()

    assert [patience.spend(b"peer", 0.0) for _ in range(BURST + 1)] == [True] * BURST + [False]
    assert not patience.has_given_up(b"peer")


def test_it_comes_back_with_time() -> None:
    patience = Patience()
    for _ in range(BURST):
        patience.spend(b"peer", 0.0)

    assert patience.spend(b"peer", 1 / REGAINED_PER_S)
    assert not patience.spend(b"peer", 1 / REGAINED_PER_S)


def test_no_more_comes_back_than_there_was() -> None:
    patience = Patience()
    patience.spend(b"peer", 0.0)

    answered = [patience.spend(b"peer", 1e6) for _ in range(BURST + 1)]

    assert answered == [True] * BURST + [False]


def test_who_says_hello_each_second_is_answered_for_ever() -> None:
    patience = Patience()

    assert all(patience.spend(b"peer", float(second)) for second in range(10 * BURST))


def test_peers_have_their_own() -> None:
    patience = Patience()
    while patience.spend(b"one", 0.0):
        pass

    assert patience.spend(b"two", 0.0)


def test_how_much_there_is_can_be_chosen() -> None:
    patience = Patience(burst=2, regained_per_s=10.0)

    assert [patience.spend(b"peer", 0.0) for _ in range(3)] == [True, True, False]
    assert patience.spend(b"peer", 0.1)


def test_who_is_given_up_stays_so() -> None:
    patience = Patience()

    patience.give_up(b"one")

    assert patience.has_given_up(b"one")
    assert not patience.has_given_up(b"two")


def test_a_limited_number_of_peers_is_remembered() -> None:
    patience = Patience()
    peers = [number.to_bytes(4, "big") for number in range(2 * MAX_KNOWN)]
    for peer in peers:
        patience.spend(peer, 0.0)
        patience.give_up(peer)

    assert [patience.has_given_up(peer) for peer in (peers[0], peers[-1])] == [False, True]
    assert len(patience._given_up) == len(patience._left) == MAX_KNOWN


def test_one_line_in_a_while_is_due_and_says_how_many_were_not() -> None:
    rarely = Rarely(1.0)

    assert [rarely.due(now) for now in (5.0, 5.1, 5.9, 6.0, 6.5, 9.0)] == [
        0,
        None,
        None,
        2,
        None,
        1,
    ]
