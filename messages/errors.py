"""Everything that can go wrong, drawn once, each with who must act.

CallboardError
├── WireError              bytes that are no message: malformed, unknown, too large  (peer's bug)
│   └── ProtocolMismatch   the two ends speak different versions or types            (upgrade one)
├── DeliveryError
│   ├── MailboxFull        nothing was queued; try later, it may say when            (back off)
│   ├── ActorStopped       it will never answer                                      (give up)
│   ├── ActorFailed        it died of this message or while holding it               (decide)
│   ├── DeadlineExceeded   it may still have acted                                   (decide)
│   ├── NameInUse          a peer of that name is there already         (take another, or wait)
│   ├── SlowReader         it did not read what it was sent             (read faster, or ask less)
│   ├── TooManyPeers       it has as many of that role as it takes; try later        (back off)
│   └── Unreachable        nobody answers at that endpoint                           (start it)
├── AccessDenied           the key is not on the list, or not with that role         (operator)
├── RequestError           this request alone is wrong: a field and what is allowed  (client fixes)
│   └── ContextOverflow    it never fits (client fixes), or not now              (scheduler waits)
│       ├── RowOverflow            all places for rows are taken
│       ├── ActiveRequestOverflow  more rows would run than may
│       ├── TokenOverflow          the step would feed more tokens than it may
│       ├── SequenceOverflow       it is longer than the model's context: never fits
│       ├── OutOfBlocks            the pool has not as many KV blocks
│       ├── OutOfStateSlots        no slot is left for its recurrent state
│       └── MemoryDeallocated      the memory is given back until it is resumed
├── UnknownRequest         no such request is open; a KeyError, too                  (client fixes)
├── RequestFailed          the engine could not finish it                            (operator)
├── DeviceError            the device failed in a step                 (its group is restarted)
│   ├── OutOfMemory        it has not the memory for such a step       (scheduler tries less)
│   ├── DeviceLost         its context is dead in this process         (process is replaced)
│   └── StepStuck          a step does not end                         (process is replaced)
├── ControlRefused         the verb is illegal in this state                         (operator)
│   └── WeightsError       those weights cannot be used; the old ones still are      (operator)
├── ConfigError            a setting or file is wrong                                (operator)
├── WrongThread            an engine is used in a thread that is not its own         (caller fixes)
└── SupervisionError
    ├── StartFailed        a child did not start                                     (escalates)
    └── RestartIntensityReached                                                      (escalates)

A `Failure` is the same thing as data: it travels, and `Failure.error()` makes the exception again.
"""

from typing import Any, ClassVar

import msgspec


class CallboardError(Exception):
    """Base of all errors of this package; `attributes` names what it has beside its message."""

    attributes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class WireError(CallboardError):
    """These bytes are no message."""


class ProtocolMismatch(WireError):
    """The two ends of a connection speak different versions or different message types."""


class DeliveryError(CallboardError):
    """A message did not get its effect or its answer."""


class MailboxFull(DeliveryError):
    """There is no room; nothing was queued. `retry_after_s` is when to try again, 0 if unknown."""

    attributes: ClassVar[tuple[str, ...]] = ("retry_after_s",)

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ActorStopped(DeliveryError):
    """The actor will never answer."""


class ActorFailed(DeliveryError):
    """The actor died while it held the message."""


class DeadlineExceeded(DeliveryError):
    """No answer came in time; the message may still have acted."""


class NameInUse(DeliveryError):
    """Another peer of that role and name is there, and alive."""


class SlowReader(DeliveryError):
    """A client did not read what it was sent, so its requests were ended."""


class TooManyPeers(DeliveryError):
    """The server has as many peers of that role as it takes."""


class Unreachable(DeliveryError):
    """Nobody answers at that endpoint."""


class AccessDenied(CallboardError):
    """The key that was used is not on the server's list, or not with that role."""


class RequestError(CallboardError):
    """One request is wrong; `field` names what and `allowed` says what would be right."""

    attributes: ClassVar[tuple[str, ...]] = ("field", "allowed")

    def __init__(self, message: str, *, field: str = "", allowed: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.allowed = allowed


class ContextOverflow(RequestError):
    """A request does not fit what is there; nothing was changed.

    A transient one may fit later, so the scheduler lets it wait and no client hears of it; any
    other never fits, and the request is refused. `row` is None and `request_id` empty where who
    raises it knows none.
    """

    attributes: ClassVar[tuple[str, ...]] = (
        *RequestError.attributes,
        "request_id",
        "row",
        "transient",
    )

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        row: int | None = None,
        transient: bool = True,
        field: str = "",
        allowed: str = "",
    ) -> None:
        super().__init__(message, field=field, allowed=allowed)
        self.request_id = request_id
        self.row = row
        self.transient = transient

    def __str__(self) -> str:
        request = f"request {self.request_id}" if self.request_id else ""
        row = "" if self.row is None else f"row {self.row}"
        return ": ".join(part for part in (request, row, self.message) if part)


