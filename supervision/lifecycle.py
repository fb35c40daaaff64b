"""The control state machine: the only place that knows which verb is legal when. Pure.

| verb    | RUNNING            | PAUSED      | SUSPENDED                  |
|---------|--------------------|-------------|----------------------------|
| PAUSE   | → PAUSED           | no change   | no change                  |
| UNPAUSE | no change          | → RUNNING   | refused: resume first      |
| SUSPEND | → PAUSED, SUSPENDED| → SUSPENDED | no change, or other levels: refused |
| RESUME  | no change          | no change   | → what SUSPEND found       |
| STOP    | → STOPPED          | → STOPPED   | → STOPPED                  |

While STOPPING and when STOPPED everything but STOP is refused.
"""

import msgspec

from callboard.messages.control import Pause, Resume, State, Stop, Suspend, Unpause, Verb

UNDER_WAY: dict[type[Verb], State] = {
    Pause: State.PAUSING,
    Unpause: State.UNPAUSING,
    Suspend: State.SUSPENDING,
    Resume: State.RESUMING,
    Stop: State.STOPPING,
}

SETTLED = frozenset({State.RUNNING, State.PAUSED, State.SUSPENDED, State.STOPPED, State.FAILED})
"""States a tree stays in by itself; the others lead to one of these."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb means now: the verbs to relay down the tree, in order, or why not."""

    relay: tuple[Verb, ...] = ()
    refused: str = ""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the tree should be, however often it is restarted."""

    paused: bool = False
    suspended: Suspend | None = None

    def after(self, verb: Verb) -> "Desired":
        """Return what is desired once a relayed verb has been sent."""
        match verb:
            case Pause():
                return msgspec.structs.replace(self, paused=True)
            case Unpause():
                return Desired()
            case Suspend():
                return Desired(paused=True, suspended=verb)
            case Resume():
                return Desired(paused=True)
            case Stop():
                return self

    def path(self) -> tuple[Verb, ...]:
        """Return the verbs that bring a freshly started part there."""
        if self.suspended is not None:
            return (Pause(), self.suspended)
        return (Pause(),) if self.paused else ()


class Lifecycle:
    """Where the tree is, and what its last SUSPEND found."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self._suspended: Suspend | None = None
        self._found = State.RUNNING

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb means in the present state; changes nothing."""
        if self.state in (State.STOPPING, State.STOPPED, State.FAILED):
            if isinstance(verb, Stop) and self.state is not State.FAILED:
                return Plan(relay=(verb,) if self.state is State.STOPPING else ())
            return Plan(refused=f"the tree is {self.state}")
        match verb:
            case Pause():
                return Plan(relay=() if self._at_rest else (verb,))
            case Unpause():
                return self._plan_unpause(verb)
            case Suspend():
                return self._plan_suspend(verb)
            case Resume():
                return self._plan_resume(verb)
            case Stop():
                return Plan(relay=(verb,))

    def begin(self, verb: Verb) -> None:
        """A verb with an effect is being relayed."""
        if isinstance(verb, Suspend) and self._suspended is None:
            self._suspended = verb
        self.state = UNDER_WAY[type(verb)]

    def note_found(self) -> None:
        """Remember the state a SUSPEND finds, for the RESUME that undoes it."""
        if self._suspended is None:
            self._found = State.PAUSED if self.state is State.PAUSED else State.RUNNING

    def reach(self, verb: Verb) -> None:
        """A relayed verb has had its effect everywhere."""
        match verb:
            case Pause():
                self.state = State.PAUSED
            case Unpause():
                self.state = State.RUNNING
            case Suspend():
                self.state = State.SUSPENDED
            case Resume():
                self._suspended = None
                self.state = State.PAUSED
            case Stop():
                self.state = State.STOPPED

    @property
    def _at_rest(self) -> bool:
        return self.state in (State.PAUSED, State.SUSPENDED)

    def _plan_unpause(self, verb: Unpause) -> Plan:
        if self._suspended is not None:
            return Plan(refused="the tree is suspended: resume first")
        return Plan(relay=() if self.state is State.RUNNING else (verb,))

    def _plan_suspend(self, verb: Suspend) -> Plan:
        if self._suspended is not None and self._suspended != verb:
            levels = f"kv={self._suspended.kv}, weights={self._suspended.weights}"
            return Plan(refused=f"the tree is suspended at other levels ({levels}): resume first")
        if self.state is State.SUSPENDED:
            return Plan()
        return Plan(relay=(verb,) if self.state is State.PAUSED else (Pause(), verb))

    def _plan_resume(self, verb: Resume) -> Plan:
        if self._suspended is None and self.state is not State.RESUMING:
            return Plan()
        back = (Unpause(),) if self._found is State.RUNNING else ()
        return Plan(relay=(verb, *back))
