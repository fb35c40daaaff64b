import pytest

from callboard.gpu.memory import block_bytes, blocks_for, blocks_in, format_bytes


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
    assert blocks_in(gib, size) == expected_blocks


def test_a_block_of_smollm2_in_float32_takes_as_much_as_its_parts() -> None:
    size = block_bytes(num_layers=30, block_tokens=64, num_kv_heads=3, head_dim=64, itemsize=4)

    assert size == 2 * 30 * 64 * 3 * 64 * 4


def test_a_budget_below_one_block_holds_none() -> None:
    assert blocks_in(0.00001, 65_536) == 0


def test_a_block_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head_dim is 0, and must be at least 1"):
        block_bytes(num_layers=1, block_tokens=1, num_kv_heads=1, head_dim=0, itemsize=4)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (144, 2), (256, 2)]
)
def test_tokens_need_the_fewest_blocks_that_hold_them(num_tokens: int, expected: int) -> None:
    assert blocks_for(num_tokens, 128) == expected


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (2048, "2 KiB"),
        (600 * 2**20, "600 MiB"),
        (1023 * 2**20, "0.999 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**40, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_sizes_read_with_three_digits_and_the_right_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