class RowOverflow(ContextOverflow):
    """All places for rows are taken."""


class ActiveRequestOverflow(ContextOverflow):
    """More rows would run in a step than may."""


class TokenOverflow(ContextOverflow):
    """The step would feed more tokens than its budget."""


class SequenceOverflow(ContextOverflow):
    """Prompt and output together are longer than the model's context: that never fits."""

    attributes: ClassVar[tuple[str, ...]] = (*RequestError.attributes, "request_id", "row")

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        row: int | None = None,
        field: str = "",
        allowed: str = "",
    ) -> None:
        super().__init__(
            message, request_id=request_id, row=row, transient=False, field=field, allowed=allowed
        )


class OutOfBlocks(ContextOverflow):
    """The block pool cannot supply that many blocks."""


class OutOfStateSlots(ContextOverflow):
    """No slot is left for the recurrent state of one more row."""


class MemoryDeallocated(ContextOverflow):
    """The memory that rows stand in is given back; there is none until it is allocated again."""


class UnknownRequest(CallboardError, KeyError):
    """No request of that id is open."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError's is the repr of the message


class RequestFailed(CallboardError):
    """The engine could not finish the request."""


class ControlRefused(CallboardError):
    """The verb is illegal in the state the tree is in."""


class WeightsError(ControlRefused):
    """New weights cannot be used: the message names file and tensor. The old ones still are."""


class ConfigError(CallboardError):
    """A setting or a file an operator named is wrong."""


class DeviceError(CallboardError):
    """The device failed in a step, and with it every row is lost."""


class OutOfMemory(DeviceError):
    """The device has not the memory for such a step; it is as good as before for a smaller one."""


class DeviceLost(DeviceError):
    """The device's context is dead, and every later call in this process fails as well."""


class StepStuck(DeviceError):
    """A step did not end in its time, and nothing can make it end: its thread is left behind.

    `ill_s` is for how long nothing had come of the device by then, in seconds.
    """

    attributes: ClassVar[tuple[str, ...]] = ("ill_s",)

    def __init__(self, message: str, *, ill_s: float = 0.0) -> None:
        super().__init__(message)
        self.ill_s = ill_s


class WrongThread(CallboardError, RuntimeError):
    """An engine belongs to the trio program and the thread in which it was opened."""


class SupervisionError(CallboardError):
    """A supervisor could not keep its children alive.

    `ill_s` is for how long the child had not been well when it failed, in seconds.
    """

    attributes: ClassVar[tuple[str, ...]] = ("ill_s",)

    def __init__(self, message: str, *, ill_s: float = 0.0) -> None:
        super().__init__(message)
        self.ill_s = ill_s


class StartFailed(SupervisionError):
    """A child did not start."""


class RestartIntensityReached(SupervisionError):
    """A child died more often than its supervisor may restart it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: `code` is the name of a class above, the rest its attributes."""

    code: str
    message: str
    field: str = ""
    allowed: str = ""
    request_id: str = ""
    row: int | None = None
    transient: bool = False
    retry_after_s: float = 0.0
    ill_s: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an exception; a foreign one becomes an `ActorFailed` that names its type.

        One that derives from a class above goes as that class.
        """
        if not isinstance(error, CallboardError):
            return cls(code="ActorFailed", message=f"{type(error).__name__}: {error}")
        attributes = {name: getattr(error, name) for name in error.attributes}
        return cls(code=_code(type(error)), message=error.message, **attributes)

    def error(self) -> CallboardError:
        """Return the exception this failure describes."""
        kind = _BY_NAME.get(self.code, CallboardError)
        attributes: dict[str, Any] = {name: getattr(self, name) for name in kind.attributes}
        return kind(self.message, **attributes)


def _code(kind: type[CallboardError]) -> str:
    known = next(base for base in kind.__mro__ if _BY_NAME.get(base.__name__) is base)
    # Of an error that is like none of them, its own name says most.
    return kind.__name__ if known is CallboardError else known.__name__


def _family(root: type[CallboardError]) -> list[type[CallboardError]]:
    return [root] + [kind for child in root.__subclasses__() for kind in _family(child)]


_BY_NAME = {kind.__name__: kind for kind in _family(CallboardError)}
