"""Which replica a request is given to."""

import random
from typing import Any

import pytest

from callboard.actors.placement import (
    FEW_PIECES,
    MAX_PIECES,
    PIECE_BYTES,
    LeastLoaded,
    PeerKey,
    PrefixAware,
    RoundRobin,
    pieces_of,
)
from callboard.messages.base import pack_ids
from callboard.messages.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

A, B, C = b"a", b"b", b"c"
PIECE_IDS = PIECE_BYTES // 4


def ids(*pieces: int, tail: int = 0) -> TokenPrompt:
    """Return a prompt of whole pieces, each filled with a number of its own, and some tokens."""
    tokens = [number for number in pieces for _ in range(PIECE_IDS)]
    return TokenPrompt(token_ids=pack_ids([*tokens, *range(tail)]))


def chat(*contents: str) -> ChatPrompt:
    turns = zip(("user", "assistant") * len(contents), contents, strict=False)
    return ChatPrompt(messages=tuple(ChatMessage(role=role, content=said) for role, said in turns))


LONG = ids(*range(10))
OTHER = ids(*range(50, 60))


def loads(a: int = 0, b: int = 0, c: int = 0) -> dict[PeerKey, int]:
    return {A: a, B: b, C: c}


def aware(weight: float = 0.5, capacity: int = 10, **fields: Any) -> PrefixAware:
    return PrefixAware(weight=weight, capacity=capacity, **fields)


def owner(policy: PrefixAware, replica: PeerKey, prompt: Prompt) -> None:
    """Let a replica, and it alone, be given a prompt."""
    assert policy.choose({replica: 0}, prompt) == replica


# Pieces of prompts.


def test_a_prompt_has_a_hash_for_each_piece_and_one_for_the_rest() -> None:
    assert len(pieces_of(ids(1, 2))) == 2
    assert len(pieces_of(ids(1, 2, tail=1))) == 3
    assert len(pieces_of(ids(tail=3))) == 1
    assert pieces_of(ids()) == []


def test_equal_prompts_have_equal_pieces_and_different_ones_do_not() -> None:
    assert pieces_of(ids(1, 2, tail=3)) == pieces_of(ids(1, 2, tail=3))
    assert pieces_of(ids(1, 2, tail=3))[:2] == pieces_of(ids(1, 2, tail=4))[:2]
    assert pieces_of(ids(1, 2, tail=3))[2] != pieces_of(ids(1, 2, tail=4))[2]


def test_a_piece_stands_for_all_that_comes_before_it() -> None:
    one, other = pieces_of(ids(1, 7)), pieces_of(ids(2, 7))
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_what_is_looked_at_of_a_prompt_is_bounded() -> None:
    long = ids(*range(MAX_PIECES + 5))
    assert len(pieces_of(long)) == MAX_PIECES
    assert pieces_of(long) == pieces_of(ids(*range(MAX_PIECES + 6)))
    assert len(pieces_of(TextPrompt(text="é" * 10 * MAX_PIECES * PIECE_BYTES))) == MAX_PIECES


def test_text_that_begins_alike_has_the_same_first_pieces_whatever_the_script() -> None:
    for letter in ("x", "é", "語", "🎭"):
        text = letter * PIECE_BYTES
        one, other = TextPrompt(text=text + "one"), TextPrompt(text=text + "other")
        shared = len(text.encode()) // PIECE_BYTES
        assert pieces_of(one)[:shared] == pieces_of(other)[:shared]
        assert pieces_of(one) != pieces_of(other)


def test_a_conversation_that_goes_on_begins_with_the_pieces_of_its_beginning() -> None:
    first = ["why? " * 100, "because " * 100]
    before, after = pieces_of(chat(*first)), pieces_of(chat(*first, "and then?"))
    assert before[:-1] == after[: len(before) - 1]
    assert len(before) > 3


