import pytest
from hypothesis import given, settings, strategies as st

from callboard.gpu.memory import (
    GIB,
    MemoryPlan,
    block_bytes,
    blocks_for,
    common_plan,
    default_max_requests,
    format_bytes,
    gib_to_bytes,
    kv_heads_per_rank,
    latent_block_bytes,
    paused_limit,
    plan_memory,
    recurrent_state_bytes,
)
from callboard.messages.errors import ConfigError

REPEATABLE = settings(derandomize=True, database=None, deadline=None, max_examples=100)

# One attention layer in float32 of 2 heads of 8, and one Mamba layer.
HYBRID_BLOCK = block_bytes(num_layers=1, block_tokens=128, num_kv_heads=2, head_dim=8, itemsize=4)
STATE = recurrent_state_bytes(
    num_layers=1, conv_shape=(544, 4), ssm_shape=(8, 64, 16), conv_itemsize=4, ssm_itemsize=4
)


def plan_of(
    budget_bytes: int = gib_to_bytes(0.03),
    *,
    bytes_per_block: int = HYBRID_BLOCK,
    bytes_per_state: int = 0,
    max_tokens: int = 16384,
    state_ratio: float | None = None,
    max_requests: int | None = None,
    paused_bytes: int = 0,
    tp_size: int = 1,
) -> MemoryPlan:
    return plan_memory(
        budget_bytes=budget_bytes,
        bytes_per_block=bytes_per_block,
        bytes_per_state=bytes_per_state,
        max_tokens=max_tokens,
        state_ratio=state_ratio,
        max_requests=max_requests,
        paused_bytes=paused_bytes,
        tp_size=tp_size,
    )


# Bytes of a block and of a state


@pytest.mark.parametrize(
    ("itemsize", "num_kv_heads", "block_tokens", "gib", "expected_bytes", "expected_blocks"),
    [
        (4, 2, 128, 0.03, 65_536, 491),
        (2, 4, 256, 0.1, 131_072, 819),
        (2, 4, 256, 0.01, 131_072, 81),
    ],
)
def test_blocks_of_a_four_layer_model_fit_a_budget_exactly_so_often(
    itemsize: int,
    num_kv_heads: int,
    block_tokens: int,
    gib: float,
    expected_bytes: int,
    expected_blocks: int,
) -> None:
    size = block_bytes(
        num_layers=4,
        block_tokens=block_tokens,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        itemsize=itemsize,
    )

    assert size == expected_bytes
    assert gib_to_bytes(gib) // size == expected_blocks


def test_a_block_of_smollm2_in_float32_takes_as_much_as_its_parts() -> None:
    size = block_bytes(num_layers=30, block_tokens=64, num_kv_heads=3, head_dim=64, itemsize=4)

    assert size == 2 * 30 * 64 * 3 * 64 * 4


def test_a_latent_block_holds_one_vector_a_token_for_keys_and_values() -> None:
    size = latent_block_bytes(
        num_layers=27, block_tokens=64, kv_lora_rank=512, rope_head_dim=64, itemsize=2
    )

    assert size == 27 * 64 * 576 * 2


def test_a_recurrent_state_is_charged_to_the_layers_that_have_one() -> None:
    assert HYBRID_BLOCK == 16_384
    assert STATE == 41_472


def test_the_two_parts_of_a_recurrent_state_may_differ_in_precision() -> None:
    size = recurrent_state_bytes(
        num_layers=3, conv_shape=(544, 4), ssm_shape=(8, 64, 16), conv_itemsize=2, ssm_itemsize=4
    )

    assert size == 3 * (544 * 4 * 2 + 8 * 64 * 16 * 4)


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "expected"),
    [
        (8, 1, 8),
        (8, 2, 4),
        (8, 8, 1),
        (2, 4, 1),  # two ranks cache each head
        (1, 8, 1),
    ],
)
def test_ranks_share_the_kv_heads_and_have_one_at_least(
    num_kv_heads: int, tp_size: int, expected: int
) -> None:
    assert kv_heads_per_rank(num_kv_heads, tp_size) == expected


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(3, 2), (3, 4), (8, 3)])
def test_kv_heads_that_cannot_be_shared_out_evenly_are_refused(
    num_kv_heads: int, tp_size: int
) -> None:
    with pytest.raises(
        ConfigError, match=f"{num_kv_heads} KV heads cannot be shared out evenly to tp_size"
    ):
        kv_heads_per_rank(num_kv_heads, tp_size)


