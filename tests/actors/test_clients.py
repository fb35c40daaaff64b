"""What a client was told and may not have read."""

import random
from typing import Any

import pytest

from callboard.actors.clients import LOST, Client, Clients, Ended, Kept, Unread, size_of
from callboard.messages.base import pack_ids
from callboard.messages.logprobs import PromptLogprobs
from callboard.messages.requests import (
    Accepted,
    Delta,
    EventKind,
    FinishReason,
    RequestEvent,
)

ENDED = Ended(b"a fingerprint", (None,))


def delta(start: int, *ids: int, request_id: str = "r", **fields: Any) -> Delta:
    return Delta(request_id=request_id, start=start, token_ids=pack_ids(ids), **fields)


def accepted(request_id: str = "r") -> Accepted:
    return Accepted(request_id=request_id, prompt_token_ids=pack_ids((1, 2)), seed=5)


def claimed(unread: Unread, request_id: str = "r") -> Kept:
    kept = unread.claim(request_id)
    assert kept is not None
    return kept


def test_what_was_taken_is_not_kept() -> None:
    unread = Unread()
    for frame in range(1, 5):
        unread.sent(frame, delta(frame, 7))
    unread.taken(3)
    unread.lose_session()
    assert claimed(unread).deltas == [delta(4, 7)]
    assert not unread
    assert unread.num_bytes == 0


def test_several_things_of_one_frame_are_taken_together() -> None:
    unread = Unread()
    for name in "rs":
        unread.sent(1, delta(0, 7, request_id=name))
    assert unread
    unread.taken(1)
    assert not unread


def test_what_was_never_sent_is_not_taken() -> None:
    unread = Unread()
    unread.sent(LOST, delta(0, 7))
    unread.taken(1000)
    unread.lose_session()
    assert claimed(unread).deltas == [delta(0, 7)]


def test_each_request_is_claimed_by_itself_and_once() -> None:
    unread = Unread()
    unread.sent(1, accepted())
    unread.sent(2, delta(0, 7, request_id="s"))
    unread.sent(3, delta(0, 8))
    unread.lose_session()
    unread.keep(delta(1, 9))
    kept = claimed(unread)
    assert (kept.accepted, kept.deltas) == (accepted(), [delta(0, 8), delta(1, 9)])
    assert unread.claim("r") is None
    assert claimed(unread, "s").deltas == [delta(0, 7, request_id="s")]
    assert unread.num_bytes == 0


def test_what_a_request_was_told_is_not_mixed_with_what_an_earlier_one_of_its_id_was() -> None:
    unread = Unread()
    unread.sent(1, accepted())
    unread.sent(1, delta(0, 100))
    unread.sent(1, delta(1, 101, finish=FinishReason.LENGTH), ENDED)
    unread.sent(2, accepted())
    unread.sent(2, delta(0, 200))
    unread.lose_session()
    unread.keep(delta(1, 201))
    kept = claimed(unread)
    assert (kept.accepted, kept.ended) == (accepted(), None)
    assert kept.deltas == [delta(0, 200), delta(1, 201)]
    assert (unread.num_bytes, bool(unread)) == (0, False)


def test_what_nobody_claims_is_forgotten_and_what_is_under_way_is_not() -> None:
    unread = Unread()
    unread.keep(delta(0, 7))
    unread.sent(1, delta(0, 7, request_id="s"))
    unread.forget()
    assert unread.claim("r") is None
    assert unread.num_bytes == size_of(delta(0, 7, request_id="s"))


def test_only_an_end_is_remembered_as_one() -> None:
    unread = Unread()
    unread.keep(delta(0, 7))
    unread.keep(delta(0, 8, request_id="s"))
    unread.keep(delta(1, request_id="s", finish=FinishReason.STOP), ENDED)
    assert claimed(unread).ended is None
    assert claimed(unread, "s").ended == ENDED


