"""Which replica runs which request, and what each client already has. Pure.

A request lives here from its submission to its terminal delta. Each time it is given to a replica
it gets a fresh wire id, so whatever a replica says about an earlier attempt matches nothing.
"""

import itertools
from array import array
from collections.abc import Iterable

import msgspec

from callboard.messages.errors import Failure, MailboxFull, RequestError
from callboard.messages.requests import (
    MAX_REQUEST_ID_CHARS,
    Accepted,
    Delta,
    FinishReason,
    RequestId,
    Submit,
)

PeerKey = bytes

MAX_OPEN = 16_384
MAX_ATTEMPTS = 4
"""Replicas a request may be lost with before it is taken for the cause."""


class OpenRequest:
    """One request between its submission and its terminal delta."""

    def __init__(self, number: int, client: PeerKey, submit: Submit, deadline: float) -> None:
        self.number = number
        self.client = client
        self.client_id = submit.request_id
        self.submit = submit
        self.deadline = deadline
        self.output: array[int] = array("i")
        self.output.frombytes(submit.delivered)
        self.replica: PeerKey | None = None
        self.attempts = 0
        self.accepted = False
        self.aborting = False

    @property
    def wire_id(self) -> RequestId:
        """What the replica that runs it now calls it."""
        return f"{self.number}.{self.attempts}"

    def for_replica(self, now: float) -> Submit:
        """Return the request as the next replica should see it: under a fresh id, continued."""
        return msgspec.structs.replace(
            self.submit,
            request_id=self.wire_id,
            delivered=self.output.tobytes(),
            timeout_s=None if self.deadline == float("inf") else max(1e-3, self.deadline - now),
        )

    def terminal(self, reason: FinishReason, failure: Failure | None = None) -> Delta:
        """Return a terminal delta made here, not by the replica."""
        return Delta(
            request_id=self.client_id, start=len(self.output), finish=reason, failure=failure
        )


class Routing:
    """All open requests, by client and by replica."""

    def __init__(self, *, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._numbers = itertools.count(1)
        self._by_wire_id: dict[RequestId, OpenRequest] = {}
        self._by_client: dict[PeerKey, dict[RequestId, OpenRequest]] = {}
        self._by_replica: dict[PeerKey, dict[int, OpenRequest]] = {}
        self._unassigned: dict[int, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """How many requests have no terminal delta yet."""
        return len(self._by_wire_id) + len(self._unassigned)

    @property
    def num_replicas(self) -> int:
        """How many replicas are there."""
        return len(self._by_replica)

    def open_requests(self) -> list[OpenRequest]:
        """Return all open requests, oldest first."""
        found = [*self._by_wire_id.values(), *self._unassigned.values()]
        return sorted(found, key=lambda request: request.number)

    def submit(self, client: PeerKey, submit: Submit, now: float) -> OpenRequest:
        """Take a request in. Raises RequestError or MailboxFull."""
        request_id = submit.request_id
        mine = self._by_client.setdefault(client, {})
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise RequestError(
                f"the request id has {len(request_id)} characters",
                field="request_id",
                allowed=f"1 to {MAX_REQUEST_ID_CHARS} characters",
            )
        if request_id in mine:
            raise RequestError(
                f"the request id {request_id} is in use", field="request_id", allowed="a new id"
            )
        if self.num_open >= self._max_open:
            raise MailboxFull(f"{self._max_open} requests are open already")
        deadline = float("inf") if submit.timeout_s is None else now + submit.timeout_s
        request = OpenRequest(next(self._numbers), client, submit, deadline)
        mine[request_id] = request
        self._unassigned[request.number] = request
        return request

    def assign(self, request: OpenRequest) -> PeerKey | None:
        """Give an unassigned request to the replica with the fewest; None when there is none."""
        if not self._by_replica:
            return None
        replica = min(self._by_replica, key=lambda key: len(self._by_replica[key]))
        del self._unassigned[request.number]
        request.replica = replica
        request.attempts += 1
        self._by_replica[replica][request.number] = request
        self._by_wire_id[request.wire_id] = request
        return replica

    def unassigned(self) -> list[OpenRequest]:
        """Return the requests that wait for a replica, oldest first."""
        return sorted(self._unassigned.values(), key=lambda request: request.number)

    def find(self, wire_id: RequestId) -> OpenRequest | None:
        """Return the request that a replica calls so now."""
        return self._by_wire_id.get(wire_id)

    def of_client(self, client: PeerKey, request_id: RequestId) -> OpenRequest | None:
        """Return a client's request by the client's own id."""
        return self._by_client.get(client, {}).get(request_id)

    def accept(self, request: OpenRequest, accepted: Accepted) -> Accepted | None:
        """Note that a replica took it; returns what to tell the client, once a request."""
        params = msgspec.structs.replace(request.submit.params, seed=accepted.seed)
        request.submit = msgspec.structs.replace(request.submit, params=params)
        if request.accepted:
            return None
        request.accepted = True
        return msgspec.structs.replace(accepted, request_id=request.client_id)

    def deliver(self, request: OpenRequest, delta: Delta) -> Delta:
        """Take a replica's delta into the ledger; returns it as the client should see it.

        A delta that does not continue what the client has ends the request as an error: tokens
        must be neither doubled nor missing.
        """
        if delta.start != len(request.output):
            why = f"the replica went on at token {delta.start}, not {len(request.output)}"
            failure = Failure(code="RequestFailed", message=why)
            delta = request.terminal(FinishReason.ERROR, failure)
        else:
            request.output.frombytes(delta.token_ids)
            delta = msgspec.structs.replace(delta, request_id=request.client_id)
        if delta.finish is not None:
            self.close(request)
        return delta

    def close(self, request: OpenRequest) -> None:
        """Forget a request that has its terminal delta, or was refused."""
        self._unassigned.pop(request.number, None)
        self._by_wire_id.pop(request.wire_id, None)
        if request.replica is not None:
            self._by_replica.get(request.replica, {}).pop(request.number, None)
        mine = self._by_client.get(request.client, {})
        mine.pop(request.client_id, None)
        if not mine:
            self._by_client.pop(request.client, None)

    def replica_joined(self, replica: PeerKey) -> None:
        """A replica is there, and runs nothing."""
        self._by_replica[replica] = {}

    def replica_left(self, replica: PeerKey) -> tuple[list[OpenRequest], list[OpenRequest]]:
        """A replica is gone: returns its requests to give away again, and those to fail."""
        lost = self._by_replica.pop(replica, {}).values()
        again: list[OpenRequest] = []
        hopeless: list[OpenRequest] = []
        for request in sorted(lost, key=lambda request: request.number):
            del self._by_wire_id[request.wire_id]
            request.replica = None
            self._unassigned[request.number] = request
            (again if request.attempts < MAX_ATTEMPTS else hopeless).append(request)
        return again, hopeless

    def client_left(self, client: PeerKey) -> list[OpenRequest]:
        """A client is gone: returns the requests nobody waits for any more."""
        return list(self._by_client.get(client, {}).values())

    def by_client_id(self, request_id: RequestId) -> list[OpenRequest]:
        """Return every client's request of that id."""
        clients: Iterable[dict[RequestId, OpenRequest]] = self._by_client.values()
        return [mine[request_id] for mine in clients if request_id in mine]
