from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.link import FromReplica, Link, ToReplica
from callboard.actors.ref import LocalRef
from callboard.actors.session import SILENCE_LIMIT_S, Connection, Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import MemoryNetwork
from callboard.messages.base import Message, pack_ids
from callboard.messages.control import State
from callboard.messages.errors import (
    Failure,
    NameInUse,
    ProtocolMismatch,
    RequestError,
    Unreachable,
)
from callboard.messages.events import StepStats
from callboard.messages.membership import Role, Welcome
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    ForgetAll,
    Refused,
    Submit,
    TokenPrompt,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams

ENDPOINT = "memory://coordinator"


def submit(request_id: str) -> Submit:
    prompt = TokenPrompt(token_ids=pack_ids((1, 2)))
    return Submit(request_id=request_id, prompt=prompt, params=SamplingParams())


def tokens(start: int) -> TokensOut:
    delta = Delta(request_id="a", start=start, token_ids=pack_ids((7,)))
    return TokensOut(deltas=(delta,))


class Line:
    """A link, the tokenizer's mailbox behind it, and a coordinator that may come and go."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.cell: Cell = system.cell("link")
        self.ref: LocalRef[Any] = LocalRef(self.cell)
        self.tokenizer: Cell = system.cell("tokenizer")
        self.events: list[Said | Joined | Left] = []
        self.listener: Listener
        self._system = system
        self._nursery = nursery
        self._network = MemoryNetwork()
        self._news = trio.Event()

    async def start(self) -> None:
        link = Link(
            self._system,
            self._network,
            ENDPOINT,
            replica="replica-0",
            tokenizer=LocalRef(self.tokenizer),
        )
        await self._nursery.start(self.cell.run, lambda: link)

    async def impostor(self) -> Connection:
        """Have somebody else join by the link's name."""

        async def ignore(event: Said | Joined | Left) -> None:
            pass

        other = Connection(
            self._system,
            self._network,
            ENDPOINT,
            role=Role.REPLICA,
            name="replica-0",
            inbox=ToReplica,
            outbox=FromReplica,
            deliver=ignore,
        )
        self._nursery.start_soon(other.run)
        await other.wait_welcome()
        return other

    def listen(self, *, inbox: Any = FromReplica, **options: Any) -> None:
        self.listener = Listener(
            self._system,
            self._network,
            ENDPOINT,
            name="coordinator",
            inboxes={Role.REPLICA: inbox},
            outboxes={Role.REPLICA: ToReplica},
            welcome=lambda session: Welcome(name="c", session=session, max_frame_bytes=9),
            deliver=self._deliver,
            **options,
        )
        self._nursery.start_soon(self.listener.run)

    async def joined(self, count: int = 1) -> bytes:
        """Wait for the link to join for the so-manieth time; returns its key."""
        with trio.fail_after(60):
            while len(keys := [one.peer for one in self.events if isinstance(one, Joined)]) < count:
                self._news = trio.Event()
                await self._news.wait()
        return keys[-1]

    async def said(self) -> list[Message]:
        """What the coordinator has heard."""
        await wait_all_tasks_blocked()
        return [event.message for event in self.events if isinstance(event, Said)]

    async def told(self) -> list[Message]:
        """What the tokenizer was told since it was asked last."""
        await wait_all_tasks_blocked()
        messages = []
        while (letter := self.tokenizer.mailbox.take_nowait()) is not None:
            messages.append(letter.message)
        return messages

    async def _deliver(self, event: Said | Joined | Left) -> None:
        self.events.append(event)
        self._news.set()


@asynccontextmanager
async def open_line() -> AsyncGenerator[Line]:
    async with open_system() as system, trio.open_nursery() as nursery:
        yield Line(system, nursery)
        nursery.cancel_scope.cancel()


async def test_it_is_up_when_the_coordinator_has_welcomed_it(autojump_clock: MockClock) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        (joined,) = line.events
        assert isinstance(joined, Joined)
        assert (joined.hello.role, joined.hello.name) == (Role.REPLICA, "replica-0")
        assert line.cell.status().details == {"endpoint": ENDPOINT, "connected": 1}


async def test_without_a_coordinator_it_does_not_start(autojump_clock: MockClock) -> None:
    async with open_line() as line:
        with pytest.raises(Unreachable, match="nobody answers"):
            await line.start()
        assert line.cell.state is State.FAILED


