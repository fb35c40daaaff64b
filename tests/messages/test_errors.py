import pickle
from collections.abc import Iterator

import pytest

from callboard.messages.codec import decode_body, encode_body
from callboard.messages.errors import (
    ActorFailed,
    CallboardError,
    ConfigError,
    DeliveryError,
    Failure,
    MailboxFull,
    OutOfBlocks,
    ProtocolMismatch,
    RequestError,
    StartFailed,
    SupervisionError,
    WireError,
)


def family(root: type[CallboardError] = CallboardError) -> Iterator[type[CallboardError]]:
    if root.__module__ == CallboardError.__module__:
        yield root
    for child in root.__subclasses__():
        yield from family(child)


FAMILY = list(family())


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_survives_as_a_failure_on_the_wire(kind: type[CallboardError]) -> None:
    failure = Failure.of(kind("what went wrong"))

    error = decode_body(encode_body(failure), Failure).error()

    assert type(error) is kind
    assert str(error) == "what went wrong"


def test_the_whole_family_is_known_by_distinct_names() -> None:
    names = [kind.__name__ for kind in FAMILY]

    assert len(names) == len(set(names))
    assert {"MailboxFull", "RestartIntensityReached", "CallboardError"} <= set(names)


def test_a_request_error_keeps_its_field_and_what_is_allowed() -> None:
    error = RequestError("top_p is 2", field="top_p", allowed="0 to 1")

    again = Failure.of(error).error()

    assert isinstance(again, RequestError)
    assert (str(again), again.field, again.allowed) == ("top_p is 2", "top_p", "0 to 1")


def test_a_foreign_exception_becomes_an_actor_failed_that_names_its_type() -> None:
    failure = Failure.of(ZeroDivisionError("division by zero"))

    assert failure.code == "ActorFailed"
    assert failure.message == "ZeroDivisionError: division by zero"
    assert type(failure.error()) is ActorFailed


def test_a_code_of_a_newer_peer_is_still_an_error_of_ours() -> None:
    error = Failure(code="QuantumDecoherence", message="oh").error()

    assert type(error) is CallboardError
    assert str(error) == "oh"


@pytest.mark.parametrize("code", ["Exception", "SystemExit", "__builtins__", ""])
def test_a_code_cannot_name_anything_but_our_errors(code: str) -> None:
    assert type(Failure(code=code, message="x").error()) is CallboardError


def test_a_special_request_error_travels_as_a_request_error() -> None:
    class PromptTooLong(RequestError):
        pass

    failure = Failure.of(PromptTooLong("too long", field="prompt"))

    assert type(failure.error()) is RequestError
    assert failure.field == "prompt"


@pytest.mark.parametrize(
    ("kind", "caught_as"),
    [
        (ProtocolMismatch, WireError),
        (MailboxFull, DeliveryError),
        (ActorFailed, DeliveryError),
        (StartFailed, SupervisionError),
        (OutOfBlocks, CallboardError),
        (ConfigError, CallboardError),
    ],
)
def test_errors_are_caught_by_the_name_of_their_branch(
    kind: type[CallboardError], caught_as: type[CallboardError]
) -> None:
    assert issubclass(kind, caught_as)


def test_every_error_of_the_tree_is_in_its_drawing() -> None:
    import callboard.messages.errors as module

    drawn = (module.__doc__ or "").replace("├──", " ").replace("└──", " ").split()

    assert {kind.__name__ for kind in FAMILY} <= set(drawn)


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_can_be_pickled(kind: type[CallboardError]) -> None:
    """Test runners and process pools pass exceptions between processes so."""
    error = pickle.loads(pickle.dumps(kind("what")))

    assert type(error) is kind
    assert str(error) == "what"
