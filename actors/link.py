"""The link: a replica's end of the connection to the coordinator."""

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.actors.session import Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem
from callboard.actors.transport import Network
from callboard.messages.events import RequestStats, StepStats
from callboard.messages.membership import Role
from callboard.messages.requests import Abort, Accepted, ForgetAll, Refused, Submit, TokensOut

ToReplica = Submit | Abort
FromReplica = Accepted | Refused | TokensOut | StepStats | RequestStats

LinkInbox = FromReplica | Said | Joined | Left


class Link(Actor[LinkInbox]):
    """Passes requests in and tokens out. Whatever a new session begins with, it begins empty."""

    capacity = 4 * 1024

    def __init__(
        self,
        system: ActorSystem,
        network: Network,
        endpoint: str,
        *,
        replica: str,
        tokenizer: ActorRef[Submit | Abort | ForgetAll],
    ) -> None:
        self._system = system
        self._network = network
        self._endpoint = endpoint
        self._replica = replica
        self._tokenizer = tokenizer
        self._connection: Connection | None = None
        self._connected = False

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
            deliver=self.ref.tell,
        )
        self.spawn(self._connection.run)
        await self._connection.wait_welcome()

    async def on_stop(self) -> None:
        """Say goodbye, so that the coordinator gives the requests to others at once."""
        if self._connection is not None:
            self._connection.close()

    async def receive(self, message: LinkInbox) -> None:
        """Handle one message."""
        match message:
            case Said(message=said):
                await self._tokenizer.tell(said)
            case Joined():
                self._connected = True
                await self._tokenizer.tell(ForgetAll())
            case Left(reason=reason):
                # The coordinator gives what we had to others, or to us again after a new Joined.
                self._connected = False
                self.log.warning("coordinator lost", reason=reason)
                await self._tokenizer.tell(ForgetAll())
            case _:
                if self._connected and self._connection is not None:
                    self._connection.send_nowait(message)

    def details(self) -> dict[str, int | float | str]:
        """Return where it is connected to."""
        return {"endpoint": self._endpoint, "connected": int(self._connected)}
