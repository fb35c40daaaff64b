"""The decisions of a supervisor, without its tasks. Pure; the meanings are OTP's, plus back-off."""

from collections import deque
from collections.abc import Sequence

from callboard.messages.errors import Failure, RestartIntensityReached
from callboard.supervision.spec import Intensity, Restart, Strategy


def should_restart(restart: Restart, failure: Failure | None) -> bool:
    """Say whether a child that ended so is started again."""
    if restart is Restart.TRANSIENT:
        return failure is not None
    return restart is Restart.PERMANENT


def affected(strategy: Strategy, names: Sequence[str], failed: str) -> list[str]:
    """Return, in start order, the children that are restarted when one of them has failed."""
    match strategy:
        case Strategy.ONE_FOR_ONE:
            return [failed]
        case Strategy.ONE_FOR_ALL:
            return list(names)
        case Strategy.REST_FOR_ONE:
            return list(names[names.index(failed) :])


class RestartHistory:
    """The restarts of the last period."""

    def __init__(self, intensity: Intensity) -> None:
        self._intensity = intensity
        self._times: deque[float] = deque()

    def record(self, now: float, failed: str) -> float:
        """Count a restart and return how long to wait before it, in seconds.

        Raises RestartIntensityReached when there were too many.
        """
        intensity = self._intensity
        while self._times and self._times[0] <= now - intensity.period_s:
            self._times.popleft()
        if len(self._times) >= intensity.restarts:
            raise RestartIntensityReached(
                f"{failed} failed again after {intensity.restarts} restarts "
                f"in {intensity.period_s:g} s"
            )
        self._times.append(now)
        earlier = len(self._times) - 1
        if earlier == 0:
            return 0.0
        return min(intensity.backoff_s * 2.0 ** (earlier - 1), intensity.max_backoff_s)
