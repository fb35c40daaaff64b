"""The requests a scheduler has accepted: what each has produced, where it stands, how it ended.

Pure: no I/O, no clock of its own. Whatever happens to a request, `finish` is called on it once and
what it returns is its terminal delta.
"""

import enum
from array import array
from collections.abc import Iterator
from typing import Protocol

import msgspec

from callboard.actors.prompt_scores import PromptScores
from callboard.gpu.prefix import BlockHash, extend_hashes, root_hash
from callboard.messages.base import id_array, pack_floats
from callboard.messages.errors import Failure
from callboard.messages.logprobs import TopLogprobs
from callboard.messages.requests import (
    Delta,
    EventKind,
    FinishReason,
    RequestEvent,
    RequestId,
    Usage,
)
from callboard.messages.sampling import LogprobsMode, SamplingParams
from callboard.messages.steps import RowId, RowSampling

_FIRST_ROOT = root_hash(salt=b"", weights_version=0)

_LAST_EVENT = {
    FinishReason.STOP: EventKind.FINISHED,
    FinishReason.LENGTH: EventKind.FINISHED,
    FinishReason.ABORT: EventKind.ABORTED,
    FinishReason.DEADLINE: EventKind.ABORTED,
    FinishReason.ERROR: EventKind.FAILED,
}


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()  # in the queue, holding nothing
    PREFILLING = enum.auto()  # a row, with part of its prompt still to be computed
    DECODING = enum.auto()  # a row that gets a token a step
    STARVED = enum.auto()  # a decoding row whose last block is full, waiting for another
    DONE = enum.auto()


class TextOut(Protocol):
    """Text made of one request's token ids; see `callboard.gpu.text.TextStream`."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        ...

    def continue_from(self, token_id: int) -> None:
        """Go on behind a prompt's text, which ends with this token."""
        ...

    def push(self, token_id: int) -> str:
        """Take a token and return the text that may be shown now."""
        ...

    def finish(self) -> str:
        """Return the text held back."""
        ...


class Request:
    """One accepted request. Its output survives everything but its end."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: "array[int]",
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        order: tuple[int, int],
        text: TextOut | None,
        accepted_at: float,
        deadline: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_token_ids = stop_token_ids
        self.order = order
        self.text = text
        self.accepted_at = accepted_at
        self.deadline = deadline
        self.first_token_at: float | None = None  # None too when it came in an earlier life
        self.finish_reason: FinishReason | None = None
        self.output = id_array()
        self.phase = Phase.WAITING
        self.row: RowId | None = None
        self.target = 0  # tokens to prefill: prompt and output so far
        self.length = 0  # of those, tokens in the KV cache with the last step that was planned
        self.blocks = 0  # blocks held
        self.ends_with = 0  # the run that makes its last token, if nothing ends it before
        self.starved_at = 0  # the first run it had no block for
        self.root = _FIRST_ROOT
        self.hashes: list[BlockHash] = []  # of the full blocks of the tokens, as far as known
        self.shared = 0  # blocks of its row that others may find, or that it found
        self.cached_tokens: int | None = None  # of the prompt, when it was first admitted
        self.crashes = 0
        self.overtaken = 0  # steps in which a younger one was admitted and this one did not fit
        self.prompt_scores = PromptScores(params.prompt_logprobs, len(prompt))
        self.scored_by = 0  # the version of the weights that did it
        self._news: list[RequestEvent] = []  # what no delta has told yet

    @property
    def has_run(self) -> bool:
        """Whether it has had a row, here or in an earlier life that made tokens."""
        return self.cached_tokens is not None or bool(self.output)

    @property
    def tokens(self) -> "array[int]":
        """Everything a recomputation has to put back: the prompt and the output so far."""
        return self.prompt + self.output

    def restore_output(self, delivered: "array[int]") -> None:
        """Take over output that its client already has, from an earlier life of the request."""
        for token_id in delivered:
            self.output.append(token_id)
            if self.text is not None:
                self.text.push(token_id)
        if delivered:  # the first token came with them
            self.prompt_scores = PromptScores(None, len(self.prompt))

    def note(self, kind: EventKind, at: float) -> None:
        """Remember that something happened, for the next delta to tell."""
        self._news.append(RequestEvent(kind=kind, at=at))

    def take_news(self) -> tuple[RequestEvent, ...]:
        """Return what has happened since this was called last."""
        news = tuple(self._news)
        self._news.clear()
        return news

    def admit(self, row: RowId) -> None:
        """Become a row, with everything still to be prefilled."""
        self.row = row
        self.target = len(self.prompt) + len(self.output)
        self.length = 0
        self.blocks = 0
        self.shared = 0
        self.phase = Phase.PREFILLING

    def hashes_of(self, num_blocks: int, block_tokens: int) -> list[BlockHash]:
        """Return the hashes of the first full blocks, each of all tokens up to its end."""
        known = len(self.hashes)
        if known < num_blocks:
            parent = self.hashes[-1] if self.hashes else self.root
            tokens = self.tokens[known * block_tokens : num_blocks * block_tokens]
            self.hashes += extend_hashes(parent, tokens, block_tokens)
        return self.hashes[:num_blocks]

    def hash_from(self, root: BlockHash) -> None:
        """Name the blocks of the coming row by hashes that begin with this root, the weights'."""
        assert self.row is None, "the blocks of a row keep their names"
        if self.root != root:
            self.root, self.hashes = root, []
            self.prompt_scores.restart()

    def checkpoint(self) -> None:
        """Leave the device: keep the output, and prefill it with the prompt next time."""
        self.row = None
        self.length = 0
        self.blocks = 0
        self.phase = Phase.WAITING

    def sampling(self) -> RowSampling:
        """Return what the executor needs to know to choose this request's tokens."""
        params = self.params
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=self.stop_token_ids,
            first_position=len(self.output),
            logprobs=-1 if params.logprobs is None else params.logprobs,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            bad_token_ids=params.bad_token_ids,
            processed_logprobs=params.logprobs_mode == LogprobsMode.PROCESSED,
            prompt_logprobs=self.prompt_scores.to_ask,
        )

    def take_token(
        self, token_id: int, logprob: float | None, top: TopLogprobs, weights_version: int
    ) -> Delta:
        """Append a sampled token and return what it adds to the stream, text included."""
        start = len(self.output)
        self.output.append(token_id)
        text = "" if self.text is None else self.text.push(token_id)
        logprobs = b""
        if logprob is not None and self.params.logprobs is not None:
            logprobs = pack_floats((logprob,))
        return Delta(
            request_id=self.request_id,
            start=start,
            token_ids=token_id.to_bytes(4, "little"),  # pack_ids takes three times as long for one
            text=text,
            logprobs=logprobs,
            top_logprobs=(top,) if self.params.logprobs else (),
            weights_version=weights_version,
            prompt_logprobs=self.prompt_scores.hand_over() if start == 0 else None,
            events=self.take_news() if self._news else (),
        )

    def usage(self) -> Usage:
        """Return what the request has taken so far."""
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            output_tokens=len(self.output),
        )

    def held_text(self) -> str:
        """Return the text held back for a stop string or half a character, at the end."""
        return "" if self.text is None else self.text.finish()

    @property
    def hit_stop_string(self) -> bool:
        """Whether the text has met one of the request's stop strings."""
        return self.text is not None and self.text.stopped is not None


