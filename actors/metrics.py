"""The metrics actor: adds up what the others tell it. Its mailbox sheds, so it never slows them."""

import math

import msgspec

from callboard.actors.actor import Actor
from callboard.actors.mailbox import Overflow
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.requests import FinishReason

MetricsInbox = StepStats | RequestStats


class Metrics(Actor[MetricsInbox]):
    """Counters, sums and means over all replicas; `status` shows them."""

    overflow = Overflow.SHED

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = 0
        self._sampled = 0
        self._step_seconds = 0.0
        self._ends = dict.fromkeys(FinishReason, 0)
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._request_seconds = 0.0
        self._first_tokens = 0
        self._first_token_seconds = 0.0
        self._refused = 0

    async def receive(self, message: MetricsInbox) -> None:
        """Add one report up; of one with a number that cannot be, only that it came."""
        if not _is_possible(message):
            self._refused += 1
            return
        match message:
            case StepStats():
                self._steps += 1
                self._tokens += message.num_tokens
                self._sampled += message.num_sampled
                self._step_seconds += message.seconds
            case RequestStats():
                self._ends[message.finish] += 1
                self._prompt_tokens += message.prompt_tokens
                self._output_tokens += message.output_tokens
                self._request_seconds += message.total_s
                if message.first_token_s is not None:
                    self._first_tokens += 1
                    self._first_token_seconds += message.first_token_s

    def details(self) -> dict[str, int | float | str]:
        """Return the counters and sums, and means a person can read."""
        requests = sum(self._ends.values())
        return {
            "steps": self._steps,
            "tokens_computed": self._tokens,
            "tokens_sampled": self._sampled,
            "step_seconds": round(self._step_seconds, 3),
            "requests": requests,
            **{f"requests_{reason}": count for reason, count in self._ends.items()},
            "prompt_tokens": self._prompt_tokens,
            "output_tokens": self._output_tokens,
            "mean_time_to_first_token_s": _mean(self._first_token_seconds, self._first_tokens),
            "mean_request_s": _mean(self._request_seconds, requests),
            "reports_refused": self._refused,
        }


def _mean(seconds: float, count: int) -> float:
    return round(seconds / max(1, count), 4)


def _is_possible(report: MetricsInbox) -> bool:
    """Whether every number of a report is one that counts or seconds can be."""
    values = msgspec.structs.astuple(report)
    return all(0 <= value < math.inf for value in values if isinstance(value, int | float))
