"""The reference pages say what the code says."""

import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from callboard.messages.errors import ConfigError
from callboard.supervision.settings import Settings, load_settings

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

ROOMY: dict[str, Any] = {"max_rows": 1, "max_step_tokens": 2**20}
"""What leaves every other setting its whole range."""


@pytest.mark.parametrize("name", ["protocol", "cli"])
def test_a_page_made_from_the_code_is_not_stale(name: str) -> None:
    """If this fails, run docs/reference/make_NAME.py."""
    made = runpy.run_path(str(REFERENCE / f"make_{name}.py"))["page"]()

    assert (REFERENCE / f"{name}.md").read_text() == made


def test_every_message_that_is_named_has_a_section() -> None:
    text = (REFERENCE / "protocol.md").read_text()
    tables = text[: text.index("\n## messages/")]
    named = set(re.findall(r"`([A-Z]\w+)`", tables))
    sections = set(re.findall(r"^### (\w+)", text, re.MULTILINE))

    assert named > {"Submit", "RunStep", "Pause", "Hello"}
    assert named - sections == set()


def setting_rows() -> dict[str, tuple[str, str]]:
    """Return each setting's default and range, as the page has them."""
    text = (REFERENCE / "settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|([^|]*)\|", text, re.MULTILINE)
    return {key: (default, range_.strip()) for key, default, range_ in rows}


def test_the_settings_are_all_there_in_order_with_their_defaults() -> None:
    defaults = msgspec.structs.asdict(Settings())

    assert {key: default for key, (default, _) in setting_rows().items()} == {
        key: msgspec.json.encode(value).decode() for key, value in defaults.items()
    }
    assert list(setting_rows()) == list(defaults)


@pytest.mark.parametrize(
    ("key", "range_"), [(key, range_) for key, (_, range_) in setting_rows().items() if range_]
)
def test_a_range_is_where_a_setting_is_taken(key: str, range_: str) -> None:
    kind = type(getattr(Settings(), key))
    low, high = (kind(bound) for bound in range_.split(" to "))

    for value in (low, high):
        assert getattr(load_settings(None, **{**ROOMY, key: value}), key) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=key):
            load_settings(None, **{**ROOMY, key: value})


def test_every_setting_with_a_range_is_said_to_have_one() -> None:
    with_range = {key for key, (_, range_) in setting_rows().items() if range_}
    numbers = {
        field.name for field in msgspec.structs.fields(Settings) if field.type in (int, float)
    }

    assert with_range == numbers
