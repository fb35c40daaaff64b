"""The conversation of a connection: who is there, is it compatible, is it still alive.

The connecting side speaks first: Hello. The other answers Welcome or Unwelcome. After that either
side may send Ping, answered by Pong; any frame counts as a sign of life.
"""

import enum

from callboard.messages.base import Call, Message
from callboard.messages.control import Suspend, Weights
from callboard.messages.errors import Failure

PROTOCOL_VERSION = 1


class Role(enum.StrEnum):
    """What a peer is to the side it connects to."""

    CLIENT = "client"
    OPERATOR = "operator"
    REPLICA = "replica"


class Hello(Message, frozen=True):
    """Connecting side → listening side, first frame: my version, role, name and message types.

    `instance` is a secret of the connecting side that it keeps as long as it lives, so that it can
    be told from others of its name, and go on with what it had open when it lost its session. A
    replica has its `ticket` from whoever started it or took it in.
    """

    version: int
    role: Role
    name: str
    incarnation: int
    schema: str
    instance: str = ""
    ticket: str = ""


class Welcome(Message, frozen=True):
    """Listening side → connecting side: you may speak; this is what I am.

    `session` changes whenever the listening side starts from nothing with this peer, be it that
    it was restarted or that it had given the peer up: whatever was open has to be said again.
    """

    name: str
    session: str
    max_frame_bytes: int
    control_endpoint: str = ""
    model: str = ""


class Unwelcome(Message, frozen=True):
    """Listening side → connecting side: not with you, and why."""

    failure: Failure


class WhoAreYou(Message, frozen=True):
    """Listening side → connecting side: I do not know you (any more); say Hello again."""


class Ping(Message, frozen=True):
    """Either side: are you there?"""


class Pong(Message, frozen=True):
    """Either side: yes."""


class Credit(Message, frozen=True):
    """Either side: I have taken so many of your frames in all; you may send a window more."""

    taken: int


class ReplicaUp(Message, frozen=True):
    """Replica process → its root: my tree is up."""

    pid: int


class ReplicaFailed(Message, frozen=True):
    """Replica process or host → its root: my tree did not come up, or ended; I am going to exit."""

    failure: Failure


class HostUp(Message, frozen=True):
    """Host → root: my replicas are up."""

    pid: int


class StartHost(Call[HostUp], frozen=True):
    """Root → host: start your replicas, paused, with the memory and the weights they are to have.

    `settings` are those of the server, as JSON; with `ticket` the replicas register.
    """

    settings: bytes
    ticket: str
    suspended: Suspend | None = None
    weights: Weights | None = None


class Bye(Message, frozen=True):
    """Either side: I am leaving in good order; `for_good` when I was told to stop."""

    for_good: bool = False


class FrameRefused(Message, frozen=True):
    """Either side: a frame of yours was no message, or not one for me. Nothing changed."""

    failure: Failure
