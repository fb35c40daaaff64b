"""What root makes of hosts that come, go and fall silent; the hosts are played, on a mock clock."""

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import REACHED
from callboard.actors.ref import LocalRef
from callboard.actors.session import SILENCE_LIMIT_S, Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.tickets import Tickets
from callboard.actors.transport import MemoryNetwork
from callboard.messages.base import Message
from callboard.messages.control import (
    ControlReply,
    GetNode,
    GetStatus,
    NodeStatus,
    Pause,
    State,
    StatusReply,
    Stop,
    Suspend,
    Unpause,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
    verb_name,
)
from callboard.messages.errors import (
    AccessDenied,
    CallboardError,
    ConfigError,
    Failure,
    NameInUse,
    StartFailed,
    Unreachable,
)
from callboard.messages.membership import (
    PROTOCOL_VERSION,
    Hello,
    HostUp,
    ReplicaFailed,
    Role,
    StartHost,
)
from callboard.supervision.joined import HOLD_S, FromHost, JoinedHosts, ToHost
from callboard.supervision.root import JOINED, Address, FromOperator, Root, ToOperator
from callboard.supervision.settings import Settings
from callboard.supervision.spec import ChildSpec

CONTROL = "memory://control"


class Host:
    """A host that does at once what it is told, and writes it down."""

    def __init__(self, house: "House", name: str) -> None:
        self.heard: list[Message] = []
        self.left = trio.Event()
        self.left_for_good = False
        self.start_s = 0.0
        self.fails: CallboardError | None = None  # at its start
        self.refuses: type[Verb] | None = None
        self.reason = "no"
        self.node: NodeStatus | None = None
        self.state = State.STARTING
        self.connection = Connection(
            house.system,
            house.network,
            CONTROL,
            role=Role.REPLICA,
            name=name,
            inbox=ToHost,
            outbox=FromHost,
            deliver=self._deliver,
            once=True,
        )
        self._name = name
        self._house = house

    @property
    def verbs(self) -> list[Any]:
        return [message for message in self.heard if isinstance(message, Verb)]

    @property
    def order(self) -> StartHost:
        return next(message for message in self.heard if isinstance(message, StartHost))

    async def join(self) -> "Host":
        self._house.nursery.start_soon(self.connection.run)
        await self.connection.wait_welcome()
        return self

    async def fall_silent(self) -> None:
        """Be gone without a word, as when its machine is; returns when root has noticed."""
        self.connection.close(goodbye=False)
        with trio.fail_after(SILENCE_LIMIT_S + 2.0):
            while self._house.may_register(self.order.ticket):  # noqa: ASYNC110  # a set
                await trio.sleep(0.1)

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said():
                self.heard.append(event.message)
                self._house.nursery.start_soon(self._answer, event)
            case Left(for_good=for_good):
                self.left_for_good = for_good
                self.left.set()
            case Joined():
                pass

    async def _answer(self, said: Said) -> None:
        answer: object
        match said.message:
            case StartHost():
                await trio.sleep(self.start_s)
                self.state = State.PAUSED
                answer = self.fails or HostUp(pid=7)
            case GetNode():
                inner = NodeStatus(name=f"{self._name}-0", kind="ReplicaProcess", state=self.state)
                answer = self.node or NodeStatus(
                    name=self._name, kind="Supervisor", state=self.state, children=(inner,)
                )
            case verb:
                refused = self.reason if isinstance(verb, self.refuses or ()) else ""
                if not refused:
                    self.state = REACHED.get(type(verb), self.state)
                answer = ControlReply(verb=verb_name(verb), state=self.state, refused=refused)
        self.connection.answer(said.message_id, answer)


