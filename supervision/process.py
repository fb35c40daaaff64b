"""A replica in a process of its own, and the two ends of the line between it and its root.

The parent writes what the replica should be to the child's standard input and keeps it open: when
it closes, for whatever reason, the child ends by itself, so there are no orphans. Verbs and their
acknowledgements go over an ipc socket that only this pair uses.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import msgspec
import trio

from callboard.actors.curve import ClientKeys
from callboard.actors.session import Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem
from callboard.actors.tickets import Tickets, TicketSource
from callboard.actors.transport import Network
from callboard.messages.control import Suspend, Weights
from callboard.messages.errors import Failure, StartFailed, SupervisionError
from callboard.messages.membership import ReplicaFailed, ReplicaUp, Role, Welcome
from callboard.supervision.remote import Remote, ToRemote
from callboard.supervision.settings import Settings
from callboard.supervision.watchdog import STUCK_LOOP, Silence, turn_of

FromReplicaProcess = ReplicaUp | ReplicaFailed

END_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 5.0
LAST_WORDS_S = 1.0

SILENCE_GRACE_S = 5.0
"""How much longer than the process itself its root waits for a sign of life: it knows more."""


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica process is told on its standard input: one line of JSON."""

    name: str
    settings: Settings
    coordinator: str
    control: str
    paused: bool = False
    suspended: Suspend | None = None
    keys: ClientKeys | None = None
    weights: Weights | None = None
    ticket: str = ""


class ReplicaProcess(Remote):
    """The root's side: starts the process, passes verbs on, fails when the process ends."""

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        settings: Settings,
        *,
        coordinator: str,
        run_folder: Path,
        tickets: TicketSource | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        super().__init__()
        self._system = system
        self._network = network
        self._settings = settings
        self._coordinator = coordinator
        self._run_folder = run_folder
        self._tickets = tickets or Tickets()
        self._ticket = ""
        self._keys = keys
        self._process: trio.Process | None = None
        self._up = trio.Event()
        self._ending = False
        self._failure: Failure | None = None
        self._last_words = trio.Event()

    async def on_start(self) -> None:
        """Start the process; the replica is up when its tree is."""
        self._ticket = self._tickets.issue(self.name)
        self._listener = Listener(
            self._system,
            self._network,
            f"ipc://{self._run_folder / (self.name + '.control')}",
            name=self.name,
            inboxes={Role.REPLICA: FromReplicaProcess},
            outboxes={Role.REPLICA: ToRemote},
            welcome=self._welcome,
            deliver=self._deliver,
        )
        self.spawn(self._listener.run)
        await self._launch(self._listener.endpoint)
        with trio.move_on_after(self._settings.start_timeout_s):
            await self._up.wait()
            return
        raise StartFailed(f"{self.name} was not up in {self._settings.start_timeout_s:g} s")

    async def on_stopping(self) -> None:
        """Close the child's input, which tells it to end, and wait for it."""
        self._ending = True
        if self._process is None:
            return
        self._close_input(self._process)
        with trio.move_on_after(END_TIMEOUT_S):
            await self._process.wait()

    async def on_stop(self) -> None:
        """See to it that the process is gone."""
        self._ending = True
        self._tickets.revoke(self._ticket)
        if self._process is not None:
            self._close_input(self._process)
            await self._kill(self._process)
        if self._listener is not None:
            self._listener.close()

    @property
    def process_id(self) -> int:
        """The process's id; 0 before there is one."""
        return 0 if self._process is None else self._process.pid

    async def _launch(self, control: str) -> None:
        order = ReplicaOrder(
            name=self.name,
            settings=self._settings,
            coordinator=self._coordinator,
            control=control,
            paused=self.cell.paused,
            suspended=self.cell.suspended,
            keys=self._keys,
            weights=self.cell.weights,
            ticket=self._ticket,
        )
        command = [sys.executable, "-m", "callboard.supervision.replica"]
        # A session of its own, so that an interrupt at the terminal reaches the root alone.
        self._process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        self.spawn(self._watch, self._process)
        if self._settings.loop_timeout_s:
            self.spawn(self._watch_silence, self._process)
        with contextlib.suppress(trio.BrokenResourceError):  # it is gone, and `_watch` says how
            await self._process.stdin.send_all(msgspec.json.encode(order) + b"\n")

    async def _watch(self, process: trio.Process) -> None:
        code = await process.wait()
        if self._ending:
            return
        if code > 0:
            # It said why, if it could; that may be under way still.
            with trio.move_on_after(LAST_WORDS_S):
                await self._last_words.wait()
        if self._failure is not None:
            raise self._failure.error()
        stuck_s = self._settings.loop_timeout_s if code == STUCK_LOOP else 0.0
        raise SupervisionError(
            f"{self.name} (pid {process.pid}) {_how_it_ended(code, stuck_s)}", ill_s=stuck_s
        )

    async def _watch_silence(self, process: trio.Process) -> None:
        """Fail when the process, once it has spoken, says nothing for too long: it is stopped."""
        assert self._listener is not None
        await self._connected.wait()
        limit = self._settings.loop_timeout_s + SILENCE_GRACE_S
        turn_s = turn_of(limit)
        silence, heard_at = Silence(), None
        while silence.look(heard_at, turn_s) < limit:
            await trio.sleep(turn_s)
            # One that is silent is dropped, and what it had said last is still its last sign.
            heard_at = self._listener.heard_at(self._peer) or heard_at
        if not self._ending:
            said = f"said nothing for {silence.seconds:.0f} s"
            raise SupervisionError(f"{self.name} (pid {process.pid}) {said}", ill_s=silence.seconds)

    def _close_input(self, process: trio.Process) -> None:
        assert isinstance(process.stdin, trio.lowlevel.FdStream)
        process.stdin.close()

    async def _kill(self, process: trio.Process) -> None:
        if process.returncode is not None:
            return
        process.kill()
        with trio.move_on_after(KILL_TIMEOUT_S):
            await process.wait()

    async def _deliver(self, event: Said | Joined | Left) -> None:
        """Take note at once: while the actor starts, nobody reads its mail."""
        match event:
            case Joined(peer=peer):
                self.connected(peer)
            case Left(peer=peer):
                self.disconnected(peer)
            case Said(message=ReplicaUp()):
                self._up.set()
            case Said(message=ReplicaFailed(failure=failure)):
                self._failure = failure
                self._last_words.set()
            case _:
                pass

    def _welcome(self, session: str) -> Welcome:
        assert self._listener is not None
        return Welcome(
            name=self.name, session=session, max_frame_bytes=self._listener.max_frame_bytes
        )


def _how_it_ended(code: int, stuck_s: float) -> str:
    if code < 0:
        return f"was killed by signal {-code}"
    if code == STUCK_LOOP:
        return f"exited with code {code}: its event loop had been stuck for {stuck_s:g} s"
    return f"exited with code {code}"
