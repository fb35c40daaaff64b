"""Keys, and the answers to libzmq's questions about them."""

import string

import pytest
import zmq.utils.z85

from callboard.actors.curve import (
    KEY_CHARS,
    AllowedKey,
    KeyPair,
    answer_zap,
    is_key,
    public_of,
    roles_of,
)
from callboard.messages.membership import Role

ALICE = KeyPair.make()


class List:
    """An allow-list with Alice on it."""

    def refresh(self) -> None:
        pass

    def find(self, public: str) -> AllowedKey | None:
        return AllowedKey("alice", public, Role.CLIENT) if public == ALICE.public else None


def request(public: str = ALICE.public, **changes: bytes) -> list[bytes]:
    fields = {
        "routing_id": b"\x00abcd",
        "delimiter": b"",
        "version": b"1.0",
        "request_id": b"7",
        "domain": b"callboard",
        "address": b"127.0.0.1",
        "identity": b"",
        "mechanism": b"CURVE",
        "credential": zmq.utils.z85.decode(public.encode()),
    }
    return list({**fields, **changes}.values())


def test_a_key_pair_is_forty_characters_twice_that_belong_together() -> None:
    assert len(ALICE.public) == len(ALICE.secret) == KEY_CHARS
    assert public_of(ALICE.secret) == ALICE.public
    assert KeyPair.make() != ALICE


def test_a_secret_is_not_shown() -> None:
    assert ALICE.secret not in f"{ALICE!r} {ALICE}"


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 39, "x" * 41, '"' * 40, "é" * 40, "#" * 40, " " * 40]
)
def test_what_is_no_key_is_found_out(text: str) -> None:
    assert not is_key(text)
    with pytest.raises(ValueError, match="40 characters"):
        public_of(text)


def test_keys_fit_into_a_toml_string_as_they_are() -> None:
    for _ in range(50):
        assert set(KeyPair.make().secret) <= set(string.printable) - set("\"'\\\n\t ")


def test_everybody_may_be_a_client_and_nothing_else_but_what_the_key_is_for() -> None:
    assert {role: roles_of(role) for role in Role} == {
        Role.CLIENT: (Role.CLIENT,),
        Role.OPERATOR: (Role.CLIENT, Role.OPERATOR),
        Role.REPLICA: (Role.CLIENT, Role.REPLICA),
    }


def test_a_key_on_the_list_is_let_in_under_its_own_name() -> None:
    answer = answer_zap(request(), List())

    assert answer is not None
    assert answer.is_allowed
    assert answer.frames[:6] == [b"\x00abcd", b"", b"1.0", b"7", b"200", b"OK"]
    assert answer.frames[6:] == [ALICE.public.encode(), b""]
    assert (answer.public, answer.address) == (ALICE.public, "127.0.0.1")


@pytest.mark.parametrize(
    "asked",
    [
        request(KeyPair.make().public),
        request(mechanism=b"NULL"),
        request(mechanism=b"PLAIN"),
        request(version=b"2.0"),
        request(credential=b"short"),
        request()[:-1],
        [*request(), b"more"],
        request()[:4],
    ],
    ids=["stranger", "null", "plain", "version", "short", "torn", "long", "head"],
)
def test_whoever_else_is_not_let_in(asked: list[bytes]) -> None:
    answer = answer_zap(asked, List())

    assert answer is not None
    assert not answer.is_allowed
    assert answer.frames[:5] == [b"\x00abcd", b"", b"1.0", b"7", b"400"]
    assert answer.frames[6] == b""


def test_what_is_no_request_is_not_answered() -> None:
    assert answer_zap([b"\x00abcd", b"", b"1.0"], List()) is None
