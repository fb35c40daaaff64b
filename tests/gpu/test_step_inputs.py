"""A step's inputs, padded and not, from arrays written down by hand."""

import numpy as np
import pytest
import torch

from callboard.gpu.dimensions import BatchDimensions, BatchLimits, graph_list, pad
from callboard.gpu.padding import StepShape, shape_in, unpadded
from callboard.gpu.staging import Staging
from callboard.gpu.state_slots import RowSlots
from callboard.gpu.step_inputs import StepInputs, StepRows, build_inputs, input_bytes

CPU = torch.device("cpu")
BLOCK_TOKENS = 4
DUMMY = 9
MAX_BLOCKS = 5

# Two decodes after 5 and 7 tokens, a prompt of 3, and a chunk of 2 after 4: the last samples not.
QUERY_LENS = [1, 1, 3, 2]
KV_LENS = [6, 8, 3, 6]
TABLE = [[3, 1], [2, 4], [5, DUMMY], [6, 7]]
REAL = BatchDimensions(7, 2, 2)


def make_rows(num_rows: int = 4, *, state_slots: RowSlots | None = None) -> StepRows:
    table = [blocks + [DUMMY] * (MAX_BLOCKS - len(blocks)) for blocks in TABLE[:num_rows]]
    return StepRows(
        input_ids_T=np.arange(100, 100 + sum(QUERY_LENS[:num_rows])),
        query_lens_R=np.array(QUERY_LENS[:num_rows], dtype=np.int32),
        kv_lens_R=np.array(KV_LENS[:num_rows], dtype=np.int32),
        block_table_RB=np.array(table, dtype=np.int32),
        state_slots=state_slots,
        num_sampling=min(num_rows, 3),
    )


def build(rows: StepRows, shape: StepShape, staging: Staging | None = None) -> StepInputs:
    return build_inputs(
        rows, shape, block_tokens=BLOCK_TOKENS, dummy=DUMMY, staging=staging or Staging(CPU)
    )


def row_slots(*slots: int) -> RowSlots:
    return RowSlots(np.array(slots, dtype=np.int32), dummy=20)


def test_dimensions_count_leading_rows_of_one_token_as_decodes() -> None:
    assert make_rows().dimensions() == REAL
    assert make_rows(2).dimensions() == BatchDimensions(2, 0, 2)


def test_an_unpadded_step_is_as_its_rows_are() -> None:
    inputs = build(make_rows(), unpadded(REAL))
    metadata = inputs.metadata

    assert inputs.input_ids_T.tolist() == list(range(100, 107))
    assert metadata.positions.tolist() == [5, 7, 0, 1, 2, 4, 5]
    assert metadata.slot_mapping.tolist() == [5, 19, 20, 21, 22, 28, 29]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 5, 7]
    assert metadata.seqlens_k.tolist() == KV_LENS
    assert metadata.block_table.tolist() == TABLE
    assert inputs.last_token_indices_S.tolist() == [0, 1, 4]
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k, metadata.num_decodes) == (3, 8, 2)
    assert (inputs.num_tokens, inputs.shape.graph, inputs.states) == (7, None, None)
    assert not inputs.is_decode_only


def test_padding_writes_to_the_dummy_and_reads_nothing() -> None:
    graph = BatchDimensions(10, 3, 4)
    inputs = build(make_rows(), shape_in(graph, REAL))
    metadata = inputs.metadata

    assert inputs.input_ids_T.tolist() == [*range(100, 107), 0, 0, 0]
    assert metadata.positions.tolist()[7:] == [0, 0, 0]
    assert metadata.slot_mapping.tolist()[7:] == [DUMMY * BLOCK_TOKENS] * 3
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 5, 7, 7, 7, 7]
    assert metadata.seqlens_k.tolist() == [*KV_LENS, 0, 0, 0]
    assert metadata.cu_seqlens_k().tolist() == [0, 6, 14, 17, 23, 23, 23, 23]
    assert metadata.block_table[4:].tolist() == [[DUMMY] * MAX_BLOCKS] * 3
    assert inputs.shape == StepShape(real=REAL, padded=graph, graph=graph)
    assert inputs.num_tokens == 7


