from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from callboard.actors.actor import Cell
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.gpu.prefix import block_hashes
from callboard.messages.base import Message
from callboard.messages.blocks import (
    BlockRequest,
    BlocksGranted,
    CacheBlocks,
    Computed,
    PrefixRequest,
    ReleaseBlocks,
    ReserveBlocks,
)
from callboard.messages.control import (
    KVLevel,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    WeightsLevel,
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

    async def tell(self, message: Message) -> None:
        await self._ref.tell(message)
        await wait_all_tasks_blocked()

    async def ask_for(self, *requests: PrefixRequest, **options: Any) -> BlocksGranted:
        """Ask for the blocks of new rows."""
        self._step += 1
        await self.tell(ReserveBlocks(step=self._step, admit=requests, **options))
        letter = self._answers.take_nowait()
        assert letter is not None
        assert isinstance(letter.message, BlocksGranted)
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
        details = caller.cell.status().details
        assert (details["blocks_total"], details["blocks_free"]) == (8, 0)


async def test_a_row_gets_all_it_asks_for_or_nothing() -> None:
    async with allocator(num_blocks=4) as caller:
        assert await caller.granted(admit={1: 5}) == {}
        assert caller.free == 4
        assert await caller.granted(admit={1: 4}) == {1: 4}


async def test_each_growing_row_that_fits_is_served() -> None:
    async with allocator(num_blocks=3) as caller:
        assert await caller.granted(grow={1: 2, 2: 2, 3: 1}) == {1: 2, 3: 1}


async def test_a_row_that_does_not_fit_is_overtaken_by_one_that_does() -> None:
    async with allocator(num_blocks=4) as caller:
        assert await caller.granted(admit={1: 2, 2: 3, 3: 1}) == {1: 2, 3: 1}


async def test_a_row_that_keeps_its_place_holds_up_those_behind_it() -> None:
    async with allocator(num_blocks=4) as caller:
        admit = [
            PrefixRequest(row=1, prompt_tokens=8, chunk_tokens=8),
            PrefixRequest(row=2, prompt_tokens=12, chunk_tokens=12, may_be_overtaken=False),
            PrefixRequest(row=3, prompt_tokens=4, chunk_tokens=4),
        ]
        granted = await caller.ask_for(*admit)
        assert set(granted.blocks) == {1}


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


# Shared prefixes.


def hashes(tokens: range) -> tuple[bytes, ...]:
    return tuple(block_hashes(tokens, 4, salt=b"", weights_version=0))


async def fill(caller: Caller, row: RowId, tokens: range) -> tuple[int, ...]:
    """Admit a row of whole blocks, and say that a step has computed them; returns the blocks."""
    answer = await caller.ask_for(
        PrefixRequest(row=row, prompt_tokens=len(tokens), chunk_tokens=99)
    )
    computed = Computed(row=row, first=0, hashes=hashes(tokens), parent=b"")
    await caller.tell(CacheBlocks(computed=(computed,)))
    return answer.blocks[row]


async def test_a_prompt_that_begins_alike_shares_what_was_computed() -> None:
    async with allocator(num_blocks=8) as caller:
        first = await fill(caller, 1, range(12))

        answer = await caller.ask_for(
            PrefixRequest(row=2, prompt_tokens=14, chunk_tokens=14, hashes=hashes(range(12)))
        )

        assert answer.cached == {2: 3}
        assert answer.blocks[2][:3] == first
        assert len(answer.blocks[2]) == 4  # two tokens more than is cached
        assert caller.cell.status().details["blocks_free"] == 4


async def test_what_nobody_holds_any_more_is_shared_until_its_room_is_needed() -> None:
    async with allocator(num_blocks=4) as caller:
        first = await fill(caller, 1, range(8))
        await caller.release(1)
        assert caller.free == 4

        request = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        answer = await caller.ask_for(request)
        assert answer.blocks[2][:2] == first

        await caller.release(2)
        assert await caller.granted(admit={3: 4}) == {3: 4}
        await caller.release(3)
        request = PrefixRequest(row=4, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).cached == {}


async def test_what_was_not_computed_is_not_shared() -> None:
    async with allocator(num_blocks=8) as caller:
        await caller.ask_for(PrefixRequest(row=1, prompt_tokens=8, chunk_tokens=8))
        await caller.release(1)

        request = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).cached == {}


