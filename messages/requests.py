"""The conversation about a request: submitted, accepted or refused, tokens, one terminal delta.

    client → coordinator → replica      Submit, Abort
    replica → coordinator → client      Accepted | Refused, then TokensOut whose last Delta for the
                                        request has a finish reason

A request that moves to another replica, or whose coordinator came back with an empty ledger, is
submitted again with `delivered`: the tokens its client already has. The stream goes on behind them.
"""

import enum

import msgspec

from callboard.messages.base import Message, TokenIds
from callboard.messages.errors import Failure
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs
from callboard.messages.sampling import SamplingParams

RequestId = str
"""Chosen by the client and unique among its open requests; the coordinator makes it unique."""

MAX_REQUEST_ID_CHARS = 256
MAX_TIMEOUT_S = 1e9


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # the end-of-sequence token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # somebody aborted it, or the engine stopped
    DEADLINE = "deadline"  # its deadline passed
    ERROR = "error"  # the engine could not finish it; Delta.failure says why


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Text to be continued."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Token ids to be continued, packed."""

    token_ids: TokenIds


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A conversation to be answered, rendered by the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class Submit(Message, frozen=True):
    """Client → coordinator → replica: please run this; answered by Accepted or Refused.

    A client that says it again in a new session, with what it has, goes on with the request that is
    open; within a session that changes nothing. Other content under an open id is refused. An id
    can be used again once its request has ended; a client that does so counts its requests, lest
    what a lost session leaves untold of the earlier one be taken for the answer to the later.
    """

    request_id: RequestId
    prompt: Prompt
    params: SamplingParams
    priority: int = 0  # smaller runs earlier
    timeout_s: float | None = None  # from acceptance to the terminal delta
    delivered: TokenIds = b""  # tokens the client already has
    number: int = 0  # the client's own, which stays the same when it says a request again


class Enqueue(Message, frozen=True):
    """Tokenizer → scheduler: a submitted request, checked, as token ids.

    Its text goes on from the prompt's, unless the prompt is a conversation.
    """

    request_id: RequestId
    prompt_token_ids: TokenIds
    params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    delivered: TokenIds = b""
    continues_text: bool = False


class ForgetAll(Message, frozen=True):
    """Link → tokenizer → scheduler: the coordinator has given all our requests away; drop them."""


class Abort(Message, frozen=True):
    """Client → coordinator → replica: free what the request holds. Unknown ids are ignored."""

    request_id: RequestId


class Accepted(Message, frozen=True):
    """Replica → coordinator → client: the request will get exactly one terminal delta."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    seed: int


class Refused(Message, frozen=True):
    """Replica or coordinator → client: the request was not taken; nothing else will come."""

    request_id: RequestId
    failure: Failure


class EventKind(enum.StrEnum):
    """What happens to a request between its acceptance and its end."""

    QUEUED = "queued"  # a replica has accepted it
    ADMITTED = "admitted"  # it has a row, and its prompt is being prefilled
    FIRST_TOKEN = "first_token"
    PAUSED = "paused"  # its last KV block is full and none is free: it waits for one
    RESUMED = "resumed"  # it got one
    EVICTED = "evicted"  # it gave its blocks up, and waits to be prefilled with its output
    FINISHED = "finished"
    ABORTED = "aborted"  # by somebody, or by its deadline
    FAILED = "failed"


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Something that happened to a request, at seconds since 1970."""

    kind: EventKind
    at: float


class Usage(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What a request took: tokens of its prompt, those of them found in the cache, its output."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Delta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one step added to one request.

    `start` is the index of the first of these tokens in the output, so that a receiver can tell a
    repeated delta from a new one. `logprobs` is packed float32, one a token, empty when not asked
    for; `top_logprobs` has one entry a token. `prompt_logprobs`, when asked for, come with the
    first delta. `events` are those since the last delta; the terminal one says what was used.
    """

    request_id: RequestId
    start: int
    token_ids: TokenIds = b""
    text: str = ""
    logprobs: bytes = b""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    finish: FinishReason | None = None
    failure: Failure | None = None
    weights_version: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    events: tuple[RequestEvent, ...] = ()
    usage: Usage | None = None


class TokensOut(Message, frozen=True):
    """Replica → coordinator, then coordinator → each client: what one step produced."""

    deltas: tuple[Delta, ...]
