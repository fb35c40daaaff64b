import random
from typing import Any

import msgspec
import pytest

from callboard.actors.placement import LeastLoaded, PeerKey, PrefixAware
from callboard.actors.routing import (
    MAX_ATTEMPTS,
    UNACCEPTED_LOSS,
    OpenRequest,
    Routing,
    repeats,
)
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.errors import Failure, MailboxFull, OutOfBlocks, RequestError
from callboard.messages.requests import (
    Accepted,
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishReason,
    Submit,
    TextPrompt,
    TokenPrompt,
)
from callboard.messages.sampling import SamplingParams

CLIENT, OTHER = b"client", b"other"
A, B, C = b"replica a", b"replica b", b"replica c"


def submit(request_id: str = "r", **fields: Any) -> Submit:
    return Submit(
        request_id=request_id,
        **{
            "prompt": TokenPrompt(token_ids=pack_ids((1, 2, 3))),
            "params": SamplingParams(),
            **fields,
        },
    )


def routing(*replicas: PeerKey, max_open: int = 100) -> Routing:
    made = Routing(LeastLoaded(), max_open=max_open)
    for replica in replicas:
        made.replica_joined(replica, replica.decode())
    return made


def running(made: Routing, request_id: str = "r", client: PeerKey = CLIENT) -> OpenRequest:
    """Take a request in and give it to a replica."""
    request = made.submit(client, submit(request_id), 0.0)
    assert made.assign(request) is not None
    return request


def delta(request: OpenRequest, start: int, *ids: int, finish: FinishReason | None = None) -> Delta:
    return Delta(request_id=request.wire_id, start=start, token_ids=pack_ids(ids), finish=finish)


def accepted(request: OpenRequest, seed: int = 5) -> Accepted:
    return Accepted(request_id=request.wire_id, prompt_token_ids=pack_ids((1, 2, 3)), seed=seed)


# Submission.


@pytest.mark.parametrize("length", [0, 257])
def test_a_request_id_of_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(RequestError, match=f"{length} characters") as caught:
        routing().submit(CLIENT, submit("x" * length), 0.0)
    assert caught.value.field == "request_id"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), 1e10])
def test_a_timeout_no_clock_can_keep_is_refused(timeout_s: float) -> None:
    with pytest.raises(RequestError, match="timeout_s is") as caught:
        routing().submit(CLIENT, submit(timeout_s=timeout_s), 0.0)
    assert caught.value.field == "timeout_s"


def test_delivered_tokens_that_are_no_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="5 bytes") as caught:
        routing().submit(CLIENT, submit(delivered=b"12345"), 0.0)
    assert caught.value.field == "delivered"


def test_an_id_the_client_uses_already_is_refused_and_another_clients_is_not() -> None:
    made = routing()
    made.submit(CLIENT, submit(), 0.0)
    with pytest.raises(RequestError, match="the request id r is in use"):
        made.submit(CLIENT, submit(), 0.0)
    made.submit(OTHER, submit(), 0.0)
    assert made.num_open == 2


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    made = routing(A)
    request = running(made)
    made.deliver(request, delta(request, 0, finish=FinishReason.STOP))
    made.submit(CLIENT, submit(), 0.0)


def test_more_requests_than_the_limit_are_refused_until_one_ends() -> None:
    made = routing(max_open=2)
    first = made.submit(CLIENT, submit("1"), 0.0)
    made.submit(CLIENT, submit("2"), 0.0)
    with pytest.raises(MailboxFull, match="2 requests are open already"):
        made.submit(CLIENT, submit("3"), 0.0)
    made.close(first)
    made.submit(CLIENT, submit("3"), 0.0)


def test_a_client_whose_requests_were_all_refused_leaves_nothing_behind() -> None:
    made = routing()
    for number in range(10):
        with pytest.raises(RequestError):
            made.submit(b"%d" % number, submit(""), 0.0)
    assert made._by_client == {}


# Assignment.


def test_without_replicas_a_request_waits() -> None:
    made = routing()
    request = made.submit(CLIENT, submit(), 0.0)
    assert made.assign(request) is None
    assert made.unassigned() == [request]


