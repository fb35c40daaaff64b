"""The link: a replica's end of the connection to the coordinator."""

import contextlib

import trio

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.actors.session import (
    PING_INTERVAL_S,
    SILENCE_LIMIT_S,
    Connection,
    Joined,
    Left,
    Said,
)
from callboard.actors.system import ActorSystem
from callboard.actors.transport import Network
from callboard.messages.errors import NameInUse, Unreachable
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.membership import Role
from callboard.messages.requests import Abort, Accepted, ForgetAll, Refused, Submit, TokensOut

ToReplica = Submit | Abort
FromReplica = Accepted | Refused | TokensOut | StepStats | RequestStats

LinkInbox = FromReplica

NAME_TIMEOUT_S = SILENCE_LIMIT_S + 5.0
"""How long a life before this one may take to be missed, when its machine died without a word."""


class Link(Actor[LinkInbox]):
    """Passes requests in and tokens out. Whatever a new session begins with, it begins empty.

    What comes in goes from the connection's task to the tokenizer, past the mailbox: scheduler and
    tokenizer may wait for room in that, so nothing that waits for them may stand in it.
    """

    capacity = 4 * 1024

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        endpoint: str,
        *,
        replica: str,
        tokenizer: ActorRef[Submit | Abort | ForgetAll],
        ticket: str = "",
    ) -> None:
        self._system = system
        self._network = network
        self._endpoint = endpoint
        self._replica = replica
        self._tokenizer = tokenizer
        self._ticket = ticket
        self._connection: Connection | None = None

    async def on_start(self) -> None:
        """Connect; the replica is up when the coordinator has welcomed it."""
        self._connection = Connection(
            self._system,
            self._network,
            self._endpoint,
            role=Role.REPLICA,
            name=self._replica,
            inbox=ToReplica,
            outbox=FromReplica,
            deliver=self._deliver,
            ticket=self._ticket,
        )
        self.spawn(self._connection.run)
        await self._wait_welcome(self._connection)

    async def on_stop(self) -> None:
        """Say goodbye, so that the coordinator gives the requests to others at once."""
        if self._connection is not None:
            self._connection.close()

    async def receive(self, message: LinkInbox) -> None:
        """Pass on what the replica says, if there is somebody to hear it.

        A message lost with its session is not missed: the coordinator gives the request out again.
        """
        if self._connection is not None and self._connection.present:
            with contextlib.suppress(Unreachable):
                self._connection.send_nowait(message)

    def details(self) -> dict[str, int | float | str]:
        """Return where it is connected to."""
        connected = self._connection is not None and self._connection.present
        return {"endpoint": self._endpoint, "connected": int(connected)}

    async def _wait_welcome(self, connection: Connection) -> None:
        give_up_at = trio.current_time() + NAME_TIMEOUT_S
        while True:
            try:
                await connection.wait_welcome()
                return
            except NameInUse:
                if trio.current_time() >= give_up_at:
                    raise
            await trio.sleep(PING_INTERVAL_S)

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said(message=said):
                await self._tokenizer.tell(said)
            case Joined():
                await self._tokenizer.tell(ForgetAll())
            case Left(reason=reason):
                # The coordinator gives what we had to others, or to us again after a new Joined.
                self.log.warning("coordinator lost", reason=reason)
                await self._tokenizer.tell(ForgetAll())
