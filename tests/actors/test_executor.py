import math
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from callboard.actors.actor import ActorExited, Cell
from callboard.actors.device_thread import num_left_behind
from callboard.actors.executor import Executor
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.testing import ScriptedRunner
from callboard.messages.base import Message, pack_ids, unpack_ids
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Pause,
    Resume,
    State,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Weights,
    WeightsLevel,
)
from callboard.messages.errors import ActorFailed, OutOfMemory, WeightsError
from callboard.messages.steps import Admit, DeviceReady, DropRows, RowSampling, RunStep, StepDone


class Runner(ScriptedRunner):
    """Counts what is asked of it, and breaks where it is told to."""

    def __init__(self, breaks_in: str = "") -> None:
        super().__init__()
        self.calls: list[str] = []
        self.breaks_in = breaks_in

    def load(self) -> None:
        self._called("load")
        super().load()

    def allocate(self) -> None:
        self._called("allocate")
        super().allocate()

    def room(self) -> DeviceReady:
        self._called("room")
        return super().room()

    def execute(self, step: RunStep) -> StepDone:
        self._called("execute")
        return super().execute(step)

    def drop(self, rows: tuple[int, ...]) -> None:
        self._called("drop")
        super().drop(rows)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks_in:
            raise RuntimeError(f"broken in {name}")


