"""What root has of the hosts that bring replicas along: one child each, for as long as they stay.

A host (`supervision/host.py`) comes to the operators' socket by itself and is told what to start.
It may go without a word, and then nobody here can see whether its replicas still run. So its place
is kept until they do not, whatever has become of it, and no PAUSE is acknowledged without them: a
host that has lost its root kills its replicas; and these have no ticket any more, so that they lose
their requests even where the host stands still.

While a host starts, its replicas are paused and get no requests, and no verb waits for them.
"""

import re
import weakref
from collections.abc import Callable
from typing import ClassVar

import msgspec
import trio

from callboard.actors.actor import ActorExited, Cell, StopActor
from callboard.actors.session import PING_INTERVAL_S, SILENCE_LIMIT_S, Joined, Left, Listener, Said
from callboard.actors.system import ActorSystem
from callboard.actors.tickets import Tickets
from callboard.actors.transport import PeerKey
from callboard.messages.base import Message
from callboard.messages.control import (
    GetNode,
    Resume,
    State,
    Step,
    Stop,
    Unpause,
    UpdateWeights,
    Weights,
)
from callboard.messages.errors import (
    CallboardError,
    ConfigError,
    Failure,
    StartFailed,
    SupervisionError,
)
from callboard.messages.membership import Hello, ReplicaFailed, Role, StartHost
from callboard.supervision.process import KILL_TIMEOUT_S
from callboard.supervision.remote import Remote, ToRemote
from callboard.supervision.settings import Settings
from callboard.supervision.spec import ChildSpec, Restart
from callboard.supervision.supervisor import Supervisor

FromHost = ReplicaFailed
ToHost = ToRemote | StartHost

HOLD_S = SILENCE_LIMIT_S + 2 * PING_INTERVAL_S + KILL_TIMEOUT_S
"""How long after root has lost a host the host may still have replicas that run: until it has
noticed, and killed them."""

MAX_START_S = 86_400.0
"""How long a host may take to start. It starts its replicas one after the other, and gives each the
time that the settings say."""

AT_REST = (State.PAUSED, State.SUSPENDED, State.STOPPED)
"""States in which a host runs nothing, and will not without root."""

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


class _Gone(Message, frozen=True):
    """The line → a host's place: that session has ended, `for_good` when nothing runs there."""

    urgent: ClassVar[bool] = True
    peer: PeerKey
    reason: str
    for_good: bool


class _Failed(Message, frozen=True):
    """The line → a host's place: its replicas are beyond repair, and have ended."""

    urgent: ClassVar[bool] = True
    peer: PeerKey
    failure: Failure


class JoinedHost(Remote):
    """A host's place in the tree, from its coming to its going."""

    def __init__(self, listener: Listener, peer: PeerKey, settings: Settings, ticket: str) -> None:
        super().__init__()
        self._listener = listener
        self.ticket = ticket
        self._settings = settings
        self._pid = 0
        self.is_here = True
        self.may_run = False
        """Whether some replica of it may make a step, as far as is known here: it starts paused."""
        self.connected(peer)

    @property
    def process_id(self) -> int:
        """The host's process id, on its own machine."""
        return self._pid

    async def on_start(self) -> None:
        """Have the host start its replicas."""
        order = StartHost(
            settings=msgspec.json.encode(self._settings),
            ticket=self.ticket,
            suspended=self.cell.suspended,
            weights=_weights_there(self.cell.weights),
        )
        if not self.is_here:
            raise StartFailed("it has left again")
        up = await self.ask_process(order, trio.current_time() + MAX_START_S)
        self._pid = up.pid

    async def receive(self, message: Said | Joined | Left | _Gone | _Failed) -> None:
        """Have no place any more, or keep it for a while."""
        match message:
            case _Gone(peer=peer, reason=reason, for_good=for_good) if peer == self._peer:
                if for_good or not self.may_run:
                    self.cell.post(StopActor())
                else:
                    self.spawn(self._hold, reason)
            case _Failed(peer=peer, failure=failure) if peer == self._peer:
                raise failure.error()
            case _:
                pass

    async def obey(self, verb: Message) -> object:
        """Pass verbs on; one that is gone need not hear that something may run, or is to end."""
        if not self.is_here:
            if isinstance(verb, GetNode):
                return msgspec.structs.replace(self.cell.status(), pid=self._pid, late=True)
            if isinstance(verb, Unpause | Resume | Stop):
                return self.ack(verb)
        if isinstance(verb, Unpause | Step):
            self.may_run = True  # until it says that it does not
        if isinstance(verb, UpdateWeights):
            verb = msgspec.structs.replace(verb, source=_source_there(verb.weights))
        return await super().obey(verb)

    def dismiss(self, error: CallboardError) -> None:
        """Tell the host, if it is here, that it is not wanted; its place is kept for some time."""
        assert self._listener is not None
        if self.is_here:
            self._listener.dismiss(self._peer, error)

    def note(self, event: Said | Left) -> None:
        """Take note of what the line brings; while this actor starts, nobody reads its mail."""
        match event:
            case Left(peer=peer, reason=reason, for_good=for_good):
                self.is_here = False
                self.disconnected(peer)
                self._tell(_Gone(peer=peer, reason=reason, for_good=for_good))
            case Said(peer=peer, message=ReplicaFailed(failure=failure)):
                self._tell(_Failed(peer=peer, failure=failure))
            case _:
                pass

    def has_obeyed(self, state: State) -> None:
        """Note that nothing of it runs any more, if that is so."""
        super().has_obeyed(state)
        if state in AT_REST:
            self.may_run = False

    def _tell(self, message: _Gone | _Failed) -> None:
        # Before it has a cell nothing runs there, and its start finds out by itself.
        cell: Cell | None = getattr(self, "cell", None)
        if cell is not None:
            cell.post(message)

    async def _hold(self, reason: str) -> None:
        await trio.sleep(HOLD_S)
        raise SupervisionError(f"{self.name} is gone: {reason}")


