"""Key files: how they look, how they are made, and the list of whom a server lets in.

A secret key file (`NAME.key`, mode 0600) is TOML with `public` and `secret`, and a client's has
`server` too: the public key of the server it is for. A public key file (`allowed/NAME.pub`) is TOML
with `public` and `role`. A server's folder has `server.key`, `server.pub`, and the folder `allowed`
with a file for each key that may connect.
"""

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from callboard.actors.curve import AllowedKey, ClientKeys, KeyPair, is_key, public_of
from callboard.logs import get_logger
from callboard.messages.errors import ConfigError
from callboard.messages.membership import Role

T = TypeVar("T")

ALLOWED = "allowed"
SERVER = "server"
FIRST_KEYS = {"client": Role.CLIENT, "operator": Role.OPERATOR}
"""The keys that are made with a server's."""

log = get_logger()


class SecretKeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a NAME.key file."""

    public: str
    secret: str
    server: str = ""

    def __repr__(self) -> str:
        return f"SecretKeyFile({self.public!r}, …)"


class PublicKeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a NAME.pub file."""

    public: str
    role: Role | None = None  # a server's has none


def load_server_keys(folder: Path) -> tuple[KeyPair, "KeyFolder"]:
    """Read a server's folder: its own pair, and whom it lets in.

    Raises ConfigError for what is missing, wrong or open to others.
    """
    own = _read_secret(folder / f"{SERVER}.key")
    allowed = KeyFolder(folder / ALLOWED)
    for path in allowed.files():
        _read_allowed(path)
    return KeyPair(own.public, own.secret), allowed


def load_client_keys(path: Path) -> ClientKeys:
    """Read a client's key file. Raises ConfigError for what is missing, wrong or open to others."""
    found = _read_secret(path)
    if not is_key(found.server):
        raise ConfigError(f"{path}: server is {found.server!r}, and must be a server's public key")
    return ClientKeys(KeyPair(found.public, found.secret), found.server)


def check_guarded(endpoint: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError where anybody on a network could use an endpoint, unless that is wanted."""
    if has_keys or _is_local(endpoint):
        return
    if not insecure:
        raise ConfigError(
            f"{endpoint} can be reached from other machines, and without keys whoever reaches it "
            "may use and stop the server: make keys with `callboard keys` and name their folder "
            "with --keys (or `keys`), or take the risk with --insecure (or `insecure = true`)"
        )
    log.warning("whoever reaches this endpoint may use and stop the server", endpoint=endpoint)


def _is_local(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, or an interface, and any of them may lead outside


class KeyFolder:
    """The keys that may connect, as they are in a folder now.

    A file that cannot be read lets nobody in; the others hold.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: object = None
        self._keys: dict[str, AllowedKey] = {}
        self._own: dict[str, AllowedKey] = {}

    def files(self) -> list[Path]:
        """Return the files there are. Raises ConfigError when there is no such folder."""
        try:
            return sorted(path for path in self._folder.iterdir() if path.suffix == ".pub")
        except OSError as error:
            raise ConfigError(f"{self._folder}: {error.strerror}") from error

    def add(self, key: AllowedKey) -> None:
        """Let a key in that is in no file."""
        self._own[key.public] = key

    def find(self, public: str) -> AllowedKey | None:
        """Return what is known of a key; see `AllowList`."""
        return self._own.get(public) or self._keys.get(public)

    def refresh(self) -> None:
        """Read the files again if they have changed; see `AllowList`."""
        try:
            files = self.files()
            seen: object = [(path.name, *_version(path)) for path in files]
        except (ConfigError, OSError) as error:
            files, seen = [], str(error)
        if seen == self._seen:
            return
        self._seen = seen
        self._keys = self._read(files)
        log.info("list of keys read", folder=str(self._folder), keys=len(self._keys))

    def _read(self, files: list[Path]) -> dict[str, AllowedKey]:
        keys: dict[str, AllowedKey] = {}
        for path in files:
            try:
                key = _read_allowed(path)
            except ConfigError as error:
                log.warning("key file left out", reason=str(error))
                continue
            keys[key.public] = key
        return keys


def make_keys(folder: Path, *, force: bool = False) -> list[Path]:
    """Make a server's folder with its key, a client's and an operator's; returns the files.

    Raises ConfigError when one of them exists, unless `force` says to replace them.
    """
    server = KeyPair.make()
    files = _server_files(folder, server)
    for name, role in FIRST_KEYS.items():
        files |= _client_files(folder, name, role, server.public)
    return _write(folder, files, force=force)


def add_key(folder: Path, name: str, role: Role, *, force: bool = False) -> list[Path]:
    """Make one more key for the server whose folder it is; returns the files.

    Raises ConfigError when there is no server's key, or a key of that name and no `force`.
    """
    if name == SERVER or not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"{name!r} is no name for a key: take letters, digits, - and _, and not {SERVER!r}"
        )
    server = _read_toml(folder / f"{SERVER}.pub", PublicKeyFile)
    return _write(folder, _client_files(folder, name, role, server.public), force=force)


def _server_files(folder: Path, pair: KeyPair) -> dict[Path, str]:
    return {
        folder / f"{SERVER}.key": _secret_text("the server", pair),
        folder / f"{SERVER}.pub": (
            "# The public key of a Callboard server: its clients need it.\n"
            f'public = "{pair.public}"\n'
        ),
    }


def _client_files(folder: Path, name: str, role: Role, server: str) -> dict[Path, str]:
    pair = KeyPair.make()
    return {
        folder / f"{name}.key": _secret_text(f"{name} ({role})", pair) + f'server = "{server}"\n',
        folder / ALLOWED / f"{name}.pub": (
            "# Lets a key in at this server, with this role.\n"
            f'public = "{pair.public}"\nrole = "{role}"\n'
        ),
    }


def _secret_text(whose: str, pair: KeyPair) -> str:
    return (
        f"# The secret key of {whose}. Whoever has it can pass for it.\n"
        f'public = "{pair.public}"\nsecret = "{pair.secret}"\n'
    )


def _write(folder: Path, files: dict[Path, str], *, force: bool) -> list[Path]:
    existing = [path for path in files if path.exists()]
    if existing and not force:
        raise ConfigError(f"{existing[0]} exists; --force replaces it")
    try:
        for place in (folder, folder / ALLOWED):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, text in files.items():
            _write_private(path, text)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return list(files)


def _write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600 at once, so that nobody ever reads half of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    unfinished.replace(path)


def _read_secret(path: Path) -> SecretKeyFile:
    found = _read_toml(path, SecretKeyFile)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"{path}: others may read or write it (mode {mode:04o}), and a secret key must be the "
            "owner's alone: mode 0600"
        )
    if not is_key(found.secret) or public_of(found.secret) != found.public:
        raise ConfigError(f"{path}: public and secret are not the halves of one key")
    return found


def _read_allowed(path: Path) -> AllowedKey:
    found = _read_toml(path, PublicKeyFile)
    if not is_key(found.public):
        raise ConfigError(f"{path}: public is {found.public!r}, and must be a key of 40 characters")
    if found.role is None:
        raise ConfigError(f"{path}: role is missing, and must be one of {', '.join(Role)}")
    return AllowedKey(path.stem, found.public, found.role)


def _read_toml(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            return msgspec.convert(tomllib.load(file), kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _version(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
