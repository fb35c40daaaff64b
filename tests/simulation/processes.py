"""Processes of one simulation: trees of tasks that can be killed between two checkpoints.

A killed process says nothing more: its ports are gone before its tasks are cancelled, so whatever
they still do in their `finally` blocks is seen by nobody.
"""

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from callboard.actors.ref import current_cell
from callboard.actors.system import ActorSystem, open_system
from callboard.supervision.process import ReplicaOrder, ReplicaProcess
from callboard.supervision.replica import _Replica
from tests.simulation.device import Device, SimThread

if TYPE_CHECKING:
    from callboard.actors.system import Timers
    from tests.simulation.network import ProcessNetwork
    from tests.simulation.world import World

current_process: contextvars.ContextVar["Process"] = contextvars.ContextVar("current_process")
"""The process a task belongs to."""


class Process:
    """One process: its tasks, its ports and, where it has one, its device."""

    def __init__(self, world: "World", name: str, life: int = 1) -> None:
        self.world = world
        self.name = name
        self.owner = name if life == 1 else f"{name}#{life}"
        self.alive = True
        self.devices: dict[str, Device] = {}  # by the names of replicas
        self.network: ProcessNetwork = world.network.of(self.owner)
        self.system: ActorSystem | None = None
        self.input_closed = trio.Event()
        self.killed = trio.Event()
        self.is_orphan = False  # whether its parent was killed
        self._scope = trio.CancelScope()

    @property
    def timers(self) -> "Timers":
        """The simulation's timers."""
        return self.world.timers

    async def run(self, main: Callable[[ActorSystem], Any]) -> Any:
        """Run the process's program; returns what it returns, or None when it was killed."""
        current_process.set(self)
        current_cell.set(None)
        result = None
        try:
            with self._scope:
                async with open_system() as system:
                    self.system = system
                    result = await main(system)
        except BaseExceptionGroup as group:
            if not self.killed.is_set():
                raise
            cancelled = group.split(Exception)[1]
            if cancelled is not None:  # what else it ran into as it died, nobody has seen
                raise cancelled from None
        finally:
            self.alive = False
        return result

    def kill(self, *, silently: bool = False) -> None:
        """End the process as `kill -9` does; silently: as when its machine is gone."""
        if self.alive:
            self.alive = False
            self.world.log("", "killed", self.owner)
            self.world.network.kill(self.owner, silently=silently)
            for device in self.devices.values():
                device.step_is_over()
            self.killed.set()
            self._scope.cancel("killed")


def make_thread(name: str) -> SimThread:
    """Make the thread of the executor whose task this is."""
    cell = current_cell.get()
    assert cell is not None
    replica = cell.name.partition("/")[0]
    return SimThread(current_process.get().devices[replica])


# A replica's process, seen from root: what `trio.Process` would be.


class SimInput:
    """The standard input of a simulated process."""

    def __init__(self, process: "ChildProcess") -> None:
        self._process = process

    async def send_all(self, data: bytes) -> None:
        """Write the order, which the process waits for."""
        await trio.lowlevel.checkpoint()
        if not self._process.process.alive:
            raise trio.BrokenResourceError
        self._process.begin(msgspec.json.decode(data, type=ReplicaOrder))

    def close(self) -> None:
        """Close it, which asks the process to end."""
        self._process.process.input_closed.set()


class ChildProcess:
    """What the parent holds of a replica's process."""

    def __init__(self, world: "World", process: Process, pid: int) -> None:
        self.pid = pid
        self.process = process
        self.returncode: int | None = None
        self.stdin = SimInput(self)
        self._world = world
        self._ended = trio.Event()

    def begin(self, order: ReplicaOrder) -> None:
        """Start the program with its order."""
        self._world.nursery.start_soon(self._run, order)

    async def wait(self) -> int:
        """Wait for the end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill it, at once; a parent that is dead itself kills nobody."""
        if current_process.get().alive:
            self.process.kill()

    async def _run(self, order: ReplicaOrder) -> None:
        world, process = self._world, self.process

        async def main(system: ActorSystem) -> int:
            await trio.sleep(world.rng.uniform(0.01, 0.2))  # until Python is up
            failure = await _Replica(order, system, process.network).run()
            return 0 if failure is None else 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_killed)
            code = await process.run(main)
            nursery.cancel_scope.cancel("it has ended")
        self._end(-9 if code is None else code)

    async def _end_when_killed(self) -> None:
        """Let the parent know at once; what the tasks still do is that of a process no more."""
        await self.process.killed.wait()
        self._end(-9)

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()


class SimReplicaProcess(ReplicaProcess):
    """The actor that stands for a replica's process, with a simulated one."""

    def _close_input(self, process: trio.Process) -> None:
        process.stdin.close()  # type: ignore[union-attr]  # a SimInput


async def end_of_input() -> None:
    """Wait until the parent has closed the standard input of the process whose task this is."""
    await current_process.get().input_closed.wait()
