"""How tokens are chosen and when a request ends: parameters, their ranges, and who checks them.

`check` is called once, where a request enters the engine, so that every other part may trust
what it is given.
"""

from collections.abc import Iterable

import msgspec

from callboard.messages.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may ask of the sampler; defaults are greedy-free plain sampling.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. max_tokens None means "what the
    context has room for". seed None means that the engine draws one (and says which). logprobs n
    returns the log-probability of each output token and of the n likeliest alternatives.
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


def check(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise RequestError naming the first field that is out of range."""
    _check_number("temperature", params.temperature, 0.0, 100.0)
    _check_number("top_k", params.top_k, 0, MAX_TOP_K)
    _check_number("top_p", params.top_p, 0.0, 1.0, low_open=True)
    _check_number("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        _check_number("seed", params.seed, 0, MAX_SEED)
    if params.max_tokens is not None:
        _check_number("max_tokens", params.max_tokens, 1, 2**31 - 1)
    _check_number("min_tokens", params.min_tokens, 0, params.max_tokens or 2**31 - 1)
    if params.logprobs is not None:
        _check_number("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _check_stop_strings(params.stop)
    _check_count("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKEN_IDS)
    check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError when an id is outside the vocabulary."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{field} has the id {token_id}, and the vocabulary ends at {vocab_size - 1}",
                field=field,
                allowed=f"0 to {vocab_size - 1}",
            )


def _check_number(
    field: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    above = value > low if low_open else value >= low
    if above and value <= high:  # never of NaN
        return
    bracket = "above " if low_open else ""
    allowed = f"{bracket}{low} to {high}"
    raise RequestError(f"{field} is {value}, and must be {allowed}", field=field, allowed=allowed)


def _check_count(field: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise RequestError(
            f"{field} has {len(values)} entries, and may have {most}",
            field=field,
            allowed=f"at most {most} entries",
        )


def _check_stop_strings(stop: tuple[str, ...]) -> None:
    _check_count("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"a stop string has {len(text)} characters",
                field="stop",
                allowed=f"1 to {MAX_STOP_STRING_CHARS} characters each",
            )
