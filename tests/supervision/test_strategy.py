"""Who is restarted, when, and how often: the decisions of a supervisor."""

import pytest

from callboard.messages.errors import Failure, RestartIntensityReached
from callboard.supervision.spec import Intensity, Restart, Strategy
from callboard.supervision.strategy import RestartHistory, affected, should_restart

FAILURE = Failure(code="ActorFailed", message="ouch")
NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("restart", "after_a_failure", "after_an_orderly_end"),
    [
        (Restart.PERMANENT, True, True),
        (Restart.TRANSIENT, True, False),
        (Restart.TEMPORARY, False, False),
    ],
)
def test_restart_types_mean_what_they_mean_in_otp(
    restart: Restart, after_a_failure: bool, after_an_orderly_end: bool
) -> None:
    assert should_restart(restart, FAILURE) is after_a_failure
    assert should_restart(restart, None) is after_an_orderly_end


@pytest.mark.parametrize(
    ("strategy", "failed", "group"),
    [
        (Strategy.ONE_FOR_ONE, "b", ["b"]),
        (Strategy.ONE_FOR_ALL, "b", ["a", "b", "c", "d"]),
        (Strategy.ONE_FOR_ALL, "d", ["a", "b", "c", "d"]),
        (Strategy.REST_FOR_ONE, "a", ["a", "b", "c", "d"]),
        (Strategy.REST_FOR_ONE, "b", ["b", "c", "d"]),
        (Strategy.REST_FOR_ONE, "d", ["d"]),
    ],
)
def test_strategies_affect_whom_they_affect_in_otp_in_start_order(
    strategy: Strategy, failed: str, group: list[str]
) -> None:
    assert affected(strategy, NAMES, failed) == group


def record(history: RestartHistory, times: list[float]) -> list[float]:
    return [history.record(now, "child") for now in times]


def test_the_first_restart_is_immediate_and_the_others_wait_twice_as_long_each() -> None:
    history = RestartHistory(Intensity(restarts=10, backoff_s=0.1, max_backoff_s=100.0))

    assert record(history, [1.0, 2.0, 3.0, 4.0]) == [0.0, 0.1, 0.2, 0.4]


def test_a_wait_is_never_longer_than_the_longest() -> None:
    history = RestartHistory(Intensity(restarts=100, backoff_s=1.0, max_backoff_s=5.0))

    assert record(history, [float(now) for now in range(20)])[-1] == 5.0


def test_as_many_restarts_as_are_bearable_are_borne() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0))

    record(history, [0.0, 1.0, 2.0])


def test_one_restart_more_within_the_period_is_one_too_many() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0))
    record(history, [0.0, 1.0, 2.0])

    with pytest.raises(RestartIntensityReached, match=r"child failed again after 3 restarts"):
        history.record(9.9, "child")


def test_restarts_count_for_one_period() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0))
    record(history, [0.0, 1.0, 2.0])

    record(history, [10.0, 11.0, 12.0])


def test_the_back_off_starts_over_after_a_quiet_period() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0, backoff_s=0.1))
    record(history, [0.0, 1.0, 2.0])

    assert history.record(100.0, "child") == 0.0


def test_an_intensity_of_zero_bears_no_restart() -> None:
    history = RestartHistory(Intensity(restarts=0))

    with pytest.raises(RestartIntensityReached):
        history.record(0.0, "child")


def test_whose_restarts_they_were_does_not_matter() -> None:
    history = RestartHistory(Intensity(restarts=2, period_s=10.0))
    history.record(0.0, "a")
    history.record(1.0, "b")

    with pytest.raises(RestartIntensityReached, match="c failed"):
        history.record(2.0, "c")
