import math
from typing import Any

import msgspec
import pytest

from callboard.messages.errors import RequestError
from callboard.messages.sampling import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_K,
    LogprobsMode,
    SamplingParams,
    check,
    check_ids,
)

VOCAB = 1000
HUGE = 10**400  # JSON can say it, a float cannot hold it


def checked(**fields: Any) -> SamplingParams:
    params = SamplingParams(**fields)
    check(params, vocab_size=VOCAB)
    return params


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        checked(**fields)
    return caught.value


def test_the_defaults_are_allowed() -> None:
    checked()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("temperature", 1),
        ("top_k", 0),
        ("top_k", MAX_TOP_K),
        ("top_p", 5e-324),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", None),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("max_tokens", None),
        ("max_tokens", 0),
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("min_tokens", 0),
        ("min_tokens", 2**31 - 1),
        ("logprobs", None),
        ("logprobs", 0),
        ("logprobs", MAX_LOGPROBS),
        ("prompt_logprobs", None),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", MAX_LOGPROBS),
        ("stop", ("x",) * MAX_STOP_STRINGS),
        ("stop", ("x" * MAX_STOP_STRING_CHARS,)),
        ("stop_token_ids", (0, VOCAB - 1)),
        ("stop_token_ids", (1,) * MAX_STOP_TOKEN_IDS),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100.0),
        ("repetition_penalty", 1),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2),
        ("logit_bias", {0: -100.0, VOCAB - 1: 100.0}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 0.0)),
        ("bad_words", ("x",) * MAX_BAD_WORDS),
        ("bad_words", ("x" * MAX_BAD_WORD_CHARS,)),
        ("bad_token_ids", ((0, VOCAB - 1), (5,) * MAX_BAD_SEQUENCE_TOKENS)),
        ("bad_token_ids", ((1,),) * MAX_BAD_TOKEN_IDS),
        ("logprobs_mode", LogprobsMode.RAW),
        ("logprobs_mode", LogprobsMode.PROCESSED),
    ],
)
def test_every_limit_itself_is_allowed(field: str, value: Any) -> None:
    checked(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.001),
        ("temperature", 100.001),
        ("temperature", HUGE),
        ("top_k", -1),
        ("top_k", MAX_TOP_K + 1),
        ("top_k", HUGE),
        ("top_p", 0.0),
        ("top_p", 1.001),
        ("top_p", -1.0),
        ("min_p", -0.001),
        ("min_p", 1.001),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", HUGE),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        ("stop", ("",)),
        ("stop", ("fine", "")),
        ("stop", ("x" * (MAX_STOP_STRING_CHARS + 1),)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", (5, HUGE)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 100.1),
        ("repetition_penalty", HUGE),
        ("presence_penalty", -2.001),
        ("presence_penalty", 2.001),
        ("frequency_penalty", -2.001),
        ("frequency_penalty", 2.001),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {VOCAB: 0.0}),
        ("logit_bias", {HUGE: 0.0}),
        ("logit_bias", {1: -100.001}),
        ("logit_bias", {1: 0.0, 2: 100.001}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: -math.inf}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
        ("bad_words", ("x",) * (MAX_BAD_WORDS + 1)),
        ("bad_words", ("fine", "")),
        ("bad_words", ("x" * (MAX_BAD_WORD_CHARS + 1),)),
        ("bad_token_ids", ((1, 2), ())),
        ("bad_token_ids", ((1, -1),)),
        ("bad_token_ids", ((VOCAB,),)),
        ("bad_token_ids", ((1, HUGE),)),
        ("bad_token_ids", ((1,) * (MAX_BAD_SEQUENCE_TOKENS + 1),)),
        ("bad_token_ids", ((1,),) * (MAX_BAD_TOKEN_IDS + 1)),
        ("logprobs_mode", "cooked"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_by_the_name_of_the_field(field: str, value: Any) -> None:
    error = refused(**{field: value})

    assert error.field == field
    assert error.allowed


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(field: str, value: float) -> None:
    assert refused(**{field: value}).field == field


def test_a_refusal_says_the_value_and_exactly_what_would_be_right() -> None:
    error = refused(top_k=-5)
    assert str(error) == "top_k is -5, and must be 0 to 2147483647"
    assert error.allowed == "0 to 2147483647"

    assert refused(seed=-1).allowed == "0 to 9223372036854775807"
    assert refused(top_p=0.0).allowed == "above 0.0 to 1.0"
    assert refused(stop_token_ids=(VOCAB,)).allowed == "0 to 999"
    assert "the id 1000" in str(refused(stop_token_ids=(VOCAB,)))

    assert refused(repetition_penalty=0.0).allowed == "0.01 to 100.0"
    assert refused(presence_penalty=3.0).allowed == "-2.0 to 2.0"
    assert refused(bad_words=("",)).allowed == "1 to 128 characters each"
    assert refused(bad_token_ids=((),)).allowed == "1 to 64 tokens each"
    assert refused(logprobs_mode="cooked").allowed == "raw or processed"
    error = refused(logit_bias={1: 1.0, 7: -101.0})
    assert str(error) == "logit_bias of token 7 is -101.0, and must be -100.0 to 100.0"


def test_no_more_tokens_can_be_demanded_than_are_allowed() -> None:
    checked(max_tokens=5, min_tokens=5)

    checked(max_tokens=0, min_tokens=0)
    refused(max_tokens=0, min_tokens=1)
    error = refused(max_tokens=5, min_tokens=6)

    assert (error.field, error.allowed) == ("min_tokens", "0 to 5")


def test_the_first_wrong_field_is_named() -> None:
    assert refused(temperature=-1.0, top_p=7.0).field == "temperature"


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [0, 1, VOCAB + 5]])
def test_ids_outside_the_vocabulary_are_refused_by_field(ids: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        check_ids("prompt", ids, VOCAB)

    assert caught.value.field == "prompt"
    assert str(ids[-1]) in str(caught.value)


def test_ids_of_the_vocabulary_are_allowed_however_they_come() -> None:
    check_ids("prompt", range(VOCAB), VOCAB)
    check_ids("prompt", [], VOCAB)


@pytest.mark.parametrize(
    "text",
    [
        '{"temprature": 1}',
        '{"temperature": "hot"}',
        '{"top_k": 1.5}',
        '{"top_k": true}',
        '{"stop": "x"}',
        '{"seed": null, "stop": [1]}',
        '{"temperature": NaN}',
        '{"logit_bias": {"5": NaN}}',
        '{"logit_bias": {"five": 1}}',
        '{"logit_bias": {"5": "1"}}',
        '{"bad_words": "x"}',
        '{"bad_token_ids": [1]}',
        '{"logprobs_mode": "cooked"}',
    ],
)
def test_json_of_the_wrong_shape_never_becomes_parameters(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(text, type=SamplingParams)


def test_json_with_an_absurd_number_is_refused_like_any_other() -> None:
    params = msgspec.json.decode('{"seed": 1' + "0" * 400 + "}", type=SamplingParams)

    with pytest.raises(RequestError):
        check(params, vocab_size=VOCAB)


def test_json_has_token_ids_as_keys_of_the_bias() -> None:
    params = msgspec.json.decode('{"logit_bias": {"5": -100, "17": 0.5}}', type=SamplingParams)

    assert params.logit_bias == {5: -100.0, 17: 0.5}
