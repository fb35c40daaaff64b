"""Which replica runs which request, and what each client already has. Pure.

A request lives here from its submission to its terminal delta. Each time it is given to a replica
it gets a fresh wire id, so whatever a replica says about an earlier attempt, or says late to a
coordinator that was restarted, matches nothing.

A replica that is lost takes all it had along, and which of them it was lost of is not known. Each
request counts the replicas it was lost with since its last token; one that has several is tried
apart from others of that kind, so that the count of the innocent goes back to 0 and that of the
guilty goes on to MAX_ATTEMPTS. A replica that had not even accepted it counts little: when many are
lost at once, a request may be given to several of them that are dead already.
"""

import itertools
import secrets
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from callboard.actors.clients import ClientKey, Ended
from callboard.actors.placement import PeerKey, Placement
from callboard.messages.base import BYTES_PER_ID, TokenIds, id_array
from callboard.messages.codec import encode_body
from callboard.messages.errors import Failure, MailboxFull, RequestError
from callboard.messages.requests import (
    MAX_REQUEST_ID_CHARS,
    MAX_TIMEOUT_S,
    Accepted,
    ChatPrompt,
    Delta,
    FinishReason,
    Prompt,
    RequestId,
    Submit,
    TextPrompt,
    TokenPrompt,
)

MAX_OPEN = 16_384
MAX_OPEN_BYTES = 512 * 2**20
"""Of the prompts of open requests together."""

RETRY_AFTER_S = 1.0
"""When to try again what found no room."""

MAX_ATTEMPTS = 4
"""Replicas a request may be lost with, without a token in between, before it is their cause."""

UNACCEPTED_LOSS = 0.25
"""What a replica counts that had not accepted the request."""

TRIED_APART = 2
"""After so many losses a replica is given no other such request before this one has a token."""


class OpenRequest:
    """One request between its submission and its terminal delta."""

    def __init__(
        self, number: int, client: ClientKey, submit: Submit, deadline: float, *, ledger: str
    ) -> None:
        """`ledger` names the ledger that counts the numbers."""
        self.number = number
        self.client = client
        self.client_id = submit.request_id
        self.submit = submit
        self.deadline = deadline
        self.output = id_array(submit.delivered)
        self.replica: PeerKey | None = None
        self.attempts = 0
        self.losses = 0.0  # since the last token
        self.accepted = False
        self.accepted_here = False  # by the replica that has it now
        self.aborting = False
        self.claimed = True  # whether its client, if it came back, has asked for it again
        self.num_bytes = _num_bytes(submit.prompt)
        self._asked_seed = submit.params.seed
        self._ledger = ledger

    @property
    def is_suspect(self) -> bool:
        """Whether it was part of so many losses that it may be their cause."""
        return self.losses >= TRIED_APART

    @property
    def wire_id(self) -> RequestId:
        """What the replica that runs it now calls it."""
        return f"{self._ledger}.{self.number}.{self.attempts}"

    @property
    def fingerprint(self) -> Ended:
        """What tells it from another of its client's and its id."""
        return Ended(_fingerprint(self.submit), (self._asked_seed, self.submit.params.seed))

    def has_begun_with(self, delivered: TokenIds) -> bool:
        """Whether its output so far begins with what a client says to have of it."""
        return memoryview(self.output).cast("B")[: len(delivered)] == delivered

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
            request_id=self.client_id,
            start=len(self.output),
            finish=reason,
            failure=failure and self.for_client(failure),
        )

    def for_client(self, failure: Failure) -> Failure:
        """Return a replica's failure as the client should see it: about the client's own id."""
        if not failure.request_id:
            return failure
        return msgspec.structs.replace(failure, request_id=self.client_id)


