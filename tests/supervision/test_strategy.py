"""Who is restarted, when, and how often: the decisions of a supervisor."""

import pytest

from callboard.messages.errors import Failure, RestartIntensityReached
from callboard.supervision.spec import AutoShutdown, Intensity, Restart, Strategy
from callboard.supervision.strategy import RestartHistory, affected, ends_with, should_restart

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


def fail_every(history: RestartHistory, up_s: float, *, start_s: float = 0.0) -> list[float]:
    """Let a child start, be up and fail, nine times; returns the waits before its restarts."""
    now, waits = 0.0, []
    for _ in range(9):
        history.up("child", now := now + start_s)
        waits.append(history.record(now := now + up_s, "child"))
    return waits


def test_restarts_count_until_the_child_has_been_well_for_a_period() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0, backoff_s=0.1))

    assert fail_every(history, up_s=10.0) == [0.0] * 9


@pytest.mark.parametrize(("start_s", "up_s"), [(0.0, 9.9), (100.0, 0.0), (100.0, 9.9)])
def test_a_child_that_is_never_well_for_a_period_reaches_the_limit_however_slowly_it_fails(
    start_s: float, up_s: float
) -> None:
    history = RestartHistory(Intensity(restarts=8, period_s=10.0))

    with pytest.raises(RestartIntensityReached, match=r"without 10 s of health") as reached:
        fail_every(history, up_s, start_s=start_s)

    assert reached.value.ill_s == pytest.approx(8 * (start_s + up_s))


def test_time_in_which_a_child_is_up_and_ill_is_no_health() -> None:
    history = RestartHistory(Intensity(restarts=1, period_s=10.0))
    history.up("child", 0.0)
    history.record(300.0, "child", ill_s=295.0)
    history.up("child", 301.0)

    with pytest.raises(RestartIntensityReached) as reached:
        history.record(601.0, "child", ill_s=295.0)

    assert reached.value.ill_s == 596.0


def test_a_child_that_is_well_does_not_clear_another_one() -> None:
    history = RestartHistory(Intensity(restarts=2, period_s=10.0))
    history.up("well", 0.0)
    record(history, [50.0, 100.0])

    assert history.left(200.0) == 0
    with pytest.raises(RestartIntensityReached):
        history.record(200.0, "well")


def test_the_back_off_starts_over_after_health() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0, backoff_s=0.1))
    record(history, [0.0, 1.0, 2.0])
    history.up("child", 2.0)

    assert history.left(11.9) == 0
    assert history.left(12.0) == 3
    assert history.record(12.0, "child") == 0.0


def test_being_down_for_another_ones_sake_is_no_health() -> None:
    history = RestartHistory(Intensity(restarts=3, period_s=10.0))
    history.record(0.0, "a")
    history.up("a", 1.0)
    history.down("a")

    assert history.left(100.0) == 2


@pytest.mark.parametrize(
    ("auto", "left", "ends"),
    [
        (AutoShutdown.NEVER, 0, False),
        (AutoShutdown.ANY_SIGNIFICANT, 2, True),
        (AutoShutdown.ALL_SIGNIFICANT, 2, False),
        (AutoShutdown.ALL_SIGNIFICANT, 0, True),
    ],
)
def test_a_supervisor_ends_with_significant_children_as_in_otp(
    auto: AutoShutdown, left: int, ends: bool
) -> None:
    assert ends_with(auto, still_significant=left) is ends


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
