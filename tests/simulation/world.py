"""One simulation: the whole tree, its clients and an operator, on one clock and one seed.

`simulate(seed)` draws a scenario and plays it. First everything happens that the scenario names.
Then faults stop, the network heals, the operator resumes the tree, and everything has to end well
in bounded time; see `checks`.
"""

import logging
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import trio

from callboard.actors import (
    actor as actor_module,
    executor as executor_module,
    session as session_module,
)
from callboard.actors.actor import STOP_TIMEOUT_S, Actor, Cell
from callboard.actors.coordinator import GRACE_S
from callboard.actors.mailbox import Letter
from callboard.actors.ref import current_cell
from callboard.actors.routing import Routing
from callboard.actors.session import PING_INTERVAL_S, SILENCE_LIMIT_S, Listener
from callboard.actors.system import ActorSystem, Timers
from callboard.messages.base import Message
from callboard.messages.control import Resume, State, Stop, Unpause
from callboard.messages.errors import CallboardError
from callboard.messages.sampling import SamplingParams
from callboard.supervision import replica as replica_module
from callboard.supervision.app import SUPERVISOR_SHUTDOWN_S, ReplicaParts, replica, root
from callboard.supervision.engine import RECONNECT_TIMEOUT_S
from callboard.supervision.root import Address
from callboard.supervision.settings import Settings
from tests.simulation.checks import Checks
from tests.simulation.clients import COORDINATOR, Client
from tests.simulation.determinism import determined, new_clock, stream
from tests.simulation.device import (
    Codec,
    Device,
    DeviceBroken,
    OutOfDeviceMemory,
    SimRunner,
    alone,
    text_for,
)
from tests.simulation.log import EventLog
from tests.simulation.network import SimNetwork
from tests.simulation.operators import Operator
from tests.simulation.processes import (
    ChildProcess,
    Process,
    SimReplicaProcess,
    current_process,
    end_of_input,
    make_thread,
)
from tests.simulation.scenario import (
    EOS,
    SECOND,
    VOCABULARY,
    Crash,
    DeviceFault,
    Fault,
    Kill,
    Partition,
    Reset,
    RootKill,
    Scenario,
    draw,
)

START_LIMIT_S = 100.0
RECOVERY_LIMIT_S = 300.0
GIVE_UP_LIMIT_S = 2_000.0
SILENCE_S = SILENCE_LIMIT_S + 2 * PING_INTERVAL_S + GRACE_S
"""Longer than anybody believes in a peer that says nothing, or keeps what it has open."""

RUN_LIMIT_S = 3_000.0
RUNAWAY = 200_000
"""Messages no run has; what goes on behind so many never ends."""


class PlannedCrash(Exception):
    """What an actor fails of when the scenario says so."""


class Runaway(BaseException):
    """The simulation does not come to an end."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run: nothing in `broken` when all promises were kept."""

    scenario: Scenario
    broken: list[str]
    log: EventLog
    seconds: float


def simulate(seed: int) -> Result:
    """Play the scenario of a seed."""
    return play(draw(seed))


