"""Clients of one simulation: the real `Engine` and its streams, and notes of what they hear."""

import contextlib
from typing import TYPE_CHECKING

import msgspec
import trio

from callboard.actors.session import Joined, Left, Said
from callboard.actors.system import ActorSystem
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    RequestError,
    Unreachable,
)
from callboard.messages.requests import Accepted, Delta, Refused, TokenPrompt
from callboard.messages.sampling import SamplingParams
from callboard.supervision.engine import Engine
from callboard.supervision.stream import RequestStream
from tests.simulation.scenario import Ask, ClientPlan

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

COORDINATOR = "sim://coordinator"
CONNECT_TIMEOUT_S = 200.0

OTHER_PROMPT = TokenPrompt(token_ids=pack_ids([5, 4, 3, 2, 1]))
"""What a request has that clashes with another; no scenario draws it."""


class Asked:
    """One request as its client sees it."""

    def __init__(self, client: str, ask: Ask, stream: RequestStream, now: float) -> None:
        self.name = f"{client}'s {stream.request_id}"
        self.prompt = ask.prompt
        self.params: SamplingParams = stream._submit.params
        self.timeout_s = ask.timeout_s
        self.stream = stream
        self.sent_at = now
        self.ended_at = float("inf")
        self.left = False
        self.client_closed = False
        self.client_died = False
        self.num_tokens = 0
        self.before: Asked | None = None  # whose id it has
        self.is_doubled = False  # whether a submission of its id may have come behind its end
        self.ran_again = False
        self.num_clashes = 0  # other requests under its id that were not refused yet
        self.problems: list[str] = []

    @property
    def accepted(self) -> bool:
        """Whether its acceptance has come."""
        return bool(self.stream.prompt_token_ids)

    @property
    def may_be_refused_for_its_id(self) -> bool:
        """Whether its client has not heard the end of the request before that has its id."""
        return self.before is not None and self.before.ended_at > self.sent_at

    def hear_answer(self, answer: Accepted | Refused) -> bool:
        """Note an answer to a submission under its id; returns whether it is about another."""
        if isinstance(answer, Accepted):
            return self._hear_accepted()
        is_clash = answer.failure.code == "RequestError" and "in use" in answer.failure.message
        if not self.num_clashes or not is_clash:
            return False
        self.num_clashes -= 1
        return True

    def _hear_accepted(self) -> bool:
        if self.ended_at == float("inf"):
            return False
        self.ran_again = True
        if not self.is_doubled:
            self.problems.append("was accepted behind its end")
        return True

    def hear(self, delta: Delta, now: float) -> None:
        """Note a delta that came for it, and what is wrong with it."""
        self.ran_again = self.ran_again or (self.is_doubled and self.ended_at < float("inf"))
        if self.ran_again:
            return
        count = len(unpack_ids(delta.token_ids))
        if self.ended_at < float("inf"):
            self.problems.append(f"was told {delta} behind its end")
        elif delta.start != self.num_tokens:
            self.problems.append(f"was told token {delta.start} behind {self.num_tokens}")
        self.num_tokens = delta.start + count
        if delta.finish is not None:
            self.ended_at = now


class SimEngine(Engine):
    """The real thing, overheard."""

    process: "Process"
    asks: dict[str, Asked]

    async def _deliver(self, event: Said | Joined | Left) -> None:
        message = event.message if isinstance(event, Said) else None
        if isinstance(message, Accepted | Refused):
            self.process.world.log(self.process.name, "hears", message)
            asked = self.asks.get(message.request_id)
            if asked is not None and asked.hear_answer(message):
                return
        await super()._deliver(event)

    def _take(self, delta: Delta) -> None:
        world = self.process.world
        world.log(self.process.name, "hears", delta)
        asked = self.asks.get(delta.request_id)
        if asked is not None and self.process.alive:
            asked.hear(delta, trio.current_time())
        super()._take(delta)


