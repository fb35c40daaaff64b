"""The conversation about a step, between scheduler and executor.

A row is one admission of a request: an integer the scheduler never uses twice, so a result of a
row that was dropped meanwhile cannot be mistaken for anything else.
"""

import msgspec

from callboard.messages.base import Message, TokenIds
from callboard.messages.logprobs import PromptLogprobs, TopLogprobs

RowId = int


class RowSampling(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """How the tokens of a row are chosen and when it ends, with every default filled in.

    `first_position` is the output index of the row's first new token (above 0 after a
    checkpoint); `max_tokens` and `min_tokens` count from output index 0. A row of max_tokens 0
    samples none and is over with its prompt. For the other fields see `SamplingParams`; the bad
    words are among `bad_token_ids`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    first_position: int = 0
    logprobs: int = -1  # -1 none, 0 of the chosen token, n also of the n likeliest
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    processed_logprobs: bool = False
    prompt_logprobs: int = -1  # of the row's whole prompt: -1 none, n also of the n likeliest


class Admit(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A new row: its whole prompt, the first chunk's length in tokens, and the blocks for that.

    The first `cached_tokens` of the prompt, whole blocks of it, are in the KV cache already: the
    blocks that hold them come first, are shared and must not be written to, and the chunk begins
    behind them. The last `sampling.first_position` tokens of the prompt are output of an earlier
    row of the same request, and count as output for penalties and bad words.
    """

    row: RowId
    prompt: TokenIds
    num_tokens: int
    blocks: tuple[int, ...]
    sampling: RowSampling
    cached_tokens: int = 0


class Continue(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The next chunk of the row that is being prefilled, and the blocks it needs."""

    row: RowId
    num_tokens: int
    blocks: tuple[int, ...]


class Grant(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One more block for a decoding row that filled its last one; without it the row waits."""

    row: RowId
    block: int


class RunStep(Message, frozen=True):
    """Scheduler → executor: run one forward pass over every row that has room for its token.

    Answered by StepDone. Rows whose last block is full and that get no grant sit this step out.
    `life` is the DeviceReady's it was planned for; a device in another life ignores the step.

    It may be planned before the step ahead of it is done. Then grants and continues may be for
    rows that ended in that step: they are ignored.
    """

    step: int
    admits: tuple[Admit, ...] = ()
    continues: tuple[Continue, ...] = ()
    grants: tuple[Grant, ...] = ()
    life: int = 0


class DropRows(Message, frozen=True):
    """Scheduler → executor: forget these rows. Their blocks may be given away at once, since

    whatever uses them next arrives behind this message in the same mailbox.
    """

    rows: tuple[RowId, ...]


class RowFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row that could not be computed, e.g. because its logits were not numbers."""

    row: RowId
    message: str


class StepDone(Message, frozen=True):
    """Executor → scheduler: what step `step` produced.

    `rows` and `token_ids` go together (packed int32 ids, one a row that sampled); rows in
    `stopped` sampled a stop id, rows in `full` reached max_tokens, and both have left the context,
    as have those in `failed`; rows that sample no token at all are in `full` with the end of their
    prompt. `logprobs` is packed float32, one a row of `rows`, empty when no row wanted any.
    `prompt_logprobs` has what the step's chunks make known of the prompts that asked for it.
    """

    step: int
    rows: tuple[RowId, ...]
    token_ids: TokenIds
    stopped: tuple[RowId, ...] = ()
    full: tuple[RowId, ...] = ()
    failed: tuple[RowFailure, ...] = ()
    logprobs: bytes = b""
    top_logprobs: dict[RowId, TopLogprobs] = msgspec.field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0
    weights_version: int = 0
    prompt_logprobs: dict[RowId, PromptLogprobs] = msgspec.field(default_factory=dict)


class DeviceReady(Message, frozen=True):
    """Executor → scheduler and allocator: the device (re)started, knows no row, and has this room.

    `num_blocks` may be handed out; a request may hold `max_model_len` tokens, prompt and output.
    `life` tells one start from another. With `out_of_memory` it is the old device, which has lost
    its rows because it had not the memory for a step.
    """

    block_tokens: int
    num_blocks: int
    max_rows: int
    max_step_tokens: int
    max_model_len: int
    life: int = 0
    out_of_memory: bool = False
