"""`callboard replica --join`: replicas on this machine for a server on another.

A host finds the server and says that it is there; root answers what to start, and the host keeps
that as a server keeps its own replicas: each in a process, started again when it ends, obeying the
verbs that come over the line. Requests and tokens go between replicas and coordinator directly.

Nothing may run that root cannot pause. A host that loses its line ends its replicas before it joins
anew, and the server gives their requests to others. The same happens when it is told to leave.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from callboard.actors.actor import Cell, start_in_order
from callboard.actors.coordinator import FromClient, ToClient
from callboard.actors.curve import ClientKeys
from callboard.actors.link import NAME_TIMEOUT_S
from callboard.actors.session import Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.tickets import GivenTicket
from callboard.actors.transport import Network, open_zmq_network
from callboard.messages.errors import (
    CallboardError,
    ConfigError,
    Failure,
    NameInUse,
    TooManyPeers,
    Unreachable,
)
from callboard.messages.membership import HostUp, ReplicaFailed, Role, StartHost, Welcome
from callboard.supervision.app import SUPERVISOR_SHUTDOWN_S, replicas
from callboard.supervision.joined import FromHost, ToHost, check_name
from callboard.supervision.process import ReplicaProcess
from callboard.supervision.remote import answer_from
from callboard.supervision.root import reachable
from callboard.supervision.run_folder import open_run_folder
from callboard.supervision.settings import Settings

RETRY_S = 1.0
"""How long to wait before the next attempt to join."""


async def join(
    endpoint: str,
    name: str,
    *,
    adapt: Callable[[Settings], Settings],
    keys: ClientKeys | None,
    announce: Callable[[str], None],
) -> None:
    """Be a host of the server at `endpoint` until that stops, or a signal says to leave.

    `adapt` makes this machine's settings of the server's; `announce` gets lines for a person to
    read. Raises why the server does not want it, or what was beyond repair, as a CallboardError.
    """
    check_name(name)
    with open_run_folder() as folder:
        async with open_zmq_network(client_keys=keys) as network:
            host = _Host(endpoint, name, adapt, keys, announce, network, folder)
            error = await host.run()
    if error is not None:
        raise error


class _Host:
    def __init__(
        self,
        endpoint: str,
        name: str,
        adapt: Callable[[Settings], Settings],
        keys: ClientKeys | None,
        announce: Callable[[str], None],
        network: Network,
        folder: Path,
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.adapt = adapt
        self.keys = keys
        self.announce = announce
        self.network = network
        self.folder = folder
        self._leaving = trio.Event()
        self._said = ""

    async def run(self) -> CallboardError | None:
        error: CallboardError | None = None  # nor is it one to be told twice to leave
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_signals, nursery.cancel_scope)
            error = await self._stay()
            nursery.cancel_scope.cancel("the host has ended")
        return error

    async def _stay(self) -> CallboardError | None:
        """Join, again and again, until there is a reason to end; returns it if it is an error."""
        name_in_use_since: float | None = None
        while not self._leaving.is_set():
            end = await self._join_once()
            if end is None or not isinstance(end, Unreachable | NameInUse | TooManyPeers):
                return end
            if isinstance(end, NameInUse):
                name_in_use_since = name_in_use_since or trio.current_time()
                if trio.current_time() - name_in_use_since > NAME_TIMEOUT_S:
                    return end
            else:
                name_in_use_since = None
            self.announce_once(f"callboard: {end}; it is tried again")
            with trio.move_on_after(RETRY_S):
                await self._leaving.wait()
        return None

    def announce_once(self, line: str) -> None:
        """Give a line to a person, unless it is what was said last."""
        if line != self._said:
            self._said = line
            self.announce(line)

    async def _join_once(self) -> CallboardError | None:
        """Join and stay as long as that lasts; returns why it ended.

        That is None when the host is to end, and Unreachable when it lost the server.
        """
        async with open_system() as system, trio.open_nursery() as nursery:
            end: CallboardError | None
            scout = _Scout(self, system)
            nursery.start_soon(scout.connection.run)
            try:
                session = _Session(self, system, await scout.find())
                scout.found_another = session.lose
                nursery.start_soon(self._end_when_leaving, session)
                end = await session.run()
            except CallboardError as error:
                end = error
            scout.connection.close()
            nursery.cancel_scope.cancel("the session is over")
        return end

    async def _end_when_leaving(self, session: "_Session") -> None:
        await self._leaving.wait()
        session.end()

    async def _heed_signals(self, everything: trio.CancelScope) -> None:
        """First signal: hand the requests over and leave. Second: end without manners."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                name = signal.Signals(number).name
                if self._leaving.is_set():
                    everything.cancel(f"{name} again")
                    return
                self.announce(f"callboard: {name}, leaving")
                self._leaving.set()


