"""What a supervisor knows of a child: how to start it, and what to do when it ends."""

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from callboard.actors.actor import STOP_TIMEOUT_S, Actor
from callboard.messages.errors import CallboardError


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


class AutoShutdown(enum.Enum):
    """Whether a supervisor ends in good order with its significant children (OTP's meanings)."""

    NEVER = "never"
    ANY_SIGNIFICANT = "any_significant"  # with the first of them that ends by itself
    ALL_SIGNIFICANT = "all_significant"  # with the last


KILL = 0.0
"""As `shutdown_s`: the child is not asked to stop but ended at once (OTP's brutal_kill)."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child: `start` makes a fresh actor for each life; `shutdown_s` is its time to stop.

    `shutdown_s` may be infinite, or KILL. A `significant` child is one that its supervisor may end
    with, see AutoShutdown. A failure that is one of `escalates` is not answered by a restart: the
    supervisor stops its children and fails of it, too.
    """

    name: str
    start: Callable[[], Actor[Any]]
    restart: Restart = Restart.PERMANENT
    shutdown_s: float = STOP_TIMEOUT_S
    significant: bool = False
    escalates: tuple[type[CallboardError], ...] = ()


class Intensity(msgspec.Struct, frozen=True, kw_only=True):
    """How many restarts are bearable, how long they count, and how they are spaced.

    A restart counts until the child has been up and well for `period_s`, however long it takes to
    start or to fail. So one that is never well for so long reaches the limit in the end. The first
    restart is immediate; each further one that counts waits twice as long.
    """

    restarts: int = 5
    period_s: float = 60.0
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
