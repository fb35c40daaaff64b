"""The coordinator between clients and replicas that say and do whatever a test wants."""

import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.clients import MAX_UNREAD_BYTES, MAX_UNREAD_FRAMES
from callboard.actors.coordinator import GRACE_S, LAST_WORDS_S, Coordinator, FromClient, ToClient
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.metrics import Metrics
from callboard.actors.placement import LeastLoaded, Placement, PrefixAware
from callboard.actors.ref import LocalRef
from callboard.actors.routing import MAX_ATTEMPTS
from callboard.actors.session import OUTBOX, WINDOW, Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.tickets import Tickets
from callboard.actors.transport import MemoryNetwork, Network, ZmqNetwork
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.base import Message, pack_ids, unpack_ids
from callboard.messages.codec import MAX_FRAME_BYTES
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    KVLevel,
    Pause,
    Stop,
    Suspend,
)
from callboard.messages.errors import Failure, NameInUse, RequestError, SequenceOverflow
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.membership import Role
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    FinishReason,
    Refused,
    Submit,
    TextPrompt,
    TokenPrompt,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams

ENDPOINT = "memory://coordinator"


class Side:
    """One connection to the coordinator, and what has come over it."""

    def __init__(
        self, stage: "Stage", role: Role, name: str, inbox: Any, outbox: Any, ticket: str = ""
    ) -> None:
        self.heard: list[Message] = []
        self.sessions = 0
        self._news = trio.Event()
        self.connection = Connection(
            stage.system,
            stage.network,
            stage.endpoint,
            role=role,
            name=name,
            inbox=inbox,
            outbox=outbox,
            deliver=self._deliver,
            ticket=ticket,
        )

    async def say(self, *messages: Message) -> None:
        for message in messages:
            await self.connection.send(message)
        await wait_all_tasks_blocked()

    async def session(self, number: int) -> None:
        """Wait for the so-manieth session."""
        await self.wait_for(lambda: self.sessions >= number)

    async def wait_for(self, found: Callable[[], bool]) -> None:
        with trio.fail_after(60):
            while not found():
                self._news = trio.Event()
                await self._news.wait()

    async def leave(self) -> None:
        self.connection.close()
        await wait_all_tasks_blocked()

    async def die(self) -> None:
        """Be gone without a word, as a process that is killed."""
        self.connection._closed = True
        self.connection._port.close()
        await wait_all_tasks_blocked()

    def hear(self, message: Message) -> None:
        self.heard.append(message)

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said(message=message):
                self.hear(message)
            case Joined():
                self.sessions += 1
        self._news.set()


class Client(Side):
    """Checks what it gets as it comes: deltas without gaps, and one terminal a request."""

    def __init__(self, stage: "Stage", name: str) -> None:
        super().__init__(stage, Role.CLIENT, name, ToClient, FromClient)
        self.lost = 0  # sessions the coordinator has ended
        self.accepted: dict[str, Accepted] = {}
        self.refused: dict[str, Refused] = {}
        self.output: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Delta] = {}

    async def submit(self, request_id: str = "r", **fields: Any) -> None:
        await self.say(submit(request_id, **fields))

    def hear(self, message: Message) -> None:
        super().hear(message)
        match message:
            case Accepted(request_id=request_id):
                assert request_id not in self.accepted, "accepted twice"
                self.accepted[request_id] = message
            case Refused(request_id=request_id):
                assert request_id not in self.accepted, "accepted, then refused"
                self.refused[request_id] = message
            case TokensOut(deltas=deltas):
                for delta in deltas:
                    self._take(delta)

    async def end(self, request_id: str) -> None:
        """Wait for the end of a request."""
        await self.wait_for(lambda: request_id in self.ends)

    def ended(self, reason: FinishReason) -> list[str]:
        return [name for name, delta in self.ends.items() if delta.finish is reason]

    def failure(self, request_id: str = "r") -> Failure:
        failure = self.ends[request_id].failure
        assert failure is not None
        return failure

    def _take(self, delta: Delta) -> None:
        name = delta.request_id
        assert name not in self.ends, "something behind the terminal delta"
        assert delta.start == len(self.output[name]), "a gap, or a token twice"
        self.output[name] += unpack_ids(delta.token_ids)
        if delta.finish is not None:
            self.ends[name] = delta


class Replica(Side):
    """Says what it is told to, of the requests it was given."""

    def __init__(self, stage: "Stage", name: str, ticket: str = "") -> None:
        super().__init__(stage, Role.REPLICA, name, ToReplica, FromReplica, ticket)

    @property
    def given(self) -> list[Submit]:
        return self.of(Submit)

    async def request(self, number: int) -> Submit:
        """Wait for the so-manieth request."""
        await self.wait_for(lambda: len(self.given) >= number)
        return self.given[number - 1]

    @property
    def aborted(self) -> list[str]:
        return [abort.request_id for abort in self.of(Abort)]

    async def accept(self, request: Submit, seed: int = 5) -> None:
        await self.say(accepted(request, seed))

    async def send(
        self, request: Submit, start: int, *ids: int, finish: FinishReason | None = None
    ) -> None:
        await self.say(tokens(request, start, *ids, finish=finish))


def submit(request_id: str = "r", **fields: Any) -> Submit:
    return Submit(
        request_id=request_id,
        **{
            "prompt": TokenPrompt(token_ids=pack_ids((1, 2, 3))),
            "params": SamplingParams(),
            **fields,
        },
    )


def accepted(request: Submit, seed: int = 5) -> Accepted:
    return Accepted(request_id=request.request_id, prompt_token_ids=pack_ids((1, 2, 3)), seed=seed)


def tokens(request: Submit, start: int, *ids: int, finish: FinishReason | None = None) -> TokensOut:
    delta = Delta(
        request_id=request.request_id, start=start, token_ids=pack_ids(ids), finish=finish
    )
    return TokensOut(deltas=(delta,))


class Stage:
    """A coordinator with its metrics; clients and replicas enter and leave."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.network: Network = MemoryNetwork()
        self.endpoint = ENDPOINT
        self.cell: Cell = system.cell("coordinator")
        self.ref: LocalRef[Any] = LocalRef(self.cell)
        self.metrics: Cell = system.cell("metrics")
        self.bound: list[str] = []
        self.placement: Placement = LeastLoaded()
        self.tickets: Tickets | None = None
        self._nursery = nursery

    async def start(self) -> None:
        await self._nursery.start(self.cell.run, self._actor)

    async def crash(self) -> None:
        """End the coordinator's life by an error, and begin the next, as its supervisor does."""

        async def fail() -> None:
            raise RuntimeError("out of the blue")

        self.cell.nursery.start_soon(fail)
        await self.cell.stopped.wait()
        await self.start()

    async def client(self, name: str = "client") -> Client:
        await self.enter(client := Client(self, name))
        return client

    async def replica(self, name: str = "replica", ticket: str = "") -> Replica:
        await self.enter(replica := Replica(self, name, ticket))
        return replica

    def details(self) -> dict[str, Any]:
        return dict(self.cell.status().details)

    def background(self, task: Callable[[], Any]) -> None:
        self._nursery.start_soon(task)

    async def enter(self, side: Side) -> None:
        self._nursery.start_soon(side.connection.run)
        await side.connection.wait_welcome()
        await wait_all_tasks_blocked()

    def _actor(self) -> Coordinator:
        return Coordinator(
            self.system,
            self.network,
            self.endpoint,
            metrics=LocalRef(self.metrics),
            placement=self.placement,
            control_endpoint=lambda: "memory://control",
            model="a model",
            bound=self.bound.append,
            tickets=self.tickets,
        )