def test_who_said_what_in_a_conversation_makes_a_difference() -> None:
    assert pieces_of(chat("ab", "c")) != pieces_of(chat("a", "bc"))
    assert pieces_of(chat("a")) != pieces_of(TextPrompt(text="user\0a\0"))


# Load alone.


def test_the_least_loaded_is_chosen_whatever_the_prompt() -> None:
    policy = LeastLoaded()
    assert policy.choose(loads(3, 2, 1), LONG) == C
    assert policy.choose(loads(3, 2, 5), LONG) == B


def test_of_equally_loaded_ones_the_first_is_chosen() -> None:
    assert LeastLoaded().choose(loads(2, 1, 1), LONG) == B
    assert aware().choose(loads(2, 1, 1), LONG) == B


# Turns.


def test_each_gets_its_turn_blind_to_load() -> None:
    policy = RoundRobin()
    assert [policy.choose(loads(99), LONG) for _ in range(7)] == [A, B, C, A, B, C, A]


def test_who_comes_is_next_and_who_leaves_is_not_missed() -> None:
    policy = RoundRobin()
    for _ in range(2):
        policy.choose({A: 0, B: 0}, LONG)
    assert [policy.choose(loads(), LONG) for _ in range(2)] == [C, A]
    policy.forget(A)
    assert [policy.choose({B: 0, C: 0}, LONG) for _ in range(3)] == [B, C, B]


# Prefixes.


def test_an_unknown_prompt_goes_to_the_least_loaded() -> None:
    policy = aware()
    owner(policy, A, OTHER)
    assert policy.choose(loads(2, 1, 0), LONG) == C


def test_a_prompt_of_nothing_goes_to_the_least_loaded() -> None:
    for weight in (0.0, 0.5, 1.0):
        policy = aware(weight)
        owner(policy, A, LONG)
        assert policy.choose(loads(2, 1, 0), ids()) == C


def test_an_equal_prompt_goes_where_the_first_went() -> None:
    policy = aware()
    assert policy.choose(loads(1, 1, 0), LONG) == C
    assert policy.choose(loads(1, 1, 2), LONG) == C


def test_the_longest_known_beginning_wins() -> None:
    policy = aware()
    owner(policy, A, ids(*range(6)))
    owner(policy, B, ids(*range(9)))
    owner(policy, C, ids(*range(3)))
    assert policy.choose(loads(), LONG) == B


def test_a_beginning_is_known_only_without_a_gap() -> None:
    policy = aware()
    owner(policy, A, ids(0, 1, 2))
    owner(policy, B, ids(99, 1, 2, 3, 4, 5, 6, 7))
    assert policy.choose(loads(), ids(0, 1, 2, 3, 4, 5, 6, 7)) == A


def test_load_decides_between_those_that_know_as_much() -> None:
    policy = aware()
    for replica in (A, B, C):
        owner(policy, replica, LONG)
    assert policy.choose(loads(2, 1, 3), LONG) == B


def test_the_most_recent_owner_wins_at_equal_load() -> None:
    policy = aware()
    for replica in (A, C, B):
        owner(policy, replica, LONG)
    assert policy.choose(loads(), LONG) == B
    owner(policy, A, LONG)
    assert policy.choose(loads(), LONG) == A


def test_an_owner_is_more_recent_by_the_piece_that_counts_and_not_by_another() -> None:
    policy = aware()
    owner(policy, A, LONG)
    owner(policy, B, LONG)
    owner(policy, A, OTHER)
    assert policy.choose(loads(), LONG) == B


@pytest.mark.parametrize(
    ("weight", "load", "chosen"),
    [
        (1.0, 1000, A),  # the prefix alone
        (0.0, 1, B),  # load alone
        (0.5, 9, A),  # a known prompt makes up for 10 requests
        (0.5, 11, B),
        (0.2, 2, A),  # and here for 2.5
        (0.2, 3, B),
    ],
)
def test_the_weight_says_how_much_load_a_known_prompt_makes_up_for(
    weight: float, load: int, chosen: PeerKey
) -> None:
    policy = aware(weight)
    owner(policy, A, LONG)
    assert policy.choose({A: load, B: 0}, LONG) == chosen