def test_padding_is_no_part_of_what_the_cpu_knows_and_of_who_samples() -> None:
    inputs = build(make_rows(), shape_in(BatchDimensions(10, 3, 4), REAL))

    assert inputs.metadata.num_rows == 4
    assert inputs.metadata.query_lens_host.tolist() == QUERY_LENS
    assert inputs.metadata.kv_lens_host.tolist() == KV_LENS
    assert inputs.last_token_indices_S.tolist() == [0, 1, 4]


def test_a_graph_is_given_the_longest_lengths_it_can_have() -> None:
    mixed = build(make_rows(), shape_in(BatchDimensions(10, 3, 4), REAL)).metadata
    decodes = make_rows(2)
    decoding = build(decodes, shape_in(BatchDimensions(4, 0, 4), decodes.dimensions())).metadata

    assert (mixed.max_seqlen_q, mixed.max_seqlen_k) == (10, MAX_BLOCKS * BLOCK_TOKENS)
    assert (decoding.max_seqlen_q, decoding.max_seqlen_k) == (1, MAX_BLOCKS * BLOCK_TOKENS)
    assert mixed.block_table.shape == (7, MAX_BLOCKS)


def test_a_graph_of_prompts_of_one_token_is_none_of_decodes() -> None:
    decodes = make_rows(2)

    metadata = build(decodes, shape_in(BatchDimensions(2, 2, 0), decodes.dimensions())).metadata

    assert (metadata.max_seqlen_q, metadata.num_decodes) == (2, 0)


def test_a_round_step_is_given_its_real_lengths() -> None:
    limits = BatchLimits(max_tokens=64, max_requests=8, max_model_len=20)
    inputs = build(make_rows(), StepShape(real=REAL, padded=pad(REAL, limits)))

    assert (inputs.metadata.max_seqlen_q, inputs.metadata.max_seqlen_k) == (3, 8)
    assert inputs.metadata.block_table.tolist() == TABLE
    assert len(inputs.input_ids_T) == 64


def test_decodes_beyond_those_of_a_graph_are_presented_as_prefills() -> None:
    metadata = build(make_rows(), shape_in(BatchDimensions(8, 3, 1), REAL)).metadata

    assert metadata.num_decodes == 1
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 5, 7]  # where all of them are all the same


def test_a_step_that_only_decodes_says_so_as_it_is_padded() -> None:
    rows = make_rows(2)
    real = rows.dimensions()

    assert build(rows, unpadded(real)).is_decode_only
    assert build(rows, shape_in(BatchDimensions(4, 0, 4), real)).is_decode_only
    assert not build(rows, shape_in(BatchDimensions(4, 2, 2), real)).is_decode_only


def test_one_line_a_sampling_row_is_taken_from_those_of_all_tokens() -> None:
    inputs = build(make_rows(), shape_in(BatchDimensions(10, 3, 4), REAL))
    logits_TV = torch.arange(10.0)[:, None] * torch.ones(3)

    assert inputs.last_tokens(logits_TV)[:, 0].tolist() == [0, 1, 4]


@pytest.mark.parametrize("num_lines", [7, 11])
def test_lines_that_are_not_those_of_the_padded_step_are_refused(num_lines: int) -> None:
    inputs = build(make_rows(), shape_in(BatchDimensions(10, 3, 4), REAL))

    with pytest.raises(ValueError, match=f"{num_lines} lines for a step of 10 tokens"):
        inputs.last_tokens(torch.zeros(num_lines, 3))


