"""How tokens are chosen and when a request ends: parameters, their ranges, and who checks them.

`check` is called once, where a request enters the engine, so that every other part may trust
what it is given.
"""

import enum
from collections.abc import Collection

import msgspec

from callboard.messages.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 100
MAX_BAD_WORD_CHARS = 128
MAX_BAD_TOKEN_IDS = 300
MAX_BAD_SEQUENCE_TOKENS = 64


class LogprobsMode(enum.StrEnum):
    """What log-probabilities are taken of."""

    RAW = "raw"  # the logits as the model gave them
    PROCESSED = "processed"  # what the token was chosen from, after all that the request asks for


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may ask of the sampler; defaults are greedy-free plain sampling.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. max_tokens None means "what the
    context has room for". seed None means that the engine draws one (and says which). logprobs n
    returns the log-probability of each output token and of the n likeliest alternatives,
    prompt_logprobs n the same of each prompt token but the first (processed ones after temperature,
    min-p, top-k and top-p alone: penalties, bias and bans are about what is chosen).
    max_tokens 0 computes the prompt and generates nothing.

    repetition_penalty divides the positive logits of tokens that are in the prompt or the output,
    and multiplies the negative ones; 1 is off. presence_penalty is taken off the logits of tokens
    that are in the output, frequency_penalty as often as they are there; 0 is off. logit_bias is
    added to the logits of its token ids. No word of bad_words and no sequence of bad_token_ids is
    completed in the output, whatever the prompt ends with.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    prompt_logprobs: int | None = None


def check(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise RequestError naming the first field that is out of range."""
    _check_number("temperature", params.temperature, 0.0, 100.0)
    _check_number("top_k", params.top_k, 0, MAX_TOP_K)
    _check_number("top_p", params.top_p, 0.0, 1.0, low_open=True)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        _check_number("seed", params.seed, 0, MAX_SEED)
    if params.max_tokens is not None:
        _check_number("max_tokens", params.max_tokens, 0, MAX_TOKENS)
    most = MAX_TOKENS if params.max_tokens is None else params.max_tokens
    _check_number("min_tokens", params.min_tokens, 0, most)
    if params.logprobs is not None:
        _check_number("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    if params.prompt_logprobs is not None:
        _check_number("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_texts("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    _check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
    _check_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _check_logit_bias(params.logit_bias, vocab_size)
    _check_texts("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    _check_bad_token_ids(params.bad_token_ids, vocab_size)
    _check_logprobs_mode(params.logprobs_mode)


def check_ids(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise RequestError when an id is outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
    raise RequestError(
        f"{field} has the id {wrong}, and the vocabulary ends at {vocab_size - 1}",
        field=field,
        allowed=f"0 to {vocab_size - 1}",
    )


def _check_number(
    field: str, value: float, low: float, high: float, *, low_open: bool = False, of: str = ""
) -> None:
    above = value > low if low_open else value >= low
    if above and value <= high:  # never of NaN
        return
    bracket = "above " if low_open else ""
    allowed = f"{bracket}{low} to {high}"
    raise RequestError(
        f"{field}{of} is {value}, and must be {allowed}", field=field, allowed=allowed
    )


def _check_count(field: str, values: Collection[object], most: int) -> None:
    if len(values) > most:
        raise RequestError(
            f"{field} has {len(values)} entries, and may have {most}",
            field=field,
            allowed=f"at most {most} entries",
        )


def _check_texts(field: str, texts: tuple[str, ...], most: int, most_chars: int) -> None:
    _check_count(field, texts, most)
    for text in texts:
        if not 1 <= len(text) <= most_chars:
            raise RequestError(
                f"{field} has a text of {len(text)} characters",
                field=field,
                allowed=f"1 to {most_chars} characters each",
            )


def _check_logit_bias(logit_bias: dict[int, float], vocab_size: int) -> None:
    _check_count("logit_bias", logit_bias, MAX_LOGIT_BIAS)
    check_ids("logit_bias", logit_bias, vocab_size)
    for token_id, bias in logit_bias.items():
        _check_number("logit_bias", bias, -100.0, 100.0, of=f" of token {token_id}")


def _check_bad_token_ids(sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    _check_count("bad_token_ids", sequences, MAX_BAD_TOKEN_IDS)
    for ids in sequences:
        check_ids("bad_token_ids", ids, vocab_size)
        if not 1 <= len(ids) <= MAX_BAD_SEQUENCE_TOKENS:
            raise RequestError(
                f"bad_token_ids has a sequence of {len(ids)} tokens",
                field="bad_token_ids",
                allowed=f"1 to {MAX_BAD_SEQUENCE_TOKENS} tokens each",
            )


def _check_logprobs_mode(mode: LogprobsMode) -> None:
    if mode not in tuple(LogprobsMode):
        allowed = " or ".join(LogprobsMode)
        raise RequestError(
            f"logprobs_mode is {mode}, and must be {allowed}",
            field="logprobs_mode",
            allowed=allowed,
        )
