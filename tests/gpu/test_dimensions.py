import pytest
from hypothesis import given, settings, strategies as st

from callboard.gpu.dimensions import (
    AUTOMATIC,
    BatchDimensions,
    BatchLimits,
    Spacing,
    graph_list,
    graph_sizes,
    match,
    match_ranks,
    pad,
    round_up_requests,
    round_up_tokens,
)
from callboard.messages.errors import ActiveRequestOverflow, ConfigError

Dimensions = tuple[int, int, int]

REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=100)

# A list to match against: 64 requests, four sizes, graphs for 16 prefills or for prefills only.
GRAPHS = [
    BatchDimensions(*dimensions)
    for dimensions in (
        (64, 64, 0),
        (48, 48, 0),
        (32, 32, 0),
        (64, 16, 48),
        (48, 16, 32),
        (32, 16, 16),
        (16, 16, 0),
        (64, 0, 64),
        (48, 0, 48),
        (32, 0, 32),
        (16, 0, 16),
    )
]


def limits_of(
    *,
    max_requests: int,
    max_tokens: int = 16384,
    max_model_len: int = 512,
    tp_size: int = 1,
) -> BatchLimits:
    return BatchLimits(
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_model_len=max_model_len,
        tp_size=tp_size,
    )


def as_tuples(graphs: tuple[BatchDimensions, ...]) -> list[Dimensions]:
    return [(graph.tokens, graph.prefills, graph.decodes) for graph in graphs]


@st.composite
def limits_st(draw: st.DrawFn) -> BatchLimits:
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    requests_a_rank = draw(st.integers(1, 60))
    more_tokens_a_rank = draw(st.integers(0, 300))
    return BatchLimits(
        max_tokens=(requests_a_rank + more_tokens_a_rank) * tp_size,
        max_requests=requests_a_rank * tp_size,
        max_model_len=draw(st.integers(1, 600)),
        tp_size=tp_size,
    )


@st.composite
def steps_st(draw: st.DrawFn) -> tuple[BatchLimits, BatchDimensions]:
    """A step that can exist, and its limits."""
    limits = draw(limits_st())
    prefills = draw(st.integers(0, limits.max_requests))
    decodes = draw(st.integers(0, limits.max_requests - prefills))
    most = min(limits.max_tokens, prefills * limits.max_model_len + decodes)
    return limits, BatchDimensions(draw(st.integers(prefills + decodes, most)), prefills, decodes)


@st.composite
def lists_st(draw: st.DrawFn) -> tuple[BatchLimits, tuple[BatchDimensions, ...]]:
    limits = draw(limits_st())
    graphs = graph_list(
        limits,
        num_sizes=draw(st.integers(AUTOMATIC, 40)),
        spacing=draw(st.sampled_from(["exponential", "linear"])),
        max_prefills=draw(st.integers(0, 40)),
        max_graph_tokens=draw(st.integers(0, 1024)),
    )
    return limits, graphs


# Rounding


@pytest.mark.parametrize(
    ("num_tokens", "tp_size", "expected"),
    [(0, 1, 0), (1, 1, 64), (64, 1, 64), (65, 1, 128), (1, 3, 66), (67, 3, 132), (1, 128, 128)],
)
def test_tokens_are_rounded_up_to_what_all_ranks_share(
    num_tokens: int, tp_size: int, expected: int
) -> None:
    assert round_up_tokens(num_tokens, tp_size) == expected


@pytest.mark.parametrize(
    ("num_requests", "tp_size", "expected"),
    [(0, 1, 0), (1, 1, 4), (4, 1, 4), (5, 1, 8), (1, 8, 8), (1, 3, 6)],
)
def test_requests_are_rounded_up_to_what_all_ranks_share(
    num_requests: int, tp_size: int, expected: int
) -> None:
    assert round_up_requests(num_requests, tp_size) == expected


# Limits and validity


