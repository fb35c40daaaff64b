import numpy as np
import numpy.typing as npt
import pytest

from callboard.gpu.rows import NO_ROW, NO_SLOT, NO_TOKEN, ROW, RowTable
from callboard.messages.steps import RowSampling

NUM_PLACES = 6
DUMMY = 99


def make_sampling(*stop_token_ids: int) -> RowSampling:
    return RowSampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        max_tokens=10,
        min_tokens=2,
        stop_token_ids=stop_token_ids,
        first_position=4,
        logprobs=1,
    )


def make_table() -> RowTable:
    """A table in which every field of every place says which place it was written at."""
    table = RowTable(max_rows=NUM_PLACES, max_blocks=3, dummy=DUMMY)
    for place in range(NUM_PLACES):
        table.write(place, place, make_sampling(*[place] * (place + 1)))  # wider and wider
        table.append_blocks(place, (place, 10 + place))
        for field in set(ROW.names or ()) - {"num_stop_ids", "num_blocks"}:
            table[field][place] = place
    return table


def came_from(table: RowTable) -> list[int]:
    """Return for each place where its row was written, after a look at every part of it."""
    places: list[int] = table["id"].tolist()
    for now, before in enumerate(places):
        record = table.records[now]
        said = {field: record[field] for field in set(ROW.names or ())}
        assert said.pop("num_stop_ids") == before + 1
        assert said.pop("num_blocks") == 2
        assert set(said.values()) == {before}
        assert table.block_table[now].tolist() == [before, 10 + before, DUMMY]
        own = slice(now, now + 1)
        assert table.stop_ids_of(own).tolist() == [[before] * (before + 1)]
    return places


def indices(*places: int) -> npt.NDArray[np.int64]:
    return np.array(places, dtype=np.int64)


def test_rows_move_with_all_that_is_known_of_them() -> None:
    table = make_table()

    table.move(indices(1, 2), indices(4, 5))

    assert came_from(table) == [0, 4, 5, 3, 4, 5]


def test_rows_may_move_to_places_that_are_moved_from() -> None:
    table = make_table()

    table.move(indices(1, 2, 3), indices(2, 3, 1))

    assert came_from(table) == [0, 2, 3, 1, 4, 5]


def test_rows_are_exchanged_pairwise() -> None:
    table = make_table()

    table.swap(indices(0, 1), indices(5, 3))

    assert came_from(table) == [5, 3, 2, 1, 4, 0]


def test_an_order_is_taken_up_from_a_place_on() -> None:
    table = make_table()

    table.reorder(2, indices(4, 2, 5, 3))

    assert came_from(table) == [0, 1, 4, 2, 5, 3]


def test_a_new_row_has_its_sampling_and_neither_tokens_nor_blocks() -> None:
    table = RowTable(max_rows=2, max_blocks=3, dummy=DUMMY)

    table.write(1, 41, make_sampling(8, 9))

    record = table.records[1]
    assert (record["id"], record["seed"], record["position"], record["max_tokens"]) == (
        41,
        7,
        4,
        10,
    )
    assert record["top_p"] == pytest.approx(0.9)
    assert (record["query_length"], record["kv_length"], record["num_blocks"]) == (0, 0, 0)
    assert table.block_table[1].tolist() == [DUMMY] * 3
    assert table.stop_ids_of(slice(0, 2)).tolist() == [[NO_TOKEN] * 2, [8, 9]]


def test_what_is_cleared_is_as_it_was_at_first() -> None:
    table, empty = make_table(), RowTable(max_rows=NUM_PLACES, max_blocks=3, dummy=DUMMY)

    table.clear(1, NUM_PLACES)

    assert (table.records[1:] == empty.records[1:]).all()
    assert set(table["id"][1:].tolist()) == {NO_ROW}
    assert set(table["state_slot"][1:].tolist()) == {NO_SLOT}
    assert (table.block_table[1:] == DUMMY).all()
    assert table.stop_ids_of(slice(1, NUM_PLACES)).size == 0
    assert table["id"][0] == 0


def test_rows_are_found_by_their_ids_where_one_looks() -> None:
    table = make_table()
    table.swap(indices(1), indices(4))

    assert table.find([4, 1, 9, 0], 1, NUM_PLACES).tolist() == [1, 4, NO_ROW, NO_ROW]
    assert table.find([4], 2, 2).tolist() == [NO_ROW]


def test_blocks_of_rows_come_row_by_row_without_the_dummy() -> None:
    table = make_table()
    table.append_block_each(indices(3, 1), np.array([30, DUMMY], dtype=np.int32))

    assert table.blocks_of(indices(3, 1)) == [3, 13, 30, 1, 11]
    assert table["num_blocks"].tolist() == [2, 3, 2, 3, 2, 2]
