"""Whether what a caller asks of a row is possible: the checks, and what they raise.

Functions of the message and a few numbers; the context calls them before it changes anything.
"""

from collections.abc import Sequence

import msgspec

from callboard.gpu.memory import blocks_for
from callboard.messages.errors import CallboardError, SequenceOverflow, TokenOverflow
from callboard.messages.steps import Admit, Continue, RowId


class RowMismatch(CallboardError):
    """What the caller says of a row is not what the context knows of it; nothing was changed."""


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """Of what there is enough for one more row, and of what there is not."""

    rows: bool
    tokens: bool
    blocks: bool
    states: bool

    @property
    def fits(self) -> bool:
        """Whether the row would be taken in."""
        return self.rows and self.tokens and self.blocks and self.states


def check_sequence(admit: Admit, num_prompt: int, max_model_len: int) -> None:
    """Raise unless the row has tokens left to sample, or is to have none, and room for them."""
    sampling = admit.sampling
    num_new = sampling.max_tokens - sampling.first_position
    is_to_sample_none = sampling.max_tokens == sampling.first_position == 0
    if num_new < 1 and not is_to_sample_none:
        raise RowMismatch(
            f"row {admit.row} has no token to sample: its max_tokens is {sampling.max_tokens}, its"
            f" first_position {sampling.first_position}"
        )
    if num_prompt + num_new > max_model_len:
        raise SequenceOverflow(
            f"{num_prompt} + {num_new} tokens are wanted, and the context holds {max_model_len}",
            row=admit.row,
        )


def check_chunk(step: Admit | Continue, *, num_cached: int, num_prompt: int) -> None:
    """Raise unless the chunk has a token and ends within the prompt."""
    rest = num_prompt - num_cached
    if not 1 <= step.num_tokens <= rest:
        raise RowMismatch(
            f"row {step.row} has a chunk of {step.num_tokens} tokens, and must have 1 to {rest}:"
            f" {num_cached} of its prompt of {num_prompt} are cached"
        )


def check_dummy(admit: Admit, num_prompt: int, *, most: int) -> None:
    """Raise unless the row feeds all of its prompt, 1 to `most` tokens, and brings no block."""
    if not 1 <= num_prompt <= most or admit.num_tokens != num_prompt:
        raise RowMismatch(
            f"row {admit.row} is a dummy that feeds {admit.num_tokens} of {num_prompt} tokens, and"
            f" must feed all of 1 to {most}"
        )
    if admit.blocks or admit.cached_tokens:
        raise RowMismatch(f"row {admit.row} is a dummy, and brings blocks of its own")


def check_budget(
    num_more: int, num_tokens: int, max_tokens: int, *, row: RowId | None = None
) -> None:
    """Raise unless `num_more` tokens fit a step that has `num_tokens`."""
    if num_tokens + num_more > max_tokens:
        raise TokenOverflow(
            f"the step has {num_tokens} tokens and is to get {num_more} more, and may have"
            f" {max_tokens}",
            row=row,
            transient=num_more <= max_tokens,
        )


def check_chunk_blocks(step: Admit | Continue, *, num_cached: int, block_tokens: int) -> None:
    """Raise unless the chunk brings exactly the blocks it needs."""
    num_blocks = blocks_for(num_cached + step.num_tokens, block_tokens)
    num_here = blocks_for(num_cached, block_tokens)
    if isinstance(step, Admit):
        num_here = 0  # a new row brings the blocks that it shares, too
        if num_cached % block_tokens:
            raise RowMismatch(
                f"row {step.row} shares {num_cached} tokens, which are no whole blocks of"
                f" {block_tokens}"
            )
    num_missing = num_blocks - num_here
    if len(step.blocks) != num_missing:
        raise RowMismatch(
            f"row {step.row} got {len(step.blocks)} blocks for {step.num_tokens} tokens after"
            f" {num_cached}, and needs {num_missing} of {block_tokens} tokens"
        )


def check_block_ids(blocks: Sequence[int], dummy: int) -> None:
    """Raise unless each block is one that can be somebody's."""
    for block in blocks:
        if not 0 <= block < dummy:
            raise RowMismatch(f"block {block} is not one of 0 to {dummy - 1}")
