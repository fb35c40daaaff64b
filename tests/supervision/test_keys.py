"""Key files, the folder of whom a server lets in, and where a server may listen without them."""

import os
import stat
from pathlib import Path

import pytest

from callboard.actors.curve import KeyPair, is_key
from callboard.messages.errors import ConfigError
from callboard.messages.membership import Role
from callboard.supervision.keys import (
    KeyFolder,
    add_key,
    check_guarded,
    load_client_keys,
    load_server_keys,
    make_keys,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    make_keys(path)
    return path


def complaint(path: Path) -> str:
    with pytest.raises(ConfigError) as wrong:
        load_client_keys(path)
    return str(wrong.value)


def text_of(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


# Making them.


def test_a_server_a_client_and_an_operator_get_keys_that_fit(folder: Path) -> None:
    server, allowed = load_server_keys(folder)
    allowed.refresh()

    for name, role in (("client", Role.CLIENT), ("operator", Role.OPERATOR)):
        keys = load_client_keys(folder / f"{name}.key")
        found = allowed.find(keys.own.public)
        assert keys.server == server.public
        assert found is not None
        assert (found.name, found.role) == (name, role)


def test_only_the_owner_may_read_them(folder: Path) -> None:
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}

    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}


def test_secrets_are_in_the_secret_files_alone(folder: Path) -> None:
    secrets = [load_server_keys(folder)[0].secret]
    secrets += [
        load_client_keys(folder / name).own.secret for name in ("client.key", "operator.key")
    ]

    for path, text in text_of(folder).items():
        assert sum(secret in text for secret in secrets) == (path.suffix == ".key")


def test_keys_are_not_replaced_unless_that_is_wanted(folder: Path) -> None:
    before = text_of(folder)

    with pytest.raises(ConfigError, match=r"server.key exists; --force replaces it"):
        make_keys(folder)
    assert text_of(folder) == before

    made = make_keys(folder, force=True)
    after = text_of(folder)
    assert set(made) == set(after) == set(before)
    assert all(after[path] != before[path] for path in made)


def test_one_more_key_leaves_the_others_as_they_are(folder: Path) -> None:
    before = text_of(folder)

    made = add_key(folder, "alice", Role.REPLICA)

    assert made == [folder / "alice.key", folder / "allowed" / "alice.pub"]
    assert before.items() < text_of(folder).items()
    _, allowed = load_server_keys(folder)
    allowed.refresh()
    found = allowed.find(load_client_keys(folder / "alice.key").own.public)
    assert found is not None
    assert found.role is Role.REPLICA
    with pytest.raises(ConfigError, match=r"alice\.key exists"):
        add_key(folder, "alice", Role.CLIENT)


@pytest.mark.parametrize("name", ["server", "", "../alice", "a/b", ".", "a.b", "a b"])
def test_a_name_that_is_no_file_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a key"):
        add_key(folder, name, Role.CLIENT)


def test_a_key_is_made_for_a_server_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server.pub: No such file"):
        add_key(tmp_path, "alice", Role.CLIENT)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"file/keys: Not a directory|file: "):
        make_keys(tmp_path / "file" / "keys")


# Reading them.


def test_a_secret_that_others_may_read_is_refused(folder: Path) -> None:
    path = folder / "client.key"
    path.chmod(0o640)

    assert "(mode 0640), and a secret key must be the owner's alone: mode 0600" in complaint(path)


def test_halves_of_two_keys_are_refused(folder: Path) -> None:
    path = folder / "client.key"
    public = load_client_keys(path).own.public
    path.write_text(path.read_text().replace(public, KeyPair.make().public))

    assert "public and secret are not the halves of one key" in complaint(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "missing required field `public`"),
        ("public = 1", "Expected `str`, got `int`"),
        ("not toml", "Expected '='"),
        ('public = "a"\nsecret = "b"\n', "not the halves"),
        ('public = "a"\nsecret = "b"\nhost = "c"\n', "unknown field `host`"),
    ],
)
def test_what_is_no_key_file_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "some.key"
    path.write_text(text)
    path.chmod(0o600)

    said = complaint(path)

    assert said.startswith(f"{path}: ")
    assert what in said


