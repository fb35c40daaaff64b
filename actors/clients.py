"""The clients over all their sessions, and what each was told and may not have read. Pure.

A client that loses its session comes back in another, with the same secret in its Hello, and
submits again what it has open, each with the tokens it has. A request goes on behind those: what
the client has missed is here, as long as it is not too much and the client not away for too long.

What was sent is known to be read when the client gives credit for its frame. Of what was under way
when a session ended nobody knows; it is kept for its request until the client asks for it again.
"""

from collections import deque

import msgspec

from callboard.actors.placement import PeerKey
from callboard.messages.base import TokenIds
from callboard.messages.requests import Accepted, Delta, RequestId

ClientKey = bytes
"""What a client is the same by in all its sessions."""

MAX_UNREAD_FRAMES = 16 * 1024
"""Frames a client may have been given and not taken.

One with so many requests gets as many answers at once, and Python may stand still for a second to
collect its garbage.
"""

MAX_UNREAD_BYTES = 8 * 2**20

LOST = 2**63
"""The number of a frame that was never sent."""

_BYTES_EACH = 128

News = Accepted | Delta


class Ended(msgspec.Struct, frozen=True):
    """What is remembered of a request whose end may be unread: what tells it from another.

    `seeds` are what its client may call its seed: as it was submitted, and as it was accepted.
    """

    fingerprint: bytes
    seeds: tuple[int | None, ...]


class Kept:
    """What a client may have missed of one request; `ended` when that is all of it."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.deltas: list[Delta] = []
        self.ended: Ended | None = None

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes."""
        size = sum(size_of(delta) for delta in self.deltas)
        return size if self.accepted is None else size + size_of(self.accepted)

    @property
    def has_end(self) -> bool:
        """Whether the request has ended with it: what comes next of its id is of another."""
        return bool(self.deltas) and self.deltas[-1].finish is not None

    def add(self, news: News, ended: Ended | None) -> None:
        """Add what comes next."""
        if isinstance(news, Accepted):
            self.accepted = news
        else:
            self.deltas.append(news)
            self.ended = ended

    def news(self, deltas: list[Delta], delivered: TokenIds) -> list[News]:
        """Return the acceptance, unless who has tokens must have read it, and some deltas."""
        if self.accepted is None or delivered:
            return [*deltas]
        return [self.accepted, *deltas]

    def behind(self, have: int, end: int) -> list[Delta] | None:
        """Return the deltas behind the first `have` tokens; None when something is missing.

        `end` is how many tokens there are in all.
        """
        deltas = [delta for delta in self.deltas if delta.start >= have]
        begin = deltas[0].start if deltas else end
        return deltas if begin == have else None


class Unread:
    """What one client may not have read, in order."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._under_way: deque[tuple[int, News, int, Ended | None]] = deque()
        self._kept: dict[RequestId, Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._under_way or self._kept)

    def sent(self, frame: int, news: News, ended: Ended | None = None) -> None:
        """Something was sent in the so-manieth frame of this session."""
        size = size_of(news)
        self.num_bytes += size
        self._under_way.append((frame, news, size, ended))

    def taken(self, frames: int) -> None:
        """The client has taken so many frames of this session."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= frames:
            self.num_bytes -= under_way.popleft()[2]

    def keep(self, news: News, ended: Ended | None = None) -> None:
        """Keep something for when its client asks for the request again."""
        self.num_bytes += size_of(news)
        self._add(news, ended)

    def lose_session(self) -> None:
        """Keep all that was under way."""
        for _, news, _, ended in self._under_way:
            self._add(news, ended)
        self._under_way.clear()

    def claim(self, request_id: RequestId) -> Kept | None:
        """Return what was kept of a request, if anything, and keep it no longer."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
        return kept

    def _add(self, news: News, ended: Ended | None) -> None:
        kept = self._kept.get(news.request_id)
        if kept is not None and kept.has_end:
            # Its client has used the id again, and so has read the end of what had it before.
            self.claim(news.request_id)
        self._kept.setdefault(news.request_id, Kept()).add(news, ended)

    def forget(self) -> None:
        """Keep nothing any more, but what is under way."""
        for request_id in list(self._kept):
            self.claim(request_id)


class Client:
    """One client: where it is now, and what it may not have read."""

    def __init__(self, key: ClientKey) -> None:
        self.key = key
        self.peer: PeerKey | None = None  # None while it is away
        self.session = ""
        self.sessions = 0
        self.slow = False  # whether its requests were ended because it did not read
        self.unread = Unread()


class Clients:
    """Those that are there, and those that may come back."""

    def __init__(self) -> None:
        self._by_key: dict[ClientKey, Client] = {}
        self._by_peer: dict[PeerKey, Client] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: ClientKey) -> Client | None:
        """Return a client, be it there or away."""
        return self._by_key.get(key)

    def at(self, peer: PeerKey) -> Client | None:
        """Return the client that is there."""
        return self._by_peer.get(peer)

    def enter(self, key: ClientKey, peer: PeerKey, session: str) -> Client:
        """A client is there, for the first time or again; it must not be there already."""
        client = self._by_key.setdefault(key, Client(key))
        client.peer, client.session = peer, session
        client.sessions += 1
        client.slow = False
        self._by_peer[peer] = client
        return client

    def leave(self, client: Client) -> None:
        """A client has lost its session."""
        if client.peer is not None:
            del self._by_peer[client.peer]
        client.peer, client.session = None, ""
        client.unread.lose_session()

    def forget(self, client: Client) -> None:
        """A client will not come back."""
        self.leave(client)
        del self._by_key[client.key]


def size_of(news: News) -> int:
    """Return about how many bytes something takes."""
    if isinstance(news, Accepted):
        return _BYTES_EACH + len(news.prompt_token_ids)
    size = _BYTES_EACH + len(news.token_ids) + len(news.text) + len(news.logprobs)
    size += _BYTES_EACH * len(news.events)
    size += sum(_BYTES_EACH * len(top) for top in news.top_logprobs)
    scores = news.prompt_logprobs
    if scores is not None:
        size += len(scores.logprobs) + len(scores.top_ids) + len(scores.top_logprobs)
    return size
