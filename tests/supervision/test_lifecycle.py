"""The control state machine: every verb in every state."""

import itertools
import math

import pytest

from callboard.messages.control import (
    KVLevel,
    Pause,
    PauseMode,
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
    WeightsLevel,
)
from callboard.supervision.lifecycle import MAX_VERSION, Desired, Lifecycle, Plan

PAUSE, UNPAUSE, SUSPEND, RESUME, STOP = Pause(), Unpause(), Suspend(), Resume(), Stop()
STEP = Step(count=3)
DEEPER = Suspend(weights=WeightsLevel.DISCARD)
UPDATE = UpdateWeights(source="new", version=3)
COMMIT = UpdateWeights(source="new", version=3, phase=UpdatePhase.COMMIT)

NOTHING: tuple[Verb, ...] = ()
REFUSED = None

# What is relayed for PAUSE, UNPAUSE, SUSPEND, SUSPEND at other levels, RESUME, STOP, STEP and
# UPDATE_WEIGHTS.
TABLE: dict[State, tuple[tuple[Verb, ...] | None, ...]] = {
    State.STARTING: (
        (PAUSE,),
        (UNPAUSE,),
        (PAUSE, SUSPEND),
        (PAUSE, DEEPER),
        NOTHING,
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.RUNNING: (
        (PAUSE,),
        NOTHING,
        (PAUSE, SUSPEND),
        (PAUSE, DEEPER),
        NOTHING,
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.PAUSING: (
        (PAUSE,),
        (UNPAUSE,),
        (PAUSE, SUSPEND),
        (PAUSE, DEEPER),
        NOTHING,
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.PAUSED: (
        NOTHING,
        (UNPAUSE,),
        (SUSPEND,),
        (DEEPER,),
        NOTHING,
        (STOP,),
        (STEP,),
        (UPDATE, COMMIT),
    ),
    State.UNPAUSING: (
        (PAUSE,),
        (UNPAUSE,),
        (PAUSE, SUSPEND),
        (PAUSE, DEEPER),
        (UNPAUSE,),
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.SUSPENDING: (
        NOTHING,
        REFUSED,
        (SUSPEND,),
        REFUSED,
        (RESUME, UNPAUSE),
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.SUSPENDED: (
        NOTHING,
        REFUSED,
        NOTHING,
        REFUSED,
        (RESUME, UNPAUSE),
        (STOP,),
        REFUSED,
        (UPDATE, COMMIT),
    ),
    State.RESUMING: (
        NOTHING,
        REFUSED,
        (SUSPEND,),
        REFUSED,
        (RESUME, UNPAUSE),
        (STOP,),
        REFUSED,
        REFUSED,
    ),
    State.STOPPING: (REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, (STOP,), REFUSED, REFUSED),
    State.STOPPED: (REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, NOTHING, REFUSED, REFUSED),
    State.FAILED: (REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED),
}


VERBS: tuple[Verb, ...] = (PAUSE, UNPAUSE, SUSPEND, DEEPER, RESUME, STOP, STEP, UPDATE)

CELLS = [
    pytest.param(state, verb, wanted, id=f"{state}-{type(verb).__name__}-{number}")
    for state, row in TABLE.items()
    for number, (verb, wanted) in enumerate(zip(VERBS, row, strict=True))
]


def obey(tree: Lifecycle, verb: Verb, *, late: Verb | None = None) -> Plan:
    """Do what a root does with a verb, up to the step of which some part is late."""
    plan = tree.plan(verb)
    if plan.refused:
        return plan
    tree.accept(verb)
    for step in plan.relay:
        tree.begin(step)
        if step == late:
            break
        tree.reach(step)
    return plan


def tree_in(state: State) -> Lifecycle:
    """Bring a tree to a state in the way a root would."""
    tree = Lifecycle()
    if state is State.STARTING:
        return tree
    tree.state = State.RUNNING
    match state:
        case State.PAUSING:
            obey(tree, PAUSE, late=PAUSE)
        case State.PAUSED:
            obey(tree, PAUSE)
        case State.UNPAUSING:
            obey(tree, PAUSE)
            obey(tree, UNPAUSE, late=UNPAUSE)
        case State.SUSPENDING:
            obey(tree, SUSPEND, late=SUSPEND)
        case State.SUSPENDED:
            obey(tree, SUSPEND)
        case State.RESUMING:
            obey(tree, SUSPEND)
            obey(tree, RESUME, late=RESUME)
        case State.STOPPING:
            obey(tree, STOP, late=STOP)
        case State.STOPPED:
            obey(tree, STOP)
        case State.FAILED:
            tree.state = State.FAILED
        case _:
            pass
    assert tree.state is state
    return tree


@pytest.mark.parametrize(("state", "verb", "wanted"), CELLS)
def test_every_verb_means_in_every_state_what_the_table_says(
    state: State, verb: Verb, wanted: tuple[Verb, ...] | None
) -> None:
    plan = tree_in(state).plan(verb)

    assert bool(plan.refused) == (wanted is REFUSED)
    assert plan.relay == (wanted or NOTHING)


@pytest.mark.parametrize(("state", "verb", "wanted"), CELLS)
def test_a_plan_changes_nothing(state: State, verb: Verb, wanted: tuple[Verb, ...] | None) -> None:
    tree = tree_in(state)

    assert tree.plan(verb) == tree.plan(verb)
    assert tree.state is state


@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED, State.SUSPENDED, State.STOPPED])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != STEP])
def test_a_repeated_verb_but_step_has_no_further_effect(state: State, verb: Verb) -> None:
    tree = tree_in(state)
    if obey(tree, verb).refused:
        return
    reached = tree.state

    again = obey(tree, verb)

    assert again == Plan()
    assert tree.state is reached


@pytest.mark.parametrize(
    ("verb", "step"),
    [
        (PAUSE, PAUSE),
        (SUSPEND, PAUSE),
        (SUSPEND, SUSPEND),
        (STOP, STOP),
    ],
)
def test_repeating_a_verb_of_which_a_part_was_late_continues_it(verb: Verb, step: Verb) -> None:
    tree, undisturbed = tree_in(State.RUNNING), tree_in(State.RUNNING)
    obey(undisturbed, verb)

    obey(tree, verb, late=step)
    again = obey(tree, verb)

    assert step in again.relay
    assert tree.state is undisturbed.state


@pytest.mark.parametrize("step", [RESUME, UNPAUSE])
def test_repeating_a_resume_of_which_a_part_was_late_continues_it(step: Verb) -> None:
    tree = tree_in(State.SUSPENDED)

    obey(tree, RESUME, late=step)
    obey(tree, RESUME)

    assert tree.state is State.RUNNING


def test_repeating_an_unpause_of_which_a_part_was_late_continues_it() -> None:
    tree = tree_in(State.UNPAUSING)

    obey(tree, UNPAUSE)

    assert tree.state is State.RUNNING


@pytest.mark.parametrize("found", [State.RUNNING, State.PAUSED])
def test_resume_returns_to_the_state_that_suspend_found(found: State) -> None:
    tree = tree_in(found)

    obey(tree, SUSPEND)
    obey(tree, RESUME)

    assert tree.state is found


def test_a_pause_that_is_not_reached_yet_when_suspend_comes_is_found_by_resume() -> None:
    tree = tree_in(State.PAUSING)

    obey(tree, SUSPEND)
    obey(tree, RESUME)

    assert tree.state is State.PAUSED


def test_a_suspend_that_needs_a_second_try_to_pause_does_not_count_as_a_pause() -> None:
    tree = tree_in(State.RUNNING)

    obey(tree, SUSPEND, late=PAUSE)
    obey(tree, SUSPEND)
    obey(tree, RESUME)

    assert tree.state is State.RUNNING


def test_a_suspend_that_could_not_even_pause_is_undone_by_resume() -> None:
    tree = tree_in(State.RUNNING)

    obey(tree, SUSPEND, late=PAUSE)
    obey(tree, RESUME)

    assert tree.state is State.RUNNING


def test_a_pause_while_suspended_does_not_change_what_resume_returns_to() -> None:
    tree = tree_in(State.SUSPENDED)

    obey(tree, PAUSE)
    obey(tree, RESUME)

    assert tree.state is State.RUNNING


def test_what_suspend_found_is_found_anew_the_next_time() -> None:
    tree = tree_in(State.PAUSED)
    for verb in (SUSPEND, RESUME, UNPAUSE, SUSPEND, RESUME):
        obey(tree, verb)

    assert tree.state is State.RUNNING


LEVELS = [Suspend(kv=kv, weights=weights) for kv in KVLevel for weights in WeightsLevel]


@pytest.mark.parametrize("levels", LEVELS, ids=lambda verb: f"{verb.kv}-{verb.weights}")
@pytest.mark.parametrize("found", [State.RUNNING, State.PAUSED])
def test_whatever_the_levels_repeating_them_does_nothing_and_others_are_refused(
    found: State, levels: Suspend
) -> None:
    tree = tree_in(found)
    obey(tree, levels)

    plans = {other: tree.plan(other) for other in LEVELS}

    assert plans.pop(levels) == Plan()
    assert all(plan.refused and not plan.relay for plan in plans.values())
    obey(tree, RESUME)
    assert tree.state is found


def test_other_levels_are_refused_with_those_that_hold() -> None:
    tree = tree_in(State.SUSPENDED)

    refused = tree.plan(Suspend(kv=KVLevel.KEEP)).refused

    assert "kv=drop, weights=keep" in refused
    assert "resume first" in refused


def test_unpause_is_refused_while_suspended_with_what_to_do() -> None:
    assert "resume first" in tree_in(State.SUSPENDED).plan(UNPAUSE).refused


def test_a_tree_is_paused_again_after_each_step() -> None:
    tree = tree_in(State.PAUSED)

    plans = [obey(tree, STEP) for _ in range(3)]

    assert plans == [Plan(relay=(STEP,))] * 3
    assert tree.state is State.PAUSED


def test_a_step_of_which_a_part_was_late_is_on_its_way_to_paused() -> None:
    tree = tree_in(State.PAUSED)

    obey(tree, STEP, late=STEP)
    refused = obey(tree, STEP).refused
    again = obey(tree, PAUSE)

    assert refused == "the tree is pausing: pause first"
    assert again.relay == (PAUSE,)
    assert tree.state is State.PAUSED


def test_a_step_does_not_change_what_resume_returns_to() -> None:
    tree = tree_in(State.PAUSED)
    for verb in (STEP, SUSPEND, RESUME):
        obey(tree, verb)

    assert tree.state is State.PAUSED


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.RUNNING, "the tree is running: pause first"),
        (State.PAUSING, "the tree is pausing: pause first"),
        (State.SUSPENDED, "the tree is suspended: resume first"),
        (State.RESUMING, "the tree is suspended: resume first"),
    ],
)
def test_a_step_that_is_refused_says_what_to_do_first(state: State, reason: str) -> None:
    assert tree_in(state).plan(STEP).refused == reason


