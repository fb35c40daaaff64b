"""The executor: owns the device thread and everything that lives on the device."""

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import trio

from callboard.actors.actor import Actor
from callboard.actors.device_thread import DEVICE_THREAD, DeviceThread, num_left_behind
from callboard.actors.ref import ActorRef
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Resume,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
    WeightsLevel,
    verb_name,
)
from callboard.messages.errors import Failure, OutOfMemory, StepStuck, WeightsError
from callboard.messages.steps import DeviceReady, DropRows, RowId, RunStep, StepDone

T = TypeVar("T")

ExecutorInbox = RunStep | DropRows


class Runner(Protocol):
    """What drives the device: `callboard.gpu.runner.ModelRunner`, or a script in tests.

    Every method is called on the device thread.
    """

    def load(self) -> None:
        """Load the weights, or take them back from the host; harmless when they are there.

        Raises WeightsError when they cannot be read.
        """
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

    def prepare_weights(self, weights: Weights) -> None:
        """Read and check other weights, or only check them while none are loaded.

        Raises WeightsError when they cannot take the place of those in use, which stay then.
        """
        ...

    def commit_weights(self, weights: Weights) -> None:
        """Use the weights that were prepared; those that were not are read now, or by `load`."""
        ...

    def cancel_weights(self) -> None:
        """Forget what was prepared."""
        ...

    def execute(self, step: RunStep) -> StepDone:
        """Run one step.

        Raises OutOfMemory where that is all that was wrong, DeviceLost where the process has to end
        for the device to work again, and anything else where a new runner may do better.
        """
        ...

    def start_over(self) -> None:
        """Forget every row after OutOfMemory, and give back what only steps have needed."""
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
    """Runs steps one at a time. An error in a step is the end of this life and of all rows.

    But for want of memory: then all rows are gone, and the scheduler hears why and tries less. A
    step that does not end in `step_timeout_s` ends this life, too, and its thread is left behind.
    """

    # Every row may be dropped, one by one, while a step runs; the scheduler must not have to wait
    # for its end then, since the end waits for room in the scheduler's mailbox.
    capacity = 128 * 1024

    def __init__(
        self,
        make_runner: Callable[[], Runner],
        *,
        scheduler: ActorRef[StepDone | DeviceReady],
        allocator: ActorRef[DeviceReady],
        step_timeout_s: float = math.inf,
    ) -> None:
        self._make_runner = make_runner
        self._scheduler = scheduler
        self._allocator = allocator
        self._step_timeout_s = step_timeout_s
        self._thread = DeviceThread(DEVICE_THREAD)
        self._life = 0
        self._step_since = math.inf  # when the step under way began
        self._num_out_of_memory = 0
        self._runner: Runner
        self._details: dict[str, int | float | str] = {}
        self._has_prepared = False

    async def on_start(self) -> None:
        """Load the model and say what fits; while suspended, take no more than that leaves."""
        self._thread.start()
        self._runner = await self._thread.run(self._make_runner)
        weights, levels = self.cell.weights, self.cell.suspended
        if weights is not None:
            await self._thread.run(lambda: self._runner.commit_weights(weights))
        if levels is None:
            await self._take_memory()
        elif levels.weights is WeightsLevel.KEEP:
            await self._thread.run(self._runner.load)
        await self._describe()
        await self._say_ready()

    async def on_stop(self) -> None:
        """End the thread once its job is done."""
        await self._thread.aclose()

    async def receive(self, message: ExecutorInbox) -> None:
        """Handle one message."""
        match message:
            case RunStep() if message.life != self._life:
                # Planned for a device that is gone, with its rows and blocks: the scheduler will
                # read of this one, and plan anew.
                self.log.info("stale step ignored", step=message.step)
            case RunStep():
                await self._step(message)
            case DropRows(rows=rows):
                await self._in_time(lambda: self._runner.drop(rows))

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Free what the levels name; acknowledged when the system has it back."""
        freed = 0
        for free in self._ways_to_free(verb):
            freed += await self._thread.run(free)
        await self._describe()
        return self.ack(verb, bytes_freed=freed)

    async def on_resume(self, verb: Resume) -> ControlReply | None:
        """Take back whatever is missing; refused when the weights cannot be read."""
        try:
            await self._take_memory()
        except WeightsError as error:
            return self._refuse(verb, error)
        await self._describe()
        return self.ack(verb)

    async def on_unpause(self, verb: Unpause) -> ControlReply | None:
        """Forget weights that were prepared for an update of which no more was heard."""
        await self._cancel()
        return self.ack(verb)

    async def on_update_weights(self, verb: UpdateWeights) -> ControlReply | None:
        """Read other weights, use them, or forget them; refused when they cannot be used."""
        try:
            await self._update(verb)
        except WeightsError as error:
            return self._refuse(verb, error)
        await self._describe()
        return self.ack(verb)

    def details(self) -> dict[str, int | float | str]:
        """Return the runner's description as of the last change, and what went wrong since."""
        details = dict(self._details)
        if self._step_since < math.inf:
            details["step_s"] = round(trio.current_time() - self._step_since, 3)
        if self._num_out_of_memory:
            details["out_of_memory"] = self._num_out_of_memory
        if left_behind := num_left_behind():
            details["threads_left_behind"] = left_behind
        return details

    async def _step(self, step: RunStep) -> None:
        self._step_since = trio.current_time()
        outcome = await self._execute(step)
        self._step_since = math.inf
        if isinstance(outcome, StepDone):
            await self._scheduler.tell(outcome)
            return
        self._num_out_of_memory += 1
        self.log.warning("out of memory", step=step.step, reason=outcome)
        await self._in_time(self._runner.start_over)
        await self._say_ready(out_of_memory=True)

    async def _execute(self, step: RunStep) -> StepDone | str:
        """Run a step; returns why the device had not the memory for it, where it had not.

        The error itself is let go of, since the tensors of the step hang on it.
        """
        try:
            return await self._in_time(lambda: self._runner.execute(step))
        except OutOfMemory as error:
            return error.message

    async def _in_time(self, job: Callable[[], T]) -> T:
        """Run a job on the device's thread. Raises StepStuck when it does not end in its time."""
        with trio.move_on_after(self._step_timeout_s):
            return await self._thread.run(job)
        stack = self._thread.leave_behind()
        self.log.error("step stuck", left_behind=num_left_behind(), stack=stack)
        seconds = self._step_timeout_s
        raise StepStuck(f"a step has not ended in {seconds:g} s", ill_s=seconds)

    async def _say_ready(self, *, out_of_memory: bool = False) -> None:
        """Tell of a device without rows, in a life that no step was planned for yet."""
        self._life = self.cell.system.next_message_id()
        fits = await self._thread.run(self._runner.room)
        ready = msgspec.structs.replace(fits, life=self._life, out_of_memory=out_of_memory)
        # The allocator first: the scheduler asks it as soon as it knows.
        await self._allocator.tell(ready)
        await self._scheduler.tell(ready)

    async def _update(self, verb: UpdateWeights) -> None:
        match verb.phase:
            case UpdatePhase.PREPARE:
                self._has_prepared = True
                await self._thread.run(lambda: self._runner.prepare_weights(verb.weights))
            case UpdatePhase.COMMIT:
                await self._thread.run(lambda: self._runner.commit_weights(verb.weights))
                self._has_prepared = False
            case UpdatePhase.CANCEL:
                await self._cancel()

    async def _cancel(self) -> None:
        if self._has_prepared:
            await self._thread.run(self._runner.cancel_weights)
            self._has_prepared = False

    def _refuse(self, verb: Verb, error: WeightsError) -> ControlReply:
        why = WeightsError(f"{self.name}: {error}")
        return ControlReply(
            verb=verb_name(verb),
            state=self.cell.state,
            refused=str(why),
            failure=Failure.of(why),
        )

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