class House:
    """A root that takes hosts in, and an operator."""

    def __init__(self, system: ActorSystem, nursery: trio.Nursery) -> None:
        self.system = system
        self.nursery = nursery
        self.network = MemoryNetwork()
        self.tickets = Tickets()
        self.settings = Settings(model="a-model", start_timeout_s=100.0)
        self.root: Root = Root(
            system,
            [
                ChildSpec(
                    name=JOINED,
                    start=partial(
                        JoinedHosts,
                        system,
                        self.settings,
                        self.tickets,
                        lambda: self.root.listener,
                    ),
                )
            ],
            network=self.network,
            control_endpoint=CONTROL,
            address=Address("memory://coordinator"),
            model="a-model",
            version="1",
            coordinator=LocalRef(system.cell("coordinator")),
            hosts=LocalRef(system.cell(JOINED)),
        )
        self.operator = Connection(
            system,
            self.network,
            CONTROL,
            role=Role.OPERATOR,
            name="operator",
            inbox=ToOperator,
            outbox=FromOperator,
            deliver=ignore,
        )

    async def open(self) -> None:
        async def live(task_status: trio.TaskStatus[None]) -> None:
            await self.system.cell("root").run(lambda: self.root, task_status=task_status)

        await self.nursery.start(live)
        self.nursery.start_soon(self.operator.run)
        await self.operator.wait_welcome()
        await self.root.started.wait()

    async def host(self, name: str = "box") -> Host:
        """Have a host join; returns when it is what the tree is."""
        host = await Host(self, name).join()
        await self.settle()
        return host

    async def settle(self) -> None:
        await trio.sleep(0.01)
        await wait_all_tasks_blocked()

    async def ask(self, verb: Verb, timeout: float = 60.0) -> ControlReply:
        return await self.operator.ask(verb, timeout=timeout)

    async def status(self) -> StatusReply:
        return await self.operator.ask(GetStatus(), timeout=60.0)

    async def places(self) -> dict[str, State]:
        """Return the places of hosts, and the states they are in."""
        [joined] = (await self.status()).tree.children
        return {node.name: node.state for node in joined.children}

    def hello(self, ticket: str, name: str = "box-0") -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            role=Role.REPLICA,
            name=name,
            incarnation=1,
            schema="",
            ticket=ticket,
        )

    def may_register(self, ticket: str, name: str = "box-0") -> bool:
        try:
            self.tickets.check(self.hello(ticket, name))
        except AccessDenied:
            return False
        return True


async def ignore(event: Said | Joined | Left) -> None:
    """Only answers come to an operator."""


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_system() as system, trio.open_nursery() as nursery:
        house = House(system, nursery)
        await house.open()
        yield house
        await system.cell("root").stop()
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="callboard")


# Coming


