"""`callboard serve`: the tree with its replicas in processes of their own, until told to stop."""

import signal
from collections.abc import Callable
from pathlib import Path

import trio

from callboard.actors.actor import ActorExited, Cell
from callboard.actors.curve import AllowedKey, ClientKeys, KeyPair, ServerKeys
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.tickets import Tickets
from callboard.actors.transport import Network, open_zmq_network
from callboard.logs import get_logger
from callboard.messages.control import Stop
from callboard.messages.errors import CallboardError, StartFailed
from callboard.messages.membership import Role
from callboard.supervision.app import SUPERVISOR_SHUTDOWN_S, journal_of, root
from callboard.supervision.keys import check_guarded, load_server_keys
from callboard.supervision.process import ReplicaProcess
from callboard.supervision.root import Address, Root
from callboard.supervision.run_folder import open_run_folder
from callboard.supervision.settings import Settings

log = get_logger()


async def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Run until stopped as asked; `announce` gets lines for a person to read.

    Raises what kept the tree from starting, or what it could not repair, as a CallboardError.
    """
    check_guarded(settings.listen, has_keys=bool(settings.keys), insecure=settings.insecure)
    keys, replica_keys = _load_keys(settings)
    with open_run_folder() as folder:
        async with (
            open_zmq_network(server_keys=keys) as network,
            journal_of(settings, "root") as journal,
            open_system(journal) as system,
        ):
            server = _Server(settings, system, network, folder, replica_keys, announce)
            error = await server.run()
    if error is not None:
        raise error


def _load_keys(settings: Settings) -> tuple[ServerKeys | None, ClientKeys | None]:
    """Return the server's keys and those of its own replicas, which are made for this run."""
    if not settings.keys:
        return None, None
    server, allowed = load_server_keys(Path(settings.keys))
    pair = KeyPair.make()
    allowed.add(AllowedKey("a replica of this server", pair.public, Role.REPLICA))
    return ServerKeys(server, allowed), ClientKeys(pair, server.public)


class _Server:
    def __init__(
        self,
        settings: Settings,
        system: ActorSystem,
        network: Network,
        folder: Path,
        replica_keys: ClientKeys | None,
        announce: Callable[[str], None],
    ) -> None:
        self._announce = announce
        self._settings = settings
        self._address = Address(settings.listen)
        self._cell: Cell = system.cell("root")
        self._coordinator: LocalRef[Stop] = LocalRef(system.cell("coordinator"))
        self._ending = False
        tickets = Tickets()
        self._root: Root = root(
            system,
            network,
            settings,
            lambda name: ReplicaProcess(
                system,
                network,
                settings,
                coordinator=self._address.endpoint,
                run_folder=folder,
                tickets=tickets,
                keys=replica_keys,
            ),
            address=self._address,
            control_endpoint=_control_endpoint(settings.listen),
            tickets=tickets,
        )

    async def run(self) -> CallboardError | None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._heed_signals, nursery)
            nursery.start_soon(self._announce_start)
            nursery.start_soon(self._end_when_stopped)
            error = await self._live()
            nursery.cancel_scope.cancel("the tree has ended")
        return error

    async def _live(self) -> CallboardError | None:
        try:
            exited: ActorExited = await self._cell.run(
                lambda: self._root, stop_timeout=SUPERVISOR_SHUTDOWN_S
            )
        except OSError as error:  # the operators' socket could not be opened
            return StartFailed(str(error))
        # Whatever fails while the tree is taken down because somebody asked for that is no failure.
        if self._ending:
            return None
        failure = exited.failure
        return self._root.start_failure if failure is None else failure.error()

    async def _announce_start(self) -> None:
        await self._root.started.wait()
        self._announce(f"callboard: ready at {self._address.endpoint}")

    async def _end_when_stopped(self) -> None:
        await self._root.stopped_by_verb.wait()
        await self._end()

    async def _end(self) -> None:
        self._ending = True
        await self._root.end_children()
        await self._cell.stop(SUPERVISOR_SHUTDOWN_S)

    async def _heed_signals(self, nursery: trio.Nursery) -> None:
        """First signal: drain. Second: end the open requests now. Third: end without manners."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            received = 0
            async for number in signals:
                received += 1
                name = signal.Signals(number).name
                if received == 1:
                    self._announce(f"callboard: {name}, stopping when open requests have ended")
                    nursery.start_soon(self._drain)
                elif received == 2:
                    self._announce(f"callboard: {name} again, stopping now")
                    nursery.start_soon(self._end_requests)
                else:
                    self._ending = True
                    self._cell.cancel(f"{name} for the third time")

    async def _drain(self) -> None:
        if self._root.started.is_set():
            drain_s = self._settings.drain_s
            await self._root.control(Stop(drain_s=drain_s), drain_s + SUPERVISOR_SHUTDOWN_S)
        await self._end()

    async def _end_requests(self) -> None:
        try:
            await self._coordinator.ask(Stop(drain_s=0.0))
        except CallboardError as error:
            log.warning("the coordinator did not end its requests", reason=str(error))
        await self._end()


def _control_endpoint(listen: str) -> str:
    """Return where operators connect: the same host or folder as clients, at a port of its own."""
    if listen.startswith("tcp://"):
        host, _, _ = listen.removeprefix("tcp://").rpartition(":")
        return f"tcp://{host}:0"
    return f"{listen}.control"