# New weights.


@pytest.mark.parametrize("state", [State.PAUSED, State.SUSPENDED])
def test_new_weights_are_prepared_everywhere_before_they_are_used_anywhere(state: State) -> None:
    tree = tree_in(state)

    plan = obey(tree, UpdateWeights(source="new", version=3, keep_kv=True))

    assert [step.phase for step in plan.relay if isinstance(step, UpdateWeights)] == [
        UpdatePhase.PREPARE,
        UpdatePhase.COMMIT,
    ]
    assert all(isinstance(step, UpdateWeights) and step.keep_kv for step in plan.relay)
    assert tree.weights == Weights(source="new", version=3)
    assert tree.state is state


def test_a_tree_whose_parts_did_not_all_prepare_is_to_have_what_it_had() -> None:
    tree = tree_in(State.PAUSED)

    obey(tree, UPDATE, late=UPDATE)

    assert tree.weights == Weights(source="", version=0)
    assert not tree.plan(UNPAUSE).refused
    assert tree.plan(UPDATE).relay == (UPDATE, COMMIT)


@pytest.mark.parametrize("state", [State.PAUSED, State.SUSPENDED])
def test_nothing_runs_before_all_parts_have_the_new_weights(state: State) -> None:
    tree = tree_in(state)
    obey(tree, UPDATE, late=COMMIT)

    refused = [tree.plan(verb).refused for verb in (UNPAUSE, STEP, RESUME)]
    again = obey(tree, UPDATE)

    wanted = "not all replicas are known to have weights 3: repeat update-weights"
    if state is State.SUSPENDED:
        assert refused == ["the tree is suspended: resume first"] * 2 + [wanted]
    else:
        assert refused == [wanted] * 3
    assert again == Plan(relay=(COMMIT,))
    assert not obey(tree, RESUME if state is State.SUSPENDED else UNPAUSE).refused
    assert tree.state is State.RUNNING