class _Scout:
    """Finds where root takes in hosts, which the coordinator tells its clients.

    It stays, since it hears at once when another server has taken the place of one that is gone.
    """

    def __init__(self, host: _Host, system: ActorSystem) -> None:
        self._endpoint = host.endpoint
        self._control = ""
        self.found_another: Callable[[str], None] = lambda reason: None
        self.connection = Connection(
            system,
            host.network,
            host.endpoint,
            role=Role.CLIENT,
            name=f"host-{host.name}",
            inbox=ToClient,
            outbox=FromClient,
            deliver=self._deliver,
        )

    async def find(self) -> str:
        """Return the endpoint. Raises what `Connection.wait_welcome` does."""
        self._control = self._control_endpoint(await self.connection.wait_welcome())
        return self._control

    def _control_endpoint(self, welcome: Welcome) -> str:
        return reachable(welcome.control_endpoint, beside=self._endpoint)

    async def _deliver(self, event: Said | Joined | Left) -> None:
        if isinstance(event, Joined) and self._control_endpoint(event.hello) != self._control:
            self.found_another("another one is there")


class _Session:
    """One stay with the server: the line to root, and the replicas it has ordered."""

    def __init__(self, host: _Host, system: ActorSystem, control: str) -> None:
        self._host = host
        self._system = system
        self._cell: Cell = system.cell(host.name)
        self._nursery: trio.Nursery
        self._order: Said | None = None
        self._ordered = trio.Event()
        self._start_scope = trio.CancelScope()
        self._over = trio.Event()  # nothing is to run any more
        self._ended = trio.Event()  # nothing does
        self._failure: Failure | None = None
        self._lost: str | None = None
        self._connection = Connection(
            system,
            host.network,
            control,
            role=Role.REPLICA,
            name=host.name,
            inbox=ToHost,
            outbox=FromHost,
            deliver=self._deliver,
            once=True,
        )

    def lose(self, reason: str) -> None:
        """Have it end because root is gone."""
        self._lost = f"the server is gone: {reason}"
        self.end()

    def end(self) -> None:
        """Have it end in good order."""
        self._over.set()
        self._ordered.set()
        self._start_scope.cancel("the host has no replicas any more")

    async def run(self) -> CallboardError | None:
        """Join, start what is ordered, and live until there is an end to it; returns why."""
        end: CallboardError | None
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._connection.run)
            try:
                await self._connection.wait_welcome()
                await self._ordered.wait()
                end = await self._live()
            except CallboardError as error:
                end = error
            # Goodbye means that nothing runs here any more.
            self._connection.close(goodbye=self._cell.actor is None)
            self._nursery.cancel_scope.cancel("the session is over")
        if end is None:
            end = self._connection.refusal
        return Unreachable(self._lost) if end is None and self._lost else end

    async def _live(self) -> CallboardError | None:
        """Run the replicas that are ordered; returns what was beyond repair."""
        if self._order is None:
            return None
        message_id = self._order.message_id
        try:
            with self._start_scope:
                await self._nursery.start(self._run_tree, self._order.message)
        except CallboardError as error:
            self._connection.answer(message_id, error)
            return error
        if self._over.is_set():
            return None
        self._nursery.start_soon(self._stop_when_over)
        self._connection.answer(message_id, HostUp(pid=os.getpid()))
        self._host.announce_once(f"callboard: joined {self._host.endpoint} as {self._host.name}")
        await self._ended.wait()
        if self._failure is None:
            return None
        with contextlib.suppress(Unreachable):
            await self._connection.send(ReplicaFailed(failure=self._failure))
        return self._failure.error()

    async def _run_tree(self, order: StartHost, task_status: trio.TaskStatus[None]) -> None:
        cell, host = self._cell, self._host
        settings = host.adapt(_settings_of(order))
        tickets = GivenTicket(order.ticket)
        cell.paused, cell.suspended, cell.weights = True, order.suspended, order.weights
        exited = await cell.run(
            lambda: replicas(
                self._system,
                settings,
                lambda name: ReplicaProcess(
                    self._system,
                    host.network,
                    settings,
                    coordinator=host.endpoint,
                    run_folder=host.folder,
                    tickets=tickets,
                    keys=host.keys,
                ),
                host.name,
            ),
            stop_timeout=SUPERVISOR_SHUTDOWN_S,
            task_status=task_status,
        )
        self._failure = None if self._over.is_set() else exited.failure
        self._ended.set()

    async def _stop_when_over(self) -> None:
        await self._over.wait()
        if self._lost is None:
            await self._cell.stop(SUPERVISOR_SHUTDOWN_S)
        else:
            self._cell.cancel(self._lost)  # nothing may run that root cannot pause

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said(message=StartHost()):
                self._order = event
                self._ordered.set()
            case Said():
                await start_in_order(
                    self._nursery, answer_from, self._cell, self._connection, event
                )
            case Left(for_good=True):
                self.end()
            case Left(reason=reason):
                self.lose(reason)
            case Joined():
                pass


def _settings_of(order: StartHost) -> Settings:
    """Return the server's settings, but for what is its own affair. Raises ConfigError."""
    try:
        settings = msgspec.json.decode(order.settings, type=Settings)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the server has settings that are not known here: {error}") from error
    return msgspec.structs.replace(settings, replicas=1, keys="", journal="")
