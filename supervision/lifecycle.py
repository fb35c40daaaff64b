"""The control state machine: the only place that knows which verb is legal when. Pure.

| verb    | RUNNING            | PAUSED      | SUSPENDED                  |
|---------|--------------------|-------------|----------------------------|
| PAUSE   | → PAUSED           | no change   | no change                  |
| UNPAUSE | no change          | → RUNNING   | refused: resume first      |
| SUSPEND | → PAUSED, SUSPENDED| → SUSPENDED | no change, or other levels: refused |
| RESUME  | no change          | no change   | → what SUSPEND found       |
| STOP    | → STOPPED          | → STOPPED   | → STOPPED                  |
| STEP    | refused: pause first | → PAUSED  | refused: resume first      |
| UPDATE_WEIGHTS | refused: pause first | new weights | new weights, now or at RESUME |

A verb that did not have its effect everywhere leaves the tree under way: PAUSING, UNPAUSING,
SUSPENDING, RESUMING or STOPPING. Repeating the verb continues it. A tree that is SUSPENDING or
RESUMING counts as suspended and is paused throughout. While STOPPING and when STOPPED everything
but STOP is refused. So is, in any state, a time to drain that is negative or no number. A tree that
steps is PAUSING until it is paused again, and STEP is the one verb whose repetition is another.

A tree that updates its weights stays PAUSED or SUSPENDED. From when all parts have them ready they
are the ones that every part is to have. Until every part has said that it does, nothing may run;
repeating the verb continues it.
"""

import msgspec

from callboard.messages.control import (
    Pause,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
)

MAX_VERSION = 2**63 - 1

UNDER_WAY: dict[type[Verb], State] = {
    Pause: State.PAUSING,
    Unpause: State.UNPAUSING,
    Suspend: State.SUSPENDING,
    Resume: State.RESUMING,
    Stop: State.STOPPING,
    Step: State.PAUSING,
}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a verb means now: the verbs to relay down the tree, in order, or why not."""

    relay: tuple[Verb, ...] = ()
    refused: str = ""


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of the tree should be, however often it is restarted."""

    paused: bool = False
    suspended: Suspend | None = None
    weights: Weights | None = None  # None: those of the settings

    def after(self, verb: Verb) -> "Desired":
        """Return what is desired once a relayed verb has been sent."""
        match verb:
            case Pause():
                return msgspec.structs.replace(self, paused=True)
            case Unpause():
                return msgspec.structs.replace(self, paused=False, suspended=None)
            case Suspend():
                return msgspec.structs.replace(self, paused=True, suspended=verb)
            case Resume():
                return msgspec.structs.replace(self, paused=True, suspended=None)
            case UpdateWeights(phase=UpdatePhase.COMMIT):
                return msgspec.structs.replace(self, weights=verb.weights)
            case Stop() | Step() | UpdateWeights():
                return self

    def path(self, born: "Desired") -> tuple[Verb, ...]:
        """Return the verbs that bring a part there that was started when `born` was desired.

        A part that is born suspended has not taken the memory, and may not be paused for all that.
        """
        verbs: list[Verb] = []
        update = self._update(born)
        if self.paused or update:
            verbs.append(Pause())
        if self.suspended is not None:
            verbs.append(self.suspended)
        verbs += update
        if self.suspended is None and born.suspended is not None:
            verbs.append(Resume())
        if not self.paused and (born.paused or update):
            verbs.append(Unpause())
        return tuple(verbs)

    def _update(self, born: "Desired") -> list[Verb]:
        if self.weights is None or self.weights == born.weights:
            return []
        source, version = self.weights.source, self.weights.version
        return [UpdateWeights(source=source, version=version, phase=UpdatePhase.COMMIT)]