class Client:
    """A client process and its requests."""

    def __init__(self, world: "World", process: "Process", plan: ClientPlan) -> None:
        self.asked_all = trio.Event()
        self.asked: list[Asked] = []
        self.engine: SimEngine
        self._nursery: trio.Nursery
        self._world = world
        self._process = process
        self._plan = plan

    async def main(self, system: ActorSystem) -> None:
        """Connect, make all requests, and wait for their ends; then stay until it is over."""
        try:
            async with trio.open_nursery() as connection:
                await self._live(system, connection)
                connection.cancel_scope.cancel("it is over")
        finally:
            self.asked_all.set()

    async def _live(self, system: ActorSystem, connection: trio.Nursery) -> None:
        try:
            self.engine = await open_sim_engine(system, self._process, connection)
        except Unreachable:
            if self._world.stopping:
                return  # it came too late
            raise
        if self._plan.closes_at is not None:
            connection.start_soon(self._close, self._plan.closes_at)
        if self._plan.dies_at is not None:
            connection.start_soon(self._die, self._plan.dies_at)
        async with trio.open_nursery() as self._nursery:
            for ask in self._plan.asks:
                self._nursery.start_soon(self._make, ask)
        self.asked_all.set()
        await self._world.over.wait()
        self.engine._close()

    async def _close(self, at: float) -> None:
        await self._world.until(at)
        self._world.log(self._process.name, "closes")
        for asked in self.asked:
            asked.client_closed = True
        self.engine._close()

    async def _die(self, at: float) -> None:
        await self._world.until(at)
        for asked in self.asked:
            asked.client_died = True
        self._process.kill(silently=self._world.rng.random() < 0.5)

    async def _make(self, ask: Ask) -> None:
        """Make a request, and those that follow it under its id."""
        await self._world.until(ask.at)
        before = await self._make_now(ask)
        for follower in ask.followers:
            await trio.sleep(follower.at)
            follower = msgspec.structs.replace(follower, request_id=ask.request_id)
            before = await self._make_now(follower, before)

    async def _make_now(self, ask: Ask, before: Asked | None = None) -> Asked | None:
        """Make a request, read what comes, and leave when the plan says so."""
        seconds = float("inf") if ask.cancel_after_s is None else ask.cancel_after_s
        mine: list[Asked] = []
        try:
            with trio.move_on_after(seconds) as scope:
                if ask.n == 1:
                    await self._ask_one(ask, mine, before)
                else:
                    await self._ask_many(ask, mine)
            is_gone = scope.cancelled_caught
        except CallboardError as error:
            self._world.log(self._process.name, "got", f"{type(error).__name__}: {error}")
            # What becomes of one choice ends the others; what was never sent has no end.
            is_gone = ask.n > 1 or not mine[0].stream.told
        for asked in mine:
            asked.left = asked.left or is_gone
        return mine[0] if mine else None

    async def _ask_one(self, ask: Ask, mine: list[Asked], before: Asked | None) -> None:
        stream = self.engine.submit(
            list(ask.prompt),
            ask.params,
            request_id=ask.request_id,
            priority=ask.priority,
            timeout_s=ask.timeout_s,
        )
        asked = self._note(ask, stream, mine)
        asked.before = before
        if ask.reset_after_s is not None:
            self._nursery.start_soon(self._world.reset_after, self._process.name, ask.reset_after_s)
        if ask.repeated_after_s is not None or ask.clashes_after_s is not None:
            self._nursery.start_soon(self._say_again, ask, asked)
        async with stream:
            num_tokens = 0
            async for delta in stream:
                num_tokens += len(unpack_ids(delta.token_ids))
                if ask.leave_after_tokens is not None and num_tokens >= ask.leave_after_tokens:
                    asked.left = True
                    break

    async def _say_again(self, ask: Ask, asked: Asked) -> None:
        """Use the id of an open request, as no engine would, but a program of somebody's own."""
        await trio.sleep(ask.repeated_after_s or ask.clashes_after_s or 0.0)
        stream = asked.stream
        if not stream.told or not self.engine._knows(stream):
            return
        submit = stream.again()
        if ask.clashes_after_s is not None:
            await self._check_that_ids_are_refused(submit.request_id)
            submit = msgspec.structs.replace(submit, prompt=OTHER_PROMPT, delivered=b"")
        with contextlib.suppress(Unreachable, ActorStopped):
            asked.is_doubled = True
            await self.engine._send(submit)
            asked.num_clashes += ask.clashes_after_s is not None
            self._world.log(self._process.name, "says", submit)

    async def _check_that_ids_are_refused(self, request_id: str) -> None:
        """An engine refuses the id of an open request itself."""
        try:
            async with self.engine.submit([1, 2], request_id=request_id, max_tokens=1):
                self._world.checks.broke(f"{request_id} was used twice")
        except RequestError as error:
            if error.field != "request_id":
                self._world.checks.broke(f"{request_id} was refused: {error}")
        except ActorStopped:
            pass  # its engine is closed

    async def _ask_many(self, ask: Ask, mine: list[Asked]) -> None:
        choices = self.engine.submit_choices(
            list(ask.prompt),
            ask.params,
            n=ask.n,
            priority=ask.priority,
            timeout_s=ask.timeout_s,
        )
        for stream in choices._streams:
            self._note(ask, stream, mine)
        async with choices:
            async for _ in choices:
                pass

    def _note(self, ask: Ask, stream: RequestStream, mine: list[Asked]) -> Asked:
        asked = Asked(self._process.name, ask, stream, trio.current_time())
        asked.client_closed = self.engine._closed
        mine.append(asked)
        self.asked.append(asked)
        self.engine.asks[stream.request_id] = asked
        self._world.checks.asked.append(asked)
        self._world.log(self._process.name, "asks", stream._submit)
        return asked


async def open_sim_engine(
    system: ActorSystem, process: "Process", nursery: trio.Nursery
) -> SimEngine:
    """Connect an engine to the simulated tree, for as long as it may take."""
    engine = SimEngine(system, process.network, COORDINATOR)
    engine.process, engine.asks = process, {}
    await engine._run(nursery, CONNECT_TIMEOUT_S)
    return engine
