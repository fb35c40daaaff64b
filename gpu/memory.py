"""How many bytes blocks and recurrent states take, what a budget holds, and sizes as text.

Pure arithmetic: nothing is allocated or asked of a device here. A rank has one shared pool of
blocks; what paused rows may hold of it is a limit, and no part of its own. `plan_memory` puts the
pieces together.
"""

import math
from collections.abc import Sequence

import msgspec

from callboard.gpu.dimensions import REQUEST_ROUNDER, round_down, round_up
from callboard.messages.errors import ConfigError

GIB = 2**30


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    """Return how many KV heads each tensor-parallel rank caches.

    Where there are fewer heads than ranks, several ranks cache the same one. Raises ConfigError
    where they cannot be shared out evenly.
    """
    _check_positive(num_kv_heads=num_kv_heads, tp_size=tp_size)
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be shared out evenly to tp_size {tp_size}, which must"
            " divide their number or be a multiple of it"
        )
    return max(1, num_kv_heads // tp_size)


def block_bytes(
    *, num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Return the bytes of one KV block: keys and values of `block_tokens` tokens in all layers.

    `num_layers` are the attention layers and `num_kv_heads` the heads of this rank, `itemsize` is
    the bytes of one element. Raises ConfigError when any of them is below 1.
    """
    _check_positive(
        num_layers=num_layers,
        block_tokens=block_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=itemsize,
    )
    return 2 * num_layers * block_tokens * num_kv_heads * head_dim * itemsize


def latent_block_bytes(
    *, num_layers: int, block_tokens: int, kv_lora_rank: int, rope_head_dim: int, itemsize: int
) -> int:
    """Return the bytes of one KV block where each token has one latent vector (MLA).

    The vector stands for keys and values of all heads, so every tensor-parallel rank caches all of
    it. Raises ConfigError when any of the numbers is below 1.
    """
    _check_positive(
        num_layers=num_layers,
        block_tokens=block_tokens,
        kv_lora_rank=kv_lora_rank,
        rope_head_dim=rope_head_dim,
        itemsize=itemsize,
    )
    return num_layers * block_tokens * (kv_lora_rank + rope_head_dim) * itemsize


def recurrent_state_bytes(
    *,
    num_layers: int,
    conv_shape: Sequence[int],
    ssm_shape: Sequence[int],
    conv_itemsize: int,
    ssm_itemsize: int,
) -> int:
    """Return the bytes of one request's recurrent states in all layers that have them (Mamba).

    Shapes are those of one layer of this rank. Raises ConfigError when a number is below 1.
    """
    _check_positive(
        num_layers=num_layers,
        conv_itemsize=conv_itemsize,
        ssm_itemsize=ssm_itemsize,
        **{f"conv_shape[{axis}]": size for axis, size in enumerate(conv_shape)},
        **{f"ssm_shape[{axis}]": size for axis, size in enumerate(ssm_shape)},
    )
    a_layer = math.prod(conv_shape) * conv_itemsize + math.prod(ssm_shape) * ssm_itemsize
    return num_layers * a_layer


def gib_to_bytes(gib: float) -> int:
    """Return GiB as whole bytes; raises ConfigError for what is no size."""
    if not 0 <= gib < math.inf:
        raise ConfigError(f"{gib} GiB is no size: it must be a number, and at least 0")
    return int(gib * GIB)


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_tokens)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank allocates, and how many requests that is for."""

    num_blocks: int  # of the shared pool, the dummy included
    paused_limit: int  # blocks that paused rows may hold
    max_requests: int  # rows at once; as many recurrent states, where the model has them

    @property
    def usable(self) -> int:
        """Blocks that can be somebody's."""
        return self.num_blocks - 1


def plan_memory(
    *,
    budget_bytes: int,
    bytes_per_block: int,
    max_tokens: int,
    bytes_per_state: int = 0,
    state_ratio: float | None = None,
    max_requests: int | None = None,
    paused_bytes: int = 0,
    tp_size: int = 1,
) -> MemoryPlan:
    """Share out a budget to KV blocks and recurrent states; raises ConfigError where it is short.

    States get `state_ratio` of the budget, or what exactly `max_requests` of them take, or, where
    neither is given, one for each block: no request is without a block. Blocks get the rest.

    Args:
        budget_bytes: what blocks and states may take together.
        bytes_per_block: see `block_bytes` and `latent_block_bytes`.
        max_tokens: most tokens of a step. Each running request takes one of them.
        bytes_per_state: see `recurrent_state_bytes`; 0 for a model without.
        state_ratio: between 0 and 1, both excluded.
        max_requests: a multiple of `tp_size`; None: as many as there are blocks, or states of the
            `state_ratio`, or tokens of a step.
        paused_bytes: how much of the pool paused rows may hold.
        tp_size: tensor-parallel ranks.
    """
    _check_positive(bytes_per_block=bytes_per_block, max_tokens=max_tokens, tp_size=tp_size)
    if max_requests is not None:
        _check_max_requests(max_requests, max_tokens, tp_size)
    if state_ratio is not None:
        _check_state_ratio(state_ratio, bytes_per_state)
        state_bytes = int(budget_bytes * state_ratio)
        max_requests = _requests_by_states(
            state_bytes // bytes_per_state, max_requests, max_tokens, tp_size
        )
        num_blocks = (budget_bytes - state_bytes) // bytes_per_block
    elif max_requests is not None:
        num_blocks = (budget_bytes - max_requests * bytes_per_state) // bytes_per_block
    else:
        num_blocks = budget_bytes // (bytes_per_block + bytes_per_state)
    _check_pool(num_blocks, budget_bytes, bytes_per_block, bytes_per_state)
    return MemoryPlan(
        num_blocks=num_blocks,
        paused_limit=paused_limit(paused_bytes, bytes_per_block, num_blocks),
        max_requests=max_requests
        or default_max_requests(num_blocks, max_tokens=max_tokens, tp_size=tp_size),
    )


def paused_limit(paused_bytes: int, bytes_per_block: int, num_blocks: int) -> int:
    """Return how many blocks paused rows may hold of a pool of `num_blocks`, the dummy included.

    Raises ConfigError unless that leaves one at least to the rows that run.
    """
    limit = paused_bytes // bytes_per_block
    if not 0 <= limit < num_blocks - 1:
        raise ConfigError(
            f"paused rows may hold {format_bytes(paused_bytes)}, which is {limit} blocks, and must"
            f" be 0 to {num_blocks - 2} of the {num_blocks - 1} usable ones"
        )
    return limit


def default_max_requests(num_blocks: int, *, max_tokens: int, tp_size: int = 1) -> int:
    """Return how many requests a pool is for: each holds a block and takes a token of a step.

    Rounded down to what rows are padded to, where that leaves any; to a multiple of `tp_size`
    otherwise. Raises ConfigError where even that leaves none.
    """
    most = min(num_blocks - 1, max_tokens)
    rounded = round_down(most, round_up(REQUEST_ROUNDER, tp_size)) or round_down(most, tp_size)
    if rounded < 1:
        raise ConfigError(
            f"{num_blocks - 1} usable blocks and {max_tokens} tokens a step are for {most} requests"
            f" at once, and must be for at least tp_size ({tp_size})"
        )
    return rounded


def common_plan(stages: Sequence[MemoryPlan]) -> MemoryPlan:
    """Return what every pipeline stage has room for: the least of each number.

    Stages have different numbers of layers, and the block ids of one are those of all.
    """
    return MemoryPlan(
        num_blocks=min(stage.num_blocks for stage in stages),
        paused_limit=min(stage.paused_limit for stage in stages),
        max_requests=min(stage.max_requests for stage in stages),
    )


def format_bytes(num_bytes: int) -> str:
    """Return a size as text with three significant digits, in the unit that keeps it below 1000."""
    value = float(num_bytes)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{digits} {unit}"


def _requests_by_states(num_states: int, wanted: int | None, max_tokens: int, tp_size: int) -> int:
    if num_states < (wanted or tp_size):
        raise ConfigError(
            f"state_ratio leaves room for the recurrent states of {num_states} requests, and must"
            f" for at least {wanted or tp_size}"
        )
    return wanted or round_down(min(num_states, max_tokens), tp_size)


def _check_max_requests(max_requests: int, max_tokens: int, tp_size: int) -> None:
    if max_requests < 1 or max_requests % tp_size:
        raise ConfigError(
            f"max_requests is {max_requests}, and must be a positive multiple of tp_size"
            f" ({tp_size})"
        )
    if max_requests > max_tokens:
        raise ConfigError(
            f"max_requests is {max_requests}, and must be at most max_tokens ({max_tokens}): every"
            " running request takes a token a step"
        )


def _check_state_ratio(state_ratio: float, bytes_per_state: int) -> None:
    if bytes_per_state < 1:
        raise ConfigError(f"state_ratio is {state_ratio}, and the model has no recurrent states")
    if not 0 < state_ratio < 1:
        raise ConfigError(f"state_ratio is {state_ratio}, and must be between 0 and 1")


def _check_pool(
    num_blocks: int, budget_bytes: int, bytes_per_block: int, bytes_per_state: int
) -> None:
    if num_blocks >= 2:
        return
    states = f" and recurrent states of {format_bytes(bytes_per_state)}" if bytes_per_state else ""
    raise ConfigError(
        f"a budget of {format_bytes(budget_bytes)} has room for {max(0, num_blocks)} blocks of"
        f" {format_bytes(bytes_per_block)}{states}, and must for at least 2: one is the dummy"
    )


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}, and must be at least 1")
