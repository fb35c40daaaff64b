"""Callboard: a dynamic-batching LLM inference engine built as a supervised tree of actors.

The names below are the public ones. They are imported when first used, so that a program that
only speaks the messages does not pay for the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from callboard.version import __version__

if TYPE_CHECKING:
    from callboard.actors.actor import Actor
    from callboard.messages.requests import ChatMessage, Delta, FinishReason
    from callboard.messages.sampling import SamplingParams
    from callboard.supervision.engine import Engine, connect, open_engine
    from callboard.supervision.record import Completion
    from callboard.supervision.settings import Settings

_HOMES = {
    "Actor": "callboard.actors.actor",
    "ChatMessage": "callboard.messages.requests",
    "Completion": "callboard.supervision.record",
    "Delta": "callboard.messages.requests",
    "Engine": "callboard.supervision.engine",
    "FinishReason": "callboard.messages.requests",
    "SamplingParams": "callboard.messages.sampling",
    "Settings": "callboard.supervision.settings",
    "connect": "callboard.supervision.engine",
    "open_engine": "callboard.supervision.engine",
}

__all__ = [
    "Actor",
    "ChatMessage",
    "Completion",
    "Delta",
    "Engine",
    "FinishReason",
    "SamplingParams",
    "Settings",
    "__version__",
    "connect",
    "open_engine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'callboard' has no attribute {name!r}")
    return getattr(import_module(home), name)