async def test_a_chunk_is_shorter_where_less_is_left_to_compute() -> None:
    async with allocator(num_blocks=8) as caller:
        await fill(caller, 1, range(8))

        request = PrefixRequest(row=2, prompt_tokens=10, chunk_tokens=6, hashes=hashes(range(8)))
        answer = await caller.ask_for(request)

        assert answer.cached == {2: 2}
        assert len(answer.blocks[2]) == 3


async def test_a_new_row_without_room_leaves_what_it_would_share_as_it_was() -> None:
    async with allocator(num_blocks=3) as caller:
        await fill(caller, 1, range(8))

        request = PrefixRequest(row=2, prompt_tokens=20, chunk_tokens=20, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).blocks == {}
        await caller.release(1)
        assert caller.free == 3


@pytest.mark.parametrize(
    ("verb", "cached"),
    [
        (Suspend(kv=KVLevel.DROP), {}),
        (Suspend(kv=KVLevel.KEEP, weights=WeightsLevel.DISCARD), {}),
        (Suspend(kv=KVLevel.OFFLOAD, weights=WeightsLevel.DISCARD), {}),
        (Suspend(kv=KVLevel.KEEP), {2: 2}),
        (Suspend(kv=KVLevel.OFFLOAD, weights=WeightsLevel.OFFLOAD), {2: 2}),
    ],
)
async def test_memory_or_weights_that_go_take_what_was_cached_along(
    verb: Suspend, cached: dict[RowId, int]
) -> None:
    """RESUME may find other weights, whose keys and values are not those that are kept."""
    async with allocator(num_blocks=8) as caller:
        await fill(caller, 1, range(8))
        await caller.release(1)
        await LocalRef[Message](caller.cell).ask(verb)

        request = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).cached == cached


async def test_what_continues_a_copy_does_not_keep_the_original_from_being_evicted() -> None:
    """Else a row might need more blocks than it holds, and one that fits could never run."""
    async with allocator(num_blocks=4) as caller:
        await fill(caller, 1, range(8))
        await caller.release(1)
        request = PrefixRequest(row=2, prompt_tokens=12, chunk_tokens=12)  # looks nothing up
        blocks = (await caller.ask_for(request)).blocks[2]
        await caller.tell(
            CacheBlocks(computed=(Computed(row=2, first=0, hashes=hashes(range(4)), parent=b""),))
        )
        await caller.tell(
            CacheBlocks(
                computed=(
                    Computed(
                        row=2, first=1, hashes=hashes(range(12))[1:], parent=hashes(range(4))[0]
                    ),
                )
            )
        )
        assert caller.free == 4 - len(blocks)
        assert await caller.granted({2: 1}) == {2: 1}


@pytest.mark.parametrize(
    ("phase", "cached"),
    [
        (UpdatePhase.PREPARE, {2: 2}),
        (UpdatePhase.CANCEL, {2: 2}),
        (UpdatePhase.COMMIT, {}),
    ],
)
async def test_what_is_cached_is_forgotten_when_new_weights_are_used(
    phase: UpdatePhase, cached: dict[RowId, int]
) -> None:
    async with allocator(num_blocks=8) as caller:
        await fill(caller, 1, range(8))
        await LocalRef[Message](caller.cell).ask(
            UpdateWeights(source="new", version=1, phase=phase)
        )

        request = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).cached == cached
        await caller.release(1, 2)
        assert caller.free == 8


async def test_a_row_that_is_gone_registers_nothing() -> None:
    async with allocator(num_blocks=8) as caller:
        await caller.tell(
            CacheBlocks(computed=(Computed(row=7, first=0, hashes=hashes(range(8)), parent=b""),))
        )
        request = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(8)))
        assert (await caller.ask_for(request)).cached == {}


