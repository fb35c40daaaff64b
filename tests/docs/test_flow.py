"""The pages about the tree and its messages name parts, files and messages that are there."""

import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from callboard.actors.coordinator import Coordinator
from callboard.actors.executor import Executor
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.link import Link
from callboard.actors.metrics import Metrics
from callboard.actors.scheduler import Scheduler
from callboard.actors.tokenizer import Tokenizer
from callboard.messages.codec import members
from callboard.supervision import app
from callboard.supervision.process import ReplicaProcess
from callboard.supervision.root import Root
from callboard.supervision.supervisor import Supervisor

ROOT = Path(__file__).parents[2]
EXPLANATION = ROOT / "docs" / "explanation"
PROTOCOL = runpy.run_path(str(ROOT / "docs" / "reference" / "make_protocol.py"))

STEP = re.compile(r"^ ?\d+  (\S.*?) → (\S+) +(\w+)(?:\(.*\))? +(\S+\.py)$", re.MULTILINE)
NUMBERED = re.compile(r"^ ?\d+  .*→.*$", re.MULTILINE)

PARTS: dict[str, tuple[type[Any], ...]] = {
    "root": (Root,),
    "replicas": (Supervisor,),
    "replica-0": (Supervisor, ReplicaProcess),
    "device": (Supervisor,),
    "coordinator": (Coordinator,),
    "metrics": (Metrics,),
    "scheduler": (Scheduler,),
    "kv_allocator": (KVAllocator,),
    "executor": (Executor,),
    "tokenizer": (Tokenizer,),
    "link": (Link,),
}


class Step(NamedTuple):
    sender: str
    receiver: str
    message: str
    file: str


def steps() -> list[Step]:
    return [Step(*match) for match in STEP.findall((EXPLANATION / "flow.md").read_text())]


def understood_by(part: str) -> set[str]:
    """Return the names of the messages that a part may be told."""
    unions = [PROTOCOL["inbox"](actor) for actor in PARTS.get(part, ())]
    unions += [PROTOCOL["SESSION"], PROTOCOL["CONTROL_LANE"]]
    for _, owner, role, says, told in PROTOCOL["SOCKETS"]:
        if owner in PARTS.get(part, ()):
            unions.append(says)
        if part == role or (part, role) == ("link", "replica"):
            unions.append(told)
    return {kind.__name__ for union in unions for kind in members(union)} | {"ControlReply"}


def test_every_numbered_line_of_the_flows_is_a_step() -> None:
    assert len(steps()) == len(NUMBERED.findall((EXPLANATION / "flow.md").read_text())) > 50


@pytest.mark.parametrize("step", sorted(set(steps())), ids=lambda step: "-".join(step[:3]))
def test_a_step_names_a_message_its_receiver_understands_and_the_file_that_says_it(
    step: Step,
) -> None:
    assert step.message in understood_by(step.receiver)
    assert re.search(rf"\b{step.message}\b", (ROOT / step.file).read_text())


@pytest.mark.parametrize("page", ["architecture.md", "flow.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    named = set(
        re.findall(
            r"`((?:messages|gpu|actors|supervision)/[\w/]+\.py)`", (EXPLANATION / page).read_text()
        )
    )

    assert named
    assert {path for path in named if not (ROOT / path).is_file()} == set()


def test_the_tree_is_drawn_as_the_code_draws_it() -> None:
    drawing = "root  " + (app.__doc__ or "").partition("root  ")[2].partition("\n\n")[0]
    drawing = drawing.replace("\n    ", "\n")

    assert drawing in (EXPLANATION / "architecture.md").read_text()