@pytest.mark.parametrize(
    ("max_tokens", "max_requests", "max_model_len", "tp_size", "reason"),
    [
        (64, 0, 128, 1, "max_requests is 0, and must be at least 1"),
        (64, 8, 0, 1, "max_model_len is 0, and must be at least 1"),
        (64, 8, 128, 0, "tp_size is 0, and must be at least 1"),
        (64, 2, 128, 4, r"max_requests is 2, and must be a multiple of tp_size \(4\)"),
        (65, 8, 128, 4, r"max_tokens is 65, and must be a multiple of tp_size \(4\)"),
        (7, 8, 128, 1, r"max_tokens is 7, and must be at least max_requests \(8\)"),
    ],
)
def test_limits_that_contradict_each_other_are_refused_by_name(
    max_tokens: int, max_requests: int, max_model_len: int, tp_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        BatchLimits(
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_model_len=max_model_len,
            tp_size=tp_size,
        )


@pytest.mark.parametrize(
    ("dimensions", "fits"),
    [
        ((0, 0, 0), True),
        ((8, 0, 8), True),
        ((9, 0, 9), False),  # more requests than may run
        ((8, 4, 5), False),
        ((6, 3, 4), False),  # a row without a token
        ((9, 0, 8), False),  # a decode of two tokens
        ((8, -1, 8), False),
        ((8, 8, -1), False),
        ((21, 2, 1), True),  # two whole sequences and a decode
        ((22, 2, 1), False),
        ((40, 8, 0), True),
        ((41, 8, 0), False),  # more tokens than a step may have
    ],
)
def test_a_step_fits_where_each_row_can_have_its_tokens(dimensions: Dimensions, fits: bool) -> None:
    limits = limits_of(max_requests=8, max_tokens=40, max_model_len=10)

    assert BatchDimensions(*dimensions).fits(limits) is fits


# Padding without a graph


@pytest.mark.parametrize(
    ("real", "padded"),
    [
        ((0, 0, 0), (0, 0, 0)),
        ((1, 0, 1), (64, 0, 64)),
        ((65, 0, 65), (100, 0, 100)),  # never more decodes than requests may run
        ((1, 1, 0), (64, 4, 0)),
        ((20, 1, 19), (64, 1, 19)),
        ((70, 1, 18), (128, 2, 18)),
        ((200, 3, 96), (256, 4, 96)),
        ((290, 1, 99), (300, 1, 99)),  # never more tokens than a step may have
    ],
)
def test_a_step_without_a_graph_is_padded_to_round_numbers_within_the_limits(
    real: Dimensions, padded: Dimensions
) -> None:
    limits = limits_of(max_requests=100, max_tokens=300)

    assert pad(BatchDimensions(*real), limits) == BatchDimensions(*padded)


def test_the_tokens_of_a_step_limit_its_padding_too() -> None:
    limits = limits_of(max_requests=40, max_tokens=50)

    assert pad(BatchDimensions(5, 0, 5), limits) == BatchDimensions(40, 0, 40)
    assert pad(BatchDimensions(5, 1, 4), limits) == BatchDimensions(50, 4, 4)


def test_padding_is_shared_out_evenly_to_the_ranks() -> None:
    limits = limits_of(max_requests=300, max_tokens=1500, tp_size=3)

    assert pad(BatchDimensions(1, 0, 1), limits) == BatchDimensions(66, 0, 66)
    assert pad(BatchDimensions(70, 1, 4), limits) == BatchDimensions(132, 2, 4)


def test_a_step_that_cannot_exist_is_not_padded() -> None:
    with pytest.raises(ValueError, match="is no step within"):
        pad(BatchDimensions(9, 0, 8), limits_of(max_requests=8))


def test_a_step_of_more_rows_than_may_run_is_not_padded() -> None:
    with pytest.raises(ActiveRequestOverflow, match="9 rows would run, and 8 may") as caught:
        pad(BatchDimensions(9, 1, 8), limits_of(max_requests=8))
    assert not caught.value.transient


@REPEATABLE
@given(steps_st())
def test_padding_takes_nothing_away_and_stays_within_the_limits(
    step: tuple[BatchLimits, BatchDimensions],
) -> None:
    limits, real = step

    padded = pad(real, limits)

    assert padded.tokens >= real.tokens
    assert padded.prefills >= real.prefills
    assert padded.decodes >= real.decodes
    assert padded.tokens <= limits.max_tokens
    assert padded.requests <= min(padded.tokens, limits.max_requests)
    assert padded.tokens % limits.tp_size == 0
    assert (padded.prefills == 0) == (real.prefills == 0)


# Sizes


@pytest.mark.parametrize(
    ("tp_size", "num_sizes", "max_size", "expected"),
    [
        (1, 8, 128, [128, 64, 32, 16, 8, 4, 2, 1]),
        (1, 16, 80, [80, 40, 20, 10, 4, 2, 1]),
        (1, 4, 80, [80, 40, 20, 1]),
        (1, 2, 80, [80, 1]),
        (1, 1, 80, [80]),
        (1, 0, 80, [80]),
        (1, 8, 80, [80, 40, 20, 10, 4, 2, 1]),
        (2, AUTOMATIC, 512, [512, 256, 128, 64, 32, 16, 8, 4, 2]),
        (4, AUTOMATIC, 512, [512, 256, 128, 64, 32, 16, 8, 4]),
        (3, AUTOMATIC, 100, [99, 48, 24, 12, 6, 3]),
        (1, AUTOMATIC, 7, [7, 2, 1]),
        (1, AUTOMATIC, 2, [2, 1]),
        (1, AUTOMATIC, 1, [1]),
        (8, AUTOMATIC, 8, [8]),
    ],
)
def test_exponential_sizes_halve_down_to_the_smallest(
    tp_size: int, num_sizes: int, max_size: int, expected: list[int]
) -> None:
    assert graph_sizes(max_size, num_sizes=num_sizes, tp_size=tp_size) == expected


@pytest.mark.parametrize(
    ("tp_size", "num_sizes", "max_size", "expected"),
    [
        (1, 1, 1000, [1000]),
        # Not 1000, 752, 504, 256 as in an example one may meet elsewhere: sizes are multiples of
        # the step, and the largest stands beside them. It is not counted down from.
        (1, 4, 1000, [1000, 768, 512, 256]),
        (2, 4, 1000, [1000, 768, 512, 256]),
        (1, 16, 256, list(range(256, 0, -16))),
        (4, 16, 256, list(range(256, 0, -16))),
        (1, 2, 40, [40, 24]),
        (1, 4, 40, [40, 32, 16]),
        (1, 8, 40, [40, 32, 24, 16, 8]),
        (1, 16, 40, [40, 32, 24, 16, 8]),
        (1, 100, 40, [40, 32, 24, 16, 8]),  # more sizes than tokens
        (1, 0, 40, [40]),
        (3, 4, 100, [99, 66, 33]),
        (8, 4, 100, [96, 64, 32]),
        (1, 3, 7, [7]),
        (2, 3, 64, [64, 48, 24]),
        (1, 4, 64, [64, 48, 32, 16]),
        (1, 16, 512, list(range(512, 0, -32))),
        (1, AUTOMATIC, 12, [12, 8, 4, 2, 1]),
        (1, AUTOMATIC, 512, [*range(512, 255, -16), *range(248, 7, -8), 4, 2, 1]),
        (1, AUTOMATIC, 1024, [1024, *range(512, 255, -16), *range(248, 7, -8), 4, 2, 1]),
        (4, AUTOMATIC, 20, [20, 16, 8, 4]),
    ],
)
def test_linear_sizes_are_evenly_spaced(
    tp_size: int, num_sizes: int, max_size: int, expected: list[int]
) -> None:
    sizes = graph_sizes(max_size, num_sizes=num_sizes, spacing="linear", tp_size=tp_size)

    assert sizes == expected


@pytest.mark.parametrize(
    ("max_size", "num_sizes", "tp_size", "reason"),
    [
        (0, 4, 1, "a largest graph of 0 tokens cannot be shared by 1 ranks"),
        (3, 4, 4, "a largest graph of 3 tokens cannot be shared by 4 ranks"),
        (64, 4, 0, "cannot be shared by 0 ranks"),
        (64, -2, 1, "num_sizes is -2, and must be at least 0, or -1 for all sizes"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    max_size: int, num_sizes: int, tp_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        graph_sizes(max_size, num_sizes=num_sizes, tp_size=tp_size)


@REPEATABLE
@given(
    tokens_beside=st.integers(0, 3000),
    num_sizes=st.integers(AUTOMATIC, 200),
    spacing=st.sampled_from(["exponential", "linear"]),
    tp_size=st.integers(1, 16),
)
def test_sizes_fall_from_the_largest_and_can_be_shared_out(
    tokens_beside: int, num_sizes: int, spacing: Spacing, tp_size: int
) -> None:
    max_size = tp_size + tokens_beside

    sizes = graph_sizes(max_size, num_sizes=num_sizes, spacing=spacing, tp_size=tp_size)

    assert sizes[0] == max_size - max_size % tp_size
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(size > 0 and size % tp_size == 0 for size in sizes)
    if num_sizes != AUTOMATIC:
        assert len(sizes) <= max(1, num_sizes)


@pytest.mark.parametrize("max_size", [1, 2, 3, 7, 80, 99, 257, 816])
def test_halving_pads_no_step_to_more_than_twice_its_size_and_one(max_size: int) -> None:
    sizes = graph_sizes(max_size)

    for real in range(1, max_size + 1):
        assert min(size for size in sizes if size >= real) <= 2 * real + 1


# The list of graphs


def test_the_list_has_every_size_with_every_number_of_prefills_and_without() -> None:
    limits = limits_of(max_requests=16, max_tokens=512, max_model_len=128)

    assert as_tuples(graph_list(limits, num_sizes=4, max_graph_tokens=64)) == [
        (64, 16, 0),
        (64, 8, 8),
        (64, 4, 12),
        (64, 2, 14),
        (64, 1, 15),
        (32, 16, 0),
        (32, 8, 8),
        (32, 4, 12),
        (32, 2, 14),
        (32, 1, 15),
        (16, 16, 0),
        (16, 8, 8),
        (16, 4, 12),
        (16, 2, 14),
        (16, 1, 15),
        (16, 0, 16),
        (8, 0, 8),
        (4, 0, 4),
        (1, 0, 1),
    ]


@pytest.mark.parametrize(
    ("num_sizes", "expected"),
    [
        (0, [80]),
        (1, [80]),
        (2, [80, 1]),
        (4, [80, 40, 20, 1]),
        (8, [80, 40, 20, 10, 4, 2, 1]),
        (16, [80, 40, 20, 10, 4, 2, 1]),
    ],
)
def test_without_prefills_the_list_is_the_sizes_of_decodes(
    num_sizes: int, expected: list[int]
) -> None:
    graphs = graph_list(limits_of(max_requests=80), num_sizes=num_sizes, max_prefills=0)

    assert as_tuples(graphs) == [(size, 0, size) for size in expected]


def test_graphs_for_prefills_reach_beyond_the_requests() -> None:
    graphs = graph_list(limits_of(max_requests=80), num_sizes=16, max_graph_tokens=1024)

    token_counts = sorted({graph.tokens for graph in graphs}, reverse=True)
    assert token_counts == [1024, 512, 256, 128, 80, 64, 40, 32, 20, 16, 10, 8, 4, 2, 1]
    assert max(graph.tokens for graph in graphs if graph.prefills == 0) == 80


def test_linear_lists_space_both_kinds_of_graph_evenly() -> None:
    graphs = graph_list(
        limits_of(max_requests=64, max_model_len=128),
        num_sizes=2,
        spacing="linear",
        max_prefills=2,
        max_graph_tokens=64,
    )

    assert as_tuples(graphs) == [
        (64, 2, 62),
        (32, 2, 30),
        (64, 1, 63),
        (32, 1, 31),
        (64, 0, 64),
        (32, 0, 32),
    ]


def test_no_graphs_are_wanted_and_none_are_listed() -> None:
    assert graph_list(limits_of(max_requests=64), num_sizes=None) == ()


@pytest.mark.parametrize(
    ("max_graph_tokens", "largest"), [(4, 16), (16, 16), (64, 64), (200, 200), (201, 200)]
)
def test_the_largest_graph_holds_every_request_and_no_more_than_a_step(
    max_graph_tokens: int, largest: int
) -> None:
    limits = limits_of(max_requests=16, max_tokens=200)

    graphs = graph_list(limits, max_graph_tokens=max_graph_tokens)

    assert max(graph.tokens for graph in graphs) == largest


def test_a_graph_is_left_out_where_its_prefills_cannot_have_so_many_tokens() -> None:
    limits = limits_of(max_requests=4, max_model_len=20)

    graphs = graph_list(limits, num_sizes=2, max_prefills=4, max_graph_tokens=64)

    # One prefill of 20 tokens and three decodes are 23.
    assert as_tuples(graphs) == [(64, 4, 0), (4, 0, 4), (1, 0, 1)]


def test_a_number_of_prefills_that_is_no_power_of_two_is_listed_too() -> None:
    graphs = graph_list(
        limits_of(max_requests=16), num_sizes=1, max_prefills=6, max_graph_tokens=16
    )

    assert [graph.prefills for graph in graphs] == [6, 4, 2, 1, 0]


def test_few_requests_and_many_sizes_give_a_valid_list() -> None:
    limits = limits_of(max_requests=10, max_tokens=10)

    graphs = graph_list(limits, num_sizes=32, max_graph_tokens=10)

    assert {graph.tokens for graph in graphs} == {10, 4, 2, 1}
    assert all(graph.fits(limits) for graph in graphs)


def test_as_many_requests_as_ranks_leave_one_size_for_decodes() -> None:
    graphs = graph_list(limits_of(max_requests=8, tp_size=8), num_sizes=16, max_prefills=0)

    assert as_tuples(graphs) == [(8, 0, 8)]


@pytest.mark.parametrize("num_sizes", [1, 16, 32, AUTOMATIC])
def test_no_size_below_the_requests_is_only_for_steps_that_prefill(num_sizes: int) -> None:
    graphs = graph_list(limits_of(max_requests=80), num_sizes=num_sizes, max_graph_tokens=1024)

    decode_sizes = {graph.tokens for graph in graphs if graph.prefills == 0}
    with_prefills = {graph.tokens for graph in graphs if graph.prefills > 0}
    assert with_prefills
    assert {size for size in with_prefills if size <= 80} <= decode_sizes


@REPEATABLE
@given(lists_st())
def test_a_list_is_sorted_and_every_graph_of_it_can_run(
    listed: tuple[BatchLimits, tuple[BatchDimensions, ...]],
) -> None:
    limits, graphs = listed

    order = [(graph.tokens - graph.decodes, graph.decodes) for graph in graphs]
    assert order == sorted(order, reverse=True)
    assert len(set(graphs)) == len(graphs)
    assert all(graph.fits(limits) for graph in graphs)
    assert all(graph.tokens % limits.tp_size == 0 for graph in graphs)


@REPEATABLE
@given(lists_st(), st.data())
def test_whatever_only_decodes_finds_a_graph(
    listed: tuple[BatchLimits, tuple[BatchDimensions, ...]], data: st.DataObject
) -> None:
    limits, graphs = listed
    num_decodes = data.draw(st.integers(1, limits.max_requests))

    graph = match(BatchDimensions(num_decodes, 0, num_decodes), graphs)

    assert graph is not None
    assert graph.tokens == graph.decodes >= num_decodes


# Matching


@pytest.mark.parametrize(
    ("real", "loose", "strict"),
    [
        ((1, 0, 1), (16, 0, 16), (16, 0, 16)),
        ((17, 0, 17), (32, 0, 32), (32, 0, 32)),
        ((64, 0, 64), (64, 0, 64), (64, 0, 64)),
        ((65, 0, 65), None, None),
        ((20, 1, 0), (32, 16, 16), (32, 16, 16)),
        ((20, 1, 19), (32, 16, 16), (48, 16, 32)),
        ((48, 1, 47), (48, 16, 32), (64, 16, 48)),
        ((64, 20, 44), (64, 64, 0), None),
        ((64, 1, 63), (64, 16, 48), None),
        ((10, 10, 0), (16, 16, 0), (16, 16, 0)),
        ((70, 1, 0), None, None),
    ],
)
def test_a_step_runs_in_the_least_graph_that_has_room(
    real: Dimensions, loose: Dimensions | None, strict: Dimensions | None
) -> None:
    step = BatchDimensions(*real)

    assert match(step, GRAPHS) == (BatchDimensions(*loose) if loose else None)
    assert match(step, GRAPHS, strict=True) == (BatchDimensions(*strict) if strict else None)


def test_a_lone_decode_runs_in_a_graph_of_one_row() -> None:
    graphs = graph_list(limits_of(max_requests=256))

    assert match(BatchDimensions(1, 0, 1), graphs) == BatchDimensions(1, 0, 1)
    assert match(BatchDimensions(20, 1, 0), graphs) == BatchDimensions(32, 1, 31)


def test_a_step_that_only_decodes_never_runs_in_a_graph_for_prefills() -> None:
    graphs = [BatchDimensions(16, 4, 12)]

    assert match(BatchDimensions(10, 0, 10), graphs) is None
    assert match(BatchDimensions(10, 1, 9), graphs) == graphs[0]


def test_without_graphs_nothing_matches() -> None:
    assert match(BatchDimensions(1, 0, 1), ()) is None


def all_graphs_with_room(
    real: BatchDimensions, graphs: tuple[BatchDimensions, ...], *, strict: bool
) -> list[BatchDimensions]:
    """Seat the rows one by one, as the slots of a graph are defined."""
    found = []
    for graph in graphs:
        free_prefills = graph.prefills - real.prefills
        decodes_left = max(0, real.decodes - graph.decodes)
        may_borrow = not strict and real.prefills > 0
        seated = decodes_left == 0 or (may_borrow and decodes_left <= free_prefills)
        same_kind = real.prefills > 0 or graph.prefills == 0
        if free_prefills >= 0 and seated and same_kind and graph.tokens >= real.tokens:
            found.append(graph)
    return found


@REPEATABLE
@given(lists_st(), st.booleans(), st.data())
def test_the_graph_that_is_chosen_has_room_and_none_less_has(
    listed: tuple[BatchLimits, tuple[BatchDimensions, ...]], strict: bool, data: st.DataObject
) -> None:
    limits, graphs = listed
    prefills = data.draw(st.integers(0, min(20, limits.max_requests)))
    decodes = data.draw(st.integers(0, limits.max_requests - prefills))
    more_tokens = data.draw(st.integers(0, 200)) if prefills else 0
    real = BatchDimensions(prefills + decodes + more_tokens, prefills, decodes)

    chosen = match(real, graphs, strict=strict)

    possible = all_graphs_with_room(real, graphs, strict=strict)
    if chosen is None:
        assert possible == []
    else:
        assert chosen in possible
        assert all(
            (chosen.tokens, chosen.prefills, chosen.decodes)
            <= (other.tokens, other.prefills, other.decodes)
            for other in possible
        )


@REPEATABLE
@given(lists_st(), steps_st())
def test_the_order_of_the_list_does_not_change_the_choice(
    listed: tuple[BatchLimits, tuple[BatchDimensions, ...]],
    step: tuple[BatchLimits, BatchDimensions],
) -> None:
    graphs, real = listed[1], step[1]

    assert match(real, graphs) == match(real, graphs[::-1])


# Matching of several ranks


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(8, 0, 8), (8, 0, 8)], (16, 0, 16)),
        ([(8, 0, 8), (40, 0, 40), (1, 0, 1)], (48, 0, 48)),  # the fullest rank decides
        ([(0, 0, 0), (17, 0, 17)], (32, 0, 32)),  # an idle rank runs along
        ([(0, 0, 0), (0, 0, 0)], (16, 0, 16)),
        ([(20, 1, 0), (20, 1, 0)], None),
        ([(8, 0, 8), (20, 1, 19)], None),  # one rank prefills
        ([(65, 0, 65), (65, 0, 65)], None),
        ([(65, 0, 65), (1, 0, 1)], None),  # one rank is too full
    ],
)
def test_expert_parallel_ranks_run_in_one_graph_or_all_in_none(
    ranks: list[Dimensions], expected: Dimensions | None
) -> None:
    graph = match_ranks([BatchDimensions(*rank) for rank in ranks], GRAPHS)

    assert graph == (BatchDimensions(*expected) if expected else None)


@REPEATABLE
@given(lists_st(), st.data())
def test_a_graph_of_all_ranks_has_room_for_each(
    listed: tuple[BatchLimits, tuple[BatchDimensions, ...]], data: st.DataObject
) -> None:
    limits, graphs = listed
    counts = data.draw(st.lists(st.integers(0, limits.max_requests), min_size=1, max_size=8))

    graph = match_ranks([BatchDimensions(count, 0, count) for count in counts], graphs)

    assert graph is not None
    assert graph.decodes >= max(counts)
