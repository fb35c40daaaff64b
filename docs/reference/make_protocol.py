"""Writes protocol.md, beside this file, from the message types themselves.

    python docs/reference/make_protocol.py

A test fails when the page is not what this makes of the code.
"""

import enum
import inspect
import types
import typing
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import msgspec

import callboard.messages
from callboard.actors.actor import Actor, ActorExited, StopActor
from callboard.actors.coordinator import Coordinator, FromClient, ToClient
from callboard.actors.executor import Executor
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.link import FromReplica, Link, ToReplica
from callboard.actors.metrics import Metrics
from callboard.actors.scheduler import Scheduler
from callboard.actors.session import (
    OUTBOX,
    PING_INTERVAL_S,
    SESSION,
    SILENCE_LIMIT_S,
    WINDOW,
    Joined,
    Left,
    Said,
)
from callboard.actors.tokenizer import Tokenizer
from callboard.messages.base import Call, Message
from callboard.messages.codec import members, reply_type
from callboard.messages.control import GetNode, Verb
from callboard.messages.membership import PROTOCOL_VERSION, Role
from callboard.supervision.joined import FromHost, JoinedHost, JoinedHosts, ToHost
from callboard.supervision.process import FromReplicaProcess, ReplicaProcess
from callboard.supervision.remote import ToRemote
from callboard.supervision.root import FromOperator, Root, ToOperator
from callboard.supervision.supervisor import Supervisor

PAGE = Path(__file__).with_name("protocol.md")

ACTORS: tuple[type[Actor[Any]], ...] = (
    Root,
    Supervisor,
    ReplicaProcess,
    JoinedHosts,
    JoinedHost,
    Coordinator,
    Metrics,
    Scheduler,
    KVAllocator,
    Executor,
    Tokenizer,
    Link,
)

SOCKETS = (
    ("Requests", Coordinator, Role.CLIENT, FromClient, ToClient),
    ("Requests", Coordinator, Role.REPLICA, FromReplica, ToReplica),
    ("Verbs", Root, Role.OPERATOR, FromOperator, ToOperator),
    ("Verbs", Root, Role.REPLICA, FromHost, ToHost),
    ("A replica process", ReplicaProcess, Role.REPLICA, FromReplicaProcess, ToRemote),
)

CONTROL_LANE = Verb | GetNode | StopActor

IN_PROCESS = (Said, Joined, Left, StopActor, ActorExited)

INTRODUCTION = f"""\
# Messages

This page is made from the code by `docs/reference/make_protocol.py`; do not edit it.

The protocol version is {PROTOCOL_VERSION}.
A frame is one `Envelope`, a msgpack array without a name, whose `body` is a message.
A message is a msgpack array as well: the name of its type, then its fields in the order given here.
It grows only by optional fields at its end.
What a message holds is an array without a name, or, where that is said, a map from field names; \
one with a `type` names its type there.
Token ids are packed as little-endian int32 and log-probabilities as little-endian float32; \
both are `bytes` below.
"""

SOCKETS_TEXT = f"""\
## Sockets

Each socket is a ZMQ ROUTER at the side that listens and a DEALER at the side that connects.
Whoever connects says `Hello` with its role, and what a role may say and be told is fixed.
Who listens answers a frame of any other type with `FrameRefused`, and nothing changes.
Either side may have {WINDOW:,} frames under way that the other has not taken, \
and keeps {OUTBOX:,} more for a peer that is behind.
A side that hears nothing sends `Ping` every {PING_INTERVAL_S:g} s, \
and gives a peer up after {SILENCE_LIMIT_S:g} s of silence.

| socket | listens | role | may say | is told |
|---|---|---|---|---|
"""

SESSION_TEXT = """
On every socket, besides: {session}.
The answer to a call, named in its section below, goes back over the same socket as an `Answer`.
"""

ACTORS_TEXT = """\
## Actors

Each actor reads one mailbox with two lanes.
The control lane is always read first; into it go the messages marked *urgent* below, \
and every actor understands {control}.
What an actor may find in its data lane is its inbox.
A name that begins with an underscore is a message of the actor to itself.

| actor | file | inbox |
|---|---|---|
"""

IN_PROCESS_TEXT = (
    "Between actors of one process only; see `actors/session.py` and `actors/actor.py`."
)


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, _sockets(), _actors(), *_sections()])


