from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from callboard.gpu.staging import Staging

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def make_arrays(length: int) -> list[npt.NDArray[Any]]:
    table = np.arange(3 * length, dtype=np.int32).reshape(3, length)
    return [
        np.arange(length, dtype=np.int64),
        np.arange(5, dtype=np.int32),
        table[:, : length // 2],  # a view with gaps between its rows
        np.empty(0, dtype=np.int64),
        np.array([0.5, 1.5], dtype=np.float32),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [4, 100_000])
def test_arrays_arrive_with_their_values_types_and_shapes(device: str, length: int) -> None:
    arrays = make_arrays(length)

    tensors = Staging(torch.device(device)).send(arrays)

    assert [tensor.device.type for tensor in tensors] == [device] * 5
    for tensor, array in zip(tensors, arrays, strict=True):
        arrived = tensor.cpu().numpy()
        assert arrived.dtype == array.dtype
        assert arrived.shape == array.shape
        assert (arrived == array).all()


@pytest.mark.parametrize("device", DEVICES)
def test_all_that_is_sent_at_once_lies_in_one_buffer(device: str) -> None:
    tensors = Staging(torch.device(device)).send(make_arrays(100))

    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_sent_next_does_not_mix_with_what_was_sent(device: str) -> None:
    staging = Staging(torch.device(device))
    staging.send(make_arrays(100))

    [sent] = staging.send([np.full(3, 7, dtype=np.int64)])

    assert sent.tolist() == [7, 7, 7]


def test_a_buffer_is_kept_from_step_to_step() -> None:
    staging = Staging(torch.device("cpu"))
    [first] = staging.send([np.arange(4)])
    [second] = staging.send([np.arange(4)])

    assert first.data_ptr() == second.data_ptr()
