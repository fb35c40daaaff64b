"""The record of a request: the same whatever its deltas were, and always of one length."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from callboard.messages.base import pack_floats, pack_ids
from callboard.messages.errors import WireError
from callboard.messages.logprobs import PromptLogprobs
from callboard.messages.requests import (
    Delta,
    EventKind,
    FinishReason,
    RequestEvent,
    Usage,
)
from callboard.messages.sampling import SamplingParams
from callboard.supervision.record import Completion, RequestRecord

ALL = SamplingParams(logprobs=2, prompt_logprobs=1)
PROMPT = [11, 12, 13, 14]
SCORES = [-0.5, -1.5, -2.5]

QUEUED, ADMITTED, FIRST, EVICTED, FINISHED = (
    RequestEvent(kind=kind, at=float(at))
    for at, kind in enumerate(
        (
            EventKind.QUEUED,
            EventKind.ADMITTED,
            EventKind.FIRST_TOKEN,
            EventKind.EVICTED,
            EventKind.FINISHED,
        )
    )
)


def top(token_id: int) -> tuple[tuple[int, float], ...]:
    return (token_id, -float(token_id)), (token_id + 1, -float(token_id) - 1.0)


def tokens(start: int, *token_ids: int, **fields: Any) -> Delta:
    """A delta of tokens, with all that may be asked for."""
    return Delta(
        request_id="a",
        **{
            "start": start,
            "token_ids": pack_ids(token_ids),
            "text": "".join(f"<{token_id}>" for token_id in token_ids),
            "logprobs": pack_floats([-float(token_id) for token_id in token_ids]),
            "top_logprobs": tuple(top(token_id) for token_id in token_ids),
            **fields,
        },
    )


def end(start: int, reason: FinishReason = FinishReason.STOP, **fields: Any) -> Delta:
    return Delta(request_id="a", start=start, finish=reason, **fields)


def scores(first: int, last: int) -> PromptLogprobs:
    """Log-probabilities of the prompt's tokens from one to another, with one alternative each."""
    return PromptLogprobs(
        start=first,
        logprobs=pack_floats(SCORES[first - 1 : last]),
        num_top=1,
        top_ids=pack_ids(range(first, last + 1)),
        top_logprobs=pack_floats(SCORES[first - 1 : last]),
    )


def record(*deltas: Delta, params: SamplingParams = ALL) -> RequestRecord:
    """A record of an accepted request, whose deltas came a second after each other."""
    made = RequestRecord(params, sent_at=100.0)
    made.accept(pack_ids(PROMPT), seed=7)
    for number, delta in enumerate(deltas, start=1):
        made.take(delta, 100.0 + number)
    return made


def whole(*deltas: Delta, params: SamplingParams = ALL) -> Completion:
    return record(*deltas, params=params).completion("a")


def test_a_record_puts_the_deltas_of_a_request_together() -> None:
    made = whole(
        tokens(0, 5, prompt_logprobs=scores(1, 3), events=(QUEUED, ADMITTED, FIRST)),
        tokens(1, 6),
        end(
            2,
            text="!",
            events=(FINISHED,),
            usage=Usage(prompt_tokens=4, cached_tokens=2, output_tokens=2),
        ),
    )

    assert made == Completion(
        id="a",
        prompt_token_ids=PROMPT,
        token_ids=[5, 6],
        text="<5><6>!",
        finish_reason=FinishReason.STOP,
        logprobs=[-5.0, -6.0],
        top_logprobs=[list(top(5)), list(top(6))],
        prompt_logprobs=SCORES,
        prompt_top_logprobs=[[(1, -0.5)], [(2, -1.5)], [(3, -2.5)]],
        seed=7,
        usage=Usage(prompt_tokens=4, cached_tokens=2, output_tokens=2),
        events=[QUEUED, ADMITTED, FIRST, FINISHED],
        latency_s=3.0,
        time_to_first_token_s=1.0,
        time_per_output_token_s=1.0,
    )


def test_what_was_not_asked_for_is_none() -> None:
    made = whole(tokens(0, 5, prompt_logprobs=scores(1, 3)), end(1), params=SamplingParams())

    assert (made.logprobs, made.top_logprobs) == (None, None)
    assert (made.prompt_logprobs, made.prompt_top_logprobs) == (None, None)


def test_without_alternatives_there_are_log_probabilities_alone() -> None:
    plain = PromptLogprobs(start=1, logprobs=pack_floats(SCORES))
    params = SamplingParams(logprobs=0, prompt_logprobs=0)

    made = whole(tokens(0, 5, top_logprobs=(), prompt_logprobs=plain), end(1), params=params)

    assert (made.logprobs, made.top_logprobs) == ([-5.0], None)
    assert (made.prompt_logprobs, made.prompt_top_logprobs) == (SCORES, None)


def test_a_request_without_a_token_has_empty_lists() -> None:
    made = whole(end(0, FinishReason.LENGTH, prompt_logprobs=scores(1, 3)))

    assert (made.token_ids, made.text, made.logprobs, made.top_logprobs) == ([], "", [], [])
    assert made.prompt_logprobs == SCORES
    assert made.latency_s == 1.0
    assert (made.time_to_first_token_s, made.time_per_output_token_s) == (None, None)


