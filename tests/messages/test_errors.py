import pickle
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from callboard.messages.codec import decode_body, encode_body
from callboard.messages.errors import (
    ActorFailed,
    CallboardError,
    ConfigError,
    ContextOverflow,
    DeliveryError,
    Failure,
    MailboxFull,
    OutOfBlocks,
    ProtocolMismatch,
    RequestError,
    RowOverflow,
    SequenceOverflow,
    StartFailed,
    SupervisionError,
    WireError,
)

E = TypeVar("E", bound=CallboardError)


def family(root: type[E]) -> Iterator[type[E]]:
    if root.__module__ == CallboardError.__module__:
        yield root
    for child in root.__subclasses__():
        yield from family(child)


FAMILY = list(family(CallboardError))
OVERFLOWS = list(family(ContextOverflow))


def through_the_wire(error: CallboardError) -> CallboardError:
    return decode_body(encode_body(Failure.of(error)), Failure).error()


@pytest.mark.parametrize("kind", FAMILY, ids=lambda kind: kind.__name__)
def test_every_error_survives_as_a_failure_on_the_wire(kind: type[CallboardError]) -> None:
    error = through_the_wire(kind("what went wrong"))

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


def test_a_full_mailbox_may_say_when_to_try_again() -> None:
    again = through_the_wire(MailboxFull("no room", retry_after_s=2.5))

    assert isinstance(again, MailboxFull)
    assert again.retry_after_s == 2.5


def test_the_overflows_are_those_of_rows_tokens_lengths_blocks_slots_and_memory() -> None:
    assert {kind.__name__ for kind in OVERFLOWS} == {
        "ContextOverflow",
        "RowOverflow",
        "ActiveRequestOverflow",
        "TokenOverflow",
        "SequenceOverflow",
        "OutOfBlocks",
        "OutOfStateSlots",
        "MemoryDeallocated",
    }


@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("kind", OVERFLOWS, ids=lambda kind: kind.__name__)
def test_an_overflow_keeps_everything_it_says_on_the_wire(
    kind: type[ContextOverflow], transient: bool
) -> None:
    said: dict[str, Any] = {"request_id": "a", "row": 0, "field": "prompt", "allowed": "less"}
    if kind is not SequenceOverflow:
        said["transient"] = transient
    error = kind("too much", **said)

    again = through_the_wire(error)

    assert type(again) is kind
    assert vars(again) == vars(error) == {"message": "too much", "transient": False, **said}
    assert str(again) == str(error)
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize("kind", OVERFLOWS, ids=lambda kind: kind.__name__)
def test_an_overflow_may_pass_unless_it_is_of_the_context_length(
    kind: type[ContextOverflow],
) -> None:
    assert kind("too much").transient is (kind is not SequenceOverflow)


def test_a_sequence_overflow_cannot_be_made_transient() -> None:
    with pytest.raises(TypeError, match="transient"):
        SequenceOverflow("too long", transient=True)  # type: ignore[call-arg]
    lie = Failure(code="SequenceOverflow", message="too long", transient=True).error()

    assert isinstance(lie, SequenceOverflow)
    assert lie.transient is False


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RowOverflow("no place"), "no place"),
        (RowOverflow("no place", row=0), "row 0: no place"),
        (RowOverflow("no place", request_id="a"), "request a: no place"),
        (RowOverflow("no place", request_id="a", row=3), "request a: row 3: no place"),
        (RowOverflow("", request_id="a"), "request a"),
    ],
)
def test_the_text_of_an_overflow_begins_with_whom_it_is_about(
    error: RowOverflow, text: str
) -> None:
    assert str(error) == text


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


def test_an_error_of_no_branch_travels_under_its_own_name() -> None:
    class OutOfPatience(CallboardError):
        pass

    failure = Failure.of(OutOfPatience("no"))

    assert failure.code == "OutOfPatience"
    assert type(failure.error()) is CallboardError


@pytest.mark.parametrize(
    ("kind", "caught_as"),
    [
        (ProtocolMismatch, WireError),
        (MailboxFull, DeliveryError),
        (ActorFailed, DeliveryError),
        (StartFailed, SupervisionError),
        (OutOfBlocks, ContextOverflow),
        (ContextOverflow, RequestError),
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
