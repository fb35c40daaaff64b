"""The whole tree under hundreds of schedules and faults; `make simulate` plays thousands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.run import find_mutant
from tests.simulation.scenario import draw_plain
from tests.simulation.world import play, simulate

ROOT = Path(__file__).parents[2]
SEEDS_AT_ONCE = 20


@pytest.mark.parametrize("start", range(0, 300, SEEDS_AT_ONCE))
def test_every_promise_is_kept_whatever_happens(start: int) -> None:
    for seed in range(start, start + SEEDS_AT_ONCE):
        broken = simulate(seed).broken
        assert broken == [], f"python -m tests.simulation.run --show {seed}"


BROKE_ONCE = {
    1982: "a verb waited for two handshakes, each as long as the whole of its time",
    2781: "the same, after another reset",
    2850: "a verb was obeyed before one that had come to the root earlier",
    3179: "a verb was obeyed before one that had come to the replica earlier",
}
"""Seeds of plain scenarios, and what went wrong in them."""

BROKE_ONCE_WITH_MORE = {
    1455: "a verb was sent before one that had waited longer for the connection",
    3199: "the same",
}
"""Seeds of scenarios with all that odd ones may have."""


@pytest.mark.parametrize("seed", BROKE_ONCE)
def test_a_seed_that_once_broke_a_promise_keeps_it(seed: int) -> None:
    assert play(draw_plain(seed)).broken == []


@pytest.mark.parametrize("seed", BROKE_ONCE_WITH_MORE)
def test_a_seed_with_more_in_it_that_once_broke_a_promise_keeps_it(seed: int) -> None:
    assert simulate(seed).broken == []


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_bug_on_purpose_is_found(name: str) -> None:
    assert find_mutant(name, seeds=300)[1] is not None


def test_the_same_seed_gives_the_same_events_to_the_byte() -> None:
    assert simulate(12).log.lines() == simulate(12).log.lines()
    assert simulate(12).log.lines() != simulate(13).log.lines()


def test_the_same_seed_gives_the_same_events_in_another_process() -> None:
    logs = [_shown(12, hash_seed) for hash_seed in ("1", "2")]
    assert logs[0] == logs[1]
    assert len(logs[0].splitlines()) > 100


def _shown(seed: int, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.run", "--show", str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