def test_a_prompt_of_one_token_has_no_log_probabilities_and_that_is_all_of_them() -> None:
    made = RequestRecord(ALL, sent_at=0.0)
    before = made.prompt_logprobs  # when it is not accepted, and the prompt not known

    made.accept(pack_ids([11]), seed=0)

    assert before is None
    assert (made.prompt_logprobs, made.prompt_top_logprobs) == ([], [])


@pytest.mark.parametrize("last", [1, 2])
def test_a_prompt_that_was_scored_in_part_has_no_log_probabilities(last: int) -> None:
    made = record(tokens(0, 5, prompt_logprobs=scores(1, last)))

    assert (made.prompt_logprobs, made.prompt_top_logprobs) == (None, None)


def test_where_some_delta_came_without_log_probabilities_there_are_none() -> None:
    made = record(tokens(0, 5), tokens(1, 6, logprobs=b""), tokens(2, 7, top_logprobs=()))

    assert (made.logprobs, made.top_logprobs) == (None, None)
    assert made.token_ids == [5, 6, 7]


def test_lengths_that_fit_by_accident_do_not_count() -> None:
    two = pack_floats([-1.0, -2.0])

    made = record(tokens(0, 5, logprobs=two), tokens(1, 6, logprobs=b""))

    assert made.logprobs is None


def test_what_the_engine_does_not_say_of_the_usage_is_counted_here() -> None:
    made = whole(tokens(0, 5), end(1, FinishReason.DEADLINE))

    assert made.usage == Usage(prompt_tokens=4, cached_tokens=0, output_tokens=1)


def test_a_record_can_be_read_while_the_request_runs() -> None:
    made = record(tokens(0, 5, events=(QUEUED,)))

    assert (made.token_ids, made.text, made.logprobs) == ([5], "<5>", [-5.0])
    assert (made.prompt_token_ids, made.seed, made.events) == (PROMPT, 7, [QUEUED])
    assert (made.finish_reason, made.time_to_first_token_s) == (None, 1.0)


def test_the_versions_of_the_weights_are_told_where_they_differ() -> None:
    same = whole(tokens(0, 5, weights_version=3), end(1))
    changed = whole(
        tokens(0, 5, 6, weights_version=3),
        tokens(2, 7, weights_version=4),
        tokens(3, 8, weights_version=4),
        end(4),
    )

    assert (same.weights_version, same.weights_versions) == (3, None)
    assert (changed.weights_version, changed.weights_versions) == (4, [3, 3, 4, 4])


def test_the_mean_time_of_a_token_leaves_out_the_wait_for_the_first() -> None:
    made = RequestRecord(ALL, sent_at=0.0)
    for start, now in enumerate((10.0, 11.0, 14.0)):
        made.take(tokens(start, 5), now)

    assert made.time_to_first_token_s == 10.0
    assert made.time_per_output_token_s == 2.0


# Lives


def test_a_request_that_moved_has_the_events_of_both_lives() -> None:
    again = msgspec.structs.replace(QUEUED, at=9.0)

    made = whole(
        tokens(0, 5, events=(QUEUED, ADMITTED, FIRST), prompt_logprobs=scores(1, 3)),
        tokens(1, 6, events=(again,), prompt_logprobs=scores(1, 3)),
        end(2, events=(FINISHED,)),
    )

    assert made.events == [QUEUED, ADMITTED, FIRST, again, FINISHED]
    assert made.prompt_logprobs == SCORES


def test_prompt_log_probabilities_may_come_in_parts_that_overlap() -> None:
    made = record(
        Delta(request_id="a", start=0, prompt_logprobs=scores(1, 2)),
        Delta(request_id="a", start=0, prompt_logprobs=scores(2, 3)),
    )

    assert made.prompt_logprobs == SCORES
    assert made.prompt_top_logprobs == [[(1, -0.5)], [(2, -1.5)], [(3, -2.5)]]


def test_prompt_log_probabilities_behind_a_gap_are_no_use() -> None:
    assert record(tokens(0, 5, prompt_logprobs=scores(2, 3))).prompt_logprobs is None


@pytest.mark.parametrize(
    "delta",
    [
        pytest.param(tokens(0, 9, events=(EVICTED,)), id="all tokens"),
        pytest.param(tokens(1, 9, weights_version=5), id="the last token"),
        pytest.param(Delta(request_id="a", start=1, events=(EVICTED,)), id="late events"),
        pytest.param(Delta(request_id="a", start=2, events=(QUEUED,)), id="known events"),
        pytest.param(Delta(request_id="a", start=2, prompt_logprobs=scores(1, 2)), id="a prompt"),
        pytest.param(Delta(request_id="a", start=2), id="nothing"),
    ],
)
def test_a_repeated_or_late_delta_is_no_news_and_changes_nothing(delta: Delta) -> None:
    made = record(tokens(0, 5, events=(QUEUED,), prompt_logprobs=scores(1, 3)), tokens(1, 6))

    news = made.take(delta, 200.0)
    made.take(end(2), 103.0)

    assert not news
    assert made.completion("a") == whole(
        tokens(0, 5, events=(QUEUED,), prompt_logprobs=scores(1, 3)), tokens(1, 6), end(2)
    )