class Ledger:
    """All accepted requests by id, and those with a row by row."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, Request] = {}
        self._rows: dict[RowId, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Accept a request whose id is not in use."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def get(self, request_id: RequestId) -> Request | None:
        """Return a request that has not ended, or None."""
        return self._requests.get(request_id)

    def in_row(self, row: RowId) -> Request | None:
        """Return the request that has that row now; None when the row was dropped meanwhile."""
        return self._rows.get(row)

    def rows(self) -> list[Request]:
        """Return the requests with a row, in the order in which they were admitted."""
        return list(self._rows.values())

    def iter_rows(self) -> Iterator[Request]:
        """Go over the requests with a row, in that order; none may come or go meanwhile."""
        return iter(self._rows.values())

    @property
    def num_rows(self) -> int:
        """How many requests have a row."""
        return len(self._rows)

    def admit(self, request: Request, row: RowId) -> None:
        """Give a request a row."""
        request.admit(row)
        self._rows[row] = request

    def checkpoint(self, request: Request) -> RowId:
        """Take a request off the device, output kept; returns the row it had."""
        row = request.row
        assert row is not None
        del self._rows[row]
        request.checkpoint()
        return row

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        at: float,
        failure: Failure | None = None,
        last: Delta | None = None,
    ) -> Delta:
        """End a request, once; returns its terminal delta, with `last` step's part in it."""
        assert request.phase is not Phase.DONE, f"{request.request_id} ended twice"
        if request.row is not None:
            del self._rows[request.row]
        del self._requests[request.request_id]
        request.phase = Phase.DONE
        # What is held back because a stop string might begin there is text like any other now.
        text = "" if request.hit_stop_string else request.held_text()
        if request.hit_stop_string and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP  # half a character at the very end has become part of one
        request.finish_reason = reason
        request.note(_LAST_EVENT[reason], at)
        if last is None:
            last = Delta(
                request_id=request.request_id,
                start=len(request.output),
                prompt_logprobs=request.prompt_scores.hand_over(),
                weights_version=request.scored_by,
            )
        return msgspec.structs.replace(
            last,
            text=last.text + text,
            finish=reason,
            failure=failure,
            events=(*last.events, *request.take_news()),
            usage=request.usage(),
        )