def test_a_request_goes_to_the_replica_with_the_fewest() -> None:
    made = routing(A, B, C)
    for number in range(7):
        running(made, str(number))
    counts = sorted(len(mine) for mine in made._by_replica.values())
    assert counts == [2, 2, 3]
    made.replica_joined(b"fresh", "fresh")
    assert running(made, "next").replica == b"fresh"


def test_each_attempt_and_each_ledger_has_wire_ids_of_its_own() -> None:
    made, later = routing(A), routing(A)
    request = running(made)
    first = request.wire_id
    made.replica_left(A)
    made.replica_joined(A, A.decode())
    made.assign(request)
    assert len({first, request.wire_id, running(later).wire_id}) == 3


def test_a_replica_gets_what_is_left_of_the_time() -> None:
    made = routing(A)
    request = made.submit(CLIENT, submit(timeout_s=10.0), 100.0)
    assert request.for_replica(104.0).timeout_s == pytest.approx(6.0)
    late = request.for_replica(200.0).timeout_s
    assert late is not None
    assert 0 < late < 0.1  # it is refused by nobody, and ends at once
    assert made.submit(CLIENT, submit("no deadline"), 0.0).for_replica(50.0).timeout_s is None


def test_a_replica_finds_only_its_own_requests() -> None:
    made = routing(A, B)
    request = running(made)
    assert request.replica == A
    assert made.find(A, request.wire_id) is request
    assert made.find(B, request.wire_id) is None
    assert made.find(A, "r") is None


# What replicas say.


def test_a_client_hears_of_the_acceptance_once_and_under_its_own_id() -> None:
    made = routing(A, B)
    request = running(made)
    assert made.accept(request, accepted(request)) == Accepted(
        request_id="r", prompt_token_ids=pack_ids((1, 2, 3)), seed=5
    )
    made.replica_left(A)
    made.assign(request)
    assert made.accept(request, accepted(request)) is None


def test_another_replica_goes_on_with_the_tokens_and_the_seed() -> None:
    made = routing(A, B)
    request = running(made)
    made.accept(request, accepted(request, seed=5))
    made.deliver(request, delta(request, 0, 7, 8))
    made.replica_left(A)
    assert made.assign(request) == B
    again = request.for_replica(0.0)
    assert unpack_ids(again.delivered) == [7, 8]
    assert again.params.seed == 5
    assert again.prompt == submit().prompt


def test_tokens_a_client_brought_along_are_counted() -> None:
    made = routing(A)
    request = made.submit(CLIENT, submit(delivered=pack_ids((7, 8))), 0.0)
    made.assign(request)
    assert made.deliver(request, delta(request, 2, 9)).finish is None
    assert unpack_ids(request.output.tobytes()) == [7, 8, 9]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_delta_that_leaves_a_gap_or_repeats_ends_the_request_as_an_error(start: int) -> None:
    made = routing(A)
    request = running(made)
    made.deliver(request, delta(request, 0, 7, 8))
    told = made.deliver(request, delta(request, start, 9))
    assert (told.finish, told.start, told.token_ids) == (FinishReason.ERROR, 2, b"")
    assert told.failure is not None
    assert told.failure.message == f"the replica went on at token {start}, not 2"
    assert made.num_open == 0


def test_a_delta_of_half_a_token_ends_the_request_as_an_error() -> None:
    made = routing(A)
    request = running(made)
    told = made.deliver(request, Delta(request_id=request.wire_id, start=0, token_ids=b"123"))
    assert told.finish is FinishReason.ERROR
    assert told.failure is not None
    assert "3 bytes" in told.failure.message


def test_a_terminal_delta_closes_the_request() -> None:
    made = routing(A)
    request = running(made)
    wire_id = request.wire_id
    told = made.deliver(request, delta(request, 0, 7, finish=FinishReason.STOP))
    assert (told.request_id, told.finish) == ("r", FinishReason.STOP)
    assert made.num_open == 0
    assert made.find(A, wire_id) is None
    assert made.of_client(CLIENT, "r") is None


