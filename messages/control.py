"""The conversation about the tree's state: verbs down, acknowledgements up.

A verb is acknowledged after its effect, with the state reached. Repeating one is harmless, but for
STEP. An illegal one is refused by name, and changes nothing.

New weights are taken by all replicas or by none, so UPDATE_WEIGHTS goes down the tree twice: every
part prepares, and says whether it can; then all commit, or all cancel.
"""

import enum
import re
from typing import ClassVar

import msgspec

from callboard.messages.base import Call, Message
from callboard.messages.errors import Failure


class State(enum.StrEnum):
    """Where a replica, or the whole tree, is in its life cycle."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    UNPAUSING = "unpausing"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class PauseMode(enum.StrEnum):
    """What PAUSE does with the requests that run: leave them, finish them, or abort them."""

    KEEP = "keep"
    DRAIN = "drain"
    ABORT = "abort"


class KVLevel(enum.StrEnum):
    """What SUSPEND does with the KV cache.

    It is freed and running requests are computed again, or it is kept on the host until RESUME, or
    it is left.
    """

    DROP = "drop"
    OFFLOAD = "offload"
    KEEP = "keep"


class WeightsLevel(enum.StrEnum):
    """What SUSPEND does with the weights.

    They are left, or kept on the host until RESUME, or freed until RESUME loads them again.
    """

    KEEP = "keep"
    OFFLOAD = "offload"
    DISCARD = "discard"


class UpdatePhase(enum.StrEnum):
    """How far an update of weights is: they are read and checked; they are used; or they go."""

    PREPARE = "prepare"
    COMMIT = "commit"
    CANCEL = "cancel"


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights and where they are read from; of two versions the later has the higher number.

    Those the tree was started with are version 0.
    """

    source: str
    version: int


class ChildAck(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of the tree answered to a verb."""

    name: str
    state: State
    bytes_freed: int = 0
    requests: int = 0
    failure: str = ""
    steps: int = 0


class ControlReply(Message, frozen=True):
    """Tree → operator: the verb is done, was refused, or some parts did not answer in time.

    `requests` are open; `steps` are the forward passes a STEP has run, in all replicas. Where a
    part was asked for what it cannot do, `failure` says so as an error, too.
    """

    verb: str
    state: State
    refused: str = ""
    late: tuple[str, ...] = ()
    children: tuple[ChildAck, ...] = ()
    seconds: float = 0.0
    bytes_freed: int = 0
    requests: int = 0
    steps: int = 0
    failure: Failure | None = None

    @property
    def done(self) -> bool:
        """Whether the verb has had its effect everywhere."""
        return not self.refused and not self.late


class Pause(Call[ControlReply], frozen=True):
    """Operator → tree: run no forward pass from the acknowledgement on."""

    urgent: ClassVar[bool] = True
    mode: PauseMode = PauseMode.KEEP
    drain_s: float = 60.0  # longest wait for running requests in mode drain


class Unpause(Call[ControlReply], frozen=True):
    """Operator → tree: step again."""

    urgent: ClassVar[bool] = True


class Suspend(Call[ControlReply], frozen=True):
    """Operator → tree: pause, then free device memory; acknowledged when it is free."""

    urgent: ClassVar[bool] = True
    kv: KVLevel = KVLevel.DROP
    weights: WeightsLevel = WeightsLevel.KEEP


class Resume(Call[ControlReply], frozen=True):
    """Operator → tree: take the memory back and return to the state SUSPEND found."""

    urgent: ClassVar[bool] = True


class Stop(Call[ControlReply], frozen=True):
    """Operator → tree: refuse new requests, let open ones run for `drain_s`, then end the rest.

    Acknowledged when every accepted request has its terminal delta.
    """

    urgent: ClassVar[bool] = True
    drain_s: float = 0.0


class Step(Call[ControlReply], frozen=True):
    """Operator → tree: run `count` forward passes in each replica and be paused again.

    Acknowledged when that is so; fewer are run where there is nothing left to run. Only what is
    paused can be stepped.
    """

    urgent: ClassVar[bool] = True
    count: int = 1


class UpdateWeights(Call[ControlReply], frozen=True):
    """Operator → tree: compute with other weights from now on, in all replicas or in none.

    They are of the model's shape and vocabulary; `source` is what a model may be called by. Only
    what is paused or suspended takes them; where the weights were freed they are read at RESUME.
    Version 0 is one more than the present one. Cached prefixes are forgotten, and running requests
    are computed again, unless `keep_kv` leaves them what the old weights made of their tokens.

    Root → tree: `phase` says what part of that is due.
    """

    urgent: ClassVar[bool] = True
    source: str
    version: int = 0
    keep_kv: bool = False
    phase: UpdatePhase = UpdatePhase.PREPARE

    @property
    def weights(self) -> Weights:
        """The weights it names."""
        return Weights(source=self.source, version=self.version)


Verb = Pause | Unpause | Suspend | Resume | Stop | Step | UpdateWeights


def verb_name(verb: Verb) -> str:
    """Return what operators call a verb: `update-weights`, say."""
    words = re.findall("[A-Z][a-z]*", type(verb).__name__)
    return "-".join(words).lower()


class LifeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """When a life of a part ended, in seconds since 1970, and of what; "" in good order."""

    at: float
    reason: str


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the tree: its state, how often it was restarted, where it runs, its children.

    `ends` are the last ends of its lives, oldest first. `restarts_left` is how often a supervisor
    may restart children now before it gives up. A part that is `late` has not answered in time, and
    is described, without what is below it, by what is known of it.
    """

    name: str
    kind: str
    state: State
    restarts: int = 0
    pid: int = 0
    details: dict[str, int | float | str] = msgspec.field(default_factory=dict)
    children: tuple["NodeStatus", ...] = ()
    ends: tuple[LifeEnd, ...] = ()
    restarts_left: int | None = None
    late: bool = False


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica is doing, picked out of its part of the tree.

    `steps` counts forward passes since its scheduler started; `paused` requests are those that run
    and wait for a KV block.
    """

    name: str
    state: State
    pid: int
    restarts: int
    steps: int = 0
    running: int = 0
    waiting: int = 0
    paused: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    weights_version: int = 0


class StatusReply(Message, frozen=True):
    """Tree → operator: the state of the whole, its replicas, and the tree itself.

    `model` is what the weights are read from that all replicas are to have. `late` names the parts
    that have not answered in time.
    """

    state: State
    endpoint: str
    model: str
    version: str
    tree: NodeStatus
    replicas: tuple[ReplicaStatus, ...] = ()
    weights_version: int = 0
    late: tuple[str, ...] = ()


class GetStatus(Call[StatusReply], frozen=True):
    """Operator → tree: what are you doing? Answered at once in any state."""

    urgent: ClassVar[bool] = True


class GetNode(Call[NodeStatus], frozen=True):
    """Supervisor → child: describe yourself and what is below you."""

    urgent: ClassVar[bool] = True


class AbortReply(Message, frozen=True):
    """Tree → operator: so many open requests were found and aborted, and have ended."""

    aborted: int


class AbortRequests(Call[AbortReply], frozen=True):
    """Operator → tree: abort one request by id, or all of them with the flag."""

    urgent: ClassVar[bool] = True
    request_id: str = ""
    all: bool = False
