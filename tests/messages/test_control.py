from typing import Any

import pytest

from callboard.messages.codec import decode_body, encode_body, members, reply_type
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    GetNode,
    GetStatus,
    KVLevel,
    NodeStatus,
    Pause,
    PauseMode,
    State,
    StatusReply,
    Stop,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    Verb,
    Weights,
    WeightsLevel,
    verb_name,
)


@pytest.mark.parametrize("kind", members(Verb))
def test_every_verb_is_urgent_and_answered_by_a_control_reply(kind: Any) -> None:
    assert kind.urgent
    assert reply_type(kind) is ControlReply


@pytest.mark.parametrize("kind", members(Verb))
def test_every_verb_can_be_given_without_options(kind: Any) -> None:
    verb = kind(source="new") if kind is UpdateWeights else kind()

    assert decode_body(encode_body(verb), kind) == verb


def test_a_verb_is_called_what_operators_type() -> None:
    assert [verb_name(Pause()), verb_name(UpdateWeights(source="new"))] == [
        "pause",
        "update-weights",
    ]


def test_an_update_names_its_weights() -> None:
    update = UpdateWeights(source="new", version=3)

    assert update.weights == Weights(source="new", version=3)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [(GetStatus, StatusReply), (GetNode, NodeStatus), (AbortRequests, AbortReply)],
)
def test_what_operators_ask_besides_is_urgent_too(kind: Any, answer: type) -> None:
    assert kind.urgent
    assert reply_type(kind) is answer


def test_the_mildest_form_of_a_verb_is_its_default() -> None:
    assert Pause().mode is PauseMode.KEEP
    assert (Suspend().kv, Suspend().weights) == (KVLevel.DROP, WeightsLevel.KEEP)
    assert Stop().drain_s == 0.0
    update = UpdateWeights(source="new")
    assert (update.version, update.keep_kv, update.phase) == (0, False, UpdatePhase.PREPARE)
    assert not AbortRequests().all


@pytest.mark.parametrize(
    ("reply", "done"),
    [
        (ControlReply(verb="pause", state=State.PAUSED), True),
        (ControlReply(verb="pause", state=State.PAUSED, refused="resume first"), False),
        (ControlReply(verb="pause", state=State.PAUSED, late=("replica-1",)), False),
    ],
)
def test_a_verb_is_done_when_nobody_refused_and_nobody_is_late(
    reply: ControlReply, done: bool
) -> None:
    assert reply.done is done


def test_a_state_is_said_in_lower_case_words() -> None:
    assert [str(state) for state in State] == [state.name.lower() for state in State]
    assert decode_body(encode_body("paused"), State) is State.PAUSED
