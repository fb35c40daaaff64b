import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.metrics import Metrics
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.requests import FinishReason


def step(*, num_tokens: int = 10, num_sampled: int = 4, seconds: float = 0.25) -> StepStats:
    return StepStats(num_tokens=num_tokens, num_sampled=num_sampled, seconds=seconds)


def request(
    *,
    finish: FinishReason = FinishReason.STOP,
    first_token_s: float | None = 0.5,
    total_s: float = 2.0,
) -> RequestStats:
    return RequestStats(
        finish=finish,
        prompt_tokens=3,
        output_tokens=5,
        first_token_s=first_token_s,
        total_s=total_s,
    )


@asynccontextmanager
async def metrics() -> AsyncGenerator[tuple[Cell, LocalRef[StepStats | RequestStats]]]:
    async with open_system() as system, trio.open_nursery() as nursery:
        cell = system.cell("metrics")
        await nursery.start(cell.run, Metrics)
        yield cell, LocalRef(cell)
        nursery.cancel_scope.cancel()


async def test_steps_and_requests_are_added_up_over_all_replicas() -> None:
    async with metrics() as (cell, ref):
        await ref.tell(step())
        await ref.tell(step(num_tokens=5, num_sampled=1))
        await ref.tell(request(first_token_s=0.5, total_s=2.0))
        await ref.tell(request(finish=FinishReason.ABORT, first_token_s=0.25, total_s=1.0))
        await wait_all_tasks_blocked()
        assert cell.status().details == {
            "steps": 2,
            "tokens_computed": 15,
            "tokens_sampled": 5,
            "step_seconds": 0.5,
            "requests": 2,
            "requests_stop": 1,
            "requests_length": 0,
            "requests_abort": 1,
            "requests_deadline": 0,
            "requests_error": 0,
            "prompt_tokens": 6,
            "output_tokens": 10,
            "mean_time_to_first_token_s": 0.375,
            "mean_request_s": 1.5,
            "reports_refused": 0,
        }


async def test_a_request_without_a_first_token_does_not_count_in_the_mean_of_its_time() -> None:
    async with metrics() as (cell, ref):
        await ref.tell(request(first_token_s=0.5))
        await ref.tell(request(first_token_s=None))
        await wait_all_tasks_blocked()
        assert cell.status().details["requests"] == 2
        assert cell.status().details["mean_time_to_first_token_s"] == 0.5


async def test_a_report_with_a_number_that_cannot_be_is_counted_and_changes_no_sum() -> None:
    async with metrics() as (cell, ref):
        await ref.tell(step())
        await ref.tell(request())
        await wait_all_tasks_blocked()
        before = cell.status().details
        for wrong in (-1.0, math.nan, math.inf, -math.inf):
            await ref.tell(step(seconds=wrong))
            await ref.tell(request(first_token_s=wrong))
        await ref.tell(step(num_sampled=-1))
        await wait_all_tasks_blocked()
        assert cell.status().details == {**before, "reports_refused": 9}
        assert cell.lives == 1


async def test_before_anything_happened_all_is_zero() -> None:
    async with metrics() as (cell, _):
        assert set(cell.status().details.values()) == {0}


async def test_a_flood_of_reports_never_makes_the_sender_wait() -> None:
    async with metrics() as (cell, ref):
        flood = cell.mailbox.capacity + 500
        for _ in range(flood):
            ref.tell_nowait(step())  # raises nothing, though nobody reads meanwhile
        await wait_all_tasks_blocked()
        assert cell.status().details["steps"] == flood - 500
        assert cell.mailbox.statistics().shed == 500
