"""Keys of encrypted connections, and who may connect with which.

ZeroMQ encrypts by CURVE: both ends have a key pair, the client knows the server's public key
beforehand, and the server learns the client's in the handshake. Keys are text in ZeroMQ's Z85: 40
characters of printable ASCII. libzmq asks in a protocol of its own (ZAP, RFC 27 of ZeroMQ) whether
a client's key is good; `answer_zap` answers it from an allow-list.
"""

import struct
from typing import Protocol

import msgspec
import zmq
import zmq.utils.z85

from callboard.messages.membership import Role

KEY_CHARS = 40

ZAP_ANSWER_FRAMES = 8

_ZAP_VERSION = b"1.0"
_ZAP_REQUEST_FRAMES = 9  # routing id, delimiter, six fields, and CURVE's one credential


class KeyPair(msgspec.Struct, frozen=True):
    """A public key and its secret half. The secret is not shown in a repr, nor in a log."""

    public: str
    secret: str

    @classmethod
    def make(cls) -> "KeyPair":
        """Return a new pair, random."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, …)"


class ClientKeys(msgspec.Struct, frozen=True):
    """What a connecting side needs: its own pair, and the public key of the server."""

    own: KeyPair
    server: str


class AllowedKey(msgspec.Struct, frozen=True):
    """A public key on the list: what it is called, and the role it was given."""

    name: str
    public: str
    role: Role


class AllowList(Protocol):
    """The keys that may connect."""

    def refresh(self) -> None:
        """Look whether the list has changed; called now and then, and before a handshake."""
        ...

    def find(self, public: str) -> AllowedKey | None:
        """Return what is known of a key, None when it is not on the list."""
        ...


class ServerKeys(msgspec.Struct, frozen=True):
    """What a listening side needs: its own pair, and who may connect."""

    own: KeyPair
    allowed: AllowList


def roles_of(role: Role) -> tuple[Role, ...]:
    """Return the roles a key of this one may say Hello with.

    All are clients too: that is how they find the socket where verbs go.
    """
    return tuple(dict.fromkeys((Role.CLIENT, role)))


def public_of(secret: str) -> str:
    """Return the public half of a secret key. Raises ValueError for what is no key."""
    return zmq.curve_public(_checked(secret).encode()).decode()


def is_key(text: str) -> bool:
    """Return whether a text is a key in Z85."""
    try:
        _checked(text)
    except ValueError:
        return False
    return True


class ZapAnswer(msgspec.Struct, frozen=True):
    """The answer to one of libzmq's questions, and what a log may say about it."""

    frames: list[bytes]
    is_allowed: bool
    public: str  # "" where the question was about no key
    address: str


def answer_zap(request: list[bytes], allowed: AllowList) -> ZapAnswer | None:
    """Return the answer to a request; None when it is no request at all."""
    if len(request) < 4:
        return None
    public = _public_key(request)
    is_allowed = public is not None and allowed.find(public) is not None
    status = (b"200", b"OK") if is_allowed else (b"400", b"this key is not on the list")
    user = public.encode() if public is not None and is_allowed else b""
    frames = [request[0], b"", _ZAP_VERSION, request[3], *status, user, b""]
    address = request[5].decode(errors="replace") if len(request) > 5 else ""
    return ZapAnswer(frames, is_allowed, public or "", address)


def _public_key(request: list[bytes]) -> str | None:
    """Return the key a request asks about; None for another mechanism or version."""
    if len(request) != _ZAP_REQUEST_FRAMES or request[2] != _ZAP_VERSION:
        return None
    mechanism, credential = request[7], request[8]
    if mechanism != b"CURVE" or len(credential) != 32:
        return None
    return zmq.utils.z85.encode(credential).decode()


def _checked(key: str) -> str:
    wrong = ValueError(f"a key has {KEY_CHARS} characters of Z85")
    if len(key) != KEY_CHARS:
        raise wrong
    try:
        zmq.utils.z85.decode(key.encode("ascii"))
    except (UnicodeEncodeError, KeyError, struct.error):  # a stranger's letter, or out of range
        raise wrong from None
    return key
