"""Supervisors beside the rows of OTP's documentation that `test_supervisor` has no test for.

| OTP                                             | test                                           |
|-------------------------------------------------|------------------------------------------------|
| children start left to right, stop right to left| test_supervisor: starts and stops              |
| a child that does not start stops the others    | test_supervisor: a failed start                |
| permanent, transient, temporary                 | test_supervisor: restarted as its spec says    |
| one_for_one, one_for_all, rest_for_one          | test_supervisor: whom it should in order       |
| shutdown: a time, then kill                     | test_supervisor: ignores stop, is busy         |
| shutdown: brutal_kill, infinity                 | here                                           |
| intensity: stop all, then fail upwards          | test_supervisor: more failures than bearable   |
| intensity of levels multiplies                  | here                                           |
| significant, auto_shutdown                      | here                                           |
| wrong flags: the supervisor does not start      | here                                           |

Different from OTP, and tested here and in `test_strategy`: restarts are spaced; they count until
there was a period of health; failures named in a spec escalate at once; and a supervisor that gave
up has failed, so it is restarted where it is transient.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Actor, ActorExited
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.messages.base import Message
from callboard.messages.errors import DeviceError, DeviceLost, OutOfMemory
from callboard.supervision.spec import (
    KILL,
    AutoShutdown,
    ChildSpec,
    Intensity,
    Restart,
    Strategy,
)
from callboard.supervision.supervisor import Supervisor

ANY, ALL = AutoShutdown.ANY_SIGNIFICANT, AutoShutdown.ALL_SIGNIFICANT
PATIENT = Intensity(restarts=100, backoff_s=0.0)


class Fail(Message, frozen=True):
    """Test → child: fail, of a device's error of that name or of a common one."""

    error: str = ""


class End(Message, frozen=True):
    """Test → child: end in good order."""


class Part(Actor[Fail | End]):
    """A child that writes down its starts and its ends."""

    def __init__(self, diary: list[str], *, start_s: float = 0.0, stop_s: float = 0.0) -> None:
        self._diary = diary
        self._start_s = start_s
        self._stop_s = stop_s

    async def on_start(self) -> None:
        await trio.sleep(self._start_s)
        self._diary.append(f"+{self.name}")

    async def on_stopping(self) -> None:
        await trio.sleep(self._stop_s)
        self._diary.append(f"bye {self.name}")

    async def on_stop(self) -> None:
        await trio.lowlevel.checkpoint()  # cleaning up takes a moment, and there is one
        self._diary.append(f"-{self.name}")

    async def receive(self, message: Fail | End) -> None:
        match message:
            case Fail(error=""):
                raise RuntimeError("ouch")
            case Fail(error=name):
                raise {"lost": DeviceLost, "memory": OutOfMemory}[name]("ouch")
            case End():
                self.cell.cancel("told to end")
                await trio.sleep_forever()


