"""What root has of the hosts that bring replicas along: one child each, for as long as they stay.

A host (`supervision/host.py`) comes to the operators' socket by itself and is told what to start.
It may go without a word, and then nobody here can see whether its replicas still run. So its place
is kept until they do not, whatever has become of it, and no PAUSE is acknowledged without them: a
host that has lost its root ends its replicas; and these have no ticket any more, so that they lose
their requests even where the host stands still.
"""

import re
import weakref
from collections.abc import Callable

import msgspec
import trio

from callboard.actors.actor import ActorExited, StopActor
from callboard.actors.session import PING_INTERVAL_S, SILENCE_LIMIT_S, Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem
from callboard.actors.tickets import Tickets
from callboard.actors.transport import PeerKey
from callboard.messages.base import Message
from callboard.messages.control import Resume, State, Step, Stop, Unpause
from callboard.messages.errors import (
    CallboardError,
    ConfigError,
    Failure,
    StartFailed,
    SupervisionError,
)
from callboard.messages.membership import Hello, ReplicaFailed, Role, StartHost
from callboard.supervision.lifecycle import UNDER_WAY
from callboard.supervision.process import END_TIMEOUT_S, KILL_TIMEOUT_S
from callboard.supervision.remote import Remote, ToRemote
from callboard.supervision.settings import Settings
from callboard.supervision.spec import ChildSpec, Restart
from callboard.supervision.supervisor import Supervisor

FromHost = ReplicaFailed
ToHost = ToRemote | StartHost

HOLD_S = SILENCE_LIMIT_S + 2 * PING_INTERVAL_S + END_TIMEOUT_S + KILL_TIMEOUT_S
"""How long after root has lost a host the host may still have replicas that run: until it has
noticed, and ended them."""

AT_REST = (State.PAUSED, State.SUSPENDED, State.STOPPED)
"""What a host acknowledged last that runs nothing, and will not without root."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
OWN_NAME = "replica"


def check_name(name: str) -> None:
    """Raise ConfigError for a host by whose name its replicas could not be told from others."""
    if not NAME.fullmatch(name) or name == OWN_NAME:
        raise ConfigError(
            f"a host cannot be named {name!r}, but by up to 63 letters, digits, dots, underscores "
            f"and hyphens, the first a letter or digit, and not {OWN_NAME!r}"
        )


def check_host(hello: Hello) -> None:
    """Raise ConfigError for a host with a name that it cannot have."""
    if hello.role is Role.REPLICA:
        check_name(hello.name)


class JoinedHost(Remote):
    """A host's place in the tree, from its coming to its going."""

    def __init__(
        self, listener: Listener, peer: PeerKey, settings: Settings, tickets: Tickets
    ) -> None:
        super().__init__()
        self._listener = listener
        self._settings = settings
        self._tickets = tickets
        self._ticket = tickets.issue()
        self._pid = 0
        self._is_here = True
        self._has_started = False
        self._stopping = False
        self.connected(peer)

    @property
    def process_id(self) -> int:
        """The host's process id, on its own machine."""
        return self._pid

    async def on_start(self) -> None:
        """Have the host start its replicas."""
        order = StartHost(
            settings=msgspec.json.encode(self._settings),
            ticket=self._ticket,
            suspended=self.cell.suspended,
            weights=self.cell.weights,
        )
        if not self._is_here:
            raise StartFailed("it has left again")
        deadline = trio.current_time() + self._settings.start_timeout_s
        up = await self.ask_process(order, deadline)
        self._pid, self._has_started = up.pid, True

    async def on_stopping(self) -> None:
        """Leave it to root to say goodbye: the tree ends."""
        self._stopping = True

    async def obey(self, verb: Message) -> object:
        """Pass verbs on; one that is gone need not hear that something may run, or is to end."""
        if not self._is_here and isinstance(verb, Unpause | Resume | Stop):
            return self.ack(verb)
        if isinstance(verb, Unpause | Step):
            self.cell.state = UNDER_WAY[type(verb)]  # it may run, until it says that it does not
        return await super().obey(verb)

    async def on_stop(self) -> None:
        """Have no session without a place in the tree."""
        self._has_started = False
        self._tickets.revoke(self._ticket)
        if not self._stopping:
            self.dismiss("it has no place in the tree any more")

    def dismiss(self, reason: str) -> None:
        """End the session with the host, if it is here; its place is kept for some time."""
        assert self._listener is not None
        if self._is_here:
            self._listener.drop(self._peer, reason)

    def note(self, event: Said | Left) -> None:
        """Take note of what the line brings; while this actor starts, nobody reads its mail."""
        match event:
            case Left(peer=peer, reason=reason, for_good=for_good):
                self._is_here = False
                self._tickets.revoke(self._ticket)
                self.disconnected(peer)
                if not self._has_started:
                    pass  # nothing of it runs
                elif for_good or self.cell.state in AT_REST:  # nothing of it runs, or will
                    self.cell.post(StopActor())
                else:
                    self.spawn(self._hold, reason)
            case Said(message=ReplicaFailed(failure=failure)) if self._has_started:
                self.spawn(self._fail, failure)
            case _:
                pass

    async def _hold(self, reason: str) -> None:
        await trio.sleep(HOLD_S)
        raise SupervisionError(f"{self.name} is gone: {reason}")

    async def _fail(self, failure: Failure) -> None:
        raise failure.error()


class JoinedHosts(Supervisor):
    """See the module. Its children are temporary: a host that is to come back comes by itself."""

    def __init__(
        self,
        system: ActorSystem,
        settings: Settings,
        tickets: Tickets,
        listener: Callable[[], Listener],
    ) -> None:
        """`listener` gives the socket that root listens at."""
        super().__init__(system, [])
        self._settings = settings
        self._tickets = tickets
        self._listener = listener
        self._hosts: dict[PeerKey, JoinedHost] = {}
        self._turns: weakref.WeakValueDictionary[str, trio.Lock] = weakref.WeakValueDictionary()

    async def on_start(self) -> None:
        """Begin without any: those of a life before have to come anew."""
        if self.cell.lives > 1:
            self._listener().drop_all(Role.REPLICA, "its place in the tree was lost")
        await super().on_start()

    async def receive(self, message: ActorExited | Said | Joined | Left) -> None:
        """Take a host in, and tell its place what becomes of it."""
        match message:
            case ActorExited(name=name):
                await super().receive(message)
                if name in self._children and self._children[name].retired:
                    await self.remove(name)
            case Joined(peer=peer, hello=hello):
                self._note(Left(peer=peer, reason="it began anew"))  # if it was here
                host = JoinedHost(self._listener(), peer, self._settings, self._tickets)
                self._hosts[peer] = host
                self.spawn(self._take_in, f"{self.name}/{hello.name}", host)
            case Said() | Left():
                self._note(message)

    def _note(self, event: Said | Left) -> None:
        host = self._hosts.get(event.peer)
        if host is not None:
            host.note(event)
        if isinstance(event, Left):
            self._hosts.pop(event.peer, None)

    async def _take_in(self, name: str, host: JoinedHost) -> None:
        turn = self._turns.setdefault(name, trio.Lock())
        async with turn:
            if name in self._children:  # it is back, so nothing it had before runs any more
                await self.remove(name)
            spec = ChildSpec(name=name, start=lambda: host, restart=Restart.TEMPORARY)
            try:
                await self.add(spec)
            except CallboardError as error:
                self.log.warning("a host was not taken in", host=name, reason=str(error))
                host.dismiss("it was not taken in")
            else:
                self.log.info("a host has joined", host=name)
