"""What happened in a simulation, in order: the same lines for the same seed."""

from typing import Any

import msgspec

from callboard.actors.session import Joined, Left, Said
from callboard.messages.base import unpack_ids
from callboard.messages.requests import Delta

PACKED = {"token_ids", "delivered", "prompt_token_ids", "prompt"}


class EventLog:
    """Lines of time, who, what and about what; put into words only when somebody reads them."""

    def __init__(self) -> None:
        self._events: list[tuple[float, str, str, object]] = []

    def add(self, now: float, who: str, what: str, about: object = "") -> None:
        """Add a line."""
        self._events.append((now, who, what, about))

    def __len__(self) -> int:
        return len(self._events)

    def lines(self) -> list[str]:
        """Return the lines."""
        return [
            f"{now:10.4f}  {who:<24} {what:<9} {describe(about)}".rstrip()
            for now, who, what, about in self._events
        ]


def describe(value: object) -> str:
    """Say a message in a line, without what is as it always is."""
    match value:
        case str():
            return value
        case Said(message=message, peer=peer):
            return f"{peer.hex()[-4:] or 'server'}: {describe(message)}"
        case Joined(peer=peer, hello=hello):
            return f"{peer.hex()[-4:] or 'server'}: Joined({describe(hello)})"
        case Left(peer=peer, reason=reason):
            return f"{peer.hex()[-4:] or 'server'}: Left({reason})"
        case Delta():
            return f"{value.request_id}[{value.start}]{_fields(value, {'request_id', 'start'})}"
        case msgspec.Struct():
            return type(value).__name__ + _fields(value, set())
        case _:
            return repr(value)


def _fields(struct: msgspec.Struct, without: set[str]) -> str:
    parts = []
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.name in without or field.name in ("events", "usage") or _is_default(field, value):
            continue
        parts.append(f"{field.name}={_value(field.name, value)}")
    return f"({', '.join(parts)})"


def _is_default(field: msgspec.structs.FieldInfo, value: object) -> bool:
    if field.default is not msgspec.NODEFAULT:
        return bool(value == field.default)
    return field.default_factory is not msgspec.NODEFAULT and not value


def _value(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        if name in PACKED and len(value) % 4 == 0:
            return str(unpack_ids(value))
        return f"{len(value)} bytes"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(name, item)}" for key, item in value.items()) + "}"
    return describe(value)
