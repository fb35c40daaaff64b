"""Rows that compute nothing anybody wants: to capture a graph, to warm up, to keep others company.

Their tokens are zeros and their blocks the dummy.
"""

from collections.abc import Iterable, Sequence

from callboard.gpu.dimensions import BatchDimensions
from callboard.messages.base import pack_ids
from callboard.messages.steps import Admit, RowSampling

_FIRST_ROW = -2
"""Ids count down from here: no request has one below 0, and -1 is no row."""

_GREEDY = RowSampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    max_tokens=1,
    min_tokens=0,
    stop_token_ids=(),
)


def dummies_for(graph: BatchDimensions) -> tuple[list[Admit], list[Admit]]:
    """Return the decodes and the prefills that fill a graph, each with the row it is.

    The tokens that no decode takes are shared out evenly to the prefills, the first of them get
    one more where there is a rest. Raises ValueError where a prefill would be without a token.
    """
    rest = graph.tokens - graph.decodes
    if rest < graph.prefills:
        raise ValueError(f"{graph} has no token for each of its prefills")
    ids = range(_FIRST_ROW, _FIRST_ROW - graph.requests, -1)
    lengths = _shares(rest, graph.prefills)
    return (
        _admits(ids[: graph.decodes], [1] * graph.decodes),
        _admits(ids[graph.decodes :], lengths),
    )


def _shares(total: int, count: int) -> list[int]:
    return [total // count + (index < total % count) for index in range(count)]


def _admits(rows: Sequence[int], lengths: Iterable[int]) -> list[Admit]:
    return [
        Admit(
            row=row, prompt=pack_ids([0] * length), num_tokens=length, blocks=(), sampling=_GREEDY
        )
        for row, length in zip(rows, lengths, strict=True)
    ]
