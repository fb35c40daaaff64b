"""What a supervisor knows of a child: how to start it, and what to do when it ends."""

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from callboard.actors.actor import STOP_TIMEOUT_S, Actor


class Restart(enum.Enum):
    """When a child that ended is started again (OTP's meanings)."""

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # after a failure
    TEMPORARY = "temporary"  # never


class Strategy(enum.Enum):
    """Who is restarted with a child that failed (OTP's meanings)."""

    ONE_FOR_ONE = "one_for_one"  # nobody else
    ONE_FOR_ALL = "one_for_all"  # all its siblings
    REST_FOR_ONE = "rest_for_one"  # the siblings started after it


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child: `start` makes a fresh actor for each life; `shutdown_s` is its time to stop."""

    name: str
    start: Callable[[], Actor[Any]]
    restart: Restart = Restart.PERMANENT
    shutdown_s: float = STOP_TIMEOUT_S


class Intensity(msgspec.Struct, frozen=True, kw_only=True):
    """How many restarts within how many seconds are bearable, and how they are spaced.

    The first restart is immediate; each further one within the period waits twice as long.
    """

    restarts: int = 5
    period_s: float = 60.0
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