@pytest.mark.parametrize(
    ("have", "end", "starts"),
    [
        (1, 5, [1, 3]),
        (3, 5, [3]),
        (5, 5, []),  # it has all there is
        (0, 5, None),  # the first is not here any more
        (2, 5, None),  # within a delta: that client has counted otherwise
        (6, 5, None),
    ],
)
def test_what_comes_behind_some_tokens_is_complete_or_nothing(
    have: int, end: int, starts: list[int] | None
) -> None:
    kept = Kept()
    for one in (delta(1, 7, 8), delta(3, 9, 10)):
        kept.add(one, None)
    behind = kept.behind(have, end)
    assert (None if behind is None else [one.start for one in behind]) == starts


def test_who_has_tokens_is_not_told_of_the_acceptance_again() -> None:
    kept = Kept()
    kept.add(accepted(), None)
    assert kept.news([delta(0, 7)], b"") == [accepted(), delta(0, 7)]
    assert kept.news([], pack_ids((7,))) == []
    assert Kept().news([delta(0, 7)], b"") == [delta(0, 7)]


def test_the_size_of_something_covers_what_may_be_large() -> None:
    small = size_of(delta(0, 7))
    large: list[dict[str, Any]] = [
        {"text": "x" * 5000},
        {"logprobs": bytes(5000)},
        {"top_logprobs": tuple(tuple((token, 0.0) for token in range(20)) for _ in range(4))},
        {"prompt_logprobs": PromptLogprobs(start=1, logprobs=bytes(5000))},
        {"prompt_logprobs": PromptLogprobs(start=1, logprobs=b"", top_ids=bytes(5000))},
        {"events": (RequestEvent(kind=EventKind.PAUSED, at=0.0),) * 100},
    ]
    for fields in large:
        assert size_of(delta(0, 7, **fields)) >= small + 5000
    long = Accepted(request_id="r", prompt_token_ids=bytes(5000), seed=0)
    assert size_of(long) >= 5000


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_unread_is_lost_and_the_bytes_add_up(seed: int) -> None:
    """Against a plain list of all that was said of each request, and how much of it was read."""
    rng = random.Random(seed)
    unread, said, frame, taken = Unread(), dict[str, int](), 0, dict[int, tuple[str, int]]()
    read: dict[str, int] = {}
    for _ in range(300):
        name = rng.choice("abc")
        match rng.randrange(4):
            case 0 | 1:
                frame += 1
                start = said.get(name, 0)
                unread.sent(frame, delta(start, 7, request_id=name))
                said[name] = start + 1
                taken[frame] = (name, start + 1)
            case 2:
                upto = rng.randint(0, frame)
                unread.taken(upto)
                for one in [one for one in taken if one <= upto]:
                    whose, count = taken.pop(one)
                    read[whose] = count
            case 3:
                unread.lose_session()
                frame = 0
                for whose, end in said.items():
                    have = rng.randint(read.get(whose, 0), end)
                    kept = unread.claim(whose) or Kept()
                    behind = kept.behind(have, end)
                    assert behind is not None
                    assert [one.start for one in behind] == list(range(have, end))
                    read[whose] = end
                assert (unread.num_bytes, bool(unread)) == (0, False)
                taken.clear()


def test_a_client_is_found_by_where_it_is_and_by_what_it_is() -> None:
    clients = Clients()
    client = clients.enter(b"key", b"here", "one")
    assert clients.at(b"here") is clients.get(b"key") is client
    clients.leave(client)
    assert clients.at(b"here") is None
    assert clients.get(b"key") is client
    assert (client.peer, client.session) == (None, "")
    assert clients.enter(b"key", b"there", "two") is client
    assert (clients.at(b"there"), client.sessions, len(clients)) == (client, 2, 1)
    clients.forget(client)
    assert (clients.at(b"there"), clients.get(b"key"), len(clients)) == (None, None, 0)


def test_leaving_keeps_what_was_under_way() -> None:
    clients = Clients()
    client: Client = clients.enter(b"key", b"here", "one")
    client.unread.sent(1, delta(0, 7))
    clients.leave(client)
    assert claimed(client.unread).deltas == [delta(0, 7)]
