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
from callboard.actors.coordinator import Coordinator, FromClient, ToClient
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.metrics import Metrics
from callboard.actors.ref import LocalRef
from callboard.actors.routing import MAX_ATTEMPTS
from callboard.actors.session import OUTBOX, WINDOW, Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import MemoryNetwork, Network, ZmqNetwork
from callboard.actors.zmq_socket import open_zmq_context
from callboard.messages.base import Message, pack_ids, unpack_ids
from callboard.messages.codec import MAX_FRAME_BYTES
from callboard.messages.control import AbortReply, AbortRequests, ControlReply, Stop
from callboard.messages.errors import Failure, RequestError, SequenceOverflow
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

    def __init__(self, stage: "Stage", role: Role, name: str, inbox: Any, outbox: Any) -> None:
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

    def __init__(self, stage: "Stage", name: str) -> None:
        super().__init__(stage, Role.REPLICA, name, ToReplica, FromReplica)

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

    async def replica(self, name: str = "replica") -> Replica:
        await self.enter(replica := Replica(self, name))
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
            control_endpoint=lambda: "memory://control",
            model="a model",
            bound=self.bound.append,
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


async def test_a_second_request_of_an_id_is_refused_and_the_first_goes_on(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    await client.submit("r")
    assert "in use" in client.refused["r"].failure.message
    (request,) = replica.given
    await replica.send(request, 0, 7, finish=FinishReason.STOP)
    assert client.output["r"] == [7]


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
            replica="replica",
            finish="stop",
            prompt_tokens=1,
            output_tokens=2,
            first_token_s=0.0,
            total_s=0.0,
        ),
        StepStats(
            replica="replica",
            step=1,
            num_tokens=3,
            num_sampled=1,
            running=1,
            waiting=0,
            paused=0,
            free_blocks=1,
            seconds=0.0,
        ),
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

    again = await stage.replica("replica-0")  # the first never said goodbye

    (request,) = again.given
    assert unpack_ids(request.delivered) == [7]
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
        assert len(replica.given) == 1
        await replica.leave()
    assert client.ended(FinishReason.ERROR) == ["r"]
    assert client.failure().code == "RequestFailed"
    assert (await stage.replica()).given == []


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


async def test_a_client_that_lost_us_unnoticed_submits_again_what_it_had_open(
    autojump_clock: MockClock, stage: Stage
) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    client.connection._lose("cut off")
    await client.session(2)
    await client.submit("r")
    assert client.refused == {}
    old, new = replica.given
    assert replica.aborted == [old.request_id]
    await replica.send(new, 0, 8, finish=FinishReason.STOP)
    assert client.output["r"] == [8]


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
    other = await stage.replica("other")
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
    assert await stage.ref.ask(AbortRequests(request_id="x")) == AbortReply(aborted=2)
    assert await stage.ref.ask(AbortRequests(request_id="nobody's")) == AbortReply(aborted=0)
    await wait_all_tasks_blocked()
    assert replica.aborted == [request.request_id for request in replica.given[:2]]
    assert await stage.ref.ask(AbortRequests(all=True)) == AbortReply(aborted=4)
    await wait_all_tasks_blocked()
    assert sorted(replica.aborted) == sorted(request.request_id for request in replica.given)


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


async def test_a_client_that_comes_back_may_use_its_ids_at_once(stage: Stage) -> None:
    client, replica = await stage.client(), await stage.replica()
    await client.submit("r")
    stage.cell.actor._listener.drop(  # type: ignore[union-attr]  # as when it was too slow
        next(iter(stage.cell.actor._routing._by_client)),  # type: ignore[union-attr]
        "too slow",
    )
    await client.connection.send(Abort(request_id="nothing"))  # and is asked who it is
    await wait_all_tasks_blocked()
    assert client.sessions == 2
    await client.submit("r", delivered=pack_ids((7,)))
    assert client.refused == {}
    first, second = replica.given
    assert replica.aborted == [first.request_id]
    assert unpack_ids(second.delivered) == [7]


# Stop.


async def ask_stop(stage: Stage, drain_s: float, replies: list[ControlReply]) -> None:
    replies.append(await stage.ref.ask(Stop(drain_s=drain_s), timeout=1000))


async def test_stopping_at_once_ends_what_is_open_and_is_acknowledged(stage: Stage) -> None:
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
    assert trio.current_time() - began == pytest.approx(30, abs=0.1)
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

    async def begin(self) -> None:
        self.clients = [await self.stage.client(f"client {number}") for number in range(3)]

    async def act(self) -> None:
        scenes: list[Callable[[], Any]] = [self.submit, self.abort, self.enter, self.die, self.go]
        (scene,) = self.rng.choices(scenes, [5, 1, 1, 1, 12])
        await scene()

    async def submit(self) -> None:
        index = self.rng.randrange(3)
        name, prompt = str(len(self.expected)), [self.rng.randrange(500)]
        max_tokens = self.rng.randint(1, 8)
        self.expected[index, name] = expected(prompt, max_tokens)
        await self.clients[index].submit(
            name,
            prompt=TokenPrompt(token_ids=pack_ids(prompt)),
            params=SamplingParams(max_tokens=max_tokens),
        )

    async def abort(self) -> None:
        if self.expected:
            index, name = self.rng.choice(sorted(self.expected))
            await self.clients[index].say(Abort(request_id=name))

    async def enter(self) -> None:
        if len(self.replicas) < 3:
            self.entered += 1
            self.replicas.append(replica := Improvised(self.stage, f"improvised {self.entered}"))
            await self.stage.enter(replica)

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
async def test_whatever_replicas_do_every_request_ends_once_and_without_a_gap(seed: int) -> None:
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