def test_an_error_that_ends_a_request_is_about_the_clients_id() -> None:
    made = routing(A)
    request = running(made)
    failure = Failure.of(OutOfBlocks("no", request_id=request.wire_id, transient=False))
    end = delta(request, 0, finish=FinishReason.ERROR)

    told = made.deliver(request, msgspec.structs.replace(end, failure=failure))

    assert told.failure == msgspec.structs.replace(failure, request_id="r")
    anonymous = Failure(code="RequestFailed", message="no")
    assert request.for_client(anonymous) == anonymous


# Who leaves.


def test_a_lost_replicas_requests_are_given_away_again_oldest_first() -> None:
    made = routing(A)
    requests = [running(made, str(number)) for number in range(5)]
    again, hopeless = made.replica_left(A)
    assert (again, hopeless) == (requests, [])
    assert made.unassigned() == requests
    assert all(request.replica is None for request in requests)


def test_a_request_that_is_lost_with_every_replica_is_given_up() -> None:
    made = routing()
    request = made.submit(CLIENT, submit(), 0.0)
    for loss in range(1, MAX_ATTEMPTS + 1):
        made.replica_joined(A, A.decode())
        made.assign(request)
        made.accept(request, accepted(request))
        again, hopeless = made.replica_left(A)
        assert (again, hopeless) == (([request], []) if loss < MAX_ATTEMPTS else ([], [request]))


def test_a_replica_that_had_not_accepted_a_request_counts_little() -> None:
    made = routing()
    request = made.submit(CLIENT, submit(), 0.0)
    most = int(MAX_ATTEMPTS / UNACCEPTED_LOSS)
    for loss in range(1, most + 1):
        made.replica_joined(A, A.decode())
        assert made.next_to_assign() is request
        made.assign(request)
        again, hopeless = made.replica_left(A)
        assert (again, hopeless) == (([request], []) if loss < most else ([], [request]))


def test_a_request_that_got_on_meanwhile_is_not_given_up() -> None:
    made = routing()
    request = made.submit(CLIENT, submit(), 0.0)
    for start in range(3 * MAX_ATTEMPTS):
        made.replica_joined(A, A.decode())
        made.assign(request)
        made.deliver(request, delta(request, start, 7))
        assert made.replica_left(A) == ([request], [])


def lose(made: Routing, replica: PeerKey = A) -> list[OpenRequest]:
    """Lose a replica and have it back; returns the requests that were given up."""
    for request in made.open_requests():
        if request.replica == replica:
            made.accept(request, accepted(request))
    _, hopeless = made.replica_left(replica)
    for request in hopeless:
        made.close(request)
    made.replica_joined(replica, replica.decode())
    while (waiting := made.next_to_assign()) is not None:
        made.assign(waiting)
    return hopeless


def test_after_one_loss_all_are_given_away_again_at_once() -> None:
    made = routing(A)
    requests = [running(made, str(number)) for number in range(5)]
    lose(made)
    assert all(request.replica == A for request in requests)


def test_after_more_losses_a_replica_is_given_one_at_a_time() -> None:
    made = routing(A)
    requests = [running(made, str(number)) for number in range(3)]
    lose(made)
    lose(made)
    assert [request.replica for request in requests] == [A, None, None]
    fresh = made.submit(CLIENT, submit("fresh"), 0.0)
    assert made.next_to_assign() is fresh  # which nobody suspects
    made.assign(fresh)
    assert made.next_to_assign() is None
    made.deliver(requests[0], delta(requests[0], 0, 7))
    assert made.next_to_assign() is requests[1]
    made.assign(requests[1])
    made.close(requests[1])  # another way to make room for the next
    assert made.next_to_assign() is requests[2]


def test_each_replica_is_given_one_of_those() -> None:
    made = routing(A)
    requests = [running(made, str(number)) for number in range(3)]
    lose(made)
    lose(made)
    made.replica_joined(B, B.decode())
    while (request := made.next_to_assign()) is not None:
        made.assign(request)
    assert [request.replica for request in requests] == [A, B, None]


@pytest.mark.parametrize("position", range(5))
def test_a_request_that_keeps_killing_replicas_is_given_up_alone(position: int) -> None:
    made = routing(A)
    requests = [running(made, str(number)) for number in range(5)]
    guilty, given_up = requests[position], list[OpenRequest]()
    while not given_up:
        if guilty.replica is not None:
            given_up = lose(made)
            continue
        for request in requests:
            if request.replica is not None:
                made.deliver(request, delta(request, len(request.output), 7))
        waiting = made.next_to_assign()
        assert waiting is not None
        made.assign(waiting)
    assert given_up == [guilty]
    assert made.num_open == 4