def inbox(actor: type[Actor[Any]]) -> Any:
    """Return the union of messages an actor handles, those to itself included."""
    return typing.get_type_hints(actor.receive)["message"]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(PAGE)


def _sockets() -> str:
    rows = [
        f"| {name} | {owner.__name__} | {role} | {_names(says)} | {_names(told)} |"
        for name, owner, role, says, told in SOCKETS
    ]
    besides = SESSION_TEXT.format(session=_names(SESSION))
    return SOCKETS_TEXT + "\n".join(rows) + "\n" + besides


def _actors() -> str:
    rows = [f"| {actor.__name__} | `{_path(actor)}` | {_names(inbox(actor))} |" for actor in ACTORS]
    text = ACTORS_TEXT.format(control=_names(CONTROL_LANE))
    return text + "\n".join(rows) + "\n"


def _sections() -> Iterator[str]:
    for name in sorted(found.name for found in iter_modules(callboard.messages.__path__)):
        kinds = _own_types(f"callboard.messages.{name}")
        if kinds:
            module = import_module(f"callboard.messages.{name}")
            yield from _section(f"messages/{name}.py", _about(module), kinds)
    yield from _section("Inside a process", IN_PROCESS_TEXT, IN_PROCESS)


def _about(module: types.ModuleType) -> str:
    """Return what a module says of itself: its first paragraph, or the whole with a drawing."""
    text = inspect.cleandoc(module.__doc__ or "")
    return f"```text\n{text}\n```" if "├" in text else text.split("\n\n")[0]


def _section(title: str, text: str, kinds: Iterable[Any]) -> Iterator[str]:
    yield f"## {title}\n\n{text}\n"
    for kind in kinds:
        yield _entry(kind)


def _own_types(module_name: str) -> list[Any]:
    """Return the message types, structs and enums a module defines, in its order."""
    module = import_module(module_name)
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and kind.__module__ == module_name
        and kind not in (Message, Call)
        and (issubclass(kind, msgspec.Struct | enum.Enum))
    ]


def _entry(kind: Any) -> str:
    notes = ", ".join(_notes(kind))
    title = f"### {kind.__name__}" + (f" ({notes})" if notes else "")
    lines = [title, "", inspect.cleandoc(kind.__doc__ or ""), ""]
    rows = _values(kind) if issubclass(kind, enum.Enum) else _fields(kind)
    return "\n".join(lines + rows)


def _notes(kind: Any) -> Iterator[str]:
    if issubclass(kind, Message) and kind.urgent:
        yield "urgent"
    if issubclass(kind, Call):
        yield f"asked: answered by {_type(reply_type(kind))}"
    if issubclass(kind, msgspec.Struct) and not kind.__struct_config__.array_like:
        yield f"a map with a `{kind.__struct_config__.tag_field}`" if _is_tagged(kind) else "a map"


def _is_tagged(kind: type[msgspec.Struct]) -> bool:
    return kind.__struct_config__.tag is not None


def _values(kind: type[enum.Enum]) -> list[str]:
    return [", ".join(f"`{member.value}`" for member in kind), ""]


def _fields(kind: type[msgspec.Struct]) -> list[str]:
    fields = msgspec.structs.fields(kind)
    if not fields:
        return []
    rows = [f"| `{field.name}` | {_type(field.type)} | {_default(field)} |" for field in fields]
    return ["| field | type | default |", "|---|---|---|", *rows, ""]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if field.default is msgspec.NODEFAULT:
        return ""
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return f"`{value!r}`"


def _type(kind: Any) -> str:
    """Return a type as a table cell; the same on every version of Python."""
    return f"`{_type_text(kind)}`".replace("|", "\\|")


def _type_text(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_text(argument) for argument in arguments)
    if arguments:
        return f"{origin.__name__}[{', '.join(_type_text(argument) for argument in arguments)}]"
    if kind is types.NoneType:
        return "None"
    return "..." if kind is Ellipsis else str(getattr(kind, "__name__", kind))


def _names(union: Any) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in members(union))


def _path(kind: type) -> str:
    return kind.__module__.removeprefix("callboard.").replace(".", "/") + ".py"


if __name__ == "__main__":
    main()
