"""The conversation about KV blocks, between scheduler and allocator: one question a step."""

import msgspec

from callboard.messages.base import Message
from callboard.messages.steps import RowId


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """`count` more blocks for a row; all of them or none."""

    row: RowId
    count: int


class ReserveBlocks(Message, frozen=True):
    """Scheduler → allocator: blocks for step `step`, the most urgent row first.

    `grow` rows are served in order, each that fits; `admit` rows only while all before them fit,
    so that no request overtakes an older one. Answered by BlocksGranted.
    """

    step: int
    grow: tuple[BlockRequest, ...] = ()
    admit: tuple[BlockRequest, ...] = ()


class BlocksGranted(Message, frozen=True):
    """Allocator → scheduler: what it gave for step `step`; rows not in `blocks` got nothing."""

    step: int
    blocks: dict[RowId, tuple[int, ...]]
    free: int


class ReleaseBlocks(Message, frozen=True):
    """Scheduler → allocator: these rows are gone; unknown rows are ignored."""

    rows: tuple[RowId, ...]
