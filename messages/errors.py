"""Everything that can go wrong, drawn once, each with who must act.

CallboardError
├── WireError              bytes that are no message: malformed, unknown, too large  (peer's bug)
│   └── ProtocolMismatch   the two ends speak different versions or types            (upgrade one)
├── DeliveryError
│   ├── MailboxFull        nothing was queued; try later                             (back off)
│   ├── ActorStopped       it will never answer                                      (give up)
│   ├── ActorFailed        it died of this message or while holding it               (decide)
│   ├── DeadlineExceeded   it may still have acted                                   (decide)
│   └── Unreachable        nobody answers at that endpoint                           (start it)
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
├── ControlRefused         the verb is illegal in this state                         (operator)
│   └── WeightsError       those weights cannot be used; the old ones still are      (operator)
├── ConfigError            a setting or file is wrong                                (operator)
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
    """The bounded lane has no room; nothing was queued."""


class ActorStopped(DeliveryError):
    """The actor will never answer."""


class ActorFailed(DeliveryError):
    """The actor died while it held the message."""


class DeadlineExceeded(DeliveryError):
    """No answer came in time; the message may still have acted."""


class Unreachable(DeliveryError):
    """Nobody answers at that endpoint."""


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


class SupervisionError(CallboardError):
    """A supervisor could not keep its children alive."""


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
