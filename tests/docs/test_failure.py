"""What docs/explanation/failure.md and docs/reference/exit-codes.md say is so."""

import re
from pathlib import Path

import pytest

from callboard.supervision.cli import main
from callboard.supervision.replica import LAST_RESORT_S
from callboard.supervision.settings import Settings
from callboard.supervision.spec import Intensity
from callboard.supervision.watchdog import STUCK_LOOP

ROOT = Path(__file__).parents[2]
FAILURE = (ROOT / "docs/explanation/failure.md").read_text()
CODES = (ROOT / "docs/reference/exit-codes.md").read_text()

SHOWN_BY = re.findall(r"`(tests/\S+)::(\w+)`", FAILURE)


def test_there_is_a_test_for_each_failure() -> None:
    assert len(SHOWN_BY) > 15


@pytest.mark.parametrize(("file", "function"), sorted(set(SHOWN_BY)))
def test_every_test_that_is_named_is_there(file: str, function: str) -> None:
    assert re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_defaults_are_those_of_the_code() -> None:
    intensity, settings = Intensity(), Settings()
    row = f"| {intensity.restarts} | {intensity.period_s:g} s |"

    assert FAILURE.count(row) == 3
    replicas = f"`max_restarts` ({settings.max_restarts}) | `restart_period_s`"
    assert replicas in FAILURE
    assert f"default of {settings.step_timeout_s:g} seconds" in FAILURE


def test_the_codes_are_those_of_the_code() -> None:
    section = CODES.partition("## Servers")[0]
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]

    assert listed == [
        main.DONE,
        main.REFUSED,
        main.UNREACHABLE,
        main.TIMED_OUT,
        main.USAGE,
        main.INTERRUPTED,
    ]
    assert re.search(rf"^\| {STUCK_LOOP} \| its event loop", CODES, re.MULTILINE)
    assert LAST_RESORT_S == 60  # "a minute"
