from array import array

import pytest

from callboard.actors.ledger import Ledger, Phase, Request
from callboard.messages.base import pack_floats, pack_ids
from callboard.messages.errors import Failure
from callboard.messages.requests import Delta, FinishReason
from callboard.messages.sampling import LogprobsMode, SamplingParams


class Words:
    """A text stream: a word a token; holds the last word back, and stops at one of them."""

    def __init__(self, stop_at: int | None = None, *, stop_at_end: bool = False) -> None:
        self.held = ""
        self.stopped: str | None = None
        self._stop_at = stop_at
        self._stop_at_end = stop_at_end

    def continue_from(self, token_id: int) -> None:
        pass

    def push(self, token_id: int) -> str:
        if token_id == self._stop_at:
            self.stopped = f"<{token_id}>"
            return self.held
        said, self.held = self.held, f"<{token_id}>"
        return said

    def finish(self) -> str:
        if self._stop_at_end:
            self.stopped = self.held
        said, self.held = self.held, ""
        return said


def a_request(
    request_id: str = "a",
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    params: SamplingParams | None = None,
    text: Words | None = None,
) -> Request:
    return Request(
        request_id,
        array("i", prompt),
        params or SamplingParams(),
        seed=7,
        max_tokens=10,
        stop_token_ids=(99,),
        order=(0, 1),
        text=text,
        accepted_at=0.0,
        deadline=float("inf"),
    )


def take(request: Request, *token_ids: int) -> list[Delta]:
    return [request.take_token(token_id, None, (), 0) for token_id in token_ids]


def test_a_request_waits_holding_nothing() -> None:
    request = a_request()
    assert request.phase is Phase.WAITING
    assert (request.row, request.length, request.blocks) == (None, 0, 0)


def test_deltas_follow_one_another_from_token_0() -> None:
    deltas = take(a_request(), 5, 6, 7)
    assert [delta.start for delta in deltas] == [0, 1, 2]
    assert [delta.token_ids for delta in deltas] == [pack_ids((n,)) for n in (5, 6, 7)]
    assert all(delta.finish is None and delta.failure is None for delta in deltas)


def test_a_row_has_prompt_and_output_to_prefill() -> None:
    ledger, request = Ledger(), a_request()
    ledger.add(request)
    take(request, 5, 6)
    ledger.admit(request, 41)
    assert request.phase is Phase.PREFILLING
    assert (request.row, request.target, request.length) == (41, 5, 0)
    assert request.tokens == array("i", (1, 2, 3, 5, 6))


def test_a_row_knows_all_that_was_asked_of_its_tokens() -> None:
    params = SamplingParams(
        logprobs=3,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 2.0},
        bad_token_ids=((1, 2), (3,)),
        logprobs_mode=LogprobsMode.PROCESSED,
    )

    sampling = a_request(params=params).sampling()

    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
        assert getattr(sampling, field) == getattr(params, field)
    assert sampling.bad_token_ids == ((1, 2), (3,))
    assert (sampling.logprobs, sampling.processed_logprobs) == (3, True)
    assert not a_request().sampling().processed_logprobs


def test_a_checkpoint_keeps_the_output_and_nothing_else() -> None:
    ledger, request = Ledger(), a_request()
    ledger.add(request)
    ledger.admit(request, 41)
    take(request, 5, 6)
    request.length, request.blocks = 5, 2
    assert ledger.checkpoint(request) == 41
    assert request.phase is Phase.WAITING
    assert (request.row, request.length, request.blocks) == (None, 0, 0)
    assert request.output == array("i", (5, 6))
    assert ledger.in_row(41) is None
    assert ledger.get("a") is request


def test_sampling_counts_from_output_index_0_after_a_checkpoint_too() -> None:
    request = a_request(params=SamplingParams(temperature=0.5, min_tokens=2, logprobs=3))
    take(request, 5, 6)
    sampling = request.sampling()
    assert sampling.first_position == 2
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (10, 2, 7)
    assert sampling.stop_token_ids == (99,)
    assert sampling.logprobs == 3