@asynccontextmanager
async def open_stage() -> AsyncGenerator[Stage]:
    async with open_system() as system, trio.open_nursery() as nursery:
        stage = Stage(system, nursery)
        await nursery.start(stage.metrics.run, Metrics)
        await stage.start()
        yield stage
        nursery.cancel_scope.cancel()


@pytest.fixture
async def stage() -> Any:
    async with open_stage() as stage:
        yield stage


# A request.


async def test_who_connects_is_told_what_is_here(stage: Stage) -> None:
    client = await stage.client()
    welcome = client.connection.welcome
    assert welcome is not None
    assert (welcome.name, welcome.model) == ("coordinator", "a model")
    assert welcome.control_endpoint == "memory://control"
    assert stage.bound == [ENDPOINT]


async def test_a_request_goes_to_a_replica_and_its_tokens_to_the_client(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    params = SamplingParams(temperature=0.5, seed=3)
    await client.submit("r", params=params, priority=2)
    (request,) = replica.given
    assert request.request_id != "r"
    assert (request.prompt, request.params, request.priority) == (submit().prompt, params, 2)
    await replica.accept(request)
    await replica.send(request, 0, 7, 8)
    await replica.send(request, 2, 9, finish=FinishReason.STOP)
    assert client.accepted["r"].seed == 5
    assert client.output["r"] == [7, 8, 9]
    assert client.ended(FinishReason.STOP) == ["r"]
    assert stage.details() == {
        "open_requests": 0,
        "requests_taken": 1,
        "replicas": 1,
        "clients": 1,
        "requests_aborted": 0,
        "requests_retried": 0,
        "requests_resumed": 0,
        "slow_readers_ended": 0,
        "frames_refused": 0,
        "peers_cut_off": 0,
    }


async def test_what_one_step_made_for_several_clients_is_parted(stage: Stage) -> None:
    one, other, replica = await stage.client(), await stage.client(), await stage.replica()
    await one.submit("x")
    await one.submit("y")
    await other.submit("x")  # the same id by another client is another request
    first, second, third = replica.given
    deltas = [tokens(given, 0, n).deltas[0] for n, given in enumerate((first, second, third))]
    await replica.say(TokensOut(deltas=tuple(deltas)))
    assert dict(one.output) == {"x": [0], "y": [1]}
    assert dict(other.output) == {"x": [2]}
    assert (len(one.of(TokensOut)), len(other.of(TokensOut))) == (1, 1)


async def test_a_refusal_is_passed_on_and_ends_the_request(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    wire_id = replica.given[0].request_id
    failure = Failure.of(SequenceOverflow("too long", request_id=wire_id, allowed="less"))
    await replica.say(Refused(request_id=wire_id, failure=failure))
    assert client.refused["r"].failure == msgspec.structs.replace(failure, request_id="r")
    await client.submit("r")
    assert len(replica.given) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": TextPrompt(text="another")},
        {"params": SamplingParams(max_tokens=3)},
        {"params": SamplingParams(seed=3)},
        {"priority": 1},
    ],
)
async def test_another_request_of_an_id_is_refused_and_the_first_goes_on(
    stage: Stage, other: dict[str, Any]
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await client.submit("r", **other)
    assert "in use" in client.refused["r"].failure.message
    (request,) = replica.given
    await replica.send(request, 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]
    assert stage.details()["refused_RequestError"] == 1


async def test_a_request_that_is_submitted_twice_runs_once(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await client.submit("r", timeout_s=5.0)  # which the first did not say, and keeps
    (request,) = replica.given
    await replica.accept(request)
    await client.submit("r", params=SamplingParams(seed=5))  # as which it was accepted
    await replica.send(request, 0, 7)
    await client.submit("r", delivered=pack_ids((7,)))
    await replica.send(request, 1, 8, finish=FinishReason.STOP)
    assert client.output["r"] == [7, 8]
    assert (client.refused, len(replica.given)) == ({}, 1)
    assert stage.details()["requests_taken"] == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"delivered": b"123"}, "delivered"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
    ],
)
async def test_a_request_nobody_could_keep_track_of_is_refused_here(
    stage: Stage, fields: dict[str, Any], field: str
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r", **fields)
    assert client.refused["r"].failure.field == field
    assert replica.given == []
    await client.submit("r")
    assert len(replica.given) == 1


async def test_a_request_that_barely_fitted_its_frame_does_not_harm_the_others(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    around = 2**16
    frame = client.connection._frame(submit("r", prompt=TextPrompt(text="x" * around)))[1]
    room = MAX_FRAME_BYTES - (len(frame) - around) - 4  # what is sent on has a longer id
    await client.submit("r", prompt=TextPrompt(text="x" * room))
    assert client.ended(FinishReason.ERROR) == ["r"]
    assert client.failure().code == "WireError"
    await client.submit("s")
    assert [given.prompt for given in replica.given] == [submit().prompt]
    assert stage.cell.lives == 1


async def test_reports_go_to_the_metrics_and_to_nobody_else(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await replica.say(
        RequestStats(
            finish=FinishReason.STOP,
            prompt_tokens=1,
            output_tokens=2,
            first_token_s=0.0,
            total_s=0.0,
        ),
        StepStats(num_tokens=3, num_sampled=1, seconds=0.0),
    )
    details = stage.metrics.status().details
    assert (details["requests"], details["steps"]) == (1, 1)
    assert client.heard == []


# Choosing a replica.


async def test_requests_are_spread_over_the_replicas(stage: Stage) -> None:
    client = await stage.client()
    replicas = [await stage.replica(f"replica-{number}") for number in range(3)]
    for number in range(9):
        await client.submit(str(number))
    assert [len(replica.given) for replica in replicas] == [3, 3, 3]
    done = replicas[1].given[0]
    await replicas[1].send(done, 0, finish=FinishReason.STOP)
    await client.submit("next")
    assert len(replicas[1].given) == 4


async def test_without_replicas_requests_wait_for_the_first_that_joins(stage: Stage) -> None:
    client = await stage.client()
    for name in "abc":
        await client.submit(name)
    assert stage.details()["open_requests"] == 3
    replica = await stage.replica()
    assert len(replica.given) == 3
    for request in replica.given:
        await replica.send(request, 0, 7, finish=FinishReason.STOP)
    assert client.ended(FinishReason.STOP) == ["a", "b", "c"]


async def test_the_first_thing_a_replica_hears_is_its_welcome(stage: Stage) -> None:
    """Requests that came before it would belong to no session, and be forgotten."""
    client = await stage.client()
    await client.submit("a")

    class Attentive(Replica):
        def hear(self, message: Message) -> None:
            assert self.sessions == 1
            super().hear(message)

    await stage.enter(replica := Attentive(stage, "replica"))
    assert len(replica.given) == 1


async def test_a_replica_that_takes_its_time_is_not_given_up(
    autojump_clock: MockClock, stage: Stage
) -> None:
    """It may be given all that may be open before it has looked at the first."""
    client, replica = await stage.client(), await stage.replica()
    gate = trio.Event()
    hear = replica._deliver

    async def slowly(event: Said | Joined | Left) -> None:
        await gate.wait()
        await hear(event)

    replica.connection._deliver = slowly
    many = WINDOW + 6_000
    await client.say(*(submit(str(number)) for number in range(many)))
    await trio.sleep(30)
    gate.set()
    await wait_all_tasks_blocked()
    assert len(replica.given) == many
    assert len({request.request_id for request in replica.given}) == many
    assert many < WINDOW + OUTBOX


# Deadlines without a replica.


async def test_a_request_that_finds_no_replica_ends_at_its_deadline(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client = await stage.client()
    await client.submit("late", timeout_s=20)
    await client.submit("early", timeout_s=10)
    await client.submit("patient")
    await trio.sleep(11)
    assert client.ended(FinishReason.DEADLINE) == ["early"]
    await trio.sleep(10)
    assert client.ended(FinishReason.DEADLINE) == ["early", "late"]
    assert stage.details()["open_requests"] == 1


async def test_a_request_that_lost_its_replica_ends_at_its_deadline_too(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r", timeout_s=20)
    await replica.accept(replica.given[0])
    await replica.send(replica.given[0], 0, 7)
    await trio.sleep(5)
    await replica.leave()
    await trio.sleep(16)
    assert client.ended(FinishReason.DEADLINE) == ["r"]
    assert client.output["r"] == [7]


async def test_a_request_that_waited_has_less_time_at_the_replica(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client = await stage.client()
    await client.submit("r", timeout_s=20)
    await trio.sleep(5)
    replica = await stage.replica()
    left = replica.given[0].timeout_s
    assert left is not None
    assert 14 < left < 15.1
    await trio.sleep(60)
    assert client.ends == {}  # from here on its replica watches the time


async def test_requests_that_come_and_go_without_a_replica_leave_no_timers_behind(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client = await stage.client()
    before = len(stage.system.timers._heap)
    for number in range(200):
        await client.submit(str(number), timeout_s=1e6 + number)
        await client.say(Abort(request_id=str(number)))
    assert len(client.ended(FinishReason.ABORT)) == 200
    assert len(stage.system.timers._heap) <= before + 1


# A replica is lost.


@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("was_accepted", [True, False])
async def test_a_lost_replicas_request_goes_on_elsewhere_behind_its_tokens(
    stage: Stage, tokens_before: int, was_accepted: bool
) -> None:
    client = await stage.client()
    first, second = await stage.replica("first"), await stage.replica("second")
    await client.submit("r")
    (request,) = first.given
    if was_accepted:
        await first.accept(request, seed=11)
    if tokens_before:
        await first.send(request, 0, *range(tokens_before))
    await first.leave()
    (again,) = second.given
    assert unpack_ids(again.delivered) == list(range(tokens_before))
    assert again.params.seed == (11 if was_accepted else None)
    await second.accept(again, seed=11)
    await second.send(again, tokens_before, 99, finish=FinishReason.STOP)
    assert client.output["r"] == [*range(tokens_before), 99]
    assert client.accepted["r"].seed == 11


async def test_a_replica_lost_after_the_last_token_changes_nothing(stage: Stage) -> None:
    client = await stage.client()
    first, second = await stage.replica("first"), await stage.replica("second")
    await client.submit("r")
    await first.send(first.given[0], 0, 7, finish=FinishReason.STOP)
    await first.leave()
    assert second.given == []
    assert client.output["r"] == [7]


async def test_a_replicas_next_life_gets_the_requests_of_one_that_died_silently(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica("replica-0")
    await client.submit("r")
    await replica.send(replica.given[0], 0, 7)

    await replica.die()
    again = await stage.replica("replica-0")

    (request,) = again.given
    assert unpack_ids(request.delivered) == [7]
    assert stage.details()["replicas"] == 1


async def test_a_replica_cannot_take_the_name_of_one_that_is_alive(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica("replica-0")
    await client.submit("r")
    with pytest.raises(NameInUse, match="a replica named replica-0 is there already"):
        await stage.replica("replica-0")
    await replica.send(replica.given[0], 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]
    assert stage.details()["replicas"] == 1


async def test_a_lost_only_replicas_requests_wait_for_its_return(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await replica.send(replica.given[0], 0, 7)
    await replica.leave()
    assert stage.details()["replicas"] == 0
    replica = await stage.replica()
    assert unpack_ids(replica.given[0].delivered) == [7]


async def test_a_request_that_loses_every_replica_is_failed_after_some(stage: Stage) -> None:
    client = await stage.client()
    await client.submit("r")
    for _ in range(MAX_ATTEMPTS):
        assert client.ends == {}
        replica = await stage.replica()
        (request,) = replica.given
        await replica.accept(request)
        await replica.leave()
    assert client.ended(FinishReason.ERROR) == ["r"]
    assert client.failure().code == "RequestFailed"
    assert (await stage.replica()).given == []


async def test_replicas_that_are_lost_while_nothing_runs_are_no_requests_fault(
    stage: Stage,
) -> None:
    client = await stage.client()
    await stage.ref.ask(Pause())
    await client.submit("r")
    for _ in range(3 * MAX_ATTEMPTS):
        replica = await stage.replica()
        (request,) = replica.given
        await replica.accept(request)
        await replica.leave()
    assert client.ends == {}


async def test_a_replica_that_is_held_gets_requests_when_it_is_released(stage: Stage) -> None:
    stage.tickets = Tickets()
    await stage.crash()  # the next life asks for tickets
    ticket = stage.tickets.issue("replica", held=True)
    client, replica = await stage.client(), await stage.replica(ticket=ticket)
    await client.submit("r")
    assert (replica.given, stage.details()["replicas"]) == ([], 0)

    stage.tickets.release(ticket)
    await wait_all_tasks_blocked()

    assert [request.prompt for request in replica.given] == [submit().prompt]
    assert stage.details()["replicas"] == 1


async def test_a_replica_that_leaves_while_it_is_held_leaves_nothing(stage: Stage) -> None:
    stage.tickets = Tickets()
    await stage.crash()
    ticket = stage.tickets.issue("replica", held=True)
    client, replica = await stage.client(), await stage.replica(ticket=ticket)
    await client.submit("r")
    await replica.leave()
    stage.tickets.release(ticket)
    await wait_all_tasks_blocked()

    assert stage.details()["replicas"] == 0
    again = await stage.replica(ticket=ticket)
    assert len(again.given) == 1


async def test_a_replica_that_lost_us_unnoticed_is_given_its_requests_again(
    autojump_clock: MockClock, stage: Stage
) -> None:
    """It was cut off for a while, has forgotten everything, and says hello as if it were new."""
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (old,) = replica.given
    await replica.send(old, 0, 7)
    replica.connection._lose("cut off")
    await replica.session(2)
    new = await replica.request(2)
    assert unpack_ids(new.delivered) == [7]
    await replica.say(tokens(old, 1, 66), tokens(new, 1, 8, finish=FinishReason.STOP))
    assert client.output["r"] == [7, 8]


async def test_what_an_earlier_attempt_says_late_is_nobodys(stage: Stage) -> None:
    client = await stage.client()
    first, second = await stage.replica("first"), await stage.replica("second")
    await client.submit("r")
    (old,) = first.given
    stage.cell.actor._listener.drop(  # type: ignore[union-attr]  # as after a long silence
        next(peer for peer in stage.cell.actor._routing._by_replica),  # type: ignore[union-attr]
        "silent",
    )
    await wait_all_tasks_blocked()
    (new,) = second.given
    await first.say(accepted(old), tokens(old, 0, 66, finish=FinishReason.STOP))
    assert client.heard == []
    await second.send(new, 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]


async def test_a_replica_cannot_speak_of_anothers_requests(stage: Stage) -> None:
    client = await stage.client()
    one, other = await stage.replica("one"), await stage.replica("other")
    await client.submit("r")
    (request,) = one.given
    refused = Refused(request_id=request.request_id, failure=Failure.of(RequestError("no")))
    await other.say(accepted(request), tokens(request, 0, 66), refused)
    assert client.heard == []
    await one.send(request, 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]


# Nonsense.


@pytest.mark.parametrize("start", [0, 1, 3, -1, 2**40])
async def test_a_replica_that_loses_count_fails_the_request_and_must_drop_it(
    stage: Stage, start: int
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.send(request, 0, 7, 8)
    await replica.send(request, start, 9)
    await replica.send(request, 2, 9)
    assert client.output["r"] == [7, 8]
    assert client.ended(FinishReason.ERROR) == ["r"]
    assert f"went on at token {start}, not 2" in client.failure().message
    assert replica.aborted == [request.request_id]


async def test_nonsense_within_one_step_comes_behind_the_tokens_before_it(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    good, bad = tokens(request, 0, 7).deltas[0], tokens(request, 5, 9).deltas[0]
    await replica.say(TokensOut(deltas=(good, bad)))
    assert client.output["r"] == [7]
    assert client.ended(FinishReason.ERROR) == ["r"]


async def test_half_a_token_fails_the_request(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    delta = Delta(request_id=replica.given[0].request_id, start=0, token_ids=b"123")
    await replica.say(TokensOut(deltas=(delta,)))
    assert client.ended(FinishReason.ERROR) == ["r"]


async def test_a_second_terminal_delta_is_dropped(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.send(request, 0, 7, finish=FinishReason.STOP)
    await replica.send(request, 1, 8, finish=FinishReason.LENGTH)
    await replica.say(Refused(request_id=request.request_id, failure=Failure(code="", message="")))
    assert client.ended(FinishReason.STOP) == ["r"]
    assert client.output["r"] == [7]


async def test_a_second_acceptance_is_not_passed_on(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await replica.accept(replica.given[0])
    await replica.accept(replica.given[0])
    assert list(client.accepted) == ["r"]


async def test_a_refusal_after_the_acceptance_is_a_failure(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.accept(request)
    await replica.send(request, 0, 7)
    failure = Failure(code="MailboxFull", message="no room after all")
    await replica.say(Refused(request_id=request.request_id, failure=failure))
    assert client.refused == {}
    assert client.ended(FinishReason.ERROR) == ["r"]
    assert client.failure() == failure


# Aborts.


async def test_an_abort_is_passed_on_and_answered_when_the_replica_has_obeyed(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await client.say(Abort(request_id="r"), Abort(request_id="r"), Abort(request_id="other"))
    assert replica.aborted == [request.request_id]
    assert client.ends == {}
    await replica.send(request, 0, 7)  # was under way
    await replica.send(request, 1, finish=FinishReason.ABORT)
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert client.output["r"] == [7]


async def test_a_request_without_a_replica_is_aborted_at_once(stage: Stage) -> None:
    client = await stage.client()
    await client.submit("r")
    await client.say(Abort(request_id="r"))
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert stage.details()["open_requests"] == 0


async def test_a_request_being_aborted_whose_replica_is_lost_ends_there(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    other = await stage.replica("the other")
    await client.submit("r")
    await client.say(Abort(request_id="r"))
    await replica.leave()
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert other.given == []


async def test_a_client_cannot_abort_another_clients_request(stage: Stage) -> None:
    one, other, replica = await stage.client(), await stage.client(), await stage.replica()
    await one.submit("r")
    await other.say(Abort(request_id="r"))
    assert replica.aborted == []


async def test_an_operator_aborts_by_id_across_clients_or_all_at_once(stage: Stage) -> None:
    one, other, replica = await stage.client(), await stage.client(), await stage.replica()
    for client, name in ((one, "x"), (other, "x"), (one, "y"), (other, "z")):
        await client.submit(name)
    replies: list[AbortReply] = []

    async def abort(call: AbortRequests) -> None:
        replies.append(await stage.ref.ask(call))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(abort, AbortRequests(request_id="x"))
        await wait_all_tasks_blocked()
        assert replica.aborted == [request.request_id for request in replica.given[:2]]
        nursery.start_soon(abort, AbortRequests(request_id="nobody's"))
        await wait_all_tasks_blocked()
        assert replies == [AbortReply(aborted=0)]
        nursery.start_soon(abort, AbortRequests(all=True))
        await wait_all_tasks_blocked()
        assert sorted(replica.aborted) == sorted(request.request_id for request in replica.given)
        for number, request in enumerate(replica.given):
            assert len(replies) == (1 if number < 2 else 2)  # it is answered when all have ended
            await replica.send(request, 0, finish=FinishReason.ABORT)
    assert replies == [AbortReply(aborted=0), AbortReply(aborted=2), AbortReply(aborted=4)]


@pytest.mark.parametrize("abort", [AbortRequests(), AbortRequests(request_id="x", all=True)])
async def test_an_abort_of_nothing_in_particular_is_refused(
    stage: Stage, abort: AbortRequests
) -> None:
    client = await stage.client()
    await client.submit("x")
    with pytest.raises(RequestError, match="say which request to abort"):
        await stage.ref.ask(abort)
    assert stage.details()["open_requests"] == 1


# A client leaves.


async def test_a_client_that_leaves_has_its_requests_aborted(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("x")
    await client.submit("y")
    await client.leave()
    assert replica.aborted == [request.request_id for request in replica.given]
    assert stage.details()["open_requests"] == 0
    for request in replica.given:
        await replica.send(request, 0, finish=FinishReason.ABORT)  # which concerns nobody
    assert stage.cell.lives == 1


# A client comes back.


def lose(stage: Stage, client: Client) -> None:
    """Have the coordinator drop a client, as when it was silent for long."""
    coordinator = stage.cell.actor
    assert isinstance(coordinator, Coordinator)
    listener = coordinator._listening
    secret = client.connection._instance
    listener.drop(
        next(key for key, it in listener._peers.items() if it.hello.instance == secret), "silent"
    )
    client.lost += 1


async def come_back(client: Client) -> None:
    """Speak, be asked who one is, and have a new session."""
    if client.sessions <= client.lost:
        await client.connection.send(Abort(request_id="nothing"))
    await client.session(client.lost + 1)
    await wait_all_tasks_blocked()


async def test_a_request_goes_on_while_its_client_is_away_and_tells_it_what_it_missed(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.accept(request)
    await replica.send(request, 0, 7)
    lose(stage, client)
    await replica.send(request, 1, 8, 9)
    await replica.send(request, 3, 10)
    assert client.output["r"] == [7]
    await come_back(client)
    await replica.send(request, 4, 11)
    assert client.output["r"] == [7]  # it has not asked for it yet
    await client.submit("r", params=SamplingParams(seed=5), delivered=pack_ids((7,)))
    await replica.send(request, 5, 12, finish=FinishReason.STOP)
    assert client.output["r"] == [7, 8, 9, 10, 11, 12]
    assert (len(replica.given), replica.aborted) == (1, [])
    assert stage.details()["requests_resumed"] == 1


async def test_what_was_under_way_when_the_connection_broke_is_not_lost(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    client.connection._take = lambda frame: None  # type: ignore[method-assign]  # nothing arrives
    await replica.accept(request)
    await replica.send(request, 0, 7)
    await replica.send(request, 1, 8)
    del client.connection._take
    lose(stage, client)
    await come_back(client)
    await client.submit("r")
    assert client.accepted["r"].seed == 5
    assert client.output["r"] == [7, 8]


async def test_the_end_of_a_request_reaches_a_client_that_was_away(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.send(request, 0, 7)
    lose(stage, client)
    await replica.send(request, 1, 8, finish=FinishReason.STOP)
    assert stage.details()["open_requests"] == 0
    await come_back(client)
    await client.submit("r", delivered=pack_ids((7,)))
    assert client.output["r"] == [7, 8]
    assert client.ended(FinishReason.STOP) == ["r"]
    assert len(replica.given) == 1


async def test_an_end_that_a_client_has_read_is_not_told_to_the_next_request_of_that_id(
    stage: Stage,
) -> None:
    """Of what was under way nobody knows whether it was read."""
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await replica.send(replica.given[0], 0, 7, finish=FinishReason.STOP)
    lose(stage, client)
    await come_back(client)
    client.ends.clear()
    client.output.clear()
    await client.submit("r", prompt=TextPrompt(text="another question"))
    assert client.output["r"] == []
    await replica.send(replica.given[1], 0, 66, finish=FinishReason.STOP)
    assert client.output["r"] == [66]


async def test_the_same_request_made_once_more_is_not_told_how_the_one_before_has_ended(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r", number=1)
    await replica.send(replica.given[0], 0, finish=FinishReason.ABORT)
    lose(stage, client)
    await come_back(client)
    client.ends.clear()
    await client.submit("r", number=2)
    assert client.ends == {}
    await replica.send(replica.given[1], 0, 66, finish=FinishReason.STOP)
    assert client.ended(FinishReason.STOP) == ["r"]


@pytest.mark.parametrize("told", [0, 1])
async def test_a_request_that_goes_on_is_not_told_what_an_earlier_one_of_its_id_had(
    stage: Stage, told: int
) -> None:
    """The earlier one was read to its end, in the very session that was lost then."""
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await replica.accept(replica.given[0])
    await replica.send(replica.given[0], 0, 7, 8, 9)
    await replica.send(replica.given[0], 3, 10, finish=FinishReason.STOP)
    for memory in (client.accepted, client.ends, client.output):
        memory.clear()
    again = TextPrompt(text="another question")
    await client.submit("r", prompt=again)
    await replica.accept(replica.given[1])
    if told:
        await replica.send(replica.given[1], 0, 20)
    lose(stage, client)
    await come_back(client)
    client.accepted.clear()  # of which it may hear again
    has = [20][:told]
    await client.submit("r", prompt=again, delivered=pack_ids(has))
    assert (client.ends, client.output["r"]) == ({}, has)
    await replica.send(replica.given[-1], told, 21, finish=FinishReason.STOP)
    assert client.output["r"] == [*has, 21]
    assert len(replica.given) == 2


async def test_what_a_client_that_comes_back_has_of_its_own_is_believed(stage: Stage) -> None:
    """As when the tokens came from a coordinator that is no more; the rest is computed again."""
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (first,) = replica.given
    await replica.send(first, 0, 1)
    lose(stage, client)
    await come_back(client)
    client.output["r"] = [7, 8]
    await client.submit("r", delivered=pack_ids((7, 8)))
    second = replica.given[1]
    assert replica.aborted == [first.request_id]
    assert unpack_ids(second.delivered) == [7, 8]
    await replica.send(first, 1, 66)  # a late word
    await replica.send(second, 2, 9, finish=FinishReason.STOP)
    assert client.output["r"] == [7, 8, 9]
    assert client.refused == {}


async def test_a_request_being_aborted_whose_client_has_lost_count_ends_there(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await client.say(Abort(request_id="r"))
    lose(stage, client)
    await replica.accept(request)
    await come_back(client)
    client.output["r"] = [7]
    await client.submit("r", delivered=pack_ids((7,)))
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert len(replica.given) == 1


@pytest.mark.parametrize("delivered", [b"123", b"1234567"])
async def test_half_a_token_from_a_client_that_comes_back_is_refused(
    stage: Stage, delivered: bytes
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    lose(stage, client)
    await come_back(client)
    await client.submit("r", delivered=delivered)
    assert client.refused["r"].failure.field == "delivered"
    await client.submit("r")
    await replica.send(replica.given[0], 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]
    assert stage.cell.lives == 1


async def test_a_client_that_is_here_again_by_another_way_goes_on_there(stage: Stage) -> None:
    """Its connection broke, and it is back before anybody here has noticed."""
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    await replica.send(request, 0, 7)
    again = Client(stage, "client")
    again.connection._instance = client.connection._instance
    await stage.enter(again)
    again.output["r"] = [7]
    await replica.send(request, 1, 8)
    await again.submit("r", delivered=pack_ids((7,)))
    await replica.send(request, 2, 9, finish=FinishReason.STOP)
    assert (client.output["r"], again.output["r"]) == ([7], [7, 8, 9])
    assert stage.details()["clients"] == 1


async def test_nobody_else_is_told_of_a_request_by_its_id(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await replica.send(replica.given[0], 0, 7)
    lose(stage, client)
    other = await stage.client("client")  # of the same name, even
    await other.submit("r")
    assert other.output["r"] == []
    assert len(replica.given) == 2


async def test_a_client_that_stays_away_has_its_requests_aborted_after_a_while(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client("a client"), await stage.replica()
    other = await stage.client("other")
    await client.submit("r")
    await other.submit("r")
    mine, others = replica.given
    await client.die()
    lose(stage, client)
    await trio.sleep(GRACE_S - 0.1)
    assert replica.aborted == []
    await trio.sleep(0.2)
    assert replica.aborted == [mine.request_id]
    assert stage.details()["clients"] == 1
    assert stage.details()["requests_aborted"] == 1
    await replica.send(others, 0, 7, finish=FinishReason.STOP)
    assert other.output["r"] == [7]


async def test_what_a_client_does_not_ask_for_again_is_aborted_after_a_while(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("wanted")
    await client.submit("given up")
    wanted, given_up = replica.given
    lose(stage, client)
    await come_back(client)
    await client.submit("wanted")
    await replica.send(given_up, 0, 7)
    await trio.sleep(GRACE_S + 0.1)
    assert replica.aborted == [given_up.request_id]
    await replica.send(wanted, 0, 8, finish=FinishReason.STOP)
    assert dict(client.output) == {"wanted": [8]}


async def test_a_client_that_comes_and_goes_in_the_grace_of_its_absence_keeps_all(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    for number in range(5):
        lose(stage, client)
        await trio.sleep(GRACE_S * 0.6)
        await replica.send(request, number, number)
        await come_back(client)
        await client.submit("r", delivered=pack_ids(range(number)))
    await replica.send(request, 5, finish=FinishReason.STOP)
    assert client.output["r"] == [0, 1, 2, 3, 4]
    assert len(replica.given) == 1


async def test_a_client_that_says_goodbye_is_not_waited_for(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await client.leave()
    assert replica.aborted == [replica.given[0].request_id]
    assert stage.details()["clients"] == 0


async def test_a_replica_that_is_lost_while_a_client_is_away_is_replaced_as_ever(
    stage: Stage,
) -> None:
    client, first = await stage.client(), await stage.replica("first")
    second = await stage.replica("second")
    await client.submit("r")
    await first.send(first.given[0], 0, 7)
    lose(stage, client)
    await first.leave()
    await second.send(second.given[0], 1, 8)
    await come_back(client)
    await client.submit("r", delivered=pack_ids((7,)))
    await second.send(second.given[0], 2, 9, finish=FinishReason.STOP)
    assert client.output["r"] == [7, 8, 9]


async def test_stopping_does_not_wait_for_a_client_that_is_away(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    lose(stage, client)
    reply: ControlReply = await stage.ref.ask(Stop())
    assert reply.done
    await come_back(client)
    await client.submit("r")
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert replica.aborted == [replica.given[0].request_id]


# A client that does not read.


def stop_reading(client: Client) -> trio.Event:
    """Take nothing any more, until the event that is returned is set."""
    gate, deliver = trio.Event(), client.connection._deliver

    async def held_up(event: Said | Joined | Left) -> None:
        await gate.wait()
        await deliver(event)

    client.connection._deliver = held_up
    return gate


async def stream(replica: Replica, requests: Sequence[Submit], start: int, count: int) -> int:
    """Send one token of each request `count` times; returns where the next begins."""
    for number in range(start, start + count):
        for request in requests:
            await replica.connection.send(tokens(request, number, number % 1000))
    await wait_all_tasks_blocked()
    return start + count


async def test_a_client_that_does_not_read_has_its_requests_ended_and_others_go_on(
    autojump_clock: MockClock, stage: Stage
) -> None:
    slow, other, replica = await stage.client("a"), await stage.client("b"), await stage.replica()
    await slow.submit("r")
    await slow.submit("s")
    await other.submit("r")
    mine, mine_too, others = replica.given
    gate = stop_reading(slow)
    await stream(replica, [mine, others], 0, MAX_UNREAD_FRAMES)
    assert replica.aborted == []
    await stream(replica, [mine, others], MAX_UNREAD_FRAMES, 200)
    assert sorted(replica.aborted) == sorted([mine.request_id, mine_too.request_id])
    assert stage.details()["slow_readers_ended"] == 1
    assert stage.details()["open_requests"] == 1
    assert len(other.output["r"]) == MAX_UNREAD_FRAMES + 200

    gate.set()
    await slow.end("r")
    await slow.end("s")
    assert [slow.failure(name).code for name in "rs"] == ["SlowReader"] * 2
    assert len(slow.output["r"]) == MAX_UNREAD_FRAMES + 1  # all it was sent, in order
    assert stage.cell.lives == 1


async def test_what_is_kept_for_a_client_that_does_not_read_is_bounded_in_bytes(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    gate = stop_reading(client)
    long, number = "x" * 2**16, 0
    while not replica.aborted:
        delta = Delta(
            request_id=request.request_id, start=number, token_ids=pack_ids((7,)), text=long
        )
        await replica.say(TokensOut(deltas=(delta,)))
        number += 1
        assert number * len(long) <= MAX_UNREAD_BYTES
    assert number * len(long) > MAX_UNREAD_BYTES - 2 * 2**16
    gate.set()
    await client.end("r")
    assert client.failure().code == "SlowReader"


async def test_a_client_that_has_not_read_yet_is_told_to_try_later_and_may_go_on_when_it_has(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    gate = stop_reading(client)
    await stream(replica, replica.given, 0, MAX_UNREAD_FRAMES + 1)
    await client.submit("s")
    gate.set()
    await client.wait_for(lambda: "s" in client.refused)
    failure = client.refused["s"].failure
    assert (failure.code, failure.retry_after_s) == ("MailboxFull", 1.0)
    assert stage.details()["refused_MailboxFull"] == 1
    await client.submit("t")
    await replica.send(replica.given[-1], 0, 7, finish=FinishReason.STOP)
    assert client.output["t"] == [7]


async def test_a_client_that_is_given_up_while_its_requests_end_hears_one_end_of_each(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    for name in "rst":
        await client.submit(name)
    gate = stop_reading(client)
    await stream(replica, replica.given[:1], 0, MAX_UNREAD_FRAMES)
    await client.say(*(Abort(request_id=name) for name in "rst"))
    await replica.leave()
    gate.set()
    await client.end("t")
    assert len(client.ends) == 3
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert stage.details()["open_requests"] == 0


async def test_a_client_that_loses_its_session_over_it_is_told_all_the_same(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    gate = stop_reading(client)
    await stream(replica, replica.given, 0, MAX_UNREAD_FRAMES + 1)
    lose(stage, client)
    gate.set()
    await wait_all_tasks_blocked()
    have = client.output["r"]
    assert client.ends == {}
    await come_back(client)
    await client.submit("r", delivered=pack_ids(have))
    assert client.failure().code == "SlowReader"


async def test_of_a_client_that_is_away_no_more_is_kept_than_of_one_that_does_not_read(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (request,) = replica.given
    lose(stage, client)
    long = "x" * 2**20
    for number in range(MAX_UNREAD_BYTES // len(long) + 1):
        delta = Delta(
            request_id=request.request_id, start=number, token_ids=pack_ids((7,)), text=long
        )
        await replica.say(TokensOut(deltas=(delta,)))
    assert replica.aborted == [request.request_id]
    assert stage.details()["clients"] == 0
    await come_back(client)
    await client.submit("r")
    assert len(replica.given) == 2  # and it begins anew


# Room.


async def test_a_timer_finds_room_in_a_mailbox_that_is_full(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    replies: list[ControlReply] = []
    stage.background(lambda: ask_stop(stage, 5.0, replies))
    await wait_all_tasks_blocked()
    stage.cell.mailbox.capacity = 0
    await trio.sleep(5.0 + LAST_WORDS_S + 0.1)
    stage.cell.mailbox.capacity = Coordinator.capacity
    assert len(replies) == 1
    assert replica.aborted == [replica.given[0].request_id]


async def test_more_requests_than_there_is_room_for_are_told_when_to_try_again(
    stage: Stage,
) -> None:
    client = await stage.client()
    coordinator = stage.cell.actor
    assert isinstance(coordinator, Coordinator)
    coordinator._routing._max_open = 1
    await client.submit("r")
    await client.submit("s")
    failure = client.refused["s"].failure
    assert (failure.code, failure.retry_after_s) == ("MailboxFull", 1.0)


# Stop.


async def ask_stop(stage: Stage, drain_s: float, replies: list[ControlReply]) -> None:
    replies.append(await stage.ref.ask(Stop(drain_s=drain_s), timeout=1000))


async def test_stopping_at_once_lets_replicas_say_the_last_words(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    replies: list[ControlReply] = []
    stage.background(lambda: ask_stop(stage, 0.0, replies))
    await wait_all_tasks_blocked()
    assert (replica.aborted, replies) == ([replica.given[0].request_id], [])
    await replica.send(replica.given[0], 0, 7, finish=FinishReason.ABORT)
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert client.output["r"] == [7]
    assert len(replies) == 1


async def test_stopping_at_once_ends_what_is_open_and_is_acknowledged(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    reply: ControlReply = await stage.ref.ask(Stop())
    await wait_all_tasks_blocked()
    assert reply.done
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert replica.aborted == [replica.given[0].request_id]


async def test_stopping_gives_open_requests_their_time_and_refuses_new_ones(
    stage: Stage,
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    replies: list[ControlReply] = []
    stage.background(lambda: ask_stop(stage, 60.0, replies))
    await wait_all_tasks_blocked()
    await client.submit("late")
    assert client.refused["late"].failure.code == "ActorStopped"
    assert replies == []
    await replica.send(replica.given[0], 0, 7, finish=FinishReason.STOP)
    assert client.ended(FinishReason.STOP) == ["r"]
    assert len(replies) == 1
    await client.submit("later")
    assert "later" in client.refused


async def test_requests_that_outlive_the_drain_are_aborted(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("running")
    await replica.send(replica.given[0], 0, 7)
    began = trio.current_time()
    reply: ControlReply = await stage.ref.ask(Stop(drain_s=30.0), timeout=60)
    assert reply.done
    assert trio.current_time() - began == pytest.approx(30 + LAST_WORDS_S, abs=0.1)
    await wait_all_tasks_blocked()
    assert client.ended(FinishReason.ABORT) == ["running"]


async def test_stopping_may_be_repeated_and_made_quicker(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, _ = await stage.client(), await stage.replica()
    await client.submit("r")
    replies: list[ControlReply] = []
    stage.background(lambda: ask_stop(stage, 500.0, replies))
    await wait_all_tasks_blocked()
    await stage.ref.ask(Stop())
    await wait_all_tasks_blocked()
    assert len(replies) == 1
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert (await stage.ref.ask(Stop())).done


async def test_an_orderly_end_ends_every_stream(stage: Stage) -> None:
    client, _ = await stage.client(), await stage.replica()
    await client.submit("r")
    await stage.cell.stop()
    await wait_all_tasks_blocked()
    assert client.ended(FinishReason.ABORT) == ["r"]
    assert client.failure().message == "the engine stopped"


# The coordinator itself fails.


async def test_a_coordinator_that_crashes_ends_no_stream_and_learns_again_what_is_open(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    (old,) = replica.given
    await replica.send(old, 0, 7)
    await stage.crash()
    assert client.ends == {}
    await client.session(2)
    await replica.session(2)
    await client.submit("r", delivered=pack_ids((7,)))
    new = replica.given[-1]
    assert new.request_id != old.request_id
    await replica.say(tokens(old, 1, 66))  # a word of the old session, still under way
    await replica.send(new, 1, 8, finish=FinishReason.STOP)
    assert client.output["r"] == [7, 8]


@pytest.fixture
def jumping_clock() -> MockClock:
    """Jumps once nothing has come over a socket for a moment."""
    return MockClock(autojump_threshold=0.05)


async def test_over_sockets_a_coordinator_comes_back_at_its_old_address(
    jumping_clock: MockClock,
) -> None:
    async with open_zmq_context() as context, open_stage() as stage:
        await stage.cell.stop()
        stage.network, stage.endpoint = ZmqNetwork(context), "tcp://127.0.0.1:*"
        await stage.start()
        stage.endpoint = stage.bound[-1]
        client, replica = await stage.client(), await stage.replica()
        await client.submit("r")
        await replica.request(1)
        await stage.crash()
        await client.session(2)
        await replica.session(2)
        await client.submit("r")
        new = await replica.request(2)
        await replica.send(new, 0, 7, finish=FinishReason.STOP)
        await client.end("r")
        assert stage.bound[-2:] == [stage.endpoint, stage.endpoint]
        for side in (client, replica):
            await side.leave()


# Anything, in any order.


class Improvised(Replica):
    """Makes the tokens that are expected, in its own time; sometimes it is beside itself."""

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage, name)
        self.open: dict[str, tuple[list[int], int]] = {}

    def hear(self, message: Message) -> None:
        super().hear(message)
        match message:
            case Submit(request_id=request_id, prompt=TokenPrompt(token_ids=packed)):
                made = expected(unpack_ids(packed), message.params.max_tokens or 1)
                self.open[request_id] = (made, len(unpack_ids(message.delivered)))
            case Abort():
                pass  # answered in its own time

    async def go_on(self, rng: random.Random) -> None:
        if not self.open:
            return
        name = rng.choice(sorted(self.open))
        made, sent = self.open[name]
        if name in self.aborted:
            del self.open[name]
            await self.say(TokensOut(deltas=(Delta(request_id=name, start=sent, finish=ABORT),)))
            return
        count = rng.randint(0, 2)
        ids, end = made[sent : sent + count], sent + count >= len(made)
        self.open[name] = (made, sent + len(ids))
        if end:
            del self.open[name]
        delta = Delta(
            request_id=name, start=sent, token_ids=pack_ids(ids), finish=LENGTH if end else None
        )
        await self.say(TokensOut(deltas=(delta,) * (1 if end or count or sent else 2)))


ABORT, LENGTH = FinishReason.ABORT, FinishReason.LENGTH


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    return [prompt[-1] + 1 + number for number in range(max_tokens)]


class Evening:
    """Clients that submit and abort, replicas that come, go on and die."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage = stage
        self.rng = random.Random(seed)
        self.clients: list[Client] = []
        self.replicas: list[Improvised] = []
        self.entered = 0
        self.expected: dict[tuple[int, str], list[int]] = {}
        self.submitted: dict[tuple[int, str], Submit] = {}

    async def begin(self) -> None:
        self.clients = [await self.stage.client(f"client {number}") for number in range(3)]

    async def act(self) -> None:
        scenes: list[Callable[[], Any]] = [
            self.submit,
            self.abort,
            self.enter,
            self.die,
            self.cut,
            self.go,
        ]
        (scene,) = self.rng.choices(scenes, [5, 1, 1, 1, 1, 12])
        await scene()

    async def submit(self) -> None:
        index = self.rng.randrange(3)
        name, prompt = str(len(self.expected)), [self.rng.randrange(500)]
        max_tokens = self.rng.randint(1, 8)
        self.expected[index, name] = expected(prompt, max_tokens)
        self.submitted[index, name] = submit(
            name,
            prompt=TokenPrompt(token_ids=pack_ids(prompt)),
            params=SamplingParams(max_tokens=max_tokens),
        )
        await self.clients[index].say(self.submitted[index, name])

    async def abort(self) -> None:
        if self.expected:
            index, name = self.rng.choice(sorted(self.expected))
            await self.clients[index].say(Abort(request_id=name))

    async def enter(self) -> None:
        if len(self.replicas) < 3:
            self.entered += 1
            self.replicas.append(replica := Improvised(self.stage, f"improvised {self.entered}"))
            await self.stage.enter(replica)

    async def cut(self) -> None:
        """Cut a client off, with what was under way to it, and have it come back."""
        index = self.rng.randrange(3)
        client = self.clients[index]
        client.connection._take = lambda frame: None  # type: ignore[method-assign]
        for _ in range(self.rng.randrange(4)):
            await self.go()
        del client.connection._take
        lose(self.stage, client)
        for _ in range(self.rng.randrange(4)):
            await self.go()
        await come_back(client)
        for (whose, name), asked in self.submitted.items():
            if whose == index and name not in client.ends:
                delivered = pack_ids(client.output[name])
                await client.say(msgspec.structs.replace(asked, delivered=delivered))

    async def die(self) -> None:
        if self.replicas:
            await self.replicas.pop(self.rng.randrange(len(self.replicas))).leave()

    async def go(self) -> None:
        if self.replicas:
            await self.rng.choice(self.replicas).go_on(self.rng)

    async def end(self) -> None:
        await self.enter()
        while self.stage.details()["open_requests"]:
            for replica in self.replicas:
                await replica.go_on(self.rng)


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_all_of_them_do_every_request_ends_once_and_without_a_gap(seed: int) -> None:
    async with open_stage() as stage:
        evening = Evening(stage, seed)
        await evening.begin()
        for _ in range(250):
            await evening.act()
        await evening.end()
        finished = 0
        for (index, name), tokens_expected in evening.expected.items():
            client = evening.clients[index]
            output, end = client.output[name], client.ends[name]
            assert output == tokens_expected[: len(output)]
            if end.finish is LENGTH:
                assert output == tokens_expected
                finished += 1
        assert sum(len(client.ends) for client in evening.clients) == len(evening.expected)
        assert finished > len(evening.expected) / 2
        assert stage.cell.lives == 1


# Where prefixes are.


async def test_choices_of_a_prompt_go_to_one_replica_until_its_cache_is_dropped() -> None:
    async with open_stage() as stage:
        await stage.cell.stop()
        stage.placement = PrefixAware(weight=0.5, capacity=4)
        await stage.start()
        client = await stage.client()
        one, other = await stage.replica("one"), await stage.replica("other")
        for name in ("r", "r#1", "r#2"):
            await client.submit(name)
        assert (len(one.given), len(other.given)) == (3, 0)
        await stage.ref.ask(Suspend(kv=KVLevel.KEEP))
        await client.submit("r#3")
        await stage.ref.ask(Suspend(kv=KVLevel.DROP))
        await client.submit("s")
        assert (len(one.given), len(other.given)) == (4, 1)


# Many.


async def test_sixty_four_replicas_and_ten_thousand_open_requests_are_no_crowd() -> None:
    """Each replica says a token of all its requests, half of them leave, and all end."""
    async with open_stage() as stage:
        clients = [await stage.client(f"client {number}") for number in range(4)]
        replicas = [await stage.replica(f"replica-{number}") for number in range(64)]
        for number in range(2500):
            for client in clients:
                await client.connection.send(submit(str(number)))
        await wait_all_tasks_blocked()
        assert stage.details()["open_requests"] == 10_000
        assert {len(replica.given) for replica in replicas} == {156, 157}

        await say_a_token_of_all(replicas, 0)
        for replica in replicas[32:]:
            replica.connection.close()
        await wait_all_tasks_blocked()
        assert stage.details()["requests_retried"] >= 5000  # some of them twice
        assert stage.details()["open_requests"] == 10_000
        await say_a_token_of_all(replicas[:32], 1, finish=FinishReason.STOP)
        while stage.details()["open_requests"]:  # those that were tried apart
            await say_a_token_of_all(replicas[:32], 1, finish=FinishReason.STOP)

        for client in clients:
            assert list(client.output.values()) == [[0, 1]] * 2500
            assert len(client.ended(FinishReason.STOP)) == 2500
        assert stage.details()["open_requests"] == 0
        assert stage.cell.lives == 1


async def say_a_token_of_all(
    replicas: Sequence[Replica], token: int, finish: FinishReason | None = None
) -> None:
    """Have each replica say one step, of all the requests it was ever given."""
    for replica in replicas:
        deltas = [
            tokens(request, token, token, finish=finish).deltas[0] for request in replica.given
        ]
        await replica.connection.send(TokensOut(deltas=tuple(deltas)))
    await wait_all_tasks_blocked()
