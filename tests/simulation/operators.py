"""Operators of one simulation: real engines that send verbs, and notes of how they are answered."""

from typing import TYPE_CHECKING

import trio

from callboard.actors.actor import start_in_order
from callboard.actors.system import ActorSystem
from callboard.messages.control import AbortRequests, Verb
from callboard.messages.errors import CallboardError, Unreachable
from tests.simulation.clients import SimEngine, open_sim_engine
from tests.simulation.scenario import Order

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World


class Operator:
    """An operator's process, which gives orders, one behind the other."""

    def __init__(
        self, world: "World", process: "Process", orders: tuple[Order, ...], *, waits: bool
    ) -> None:
        """`waits` is whether it waits for the answer to one before it gives the next."""
        self.engine: SimEngine
        self.is_connected = trio.Event()
        self.is_done = trio.Event()  # whether all its orders have been answered
        self._world = world
        self._process = process
        self._orders = orders
        self._waits = waits

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect, and stay until the simulation is over."""

        async def main(system: ActorSystem) -> None:
            async with trio.open_nursery() as nursery:
                if await self._connect(system, nursery):
                    self.is_connected.set()
                    task_status.started()
                    await self._world.over.wait()
                    self.engine._close()
                nursery.cancel_scope.cancel("it is over")

        await self._process.run(main)

    async def _connect(self, system: ActorSystem, nursery: trio.Nursery) -> bool:
        try:
            self.engine = await open_sim_engine(system, self._process, nursery)
        except Unreachable:
            if self._world.stopping:
                return False  # it came too late
            raise
        return True

    async def give_orders(self) -> None:
        """Give the scenario's orders, each when its time has come, and hear the answers."""
        if not self.is_connected.is_set():
            await self.is_connected.wait()
        if self._waits:
            for order in self._orders:
                await self._world.until(order.at)
                await self.order(order.verb, order.timeout_s)
        else:
            async with trio.open_nursery() as nursery:
                for order in self._orders:
                    await self._world.until(order.at)
                    await start_in_order(nursery, self.order, order.verb, order.timeout_s)
        self.is_done.set()

    async def order(self, verb: Verb | AbortRequests, timeout_s: float) -> bool:
        """Give an order; returns whether it was carried out."""
        checks, name = self._world.checks, self._process.name
        self._world.log(name, "orders", verb)
        sent = checks.verb_sent(name, verb)
        began = trio.current_time()
        done = False
        with trio.move_on_after(timeout_s + 1.0) as scope:
            try:
                if isinstance(verb, AbortRequests):
                    await self.engine._ask(verb, timeout_s)
                    done = True
                else:
                    reply = await self.engine.ask_tree(verb, timeout_s)
                    self._world.log(name, "is told", reply)
                    checks.verb_answered(sent, reply)
                    done = reply.done
            except CallboardError as error:
                self._world.log(name, "is told", f"{type(error).__name__}: {error}")
                if isinstance(error, Unreachable):
                    checks.verb_was_not_sent(sent)
        if scope.cancelled_caught or trio.current_time() - began > timeout_s + 0.01:
            checks.broke(f"{verb} of {name} was not answered in {timeout_s:g} s")
        checks.verb_over(sent, done=done)
        return done

    async def insist(self, verb: Verb) -> None:
        """Give an order until it is carried out, which has to be soon."""
        for _ in range(5):
            if self._world.root_ended.is_set() or await self.order(verb, 60.0):
                return
            await trio.sleep(1.0)
        self._world.checks.broke(f"{type(verb).__name__} was not carried out")
