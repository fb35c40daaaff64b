"""A model's chat template: conversations to prompts, with Jinja in a sandbox.

A template comes with the model, so it may be broken, but its author is trusted about as far as the
weights are: the sandbox keeps it from the interpreter, and the limits keep a mistake in it from
hanging the process. They count loop rounds and calls, and characters of output; they do not bound
the memory that a hostile template could take in between.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 200_000
"""Loop rounds and calls in one rendering; a thousand messages take some ten thousand."""

MAX_CHARACTERS = 8_000_000
"""Characters of one prompt; a context of a million tokens is about half of that."""


class ChatTemplateError(ValueError):
    """A conversation cannot be made a prompt: it is malformed, or the template fails or refuses."""


class ChatTemplate:
    """One compiled template; rendering it is pure but for templates that ask for the date."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Compile; `special_tokens` are the variables bos_token, eos_token and so on."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _Sandbox().from_string(source)
        except Exception as error:  # foreign code: see render
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation, with the opening of the next turn if asked for.

        Raises ChatTemplateError when a message is malformed, and when the template fails, refuses
        the conversation, takes more than MAX_STEPS or gives more than MAX_CHARACTERS.
        """
        check_messages(messages)
        variables = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: _Budget(),
        }
        try:
            return "".join(_bounded(self._template.generate(variables)))
        except ChatTemplateError:
            raise
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses without end") from error
        except Exception as error:  # foreign code: it may raise anything a Python expression can
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raise ChatTemplateError unless this is one or more of {"role": str, "content": str}."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages is a {type(messages).__name__}, and must be a list")
    if not messages:
        raise ChatTemplateError("messages is empty, and must have at least one message")
    for number, message in enumerate(messages):
        _check_message(number, message)


def _check_message(number: int, message: object) -> None:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise ChatTemplateError(f"messages[{number}] is a {kind}, and must be an object")
    for key in ("role", "content"):
        if key not in message:
            raise ChatTemplateError(f"messages[{number}] has no {key}")
        if not isinstance(message[key], str):
            kind = type(message[key]).__name__
            raise ChatTemplateError(f"messages[{number}].{key} is a {kind}, and must be a string")
    unknown = sorted(str(key) for key in message.keys() - {"role", "content"})
    if unknown:
        raise ChatTemplateError(
            f"messages[{number}] has {', '.join(unknown)}: only role and content are supported"
        )


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            raise ChatTemplateError(f"the prompt is longer than {MAX_CHARACTERS} characters")
        yield piece


_BUDGET = "_callboard_budget"


class _Budget:
    """The steps one rendering has left; a variable of it, where calls and filters find it."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def spend(self, num_steps: int) -> None:
        self._num_left -= max(num_steps, 0)  # the template could call this too
        if self._num_left < 0:
            raise ChatTemplateError(f"the chat template takes more than {MAX_STEPS} steps")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for, with every loop round and call counted."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
        )
        del self.globals["lipsum"]  # writes as much filler as asked in one call
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None)
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget(context).spend(1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("** is not allowed")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(repeated, "__len__"):
                _budget(context).spend(len(repeated) * max(times, 0))
        return super().call_binop(context, operator, left, right)


_COUNTED = "_callboard_counted"


@jinja2.pass_context
def _counted(context: Context, items: Any) -> Any:
    """Pay for a loop over the items: at once when their number is known, else as they come."""
    budget = _budget(context)
    if not hasattr(items, "__len__"):
        return budget.each(items)
    budget.spend(len(items))
    return items


def _budget(context: Context) -> _Budget:
    budget = context.get(_BUDGET)
    assert isinstance(budget, _Budget)
    return budget


class _Generation(Extension):
    """{% generation %} marks the model's turns for training; in a prompt it is only its body."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> Never:
    raise ChatTemplateError(f"the chat template refuses this conversation: {message}")


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
