"""Tickets: what tells replicas that this server's tree knows of from everybody else who asks in.

A replica that no supervisor knows of would go on while the tree is paused. So whoever starts or
takes in a replica gives it a ticket, which it shows in its Hello, and takes it back when it gives
the replica up: then no session of it stays, whatever it believes itself.
"""

import secrets
from typing import Protocol

from callboard.messages.errors import AccessDenied
from callboard.messages.membership import Hello, Role


class TicketSource(Protocol):
    """Where who starts a replica has a ticket for it from."""

    def issue(self) -> str:
        """Return a ticket."""
        ...

    def revoke(self, ticket: str) -> None:
        """Take one back; harmless when that was done before."""
        ...


class Tickets:
    """The tickets that are out."""

    def __init__(self) -> None:
        self._valid: set[str] = set()

    def issue(self) -> str:
        """Return a new one."""
        ticket = secrets.token_hex(16)
        self._valid.add(ticket)
        return ticket

    def revoke(self, ticket: str) -> None:
        """Take one back; harmless when that was done before."""
        self._valid.discard(ticket)

    def check(self, hello: Hello) -> None:
        """Raise AccessDenied for a replica without a valid ticket; others need none."""
        if hello.role is Role.REPLICA and hello.ticket not in self._valid:
            raise AccessDenied(f"{hello.name} is no replica of this server, or not any more")


class GivenTicket:
    """One that came from elsewhere, for every replica that is started here."""

    def __init__(self, ticket: str) -> None:
        self._ticket = ticket

    def issue(self) -> str:
        """Return it."""
        return self._ticket

    def revoke(self, ticket: str) -> None:
        """Nothing: that is for who gave it."""