def _source_there(weights: Weights) -> str:
    """Return what a host calls a source: that of the first weights lies elsewhere, perhaps."""
    return weights.source if weights.version else ""


def _weights_there(weights: Weights | None) -> Weights | None:
    if weights is None:
        return None
    return msgspec.structs.replace(weights, source=_source_there(weights))


class _Before(msgspec.Struct, frozen=True):
    """What a life leaves to the next: whether replicas of hosts may run that it does not know."""

    may_run: bool


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
        self._places: dict[str, JoinedHost] = {}
        self._turns: weakref.WeakValueDictionary[str, trio.Lock] = weakref.WeakValueDictionary()
        self._hold_first = False
        self._stopping = False

    def snapshot(self) -> _Before:
        """Leave word of hosts whose replicas may run."""
        hosts = self._places.values()
        return _Before(self._hold_first or any(host.may_run for host in hosts))

    def restore(self, snapshot: msgspec.Struct) -> None:
        """Wait for those first."""
        self._hold_first = isinstance(snapshot, _Before) and snapshot.may_run

    async def on_start(self) -> None:
        """Begin without any: those of a life before have to come anew."""
        if self.cell.lives > 1:
            self._listener().drop_all(Role.REPLICA, "its place in the tree was lost")
        if self._hold_first:
            await trio.sleep(HOLD_S)
            self._hold_first = False
        await super().on_start()

    async def on_stopping(self) -> None:
        """Leave it to root to say goodbye to the hosts: the tree ends."""
        self._stopping = True
        await super().on_stopping()

    async def on_stop(self) -> None:
        """Let no replica of a host stay."""
        for host in self._hosts.values():
            self._tickets.revoke(host.ticket)

    async def receive(self, message: ActorExited | Said | Joined | Left) -> None:
        """Take a host in, and tell its place what becomes of it."""
        match message:
            case ActorExited(name=name):
                await super().receive(message)
                if name in self._children and self._children[name].retired:
                    await self.remove(name)
                    self._places.pop(name).dismiss(SupervisionError("its place was lost"))
            case Joined(peer=peer, hello=hello):
                ticket = self._tickets.issue(hello.name, held=True)
                host = JoinedHost(self._listener(), peer, self._settings, ticket)
                self._hosts[peer] = host
                self.spawn(self._take_in, f"{self.name}/{hello.name}", host)
            case Said() | Left():
                self._note(message)

    def _note(self, event: Said | Left) -> None:
        host = self._hosts.get(event.peer)
        if host is None:
            return
        if isinstance(event, Left):
            del self._hosts[event.peer]
            self._tickets.revoke(host.ticket)
        host.note(event)

    async def _take_in(self, name: str, host: JoinedHost) -> None:
        turn = self._turns.setdefault(name, trio.Lock())
        async with turn:
            if name in self._children:  # it is back, so nothing it had before runs any more
                await self.remove(name)
            self._places[name] = host
            spec = ChildSpec(name=name, start=lambda: host, restart=Restart.TEMPORARY)
            try:
                await self.add(spec)
            except CallboardError as error:
                self.log.warning("a host was not taken in", host=name, reason=str(error))
                if not self._stopping:
                    host.dismiss(error)
                if name not in self._children:
                    del self._places[name]
                self._tickets.revoke(host.ticket)
            else:
                self._tickets.release(host.ticket)
                self.log.info("a host has joined", host=name)