def test_steps_in_one_graph_come_to_one_address_whoever_samples() -> None:
    limits = BatchLimits(max_tokens=64, max_requests=8, max_model_len=20)
    staging = Staging(CPU, input_bytes(limits, MAX_BLOCKS))
    graph = BatchDimensions(16, 4, 4)

    def addresses(inputs: StepInputs) -> list[int]:
        metadata = inputs.metadata
        return [
            tensor.data_ptr()
            for tensor in (
                inputs.input_ids_T,
                metadata.positions,
                metadata.slot_mapping,
                metadata.cu_seqlens_q,
                metadata.seqlens_k,
                metadata.block_table,
            )
        ]

    first = build(make_rows(4), shape_in(graph, REAL), staging)
    before, ids_before = addresses(first), first.input_ids_T.tolist()
    rows = make_rows(1)
    second = build(rows, shape_in(graph, rows.dimensions()), staging)

    assert addresses(second) == before
    assert second.input_ids_T.tolist() != ids_before
    assert first.input_ids_T.tolist() == second.input_ids_T.tolist()  # what it held is gone


def test_the_largest_step_fits_the_staging_that_was_sized_for_it() -> None:
    limits = BatchLimits(max_tokens=64, max_requests=8, max_model_len=20)
    num_bytes = input_bytes(limits, MAX_BLOCKS)
    staging = Staging(CPU, num_bytes)
    before = staging.send([np.zeros(1)])[0].data_ptr()
    rows = StepRows(
        input_ids_T=np.zeros(64, dtype=np.int64),
        query_lens_R=np.full(8, 8, dtype=np.int32),
        kv_lens_R=np.full(8, 20, dtype=np.int32),
        block_table_RB=np.zeros((8, MAX_BLOCKS), dtype=np.int32),
        state_slots=row_slots(*range(8)),
        num_sampling=8,
    )

    build(rows, shape_in(graph_list(limits)[0], rows.dimensions()), staging)

    assert staging.send([np.zeros(1)])[0].data_ptr() == before
    assert num_bytes < 8192


# Recurrent states


def test_states_of_decodes_come_first_and_those_of_prefills_count_from_zero() -> None:
    states = build(make_rows(state_slots=row_slots(5, 2, 9, 4)), unpadded(REAL)).states

    assert states is not None
    assert states.decode_slots_D.tolist() == [5, 2]
    assert states.prefill_slots_P.tolist() == [9, 4]
    assert states.prefill_cu_seqlens.tolist() == [0, 3, 5]
    assert states.prefill_T.tolist() == [0, 0, 0, 1, 1]
    assert states.num_decodes == 2


def test_padded_states_are_the_dummys_and_have_no_tokens() -> None:
    rows = make_rows(state_slots=row_slots(5, 2, 9, 4))

    states = build(rows, shape_in(BatchDimensions(10, 3, 4), REAL)).states

    assert states is not None
    assert states.decode_slots_D.tolist() == [5, 2, 20, 20]
    assert states.prefill_slots_P.tolist() == [9, 4, 20]
    assert states.prefill_cu_seqlens.tolist() == [0, 3, 5, 5]
    assert states.prefill_T.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [(None, [5, 2]), (BatchDimensions(4, 0, 4), [5, 2, 20, 20])],
    ids=["exact", "padded"],
)
def test_a_step_that_only_decodes_has_no_states_of_prefills(
    graph: BatchDimensions | None, expected: list[int]
) -> None:
    rows = make_rows(2, state_slots=row_slots(5, 2))
    real = rows.dimensions()

    states = build(rows, unpadded(real) if graph is None else shape_in(graph, real)).states

    assert states is not None
    assert states.decode_slots_D.tolist() == expected
    assert states.prefill_slots_P.tolist() == []
    assert states.prefill_cu_seqlens.tolist() == [0]


def test_slots_are_32_bits_wide_as_kernels_read_them() -> None:
    states = build(make_rows(state_slots=row_slots(5, 2, 9, 4)), unpadded(REAL)).states

    assert states is not None
    parts = (
        states.decode_slots_D,
        states.prefill_slots_P,
        states.prefill_cu_seqlens,
        states.prefill_T,
    )
    assert {part.dtype for part in parts} == {torch.int32}