def test_behind_the_end_nothing_changes() -> None:
    made = record(tokens(0, 5), end(1))
    before = made.completion("a")

    news = made.take(tokens(1, 6, events=(EVICTED,)), 200.0)
    again = made.take(end(1, FinishReason.ABORT), 200.0)

    assert (news, again) == (False, False)
    assert made.completion("a") == before


def test_an_end_that_comes_with_known_tokens_is_the_end_all_the_same() -> None:
    made = record(tokens(0, 5), tokens(1, 6), end(1, FinishReason.DEADLINE, events=(FINISHED,)))

    assert made.finish_reason is FinishReason.DEADLINE
    assert (made.token_ids, made.text, made.events) == ([5, 6], "<5><6>", [FINISHED])


@pytest.mark.parametrize(
    ("delta", "complaint"),
    [
        (tokens(3, 9), "does not go on from 2"),
        (tokens(1, 6, 7), "does not go on from 2"),
        (end(3), "does not go on from 2"),
        (tokens(2, 9, token_ids=b"abc"), "3 bytes of packed ids"),
        (Delta(request_id="a", start=2, text="?"), "text and no token"),
        (tokens(2, 9, prompt_logprobs=PromptLogprobs(start=1, logprobs=b"abc")), "3 bytes of log"),
        (
            tokens(2, 9, prompt_logprobs=PromptLogprobs(start=1, logprobs=b"abcd", num_top=1)),
            "with 0 and 0 bytes of 1 alternatives",
        ),
    ],
)
def test_a_delta_that_fits_nowhere_is_a_wire_error_and_changes_nothing(
    delta: Delta, complaint: str
) -> None:
    made = record(tokens(0, 5), tokens(1, 6))

    with pytest.raises(WireError, match=complaint):
        made.take(delta, 200.0)
    made.take(end(2), 103.0)

    assert made.completion("a") == whole(tokens(0, 5), tokens(1, 6), end(2))


# Properties


@st.composite
def lives(draw: st.DrawFn) -> tuple[list[Delta], list[Delta]]:
    """A request in one delta, and the same in segments of which some are said again."""
    length = draw(st.integers(0, 12))
    output = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
    kinds = draw(st.lists(st.sampled_from(EventKind), max_size=8))
    events = [RequestEvent(kind=kind, at=float(at)) for at, kind in enumerate(kinds)]
    usage = Usage(prompt_tokens=4, cached_tokens=0, output_tokens=length)
    once = [
        tokens(0, *output, events=tuple(events), prompt_logprobs=scores(1, 3)),
        end(length, text="!", usage=usage),
    ]
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=5))})
    segments = list(itertools.pairwise(cuts)) or [(0, 0)]
    places = sorted(draw(st.integers(0, len(segments) - 1)) for _ in events)
    scored = draw(st.lists(st.integers(1, 3), max_size=3))
    parts = list(itertools.pairwise(sorted({0, 3, *scored})))
    said: list[Delta] = []
    for number, (first, last) in enumerate(segments):
        mine = tuple(event for event, place in zip(events, places, strict=True) if place == number)
        delta = tokens(first, *output[first:last], events=mine)
        if number == 0:
            for low, high in parts:
                overlap = draw(st.integers(0, low))
                part = scores(1 + overlap, high)
                said.append(Delta(request_id="a", start=0, prompt_logprobs=part))
        said.append(delta)
        said += draw(st.lists(st.sampled_from(said), max_size=3))
    said.append(end(length, text="!", usage=usage))
    said += draw(st.lists(st.sampled_from(said), max_size=3))
    return once, said


@given(lives())
def test_however_a_request_is_split_and_repeated_its_record_is_the_same(
    deltas: tuple[list[Delta], list[Delta]],
) -> None:
    once, said = deltas
    plain, split = RequestRecord(ALL, sent_at=0.0), RequestRecord(ALL, sent_at=0.0)
    for made, parts in ((plain, once), (split, said)):
        made.accept(pack_ids(PROMPT), seed=7)
        for delta in parts:
            made.take(delta, 1.0)

    assert split.completion("a") == plain.completion("a")


@given(lives())
def test_the_lists_are_of_one_length_after_every_delta(
    deltas: tuple[list[Delta], list[Delta]],
) -> None:
    made = RequestRecord(ALL, sent_at=0.0)
    made.accept(pack_ids(PROMPT), seed=7)
    for delta in deltas[1]:
        made.take(delta, 1.0)

        assert made.logprobs is not None
        assert made.top_logprobs is not None
        assert len(made.logprobs) == len(made.top_logprobs) == made.num_tokens
        assert len(made.token_ids) == len(made.weights_versions) == made.num_tokens
        for scored in (made.prompt_logprobs, made.prompt_top_logprobs):
            assert scored is None or len(scored) == len(PROMPT) - 1
