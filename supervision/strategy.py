"""The decisions of a supervisor, without its tasks. Pure; the meanings are OTP's, plus back-off."""

from collections.abc import Sequence

from callboard.messages.errors import Failure, RestartIntensityReached
from callboard.supervision.spec import AutoShutdown, Intensity, Restart, Strategy


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
    """The restarts that count: those since which the child has not been well for a period."""

    def __init__(self, intensity: Intensity) -> None:
        self._intensity = intensity
        self._restarts: list[str] = []  # whose they were; never more than are bearable
        self._up_since: dict[str, float] = {}  # of the children that are up
        self._first_at: dict[str, float] = {}  # when the oldest restart that counts was

    def up(self, name: str, now: float) -> None:
        """A child is up, for the first time or again."""
        self._up_since[name] = now

    def down(self, name: str) -> None:
        """A child is down, and not by a failure of its own."""
        self._up_since.pop(name, None)

    def record(self, now: float, failed: str, *, ill_s: float = 0.0) -> float:
        """Count a restart for a failure now; returns how long to wait before it, in seconds.

        The child has not been well for `ill_s`, its failure says. Raises RestartIntensityReached
        when there were too many.
        """
        self._forgive(now, {failed: ill_s})
        self.down(failed)
        since = self._first_at.setdefault(failed, now - ill_s)
        if self.left(now) == 0:
            most = self._intensity.restarts
            raise RestartIntensityReached(
                f"{failed} failed again after {most} restarts without "
                f"{self._intensity.period_s:g} s of health",
                ill_s=now - since,
            )
        self._restarts.append(failed)
        return self._wait(len(self._restarts) - 1)

    def left(self, now: float) -> int:
        """Return how many more restarts are bearable."""
        self._forgive(now, {})
        return self._intensity.restarts - len(self._restarts)

    def _forgive(self, now: float, ill: dict[str, float]) -> None:
        """Forget the restarts of children that have been well for long enough."""
        for name, since in self._up_since.items():
            if now - ill.get(name, 0.0) - since >= self._intensity.period_s:
                self._first_at.pop(name, None)
                self._restarts = [other for other in self._restarts if other != name]

    def _wait(self, earlier: int) -> float:
        if earlier == 0:
            return 0.0
        # Of a large power there is no float; the longest wait is reached long before.
        doubled = self._intensity.backoff_s * 2.0 ** min(earlier - 1, 100)
        return min(doubled, self._intensity.max_backoff_s)


def ends_with(auto: AutoShutdown, *, still_significant: int) -> bool:
    """Say whether a supervisor ends with a significant child that ended by itself for good.

    So many other significant children are left.
    """
    if auto is AutoShutdown.ALL_SIGNIFICANT:
        return still_significant == 0
    return auto is AutoShutdown.ANY_SIGNIFICANT
