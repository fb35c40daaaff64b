"""Which connections of a listening socket may stay: those with a session, and a few newcomers.

ZMQ accepts whoever connects and says nothing of it to the program, so that peers who never say a
word would cost a file descriptor each, for ever. A door counts connections by descriptor, gives
each newcomer some time to begin a session, and has room for a limited number of them at once; the
oldest makes room for the newest. Knows no sockets: what is to be cut is returned.
"""

MAX_NEWCOMERS = 64
"""How many connections may be without a session at once."""

NEWCOMER_S = 10.0
"""How long a connection may be without a session."""


class Door:
    """Bookkeeping of one listening socket's connections."""

    def __init__(
        self, *, max_newcomers: int = MAX_NEWCOMERS, newcomer_s: float = NEWCOMER_S
    ) -> None:
        self._max_newcomers = max_newcomers
        self._newcomer_s = newcomer_s
        self._newcomers: dict[int, float] = {}  # since when, the oldest first
        self._guests: set[int] = set()

    def __contains__(self, fd: int) -> bool:
        return fd in self._newcomers or fd in self._guests

    @property
    def num_newcomers(self) -> int:
        """How many connections have no session."""
        return len(self._newcomers)

    @property
    def num_guests(self) -> int:
        """How many connections have a session."""
        return len(self._guests)

    def accept(self, fd: int, now: float) -> list[int]:
        """A connection was accepted; returns those to cut for its sake."""
        self.close(fd)
        self._newcomers[fd] = now
        return list(self._newcomers)[: -self._max_newcomers]

    def close(self, fd: int) -> None:
        """A connection is closed; its number may be used again."""
        self._newcomers.pop(fd, None)
        self._guests.discard(fd)

    def admit(self, fd: int) -> None:
        """A connection has a session now; one that is closed already is not."""
        if self._newcomers.pop(fd, None) is not None:
            self._guests.add(fd)

    def dismiss(self, fd: int, now: float) -> None:
        """A session is over; its connection may begin another one in the usual time."""
        if fd in self._guests:
            self._guests.remove(fd)
            self._newcomers[fd] = now

    def expel(self, fd: int) -> None:
        """A connection has no time left."""
        if fd in self:
            self.close(fd)
            self._newcomers = {fd: float("-inf"), **self._newcomers}

    def overdue(self, now: float) -> list[int]:
        """Return the connections that have had their time."""
        return [fd for fd, since in self._newcomers.items() if now - since >= self._newcomer_s]
