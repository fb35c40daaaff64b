from itertools import pairwise

import pytest

from callboard.actors.prompt_scores import PromptScores, check_size
from callboard.messages.base import pack_floats, pack_ids, unpack_floats, unpack_ids
from callboard.messages.errors import RequestError
from callboard.messages.logprobs import PromptLogprobs

NUM_PROMPT = 6
SCORES = [-1.0, -2.0, -3.0, -4.0, -5.0]  # of tokens 1 to 5; nothing precedes token 0


def part(start: int, stop: int, num_top: int = 0) -> PromptLogprobs:
    """What a chunk makes known of tokens `start` to `stop`, the latter excluded."""
    scores = SCORES[start - 1 : stop - 1]
    return PromptLogprobs(
        start=start,
        logprobs=pack_floats(scores),
        num_top=num_top,
        top_ids=pack_ids([10 * token + n for token in range(start, stop) for n in range(num_top)]),
        top_logprobs=pack_floats([score - n for score in scores for n in range(num_top)]),
    )


def scores_of(*parts: PromptLogprobs, num_top: int = 0) -> PromptScores:
    scores = PromptScores(num_top, NUM_PROMPT)
    for each in parts:
        scores.take(each)
    return scores


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("cuts", [(), (2,), (5,), (2, 3, 4, 5)])
def test_parts_in_order_are_the_whole(cuts: tuple[int, ...], num_top: int) -> None:
    parts = [part(*ends, num_top) for ends in pairwise((1, *cuts, NUM_PROMPT))]

    assert scores_of(*parts, num_top=num_top).hand_over() == part(1, NUM_PROMPT, num_top)


def test_nothing_is_handed_over_before_it_is_whole_and_it_is_once() -> None:
    scores = scores_of(part(1, 4))
    assert (scores.missing, scores.hand_over()) == (True, None)

    scores.take(part(4, 6))

    assert not scores.missing
    assert scores.hand_over() is not None
    assert scores.hand_over() is None


def test_what_a_later_row_computes_again_is_dropped() -> None:
    """A request that was evicted in the middle of its prompt begins it anew, in other chunks."""
    whole = scores_of(part(1, 4, 1), part(1, 3, 1), part(3, 6, 1), num_top=1).hand_over()

    assert whole is not None
    assert unpack_floats(whole.logprobs) == SCORES
    assert unpack_ids(whole.top_ids) == [10, 20, 30, 40, 50]
    assert unpack_floats(whole.top_logprobs) == SCORES


def test_a_part_behind_a_gap_is_an_error_of_ours() -> None:
    with pytest.raises(AssertionError, match="from 3 on, and 1 is next"):
        scores_of(part(3, 6))


def test_a_row_is_asked_only_while_something_is_missing() -> None:
    assert [PromptScores(wanted, NUM_PROMPT).to_ask for wanted in (None, 0, 3)] == [-1, 0, 3]
    assert scores_of(part(1, 6, 3), num_top=3).to_ask == -1


def test_a_prompt_of_one_token_is_whole_with_nothing() -> None:
    scores = PromptScores(2, 1)

    assert not scores.missing
    assert scores.hand_over() == PromptLogprobs(start=1, logprobs=b"", num_top=2)


def test_what_nobody_asked_for_is_never_handed_over() -> None:
    scores = PromptScores(None, NUM_PROMPT)

    assert (scores.missing, scores.hand_over()) == (False, None)


def test_other_weights_score_all_of_a_prompt() -> None:
    scores = scores_of(part(1, 4))
    scores.restart()
    scores.take(part(1, 6))

    handed_over = scores.hand_over()

    assert handed_over is not None
    assert unpack_floats(handed_over.logprobs) == SCORES
    scores.restart()
    assert not scores.missing  # once is enough


@pytest.mark.parametrize(("num_top", "most"), [(0, 8 * 2**20), (20, 204_600)])
def test_more_scores_than_can_be_sent_are_refused(num_top: int, most: int) -> None:
    check_size(None, 10 * most)
    check_size(num_top, most)
    with pytest.raises(RequestError, match="more scores than fit") as raised:
        check_size(num_top, most + 1)
    assert str(most) in raised.value.allowed