def play(scenario: Scenario) -> Result:
    """Play a scenario."""
    clock = new_clock()
    log = EventLog()
    world: list[World] = []

    async def main() -> None:
        world.append(World(scenario, log))
        await world[0].run()

    broken: list[str] = []
    with determined(scenario.seed, clock):
        try:
            trio.run(main, clock=clock)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            broken.append(f"the simulation ended with {_described(error)}")
            log.add(clock.current_time(), "", "BROKEN", _trace(error))
    if world:
        broken = world[0].checks.broken + broken
    return Result(scenario=scenario, broken=broken, log=log, seconds=clock.current_time())


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, log: EventLog) -> None:
        self.scenario = scenario
        self.nursery: trio.Nursery
        self.rng = stream(scenario.seed, "world")
        self.timers = Timers()
        self.network = SimNetwork(self.timers, stream(scenario.seed, "network"), scenario.delays)
        self.checks = Checks(self)
        self.processes: dict[str, Process] = {}
        self.over = trio.Event()
        self.stopping = False
        self._log = log
        self._began = 0.0
        self._lives: Counter[str] = Counter()
        self._steps: Counter[int] = Counter()  # forward passes of each replica
        self._loads: Counter[int] = Counter()  # of each replica's weights
        self._handled: Counter[str] = Counter()  # messages of each actor
        self._num_handled = 0
        self._crashes = {
            (fault.name, fault.message): fault
            for fault in scenario.faults
            if isinstance(fault, Crash) and fault.at is None
        }
        self.faulty = False  # whether faults may happen now
        self.has_reset = False  # whether a client was cut off when it used an id again
        self._hangs_until = 0.0
        self._clients: list[Client] = []
        self.root_ended = trio.Event()
        self._root_started = trio.Event()
        self._may_not_start = False  # whether a fault has hit a part that was just starting
        self._orphans: list[Process] = []  # replicas of a root that was killed
        self._absent_s = 0.0  # how long there is no root then
        self._is_doomed = False  # whether a device cannot be restarted any more
        self._operators: list[Operator] = []

    # The run.

    async def run(self) -> None:
        """Play the scenario, then see to it that everything ends well, and check that it has."""
        with self._patched(), trio.fail_after(RUN_LIMIT_S):
            async with trio.open_nursery() as self.nursery:
                self.nursery.start_soon(self.timers.run)
                await self._start()
                await self._play()
                await self._recover()
                await self._end()
                self.nursery.cancel_scope.cancel("it is over")

    async def _start(self) -> None:
        """Start root and the operators, and wait for them if that is to be undisturbed."""
        if self.scenario.from_the_start:
            self._begin()
        names = ["operator", SECOND] if self.scenario.second_orders else ["operator"]
        orders = (self.scenario.orders, self.scenario.second_orders)
        patience = (True, self.scenario.second_waits)
        with trio.fail_after(START_LIMIT_S):
            await self._launch(self._run_root)
            for name, its, waits in zip(names, orders, patience, strict=False):
                operator = Operator(self, self._process(name), its, waits=waits)
                self._operators.append(operator)
                await self._launch(operator.run)
        if not self.scenario.from_the_start:
            self._begin()

    async def _launch(self, program: Callable[..., Any]) -> None:
        if self.scenario.from_the_start:
            self.nursery.start_soon(program)
        else:
            await self.nursery.start(program)

    def _begin(self) -> None:
        self._began = trio.current_time()
        self.log("", "begins")
        self.faulty = True

    async def _play(self) -> None:
        scenario = self.scenario
        for index, plan in enumerate(scenario.clients):
            client = Client(self, self._process(f"client-{index}"), plan)
            self._clients.append(client)
            self.nursery.start_soon(self.processes[f"client-{index}"].run, client.main)
        for fault in scenario.faults:
            if not isinstance(fault, DeviceFault) and fault.at is not None:
                self.nursery.start_soon(self._happen_at, fault, fault.at)
        first, *others = self._operators
        for other in others:
            self.nursery.start_soon(other.give_orders)
        with trio.move_on_after(scenario.seconds):
            await first.give_orders()
            await trio.sleep_forever()
        if scenario.stops_at is not None and first.is_connected.is_set():
            self.stopping = True
            await first.order(Stop(drain_s=scenario.drain_s), 5.0)

    async def _recover(self) -> None:
        """Faults are over: whatever was asked for has to end."""
        self.faulty = False
        self.network.heal()
        self.log("", "heals")
        await trio.sleep_until(self._hangs_until)
        await trio.sleep(self.rng.choice((0.0, 0.5)) if self._was_calm else SILENCE_S)
        if self.scenario.from_the_start or self._absent_s:
            await self._wait_for_the_start()
            await trio.sleep(SILENCE_S if self._absent_s else 0.0)
        if self._is_doomed:
            await self._wait_for_the_end()
        first, *others = self._operators
        for other in others:
            await self._unless_root_ends(other.is_done)
        if self.stopping:
            await first.insist(Stop(drain_s=self.scenario.drain_s))
        else:
            for operator in (*others, first):  # an answer says that nothing earlier is under way
                await operator.insist(Resume())
            await first.insist(Unpause())
        with trio.move_on_after(RECOVERY_LIMIT_S) as scope:
            for client in self._clients:
                await client.asked_all.wait()
        if scope.cancelled_caught:
            self.checks.broke(f"requests have not ended in {RECOVERY_LIMIT_S:g} s")

    async def _wait_for_the_start(self) -> None:
        """A tree that started under faults is up soon, or has ended and told everybody."""
        with trio.move_on_after(self._absent_s + START_LIMIT_S) as scope:
            await self._unless_root_ends(self._root_started)
            for operator in self._operators:
                await self._unless_root_ends(operator.is_connected)
        if scope.cancelled_caught:
            self.checks.broke(f"the tree has not started in {START_LIMIT_S:g} s")

    async def _wait_for_the_end(self) -> None:
        """What no restart repairs goes up from level to level, to the end of root."""
        with trio.move_on_after(GIVE_UP_LIMIT_S) as scope:
            await self.root_ended.wait()
        if scope.cancelled_caught:
            self.checks.broke(f"root has not given up in {GIVE_UP_LIMIT_S:g} s")

    async def _unless_root_ends(self, event: trio.Event) -> None:
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await self.root_ended.wait()
                nursery.cancel_scope.cancel("root has ended")

            nursery.start_soon(give_up)
            await event.wait()
            nursery.cancel_scope.cancel("it has happened")

    async def _end(self) -> None:
        if not self.stopping:
            await self._check_that_it_works()
            await trio.sleep(0.5)
            self.checks.check_tables()
        self.checks.check_requests()
        for orphan in self._orphans:
            if orphan.alive:
                self.checks.broke(f"{orphan.owner} has outlived its root")
        self.stopping = True
        await self._operators[0].insist(Stop())
        with trio.move_on_after(SUPERVISOR_SHUTDOWN_S) as scope:
            await self.root_ended.wait()
        if scope.cancelled_caught:
            self.checks.broke("root did not end after STOP")
        self.over.set()

    async def _check_that_it_works(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        with trio.move_on_after(RECOVERY_LIMIT_S) as scope:
            try:
                [answer] = await self._operators[0].engine.generate([[7, 8, 9]], params)
            except CallboardError as error:
                self.checks.broke(f"a request at the end failed: {error}")
                return
            if answer.token_ids != alone([7, 8, 9], params, answer.seed).tokens:
                self.checks.broke(f"a request at the end has {answer.token_ids}")
        if scope.cancelled_caught:
            self.checks.broke("a request at the end was not answered")

    @property
    def _was_calm(self) -> bool:
        """Whether nobody has to be given up for his silence."""
        partings = any(isinstance(fault, Partition | Reset) for fault in self.scenario.faults)
        return not (partings or self.has_reset or self._absent_s) and all(
            plan.dies_at is None for plan in self.scenario.clients
        )

    # Processes.

    def _process(self, name: str) -> Process:
        self._lives[name] += 1
        process = self.processes[name] = Process(self, name, self._lives[name])
        return process

    async def _run_root(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        process = self._process("root")
        control = (
            "sim://control" if process.owner == "root" else f"sim://control-of-{process.owner}"
        )

        async def main(system: ActorSystem) -> None:
            top = root(
                system,
                process.network,
                self._settings(),
                lambda name: self._replica(process, system, name),
                address=Address(COORDINATOR),
                control_endpoint=control,
            )
            cell = system.cell("root")

            async def end_when_stopped() -> None:
                await top.stopped_by_verb.wait()
                await top.end_children()
                await cell.stop(SUPERVISOR_SHUTDOWN_S)

            async def announce() -> None:
                await top.started.wait()
                self._root_started.set()
                task_status.started()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_when_stopped)
                nursery.start_soon(announce)
                exited = await cell.run(lambda: top, stop_timeout=SUPERVISOR_SHUTDOWN_S)
                nursery.cancel_scope.cancel("root has ended")
            failure = top.start_failure or exited.failure
            if self._is_doomed or (top.start_failure is not None and self._may_not_start):
                self.log("root", "gives up", str(failure))
                self.stopping = True
            elif exited.failure is not None or not self.stopping:
                self.checks.broke(f"root has ended: {exited.failure} {top.start_failure}")

        await process.run(main)
        if not process.killed.is_set():
            self.root_ended.set()

    def _settings(self) -> Settings:
        scenario = self.scenario
        return Settings(
            replicas=scenario.replicas,
            pipeline_depth=scenario.pipeline_depth,
            prefill_chunk_tokens=scenario.prefill_chunk_tokens,
            prefix_caching=scenario.prefix_caching,
            paused_limit_blocks=scenario.paused_limit_blocks,
        )

    def _replica(self, process: Process, system: ActorSystem, name: str) -> Actor[Any]:
        if self.scenario.in_processes:
            return SimReplicaProcess(
                system,
                process.network,
                self._settings(),
                coordinator=COORDINATOR,
                run_folder=Path("/simulated") / process.owner,
            )
        parts = self._parts(process, name)
        return replica(
            system, process.network, name, parts, self._settings(), coordinator=COORDINATOR
        )

    def _parts(self, process: Process, name: str) -> ReplicaParts:
        index = int(name.removeprefix("replica-"))
        faults = [
            fault
            for fault in self.scenario.faults
            if isinstance(fault, DeviceFault) and fault.replica == index
        ]
        rng = stream(self.scenario.seed, f"{process.owner}/{name}")
        device = process.devices[name] = Device(process, index, faults, rng)
        return ReplicaParts(
            make_runner=device.make_runner,
            codec=Codec(),
            text_for=text_for,
            vocab_size=VOCABULARY,
            eos_token_ids=(EOS,),
        )

    async def _open_process(self, command: object, **options: object) -> ChildProcess:
        """Stand in for `trio.lowlevel.open_process`, in the task of the actor that calls it."""
        await trio.lowlevel.checkpoint()
        cell = current_cell.get()
        assert cell is not None
        process = self._process(cell.name)
        return ChildProcess(self, process, pid=1000 + len(self._lives))

    def runners(self) -> list[tuple[str, SimRunner]]:
        """Return the runners that are there now, with the names of their replicas."""
        devices = [
            device
            for process in self.processes.values()
            if process.alive
            for device in process.devices.values()
        ]
        return [(device.name, device.runner) for device in devices if device.runner is not None]

    # Faults.

    async def _happen_at(self, fault: Fault, at: float) -> None:
        await self.until(at)
        if not self.faulty:
            return
        self.log("", "fault", fault)
        match fault:
            case Crash(name=name):
                self.crash(name)
            case Kill(replica=number):
                self.kill_replica(number)
            case RootKill(back_after_s=seconds):
                self.kill_root(seconds)
                await trio.sleep(seconds)
                self.log("", "begins", "another root")
                self.nursery.start_soon(self._run_root)
            case Reset(one=one, other=other):
                self.network.cut(one, other)
            case Partition(one=one, other=other, seconds=seconds, one_way=one_way):
                self.network.part(one, other, one_way=one_way)
                await trio.sleep(seconds)
                if self.faulty:
                    self.log("", "heals")
                    self.network.heal()
            case _:
                raise AssertionError(fault)

    async def reset_after(self, name: str, seconds: float) -> None:
        """Reset the connections between a process and root some time from now."""
        await trio.sleep(seconds)
        if self.faulty:
            self.log("", "fault", f"{name} is cut off")
            self.network.cut("root", name)
            self.has_reset = True

    def crash(self, name: str) -> None:
        """Let the present life of an actor fail between two of its steps."""
        cells = [
            process.system.cells[name]
            for process in self.processes.values()
            if process.alive and process.system is not None and name in process.system.cells
        ]
        for cell in cells[-1:]:
            if cell.actor is None or (cell.state is State.STARTING and self._is_up):
                continue
            self._note_victim(cell)
            with suppress(RuntimeError):  # it is ending already
                cell.nursery.start_soon(_fail)

    @property
    def _is_up(self) -> bool:
        """Whether the tree has been up; before that, a part that fails to start is one too many."""
        return self._root_started.is_set()

    def _note_victim(self, cell: Cell) -> None:
        if cell.state is State.STARTING and not self._is_up:
            self._may_not_start = True

    def may_fail_to_load(self, fault: DeviceFault, number: int) -> bool:
        """Whether this load of weights is one that goes wrong."""
        if fault.for_good:
            return number >= fault.step and (self.faulty or self._is_doomed)
        return number == fault.step and self.faulty

    def weights_do_not_load(self, fault: DeviceFault) -> None:
        """A device has not the memory for its weights."""
        self.log(f"replica-{fault.replica}", "fault", "weights do not load")
        self._may_not_start = self._may_not_start or not self._is_up
        self._is_doomed = self._is_doomed or fault.for_good

    def kill_replica(self, number: int) -> None:
        """Kill a replica's process, or its supervisor where it has none."""
        name = f"replica-{number}"
        if not self.scenario.in_processes:
            self.crash(name)
        elif name in self.processes:
            root = self.processes["root"].system
            if root is not None and name in root.cells:
                self._note_victim(root.cells[name])
            self.processes[name].kill()

    def kill_root(self, absent_s: float) -> None:
        """Kill root's process; its replicas find that the other end of their input is closed."""
        self._orphans = [
            process
            for process in self.processes.values()
            if process.name.startswith("replica-") and process.alive
        ]
        self._absent_s = absent_s
        self._root_started = trio.Event()
        self.checks.tree_ended()
        self.processes["root"].kill()
        for orphan in self._orphans:
            orphan.is_orphan = True
            orphan.input_closed.set()

    @property
    def was_away_too_long(self) -> bool:
        """Whether there was no root for longer than clients wait for its return."""
        return self._absent_s > RECONNECT_TIMEOUT_S

    def watch_hanging(self, number: int, fault: DeviceFault) -> None:
        """End the process in which a forward pass hangs, after a time."""
        self.log(f"replica-{number}", "hangs")
        name = f"replica-{number}"
        process = self.processes.get(name)

        def end() -> None:
            if not self.scenario.in_processes:
                self.crash(name)
            elif process is not None:
                process.kill()

        due = trio.current_time() + fault.killed_after_s
        # Where it cannot be killed its supervisor waits for it, and leaves it to itself then.
        patience_s = 0.0 if self.scenario.in_processes else STOP_TIMEOUT_S
        self._hangs_until = max(self._hangs_until, due + patience_s)
        self.timers.at(due, end)

    def count_step(self, number: int) -> int:
        """Count a forward pass of a replica; returns its number."""
        self._steps[number] += 1
        return self._steps[number]

    def count_load(self, number: int) -> int:
        """Count a load of a replica's weights; returns its number."""
        self._loads[number] += 1
        return self._loads[number]

    def is_expected(self, error: BaseException) -> bool:
        """Whether an actor may fail of this."""
        if isinstance(error, BaseExceptionGroup):
            return all(self.is_expected(part) for part in error.exceptions)
        return isinstance(error, PlannedCrash | DeviceBroken | OutOfDeviceMemory | CallboardError)

    # What is seen.

    def log(self, who: str, what: str, about: object = "") -> None:
        """Add a line to the log."""
        self._log.add(trio.current_time() - self._began, who, what, about)

    async def until(self, at: float) -> None:
        """Wait until a time of the scenario."""
        await trio.sleep_until(self._began + at)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Put the simulation where the product meets the operating system, and look on."""
        handle, root_cause, replica_left, answer = (
            Cell._handle,
            actor_module._root_cause,
            Routing.replica_left,
            Listener.answer,
        )

        async def watched_handle(cell: Cell, actor: Actor[Any], letter: Letter) -> None:
            await self._handle(handle, cell, actor, letter)

        def watched_cause(error: Exception) -> Exception:
            cause = root_cause(error)
            process = current_process.get(None)
            cell = current_cell.get()
            if process is not None and process.alive and cell is not None:
                self.log(cell.name, "fails", f"{type(cause).__name__}: {cause}")
                self.checks.life_ended(cell.name, cause)
            return cause

        def counted_loss(routing: Routing, peer: bytes, **options: Any) -> Any:
            lost = replica_left(routing, peer, **options)
            self.checks.losses += bool(lost[0] or lost[1])
            return lost

        def counted_answer(listener: Listener, peer: bytes, message_id: int, value: object) -> bool:
            self.checks.question_answered(peer, message_id, value)
            return answer(listener, peer, message_id, value)

        logger = logging.getLogger("callboard")
        with (
            patch.object(Cell, "_handle", watched_handle),
            patch.object(actor_module, "_root_cause", watched_cause),
            patch.object(Routing, "replica_left", counted_loss),
            patch.object(Listener, "answer", counted_answer),
            patch.object(executor_module, "DeviceThread", make_thread),
            patch.object(trio.lowlevel, "open_process", self._open_process),
            patch.object(replica_module, "_end_of_input", end_of_input),
            patch.object(replica_module, "replica_parts", self._parts_of_child),
            patch.object(signal, "alarm", lambda seconds: 0),
            patch.object(session_module, "WINDOW", self.scenario.window),
            patch.object(logger, "disabled", True),
        ):
            yield

    def _parts_of_child(self, settings: Settings) -> ReplicaParts:
        process = current_process.get()
        return self._parts(process, process.name)

    async def _handle(
        self, handle: Callable[..., Any], cell: Cell, actor: Actor[Any], letter: Letter
    ) -> None:
        process = current_process.get()
        if not process.alive:
            await handle(cell, actor, letter)
            return
        self._num_handled += 1
        if self._num_handled > RUNAWAY:
            raise Runaway
        self.log(cell.name, "reads", letter.message)
        self._handled[cell.name] += self.faulty
        crash = self._crashes.get((cell.name, self._handled[cell.name]))
        if crash is None or not self.faulty:
            await handle(cell, actor, letter)
        else:
            await handle(cell, _Crashing(actor, crash), letter)
        self.checks.message_handled(cell, letter.message)


class _Crashing:
    """An actor that fails before or behind a message."""

    def __init__(self, actor: Actor[Any], crash: Crash) -> None:
        self._actor = actor
        self._crash = crash

    async def receive(self, message: Message) -> object:
        return await self._around(self._actor.receive, message)

    async def obey(self, message: Message) -> object:
        return await self._around(self._actor.obey, message)

    async def _around(self, work: Callable[[Any], Any], message: Message) -> object:
        if self._crash.behind:
            await work(message)
        raise PlannedCrash(f"planned at {type(message).__name__}")


async def _fail() -> None:
    raise PlannedCrash("planned")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _described(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_described(part) for part in error.exceptions)
    return f"{type(error).__name__}: {error}"