def test_pausing_suspending_and_stopping_go_on_while_parts_are_late_with_new_weights() -> None:
    tree = tree_in(State.PAUSED)
    obey(tree, UPDATE, late=COMMIT)

    assert tree.plan(PAUSE) == Plan()
    assert tree.plan(SUSPEND).relay == (SUSPEND,)
    assert tree.plan(STOP).relay == (STOP,)


def test_later_weights_can_follow_an_update_of_which_a_part_was_late() -> None:
    tree = tree_in(State.PAUSED)
    obey(tree, UPDATE, late=COMMIT)

    later = obey(tree, UpdateWeights(source="newer"))

    assert [step.version for step in later.relay if isinstance(step, UpdateWeights)] == [4, 4]
    assert not tree.plan(UNPAUSE).refused


def test_without_a_version_each_update_is_one_more() -> None:
    tree = tree_in(State.PAUSED)

    for _ in range(2):
        obey(tree, UpdateWeights(source="new"))

    assert tree.weights == Weights(source="new", version=2)


@pytest.mark.parametrize(
    ("source", "version", "reason"),
    [
        ("new", 2, "version is 2, and must be above 3, that of 'new'"),
        ("other", 3, "version is 3, and must be above 3, that of 'new'"),
        ("new", -1, "version is -1, and must be above 3, that of 'new'"),
        ("new", MAX_VERSION + 1, f"version is {MAX_VERSION + 1}, and must be above 3"),
        ("", 4, "source is empty, and must say where the weights are"),
    ],
)
def test_versions_only_grow_and_name_one_source(source: str, version: int, reason: str) -> None:
    tree = tree_in(State.PAUSED)
    obey(tree, UPDATE)

    assert tree.plan(UpdateWeights(source=source, version=version)).refused.startswith(reason)