class Routing:
    """All open requests, by client and by replica."""

    def __init__(
        self,
        placement: Placement,
        *,
        max_open: int = MAX_OPEN,
        max_open_bytes: int = MAX_OPEN_BYTES,
    ) -> None:
        self._placement = placement
        self._max_open = max_open
        self._max_open_bytes = max_open_bytes
        self._num_bytes = 0
        self._name = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._by_wire_id: dict[RequestId, OpenRequest] = {}
        self._by_client: dict[ClientKey, dict[RequestId, OpenRequest]] = {}
        self._by_replica: dict[PeerKey, dict[int, OpenRequest]] = {}  # in the order of their names
        self._loads: dict[PeerKey, int] = {}  # how many each has, in that order, too
        self._names: dict[PeerKey, str] = {}  # of the replicas
        self._weights: dict[PeerKey, int] = {}  # the version that made a replica's last token
        self._unassigned: dict[int, OpenRequest] = {}
        self._suspects: dict[int, OpenRequest] = {}  # unassigned, too
        self._on_trial: dict[PeerKey, OpenRequest] = {}  # a replica's suspect

    @property
    def num_open(self) -> int:
        """How many requests have no terminal delta yet."""
        return len(self._by_wire_id) + len(self._unassigned) + len(self._suspects)

    @property
    def num_replicas(self) -> int:
        """How many replicas are there."""
        return len(self._by_replica)

    def open_requests(self) -> list[OpenRequest]:
        """Return all open requests, oldest first."""
        return _by_age([*self._by_wire_id.values(), *self.unassigned()])

    def submit(self, client: ClientKey, submit: Submit, now: float) -> OpenRequest:
        """Take a request in. Raises RequestError or MailboxFull."""
        check(submit)
        request_id = submit.request_id
        if self.of_client(client, request_id) is not None:
            raise RequestError(
                f"the request id {request_id} is in use", field="request_id", allowed="a new id"
            )
        self._check_room(_num_bytes(submit.prompt))
        timeout_s = submit.timeout_s
        deadline = float("inf") if timeout_s is None else now + timeout_s
        number = next(self._numbers)
        request = OpenRequest(number, client, submit, deadline, ledger=self._name)
        self._by_client.setdefault(client, {})[request_id] = request
        self._unassigned[request.number] = request
        self._num_bytes += request.num_bytes
        return request

    def next_to_assign(self) -> OpenRequest | None:
        """Return the oldest request that waits and for which there is a replica, or None."""
        if not self._by_replica:
            return None
        waiting = self._unassigned
        if not waiting and len(self._on_trial) < len(self._by_replica):
            waiting = self._suspects
        return waiting[min(waiting)] if waiting else None

    def assign(self, request: OpenRequest) -> PeerKey | None:
        """Give a request to the replica that the policy chooses; None when there is none for it."""
        loads = self._loads_for(request)
        if not loads:
            return None
        replica = self._placement.choose(loads, request.submit.prompt)
        self._take_up(request)
        request.replica = replica
        request.accepted_here = False
        request.attempts += 1
        if request.is_suspect:
            self._on_trial[replica] = request
        self._by_replica[replica][request.number] = request
        self._loads[replica] += 1
        self._by_wire_id[request.wire_id] = request
        return replica

    def unassigned(self) -> list[OpenRequest]:
        """Return the requests that wait for a replica, oldest first."""
        return _by_age([*self._unassigned.values(), *self._suspects.values()])

    def find(self, replica: PeerKey, wire_id: RequestId) -> OpenRequest | None:
        """Return the request that this replica calls so now."""
        request = self._by_wire_id.get(wire_id)
        return None if request is None or request.replica != replica else request

    def of_client(self, client: ClientKey, request_id: RequestId) -> OpenRequest | None:
        """Return a client's request by the client's own id."""
        return self._by_client.get(client, {}).get(request_id)

    def is_open(self, request: OpenRequest) -> bool:
        """Return whether a request has not been closed."""
        return self.of_client(request.client, request.client_id) is request

    def accept(self, request: OpenRequest, accepted: Accepted) -> Accepted | None:
        """Note that a replica took it; returns what to tell the client, once a request."""
        request.accepted_here = True
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
        nonsense = _nonsense(request, delta)
        if nonsense:
            failure = Failure(code="RequestFailed", message=nonsense)
            delta = request.terminal(FinishReason.ERROR, failure)
        else:
            request.output.frombytes(delta.token_ids)
            if delta.token_ids:
                self._acquit(request)
                self._note_weights(request, delta.weights_version)
            delta = msgspec.structs.replace(
                delta,
                request_id=request.client_id,
                failure=delta.failure and request.for_client(delta.failure),
            )
        if delta.finish is not None:
            self.close(request)
        return delta

    def close(self, request: OpenRequest) -> None:
        """Forget a request that has its terminal delta, or was refused."""
        self._take_back(request)
        self._take_up(request)
        self._num_bytes -= request.num_bytes
        mine = self._by_client.get(request.client, {})
        mine.pop(request.client_id, None)
        if not mine:
            self._by_client.pop(request.client, None)

    def replica_joined(self, replica: PeerKey, name: str) -> None:
        """A replica is there, and runs nothing."""
        self._names[replica] = name
        joined = {**self._by_replica, replica: dict[int, OpenRequest]()}
        # The shorter name first: so replica-2 comes before replica-10.
        order = sorted(joined, key=lambda key: (len(self._names[key]), self._names[key]))
        self._by_replica = {key: joined[key] for key in order}
        self._loads = {key: len(joined[key]) for key in order}

    def replica_left(
        self, replica: PeerKey, *, counts: bool = True
    ) -> tuple[list[OpenRequest], list[OpenRequest]]:
        """A replica is gone: returns its requests to give away again, and those to fail.

        `counts` says whether one of them may have been the cause.
        """
        lost = self._by_replica.pop(replica, {}).values()
        self._loads.pop(replica, None)
        self._names.pop(replica, None)
        self._weights.pop(replica, None)
        self._on_trial.pop(replica, None)
        self._placement.forget(replica)
        again: list[OpenRequest] = []
        hopeless: list[OpenRequest] = []
        for request in _by_age(lost):
            del self._by_wire_id[request.wire_id]
            request.replica = None
            if counts:
                request.losses += 1.0 if request.accepted_here else UNACCEPTED_LOSS
            self._put(request)
            (again if request.losses < MAX_ATTEMPTS else hopeless).append(request)
        return again, hopeless

    def restart(self, request: OpenRequest, delivered: TokenIds) -> None:
        """Have a request given away again, to go on behind what its client says to have of it."""
        self._take_back(request)
        self._take_up(request)
        request.replica = None
        request.output = id_array(delivered)
        self._put(request)

    def requests_of(self, client: ClientKey) -> list[OpenRequest]:
        """Return the open requests of a client."""
        return list(self._by_client.get(client, {}).values())

    def by_client_id(self, request_id: RequestId) -> list[OpenRequest]:
        """Return every client's request of that id."""
        clients: Iterable[dict[RequestId, OpenRequest]] = self._by_client.values()
        return [mine[request_id] for mine in clients if request_id in mine]

    def forget_prefixes(self) -> None:
        """No replica has what it has computed any more."""
        for replica in self._by_replica:
            self._placement.forget(replica)

    def _loads_for(self, request: OpenRequest) -> dict[PeerKey, int]:
        if not request.is_suspect:
            return self._loads
        return {key: load for key, load in self._loads.items() if key not in self._on_trial}

    def _note_weights(self, request: OpenRequest, version: int) -> None:
        replica = request.replica
        if replica is not None and self._weights.setdefault(replica, version) != version:
            # What was computed with other weights is of no use to these.
            self._weights[replica] = version
            self._placement.forget(replica)

    def _check_room(self, num_bytes: int) -> None:
        if self.num_open >= self._max_open:
            raise MailboxFull(
                f"{self._max_open} requests are open already", retry_after_s=RETRY_AFTER_S
            )
        if self._num_bytes + num_bytes > self._max_open_bytes:
            raise MailboxFull(
                f"open requests have {self._num_bytes} bytes of prompts already, "
                f"and {num_bytes} more would be over {self._max_open_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )

    def _take_back(self, request: OpenRequest) -> None:
        """Take a request from the replica that runs it, if one does."""
        self._end_trial(request)
        if request.replica is not None:
            self._by_wire_id.pop(request.wire_id, None)
            del self._by_replica[request.replica][request.number]
            self._loads[request.replica] -= 1

    def _put(self, request: OpenRequest) -> None:
        waiting = self._suspects if request.is_suspect else self._unassigned
        waiting[request.number] = request

    def _take_up(self, request: OpenRequest) -> None:
        self._unassigned.pop(request.number, None)
        self._suspects.pop(request.number, None)

    def _acquit(self, request: OpenRequest) -> None:
        request.losses = 0.0
        self._end_trial(request)

    def _end_trial(self, request: OpenRequest) -> None:
        if request.replica is not None and self._on_trial.get(request.replica) is request:
            del self._on_trial[request.replica]


def _by_age(requests: Iterable[OpenRequest]) -> list[OpenRequest]:
    return sorted(requests, key=lambda request: request.number)


def check(submit: Submit) -> None:
    """Raise RequestError for a request that nobody could keep track of."""
    request_id = submit.request_id
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise RequestError(
            f"the request id has {len(request_id)} characters",
            field="request_id",
            allowed=f"1 to {MAX_REQUEST_ID_CHARS} characters",
        )
    timeout_s = submit.timeout_s
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"timeout_s is {timeout_s}",
            field="timeout_s",
            allowed=f"above 0 and at most {MAX_TIMEOUT_S:g} seconds",
        )
    if len(submit.delivered) % BYTES_PER_ID:
        raise RequestError(
            f"delivered is {len(submit.delivered)} bytes of packed ids",
            field="delivered",
            allowed="4 bytes an id",
        )


def repeats(submit: Submit, ended: Ended) -> bool:
    """Return whether a submission says the same as an earlier one, whatever was delivered since."""
    return submit.params.seed in ended.seeds and _fingerprint(submit) == ended.fingerprint


def _fingerprint(submit: Submit) -> bytes:
    # The seed is drawn by a replica, and the client says it when it submits again.
    params = msgspec.structs.replace(submit.params, seed=None)
    said = encode_body((submit.prompt, params, submit.priority, submit.number))
    return blake2b(said, digest_size=16).digest()


def _num_bytes(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(messages=messages):
            return sum(len(message.role) + len(message.content) for message in messages)


def _nonsense(request: OpenRequest, delta: Delta) -> str:
    """Say why a delta cannot be what comes next; "" when it can."""
    if delta.start != len(request.output):
        return f"the replica went on at token {delta.start}, not {len(request.output)}"
    if len(delta.token_ids) % BYTES_PER_ID:
        return f"the replica sent {len(delta.token_ids)} bytes of packed ids"
    return ""