class Family:
    """A supervisor, its children by name, and what became of them."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.diary: list[str] = []
        self.exited: ActorExited | None = None
        self._nursery = nursery

    def part(
        self, name: str, *, start_s: float = 0.0, stop_s: float = 0.0, **spec: Any
    ) -> ChildSpec:
        def start() -> Part:
            return Part(self.diary, start_s=start_s, stop_s=stop_s)

        return ChildSpec(name=name, start=start, **spec)

    def group(
        self, name: str, *children: ChildSpec, spec: dict[str, Any], **flags: Any
    ) -> ChildSpec:
        return ChildSpec(
            name=name, start=lambda: Supervisor(self.system, children, **flags), **spec
        )

    async def live(self, *children: ChildSpec, **flags: Any) -> None:
        flags.setdefault("intensity", PATIENT)

        async def run(task_status: trio.TaskStatus[None]) -> None:
            self.exited = await self.system.cell("top").run(
                lambda: Supervisor(self.system, children, **flags), task_status=task_status
            )

        await self._nursery.start(run)

    async def tell(self, name: str, message: Message) -> None:
        await LocalRef[Any](self.system.cell(name)).tell(message)
        for _ in range(5):
            await wait_all_tasks_blocked()

    def lives(self, name: str) -> int:
        return self.system.cell(name).lives

    @property
    def ended_well(self) -> bool:
        return self.exited is not None and self.exited.failure is None


@pytest.fixture
async def family() -> AsyncIterator[Family]:
    with trio.fail_after(100_000):
        async with open_system() as system, trio.open_nursery() as nursery:
            yield Family(system, nursery)
            await system.cell("top").stop(1000.0)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


# Significant children


@pytest.mark.parametrize(
    ("restart", "message", "auto", "ends"),
    [
        (Restart.TRANSIENT, End(), ANY, True),
        (Restart.TRANSIENT, Fail(), ANY, False),  # it is restarted
        (Restart.TEMPORARY, End(), ANY, True),
        (Restart.TEMPORARY, Fail(), ANY, True),
        (Restart.TRANSIENT, End(), ALL, False),
    ],
)
async def test_a_supervisor_ends_in_good_order_with_a_significant_child(
    autojump_clock: MockClock,
    family: Family,
    restart: Restart,
    message: Message,
    auto: AutoShutdown,
    ends: bool,
) -> None:
    significant: dict[str, Any] = {"restart": restart, "significant": True}
    children = [family.part("a"), family.part("b", **significant), family.part("c", **significant)]
    await family.live(*children, auto_shutdown=auto)
    family.diary.clear()

    await family.tell("b", message)

    assert family.ended_well is ends
    if ends:
        assert family.diary == ["-b", "bye c", "-c", "bye a", "-a"]


async def test_a_supervisor_may_end_with_the_last_of_its_significant_children(
    autojump_clock: MockClock,
    family: Family,
) -> None:
    significant: dict[str, Any] = {"restart": Restart.TRANSIENT, "significant": True}
    children = [family.part("a"), family.part("b", **significant), family.part("c", **significant)]
    await family.live(*children, auto_shutdown=ALL)

    await family.tell("c", End())
    assert not family.ended_well
    await family.tell("b", End())

    assert family.ended_well


async def test_a_significant_child_that_goes_with_its_sibling_ends_nobody(
    autojump_clock: MockClock, family: Family
) -> None:
    significant: dict[str, Any] = {"restart": Restart.TEMPORARY, "significant": True}
    children = [family.part("a"), family.part("b", **significant), family.part("c")]
    await family.live(*children, auto_shutdown=ANY, strategy=Strategy.ONE_FOR_ALL)

    await family.tell("a", Fail())

    assert family.exited is None
    assert [family.lives(name) for name in "abc"] == [2, 1, 2]


@pytest.mark.parametrize(("restart", "lives"), [(Restart.TRANSIENT, 1), (Restart.PERMANENT, 2)])
async def test_the_one_above_sees_an_orderly_end(
    autojump_clock: MockClock, family: Family, restart: Restart, lives: int
) -> None:
    significant = family.part("a", restart=Restart.TRANSIENT, significant=True)
    group = family.group("group", significant, spec={"restart": restart}, auto_shutdown=ANY)
    await family.live(group)

    await family.tell("a", End())

    assert family.lives("group") == lives


async def test_children_that_do_not_fit_are_refused(
    autojump_clock: MockClock, family: Family
) -> None:
    def refused(match: str, child: ChildSpec, **flags: Any) -> None:
        with pytest.raises(ValueError, match=match):
            Supervisor(family.system, [child], **flags)

    transient = Restart.TRANSIENT
    refused("transient or temporary", family.part("a", significant=True), auto_shutdown=ANY)
    refused("never", family.part("a", significant=True, restart=transient))
    refused("is -1", family.part("a", shutdown_s=-1))
    refused("is nan", family.part("a", shutdown_s=float("nan")))


# The time to stop


async def test_a_child_to_be_killed_is_not_asked_and_can_clean_up(
    autojump_clock: MockClock, family: Family
) -> None:
    await family.live(family.part("a", shutdown_s=KILL, stop_s=50.0))
    began = trio.current_time()

    await family.system.cell("top").stop()

    assert family.diary == ["+a", "-a"]
    assert trio.current_time() - began < 1.0


async def test_a_child_may_have_all_the_time_it_needs(
    autojump_clock: MockClock, family: Family
) -> None:
    await family.live(family.part("a", shutdown_s=float("inf"), stop_s=5000.0))

    await family.system.cell("top").stop(10_000.0)

    assert family.diary == ["+a", "bye a", "-a"]


# Intensity


async def test_the_restarts_of_levels_multiply(autojump_clock: MockClock, family: Family) -> None:
    twice = Intensity(restarts=2, backoff_s=0.0)
    group = family.group("group", family.part("a"), spec={}, intensity=twice)
    await family.live(group, intensity=twice)

    for _ in range(9):
        assert family.exited is None
        await family.tell("a", Fail())

    assert (family.lives("a"), family.lives("group")) == (9, 3)
    assert family.exited is not None
    assert family.exited.failure is not None
    assert "group failed again after 2 restarts" in family.exited.failure.message


async def test_a_group_that_takes_long_to_give_up_each_time_is_given_up_too(
    autojump_clock: MockClock,
    family: Family,
) -> None:
    # The group is up for five minutes each time, in which its child is never up for one.
    twice = Intensity(restarts=2, period_s=60.0, backoff_s=0.0)
    group = family.group("group", family.part("a", start_s=100.0), spec={}, intensity=twice)
    await family.live(group, intensity=twice)

    for _ in range(9):
        assert family.exited is None
        await family.tell("a", Fail())
        await trio.sleep(150.0)  # it starts, and is up for a while

    assert family.exited is not None
    assert family.exited.failure is not None
    assert family.exited.failure.code == "RestartIntensityReached"


async def test_a_transient_supervisor_that_gave_up_is_restarted(
    autojump_clock: MockClock, family: Family
) -> None:
    never = Intensity(restarts=0)
    spec = {"restart": Restart.TRANSIENT}
    await family.live(family.group("group", family.part("a"), spec=spec, intensity=never))

    await family.tell("a", Fail())

    assert (family.lives("a"), family.lives("group")) == (2, 2)


# Failures that no restart mends


@pytest.mark.parametrize(("error", "lives"), [("lost", 1), ("memory", 2), ("", 2)])
async def test_a_failure_that_escalates_is_no_restart(
    autojump_clock: MockClock, family: Family, error: str, lives: int
) -> None:
    await family.live(family.part("a", escalates=(DeviceLost,)), family.part("b"))
    family.diary.clear()

    await family.tell("a", Fail(error=error))

    assert (family.lives("a"), family.lives("b")) == (lives, 1)
    if lives == 1:
        assert family.diary == ["-a", "bye b", "-b"]
        assert family.exited is not None
        assert family.exited.failure is not None
        assert isinstance(family.exited.failure.error(), DeviceLost)


async def test_a_restart_that_fails_of_what_escalates_is_not_tried_again(
    autojump_clock: MockClock, family: Family
) -> None:
    class Lost(Part):
        async def on_start(self) -> None:
            if self.cell.lives > 1:
                raise DeviceLost("for good")

    lost = ChildSpec(name="a", start=lambda: Lost(family.diary), escalates=(DeviceLost,))
    await family.live(family.group("group", lost, spec={"escalates": (DeviceLost,)}))

    await family.tell("a", Fail())

    assert (family.lives("a"), family.lives("group")) == (2, 1)
    assert family.exited is not None
    assert family.exited.failure is not None
    assert isinstance(family.exited.failure.error(), DeviceLost)


async def test_a_failure_escalates_to_the_level_that_can_do_something_about_it(
    autojump_clock: MockClock,
    family: Family,
) -> None:
    child = family.part("a", escalates=(DeviceError,))
    await family.live(family.group("group", child, spec={}), family.part("b"))

    await family.tell("a", Fail(error="lost"))

    assert [family.lives(name) for name in ("a", "group", "b")] == [2, 2, 1]
