"""What a journal says: a conversation as a diagram, and its pure parts run again.

The scheduler and the block allocator do what they do because of what they are told, and of nothing
else but their settings. So each of their lives that is in a journal from its beginning can be run
again, told the same at the same times, and must say the same.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from callboard.actors.actor import Actor, Cell
from callboard.actors.journal import ABOUT, SUFFIX, Entry, process_of, read_journal
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import TextOut
from callboard.actors.mailbox import Letter, Reply
from callboard.actors.system import open_system
from callboard.messages.base import Call, Message
from callboard.messages.codec import decode_body, encode_body
from callboard.messages.control import GetNode, Verb
from callboard.messages.errors import WireError
from callboard.messages.sampling import SamplingParams
from callboard.messages.steps import RunStep
from callboard.supervision.app import scheduler
from callboard.supervision.settings import Settings

OUTSIDE = "·"
"""Who sent a message that nobody in the journal sent."""

_COLUMN = 22
_VERBS = Verb | GetNode


Process = list[Entry]
"""What one process wrote, in order: ids and lives mean something in it alone."""


def read(path: Path) -> list[Process]:
    """Return what a journal's file says, or what each process wrote into the files of a folder.

    Raises ValueError where there is none, OSError where it cannot be read.
    """
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"there is no journal in {path}")
    processes = itertools.groupby(files, key=process_of)
    return [[entry for file in own for entry in read_journal(file)] for _, own in processes]


class Arrow(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way, as a diagram shows it."""

    at: float
    sender: str
    receiver: str
    label: str


def arrows(
    processes: Iterable[Process], *, about: str = "", actors: Sequence[str] = ()
) -> Iterator[Arrow]:
    """Yield the messages by time, those only that name `about` and are from or to `actors`."""
    each = (_arrows_of(process, about, actors) for process in processes)
    return heapq.merge(*each, key=lambda arrow: arrow.at)


def _arrows_of(process: Process, about: str, actors: Sequence[str]) -> Iterator[Arrow]:
    handled: dict[int, str] = {}
    for entry in process:
        if entry.kind == ABOUT:
            continue
        handled[entry.message_id] = entry.receiver
        sender = handled.get(entry.cause, OUTSIDE)
        if actors and not {sender, entry.receiver} & set(actors):
            continue
        said = _plain(entry.body)
        if about and not _names(said, about):
            continue
        yield Arrow(at=entry.at, sender=sender, receiver=entry.receiver, label=_label(entry, said))


def diagram(shown: Sequence[Arrow]) -> Iterator[str]:
    """Yield the lines of a sequence diagram: a column an actor, a line a message."""
    if not shown:
        return
    names = list(dict.fromkeys(name for arrow in shown for name in (arrow.sender, arrow.receiver)))
    places = {name: index * _COLUMN + 1 for index, name in enumerate(names)}
    heads = "".join(_fitted(name).ljust(_COLUMN) for name in names)
    yield f"{'seconds':>10}  {heads}".rstrip()
    start = shown[0].at
    for arrow in shown:
        line = _drawn(arrow, places)
        yield f"{arrow.at - start:10.6f}  {line}"


def _drawn(arrow: Arrow, places: dict[str, int]) -> str:
    line = [" "] * (len(places) * _COLUMN)
    for place in places.values():
        line[place] = "|"
    here, there = places[arrow.sender], places[arrow.receiver]
    low, high = min(here, there), max(here, there)
    line[low + 1 : high] = "-" * (high - low - 1)
    if here < there:
        line[there - 1] = ">"
    elif here > there:
        line[there + 1] = "<"
    return "".join(line).rstrip() + f"  {arrow.label}"


def _fitted(name: str) -> str:
    return name if len(name) < _COLUMN else "…" + name[-(_COLUMN - 2) :]


def _plain(body: bytes) -> Any:
    """Return a message as lists: its tag first, then its fields."""
    try:
        return msgspec.msgpack.decode(body) if body else []
    except msgspec.MsgspecError:
        return []


def _names(said: Any, text: str) -> bool:
    if isinstance(said, list | tuple):
        return any(_names(part, text) for part in said)
    if isinstance(said, dict):
        return any(_names(part, text) for pair in said.items() for part in pair)
    return bool(said == text)


def _label(entry: Entry, said: Any) -> str:
    inner = next((part for part in said[1:] if isinstance(part, list)), None)
    if entry.kind in ("Said", "Joined") and inner and isinstance(inner[0], str):
        return f"{entry.kind} {_named(inner[0], inner)}"
    return _named(entry.kind, said)


def _named(kind: str, said: Any) -> str:
    """Return a message's name, and of its fields those that tell one from another."""
    fields = _fields().get(kind, ())
    values = dict(zip(fields, said[1:], strict=False))
    shown = [f"{name}={values[name]}" for name in ("request_id", "step", "verb") if name in values]
    return f"{kind}({', '.join(shown)})" if shown else kind


