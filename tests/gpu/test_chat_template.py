"""Chat templates: conversations become the prompts the model was trained on, within limits."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from callboard.gpu.loading import chat_template
from callboard.gpu.loading.chat_template import ChatTemplate, ChatTemplateError

HELLO = [{"role": "user", "content": "Hello"}]

TURNS = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}
"""


def render(
    source: str,
    messages: Sequence[dict[str, str]] = HELLO,
    *,
    add_generation_prompt: bool = True,
    **special_tokens: str,
) -> str:
    template = ChatTemplate(source, special_tokens=special_tokens)
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def test_turns_are_written_as_the_template_says() -> None:
    conversation = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": " Hello!"},
        {"role": "user", "content": '2 < 3 & "so" on\n'},
    ]

    assert render(TURNS, conversation) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n Hello!<|im_end|>\n"
        '<|im_start|>user\n2 < 3 & "so" on\n<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_the_next_turn_is_opened_only_on_request() -> None:
    opened = render(TURNS)
    closed = render(TURNS, add_generation_prompt=False)

    assert opened == closed + "<|im_start|>assistant\n"


def test_block_lines_leave_no_white_space() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_special_tokens_are_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"

    assert render(source, bos_token="<s>", eos_token="</s>") == "<s>Hello</s>"


def test_what_templates_in_use_rely_on_is_there() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert (
        render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'
    )
    assert render("{{ strftime_now('%%d') }}") == "%d"
    assert (
        render("{% for x in 'abc' %}{% if x == 'b' %}{% break %}{% endif %}{{ x }}{% endfor %}")
        == "a"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert (
        render(
            "{% set ns = namespace(n=0) %}"
            "{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
        )
        == "3"
    )
    assert (
        render("{{ tools is none }} {{ documents is none }} {{ missing is defined }}")
        == "True True False"
    )
    assert render("{{ '-' * 3 }}{{ 2 * 3 }}") == "---6"


def test_loops_know_their_place_also_over_filtered_messages() -> None:
    source = (
        "{% for c in messages | map(attribute='content') %}"
        "{{ loop.index }}/{{ loop.length }}{{ c }}{{ '' if loop.last else ',' }}"
        "{% endfor %}"
    )

    assert render(source, HELLO * 2) == "1/2Hello,2/2Hello"


def test_a_recursive_loop_and_a_loop_with_a_condition_work() -> None:
    tree = (
        "{% for x in [[1, [2]], 3] recursive %}"
        "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}"
    )
    odd = "{% for i in range(6) if i % 2 %}{{ i }}{% else %}none{% endfor %}"

    assert render(tree) == "(1(2))3"
    assert render(odd) == "135"


def test_a_refusal_of_the_template_says_why() -> None:
    with pytest.raises(ChatTemplateError, match=r"refuses .*: only users here"):
        render("{{ raise_exception('only users here') }}")


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' | no_such_filter }}", "{% nonsense %}"])
def test_a_template_with_bad_syntax_does_not_compile(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ 'a' + 1 }}",
        "{% include 'other' %}",
        "{{ '%d' | format('x') }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ lipsum(n=10) }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_one_kind_of_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="failed"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% set r = range(1000) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 1000000000000 }}",
        "{{ [0] * 1000000000000 }}",
        "{% for i in range(1000) %}{% set _ = _callboard_budget.spend(-99999) %}"
        "{% for j in range(1000) %}{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_template_ends(source: str) -> None:
    start = time.process_time()

    with pytest.raises(ChatTemplateError):
        render(source)

    assert time.process_time() - start < 5


def test_output_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 10)

    assert render("{{ messages[0].content }}12345") == "Hello12345"
    with pytest.raises(ChatTemplateError, match="longer than 10 characters"):
        render("{{ messages[0].content }}123456")


def test_a_long_conversation_is_well_within_the_limits() -> None:
    conversation = [{"role": "user", "content": "word " * 100}] * 5000

    assert len(render(TURNS, conversation)) > 2_500_000


def test_steps_are_counted_anew_for_each_prompt() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}ok", special_tokens={})

    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is empty"),
        ("Hello", "messages is a str"),
        ({"role": "user", "content": "Hello"}, "messages is a dict"),
        (None, "messages is a NoneType"),
        (["Hello"], r"messages\[0\] is a str"),
        ([*HELLO, {"content": "x"}], r"messages\[1\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": 1, "content": "x"}], r"messages\[0\].role is a int"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is a NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content is a list"),
        ([{"role": "user", "content": "x", "tool_calls": []}], r"messages\[0\] has tool_calls"),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        render(TURNS, messages)


def test_rendering_leaves_the_messages_as_they_are() -> None:
    conversation = [{"role": "user", "content": "Hello"}]

    render("{% for m in messages %}{% set m = {'role': 'x'} %}{% endfor %}", conversation)

    assert conversation == HELLO
