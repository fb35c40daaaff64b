"""The metrics actor: adds up what the others tell it. Its mailbox sheds, so it never slows them."""

import math

import msgspec

from callboard.actors.actor import Actor
from callboard.actors.mailbox import Overflow
from callboard.messages.events import RequestStats, StepStats

MetricsInbox = StepStats | RequestStats


class _Replica(msgspec.Struct):
    steps: int = 0
    tokens: int = 0
    sampled: int = 0
    step_seconds: float = 0.0
    requests: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0


class Metrics(Actor[MetricsInbox]):
    """Counters and sums by replica; `status` shows them."""

    overflow = Overflow.SHED

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._refused = 0

    async def receive(self, message: MetricsInbox) -> None:
        """Add one report up; of one with a number that cannot be, only that it came."""
        if not _is_possible(message):
            self._refused += 1
            return
        replica = self._replicas.setdefault(message.replica, _Replica())
        match message:
            case StepStats():
                replica.steps += 1
                replica.tokens += message.num_tokens
                replica.sampled += message.num_sampled
                replica.step_seconds += message.seconds
            case RequestStats():
                replica.requests += 1
                if message.first_token_s is not None:
                    replica.first_tokens += 1
                    replica.first_token_seconds += message.first_token_s

    def details(self) -> dict[str, int | float | str]:
        """Return the sums over all replicas, and means a person can read."""
        replicas = self._replicas.values()
        first_tokens = sum(replica.first_tokens for replica in replicas)
        first_token_seconds = sum(replica.first_token_seconds for replica in replicas)
        return {
            "steps": sum(replica.steps for replica in replicas),
            "tokens_computed": sum(replica.tokens for replica in replicas),
            "tokens_sampled": sum(replica.sampled for replica in replicas),
            "step_seconds": round(sum(replica.step_seconds for replica in replicas), 3),
            "requests": sum(replica.requests for replica in replicas),
            "mean_time_to_first_token_s": round(first_token_seconds / max(1, first_tokens), 4),
            "reports_refused": self._refused,
        }


def _is_possible(report: MetricsInbox) -> bool:
    """Whether every number of a report is one that counts or seconds can be."""
    values = msgspec.structs.astuple(report)
    return all(0 <= value < math.inf for value in values if isinstance(value, int | float))
