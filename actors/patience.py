"""How much nonsense a peer may say: some at once, and then a little each second.

Every answer to nonsense costs the listening side more than it cost the peer. So a peer is answered
a few times, which is enough for whoever made a mistake, and then no more. Knows no sockets.
"""

from typing import TypeVar

V = TypeVar("V")

BURST = 16
"""How often a peer that has been quiet is answered in a row."""

REGAINED_PER_S = 1.0
"""How much of that comes back each second: as fast as a client that waits says Hello."""

MAX_KNOWN = 4096
"""Peers that are remembered; of more than that the oldest are forgotten, and begin anew."""


class Patience:
    """What is left of it for each peer, by the key of the peer's connection."""

    def __init__(self, *, burst: int = BURST, regained_per_s: float = REGAINED_PER_S) -> None:
        self._burst = burst
        self._regained_per_s = regained_per_s
        self._left: dict[bytes, tuple[float, float]] = {}  # how much, and when that was
        self._given_up: dict[bytes, None] = {}

    def spend(self, peer: bytes, now: float) -> bool:
        """Count some nonsense; False when that was too much."""
        left, since = self._left.pop(peer, (float(self._burst), now))
        left = min(self._burst, left + (now - since) * self._regained_per_s)
        is_left = left >= 1
        _remember(self._left, peer, (left - is_left, now))
        return is_left

    def give_up(self, peer: bytes) -> None:
        """Do not listen to a peer any more."""
        _remember(self._given_up, peer, None)

    def has_given_up(self, peer: bytes) -> bool:
        """Return whether the peer is not listened to any more."""
        return peer in self._given_up


class Rarely:
    """Lets through one line of a log in so many seconds, and counts the others."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_at = float("-inf")
        self._num_left_out = 0

    def due(self, now: float) -> int | None:
        """Return how many lines were left out since the last one; None to leave this out, too."""
        if now < self._next_at:
            self._num_left_out += 1
            return None
        self._next_at = now + self._interval_s
        left_out, self._num_left_out = self._num_left_out, 0
        return left_out


def _remember(table: dict[bytes, V], peer: bytes, value: V) -> None:
    table[peer] = value
    if len(table) > MAX_KNOWN:
        del table[next(iter(table))]
