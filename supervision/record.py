"""A request as its client sees it: its deltas merged into one record. Pure; it is told the time.

However a request came about, be it in one life or in several on different replicas, and whatever
of it is said twice, the record is the same and its lists are of one length.
"""

import math

import msgspec

from callboard.messages.base import TokenIds, unpack_floats, unpack_ids
from callboard.messages.errors import WireError
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs
from callboard.messages.requests import Delta, FinishReason, RequestEvent, Usage
from callboard.messages.sampling import SamplingParams

BYTES = 4  # of a token id and of a log-probability, as they travel


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request, whole.

    `logprobs` and `top_logprobs` have one entry a token, `prompt_logprobs` and
    `prompt_top_logprobs` one a prompt token but the first; None where they were not asked for, or
    where the engine gave none. `choice` tells the completions of one prompt apart. The weights of
    `weights_version` made the last token; `weights_versions` has one a token where they differ.

    Times are in seconds by the client's clock, so they have the way to the server and back in them:
    from sending the request to its terminal delta, to its first token, and the mean from token to
    token. `events` are what the engine says of the same, by its own clocks.
    """

    id: str
    choice: int = 0
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: list[list[tuple[int, float]]] | None = None
    seed: int = 0
    usage: Usage
    events: list[RequestEvent]
    weights_version: int = 0
    weights_versions: list[int] | None = None
    latency_s: float
    time_to_first_token_s: float | None = None
    time_per_output_token_s: float | None = None


class RequestRecord:
    """What is known of one request so far."""

    def __init__(self, params: SamplingParams, *, sent_at: float) -> None:
        """`sent_at` is on the clock that `take` is told the time of."""
        self.sent_at = sent_at
        self.seed = 0
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._prompt: TokenIds | None = None  # known once the request is accepted
        self._tokens = bytearray()
        self._text: list[str] = []
        self._logprobs = bytearray()
        self._has_logprobs = params.logprobs is not None  # for each token so far
        self._top: list[TopLogprobs] = []
        self._has_top = bool(params.logprobs)
        self._prompt_logprobs = bytearray()
        self._prompt_top: list[list[tuple[int, float]]] = []
        self._events: dict[RequestEvent, None] = {}  # in order, each once
        self._versions: list[tuple[int, int]] = []  # (first token, version), where it changes
        self._scored_by = 0
        self._usage: Usage | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._ended_at: float | None = None

    def accept(self, prompt: TokenIds, seed: int) -> None:
        """Note what the engine made of the prompt, and the seed it drew."""
        self._prompt = prompt
        self.seed = seed

    def take(self, delta: Delta, now: float) -> bool:
        """Merge a delta; returns whether it said anything new.

        One that repeats what is here, or comes behind the end, changes nothing. Raises WireError,
        and changes nothing, for one that leaves a gap or cannot be fitted to what is here.
        """
        if self.finish_reason is not None:
            return False
        repeats = self._repeats(delta)
        if repeats and delta.finish is None:
            return False
        if delta.prompt_logprobs is not None:
            _check(delta.prompt_logprobs)
        if not repeats:
            self._take_tokens(delta, now)
        has_more = self._take_events(delta.events)
        if delta.prompt_logprobs is not None:
            self._scored_by = delta.weights_version
            has_more |= self._take_prompt(delta.prompt_logprobs)
        if delta.finish is not None:
            self.finish_reason, self._usage, self._ended_at = delta.finish, delta.usage, now
        return has_more or bool(delta.token_ids) or delta.finish is not None

    @property
    def packed_ids(self) -> TokenIds:
        """The output as it travels."""
        return bytes(self._tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens the output has."""
        return len(self._tokens) // BYTES

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the engine reads it; empty before the request is accepted."""
        return unpack_ids(self._prompt or b"")

    @property
    def token_ids(self) -> list[int]:
        """The output."""
        return unpack_ids(self.packed_ids)

    @property
    def text(self) -> str:
        """The text of the output."""
        return "".join(self._text)

    @property
    def logprobs(self) -> list[float] | None:
        """One a token of the output, or None."""
        return unpack_floats(bytes(self._logprobs)) if self._has_logprobs else None

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        """The likeliest tokens in the place of each of the output, or None."""
        return [list(alternatives) for alternatives in self._top] if self._has_top else None

    @property
    def prompt_logprobs(self) -> list[float] | None:
        """One a token of the prompt but the first; None until all are here."""
        return unpack_floats(bytes(self._prompt_logprobs)) if self._prompt_is_scored else None

    @property
    def prompt_top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        """The likeliest tokens in the place of each of the prompt but the first, or None."""
        if not self._params.prompt_logprobs or not self._prompt_is_scored:
            return None
        is_whole = len(self._prompt_top) * BYTES == len(self._prompt_logprobs)
        return list(self._prompt_top) if is_whole else None

    @property
    def events(self) -> list[RequestEvent]:
        """What has happened to the request, in order; of all its lives, when it had several."""
        return list(self._events)

    @property
    def usage(self) -> Usage:
        """What the engine said at the end; else counted here, with nothing known to be cached."""
        if self._usage is not None:
            return self._usage
        prompt_tokens = len(self._prompt or b"") // BYTES
        return Usage(prompt_tokens=prompt_tokens, cached_tokens=0, output_tokens=self.num_tokens)

    @property
    def weights_version(self) -> int:
        """The version of the weights that made the last token, or scored a prompt without any."""
        return self._versions[-1][1] if self._versions else self._scored_by

    @property
    def weights_versions(self) -> list[int]:
        """The version that made each token."""
        ends = [start for start, _ in self._versions[1:]] + [self.num_tokens]
        runs = zip(self._versions, ends, strict=False)
        return [version for (start, version), end in runs for _ in range(start, end)]

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from sending the request to its first token; None before there is one."""
        return None if self._first_token_at is None else self._first_token_at - self.sent_at

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean seconds from token to token; None before there are two."""
        if self._first_token_at is None or self._last_token_at is None or self.num_tokens < 2:
            return None
        return (self._last_token_at - self._first_token_at) / (self.num_tokens - 1)

    def completion(self, request_id: str, choice: int = 0) -> Completion:
        """Return the request whole; it must have ended."""
        assert self.finish_reason is not None
        assert self._ended_at is not None
        return Completion(
            id=request_id,
            choice=choice,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            seed=self.seed,
            usage=self.usage,
            events=self.events,
            weights_version=self.weights_version,
            weights_versions=self.weights_versions if len(self._versions) > 1 else None,
            latency_s=self._ended_at - self.sent_at,
            time_to_first_token_s=self.time_to_first_token_s,
            time_per_output_token_s=self.time_per_output_token_s,
        )

    def _repeats(self, delta: Delta) -> bool:
        """Whether the tokens of a delta are here already. Raises WireError if it fits nowhere."""
        added, odd = divmod(len(delta.token_ids), BYTES)
        if odd:
            raise WireError(f"{len(delta.token_ids)} bytes of packed ids")
        end = delta.start + added
        if delta.start < self.num_tokens and end <= self.num_tokens:
            return True
        if delta.start != self.num_tokens:
            raise WireError(
                f"a delta of tokens {delta.start} to {end} does not go on from {self.num_tokens}"
            )
        if delta.text and not added and delta.finish is None:
            raise WireError("a delta has text and no token")
        return False

    def _take_tokens(self, delta: Delta, now: float) -> None:
        self._text.append(delta.text)
        if not delta.token_ids:
            return
        if not self._versions or self._versions[-1][1] != delta.weights_version:
            self._versions.append((delta.start, delta.weights_version))
        self._has_logprobs &= len(delta.logprobs) == len(delta.token_ids)
        self._has_top &= len(delta.top_logprobs) * BYTES == len(delta.token_ids)
        self._tokens += delta.token_ids
        self._logprobs += delta.logprobs
        self._top += delta.top_logprobs
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now

    def _take_events(self, events: tuple[RequestEvent, ...]) -> bool:
        before = len(self._events)
        self._events.update(dict.fromkeys(events))
        return len(self._events) > before

    def _take_prompt(self, part: PromptLogprobs) -> bool:
        """Append what is not here yet; each life of a request may say it from the start."""
        known = len(self._prompt_logprobs) // BYTES
        repeated = 1 + known - part.start
        if not 0 <= repeated < len(part.logprobs) // BYTES:
            return False  # all is here; or what comes before is not, and the prompt stays without
        self._prompt_logprobs += part.logprobs[repeated * BYTES :]
        ids, logprobs = unpack_ids(part.top_ids), unpack_floats(part.top_logprobs)
        pairs = list(zip(ids, logprobs, strict=False))
        lines = [pairs[at : at + part.num_top] for at in range(0, len(pairs), part.num_top or 1)]
        tops = [[pair for pair in line if pair[1] > -math.inf] for line in lines]
        self._prompt_top += tops[repeated:]
        return True

    @property
    def _prompt_is_scored(self) -> bool:
        if self._params.prompt_logprobs is None or not self._prompt:
            return False
        return len(self._prompt_logprobs) == len(self._prompt) - BYTES


def _check(part: PromptLogprobs) -> None:
    """Raise WireError where the lengths of the parts do not fit together."""
    size, num_top = len(part.logprobs), part.num_top
    if size % BYTES or not len(part.top_ids) == len(part.top_logprobs) == size * num_top:
        raise WireError(
            f"{size} bytes of log-probabilities of a prompt, with {len(part.top_ids)} and "
            f"{len(part.top_logprobs)} bytes of {num_top} alternatives each"
        )
