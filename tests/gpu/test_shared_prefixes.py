"""A pool with a prefix cache and the rows of a context, together: what rows share and compute."""

import numpy as np
import pytest

from callboard.gpu.blocks import BlockPool
from callboard.gpu.context import DynamicContext
from callboard.gpu.memory import blocks_for
from callboard.gpu.prefix import BlockHash, block_hashes
from callboard.gpu.step_inputs import StepInputs
from callboard.messages.base import pack_ids
from callboard.messages.errors import OutOfBlocks
from callboard.messages.steps import Admit, Continue, RowSampling

GREEDY = RowSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    max_tokens=100,
    min_tokens=0,
    stop_token_ids=(),
)


class Sharer:
    """A context beside a pool, as an executor and an allocator have them."""

    def __init__(
        self, *, block_tokens: int = 4, num_blocks: int = 50, caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.context = DynamicContext(
            max_rows=16,
            max_tokens=256,
            max_model_len=200,
            block_tokens=block_tokens,
            num_blocks=num_blocks,
        )
        self.blocks: dict[int, list[int]] = {}
        self.num_computed = 0  # prompt tokens that were fed
        self._prompts: dict[int, list[int]] = {}
        self._caching = caching

    def admit(self, row: int, prompt: list[int], *, num_tokens: int | None = None) -> int:
        """Add a row; returns how many tokens of its prompt it shares."""
        size = self.context.block_tokens
        # The last token is always computed: the next one is sampled from its logits.
        hashes = self._hashes(prompt[:-1]) if self._caching else []
        cached = len(self.pool.match(hashes))
        end = len(prompt) if num_tokens is None else cached * size + num_tokens
        blocks = self.pool.acquire(hashes, blocks_for(end, size) - cached)
        self.context.add_row(
            Admit(
                row=row,
                prompt=pack_ids(prompt),
                num_tokens=end - cached * size,
                blocks=tuple(blocks),
                sampling=GREEDY,
                cached_tokens=cached * size,
            )
        )
        self.blocks[row], self._prompts[row] = blocks, prompt
        return cached * size

    def go_on(self, row: int, *, end: int) -> None:
        """Prefill a row up to `end` in the coming step."""
        size = self.context.block_tokens
        done = len(self.blocks[row]) * size
        blocks = self.pool.allocate(blocks_for(end, size) - len(self.blocks[row]))
        self.context.continue_row(Continue(row=row, num_tokens=end - done, blocks=tuple(blocks)))
        self.blocks[row] += blocks

    def step(self) -> StepInputs:
        """Run a step, and let others find the blocks of prompts that are computed now."""
        inputs = self.context.begin_step()
        assert inputs is not None
        self.num_computed += inputs.num_tokens - inputs.metadata.num_decodes
        sampled = np.ones(len(inputs.last_token_indices_S), dtype=np.int64)
        self.context.finish_step(sampled)
        for row, blocks in self.blocks.items():
            parents = [None, *(hashes := self._hashes(self._prompts[row]))]
            for block, block_hash, parent in zip(blocks, hashes, parents, strict=False):
                self.pool.register(block, block_hash, parent)
        return inputs

    def leave(self, row: int) -> None:
        self.context.drop([row])
        self.pool.release(self.blocks.pop(row))

    def run(self, row: int, prompt: list[int]) -> int:
        """Prefill a prompt and leave; returns how many tokens it shared."""
        shared = self.admit(row, prompt)
        self.step()
        self.leave(row)
        return shared

    def _hashes(self, tokens: list[int]) -> list[BlockHash]:
        size = self.context.block_tokens
        return block_hashes(tokens, size, salt=b"", weights_version=0)


@pytest.mark.parametrize(("caching", "num_computed"), [(True, 4 * 4 + 2 * 3), (False, 2 * 19)])
def test_an_equal_prompt_computes_only_what_lies_behind_its_full_blocks(
    caching: bool, num_computed: int
) -> None:
    sharer = Sharer(caching=caching)
    prompt = list(range(4 * 4 + 3))

    sharer.run(1, prompt)
    shared = sharer.run(2, prompt)

    assert shared == (16 if caching else 0)
    assert sharer.num_computed == num_computed
    statistics = sharer.pool.statistics()
    assert (statistics.hits, statistics.misses) == ((4, 4) if caching else (0, 0))


def test_rows_that_share_and_rows_that_do_not_run_in_one_step() -> None:
    sharer = Sharer(block_tokens=16)
    prefix = list(range(32))
    sharer.admit(1, [*prefix, 90])
    sharer.step()

    # The row that decodes, then in turn a prompt that is cached but for 3 tokens, and a fresh one.
    for row in (2, 4):
        sharer.admit(row, [*prefix, 91, 92, 90 + row])
        sharer.admit(row + 1, [80 + row] * 20)
    inputs = sharer.step()

    assert inputs.metadata.query_lens_host.tolist() == [1, 3, 20, 3, 20]
    assert inputs.metadata.kv_lens_host.tolist() == [34, 35, 20, 35, 20]
    assert inputs.last_token_indices_S.tolist() == [0, 3, 23, 26, 46]
    assert [sharer.pool.references(block) for block in sharer.blocks[1][:2]] == [3, 3]


def test_a_prompt_cached_up_to_a_block_end_writes_behind_it_and_never_before() -> None:
    sharer = Sharer(block_tokens=16)
    prefix = list(range(32))
    sharer.admit(1, prefix)
    sharer.step()

    sharer.admit(2, [*prefix, 90, 91, 92])
    inputs = sharer.step()

    shared = sharer.blocks[2][:2]
    assert shared == sharer.blocks[1][:2]
    assert len(sharer.blocks[2]) == 3
    table = inputs.metadata.block_table[list(inputs.metadata.query_lens_host).index(3)]
    assert table.tolist()[:3] == sharer.blocks[2]
    slots = inputs.metadata.slot_mapping[-3:].tolist()
    assert slots == [sharer.blocks[2][2] * 16 + offset for offset in (0, 1, 2)]


def test_a_later_chunk_does_not_write_into_what_the_first_one_shares() -> None:
    sharer = Sharer()
    prompt = list(range(20))
    sharer.run(1, prompt)

    assert sharer.admit(2, [*prompt[:8], *range(50, 62)], num_tokens=4) == 8
    sharer.step()
    sharer.go_on(2, end=20)
    inputs = sharer.step()

    assert inputs.metadata.kv_lens_host.tolist() == [20]
    written = {slot // 4 for slot in inputs.metadata.slot_mapping.tolist()}
    assert written == set(sharer.blocks[2][3:])
    sharer.pool.audit()


def test_what_a_new_row_shares_is_not_evicted_for_its_own_new_blocks() -> None:
    sharer = Sharer(num_blocks=6)
    sharer.run(1, list(range(17)))  # five blocks, of which four are cached
    old = sharer.pool.match(block_hashes(range(16), 4, salt=b"", weights_version=0))

    assert sharer.admit(2, [*range(8), *range(50, 61)]) == 8

    assert sharer.blocks[2][:2] == old[:2]
    assert sorted(sharer.blocks[2]) == list(range(5))
    with pytest.raises(OutOfBlocks):
        sharer.admit(3, [1])
    sharer.pool.audit()


def with_own_pool(num_blocks: int) -> tuple[DynamicContext, BlockPool]:
    pool = BlockPool(num_blocks)
    context = DynamicContext(
        max_rows=4,
        max_tokens=64,
        max_model_len=200,
        block_tokens=4,
        num_blocks=num_blocks,
        pool=pool,
    )
    return context, pool


def update(context: DynamicContext, num_rows: int) -> list[int]:
    """Finish a step in which so many rows sampled and all go on; returns who waits."""
    context.update_requests(np.ones(num_rows, dtype=np.bool_), np.arange(num_rows))
    return context.paused_ids


def cache(pool: BlockPool, tokens: range) -> list[int]:
    """Hold blocks and register them as those of the tokens."""
    hashes = block_hashes(tokens, 4, salt=b"", weights_version=0)
    blocks = pool.allocate(len(hashes))
    for block, block_hash, parent in zip(blocks, hashes, [None, *hashes], strict=False):
        pool.register(block, block_hash, parent)
    return blocks


def test_a_row_that_waits_resumes_with_a_cached_block_when_no_other_is_left() -> None:
    context, pool = with_own_pool(4)
    context.add_request(1, pack_ids([1, 2, 3, 4]), GREEDY)
    others = cache(pool, range(8))
    context.begin_step()
    assert update(context, 1) == [1]

    pool.release(others)
    assert update(context, 0) == []
    assert (pool.statistics().evictions, pool.free) == (1, 1)
    context.check()
    pool.audit()


def test_as_many_rows_resume_as_there_are_blocks_to_evict_the_longest_wait_first() -> None:
    context, pool = with_own_pool(6)
    others = cache(pool, range(4)) + pool.allocate(1)
    for row in (1, 2, 3):
        context.add_request(row, pack_ids([1, 2, 3, 4]), GREEDY)
    context.begin_step()
    assert update(context, 3) == [1, 2, 3]

    pool.release(others[:1])  # free, for what is cached can be evicted
    assert update(context, 0) == [2, 3]

    pool.release(others[1:])
    context.begin_step()
    assert update(context, 1) == [3]
    pool.audit()


def test_rows_that_all_leave_leave_the_prefix_cache_as_it_was() -> None:
    context, pool = with_own_pool(10)
    blocks = cache(pool, range(8))
    context.add_request(1, pack_ids(range(8)), GREEDY)

    context.drop([1])
    pool.release(blocks)

    hashes = block_hashes(range(8), 4, salt=b"", weights_version=0)
    assert (pool.free, pool.match(hashes)) == (9, blocks)
    pool.forget_all()
    assert pool.match(hashes) == []