def test_a_stranger_that_leaves_takes_nothing_along() -> None:
    made = routing(A)
    running(made)
    assert made.replica_left(B) == ([], [])
    assert made.requests_of(OTHER) == []
    assert made.num_open == 1


def test_a_client_that_leaves_leaves_its_requests_to_nobody() -> None:
    made = routing(A)
    mine = [running(made, name) for name in "xy"]
    running(made, "x", OTHER)
    assert made.requests_of(CLIENT) == mine


def test_requests_are_found_by_their_clients_id_across_clients() -> None:
    made = routing(A)
    same = [running(made, "x", CLIENT), running(made, "x", OTHER)]
    running(made, "y", CLIENT)
    assert made.by_client_id("x") == same
    assert made.by_client_id("z") == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_tables_agree(seed: int) -> None:
    """Random joins, losses, tokens and ends: each open request is in just the right tables."""
    rng = random.Random(seed)
    made = routing(max_open=30)
    replicas: set[PeerKey] = set()
    for step in range(300):
        match rng.randrange(6):
            case 0:
                replica = rng.choice((A, B, C))
                if replica not in replicas:
                    made.replica_joined(replica, replica.decode())
                    replicas.add(replica)
            case 1:
                if replicas:
                    replica = rng.choice(sorted(replicas))
                    replicas.discard(replica)
                    again, hopeless = made.replica_left(replica)
                    assert all(request.replica is None for request in again)
                    for request in hopeless:
                        made.close(request)
            case 2 | 3:
                if made.num_open < 30:
                    made.submit(rng.choice((CLIENT, OTHER)), submit(str(step)), 0.0)
            case 4 | 5:
                busy = [one for one in made.open_requests() if one.replica is not None]
                if busy:
                    request = rng.choice(busy)
                    finish = FinishReason.STOP if rng.random() < 0.3 else None
                    start = len(request.output) + (rng.random() < 0.1)
                    made.deliver(request, delta(request, start, step, finish=finish))
        while (waiting := made.next_to_assign()) is not None:
            assert made.assign(waiting) in replicas
        check_tables(made, replicas)
    for request in made.open_requests():
        made.close(request)
    tables = (made._by_client, made._by_wire_id, made._unassigned, made._suspects, made._on_trial)
    assert tables == ({}, {}, {}, {}, {})


def check_tables(made: Routing, replicas: set[PeerKey]) -> None:
    requests = made.open_requests()
    assert made.num_open == len(requests)
    assert set(made._by_replica) == replicas
    assert made._loads == {replica: len(mine) for replica, mine in made._by_replica.items()}
    for request in requests:
        assert made.of_client(request.client, request.client_id) is request
        if request.replica is None:
            assert request in made.unassigned()
            assert not replicas or (request.is_suspect and set(made._on_trial) == replicas)
        else:
            assert made.find(request.replica, request.wire_id) is request
            assert made._by_replica[request.replica][request.number] is request
            if request.is_suspect:
                assert made._on_trial[request.replica] is request
    assert sum(map(len, made._by_client.values())) == len(requests)
    assert sum(map(len, made._by_replica.values())) + len(made.unassigned()) == len(requests)


# Prefixes.


def aware(*replicas: PeerKey) -> Routing:
    made = Routing(PrefixAware(weight=0.5, capacity=10))
    for replica in replicas:
        made.replica_joined(replica, replica.decode())
    return made


def test_replicas_come_in_the_order_of_their_names_whenever_they_join() -> None:
    made = routing()
    for number in (10, 2, 1):
        made.replica_joined(b"%d" % number, f"replica-{number}")
    assert [running(made, str(n)).replica for n in range(3)] == [b"1", b"2", b"10"]


def test_the_choices_of_a_prompt_find_it_on_one_replica() -> None:
    made = aware(A, B, C)
    running(made, "another", OTHER)
    choices = [running(made, name) for name in ("r", "r#1", "r#2", "r#3")]
    assert {choice.replica for choice in choices} == {A}


