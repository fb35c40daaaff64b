"""What `check` finds wrong, and what it lets rows share."""

from collections.abc import Callable

import numpy as np
import pytest

from callboard.gpu.context import DynamicContext
from callboard.messages.base import pack_ids
from callboard.messages.steps import Admit, RowSampling


def make_context() -> DynamicContext:
    return DynamicContext(
        max_rows=4, max_tokens=64, max_model_len=100, block_tokens=4, num_blocks=20
    )


def add(
    context: DynamicContext, row: int, blocks: tuple[int, ...], *, length: int, cached: int = 0
) -> None:
    context.add_row(
        Admit(
            row=row,
            prompt=pack_ids(range(length)),
            num_tokens=length - cached,
            blocks=blocks,
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
            cached_tokens=cached,
        )
    )


def step(context: DynamicContext, num_rows: int) -> None:
    context.begin_step()
    context.finish_step(np.ones(num_rows, dtype=np.int64))


def test_rows_may_share_a_block_that_all_of_them_only_read() -> None:
    context = make_context()
    add(context, 1, (3, 4), length=6)
    step(context, 1)

    add(context, 2, (3, 5), length=7, cached=4)

    context.check()


def test_nobody_writes_to_a_block_that_another_row_has() -> None:
    context = make_context()
    add(context, 1, (3, 4), length=6)  # writes to both

    add(context, 2, (3, 5), length=7, cached=4)

    with pytest.raises(AssertionError, match="written to is in two rows"):
        context.check()


def test_no_row_shares_a_block_that_is_not_full() -> None:
    context = make_context()
    add(context, 1, (3, 4), length=6)
    step(context, 1)

    add(context, 2, (4, 5), length=7, cached=4)

    with pytest.raises(AssertionError, match="written to is in two rows"):
        context.check()


def test_a_shared_block_is_at_the_same_place_in_every_row() -> None:
    context = make_context()
    add(context, 1, (3, 4, 6), length=9)
    step(context, 1)

    add(context, 2, (4, 5), length=7, cached=4)

    with pytest.raises(AssertionError, match="two places"):
        context.check()


def corrupt_length(context: DynamicContext) -> None:
    context._rows["kv_length"][0] += 4


def corrupt_offset(context: DynamicContext) -> None:
    context._rows["last_offset"][0] = 3


def corrupt_id(context: DynamicContext) -> None:
    context._rows["id"][1] = 1


def corrupt_dead(context: DynamicContext) -> None:
    context._rows["id"][3] = 8


def corrupt_block(context: DynamicContext) -> None:
    context._rows.block_table[0, 0] = context.dummy


def corrupt_tail(context: DynamicContext) -> None:
    context._rows.block_table[0, 5] = 2


def corrupt_order(context: DynamicContext) -> None:
    context._prefill_ids.clear()


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (corrupt_length, "wrong block count"),
        (corrupt_offset, "wrong offset"),
        (corrupt_id, "a row is here twice"),
        (corrupt_dead, "a place is not empty"),
        (corrupt_block, "the dummy block among others"),
        (corrupt_tail, "an unused entry names a block"),
        (corrupt_order, "a prefill stands before a decode"),
    ],
)
def test_what_contradicts_the_picture_is_found(
    corrupt: Callable[[DynamicContext], None], reason: str
) -> None:
    context = make_context()
    add(context, 1, (3, 4), length=6)
    add(context, 2, (5, 6), length=7)
    context.check()

    corrupt(context)

    with pytest.raises(AssertionError, match=reason):
        context.check()