def test_an_operator_cannot_skip_a_phase() -> None:
    tree = tree_in(State.PAUSED)

    assert tree.plan(COMMIT).relay == (UPDATE, COMMIT)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State.RUNNING, "the tree is running: pause first"),
        (State.PAUSING, "the tree is pausing: pause first"),
        (State.UNPAUSING, "the tree is unpausing: pause first"),
        (State.SUSPENDING, "the tree is suspending: suspend or resume first"),
        (State.RESUMING, "the tree is resuming: suspend or resume first"),
    ],
)
def test_an_update_that_is_refused_says_what_to_do_first(state: State, reason: str) -> None:
    assert tree_in(state).plan(UPDATE).refused == reason


@pytest.mark.parametrize("found", [State.RUNNING, State.PAUSED])
def test_an_update_does_not_change_what_resume_returns_to(found: State) -> None:
    tree = tree_in(found)
    for verb in (SUSPEND, UPDATE, RESUME):
        obey(tree, verb)

    assert tree.state is found


@pytest.mark.parametrize("count", [0, -1])
def test_no_steps_at_all_are_refused(count: int) -> None:
    refused = tree_in(State.PAUSED).plan(Step(count=count)).refused

    assert refused == f"count is {count}, and must be 1 or more"


@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED, State.FAILED])
def test_a_refusal_at_the_end_names_the_state(state: State) -> None:
    assert str(state) in tree_in(state).plan(PAUSE).refused


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_is_relayed_with_its_mode(mode: PauseMode) -> None:
    verb = Pause(mode=mode, drain_s=7.0)

    assert tree_in(State.RUNNING).plan(verb).relay == (verb,)