def test_a_block_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="head_dim is 0, and must be at least 1"):
        block_bytes(num_layers=1, block_tokens=1, num_kv_heads=1, head_dim=0, itemsize=4)
    with pytest.raises(ConfigError, match="kv_lora_rank is 0, and must be at least 1"):
        latent_block_bytes(
            num_layers=1, block_tokens=1, kv_lora_rank=0, rope_head_dim=1, itemsize=4
        )
    with pytest.raises(ConfigError, match=r"ssm_shape\[1\] is 0, and must be at least 1"):
        recurrent_state_bytes(
            num_layers=1, conv_shape=(4, 4), ssm_shape=(4, 0), conv_itemsize=4, ssm_itemsize=4
        )
    with pytest.raises(ConfigError, match="tp_size is 0, and must be at least 1"):
        kv_heads_per_rank(8, 0)


# What a budget holds


@pytest.mark.parametrize("gib", [-1.0, float("nan"), float("inf")])
def test_what_is_no_size_is_refused(gib: float) -> None:
    with pytest.raises(ConfigError, match="GiB is no size"):
        gib_to_bytes(gib)


def test_a_fraction_of_a_gib_is_rounded_down_to_bytes() -> None:
    assert gib_to_bytes(0.03) == 32_212_254
    assert gib_to_bytes(0) == 0


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (144, 2), (256, 2)]
)
def test_tokens_need_the_fewest_blocks_that_hold_them(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 128) == expected


@pytest.mark.parametrize(
    ("gib", "bytes_per_block", "bytes_per_state", "num_blocks"),
    [
        (0.03, 65_536, 0, 491),
        (0.03, HYBRID_BLOCK, STATE, 556),
        (0.1, 131_072, 0, 819),
        (0.01, 131_072, 0, 81),
        # Two layers of 8 heads of 64 in float32, 128 tokens; the hybrid has one of them.
        (1.0, 2**20, 0, 1024),
        (1.0, 2**19, STATE, 1897),
    ],
)
def test_a_pool_has_as_many_blocks_as_fit_each_with_a_state(
    gib: float, bytes_per_block: int, bytes_per_state: int, num_blocks: int
) -> None:
    plan = plan_of(
        gib_to_bytes(gib), bytes_per_block=bytes_per_block, bytes_per_state=bytes_per_state
    )

    assert (plan.num_blocks, plan.usable) == (num_blocks, num_blocks - 1)


@pytest.mark.parametrize(
    ("num_blocks", "tp_size", "expected"),
    [
        (491, 64, 448),  # 64 ranks make rows come by 64
        (556, 64, 512),
        (491, 1, 488),
        (819, 1, 816),
        (819, 8, 816),
        (819, 3, 816),
        (81, 1, 80),
        (491, 3, 486),  # by 6, which 3 ranks share
        (5, 1, 4),
        (4, 1, 3),  # below what rows are padded to, as many as there are
        (2, 1, 1),
        (4, 2, 2),
    ],
)
def test_a_pool_is_for_a_round_number_of_requests(
    num_blocks: int, tp_size: int, expected: int
) -> None:
    assert default_max_requests(num_blocks, max_tokens=16384, tp_size=tp_size) == expected


def test_no_more_requests_run_than_a_step_has_tokens() -> None:
    assert default_max_requests(40_000, max_tokens=16384) == 16384
    assert plan_of(GIB, bytes_per_block=16_384, max_tokens=510).max_requests == 508


def test_a_pool_too_small_for_a_request_on_each_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 usable blocks .* for at least tp_size \(4\)"):
        default_max_requests(4, max_tokens=64, tp_size=4)


def test_max_requests_is_taken_as_it_is_given() -> None:
    assert plan_of(max_requests=4).max_requests == 4
    assert plan_of(max_requests=5).max_requests == 5
    assert plan_of(max_requests=4).num_blocks == plan_of().num_blocks


