import gc
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from callboard.actors.device_thread import DeviceThread, num_left_behind


@asynccontextmanager
async def device_thread() -> AsyncGenerator[DeviceThread]:
    thread = DeviceThread("test device")
    thread.start()
    try:
        yield thread
    finally:
        await thread.aclose()


class Gate:
    """A job that runs until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.let_go.wait(10)
        return "done"

    async def wait_entered(self) -> None:
        await trio.to_thread.run_sync(self.entered.wait, 10)


async def test_a_job_returns_its_result() -> None:
    async with device_thread() as thread:
        assert await thread.run(lambda: 6 * 7) == 42


async def test_a_job_raises_what_it_raises_and_the_next_one_runs() -> None:
    async with device_thread() as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        assert await thread.run(lambda: "still here") == "still here"


async def test_all_jobs_run_on_one_thread_that_is_not_the_callers() -> None:
    async with device_thread() as thread:
        threads = {await thread.run(threading.current_thread) for _ in range(5)}
    assert len(threads) == 1
    (only,) = threads
    assert only is not threading.current_thread()
    assert only.name == "test device"
    assert only.daemon


async def test_jobs_run_in_the_order_in_which_they_were_given() -> None:
    ran: list[int] = []
    async with device_thread() as thread, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(thread.run, lambda number=number: ran.append(number))
            await trio.lowlevel.checkpoint()
    assert ran == list(range(20))


async def test_the_event_loop_goes_on_while_a_job_runs() -> None:
    gate = Gate()
    async with device_thread() as thread, trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, gate)
        await gate.wait_entered()
        for _ in range(10):
            await trio.lowlevel.checkpoint()
        gate.let_go.set()


async def test_a_cancelled_wait_leaves_the_job_to_its_end_and_drops_the_result() -> None:
    gate = Gate()
    async with device_thread() as thread:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run, gate)
            await gate.wait_entered()
            nursery.cancel_scope.cancel()
        gate.let_go.set()
        assert await thread.run(lambda: "next") == "next"


async def test_closing_waits_for_the_job_in_hand() -> None:
    gate, thread = Gate(), DeviceThread("test device")
    thread.start()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, gate)
        await gate.wait_entered()
        with trio.move_on_after(0) as scope:
            await thread.aclose()
        assert scope.cancelled_caught  # the job goes on
        gate.let_go.set()
    await thread.aclose()


async def test_a_job_that_hangs_does_not_hold_up_a_cancelled_close() -> None:
    gate, thread = Gate(), DeviceThread("test device")
    thread.start()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, gate)
        await gate.wait_entered()
        with trio.move_on_after(0):
            await thread.aclose()
        nursery.cancel_scope.cancel()
    gate.let_go.set()


async def test_nothing_of_a_job_lives_on_while_the_thread_waits() -> None:
    class Model:
        def itself(self) -> "Model":
            return self

    async with device_thread() as thread:
        model = Model()
        gone = weakref.ref(model)
        assert await thread.run(model.itself) is model
        await thread.run(lambda: None)  # the thread has let go of the job before this one
        del model
        gc.collect()
        assert gone() is None


def test_a_job_may_end_after_the_trio_run_did() -> None:
    gate = Gate()

    async def main() -> DeviceThread:
        thread = DeviceThread("test device")
        thread.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thread.run, gate)
            await gate.wait_entered()
            nursery.cancel_scope.cancel()
        return thread

    thread = trio.run(main)
    gate.let_go.set()
    trio.run(thread.aclose)  # an error in the thread would be a warning, and those are errors here


async def test_a_thread_that_hangs_is_left_behind_with_all_it_was_still_to_do() -> None:
    gate, thread, ran = Gate(), DeviceThread("test device"), threading.Event()
    thread.start()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(thread.run, gate)
        await gate.wait_entered()
        nursery.start_soon(thread.run, ran.set)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    stack = thread.leave_behind()
    await thread.aclose()  # waits for nothing

    assert "self.let_go.wait" in stack
    assert num_left_behind() == 1
    gate.let_go.set()
    with trio.fail_after(10):
        while num_left_behind():  # noqa: ASYNC110  # the end of a thread wakes nobody
            await trio.sleep(0.001)
    assert not ran.is_set()