class Lab:
    """An executor's cell, the mailboxes of those it speaks to, and the runners it has made."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.cell: Cell = system.cell("executor")
        self.ref: LocalRef[Message] = LocalRef(self.cell)
        self.scheduler = system.cell("scheduler")
        self.allocator = system.cell("kv_allocator")
        self.watcher = system.cell("watcher")
        self.cell.watch(LocalRef(self.watcher))
        self.runners: list[Runner] = []
        self.make_runner: Callable[[], Runner] = Runner
        self.step_timeout_s = math.inf
        self._nursery = nursery

    @property
    def runner(self) -> Runner:
        return self.runners[-1]

    async def start(self) -> None:
        await self._nursery.start(self.cell.run, self._actor)

    async def exited(self) -> ActorExited:
        exited = await hear(self.watcher)
        assert isinstance(exited, ActorExited)
        return exited

    def _actor(self) -> Executor:
        return Executor(
            self._make_runner,
            scheduler=LocalRef(self.scheduler),
            allocator=LocalRef(self.allocator),
            step_timeout_s=self.step_timeout_s,
        )

    def _make_runner(self) -> Runner:
        runner = self.make_runner()
        self.runners.append(runner)
        return runner


@asynccontextmanager
async def lab() -> AsyncGenerator[Lab]:
    async with open_system() as system, trio.open_nursery() as nursery:
        the_lab = Lab(system, nursery)
        yield the_lab
        await the_lab.cell.stop()
        nursery.cancel_scope.cancel()


async def hear(cell: Cell) -> Any:
    """Return the next message in a mailbox."""
    with trio.fail_after(10):
        await cell.mailbox.wait()
    letter = cell.mailbox.take_nowait()
    assert letter is not None
    return letter.message


def admit(row: int = 1) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids((1, 2, 3)),
        num_tokens=3,
        blocks=(0,),
        sampling=RowSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=9,
            min_tokens=0,
            stop_token_ids=(),
        ),
    )


async def test_it_takes_the_memory_then_tells_the_allocator_then_the_scheduler_what_fits() -> None:
    async with lab() as one:
        told: list[str] = []

        async def note(cell: Cell) -> None:
            room = await hear(cell)
            assert isinstance(room, DeviceReady)
            assert room.num_blocks == 64
            told.append(cell.name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, one.allocator)
            nursery.start_soon(note, one.scheduler)
            await one.start()
        assert told == ["kv_allocator", "scheduler"]
        assert one.runner.calls == ["load", "allocate", "room"]
        assert one.cell.status().details == {
            "device": "script",
            "weights_version": 0,
            "loaded": 1,
            "allocated": 1,
        }


async def test_a_step_is_run_and_its_result_told_to_the_scheduler() -> None:
    async with lab() as one:
        await one.start()
        room = await hear(one.scheduler)
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=room.life))
        done = await hear(one.scheduler)
        assert isinstance(done, StepDone)
        assert (done.step, done.rows, unpack_ids(done.token_ids)) == (1, (1,), [4])


async def test_dropped_rows_are_forgotten_before_the_next_step() -> None:
    async with lab() as one:
        await one.start()
        life = (await hear(one.scheduler)).life
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=life))
        await one.ref.tell(DropRows(rows=(1, 77)))
        await one.ref.tell(RunStep(step=2, life=life))
        assert (await hear(one.scheduler)).rows == (1,)
        assert (await hear(one.scheduler)).rows == ()


async def test_an_error_in_a_step_ends_the_life_and_the_next_one_begins_anew() -> None:
    async with lab() as one:
        await one.start()
        first = await hear(one.scheduler)
        one.runner.breaks_in = "execute"
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=first.life))
        failure = (await one.exited()).failure
        assert failure is not None
        assert "broken in execute" in failure.message
        await one.start()
        second = await hear(one.scheduler)
        assert second.life != first.life
        assert len(one.runners) == 2
        await one.ref.tell(RunStep(step=2, admits=(admit(row=2),), life=second.life))
        assert (await hear(one.scheduler)).rows == (2,)


async def test_a_step_meant_for_an_earlier_life_is_not_run() -> None:
    async with lab() as one:
        await one.start()
        first = await hear(one.scheduler)
        one.runner.breaks_in = "drop"
        await one.ref.tell(DropRows(rows=(1,)))
        await one.ref.tell(RunStep(step=1, admits=(admit(row=1),), life=first.life))
        await one.exited()
        await one.start()  # and finds the step in its mailbox
        second = await hear(one.scheduler)
        await one.ref.tell(RunStep(step=2, admits=(admit(row=2),), life=second.life))
        done = await hear(one.scheduler)
        assert (done.step, done.rows) == (2, (2,))  # row 1 is not there to use another's blocks


@pytest.mark.parametrize("broken", ["load", "allocate", "room"])
async def test_a_device_that_does_not_start_says_why(broken: str) -> None:
    async with lab() as one:
        one.make_runner = lambda: Runner(breaks_in=broken)
        with pytest.raises(RuntimeError, match=f"broken in {broken}"):
            await one.start()
        assert one.cell.state is State.FAILED


SUSPENDED = [
    (KVLevel.DROP, WeightsLevel.KEEP, 2000, {"loaded": 1, "allocated": 0}),
    (KVLevel.DROP, WeightsLevel.DISCARD, 3000, {"loaded": 0, "allocated": 0}),
    (KVLevel.DROP, WeightsLevel.OFFLOAD, 3000, {"loaded": 0, "allocated": 0}),
    (KVLevel.OFFLOAD, WeightsLevel.KEEP, 2000, {"loaded": 1, "allocated": 0}),
    (KVLevel.OFFLOAD, WeightsLevel.OFFLOAD, 3000, {"loaded": 0, "allocated": 0}),
    (KVLevel.OFFLOAD, WeightsLevel.DISCARD, 3000, {"loaded": 0, "allocated": 0}),
    (KVLevel.KEEP, WeightsLevel.DISCARD, 1000, {"loaded": 0, "allocated": 1}),
    (KVLevel.KEEP, WeightsLevel.OFFLOAD, 1000, {"loaded": 0, "allocated": 1}),
    (KVLevel.KEEP, WeightsLevel.KEEP, 0, {"loaded": 1, "allocated": 1}),
]


@pytest.mark.parametrize(("kv", "weights", "freed", "left"), SUSPENDED)
async def test_suspending_frees_what_the_levels_name_and_resuming_takes_it_back(
    kv: KVLevel, weights: WeightsLevel, freed: int, left: dict[str, int]
) -> None:
    async with lab() as one:
        await one.start()
        await one.ref.ask(Pause())
        reply: ControlReply = await one.ref.ask(Suspend(kv=kv, weights=weights))
        assert (reply.state, reply.bytes_freed) == (State.SUSPENDED, freed)
        assert one.cell.status().details == {"device": "script", "weights_version": 0, **left}
        again: ControlReply = await one.ref.ask(Suspend(kv=kv, weights=weights))
        assert (again.done, again.bytes_freed) == (True, 0)
        resumed: ControlReply = await one.ref.ask(Resume())
        assert resumed.state is State.PAUSED
        assert one.cell.status().details == {
            "device": "script",
            "weights_version": 0,
            "loaded": 1,
            "allocated": 1,
        }


@pytest.mark.parametrize("kv", [KVLevel.KEEP, KVLevel.OFFLOAD])
async def test_rows_outlive_a_suspension_that_does_not_drop_the_cache(kv: KVLevel) -> None:
    async with lab() as one:
        await one.start()
        life = (await hear(one.scheduler)).life
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=life))
        await hear(one.scheduler)
        await one.ref.ask(Suspend(kv=kv, weights=WeightsLevel.DISCARD))
        await one.ref.ask(Resume())
        await one.ref.tell(RunStep(step=2, life=life))
        assert unpack_ids((await hear(one.scheduler)).token_ids) == [5]


@pytest.mark.parametrize(
    ("levels", "left"),
    [
        (Suspend(), {"loaded": 1, "allocated": 0}),
        (Suspend(weights=WeightsLevel.DISCARD), {"loaded": 0, "allocated": 0}),
        (Suspend(kv=KVLevel.OFFLOAD), {"loaded": 1, "allocated": 0}),
        (Suspend(kv=KVLevel.OFFLOAD, weights=WeightsLevel.OFFLOAD), {"loaded": 0, "allocated": 0}),
    ],
)
async def test_started_while_suspended_it_takes_no_memory_and_says_what_will_fit(
    levels: Suspend, left: dict[str, int]
) -> None:
    async with lab() as one:
        one.cell.suspended = levels
        await one.start()
        assert "allocate" not in one.runner.calls
        assert one.cell.status().details == {"device": "script", "weights_version": 0, **left}
        room = await hear(one.scheduler)
        assert room.num_blocks == 64
        await one.ref.ask(Resume())
        assert one.cell.status().details == {
            "device": "script",
            "weights_version": 0,
            "loaded": 1,
            "allocated": 1,
        }
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=room.life))
        assert (await hear(one.scheduler)).rows == (1,)


NEW = Weights(source="new", version=3)


def update(phase: UpdatePhase) -> UpdateWeights:
    return UpdateWeights(source="new", version=3, phase=phase)


async def test_new_weights_are_prepared_then_used_and_steps_say_so() -> None:
    async with lab() as one:
        await one.start()
        life = (await hear(one.scheduler)).life
        prepared: ControlReply = await one.ref.ask(update(UpdatePhase.PREPARE))
        assert one.runner.prepared == NEW
        committed: ControlReply = await one.ref.ask(update(UpdatePhase.COMMIT))
        assert (prepared.done, committed.done) == (True, True)
        assert one.cell.status().details["weights_version"] == 3
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=life))
        assert (await hear(one.scheduler)).weights_version == 3


@pytest.mark.parametrize("verb", [update(UpdatePhase.CANCEL), Unpause()])
async def test_what_was_prepared_is_forgotten_when_it_is_cancelled_or_work_goes_on(
    verb: UpdateWeights | Unpause,
) -> None:
    async with lab() as one:
        await one.start()
        await one.ref.ask(update(UpdatePhase.PREPARE))
        await one.ref.ask(verb)
        assert one.runner.prepared is None
        assert one.runner.weights.version == 0


@pytest.mark.parametrize("state", [State.PAUSED, State.SUSPENDED])
async def test_an_update_leaves_the_state_as_it_is(state: State) -> None:
    async with lab() as one:
        await one.start()
        await one.ref.ask(Pause())
        if state is State.SUSPENDED:
            await one.ref.ask(Suspend())
        for phase in UpdatePhase:
            reply: ControlReply = await one.ref.ask(update(phase))
            assert (reply.verb, reply.state) == ("update-weights", state)
        assert one.cell.state is state


class Picky(Runner):
    """Cannot read any weights but its own."""

    def prepare_weights(self, weights: Weights) -> None:
        raise WeightsError("new.safetensors: tensor 'a' is missing")

    def commit_weights(self, weights: Weights) -> None:
        self.prepare_weights(weights)


@pytest.mark.parametrize("phase", [UpdatePhase.PREPARE, UpdatePhase.COMMIT])
async def test_weights_that_cannot_be_used_are_refused_by_name_and_the_life_goes_on(
    phase: UpdatePhase,
) -> None:
    async with lab() as one:
        one.make_runner = Picky
        await one.start()
        reply: ControlReply = await one.ref.ask(update(phase))
        assert reply.refused == "executor: new.safetensors: tensor 'a' is missing"
        assert reply.failure is not None
        assert isinstance(reply.failure.error(), WeightsError)
        assert one.cell.lives == 1
        assert one.cell.status().details["weights_version"] == 0


async def test_a_life_that_begins_after_an_update_loads_the_new_weights() -> None:
    async with lab() as one:
        one.cell.weights = NEW
        await one.start()
        assert one.runner.weights == NEW
        assert one.runner.calls == ["load", "allocate", "room"]


async def test_weights_that_cannot_be_read_at_resume_are_a_refusal_and_can_be_tried_again() -> None:
    class Forgetful(Runner):
        def load(self) -> None:
            if self.breaks_in == "resume":
                raise WeightsError("old.safetensors: no such file")
            super().load()

    async with lab() as one:
        one.make_runner = Forgetful
        await one.start()
        await one.ref.ask(Suspend(weights=WeightsLevel.DISCARD))
        one.runner.breaks_in = "resume"
        reply: ControlReply = await one.ref.ask(Resume())
        assert reply.refused == "executor: old.safetensors: no such file"
        assert one.cell.state is State.SUSPENDED
        one.runner.breaks_in = ""
        assert (await one.ref.ask(Resume())).done


async def test_memory_that_cannot_be_freed_is_a_failure_and_no_acknowledgement() -> None:
    class Stuck(Runner):
        def free_kv(self) -> int:
            raise RuntimeError("will not go")

    async with lab() as one:
        one.make_runner = Stuck
        await one.start()
        with pytest.raises(ActorFailed, match="will not go"):
            await one.ref.ask(Suspend())


async def test_stopping_waits_for_the_step_in_hand_and_tells_its_result() -> None:
    entered, let_go = threading.Event(), threading.Event()

    class Slow(Runner):
        def execute(self, step: RunStep) -> StepDone:
            entered.set()
            assert let_go.wait(10)
            return super().execute(step)

    async with lab() as one:
        one.make_runner = Slow
        await one.start()
        life = (await hear(one.scheduler)).life
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=life))
        await trio.to_thread.run_sync(entered.wait, 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.cell.stop)
            await wait_all_tasks_blocked()
            assert one.cell.actor is not None
            let_go.set()
        assert isinstance(await hear(one.scheduler), StepDone)
        assert (await one.exited()).failure is None


async def test_a_step_without_the_memory_for_it_costs_the_rows_and_not_the_life() -> None:
    class Small(Runner):
        def execute(self, step: RunStep) -> StepDone:
            done = super().execute(step)
            if len(done.rows) > 1:
                raise OutOfMemory("too large")
            return done

    def both(first: int) -> tuple[Admit, ...]:
        second = msgspec.structs.replace(admit(first + 1), blocks=(1,))
        return (admit(first), second)

    async with lab() as one:
        one.make_runner = Small
        await one.start()
        await hear(one.allocator)
        life = (await hear(one.scheduler)).life
        await one.ref.tell(RunStep(step=1, admits=both(1), life=life))
        await one.ref.tell(RunStep(step=2, life=life))  # planned before that was known

        again = await hear(one.scheduler)
        assert again == await hear(one.allocator)
        assert isinstance(again, DeviceReady)
        assert again.out_of_memory
        assert again.life != life
        await one.ref.tell(RunStep(step=3, admits=(admit(3),), life=again.life))
        done = await hear(one.scheduler)

        assert (done.step, done.rows) == (3, (3,))
        assert one.cell.lives == 1
        assert one.cell.status().details["out_of_memory"] == 1


async def test_a_step_that_does_not_end_is_given_up_with_its_thread() -> None:
    let_go, entered = threading.Event(), threading.Event()

    class Stuck(Runner):
        def execute(self, step: RunStep) -> StepDone:
            entered.set()
            assert let_go.wait(10)
            return super().execute(step)

    async with lab() as one:
        one.make_runner, one.step_timeout_s = Stuck, 0.05
        await one.start()
        life = (await hear(one.scheduler)).life
        await one.ref.tell(RunStep(step=1, admits=(admit(),), life=life))
        await trio.to_thread.run_sync(entered.wait, 10)
        assert "step_s" in one.cell.status().details

        failure = (await one.exited()).failure
        assert failure is not None
        assert (failure.code, failure.ill_s) == ("StepStuck", 0.05)
        assert num_left_behind() == 1

        one.make_runner = Runner  # the next life has a thread of its own
        await one.start()
        life = (await hear(one.scheduler)).life
        assert one.cell.status().details["threads_left_behind"] == 1
        await one.ref.tell(RunStep(step=2, admits=(admit(2),), life=life))
        assert (await hear(one.scheduler)).rows == (2,)
        let_go.set()
        while num_left_behind():  # noqa: ASYNC110  # the end of a thread wakes nobody
            await trio.sleep(0.001)
