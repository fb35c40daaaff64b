"""What a step may be padded to: batch dimensions, the list of captured graphs, and matching.

A captured graph replays one shape, so a step runs in the smallest graph that has room for it and
is padded up to that graph's dimensions; without a graph it is padded to round numbers. Pure
functions of integers: every rank that is given the same numbers chooses the same graph.

The list is one grid of sizes for steps that only decode and one for steps that prefill as well.
Sizes halve by default: a lone request then runs in a graph of one row, and no step is padded to
much more than twice its size, with ten sizes and not fifty. Evenly spaced sizes are there for who
prefers less padding to fewer graphs. A graph for prefills has slots for 1, 2, 4, ... prefills, so
that most slots are left for decodes whatever a step admits; a list with one number of prefills
would send a step with one more of them to no graph, and pad a lone one to all of them.

Dimensions count the rows of a step, which elsewhere are called requests: T tokens, P prefills, D
decodes.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

import msgspec

from callboard.messages.errors import ActiveRequestOverflow, ConfigError

TOKEN_ROUNDER = 64
REQUEST_ROUNDER = 4

AUTOMATIC = -1
"""As a number of sizes: all that the spacing has."""

Spacing = Literal["exponential", "linear"]

_LINEAR_ROUNDER = 8  # evenly spaced sizes are multiples of it, as tiles of matrix kernels are
_HALVES_ROUNDER = 2  # all but the last half
_EVENLY_SPACED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What no step exceeds. Raises ConfigError where the limits contradict each other."""

    max_tokens: int  # of a step
    max_requests: int  # that run in a step
    max_model_len: int  # tokens of a sequence, prompt and output
    tp_size: int = 1  # tensor-parallel ranks, which share out the tokens of a step evenly

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_model_len", "tp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, and must be at least 1")
        for name in ("max_tokens", "max_requests"):
            if getattr(self, name) % self.tp_size:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, and must be a multiple of tp_size"
                    f" ({self.tp_size})"
                )
        if self.max_tokens < self.max_requests:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, and must be at least max_requests"
                f" ({self.max_requests}): every running request takes a token a step"
            )


class BatchDimensions(msgspec.Struct, frozen=True, order=True):
    """Tokens, prefills and decodes of a step, or the room a captured graph has for them.

    They are ordered by tokens, then prefills, then decodes: the least of several graphs is the one
    that wastes least.
    """

    tokens: int
    prefills: int
    decodes: int

    @property
    def requests(self) -> int:
        """Rows, whatever they do."""
        return self.prefills + self.decodes

    def fits(self, limits: BatchLimits) -> bool:
        """Tell whether a step of exactly these dimensions can exist within the limits.

        Each row has a token, a decode has no more than one, a prefill at most a whole sequence.
        """
        most = min(limits.max_tokens, self.prefills * limits.max_model_len + self.decodes)
        return (
            min(self.prefills, self.decodes) >= 0
            and self.requests <= limits.max_requests
            and self.requests <= self.tokens <= most
        )


