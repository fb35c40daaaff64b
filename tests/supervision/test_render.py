"""What the commands print."""

import json
import re
from typing import Any

import msgspec
import pytest

from callboard.messages.control import (
    ChildAck,
    ControlReply,
    LifeEnd,
    NodeStatus,
    ReplicaStatus,
    State,
    StatusReply,
)
from callboard.messages.requests import EventKind, FinishReason, RequestEvent, Usage
from callboard.supervision.cli import render
from callboard.supervision.record import Completion

ACK = ChildAck(name="replica-0/scheduler", state=State.PAUSED, requests=2)
PAUSED = ControlReply(verb="pause", state=State.PAUSED, seconds=0.0123, requests=2, children=(ACK,))

SCHEDULER = NodeStatus(
    name="replica-0/scheduler",
    kind="Scheduler",
    state=State.RUNNING,
    pid=11,
    details={"steps": 7, "running": 1},
)
REPLICA = NodeStatus(
    name="replica-0",
    kind="ReplicaProcess",
    state=State.RUNNING,
    pid=11,
    restarts=2,
    children=(SCHEDULER,),
)
STATUS = StatusReply(
    state=State.RUNNING,
    endpoint="tcp://127.0.0.1:7500",
    model="a-model",
    version="1.2.3",
    tree=NodeStatus(name="root", kind="Root", state=State.RUNNING, pid=10, children=(REPLICA,)),
    replicas=(ReplicaStatus(name="replica-0", state=State.RUNNING, pid=11, restarts=2, steps=7),),
)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert err == ""
    return out


def complained(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_an_acknowledgement_is_a_line_with_the_state_and_the_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.reply(PAUSED)

    assert printed(capsys) == "pause: now paused (12 ms, 2 requests kept)\n"


def test_an_acknowledgement_says_what_was_freed(capsys: pytest.CaptureFixture[str]) -> None:
    render.reply(ControlReply(verb="suspend", state=State.SUSPENDED, bytes_freed=3 * 2**30))

    assert printed(capsys) == "suspend: now suspended (0 ms, 3 GiB freed)\n"


def test_a_refusal_goes_to_standard_error_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.reply(ControlReply(verb="unpause", state=State.SUSPENDED, refused="resume first"))

    assert complained(capsys) == "callboard: unpause refused: resume first\n"


def test_who_was_late_goes_to_standard_error_with_the_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.reply(ControlReply(verb="pause", state=State.PAUSING, late=("replica-0", "replica-1")))

    assert complained(capsys) == (
        "callboard: pause: no answer in time from replica-0, replica-1; now pausing\n"
    )


def test_status_shows_the_state_and_the_tree_a_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.status(STATUS)

    assert printed(capsys).splitlines() == [
        "callboard 1.2.3 at tcp://127.0.0.1:7500: running",
        "root  running pid=10",
        "  replica-0  running pid=11 restarts=2",
        "    replica-0/scheduler  running pid=11 steps=7 running=1",
    ]


def test_status_shows_what_parts_ended_of_and_who_is_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ends = (LifeEnd(at=0.0, reason="it was killed"), LifeEnd(at=1.0, reason=""))
    replica = NodeStatus(
        name="replica-0", kind="", state=State.RUNNING, restarts=2, ends=ends, late=True
    )
    tree = NodeStatus(
        name="root", kind="", state=State.RUNNING, children=(replica,), restarts_left=8
    )

    render.status(msgspec.structs.replace(STATUS, tree=tree, late=("replica-0",)))

    out, complaint = capsys.readouterr()
    assert "root  running pid=0 restarts_left=8" in out
    assert "  replica-0  running late pid=0 restarts=2" in out
    [end] = [line for line in out.splitlines() if "!" in line]
    assert end.endswith("it was killed")
    assert re.match(r"    ! (1969|1970)-\d\d-\d\d \d\d:\d\d:00", end)
    assert complaint == "callboard: status: no answer in time from replica-0\n"


@pytest.mark.parametrize("message", [PAUSED, STATUS])
def test_any_message_is_one_json_object_with_its_fields_by_name(
    capsys: pytest.CaptureFixture[str], message: msgspec.Struct
) -> None:
    render.as_json(message)

    out = printed(capsys)
    shown = json.loads(out)
    assert out.count("\n") == 1
    assert list(shown) == list(message.__struct_fields__)


def test_json_shows_what_is_inside_a_message_by_name_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.as_json(STATUS)

    shown: dict[str, Any] = json.loads(printed(capsys))
    assert shown["state"] == "running"
    assert shown["tree"]["children"][0]["children"][0]["details"] == {"steps": 7, "running": 1}
    assert shown["replicas"][0]["restarts"] == 2


def test_json_has_null_for_what_is_no_number_there(capsys: pytest.CaptureFixture[str]) -> None:
    render.as_json({"logprobs": [-0.5, float("-inf"), float("nan")]})

    assert json.loads(printed(capsys)) == {"logprobs": [-0.5, None, None]}


def test_a_completion_shows_what_is_known_and_was_asked_for() -> None:
    plain = Completion(
        id="a",
        prompt_token_ids=[1],
        token_ids=[2],
        text="x",
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1),
        events=[RequestEvent(kind=EventKind.QUEUED, at=5.5)],
        latency_s=0.5,
    )
    asked = msgspec.structs.replace(plain, logprobs=[-0.5], top_logprobs=[[(2, -0.5)]])

    assert render.completion(plain) == {
        "id": "a",
        "choice": 0,
        "prompt_token_ids": [1],
        "token_ids": [2],
        "text": "x",
        "finish_reason": "length",
        "seed": 0,
        "usage": {"prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1},
        "events": [{"kind": "queued", "at": 5.5}],
        "weights_version": 0,
        "latency_s": 0.5,
    }
    assert render.completion(asked)["logprobs"] == [-0.5]
    assert render.completion(asked)["top_logprobs"] == [[[2, -0.5]]]


def test_a_complaint_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    render.complain("no such thing")

    assert complained(capsys) == "callboard: no such thing\n"
