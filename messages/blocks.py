"""The conversation about KV blocks, between scheduler and allocator: one question a step."""

import msgspec

from callboard.messages.base import Message
from callboard.messages.steps import RowId


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """`count` more blocks for a row; all of them or none."""

    row: RowId
    count: int


class PrefixRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The blocks of a new row: those of its prompt that are cached, then those of its first chunk.

    `hashes` are of the prompt's full blocks, in order. The chunk is what is left of `prompt_tokens`
    behind the cached ones, but no longer than `chunk_tokens`, or than what is left of the step's
    budget. When a row that must not be overtaken does not fit, none behind it is served.
    """

    row: RowId
    prompt_tokens: int
    chunk_tokens: int
    hashes: tuple[bytes, ...] = ()
    may_be_overtaken: bool = True


class ReserveBlocks(Message, frozen=True):
    """Scheduler → allocator: blocks for step `step`, the most urgent row first.

    Rows are served in order, each that fits; `admit` rows only when all `grow` rows fit, and
    within `budget` tokens for all of their chunks. At most one of them gets a chunk that is not
    the rest of its prompt, and none where `may_split` is false. Answered by BlocksGranted.
    """

    step: int
    grow: tuple[BlockRequest, ...] = ()
    admit: tuple[PrefixRequest, ...] = ()
    budget: int = 2**31 - 1
    may_split: bool = True


class BlocksGranted(Message, frozen=True):
    """Allocator → scheduler: what it gave for step `step`; rows not in `blocks` got nothing.

    Of the blocks of a row in `cached`, the first so many hold the beginning of its prompt already.
    `chunks` has the length of each new row's chunk. For rows in `denied` there were not enough
    blocks; other new rows without any wait for the budget, or for one that is computing the
    beginning of their prompt.
    """

    step: int
    blocks: dict[RowId, tuple[int, ...]]
    cached: dict[RowId, int] = msgspec.field(default_factory=dict)
    chunks: dict[RowId, int] = msgspec.field(default_factory=dict)
    denied: tuple[RowId, ...] = ()


class Computed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Blocks of a row, from number `first` on, that a step has filled, by the hash of each.

    `parent` is the hash of the block before them, empty when they are the row's first.
    """

    row: RowId
    first: int
    hashes: tuple[bytes, ...]
    parent: bytes


class CacheBlocks(Message, frozen=True):
    """Scheduler → allocator: these blocks may be shared from now on; unknown rows are ignored."""

    computed: tuple[Computed, ...]


class ReleaseBlocks(Message, frozen=True):
    """Scheduler → allocator: these rows are gone; unknown rows are ignored."""

    rows: tuple[RowId, ...]
