import pytest

from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list
from callboard.gpu.dummies import dummies_for


def lengths(graph: BatchDimensions) -> tuple[list[int], list[int]]:
    decodes, prefills = dummies_for(graph)
    return [admit.num_tokens for admit in decodes], [admit.num_tokens for admit in prefills]


def test_tokens_that_no_decode_takes_are_shared_out_to_prefills() -> None:
    assert lengths(BatchDimensions(16, 3, 5)) == ([1] * 5, [4, 4, 3])
    assert lengths(BatchDimensions(4, 0, 4)) == ([1] * 4, [])
    assert lengths(BatchDimensions(8, 8, 0)) == ([], [1] * 8)


def test_no_two_dummies_are_one_row_and_none_is_a_requests() -> None:
    decodes, prefills = dummies_for(BatchDimensions(16, 3, 5))

    rows = [admit.row for admit in decodes + prefills]
    assert len(set(rows)) == 8
    assert max(rows) < -1


def test_a_graph_with_more_prefills_than_tokens_for_them_is_refused() -> None:
    with pytest.raises(ValueError, match="no token for each of its prefills"):
        dummies_for(BatchDimensions(6, 3, 4))


def test_every_graph_of_a_list_is_filled() -> None:
    limits = BatchLimits(max_tokens=512, max_requests=16, max_model_len=128)

    for graph in graph_list(limits):
        decodes, prefills = lengths(graph)
        assert (len(decodes), len(prefills)) == (graph.decodes, graph.prefills)
        assert sum(decodes + prefills) == graph.tokens