class Lifecycle:
    """Where the tree is, where a RESUME leads, and which weights all parts are to have."""

    def __init__(self, source: str = "") -> None:
        """`source` is where the weights of version 0 are read from."""
        self.state = State.STARTING
        self.weights = Weights(source=source, version=0)
        self._update: UpdateWeights | None = None  # that some parts may not have followed
        self._suspended: Suspend | None = None
        self._paused_by_verb = False

    def plan(self, verb: Verb) -> Plan:
        """Say what a verb means in the present state; changes nothing."""
        if self.state in (State.STOPPING, State.STOPPED, State.FAILED):
            if isinstance(verb, Stop) and self.state is not State.FAILED:
                return Plan(relay=(verb,) if self.state is State.STOPPING else ())
            return Plan(refused=f"the tree is {self.state}")
        if isinstance(verb, Pause | Stop) and not verb.drain_s >= 0:  # NaN, too
            return Plan(refused=f"drain_s is {verb.drain_s}, and must be 0 or more seconds")
        match verb:
            case Pause():
                return Plan(relay=() if self._is_paused else (verb,))
            case Unpause():
                return self._plan_unpause(verb)
            case Suspend():
                return self._plan_suspend(verb)
            case Resume():
                return self._plan_resume(verb)
            case Stop():
                return Plan(relay=(verb,))
            case Step():
                return self._plan_step(verb)
            case UpdateWeights():
                return self._plan_update(verb)

    def accept(self, verb: Verb) -> None:
        """An operator's verb is not refused: remember what a later RESUME has to lead back to."""
        if self._suspended is None and isinstance(verb, Pause | Unpause):
            self._paused_by_verb = isinstance(verb, Pause)

    def begin(self, verb: Verb) -> None:
        """A verb with an effect is being relayed."""
        if isinstance(verb, Suspend):
            self._suspended = verb
        if isinstance(verb, UpdateWeights):
            self._begin_update(verb)
        else:
            self.state = UNDER_WAY[type(verb)]

    def reach(self, verb: Verb) -> None:
        """A relayed verb has had its effect everywhere."""
        match verb:
            case Pause() | Step():
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
            case UpdateWeights(phase=UpdatePhase.COMMIT):
                self._update = None
            case UpdateWeights():
                pass

    @property
    def suspended(self) -> Suspend | None:
        """The levels that a SUSPEND has reached or is about to; None when there is none."""
        return self._suspended

    @property
    def _is_paused(self) -> bool:
        return self._suspended is not None or self.state is State.PAUSED

    @property
    def _mixed(self) -> str:
        """Why nothing may run while some parts may have other weights than the rest."""
        if self._update is None:
            return ""
        version = self._update.version
        return f"not all replicas are known to have weights {version}: repeat update-weights"

    def _begin_update(self, verb: UpdateWeights) -> None:
        if verb.phase is UpdatePhase.COMMIT:
            self.weights, self._update = verb.weights, verb

    def _plan_unpause(self, verb: Unpause) -> Plan:
        if self._suspended is not None:
            return Plan(refused="the tree is suspended: resume first")
        if self._mixed:
            return Plan(refused=self._mixed)
        return Plan(relay=() if self.state is State.RUNNING else (verb,))

    def _plan_suspend(self, verb: Suspend) -> Plan:
        if self._suspended is not None and self._suspended != verb:
            levels = f"kv={self._suspended.kv}, weights={self._suspended.weights}"
            return Plan(refused=f"the tree is suspended at other levels ({levels}): resume first")
        if self.state is State.SUSPENDED:
            return Plan()
        return Plan(relay=(verb,) if self._is_paused else (Pause(), verb))

    def _plan_resume(self, verb: Resume) -> Plan:
        if self._mixed:
            return Plan(refused=self._mixed)
        if self._suspended is not None:
            return Plan(relay=(verb,) if self._paused_by_verb else (verb, Unpause()))
        # Left in between by a SUSPEND or RESUME of which some part was late.
        between = self.state in (State.PAUSING, State.UNPAUSING) and not self._paused_by_verb
        return Plan(relay=(Unpause(),) if between else ())

    def _plan_step(self, verb: Step) -> Plan:
        if self._suspended is not None:
            return Plan(refused="the tree is suspended: resume first")
        if self.state is not State.PAUSED:
            return Plan(refused=f"the tree is {self.state}: pause first")
        if self._mixed:
            return Plan(refused=self._mixed)
        if verb.count < 1:
            return Plan(refused=f"count is {verb.count}, and must be 1 or more")
        return Plan(relay=(verb,))

    def _plan_update(self, verb: UpdateWeights) -> Plan:
        if self.state not in (State.PAUSED, State.SUSPENDED):
            first = "pause" if self._suspended is None else "suspend or resume"
            return Plan(refused=f"the tree is {self.state}: {first} first")
        if not verb.source:
            return Plan(refused="source is empty, and must say where the weights are")
        present = self.weights
        wanted = Weights(source=verb.source, version=verb.version or present.version + 1)
        if wanted == present:
            return Plan(relay=() if self._update is None else (self._update,))
        if not present.version < wanted.version <= MAX_VERSION:
            return Plan(
                refused=f"version is {wanted.version}, and must be above {present.version},"
                f" that of {present.source!r}, and at most {MAX_VERSION}"
            )
        prepare = UpdateWeights(source=wanted.source, version=wanted.version, keep_kv=verb.keep_kv)
        return Plan(relay=(prepare, msgspec.structs.replace(prepare, phase=UpdatePhase.COMMIT)))
