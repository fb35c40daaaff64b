import pytest
import torch
import torch.nn.functional as F

from callboard.gpu import linear
from callboard.gpu.device import release_memory, resident_bytes
from callboard.gpu.linear import Linear


@pytest.fixture(params=["onednn", "plain"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(linear, "_onednn_multiplies", lambda weight: False)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_it_multiplies(num_tokens: int, has_bias: bool, shared: bool) -> None:
    weight, x = torch.randn(24, 10), torch.randn(num_tokens, 10)
    bias = torch.randn(24) if has_bias else None

    y = Linear(weight, bias, shared=shared)(x)

    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_both_ways")
def test_it_takes_rows_that_are_not_contiguous() -> None:
    weight, x = torch.randn(24, 10), torch.randn(7, 20)[:, ::2]

    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), rtol=0, atol=1e-5)


def test_half_precision_is_multiplied_as_it_is() -> None:
    weight, x = torch.randn(24, 10).bfloat16(), torch.randn(3, 10).bfloat16()

    y = Linear(weight)(x)

    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.linear(x, weight))


def test_a_shared_weight_stays_the_one_it_was_given() -> None:
    weight = torch.ones(24, 10)
    layer = Linear(weight, shared=True)

    weight.zero_()

    assert layer(torch.ones(2, 10)).eq(0).all()


def test_a_weight_is_held_once_and_freed_with_its_layer() -> None:
    device = torch.device("cpu")
    size = 4096 * 4096 * 4  # large enough for the allocator to map and unmap it
    release_memory(device)
    before = resident_bytes(device)

    layer: Linear | None = Linear(torch.ones(4096, 4096))
    release_memory(device)
    held = resident_bytes(device) - before
    layer = None
    release_memory(device)
    left = resident_bytes(device) - before

    assert layer is None
    assert 0.9 * size < held < 1.5 * size
    assert left < 0.3 * size
