"""The executor: owns the device thread and everything that lives on the device."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from callboard.actors.actor import Actor
from callboard.actors.device_thread import DeviceThread
from callboard.actors.ref import ActorRef
from callboard.messages.control import ControlReply, KVLevel, Resume, Suspend, WeightsLevel
from callboard.messages.steps import DeviceReady, DropRows, RowId, RunStep, StepDone

ExecutorInbox = RunStep | DropRows


class Runner(Protocol):
    """What drives the device: `callboard.gpu.runner.ModelRunner`, or a script in tests.

    Every method is called on the device thread.
    """

    def load(self) -> None:
        """Load the weights, or take them back from the host; harmless when they are there."""
        ...

    def allocate(self) -> None:
        """Allocate the KV cache, empty or as it was offloaded; harmless when it is there."""
        ...

    def free_weights(self) -> int:
        """Free the weights; returns by how many bytes the process or device shrank."""
        ...

    def free_kv(self) -> int:
        """Free the KV cache and forget every row; returns the bytes the system got back."""
        ...

    def offload_weights(self) -> int:
        """Free the weights and keep them on the host until `load`; returns the bytes as above."""
        ...

    def offload_kv(self) -> int:
        """Free the KV cache and keep it, and the rows, on the host until `allocate`."""
        ...

    def execute(self, step: RunStep) -> StepDone:
        """Run one step."""
        ...

    def drop(self, rows: tuple[RowId, ...]) -> None:
        """Forget rows; unknown ones are ignored."""
        ...

    def room(self) -> DeviceReady:
        """Say what fits; needs neither weights nor cache."""
        ...

    def describe(self) -> dict[str, int | float | str]:
        """Return what `status` shows: device, dtype, backend, bytes."""
        ...


class Executor(Actor[ExecutorInbox]):
    """Runs steps one at a time. An error in a step is the end of this life and of all rows."""

    # Every row may be dropped, one by one, while a step runs; the scheduler must not have to wait
    # for its end then, since the end waits for room in the scheduler's mailbox.
    capacity = 128 * 1024

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        *,
        scheduler: ActorRef[StepDone | DeviceReady],
        allocator: ActorRef[DeviceReady],
    ) -> None:
        self._make_runner = make_runner
        self._scheduler = scheduler
        self._allocator = allocator
        self._thread = DeviceThread("callboard device")
        self._runner: Runner
        self._details: dict[str, int | float | str] = {}

    async def on_start(self) -> None:
        """Load the model and say what fits; while suspended, take no more than that leaves."""
        self._thread.start()
        self._runner = await self._thread.run(self._make_runner)
        levels = self.cell.suspended
        if levels is None:
            await self._take_memory()
        elif levels.weights is WeightsLevel.KEEP:
            await self._thread.run(self._runner.load)
        await self._describe()
        fits = await self._thread.run(self._runner.room)
        room = msgspec.structs.replace(fits, life=self.cell.lives)
        # The allocator first: the scheduler asks it as soon as it knows.
        await self._allocator.tell(room)
        await self._scheduler.tell(room)

    async def on_stop(self) -> None:
        """End the thread once its job is done."""
        await self._thread.aclose()

    async def receive(self, message: ExecutorInbox) -> None:
        """Handle one message."""
        match message:
            case RunStep() if message.life != self.cell.lives:
                # Planned for a device that is gone, with its rows and blocks: the scheduler will
                # read of this one, and plan anew.
                self.log.info("stale step ignored", step=message.step)
            case RunStep():
                done = await self._thread.run(lambda: self._runner.execute(message))
                await self._scheduler.tell(done)
            case DropRows(rows=rows):
                await self._thread.run(lambda: self._runner.drop(rows))

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Free what the levels name; acknowledged when the system has it back."""
        freed = 0
        for free in self._ways_to_free(verb):
            freed += await self._thread.run(free)
        await self._describe()
        return self.ack(verb, bytes_freed=freed)

    async def on_resume(self, verb: Resume) -> ControlReply | None:
        """Take back whatever is missing."""
        await self._take_memory()
        await self._describe()
        return self.ack(verb)

    def details(self) -> dict[str, int | float | str]:
        """Return the runner's description as of the last change."""
        return self._details

    async def _take_memory(self) -> None:
        await self._thread.run(self._runner.load)
        await self._thread.run(self._runner.allocate)

    def _ways_to_free(self, levels: Suspend) -> list[Callable[[], int]]:
        runner = self._runner
        of_kv = {KVLevel.DROP: runner.free_kv, KVLevel.OFFLOAD: runner.offload_kv}
        of_weights = {
            WeightsLevel.DISCARD: runner.free_weights,
            WeightsLevel.OFFLOAD: runner.offload_weights,
        }
        ways = [of_kv.get(levels.kv), of_weights.get(levels.weights)]
        return [way for way in ways if way is not None]

    async def _describe(self) -> None:
        self._details = await self._thread.run(self._runner.describe)