async def test_a_row_waits_for_blocks_that_another_is_about_to_compute() -> None:
    async with allocator(num_blocks=8) as caller:
        first = PrefixRequest(row=1, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(9)))
        second = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(9)))
        granted = await caller.ask_for(first, second)
        assert (set(granted.blocks), granted.denied) == ({1}, ())
        granted = await caller.ask_for(second)
        assert (granted.blocks, granted.denied) == ({}, ())
        await caller.tell(
            CacheBlocks(computed=(Computed(row=1, first=0, hashes=hashes(range(9)), parent=b""),))
        )
        granted = await caller.ask_for(second)
        assert granted.cached == {2: 2}


async def test_nobody_waits_for_blocks_of_a_row_that_is_gone() -> None:
    async with allocator(num_blocks=8) as caller:
        first = PrefixRequest(row=1, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(9)))
        await caller.ask_for(first)
        await caller.release(1)
        second = PrefixRequest(row=2, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(9)))
        granted = await caller.ask_for(second)
        assert (set(granted.blocks), granted.denied) == ({2}, ())


async def test_a_row_waits_only_for_the_first_block_it_misses() -> None:
    async with allocator(num_blocks=12) as caller:
        first = PrefixRequest(row=1, prompt_tokens=9, chunk_tokens=9, hashes=hashes(range(9)))
        await caller.ask_for(first)
        await caller.tell(
            CacheBlocks(computed=(Computed(row=1, first=0, hashes=hashes(range(9)), parent=b""),))
        )
        granted = await caller.ask_for(
            PrefixRequest(row=2, prompt_tokens=13, chunk_tokens=13, hashes=hashes(range(13)))
        )
        assert granted.cached == {2: 2}


# The budget of a step.


def new_row(row: int, prompt: range, **options: Any) -> PrefixRequest:
    known = hashes(range(len(prompt) - 1))
    length = len(prompt)
    return PrefixRequest(row=row, prompt_tokens=length, chunk_tokens=64, hashes=known, **options)


async def test_what_is_cached_takes_nothing_of_the_budget() -> None:
    async with allocator(num_blocks=20) as caller:
        await fill(caller, 1, range(8))
        granted = await caller.ask_for(*(new_row(row, range(9)) for row in (2, 3, 4)), budget=3)
        assert granted.chunks == {2: 1, 3: 1, 4: 1}
        assert granted.cached == {2: 2, 3: 2, 4: 2}


async def test_one_prompt_a_step_is_split_and_those_behind_it_that_fit_are_not() -> None:
    async with allocator(num_blocks=20) as caller:
        long = PrefixRequest(row=1, prompt_tokens=30, chunk_tokens=10)
        other = PrefixRequest(row=2, prompt_tokens=11, chunk_tokens=10)
        short = PrefixRequest(row=3, prompt_tokens=4, chunk_tokens=10)
        granted = await caller.ask_for(long, other, short, budget=16)
        assert granted.chunks == {1: 10, 3: 4}
        assert granted.denied == ()
        assert len(granted.blocks[1]) == 3


async def test_no_prompt_is_split_where_another_one_is_already() -> None:
    async with allocator(num_blocks=20) as caller:
        long = PrefixRequest(row=1, prompt_tokens=30, chunk_tokens=10)
        short = PrefixRequest(row=2, prompt_tokens=4, chunk_tokens=10)
        granted = await caller.ask_for(long, short, may_split=False)
        assert granted.chunks == {2: 4}


async def test_nobody_is_served_behind_the_end_of_the_budget() -> None:
    async with allocator(num_blocks=20) as caller:
        rows = [PrefixRequest(row=row, prompt_tokens=4, chunk_tokens=64) for row in (1, 2, 3)]
        granted = await caller.ask_for(*rows, budget=6)
        assert granted.chunks == {1: 4, 2: 2}
        assert granted.denied == ()