def _fields() -> dict[str, tuple[str, ...]]:
    """Return the field names of every message there is, by the name of its class."""

    def below(kind: type[Message]) -> Iterator[type[Message]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    return {kind.__name__: kind.__struct_fields__ for kind in below(Message)}


# The pure parts, run again


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of running a life again: how many messages it said alike, and what differed."""

    actor: str
    life: int
    alike: int = 0
    difference: str = ""
    skipped: str = ""


def run_again(
    process: Process, text_for: Callable[[SamplingParams], TextOut] | None = None
) -> list[Verdict]:
    """Run each life of a process's scheduler and allocator again that it wrote from the beginning.

    `text_for` is for schedulers whose requests have stop strings.
    """
    settings = settings_of(process)
    lives = dict.fromkeys(
        (entry.receiver, entry.life)
        for entry in process
        if entry.receiver.endswith(("/scheduler", "/kv_allocator"))
    )
    return [_run_life(process, name, life, settings, text_for) for name, life in lives]


def settings_of(process: Process) -> Settings:
    """Return what the process was started with, as the journal says."""
    for entry in process:
        if entry.kind == ABOUT and entry.body:
            settings: Settings = msgspec.msgpack.decode(entry.body, type=Settings)
            return settings
    return Settings()


def _run_life(
    process: Process,
    name: str,
    life: int,
    settings: Settings,
    text_for: Callable[[SamplingParams], TextOut] | None,
) -> Verdict:
    prefix, _, child = name.rpartition("/")
    told = [entry for entry in process if (entry.receiver, entry.life) == (name, life)]
    if not _begins(told):
        return Verdict(actor=name, life=life, skipped="its beginning is not in the journal")
    heard: list[tuple[str, Message]] = []

    def ref(other: str) -> Any:
        return _Listener(f"{prefix}/{other}", heard)

    def make() -> Actor[Any]:
        if child == "kv_allocator":
            return KVAllocator(ref("scheduler"))
        return scheduler(ref, settings, text_for=text_for)

    clock = MockClock()
    trio.run(_tell_all, make, name, told, clock, clock=clock)
    return _compared(name, life, heard, _said_by(process, name, told))


def _begins(told: Sequence[Entry]) -> bool:
    first_steps = [entry for entry in told if entry.kind in ("BlocksGranted", "ReserveBlocks")]
    if not first_steps:
        return bool(told)
    return bool(_plain(first_steps[0].body)[1] == 1)


class _Listener:
    """A ref that writes down what it is told."""

    def __init__(self, name: str, heard: list[tuple[str, Message]]) -> None:
        self.name = name
        self._heard = heard

    async def tell(self, message: Message) -> None:
        self.tell_nowait(message)

    def tell_nowait(self, message: Message) -> None:
        self._heard.append((self.name, message))

    async def ask(self, call: Call[Any], *, timeout: float = 5.0) -> Any:
        raise NotImplementedError("neither of them asks anybody")


async def _tell_all(
    make: Callable[[], Actor[Any]], name: str, told: Sequence[Entry], clock: MockClock
) -> None:
    kinds = type(make()).inbox() | _VERBS
    start = told[0].at
    async with open_system() as system, trio.open_nursery() as nursery:
        cell = system.cell(name)
        nursery.start_soon(cell.run, make)
        await wait_all_tasks_blocked()
        for entry in told:
            clock.jump(max(0.0, entry.at - start - trio.current_time()))
            await wait_all_tasks_blocked()
            if not entry.kind.startswith("_"):  # what it tells itself, it tells itself again
                await _tell(cell, decode_body(entry.body, kinds), asked=entry.asked)
        nursery.cancel_scope.cancel("all is told")


async def _tell(cell: Cell, message: Message, *, asked: bool) -> None:
    reply = Reply() if asked else None
    cell.mailbox.put_nowait(Letter(message, message_id=cell.system.next_message_id(), reply=reply))
    await wait_all_tasks_blocked()


def _said_by(process: Process, name: str, told: Sequence[Entry]) -> list[tuple[str, bytes]]:
    """Return what the actor said in that life, as the others have handled it, by receiver."""
    ids = {entry.message_id for entry in told}
    return [
        (entry.receiver, entry.body)
        for entry in process
        if entry.cause in ids and entry.receiver != name and entry.kind != ABOUT
    ]


def _compared(
    name: str,
    life: int,
    heard: Sequence[tuple[str, Message]],
    said: Sequence[tuple[str, bytes]],
) -> Verdict:
    """Compare by receiver, for between two receivers there is no order; times are told apart."""
    alike = 0
    for receiver in dict.fromkeys(receiver for receiver, _ in said):
        if receiver.endswith("/link"):
            continue  # what clients are told has times in it
        then = [body for to, body in said if to == receiver]
        now = [message for to, message in heard if to == receiver]
        for number, (body, message) in enumerate(zip(then, now, strict=False)):
            if _comparable(body, type(message)) != _comparable(encode_body(message), type(message)):
                what = f"message {number} to {receiver}: {_plain(body)!r:.200} was said, and now "
                return Verdict(
                    actor=name, life=life, alike=alike, difference=what + f"{message!r:.200}"
                )
            alike += 1
        if len(now) < len(then):
            what = f"{len(then)} messages to {receiver} were said, and now {len(now)}"
            return Verdict(actor=name, life=life, alike=alike, difference=what)
    return Verdict(actor=name, life=life, alike=alike)


def _comparable(body: bytes, kind: type[Message]) -> Message | bytes:
    """Return a message without seeds, which may be drawn at random, and the model's stop ids."""
    try:
        message = decode_body(body, kind)
    except WireError:
        return body
    if not isinstance(message, RunStep):
        return message
    replace = msgspec.structs.replace
    admits = tuple(
        replace(admit, sampling=replace(admit.sampling, seed=0, stop_token_ids=()))
        for admit in message.admits
    )
    return replace(message, admits=admits)