@pytest.mark.parametrize(
    ("max_requests", "tp_size", "reason"),
    [
        (0, 1, "max_requests is 0, and must be a positive multiple"),
        (-4, 2, "max_requests is -4, and must be a positive multiple"),
        (2, 4, r"max_requests is 2, and must be a positive multiple of tp_size \(4\)"),
        (6, 4, r"max_requests is 6, and must be a positive multiple of tp_size \(4\)"),
        (20_000, 1, r"max_requests is 20000, and must be at most max_tokens \(16384\)"),
    ],
)
def test_a_max_requests_that_cannot_be_is_refused(
    max_requests: int, tp_size: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_of(max_requests=max_requests, tp_size=tp_size)


def test_a_pool_without_a_block_to_hand_out_is_refused() -> None:
    # One byte more than the dummy takes.
    with pytest.raises(ConfigError, match="room for 1 blocks of 16 KiB, and must for at least 2"):
        plan_of(HYBRID_BLOCK + 1)
    with pytest.raises(ConfigError, match=r"0 blocks of 16 KiB and recurrent states of 40\.5 KiB"):
        plan_of(10 * STATE, bytes_per_state=STATE, max_requests=64)
    assert plan_of(2 * HYBRID_BLOCK).max_requests == 1


# Recurrent states


@pytest.mark.parametrize("state_ratio", [0.2, 0.4, 0.6, 0.8])
def test_a_ratio_of_the_budget_goes_to_states_and_the_rest_to_blocks(state_ratio: float) -> None:
    budget = gib_to_bytes(0.03)
    share = int(budget * state_ratio)

    plan = plan_of(budget, bytes_per_state=STATE, state_ratio=state_ratio)

    assert plan.max_requests == share // STATE
    assert plan.num_blocks == (budget - share) // HYBRID_BLOCK


def test_a_ratio_may_leave_room_for_more_states_than_requests() -> None:
    plan = plan_of(bytes_per_state=STATE, state_ratio=0.4, max_requests=8)

    assert plan.max_requests == 8
    assert plan.num_blocks == plan_of(bytes_per_state=STATE, state_ratio=0.4).num_blocks


@pytest.mark.parametrize("max_requests", [1, 4, 64])
def test_max_requests_alone_reserve_exactly_their_states(max_requests: int) -> None:
    budget = gib_to_bytes(0.03)

    plan = plan_of(budget, bytes_per_state=STATE, max_requests=max_requests)

    assert plan.max_requests == max_requests
    assert plan.num_blocks == (budget - max_requests * STATE) // HYBRID_BLOCK


def test_fewer_requests_leave_more_blocks() -> None:
    pools = [
        plan_of(bytes_per_state=STATE, max_requests=count).num_blocks for count in (64, 16, 4, 1)
    ]

    assert pools == sorted(set(pools))


@pytest.mark.parametrize("tp_size", [1, 4, 8])
def test_states_by_ratio_are_for_as_many_requests_on_each_rank(tp_size: int) -> None:
    share = int(gib_to_bytes(0.03) * 0.1)

    plan = plan_of(bytes_per_state=STATE, state_ratio=0.1, tp_size=tp_size)

    assert plan.max_requests == share // STATE // tp_size * tp_size


def test_states_by_ratio_are_for_no_more_requests_than_a_step_has_tokens() -> None:
    assert plan_of(bytes_per_state=STATE, state_ratio=0.8, max_tokens=50).max_requests == 50


@pytest.mark.parametrize(
    ("bytes_per_state", "state_ratio", "max_requests", "reason"),
    [
        (0, 0.4, None, "state_ratio is 0.4, and the model has no recurrent states"),
        (STATE, 0.0, None, "state_ratio is 0.0, and must be between 0 and 1"),
        (STATE, 1.0, None, "state_ratio is 1.0, and must be between 0 and 1"),
        (STATE, 0.004, 8, "room for the recurrent states of 3 requests, and must for at least 8"),
        (STATE, 0.0001, None, "states of 0 requests, and must for at least 1"),
    ],
)
def test_a_share_of_states_that_cannot_be_is_refused(
    bytes_per_state: int, state_ratio: float, max_requests: int | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_of(bytes_per_state=bytes_per_state, state_ratio=state_ratio, max_requests=max_requests)


# The paused limit and pipeline stages


@pytest.mark.parametrize(
    ("paused_bytes", "expected"), [(0, 0), (65_535, 0), (65_536, 1), (3 * 65_536, 3)]
)
def test_paused_rows_may_hold_whole_blocks_of_the_shared_pool(
    paused_bytes: int, expected: int
) -> None:
    plan = plan_of(5 * 65_536, bytes_per_block=65_536, paused_bytes=paused_bytes)

    assert (plan.num_blocks, plan.paused_limit) == (5, expected)


@pytest.mark.parametrize(("paused_bytes", "limit"), [(4 * 65_536, 4), (GIB, 16_384), (-1, -1)])
def test_paused_rows_must_leave_a_block_to_the_others(paused_bytes: int, limit: int) -> None:
    with pytest.raises(ConfigError, match=f"is {limit} blocks, and must be 0 to 3 of the 4 usable"):
        paused_limit(paused_bytes, 65_536, num_blocks=5)


def test_pipeline_stages_agree_on_what_all_have_room_for() -> None:
    stages = [
        MemoryPlan(num_blocks=500, paused_limit=9, max_requests=64),
        MemoryPlan(num_blocks=400, paused_limit=12, max_requests=80),
        MemoryPlan(num_blocks=450, paused_limit=10, max_requests=72),
    ]

    assert common_plan(stages) == MemoryPlan(num_blocks=400, paused_limit=9, max_requests=64)


# Invariants


@REPEATABLE
@given(spare=st.integers(0, 2**34), block=st.integers(1, 2**22), state=st.integers(0, 2**22))
def test_blocks_and_their_states_fill_the_budget_and_no_more(
    spare: int, block: int, state: int
) -> None:
    budget = 2 * (block + state) + spare

    plan = plan_of(budget, bytes_per_block=block, bytes_per_state=state)

    assert plan.num_blocks * (block + state) <= budget < (plan.num_blocks + 1) * (block + state)
    assert 1 <= plan.max_requests <= plan.usable


@REPEATABLE
@given(
    spare=st.integers(0, 2**34),
    block=st.integers(1, 2**22),
    state=st.integers(0, 2**22),
    max_requests=st.integers(1, 64),
)
def test_a_given_number_of_states_and_the_blocks_beside_them_fill_the_budget(
    spare: int, block: int, state: int, max_requests: int
) -> None:
    budget = max_requests * state + 2 * block + spare

    plan = plan_of(budget, bytes_per_block=block, bytes_per_state=state, max_requests=max_requests)

    left = budget - plan.max_requests * state - plan.num_blocks * block
    assert 0 <= left < block


@REPEATABLE
@given(
    budget=st.integers(2**25, 2**34),
    block=st.integers(1, 2**20),
    state=st.integers(2**10, 2**20),
    ratio=st.floats(0.1, 0.9),
)
def test_shares_by_ratio_fill_the_budget_but_for_a_block_and_a_state(
    budget: int, block: int, state: int, ratio: float
) -> None:
    plan = plan_of(
        budget, bytes_per_block=block, bytes_per_state=state, state_ratio=ratio, max_tokens=2**24
    )

    left = budget - plan.max_requests * state - plan.num_blocks * block
    assert 0 <= left < block + state


@REPEATABLE
@given(blocks_beside=st.integers(0, 10_000), tp_size=st.integers(1, 8))
def test_default_requests_are_shared_by_the_ranks_and_each_has_a_block(
    blocks_beside: int, tp_size: int
) -> None:
    num_blocks = tp_size + 1 + blocks_beside

    max_requests = default_max_requests(num_blocks, max_tokens=16384, tp_size=tp_size)

    assert 1 <= max_requests < num_blocks
    assert max_requests % tp_size == 0


# Sizes as text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (512, "512 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2048, "2 KiB"),
        (2**19, "512 KiB"),
        (2**20, "1 MiB"),
        (2**29, "512 MiB"),
        (600 * 2**20, "600 MiB"),
        (1023 * 2**20, "0.999 GiB"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**39, "512 GiB"),
        (2**40, "1 TiB"),
        (2**49, "512 TiB"),
        (5000 * 2**40, "4.88 PiB"),
        (2**50, "1 PiB"),
        (5000 * 2**50, "5000 PiB"),
        (-1, "-1 bytes"),
        (-2048, "-2 KiB"),
        (-(2**50), "-1 PiB"),
    ],
)
def test_sizes_read_with_three_digits_and_the_right_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@REPEATABLE
@given(st.integers(0, 400).flatmap(lambda bits: st.integers(0, 2**bits)))
def test_a_size_as_text_is_the_size_to_half_a_percent_or_so(num_bytes: int) -> None:
    digits, unit = format_bytes(num_bytes).split()
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]

    assert float(digits) * 1024 ** units.index(unit) == pytest.approx(num_bytes, rel=0.006)
    assert float(digits) < 1000 or unit == "PiB"
    assert float(digits) >= 0.97 or num_bytes == 0
    assert format_bytes(-num_bytes) == ("-" if num_bytes else "") + f"{digits} {unit}"
