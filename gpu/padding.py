"""What a step is padded to, and how its arrays are.

Padding must change nothing but the time a step takes: a token of padding is written to the dummy
block, and a row of padding has no token, no cached key, and only the dummy in its block table.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from callboard.gpu.dimensions import BatchDimensions, BatchLimits, match, pad

Scalar = TypeVar("Scalar", bound=np.generic)


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """The dimensions of a step: what is in it, and what it is padded to."""

    real: BatchDimensions
    padded: BatchDimensions
    graph: BatchDimensions | None = None  # the one it runs in, whose dimensions `padded` then has

    @property
    def num_decodes(self) -> int:
        """Decodes in places of decodes; a graph that has too few takes the last for prefills."""
        return min(self.real.decodes, self.padded.decodes)


class Padding:
    """Chooses the shape of each step: that of the least graph with room for it, or a round one.

    Args:
        graphs: those that were captured; empty where every step is to get a round shape.
        limits: what no step exceeds.
        strict: whether a decode may not take a prefill's place: see `match`.
    """

    def __init__(
        self, graphs: Sequence[BatchDimensions], limits: BatchLimits, *, strict: bool = False
    ) -> None:
        self._graphs = tuple(graphs)
        self._limits = limits
        self._strict = strict

    def shape_of(self, real: BatchDimensions) -> StepShape:
        """Return what a step of these dimensions is padded to."""
        graph = match(real, self._graphs, strict=self._strict)
        if graph is not None:
            return shape_in(graph, real)
        return StepShape(real=real, padded=pad(real, self._limits))


def unpadded(real: BatchDimensions) -> StepShape:
    """Return the shape of a step that stays as it is."""
    return StepShape(real=real, padded=real)


def shape_in(graph: BatchDimensions, real: BatchDimensions) -> StepShape:
    """Return the shape of a step that runs in a graph; raises ValueError where it has no room."""
    if real.tokens > graph.tokens or real.requests > graph.requests:
        raise ValueError(f"{real} does not fit the graph {graph}")
    return StepShape(real=real, padded=graph, graph=graph)


def extended(array: npt.NDArray[Scalar], length: int, value: Scalar | int) -> npt.NDArray[Scalar]:
    """Return the array with `value` behind it up to `length`; the array itself where it is so long.

    Raises ValueError where it is longer.
    """
    if len(array) == length:
        return array
    longer = np.empty((length, *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    longer[len(array) :] = value
    return longer
