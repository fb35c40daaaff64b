"""What a context holds at one moment, as numbers for logs, metrics and tests."""

import msgspec


class ContextStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A context at one moment: `free_blocks + held_blocks == usable_blocks`.

    Blocks that several rows share count once. Where the context has a pool of its own, what is
    held is what the pool says: others may hold blocks too.
    """

    rows: int
    paused_rows: int
    max_rows: int
    tokens: int  # of the coming step
    max_tokens: int
    usable_blocks: int
    free_blocks: int
    held_blocks: int
    active_blocks: int  # of rows that are not paused

    @property
    def active_rows(self) -> int:
        """Rows that are not paused."""
        return self.rows - self.paused_rows

    @property
    def held_fraction(self) -> float:
        """The share of the blocks that is held, 0 to 1."""
        return self.held_blocks / self.usable_blocks

    @property
    def active_fraction(self) -> float:
        """The share of the blocks that rows hold which are not paused, 0 to 1."""
        return self.active_blocks / self.usable_blocks
