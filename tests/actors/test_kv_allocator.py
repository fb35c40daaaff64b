from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.messages.base import Message
from callboard.messages.blocks import (
    BlockRequest,
    BlocksGranted,
    PrefixRequest,
    ReleaseBlocks,
    ReserveBlocks,
)
from callboard.messages.steps import DeviceReady, RowId


class Caller:
    """Speaks to an allocator as the scheduler does, and reads its answers."""

    def __init__(self, allocator: Cell, scheduler: Cell) -> None:
        self.cell = allocator
        self._ref: LocalRef[Message] = LocalRef(allocator)
        self._answers = scheduler.mailbox
        self._step = 0

    async def device(self, num_blocks: int) -> None:
        await self._ref.tell(
            DeviceReady(
                block_tokens=4,
                num_blocks=num_blocks,
                max_rows=8,
                max_step_tokens=64,
                max_model_len=100,
            )
        )

    async def ask(
        self, grow: dict[RowId, int] | None = None, admit: dict[RowId, int] | None = None
    ) -> BlocksGranted | None:
        """Ask for blocks by row; None when nothing is answered."""
        self._step += 1
        await self._ref.tell(
            ReserveBlocks(step=self._step, grow=_requests(grow), admit=_new_rows(admit))
        )
        await wait_all_tasks_blocked()
        letter = self._answers.take_nowait()
        if letter is None:
            return None
        assert isinstance(letter.message, BlocksGranted)
        assert letter.message.step == self._step
        return letter.message

    async def granted(
        self, grow: dict[RowId, int] | None = None, admit: dict[RowId, int] | None = None
    ) -> dict[RowId, int]:
        """Ask, and return how many blocks each row got."""
        answer = await self.ask(grow, admit)
        assert answer is not None
        return {row: len(blocks) for row, blocks in answer.blocks.items()}

    async def release(self, *rows: RowId) -> None:
        await self._ref.tell(ReleaseBlocks(rows=rows))
        await wait_all_tasks_blocked()

    @property
    def free(self) -> int:
        return int(self.cell.status().details["blocks_free"])


def _new_rows(counts: dict[RowId, int] | None) -> tuple[PrefixRequest, ...]:
    """New rows whose prompts fill so many blocks, none of them cached."""
    return tuple(
        PrefixRequest(row=row, prompt_tokens=4 * count, chunk_tokens=4 * count)
        for row, count in (counts or {}).items()
    )


def _requests(counts: dict[RowId, int] | None) -> tuple[BlockRequest, ...]:
    return tuple(BlockRequest(row=row, count=count) for row, count in (counts or {}).items())


@asynccontextmanager
async def allocator(num_blocks: int | None = 8) -> AsyncGenerator[Caller]:
    async with open_system() as system, trio.open_nursery() as nursery:
        scheduler, cell = system.cell("scheduler"), system.cell("kv_allocator")
        await nursery.start(cell.run, lambda: KVAllocator(LocalRef(scheduler)))
        caller = Caller(cell, scheduler)
        if num_blocks is not None:
            await caller.device(num_blocks)
        yield caller
        assert cell.actor is not None, "the allocator died"
        nursery.cancel_scope.cancel()


async def test_every_block_the_device_has_can_be_handed_out_once() -> None:
    async with allocator(num_blocks=8) as caller:
        answer = await caller.ask(admit={1: 3, 2: 5})
        assert answer is not None
        ids = [*answer.blocks[1], *answer.blocks[2]]
        assert sorted(ids) == list(range(8))
        assert answer.free == 0
        assert caller.cell.status().details == {"blocks_total": 8, "blocks_free": 0}


async def test_a_row_gets_all_it_asks_for_or_nothing() -> None:
    async with allocator(num_blocks=4) as caller:
        assert await caller.granted(admit={1: 5}) == {}
        assert caller.free == 4
        assert await caller.granted(admit={1: 4}) == {1: 4}


async def test_each_growing_row_that_fits_is_served() -> None:
    async with allocator(num_blocks=3) as caller:
        assert await caller.granted(grow={1: 2, 2: 2, 3: 1}) == {1: 2, 3: 1}


async def test_no_row_is_admitted_behind_one_that_does_not_fit() -> None:
    async with allocator(num_blocks=4) as caller:
        assert await caller.granted(admit={1: 2, 2: 3, 3: 1}) == {1: 2}


async def test_no_row_is_admitted_when_a_growing_one_got_nothing() -> None:
    async with allocator(num_blocks=2) as caller:
        assert await caller.granted(grow={1: 3}, admit={2: 1}) == {}


async def test_a_row_that_needs_no_block_is_granted_none() -> None:
    async with allocator(num_blocks=2) as caller:
        await caller.granted(admit={1: 2})
        assert await caller.granted(grow={1: 0}) == {1: 0}


async def test_released_rows_give_back_all_they_got_over_time() -> None:
    async with allocator(num_blocks=8) as caller:
        await caller.granted(admit={1: 2, 2: 1})
        await caller.granted(grow={1: 1})
        await caller.granted(grow={1: 1})
        await caller.release(1)
        assert caller.free == 7


async def test_releasing_rows_that_hold_nothing_changes_nothing() -> None:
    async with allocator(num_blocks=8) as caller:
        await caller.granted(admit={1: 2})
        await caller.release(7)
        await caller.release(1, 1)
        await caller.release(1)
        assert caller.free == 8


async def test_before_the_device_is_known_nothing_is_answered() -> None:
    async with allocator(num_blocks=None) as caller:
        assert await caller.ask(grow={1: 1}) is None
        await caller.release(1)
        assert caller.cell.status().details == {"blocks_total": 0, "blocks_free": 0}
        await caller.device(3)
        assert await caller.granted(grow={1: 1}) == {1: 1}


async def test_a_new_device_has_all_its_blocks_free() -> None:
    async with allocator(num_blocks=4) as caller:
        await caller.granted(admit={1: 4})
        await caller.device(6)
        await caller.release(1)  # of the device before
        assert await caller.granted(admit={2: 6}) == {2: 6}
