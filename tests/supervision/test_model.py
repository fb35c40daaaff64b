"""From an operator's settings to the runner of a replica, without loading any weights."""

import pytest

from callboard.gpu.attention.sdpa import SdpaAttention
from callboard.supervision.model import replica_parts
from callboard.supervision.settings import Settings


def test_a_runner_is_made_as_the_settings_say() -> None:
    settings = Settings(
        model="random:tiny",
        device="cpu",
        dtype="float64",
        threads=3,
        block_tokens=8,
        batch_invariant=True,
    )

    description = replica_parts(settings).make_runner().describe()

    said = {name: description[name] for name in ("dtype", "threads", "block_tokens")}
    assert said == {"dtype": "float64", "threads": 3, "block_tokens": 8}
    assert description["batch_invariant"] == 1


@pytest.mark.parametrize(("multiple", "expected"), [(1, 64), (256, 256)])
def test_how_long_blocks_are_is_the_attention_backends_choice(
    multiple: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SdpaAttention, "block_multiple", multiple)

    runner = replica_parts(Settings(model="random:tiny", device="cpu")).make_runner()

    assert runner.room().block_tokens == expected