def test_a_file_without_the_server_it_is_for_is_no_clients(folder: Path) -> None:
    assert "server is '', and must be a server's public key" in complaint(folder / "server.key")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.key") == f"{tmp_path / 'none.key'}: No such file or directory"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('public = "{key}"\n', "role is missing, and must be one of client, operator, replica"),
        ('public = "{key}"\nrole = "root"\n', "Invalid enum value 'root'"),
        ('public = "short"\nrole = "client"\n', "public is 'short', and must be a key"),
    ],
)
def test_a_server_does_not_start_with_a_list_that_is_wrong(
    folder: Path, text: str, what: str
) -> None:
    (folder / "allowed" / "bad.pub").write_text(text.replace("{key}", KeyPair.make().public))

    with pytest.raises(ConfigError, match=r"bad\.pub: ") as wrong:
        load_server_keys(folder)
    assert what in str(wrong.value)


def test_a_server_does_not_start_without_a_list(folder: Path) -> None:
    for path in (folder / "allowed").iterdir():
        path.unlink()
    (folder / "allowed").rmdir()

    with pytest.raises(ConfigError, match="allowed: No such file"):
        load_server_keys(folder)


# The list while the server runs.


@pytest.fixture
def allowed(folder: Path) -> KeyFolder:
    _, allowed = load_server_keys(folder)
    allowed.refresh()
    return allowed


def test_a_key_is_let_in_when_its_file_comes_and_not_when_it_has_gone(
    folder: Path, allowed: KeyFolder
) -> None:
    add_key(folder, "alice", Role.CLIENT)
    alice = load_client_keys(folder / "alice.key").own.public

    assert allowed.find(alice) is None
    allowed.refresh()
    assert allowed.find(alice) is not None
    (folder / "allowed" / "alice.pub").unlink()
    allowed.refresh()
    assert allowed.find(alice) is None


def test_a_role_is_what_the_file_says_now(folder: Path, allowed: KeyFolder) -> None:
    path = folder / "allowed" / "client.pub"
    path.write_text(path.read_text().replace('"client"', '"operator"'))
    allowed.refresh()

    found = allowed.find(load_client_keys(folder / "client.key").own.public)

    assert found is not None
    assert found.role is Role.OPERATOR


def test_a_key_that_is_replaced_does_not_get_in_any_more(folder: Path, allowed: KeyFolder) -> None:
    old = load_client_keys(folder / "client.key").own.public
    (folder / "client.key").unlink()
    add_key(folder, "client", Role.CLIENT, force=True)
    allowed.refresh()

    new = load_client_keys(folder / "client.key").own.public

    assert allowed.find(old) is None
    assert allowed.find(new) is not None


def test_a_file_that_turns_bad_lets_nobody_in_and_the_others_hold(
    folder: Path, allowed: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "allowed" / "client.pub").write_text("half a fi")
    with caplog.at_level("WARNING", logger="callboard"):
        for _ in range(3):
            allowed.refresh()

    assert allowed.find(load_client_keys(folder / "client.key").own.public) is None
    assert allowed.find(load_client_keys(folder / "operator.key").own.public) is not None
    assert len(caplog.records) == 1


def test_a_list_that_is_gone_lets_nobody_in(folder: Path, allowed: KeyFolder) -> None:
    (folder / "allowed").rename(folder / "elsewhere")
    allowed.refresh()

    assert allowed.find(load_client_keys(folder / "operator.key").own.public) is None


def test_a_list_that_has_not_changed_is_not_read_again(
    folder: Path, allowed: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyFolder, "_read", lambda self, files: pytest.fail("it was read"))

    allowed.refresh()


# Where a server may listen.


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:7500",
        "tcp://127.8.9.1:0",
        "tcp://localhost:7500",
        "tcp://[::1]:7500",
        "ipc:///run/callboard/socket",
    ],
)
def test_this_machine_alone_needs_no_keys(endpoint: str) -> None:
    check_guarded(endpoint, has_keys=False, insecure=False)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:7500",
        "tcp://*:7500",
        "tcp://[::]:7500",
        "tcp://192.168.1.7:7500",
        "tcp://eth0:7500",
        "tcp://node1.example.org:7500",
        "tcp://127.0.0.1.example.org:7500",
    ],
)
def test_what_others_can_reach_needs_keys_or_a_word(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines") as wrong:
        check_guarded(endpoint, has_keys=False, insecure=False)
    assert str(wrong.value).startswith(endpoint)

    check_guarded(endpoint, has_keys=True, insecure=False)
    assert caplog.records == []
    with caplog.at_level("WARNING", logger="callboard"):
        check_guarded(endpoint, has_keys=False, insecure=True)
    assert "may use and stop the server" in caplog.text


def test_what_is_made_is_a_key(folder: Path) -> None:
    assert is_key(load_server_keys(folder)[0].public)
    assert os.listdir(folder / "allowed")
