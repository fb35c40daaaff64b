"""What the parts tell the metrics actor. Losing one of these loses nothing but a number."""

from callboard.messages.base import Message
from callboard.messages.requests import FinishReason


class StepStats(Message, frozen=True):
    """Scheduler → metrics: one step, as counts and seconds."""

    num_tokens: int
    num_sampled: int
    seconds: float


class RequestStats(Message, frozen=True):
    """Scheduler → metrics: one request ended.

    `first_token_s` is None where there was no first token, or where it came in an earlier life of
    the request, at a time that is not known here.
    """

    finish: FinishReason
    prompt_tokens: int
    output_tokens: int
    first_token_s: float | None
    total_s: float
