"""Tickets: what tells replicas that this server's tree knows of from everybody else who asks in.

A replica that no supervisor knows of would go on while the tree is paused. So whoever starts or
takes in a replica gives it a ticket, which it shows in its Hello, and takes it back when it gives
the replica up: then no session of it stays, whatever it believes itself. A ticket is good for one
name, and for the numbered replicas of a host of that name.
"""

import re
import secrets
from collections.abc import Callable
from typing import Protocol

from callboard.messages.errors import AccessDenied
from callboard.messages.membership import Hello, Role

_NUMBER = re.compile(r"-\d{1,3}")


class TicketSource(Protocol):
    """Where who starts a replica has a ticket for it from."""

    def issue(self, name: str) -> str:
        """Return a ticket for a name."""
        ...

    def revoke(self, ticket: str) -> None:
        """Take one back; harmless when that was done before."""
        ...


class Tickets:
    """The tickets that are out."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._held: set[str] = set()
        self.on_release: Callable[[], object] = lambda: None
        """Called when replicas that were held are so no more."""

    def issue(self, name: str, *, held: bool = False) -> str:
        """Return a new one; who is `held` may come in, and is to get no requests yet."""
        ticket = secrets.token_hex(16)
        self._names[ticket] = name
        if held:
            self._held.add(ticket)
        return ticket

    def release(self, ticket: str) -> None:
        """Let those with a held ticket have requests."""
        self._held.discard(ticket)
        self.on_release()

    def revoke(self, ticket: str) -> None:
        """Take one back; harmless when that was done before."""
        self._names.pop(ticket, None)
        self._held.discard(ticket)

    def holds(self, hello: Hello) -> bool:
        """Return whether a replica is to get no requests yet."""
        return hello.ticket in self._held

    def check(self, hello: Hello) -> None:
        """Raise AccessDenied for a replica without a ticket for its name; others need none."""
        if hello.role is Role.REPLICA and not _is_good_for(self._names.get(hello.ticket), hello):
            raise AccessDenied(f"{hello.name} is no replica of this server, or not any more")


class GivenTicket:
    """One that came from elsewhere, for every replica that is started here."""

    def __init__(self, ticket: str) -> None:
        self._ticket = ticket

    def issue(self, name: str) -> str:
        """Return it."""
        return self._ticket

    def revoke(self, ticket: str) -> None:
        """Nothing: that is for who gave it."""


def _is_good_for(name: str | None, hello: Hello) -> bool:
    if name is None or not hello.name.startswith(name):
        return False
    rest = hello.name.removeprefix(name)
    return not rest or _NUMBER.fullmatch(rest) is not None