def test_half_of_a_prompt_makes_up_for_half_as_much() -> None:
    for load, chosen in ((4, A), (6, B)):
        policy = aware()
        owner(policy, A, ids(*range(5)))
        assert policy.choose({A: load, B: 0}, LONG) == chosen


def test_a_short_beginning_that_all_have_makes_up_for_little() -> None:
    policy = aware(capacity=FEW_PIECES)
    owner(policy, A, ids(0, tail=3))
    assert policy.choose({A: 2, B: 0}, ids(0, tail=5)) == B


def test_a_short_prompt_that_is_known_as_a_whole_counts_like_a_long_one() -> None:
    policy = aware()
    owner(policy, A, ids(tail=3))
    assert policy.choose({A: 9, B: 0}, ids(tail=3)) == A
    assert policy.choose({A: 2, B: 0}, ids(tail=2)) == B


def test_a_prompt_that_goes_beyond_its_owner_is_known_there_too() -> None:
    policy = aware(weight=0.2)
    given = {A: 0, B: 0, C: 0}
    for _ in range(30):
        given[policy.choose(given, LONG)] += 1
    assert given == {A: 10, B: 10, C: 10}


def test_prompts_without_anything_in_common_are_spread() -> None:
    policy = aware()
    given = {A: 0, B: 0, C: 0}
    for number in range(6):
        given[policy.choose(given, ids(1000 + number, tail=3))] += 1
    assert given == {A: 2, B: 2, C: 2}


def test_what_a_lost_replica_knew_is_forgotten() -> None:
    policy = aware()
    owner(policy, A, LONG)
    policy.forget(A)
    policy.forget(B)  # which knew nothing
    assert policy.num_known == 0
    assert policy.choose({A: 1, B: 0}, LONG) == B


def test_what_is_remembered_of_a_replica_is_bounded_and_the_oldest_goes_first() -> None:
    policy = aware(max_known=12)
    owner(policy, A, LONG)
    owner(policy, A, ids(70, 71))
    owner(policy, A, LONG)
    owner(policy, A, ids(80, 81))
    assert policy.num_known == 12
    assert policy.choose({A: 1, B: 0}, LONG) == A
    assert policy.choose({A: 1, B: 0}, ids(70, 71)) == B


def test_of_the_oldest_prompt_the_beginning_is_remembered_longest() -> None:
    policy = aware(max_known=11)
    owner(policy, A, LONG)
    owner(policy, A, ids(70, 71, 72, 73))
    assert policy.choose({A: 3, B: 0}, LONG) == A  # seven of its ten pieces


@pytest.mark.parametrize("seed", range(10))
def test_choices_are_the_best_by_the_formula(seed: int) -> None:
    """Against the formula written out over a plain record of who was given what."""
    rng = random.Random(seed)
    policy = aware(weight=0.3, capacity=7)
    given: dict[PeerKey, list[list[int]]] = {A: [], B: [], C: []}
    for _ in range(200):
        prompt = ids(*(rng.randrange(2) for _ in range(rng.randrange(1, 12))))
        now = loads(*(rng.randrange(12) for _ in range(3)))
        pieces = pieces_of(prompt)

        def score(
            replica: PeerKey, pieces: list[int] = pieces, now: dict[PeerKey, int] = now
        ) -> float:
            seen = {piece for earlier in given[replica] for piece in earlier}
            known = 0
            while known < len(pieces) and pieces[known] in seen:
                known += 1
            share = 1.0 if known == len(pieces) else known / max(8, len(pieces))
            return 0.3 * share + 0.7 * (1 - now[replica] / 7)

        chosen = policy.choose(now, prompt)
        assert score(chosen) == pytest.approx(max(map(score, given)))
        given[chosen].append(pieces)