async def test_a_host_is_told_the_settings_and_runs_when_the_tree_does(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()

    assert msgspec.json.decode(host.order.settings, type=Settings) == house.settings
    assert house.may_register(host.order.ticket)
    assert host.verbs == [Unpause()]
    status = await house.status()
    assert [(one.name, one.state) for one in status.replicas] == [("box-0", State.RUNNING)]


async def test_a_host_that_comes_to_a_paused_tree_stays_paused(
    autojump_clock: MockClock, house: House
) -> None:
    await house.ask(Pause())
    host = await house.host()

    assert host.verbs == [Pause()]
    assert host.state is State.PAUSED


async def test_a_host_that_comes_to_a_suspended_tree_is_born_without_its_memory(
    autojump_clock: MockClock,
    house: House,
) -> None:
    await house.ask(Suspend())
    host = await house.host()

    assert host.order.suspended == Suspend()
    assert host.state is State.SUSPENDED


async def test_a_host_that_comes_after_an_update_is_born_with_the_new_weights(
    autojump_clock: MockClock,
    house: House,
) -> None:
    await house.ask(Pause())
    await house.ask(UpdateWeights(source="new", version=3))
    host = await house.host()

    assert host.order.weights is not None
    assert (host.order.weights.source, host.order.weights.version) == ("new", 3)


async def test_no_verb_waits_for_a_host_that_starts_and_it_comes_up_as_they_said(
    autojump_clock: MockClock,
    house: House,
) -> None:
    host = Host(house, "box")
    host.start_s = 50.0
    await host.join()
    await trio.sleep(1.0)
    began = trio.current_time()

    assert (await house.ask(Pause())).done
    assert (await house.ask(UpdateWeights(source="new", version=1))).done
    assert trio.current_time() == began
    assert await house.places() == {"joined/box": State.STARTING}

    await trio.sleep(60.0)
    commit = UpdateWeights(source="new", version=1, phase=UpdatePhase.COMMIT)
    assert host.verbs == [Pause(), commit]
    assert await house.places() == {"joined/box": State.PAUSED}


async def test_verbs_reach_every_host(autojump_clock: MockClock, house: House) -> None:
    hosts = [await house.host(name) for name in ("a", "b")]

    paused = await house.ask(Pause())
    unpaused = await house.ask(Unpause())

    assert [child.name for child in paused.children] == ["joined/a", "joined/b"]
    assert unpaused.done
    assert [host.verbs for host in hosts] == [[Unpause(), Pause(), Unpause()]] * 2


@pytest.mark.parametrize("name", ["", "a/b", "replica", "x" * 64, "-x", "a b"])
async def test_a_host_with_a_name_that_it_cannot_have_is_refused(
    autojump_clock: MockClock, house: House, name: str
) -> None:
    with pytest.raises(ConfigError, match="a host cannot be named"):
        await Host(house, name).join()
    assert await house.places() == {}


async def test_a_name_belongs_to_the_host_that_is_here(
    autojump_clock: MockClock, house: House
) -> None:
    first = await house.host()

    with pytest.raises(NameInUse):
        await Host(house, "box").join()

    assert not first.left.is_set()


async def test_a_host_that_cannot_start_has_no_place(
    autojump_clock: MockClock, house: House
) -> None:
    host = Host(house, "box")
    host.fails = ConfigError("no such file")
    await host.join()
    await house.settle()

    assert await house.places() == {}
    assert not house.may_register(host.order.ticket)
    await host.left.wait()


async def test_a_host_may_take_longer_to_start_than_a_replica(
    autojump_clock: MockClock, house: House
) -> None:
    host = Host(house, "box")
    host.start_s = 3 * house.settings.start_timeout_s
    await host.join()
    await trio.sleep(host.start_s + 1.0)

    assert await house.places() == {"joined/box": State.RUNNING}


async def test_the_replicas_of_a_host_that_starts_get_no_requests(
    autojump_clock: MockClock, house: House
) -> None:
    released: list[float] = []
    house.tickets.on_release = lambda: released.append(trio.current_time())
    host = Host(house, "box")
    host.start_s = 50.0
    await host.join()
    await trio.sleep(1.0)

    assert house.may_register(host.order.ticket)
    assert house.tickets.holds(house.hello(host.order.ticket))
    await trio.sleep(50.0)
    assert not house.tickets.holds(house.hello(host.order.ticket))
    assert len(released) == 1


async def test_memory_that_a_starting_host_may_take_is_waited_for(
    autojump_clock: MockClock, house: House
) -> None:
    host = Host(house, "box")
    host.start_s = 50.0
    await host.join()
    await trio.sleep(1.0)

    assert (await house.ask(Suspend(), timeout=5.0)).late == ("joined/box",)
    suspended = await house.ask(Suspend())

    assert suspended.done
    assert host.state is State.SUSPENDED


async def test_what_the_tree_was_started_with_has_a_name_of_its_own_on_a_host(
    autojump_clock: MockClock, house: House
) -> None:
    hosts = [await house.host(name) for name in ("a", "b")]
    hosts[1].refuses = UpdateWeights
    await house.ask(Pause())
    with_new = await house.ask(UpdateWeights(source="new", version=3))

    assert with_new.refused
    hosts[1].refuses = None
    assert (await house.status()).model == "a-model"
    late = await house.host("c")
    assert late.order.weights in (None, Weights(source="", version=0))


# Going


async def test_a_host_that_says_goodbye_has_its_place_no_more(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    host.connection.close()
    await house.settle()

    assert await house.places() == {}
    assert not house.may_register(host.order.ticket)
    assert (await house.ask(Pause())).done


async def test_a_pause_waits_until_a_host_that_was_lost_can_have_nothing_that_runs(
    autojump_clock: MockClock,
    house: House,
) -> None:
    host = await house.host()
    await host.fall_silent()
    lost_at = trio.current_time()

    assert not house.may_register(host.order.ticket)
    late = await house.ask(Pause(), timeout=5.0)
    assert late.late == ("joined/box",)
    assert (await house.status()).state is State.PAUSING

    assert (await house.ask(Pause())).done
    assert HOLD_S - 5.0 < trio.current_time() - lost_at < HOLD_S + 5.0
    assert await house.places() == {}


async def test_what_lets_run_and_what_ends_does_not_wait_for_a_host_that_was_lost(
    autojump_clock: MockClock,
    house: House,
) -> None:
    host = await house.host()
    await host.fall_silent()
    began = trio.current_time()

    assert (await house.ask(Unpause())).done
    assert (await house.ask(Stop())).done
    assert trio.current_time() == began


async def test_nothing_waits_for_a_host_that_was_lost_while_it_was_paused(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    await house.ask(Pause())
    await host.fall_silent()

    assert await house.places() == {}


async def test_a_host_that_was_told_to_run_and_lost_before_it_said_so_may_run(
    autojump_clock: MockClock,
    house: House,
) -> None:
    host = await house.host()
    await house.ask(Pause())
    host.connection.close(goodbye=False)
    await house.ask(Unpause())

    assert (await house.ask(Pause(), timeout=5.0)).late == ("joined/box",)


async def test_a_host_that_comes_back_takes_its_place_again_at_once(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    await host.fall_silent()
    again = await house.host()
    began = trio.current_time()

    assert (await house.ask(Pause())).done
    assert trio.current_time() == began
    assert again.verbs == [Unpause(), Pause()]
    assert again.order.ticket != host.order.ticket
    await trio.sleep(HOLD_S)
    assert await house.places() == {"joined/box": State.PAUSED}


async def test_a_host_whose_replicas_are_beyond_repair_has_its_place_no_more(
    autojump_clock: MockClock,
    house: House,
) -> None:
    host = await house.host()
    await host.connection.send(ReplicaFailed(failure=Failure.of(StartFailed("too often"))))
    await house.settle()

    assert await house.places() == {}


async def test_a_host_that_refuses_to_be_what_the_tree_is_has_to_leave(
    autojump_clock: MockClock, house: House
) -> None:
    host = Host(house, "box")
    host.refuses = Unpause
    await host.join()

    await host.left.wait()
    assert not house.may_register(host.order.ticket)
    await trio.sleep(HOLD_S + 1.0)
    assert await house.places() == {}


async def test_when_their_supervisor_is_started_again_hosts_have_to_come_anew(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    house.system.cell(JOINED).nursery.start_soon(fail)
    await host.left.wait()
    assert not house.may_register(host.order.ticket)

    assert (await house.ask(Pause(), timeout=5.0)).late == (JOINED,)
    assert (await house.ask(Pause())).done
    assert trio.current_time() > HOLD_S
    again = await house.host()
    assert again.verbs == [Pause()]
    assert await house.places() == {"joined/box": State.PAUSED}


async def test_nothing_is_waited_for_when_no_host_could_run(
    autojump_clock: MockClock, house: House
) -> None:
    await house.host()
    await house.ask(Pause())
    began = trio.current_time()
    house.system.cell(JOINED).nursery.start_soon(fail)
    await house.settle()

    assert (await house.ask(Unpause())).done
    assert trio.current_time() - began < 1.0


async def fail() -> None:
    raise RuntimeError("a bug")


async def test_hosts_hear_that_a_tree_that_ends_does_so_for_good(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    await house.ask(Stop())
    await house.root.end_children()
    await house.system.cell("root").stop()
    await host.left.wait()

    assert host.left_for_good


# Coming again and again


@pytest.mark.parametrize("seed", range(30))
async def test_a_host_that_takes_the_place_of_one_that_is_just_lost_has_it_for_good(
    autojump_clock: MockClock, house: House, seed: int
) -> None:
    await house.ask(Pause())
    first = await house.host()
    first.connection.close(goodbye=False)
    for _ in range(seed):
        await trio.lowlevel.checkpoint()
    second = await Host(house, "box").join()
    await trio.sleep(SILENCE_LIMIT_S + HOLD_S)
    await house.ask(Unpause())

    assert await house.places() == {"joined/box": State.RUNNING}
    assert (await house.ask(Pause())).done
    assert second.verbs[-2:] == [Unpause(), Pause()]


async def test_a_host_that_root_has_dropped_does_not_come_back_before_its_replicas_are_gone(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    began = trio.current_time()
    [peer] = house.root._host_peers
    house.root.listener.drop(peer, "on purpose")

    assert (await house.ask(Pause())).done
    assert trio.current_time() - began >= HOLD_S
    assert not host.connection.present


async def test_no_name_of_a_host_is_remembered_when_it_has_gone(
    autojump_clock: MockClock, house: House
) -> None:
    before = set(house.system.cells)
    for number in range(20):
        host = await house.host(f"box{number}")
        host.connection.close()
        await house.settle()

    assert set(house.system.cells) == before


# Hosts that mean harm


async def test_a_ticket_is_good_for_the_replicas_of_its_host_alone(
    autojump_clock: MockClock, house: House
) -> None:
    ticket = (await house.host()).order.ticket

    names = ["box-0", "box-63", "replica-0", "box-x", "boxer-0", "box-0/scheduler", ""]
    assert [name for name in names if house.may_register(ticket, name)] == ["box-0", "box-63"]


async def test_a_host_that_fails_again_and_again_harms_nobody(
    autojump_clock: MockClock, house: House
) -> None:
    failure = Failure.of(StartFailed("on purpose"))
    other = await house.host("other")
    for number in range(1, 30):
        host = await house.host()
        for _ in range(number):
            host.connection.send_nowait(ReplicaFailed(failure=failure))
        if number % 2:
            host.connection.close(goodbye=False)
        await house.settle()
        await trio.sleep(SILENCE_LIMIT_S + HOLD_S)

    assert await house.places() == {"joined/other": State.RUNNING}
    assert not other.left.is_set()
    assert house.system.cell(JOINED).lives == 1


async def test_a_host_that_tells_of_a_bottomless_tree_harms_nobody(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    node = NodeStatus(name="leaf", kind="x", state=State.RUNNING)
    for _ in range(400):
        node = NodeStatus(name="node", kind="x", state=State.RUNNING, children=(node,))
    host.node = node

    status = await house.status()

    assert status.state is State.RUNNING
    assert len(repr(status.tree)) < 10_000


async def test_a_host_that_says_more_than_root_can_pass_on_harms_nobody(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    host.refuses, host.reason = Pause, "x" * (40 * 2**20)

    with pytest.raises(CallboardError):
        await house.ask(Pause())

    assert (await house.status()).state is not State.FAILED


async def test_a_host_that_says_much_while_nobody_takes_hosts_in_has_to_leave(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    await house.ask(Pause())
    house.system.cell(JOINED).nursery.start_soon(fail)
    for _ in range(3000):
        with contextlib.suppress(Unreachable):
            host.connection.send_nowait(ReplicaFailed(failure=Failure.of(StartFailed("x"))))
    await host.left.wait()

    assert (await house.status()).state is State.PAUSED


async def test_a_peer_that_was_a_host_and_is_an_operator_is_answered(
    autojump_clock: MockClock, house: House
) -> None:
    host = await house.host()
    host.connection._role = Role.OPERATOR
    host.connection._schema = house.operator._schema
    host.connection._incarnation += 1
    host.connection._send_frame(host.connection._hello())
    await house.settle()

    assert (await house.ask(Unpause())).done
    assert await house.places() in ({}, {"joined/box": State.RUNNING})
    assert house.root._host_peers == set()