def test_a_request_checkpointed_again_and_again_goes_on_behind_all_its_tokens() -> None:
    ledger, request = Ledger(), a_request(prompt=tuple(range(1, 9)))
    ledger.add(request)
    hashes = request.hashes_of(2, 4)
    for row, num_output, num_left in ((41, 0, 10), (42, 4, 6), (43, 8, 2)):
        ledger.admit(request, row)
        sampling = request.sampling()
        assert request.target == 8 + num_output
        assert sampling.max_tokens - sampling.first_position == num_left
        assert request.hashes_of(request.target // 4, 4)[:2] == hashes
        take(request, *range(50, 54))
        ledger.checkpoint(request)
    assert len(request.hashes) == 4
    assert request.tokens == array(
        "i", (*range(1, 9), *range(50, 54), *range(50, 54), *range(50, 54))
    )


def test_a_request_that_wants_no_logprobs_asks_the_sampler_for_none() -> None:
    assert a_request().sampling().logprobs == -1


def test_delivered_output_is_taken_over_without_being_said_again() -> None:
    request = a_request(text=Words())
    request.restore_output(array("i", (5, 6)))
    (delta,) = take(request, 7)
    assert delta.start == 2
    assert delta.text == "<6>"  # the words before were said in the earlier life


@pytest.mark.parametrize("wanted", [None, 0, 2])
def test_logprobs_are_in_a_delta_as_they_were_asked_for(wanted: int | None) -> None:
    request = a_request(params=SamplingParams(logprobs=wanted))
    top = ((5, -0.5), (6, -1.5))
    delta = request.take_token(5, -0.5, top if wanted else (), 3)
    assert delta.logprobs == (b"" if wanted is None else pack_floats((-0.5,)))
    assert delta.top_logprobs == ((top,) if wanted else ())
    assert delta.weights_version == 3


def test_a_terminal_delta_says_the_text_that_was_held_back() -> None:
    ledger, request = Ledger(), a_request(text=Words())
    ledger.add(request)
    take(request, 5, 6)
    delta = ledger.finish(request, FinishReason.ABORT, at=5.0)
    assert (delta.start, delta.token_ids, delta.text) == (2, b"", "<6>")
    assert delta.finish is FinishReason.ABORT


def test_a_terminal_delta_carries_the_last_token() -> None:
    ledger, request = Ledger(), a_request(text=Words())
    ledger.add(request)
    deltas = take(request, 5, 6)
    delta = ledger.finish(request, FinishReason.LENGTH, last=deltas[-1], at=5.0)
    assert (delta.start, delta.token_ids, delta.text) == (1, pack_ids((6,)), "<5><6>")


def test_nothing_is_said_behind_a_stop_string() -> None:
    ledger, request = Ledger(), a_request(text=Words(stop_at=6))
    ledger.add(request)
    deltas = take(request, 5, 6)
    assert request.hit_stop_string
    delta = ledger.finish(request, FinishReason.STOP, last=deltas[-1], at=5.0)
    assert delta.text == "<5>"


def test_a_stop_string_made_of_the_last_half_character_is_why_a_request_ended() -> None:
    ledger, request = Ledger(), a_request(text=Words(stop_at_end=True))
    ledger.add(request)
    deltas = take(request, 5)
    assert ledger.finish(request, FinishReason.LENGTH, last=deltas[-1], at=5.0).finish == "stop"
    assert request.finish_reason is FinishReason.STOP


def test_a_terminal_delta_says_why_a_request_failed() -> None:
    ledger, request = Ledger(), a_request()
    ledger.add(request)
    failure = Failure(code="RequestFailed", message="no reason")
    assert ledger.finish(request, FinishReason.ERROR, failure=failure, at=5.0).failure == failure


def test_a_finished_request_is_in_no_list_any_more() -> None:
    ledger, request = Ledger(), a_request()
    ledger.add(request)
    ledger.admit(request, 41)
    ledger.finish(request, FinishReason.STOP, at=5.0)
    assert request.phase is Phase.DONE
    assert (len(ledger), ledger.num_rows, ledger.rows(), list(ledger)) == (0, 0, [], [])
    assert "a" not in ledger
    assert ledger.get("a") is None
    assert ledger.in_row(41) is None


def test_a_request_cannot_end_twice() -> None:
    ledger, request = Ledger(), a_request()
    ledger.add(request)
    ledger.finish(request, FinishReason.STOP, at=5.0)
    with pytest.raises(AssertionError, match="a ended twice"):
        ledger.finish(request, FinishReason.ABORT, at=5.0)


def test_an_id_in_use_cannot_be_added() -> None:
    ledger = Ledger()
    ledger.add(a_request())
    with pytest.raises(AssertionError):
        ledger.add(a_request())


def test_rows_are_listed_in_the_order_of_their_admission() -> None:
    ledger = Ledger()
    requests = [a_request(name) for name in "abc"]
    for request in requests:
        ledger.add(request)
    for row, request in zip((3, 1, 2), reversed(requests), strict=True):
        ledger.admit(request, row)
    assert [request.request_id for request in ledger.rows()] == ["c", "b", "a"]
    assert ledger.num_rows == 3
