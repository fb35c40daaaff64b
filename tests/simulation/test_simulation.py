"""The whole tree under thousands of schedules and faults; `make simulate` plays more seeds."""

import pytest

from tests.simulation.world import simulate


@pytest.mark.parametrize("seed", range(0, 30, 10))
def test_every_promise_is_kept(seed: int) -> None:
    for each in range(seed, seed + 10):
        result = simulate(each)
        assert result.broken == [], f"seed {each}"


def test_the_same_seed_gives_the_same_events_to_the_byte() -> None:
    assert simulate(12).log.lines() == simulate(12).log.lines()
