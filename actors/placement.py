"""Which replica a request is given to: three policies. Pure.

least_loaded   the replica with the fewest open requests
round_robin    the one whose turn was longest ago, whatever it has to do
prefix_aware   the one with the best sum of what it knows of the prompt and what it is free to do:

    score = weight * known + (1 - weight) * (1 - load / capacity)

`known` is 1 where the whole prompt was given to the replica before. Otherwise it is the share of
the prompt's pieces that were, counted from the first one on without a gap, and of at least
FEW_PIECES, so that a short beginning that all prompts have does not draw them all to one replica.
`load` is the replica's open requests, and `capacity` how many it can run at once. So a prompt that
is known makes up for `weight / (1 - weight) * capacity` requests, and beyond that goes to a replica
that is freer, and is known there, too. Of equal scores the most recent owner wins.

All policies settle what is left equal by the order in which they are given the replicas.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from callboard.messages.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

PeerKey = bytes

PIECE_BYTES = 256
"""Of packed ids 64 tokens, and of text about as many."""

MAX_PIECES = 64
"""Pieces of a prompt that are looked at: what is alike for 4,096 tokens may as well be alike."""

FEW_PIECES = 8
MAX_KNOWN = 8192
"""Pieces that are remembered of a replica: half a million tokens of prompts."""


class Placement(Protocol):
    """A policy."""

    def choose(self, loads: Mapping[PeerKey, int], prompt: Prompt) -> PeerKey:
        """Return one of the replicas, which come with the open requests of each; not empty."""
        ...

    def forget(self, replica: PeerKey) -> None:
        """A replica is gone, or no longer has what it computed."""
        ...


class LeastLoaded:
    """See the module."""

    def choose(self, loads: Mapping[PeerKey, int], prompt: Prompt) -> PeerKey:
        """Return the replica with the fewest."""
        return min(loads, key=loads.__getitem__)

    def forget(self, replica: PeerKey) -> None:
        """There is nothing it remembers."""


class RoundRobin:
    """See the module."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last: dict[PeerKey, int] = {}

    def choose(self, loads: Mapping[PeerKey, int], prompt: Prompt) -> PeerKey:
        """Return the replica whose turn it is; one that never had any comes first."""
        replica = min(loads, key=lambda key: self._last.get(key, 0))
        self._last[replica] = next(self._turns)
        return replica

    def forget(self, replica: PeerKey) -> None:
        """Drop its turn."""
        self._last.pop(replica, None)


class PrefixAware:
    """See the module. What it believes a replica knows may be wrong, which costs time only."""

    def __init__(self, *, weight: float, capacity: int, max_known: int = MAX_KNOWN) -> None:
        """`weight` is from 0 (load alone) to 1 (prefix alone)."""
        self._weight = weight
        self._capacity = capacity
        self._max_known = max_known
        self._ticks = itertools.count(1)
        # When each piece was last given to a replica, the oldest first.
        self._known: dict[PeerKey, dict[int, int]] = {}

    @property
    def num_known(self) -> int:
        """How many pieces are remembered."""
        return sum(len(known) for known in self._known.values())

    def choose(self, loads: Mapping[PeerKey, int], prompt: Prompt) -> PeerKey:
        """Return the replica with the best score, and remember that it gets this prompt."""
        pieces = pieces_of(prompt)
        # Of those that know nothing of it only the least loaded may be the best.
        best = min(loads, key=loads.__getitem__)
        score = self._score(best, loads[best], pieces)
        for replica in self._owners(loads, pieces):
            its = self._score(replica, loads[replica], pieces)
            if its > score:
                best, score = replica, its
        self._remember(best, pieces)
        return best

    def forget(self, replica: PeerKey) -> None:
        """Drop what it knows."""
        self._known.pop(replica, None)

    def _owners(self, loads: Mapping[PeerKey, int], pieces: Sequence[int]) -> list[PeerKey]:
        """Return the replicas that know the first piece, in the order of all."""
        if not pieces:
            return []
        first, known = pieces[0], self._known
        return [replica for replica in loads if replica in known and first in known[replica]]

    def _score(self, replica: PeerKey, load: int, pieces: Sequence[int]) -> tuple[float, int]:
        known, last = self._match(replica, pieces)
        free = 1 - load / self._capacity
        return self._weight * known + (1 - self._weight) * free, last

    def _match(self, replica: PeerKey, pieces: Sequence[int]) -> tuple[float, int]:
        """Return the share that a replica knows, and when it was last given all of that."""
        known = self._known.get(replica)
        if not known:
            return 0.0, 0
        count = last = 0
        for piece in pieces:
            when = known.get(piece)
            if when is None:
                break
            count, last = count + 1, when
        whole = count == len(pieces) > 0
        return 1.0 if whole else count / max(len(pieces), FEW_PIECES), last

    def _remember(self, replica: PeerKey, pieces: Sequence[int]) -> None:
        known = self._known.setdefault(replica, {})
        tick = next(self._ticks)
        # The last first, so that the beginning, without which the rest is of no use, stays longest.
        for piece in reversed(pieces):
            known.pop(piece, None)
            known[piece] = tick
        while len(known) > self._max_known:
            del known[next(iter(known))]


def pieces_of(prompt: Prompt) -> list[int]:
    """Return hashes for the pieces of a prompt, each of all up to its end; equal in one process.

    What is left behind the last complete piece is one as well, and is known by equal prompts only;
    of a prompt longer than MAX_PIECES nothing is left.
    """
    data = _beginning(prompt)
    hashes: list[int] = []
    parent = hash(type(prompt))
    for start in range(0, len(data), PIECE_BYTES):
        parent = hash((parent, data[start : start + PIECE_BYTES]))
        hashes.append(parent)
    return hashes


def _beginning(prompt: Prompt) -> bytes:
    """Return what a prompt begins with, as bytes that begin alike where prompts do."""
    limit = MAX_PIECES * PIECE_BYTES
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            return token_ids[:limit]
        case TextPrompt(text=text):
            return text[:limit].encode()[:limit]
        case ChatPrompt(messages=messages):
            data = b""
            for message in messages:
                data += f"{message.role}\0{message.content[:limit]}\0".encode()
                if len(data) >= limit:
                    break
            return data[:limit]
