import pytest

from callboard.actors.tickets import Tickets
from callboard.messages.errors import AccessDenied
from callboard.messages.membership import PROTOCOL_VERSION, Hello, Role


def hello(ticket: str = "", role: Role = Role.REPLICA) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION, role=role, name="r", incarnation=1, schema="", ticket=ticket
    )


def test_a_replica_gets_in_with_a_ticket_until_it_is_taken_back() -> None:
    tickets = Tickets()
    ticket, other = tickets.issue("r"), tickets.issue("r")

    tickets.check(hello(ticket))
    tickets.revoke(ticket)
    with pytest.raises(AccessDenied, match="r is no replica of this server"):
        tickets.check(hello(ticket))
    tickets.revoke(ticket)
    tickets.check(hello(other))


@pytest.mark.parametrize("ticket", ["", "made up"])
def test_a_replica_without_a_ticket_does_not_get_in(ticket: str) -> None:
    with pytest.raises(AccessDenied):
        Tickets().check(hello(ticket))


@pytest.mark.parametrize("role", [Role.CLIENT, Role.OPERATOR])
def test_others_need_no_ticket(role: Role) -> None:
    Tickets().check(hello(role=role))