@pytest.mark.parametrize("drain_s", [math.nan, -1.0, -math.inf])
@pytest.mark.parametrize("kind", [Pause, Stop])
@pytest.mark.parametrize("state", [State.RUNNING, State.PAUSED])
def test_a_time_to_drain_that_is_none_is_refused_with_what_is_allowed(
    state: State, kind: type[Pause | Stop], drain_s: float
) -> None:
    plan = tree_in(state).plan(kind(drain_s=drain_s))

    assert plan == Plan(refused=f"drain_s is {drain_s}, and must be 0 or more seconds")


@pytest.mark.parametrize("drain_s", [0.0, 1e300, math.inf])
def test_requests_may_be_given_any_time_to_drain(drain_s: float) -> None:
    for verb in (Pause(mode=PauseMode.DRAIN, drain_s=drain_s), Stop(drain_s=drain_s)):
        assert tree_in(State.RUNNING).plan(verb).relay == (verb,)


# What a part should be, however often it is restarted.


@pytest.mark.parametrize(
    ("verbs", "wanted"),
    [
        ((), Desired()),
        ((PAUSE,), Desired(paused=True)),
        ((PAUSE, UNPAUSE), Desired()),
        ((PAUSE, SUSPEND), Desired(paused=True, suspended=SUSPEND)),
        ((PAUSE, SUSPEND, PAUSE), Desired(paused=True, suspended=SUSPEND)),
        ((PAUSE, SUSPEND, RESUME), Desired(paused=True)),
        ((PAUSE, SUSPEND, RESUME, UNPAUSE), Desired()),
        ((PAUSE, STOP), Desired(paused=True)),
        ((PAUSE, STEP), Desired(paused=True)),
        ((PAUSE, UPDATE), Desired(paused=True)),
        ((PAUSE, COMMIT), Desired(paused=True, weights=COMMIT.weights)),
        ((PAUSE, SUSPEND, COMMIT, RESUME, UNPAUSE), Desired(weights=COMMIT.weights)),
    ],
)
def test_the_desired_state_follows_the_verbs_that_were_sent(
    verbs: tuple[Verb, ...], wanted: Desired
) -> None:
    desired = Desired()
    for verb in verbs:
        desired = desired.after(verb)

    assert desired == wanted


DESIRED = (
    Desired(),
    Desired(paused=True),
    Desired(paused=True, suspended=SUSPEND),
    Desired(paused=True, suspended=DEEPER),
    Desired(weights=COMMIT.weights),
    Desired(paused=True, weights=COMMIT.weights),
    Desired(paused=True, suspended=DEEPER, weights=COMMIT.weights),
)


class Part:
    """A part of a tree that takes note; it is born without memory where that is desired."""

    def __init__(self, born: Desired, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.memory = born.suspended is None
        self.weights = born.weights

    def obey(self, verb: Verb) -> None:
        match verb:
            case Pause():
                self.is_paused = True
            case Unpause():
                self.is_paused = False
            case Suspend():
                assert self.is_paused, "memory is not taken from what runs"
                self.memory = False
            case Resume():
                self.memory = True
            case UpdateWeights():
                assert verb.phase is UpdatePhase.COMMIT
                assert self.is_paused, "weights are not taken from what runs"
                self.weights = verb.weights
            case Stop() | Step():
                raise AssertionError("nothing is stopped or stepped to bring it somewhere")


@pytest.mark.parametrize(("born", "desired"), list(itertools.product(DESIRED, DESIRED)))
@pytest.mark.parametrize("is_paused_at_birth", [False, True])
def test_the_path_leads_from_whatever_a_part_was_born_as_to_what_is_desired(
    born: Desired, desired: Desired, is_paused_at_birth: bool
) -> None:
    part = Part(born, is_paused=born.paused and is_paused_at_birth)

    for verb in desired.path(born):
        part.obey(verb)

    assert part.is_paused == desired.paused
    assert part.memory == (desired.suspended is None)
    if desired.weights is not None:  # once there are others, those of the settings are named too
        assert part.weights == desired.weights


def test_a_part_that_should_run_and_was_born_so_needs_no_verb() -> None:
    assert Desired().path(Desired()) == ()