# Padding without a graph


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Return the greatest multiple of `multiple` that is not above `value`."""
    return value // multiple * multiple


def round_up_tokens(num_tokens: int, tp_size: int = 1) -> int:
    """Return how many tokens a step of `num_tokens` is padded to.

    A multiple of the least multiple of `tp_size` that is not below TOKEN_ROUNDER.
    """
    return round_up(num_tokens, round_up(TOKEN_ROUNDER, tp_size))


def round_up_requests(num_requests: int, tp_size: int = 1) -> int:
    """Return how many rows a step of `num_requests` is padded to: see `round_up_tokens`."""
    return round_up(num_requests, round_up(REQUEST_ROUNDER, tp_size))


def pad(real: BatchDimensions, limits: BatchLimits) -> BatchDimensions:
    """Return the dimensions a step without a graph is padded to, none less than it has.

    A step that only decodes gets as many decodes as tokens; the rows a step that prefills is
    padded with count as prefills. Raises ActiveRequestOverflow for more rows than may run, and
    ValueError for a step that exceeds the limits in any other way.
    """
    if real.requests > limits.max_requests:
        raise ActiveRequestOverflow(
            f"{real.requests} rows would run, and {limits.max_requests} may", transient=False
        )
    if not real.fits(limits):
        raise ValueError(f"{real} is no step within {limits}")
    tokens = min(limits.max_tokens, round_up_tokens(real.tokens, limits.tp_size))
    if real.prefills == 0:
        tokens = min(limits.max_requests, tokens)
        return BatchDimensions(tokens, 0, tokens)
    requests = min(limits.max_requests, round_up_requests(real.requests, limits.tp_size))
    return BatchDimensions(tokens, requests - real.decodes, real.decodes)


# The list of graphs


def graph_sizes(
    max_size: int, *, num_sizes: int = AUTOMATIC, spacing: Spacing = "exponential", tp_size: int = 1
) -> list[int]:
    """Return the token counts to capture graphs for, the largest first.

    The largest is `max_size`, rounded down to a multiple of `tp_size` like all of them. Exponential
    sizes halve down to the smallest there is; when only `num_sizes` are wanted, the smallest takes
    the last place, since a lone request is a common step. Linear sizes are `max_size / num_sizes`
    apart, rounded up to a multiple of 8. `num_sizes` 0 means one, as 1 does. Raises ConfigError
    where no size is possible.
    """
    if num_sizes < AUTOMATIC:
        raise ConfigError(
            f"num_sizes is {num_sizes}, and must be at least 0, or {AUTOMATIC} for all sizes"
        )
    if tp_size < 1 or max_size < tp_size:
        raise ConfigError(
            f"a largest graph of {max_size} tokens cannot be shared by {tp_size} ranks: it must"
            " have at least one token each"
        )
    spaced = _halves if spacing == "exponential" else _even_steps
    return spaced(max_size, num_sizes, tp_size)


def _halves(max_size: int, num_sizes: int, tp_size: int) -> list[int]:
    multiple = round_up(_HALVES_ROUNDER, tp_size)
    sizes = [round_down(max_size, tp_size)]
    while half := round_down(sizes[-1] // 2, multiple):
        sizes.append(half)
    if sizes[-1] > tp_size:
        sizes.append(tp_size)
    wanted = len(sizes) if num_sizes == AUTOMATIC else max(1, num_sizes)
    kept = sizes[:wanted]
    if wanted > 1:
        kept[-1] = sizes[-1]
    return kept


def _even_steps(max_size: int, num_sizes: int, tp_size: int) -> list[int]:
    largest = round_down(max_size, tp_size)
    smaller: Iterable[int]
    if num_sizes == AUTOMATIC:
        smaller = (round_up(size, tp_size) for size in _EVENLY_SPACED)
    else:
        # At least 1: with more sizes wanted than there are tokens the quotient is 0.
        distance = max(1, max_size // max(1, num_sizes))
        step = round_up(round_up(distance, _LINEAR_ROUNDER), tp_size)
        smaller = range(step, largest, step)
    return sorted({largest, *(size for size in smaller if size < largest)}, reverse=True)


def graph_list(
    limits: BatchLimits,
    *,
    num_sizes: int | None = AUTOMATIC,
    spacing: Spacing = "exponential",
    max_prefills: int = 16,
    max_graph_tokens: int = 512,
) -> tuple[BatchDimensions, ...]:
    """Return the graphs to capture, in the order to capture them.

    The most prefill tokens come first, so that the most memory is asked for while it is there.

    Args:
        limits: what every graph stays within.
        num_sizes: how many sizes each of the two grids has: see `graph_sizes`; None: no graphs.
        spacing: how the sizes are spaced.
        max_prefills: most prefills of a graph; 0 leaves the graphs for decodes only.
        max_graph_tokens: tokens of the largest graph, where that is at least `max_requests` and at
            most `max_tokens`; the nearer of the two where it is not.
    """
    if num_sizes is None:
        return ()
    spaced = partial(graph_sizes, num_sizes=num_sizes, spacing=spacing, tp_size=limits.tp_size)
    mixed_sizes: list[int] = []
    if max_prefills > 0:
        largest = min(limits.max_tokens, max(limits.max_requests, max_graph_tokens))
        # One token is a decode: kernels tell the two by their query length.
        mixed_sizes = [size for size in spaced(largest) if size > 1]
    # A size that graphs for prefills have, those for decodes have too, as far as requests go: a
    # step of so many tokens finds one whatever it does.
    decode_sizes = {*spaced(limits.max_requests), *mixed_sizes}
    graphs = {BatchDimensions(size, 0, size) for size in decode_sizes} | {
        BatchDimensions(size, prefills, min(size, limits.max_requests) - prefills)
        for size in mixed_sizes
        for prefills in _prefill_counts(min(max_prefills, limits.max_requests))
    }
    return tuple(sorted((g for g in graphs if g.fits(limits)), key=_capture_order, reverse=True))


def _prefill_counts(most: int) -> list[int]:
    powers = [2**exponent for exponent in range(most.bit_length())]
    return [*(count for count in powers if count < most), most]


def _capture_order(graph: BatchDimensions) -> tuple[int, int]:
    return graph.tokens - graph.decodes, graph.decodes


# Matching


def match(
    real: BatchDimensions, graphs: Iterable[BatchDimensions], *, strict: bool = False
) -> BatchDimensions | None:
    """Return the least graph that a step can run in, or None when there is none.

    A step that only decodes takes a graph for decodes only. In one that prefills as well, decodes
    beyond the graph's own may take slots of prefills; where `strict`, they may not, which is what a
    model with recurrent states needs: its kernels treat the two differently.
    """
    return min((graph for graph in graphs if _has_room(graph, real, strict)), default=None)


def _has_room(graph: BatchDimensions, real: BatchDimensions, strict: bool) -> bool:
    if graph.tokens < real.tokens or graph.prefills < real.prefills:
        return False
    if real.prefills == 0 and graph.prefills > 0:
        return False
    if strict or real.prefills == 0:
        return graph.decodes >= real.decodes
    return graph.requests >= real.requests


def match_ranks(
    ranks: Sequence[BatchDimensions], graphs: Iterable[BatchDimensions]
) -> BatchDimensions | None:
    """Return the one graph that all expert-parallel ranks run in; None when all go without.

    Ranks exchange tokens within a captured step, so all must replay the same size: that of the
    rank with the most tokens. Where any rank prefills, none uses a graph.
    """
    if any(rank.prefills for rank in ranks):
        return None
    return match(max(ranks), graphs)
