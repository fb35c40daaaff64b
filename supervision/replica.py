"""What runs in a replica's own process: `python -m callboard.supervision.replica`.

Its order is one line of JSON on standard input, which the parent keeps open. When that closes,
the parent wants the replica to end, or is gone itself; either way it ends. Exit codes: 0 as told, 1
failed, and the root was told of what, 70 the event loop was stuck. It ends by SIGALRM when it
cannot end within a minute of being told to.
"""

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import trio

from callboard.actors.actor import Cell, start_in_order
from callboard.actors.device_thread import hangs
from callboard.actors.session import Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import Network, open_zmq_network
from callboard.messages.errors import Failure, Unreachable
from callboard.messages.membership import ReplicaFailed, ReplicaUp, Role
from callboard.supervision.app import SUPERVISOR_SHUTDOWN_S, journal_of, replica
from callboard.supervision.logging import configure_logging
from callboard.supervision.model import replica_parts
from callboard.supervision.process import FromReplicaProcess, ReplicaOrder
from callboard.supervision.remote import ToRemote, answer_from
from callboard.supervision.run_folder import remove_if_left_over
from callboard.supervision.watchdog import watched_loop

LAST_RESORT_S = 60


def main() -> int:
    """Run the replica that standard input describes; returns the exit code."""
    # The root decides when a replica ends: a signal to the whole service must not end this before
    # its requests have had their time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the parent is gone already
    order = msgspec.json.decode(line, type=ReplicaOrder)
    configure_logging(order.settings.log_level, as_json=order.settings.log_json)
    code = trio.run(_run, order)
    remove_if_left_over(Path(order.control.removeprefix("ipc://")).parent)
    if hangs():
        # The interpreter would wait for the thread, or abort over it.
        logging.shutdown()
        os._exit(code)
    return code


async def _run(order: ReplicaOrder) -> int:
    with watched_loop(order.settings.loop_timeout_s):
        async with (
            open_zmq_network(client_keys=order.keys) as network,
            journal_of(order.settings, order.name) as journal,
            open_system(journal) as system,
        ):
            failure = await _Replica(order, system, network).run()
    return 0 if failure is None else 1


class _Replica:
    """The process's tree and its line to the root."""

    def __init__(self, order: ReplicaOrder, system: ActorSystem, network: Network) -> None:
        self._order = order
        self._system = system
        self._network = network
        self._top: Cell = system.cell(order.name)
        self._top.paused, self._top.suspended = order.paused, order.suspended
        self._top.weights = order.weights
        self._is_up = False
        self._ended = trio.Event()
        self._failure: Failure | None = None
        self._nursery: trio.Nursery
        self._connection = Connection(
            system,
            network,
            order.control,
            role=Role.REPLICA,
            name=order.name,
            inbox=ToRemote,
            outbox=FromReplicaProcess,
            deliver=self._deliver,
        )

    async def run(self) -> Failure | None:
        """Live until the tree ends or the parent closes standard input; returns why it failed."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._connection.run)
            self._nursery.start_soon(self._end_with_parent)
            await self._connection.wait_welcome()
            try:
                await self._start()
            except Exception as error:  # whatever the start raises is told to the root
                self._failure = Failure.of(error)
            else:
                self._is_up = True
                self._say_up()
                await self._ended.wait()
            if self._failure is not None:
                with contextlib.suppress(Unreachable):  # then the parent does not care any more
                    await self._connection.send(ReplicaFailed(failure=self._failure))
            self._connection.close()
            self._nursery.cancel_scope.cancel("the replica has ended")
        return self._failure

    async def _start(self) -> None:
        order = self._order
        parts = await trio.to_thread.run_sync(replica_parts, order.settings, abandon_on_cancel=True)
        tree = replica(
            self._system,
            self._network,
            order.name,
            parts,
            order.settings,
            coordinator=order.coordinator,
            ticket=order.ticket,
            own_process=True,
        )

        async def live(task_status: trio.TaskStatus[None]) -> None:
            exited = await self._top.run(
                lambda: tree, stop_timeout=SUPERVISOR_SHUTDOWN_S, task_status=task_status
            )
            self._failure = exited.failure
            self._ended.set()

        await self._nursery.start(live)

    def _say_up(self) -> None:
        with contextlib.suppress(Unreachable):  # it is said again when the line is back
            self._connection.send_nowait(ReplicaUp(pid=os.getpid()))

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said():
                await start_in_order(self._nursery, answer_from, self._top, self._connection, event)
            case Joined() if self._is_up:
                self._say_up()  # the session before may have ended with that under way
            case _:
                pass

    async def _end_with_parent(self) -> None:
        await _end_of_input()
        # A device that hangs must not make this an orphan: what an alarm does is to kill.
        signal.alarm(LAST_RESORT_S)
        if self._top.actor is None:
            self._nursery.cancel_scope.cancel("the parent wants no replica any more")
        else:
            await self._top.stop(SUPERVISOR_SHUTDOWN_S)


async def _end_of_input() -> None:
    """Wait until standard input is closed at the other end."""
    fd = sys.stdin.fileno()
    while True:
        await trio.lowlevel.wait_readable(fd)
        if not os.read(fd, 4096):
            return


if __name__ == "__main__":
    sys.exit(main())