async def test_it_waits_for_a_life_before_it_to_be_missed(autojump_clock: MockClock) -> None:
    async with open_line() as line:
        line.listen(unique=(Role.REPLICA,))
        before = await line.impostor()
        before._say = lambda message: None  # type: ignore[method-assign]  # its machine is dead
        await line.start()
        left, joined = line.events[-2:]
        assert (type(left), type(joined)) == (Left, Joined)
        assert trio.current_time() > SILENCE_LIMIT_S


async def test_it_does_not_start_beside_another_of_its_name_that_is_alive(
    autojump_clock: MockClock,
) -> None:
    async with open_line() as line:
        line.listen(unique=(Role.REPLICA,))
        before = await line.impostor()
        with pytest.raises(NameInUse, match="a replica named replica-0 is there already"):
            await line.start()
        assert before.present


async def test_a_coordinator_of_another_version_is_named(autojump_clock: MockClock) -> None:
    async with open_line() as line:
        line.listen(inbox=TokensOut)
        with pytest.raises(ProtocolMismatch, match="coordinator and replica-0 differ"):
            await line.start()


async def test_requests_go_to_the_tokenizer_in_order_behind_a_clean_start(
    autojump_clock: MockClock,
) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        key = await line.joined()
        requests = [submit("a"), Abort(request_id="a"), submit("b")]
        for request in requests:
            line.listener.send(key, request)
        assert await line.told() == [ForgetAll(), *requests]


async def test_what_the_replica_says_goes_to_the_coordinator_in_order(
    autojump_clock: MockClock,
) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        says: list[Message] = [
            Accepted(request_id="a", prompt_token_ids=pack_ids((1, 2)), seed=3),
            tokens(0),
            Refused(request_id="b", failure=Failure.of(RequestError("no"))),
            StepStats(num_tokens=1, num_sampled=1, seconds=0.0),
        ]
        for message in says:
            await line.ref.tell(message)
        assert await line.said() == says


async def test_when_the_coordinator_leaves_all_its_requests_are_forgotten(
    autojump_clock: MockClock,
) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        line.listener.send(await line.joined(), submit("a"))
        await line.told()
        line.listener.close()
        assert await line.told() == [ForgetAll()]
        assert line.cell.status().details["connected"] == 0


async def test_what_is_said_to_nobody_is_dropped_and_what_follows_begins_clean(
    autojump_clock: MockClock,
) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        line.listener.close()
        await line.told()
        await line.ref.tell(tokens(0))
        line.events.clear()
        line.listen()
        key = await line.joined()
        line.listener.send(key, submit("b"))
        await line.ref.tell(tokens(5))
        assert await line.said() == [tokens(5)]
        assert await line.told() == [ForgetAll(), submit("b")]
        assert line.cell.lives == 1


async def test_words_lost_on_the_way_begin_a_new_session_and_not_a_new_life(
    autojump_clock: MockClock,
) -> None:
    """The coordinator's socket is gone, and the link has not heard of it yet."""
    async with open_line() as line:
        line.listen()
        await line.start()
        await line.told()
        line.listener._closed = True
        line.listener._port.close()
        await line.ref.tell(tokens(0))
        await wait_all_tasks_blocked()
        line.events.clear()
        line.listen()
        await line.joined()
        assert await line.told() == [ForgetAll(), ForgetAll()]  # one when it left, one as it came
        assert line.cell.lives == 1


async def test_stopping_it_tells_the_coordinator_at_once(autojump_clock: MockClock) -> None:
    async with open_line() as line:
        line.listen()
        await line.start()
        began = trio.current_time()
        await line.cell.stop()
        await line.said()
        assert isinstance(line.events[-1], Left)
        assert trio.current_time() == began


async def test_a_tokenizer_that_has_no_room_does_not_hold_up_the_tokens(
    autojump_clock: MockClock,
) -> None:
    """Else the scheduler would wait for the link, the link for it, and both for ever."""
    async with open_line() as line:
        line.listen()
        await line.start()
        key = await line.joined()
        flood = line.tokenizer.mailbox.capacity + 3_000
        for number in range(flood):
            line.listener.send(key, submit(str(number)))
        await wait_all_tasks_blocked()
        for start in range(6_000):
            await line.ref.tell(tokens(start))
        assert len(await line.said()) == 6_000
        told: list[Message] = []
        while batch := await line.told():
            told += batch
        assert told == [ForgetAll(), *(submit(str(number)) for number in range(flood))]
