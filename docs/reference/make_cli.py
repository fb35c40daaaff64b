"""Writes cli.md, beside this file, from the commands themselves.

    python docs/reference/make_cli.py

A test fails when the page is not what this makes of the code.
"""

import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from typer.models import OptionInfo

from callboard.supervision.cli.main import (
    DONE,
    INTERRUPTED,
    REFUSED,
    TIMED_OUT,
    UNREACHABLE,
    USAGE,
    app,
)
from callboard.supervision.settings import DEFAULT_ENDPOINT

PAGE = Path(__file__).with_name("cli.md")

INTRODUCTION = f"""\
# Commands

This page is made from the code by `docs/reference/make_cli.py`; do not edit it.

`callboard`, `python -m callboard` and `python -m callboard.supervision` are the same program.
`callboard --help` and `callboard COMMAND --help` say in short what is here; \
`callboard --version` prints the version.

Commands that speak to a server find it at `{DEFAULT_ENDPOINT}`, \
or at what the environment variable `CALLBOARD_ENDPOINT` says, or at what `--connect` says.
The default model is kept in `~/.cache/callboard`, or in the folder that `CALLBOARD_CACHE` names.

## Exit codes

| code | meaning |
|---|---|
| {DONE} | done |
| {REFUSED} | refused, or failed; the reason is on standard error, \
unless whoever read the output has closed it |
| {UNREACHABLE} | nobody answers at the endpoint |
| {TIMED_OUT} | no answer in time |
| {USAGE} | the command line itself is wrong |
| {INTERRUPTED} | interrupted |

`callboard serve` ends with {DONE} when it was stopped as asked, by `stop` or a signal, \
and with {REFUSED} when it could not start or failed beyond repair.
"""


class Parameter(NamedTuple):
    """An option or argument of a command, as a user writes it."""

    name: str
    is_option: bool
    is_required: bool
    is_many: bool
    values: str
    default: str
    help: str


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *starmap(_section, commands().items())])


def commands() -> dict[str, Callable[..., Any]]:
    """Return the function behind each command."""
    found: dict[str, Callable[..., Any]] = {}
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        found[name] = command.callback
    return found


def parameters(command: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield what a command takes."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = typing.get_args(hints[name])
        is_option = isinstance(info, OptionInfo)
        yield Parameter(
            name=_option(name, info) if is_option else info.metavar or name.upper(),
            is_option=is_option,
            is_required=parameter.default is inspect.Parameter.empty,
            is_many=_is_list(kind),
            values=_values(kind),
            default=_default(parameter.default),
            help=info.help or "",
        )


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(PAGE)


def _section(name: str, command: Callable[..., Any]) -> str:
    taken = list(parameters(command))
    usage = " ".join([f"callboard {name} [OPTIONS]", *_arguments(taken)])
    rows = [
        f"| `{parameter.name}` | {parameter.values} | {parameter.default} | {parameter.help} |"
        for parameter in taken
    ]
    table = ["| | value | default | |", "|---|---|---|---|", *rows, ""] if rows else []
    about = inspect.cleandoc(command.__doc__ or "")
    return "\n".join([f"## {name}", "", about, "", f"```text\n{usage}\n```", "", *table])


def _arguments(taken: list[Parameter]) -> Iterator[str]:
    for parameter in taken:
        if not parameter.is_option:
            shown = parameter.name if parameter.is_required else f"[{parameter.name}]"
            yield shown + "..." * parameter.is_many


def _option(name: str, info: OptionInfo) -> str:
    # Behind Annotated, typer takes the first declaration for the default and sorts it out later.
    declared = [info.default, *(info.param_decls or ())]
    own = [text for text in declared if isinstance(text, str) and text.startswith("--")]
    return own[0] if own else "--" + name.replace("_", "-")


def _values(kind: Any) -> str:
    kind = _without_none(kind)
    if _is_list(kind):
        return _values(typing.get_args(kind)[0]) + ", several times"
    if issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    names = {bool: "", str: "text", int: "number", float: "number", Path: "path"}
    return names[kind]


def _is_list(kind: Any) -> bool:
    return typing.get_origin(_without_none(kind)) is list


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        [kind] = [inner for inner in typing.get_args(kind) if inner is not types.NoneType]
    return kind


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is None or value is False or value == "":
        return ""
    return f"`{value.value if isinstance(value, enum.Enum) else value}`"


if __name__ == "__main__":
    main()
