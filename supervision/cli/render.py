"""What the commands print: for people as text, for scripts as JSON."""

import enum
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from callboard.gpu.memory import format_bytes
from callboard.messages.control import ControlReply, NodeStatus, StatusReply
from callboard.supervision.record import Completion

if TYPE_CHECKING:
    from callboard.supervision.replay import Verdict  # which takes long to import


def line(text: str = "") -> None:
    """Print a line to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def piece(text: str) -> None:
    """Print a piece of a line as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"callboard: {text}\n")
    sys.stderr.flush()


def as_json(value: Any) -> None:
    """Print any message as one JSON object."""
    line(json.dumps(_plain(value), ensure_ascii=False))


def verdicts(found: Sequence["Verdict"]) -> None:
    """Print what came of running each life again."""
    for verdict in found:
        who = f"{verdict.actor}, life {verdict.life}"
        if verdict.skipped:
            line(f"{who}: not run again, {verdict.skipped}")
        elif verdict.difference:
            line(f"{who}: {verdict.alike} messages alike, then {verdict.difference}")
        else:
            line(f"{who}: {verdict.alike} messages, all alike")


def reply(answer: ControlReply) -> None:
    """Print an acknowledgement; to standard error what was not done, and why."""
    if answer.refused:
        complain(f"{answer.verb} refused: {answer.refused}")
        return
    if answer.late:
        who = ", ".join(answer.late)
        complain(f"{answer.verb}: no answer in time from {who}; now {answer.state}")
        return
    freed = f", {format_bytes(answer.bytes_freed)} freed" if answer.bytes_freed else ""
    requests = f", {answer.requests} requests kept" if answer.requests else ""
    steps = f", {answer.steps} steps" if answer.verb == "step" else ""
    time = f"{answer.seconds * 1000:.0f} ms"
    line(f"{answer.verb}: now {answer.state} ({time}{freed}{steps}{requests})")


def status(answer: StatusReply) -> None:
    """Print the state and the tree."""
    line(f"callboard {answer.version} at {answer.endpoint}: {answer.state}")
    for text in _tree(answer.tree, ""):
        line(text)
    if answer.late:
        complain(f"status: no answer in time from {', '.join(answer.late)}")


def completion(answer: Completion) -> dict[str, Any]:
    """Return a completion as the object `generate --json` prints: all of it that is known."""
    return {name: value for name, value in _plain(answer).items() if value is not None}


def _plain(value: Any) -> Any:
    """Return a message as dictionaries by field name; on the wire it is an array."""
    match value:
        case msgspec.Struct():
            fields = msgspec.structs.asdict(value)
            return {name: _plain(field) for name, field in fields.items()}
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case enum.Enum():
            return value.value
        case float() if not math.isfinite(value):
            return None  # JSON has no word for the log-probability of what cannot be
        case _:
            return value


def _tree(node: NodeStatus, indent: str) -> list[str]:
    details = " ".join(f"{name}={value}" for name, value in node.details.items())
    late = " late" if node.late else ""
    own = f"{indent}{node.name}  {node.state}{late} pid={node.pid}{_restarts(node)} {details}"
    ends = [f"{indent}  ! {_time(end.at)} {end.reason}" for end in node.ends if end.reason]
    below = [text for child in node.children for text in _tree(child, indent + "  ")]
    return [own.rstrip(), *ends, *below]


def _restarts(node: NodeStatus) -> str:
    """Tell how often a part was restarted, and what is left of what its children may be."""
    own = f" restarts={node.restarts}" if node.restarts else ""
    left = node.restarts_left
    tells = left is not None and any(child.restarts for child in node.children)
    return own + (f" restarts_left={left}" if tells else "")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")
