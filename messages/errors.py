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
├── UnknownRequest         no such request is open; a KeyError, too                  (client fixes)
├── RequestFailed          the engine could not finish it                            (operator)
├── ControlRefused         the verb is illegal in this state                         (operator)
├── OutOfBlocks            no cache space; the scheduler makes a request wait        (scheduler)
├── ConfigError            a setting or file is wrong                                (operator)
└── SupervisionError
    ├── StartFailed        a child did not start                                     (escalates)
    └── RestartIntensityReached                                                      (escalates)

A `Failure` is the same thing as data: it travels, and `Failure.error()` makes the exception again.
"""

import msgspec


class CallboardError(Exception):
    """Base of all errors of this package."""


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

    def __init__(self, message: str, *, field: str = "", allowed: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.allowed = allowed


class UnknownRequest(CallboardError, KeyError):
    """No request of that id is open."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError's is the repr of the message


class RequestFailed(CallboardError):
    """The engine could not finish the request."""


class ControlRefused(CallboardError):
    """The verb is illegal in the state the tree is in."""


class OutOfBlocks(CallboardError):
    """The block pool cannot supply that many blocks."""


class ConfigError(CallboardError):
    """A setting or a file an operator named is wrong."""


class SupervisionError(CallboardError):
    """A supervisor could not keep its children alive."""


class StartFailed(SupervisionError):
    """A child did not start."""


class RestartIntensityReached(SupervisionError):
    """A child died more often than its supervisor may restart it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error as data: `code` is the name of a class above."""

    code: str
    message: str
    field: str = ""
    allowed: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an exception; a foreign one becomes an `ActorFailed` that names its type."""
        if isinstance(error, RequestError):
            return cls(
                code="RequestError", message=str(error), field=error.field, allowed=error.allowed
            )
        if isinstance(error, CallboardError):
            return cls(code=type(error).__name__, message=str(error))
        return cls(code="ActorFailed", message=f"{type(error).__name__}: {error}")

    def error(self) -> CallboardError:
        """Return the exception this failure describes."""
        if self.code == "RequestError":
            return RequestError(self.message, field=self.field, allowed=self.allowed)
        return _BY_NAME.get(self.code, CallboardError)(self.message)


def _family(root: type[CallboardError]) -> list[type[CallboardError]]:
    return [root] + [kind for child in root.__subclasses__() for kind in _family(child)]


_BY_NAME = {kind.__name__: kind for kind in _family(CallboardError)}