def test_when_a_replica_makes_tokens_with_other_weights_its_prefixes_are_forgotten() -> None:
    made = aware(A, B)
    request = running(made)
    made.deliver(request, msgspec.structs.replace(delta(request, 0, 7), weights_version=1))
    assert running(made, "s").replica == A
    made.deliver(request, msgspec.structs.replace(delta(request, 1, 8), weights_version=2))
    assert running(made, "t").replica == B
    made.deliver(request, msgspec.structs.replace(delta(request, 2), weights_version=0))  # no token
    assert running(made, "u").replica == B


def test_prefixes_are_forgotten_when_told_and_with_their_replica() -> None:
    policy = PrefixAware(weight=0.5, capacity=10)
    made = Routing(policy)
    made.replica_joined(A, "a")
    running(made, "r")
    made.forget_prefixes()
    assert policy.num_known == 0
    running(made, "s")
    made.replica_left(A)
    assert policy.num_known == 0


# Again.


def test_a_request_is_told_from_another_by_all_but_what_changes_on_the_way() -> None:
    made = routing(A)
    request = running(made)
    made.accept(request, accepted(request, seed=5))
    same = request.fingerprint
    for fields in ({}, {"delivered": pack_ids((7,))}, {"timeout_s": 3.0}):
        assert repeats(submit(**fields), same)
    assert repeats(submit(params=SamplingParams(seed=5)), same)
    others: list[dict[str, Any]] = [
        {"prompt": TokenPrompt(token_ids=pack_ids((1, 2, 4)))},
        {"prompt": TextPrompt(text="text")},
        {"params": SamplingParams(seed=6)},
        {"params": SamplingParams(max_tokens=2)},
        {"priority": 1},
        {"number": 1},
    ]
    for fields in others:
        assert not repeats(submit(**fields), same)


def test_a_request_can_be_given_away_again_behind_what_its_client_has() -> None:
    made = routing(A)
    request = running(made)
    made.accept(request, accepted(request, seed=5))
    made.deliver(request, delta(request, 0, 7, 8, 9))
    before = request.wire_id
    assert request.has_begun_with(pack_ids((7, 8)))
    assert not request.has_begun_with(pack_ids((7, 9)))
    assert not request.has_begun_with(pack_ids((7, 8, 9, 10)))
    made.restart(request, pack_ids((7,)))
    assert made.find(A, before) is None
    assert made.unassigned() == [request]
    assert made.assign(request) == A
    again = request.for_replica(0.0)
    assert (unpack_ids(again.delivered), again.params.seed) == ([7], 5)
    assert made.accept(request, accepted(request, seed=5)) is None
    made.deliver(request, delta(request, 1, 8, finish=FinishReason.STOP))
    assert made.num_open == 0


def test_a_request_that_waits_can_be_given_away_again_too() -> None:
    made = routing()
    request = made.submit(CLIENT, submit(), 0.0)
    made.restart(request, pack_ids((7,)))
    assert made.unassigned() == [request]
    made.close(request)
    assert made.num_open == 0


def test_a_suspect_stays_one_when_its_client_comes_back() -> None:
    made = routing(A)
    requests = [running(made, name) for name in "xy"]
    lose(made)
    lose(made)
    made.restart(requests[0], b"")
    assert requests[0].is_suspect
    assert made.next_to_assign() is requests[0]
    made.assign(requests[0])
    assert made.next_to_assign() is None


def test_the_bytes_of_open_prompts_are_bounded() -> None:
    made = Routing(LeastLoaded(), max_open_bytes=100)
    chat = ChatPrompt(messages=(ChatMessage(role="user", content="x" * 36),))
    first = made.submit(CLIENT, submit("1", prompt=TextPrompt(text="x" * 60)), 0.0)
    made.submit(CLIENT, submit("2", prompt=chat), 0.0)
    with pytest.raises(MailboxFull, match="100 bytes of prompts already, and 12 more") as caught:
        made.submit(CLIENT, submit("3"), 0.0)
    assert caught.value.retry_after_s == 1.0
    made.close(first)
    made.submit(CLIENT, submit("3"), 0.0)
