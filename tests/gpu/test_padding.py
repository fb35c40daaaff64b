import numpy as np
import pytest

from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list
from callboard.gpu.padding import Padding, StepShape, extended, shape_in, unpadded

LIMITS = BatchLimits(max_tokens=512, max_requests=16, max_model_len=128)


def dims(tokens: int, prefills: int, decodes: int) -> BatchDimensions:
    return BatchDimensions(tokens, prefills, decodes)


def test_an_unpadded_step_has_its_own_dimensions() -> None:
    real = dims(20, 1, 3)

    assert unpadded(real) == StepShape(real=real, padded=real)


def test_a_step_runs_in_the_least_graph_with_room_for_it() -> None:
    padding = Padding(graph_list(LIMITS), LIMITS)

    shape = padding.shape_of(dims(5, 0, 5))

    assert shape.padded == shape.graph == dims(8, 0, 8)
    assert shape.real == dims(5, 0, 5)


def test_a_step_without_a_graph_gets_round_dimensions() -> None:
    padding = Padding((), LIMITS)

    assert padding.shape_of(dims(5, 0, 5)).padded == dims(16, 0, 16)
    assert padding.shape_of(dims(70, 2, 3)).padded == dims(128, 5, 3)
    assert padding.shape_of(dims(70, 2, 3)).graph is None


def test_a_graph_may_take_surplus_decodes_for_prefills_but_not_where_it_is_strict() -> None:
    graphs = [dims(32, 16, 16), dims(32, 2, 30)]
    real = dims(20, 1, 19)
    limits = BatchLimits(max_tokens=512, max_requests=64, max_model_len=128)

    loose = Padding([graphs[0]], limits).shape_of(real)
    strict = Padding(graphs, limits, strict=True).shape_of(real)

    assert (loose.graph, loose.num_decodes) == (graphs[0], 16)
    assert (strict.graph, strict.num_decodes) == (graphs[1], 19)


def test_a_step_without_a_place_for_every_row_is_refused_by_the_graph() -> None:
    for real in (dims(17, 0, 4), dims(10, 2, 3)):
        with pytest.raises(ValueError, match="does not fit the graph"):
            shape_in(dims(16, 0, 4), real)


def test_an_array_is_extended_by_a_value() -> None:
    array = np.array([3, 5], dtype=np.int32)

    assert extended(array, 4, 7).tolist() == [3, 5, 7, 7]
    assert extended(array, 4, 7).dtype == np.int32


def test_lines_are_extended_by_lines() -> None:
    assert extended(np.array([[1, 2]]), 3, 9).tolist() == [[1, 2], [9, 9], [9, 9]]


def test_an_array_that_is_long_enough_is_not_copied() -> None:
    array = np.arange(3)

    assert extended(array, 3, 0) is array


def test_an_array_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        extended(np.arange(3), 2, 0)
