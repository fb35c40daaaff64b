"""Clients of one simulation: the real `Engine` and its streams, and notes of what they hear."""

from typing import TYPE_CHECKING

import trio

from callboard.actors.system import ActorSystem
from callboard.messages.base import unpack_ids
from callboard.messages.errors import CallboardError, Unreachable
from callboard.messages.requests import Delta
from callboard.messages.sampling import SamplingParams
from callboard.supervision.engine import Engine
from callboard.supervision.stream import RequestStream
from tests.simulation.scenario import Ask, ClientPlan

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

COORDINATOR = "sim://coordinator"
CONNECT_TIMEOUT_S = 100.0


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
        self.problems: list[str] = []

    @property
    def accepted(self) -> bool:
        """Whether its acceptance has come."""
        return bool(self.stream.prompt_token_ids)

    def hear(self, delta: Delta, now: float) -> None:
        """Note a delta that came for it, and what is wrong with it."""
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
        async with trio.open_nursery() as nursery:
            for ask in self._plan.asks:
                nursery.start_soon(self._make, ask)
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
        """Make a request, read what comes, and leave when the plan says so."""
        await self._world.until(ask.at)
        seconds = float("inf") if ask.cancel_after_s is None else ask.cancel_after_s
        mine: list[Asked] = []
        try:
            with trio.move_on_after(seconds) as scope:
                await (self._ask_one(ask, mine) if ask.n == 1 else self._ask_many(ask, mine))
            is_gone = scope.cancelled_caught
        except CallboardError as error:
            self._world.log(self._process.name, "got", f"{type(error).__name__}: {error}")
            # What becomes of one choice ends the others; what was never sent has no end.
            is_gone = ask.n > 1 or not mine[0].stream.told
        for asked in mine:
            asked.left = asked.left or is_gone

    async def _ask_one(self, ask: Ask, mine: list[Asked]) -> None:
        stream = self.engine.submit(
            list(ask.prompt), ask.params, priority=ask.priority, timeout_s=ask.timeout_s
        )
        asked = self._note(ask, stream, mine)
        async with stream:
            num_tokens = 0
            async for delta in stream:
                num_tokens += len(unpack_ids(delta.token_ids))
                if ask.leave_after_tokens is not None and num_tokens >= ask.leave_after_tokens:
                    asked.left = True
                    break

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
