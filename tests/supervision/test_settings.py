"""Settings: defaults, files, flags, and errors that name what is wrong and where."""

from pathlib import Path
from typing import Any

import pytest

from callboard.messages.errors import ConfigError
from callboard.supervision.settings import DEFAULT_ENDPOINT, Settings, load_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def complaint(path: Path | None, **overrides: Any) -> str:
    with pytest.raises(ConfigError) as wrong:
        load_settings(path, **overrides)
    return str(wrong.value)


def test_without_a_file_and_flags_there_are_the_defaults() -> None:
    assert load_settings(None) == Settings()
    assert (Settings().listen, Settings().max_step_tokens) == (DEFAULT_ENDPOINT, 512)


def test_the_default_endpoint_is_open_to_this_machine_alone() -> None:
    assert "127.0.0.1" in DEFAULT_ENDPOINT


def test_a_file_may_set_everything(file: Path) -> None:
    file.write_text(
        """
        model = "model.gguf"
        listen = "ipc:///run/callboard/socket"
        replicas = 2
        kv_cache_gb = 1
        log_level = "INFO"
        """
    )

    settings = load_settings(file)

    assert settings.model == "model.gguf"
    assert settings.replicas == 2
    assert settings.kv_cache_gb == 1.0


def test_flags_win_over_the_file(file: Path) -> None:
    file.write_text("replicas = 2\nmax_rows = 8\n")

    settings = load_settings(file, replicas=3)

    assert (settings.replicas, settings.max_rows) == (3, 8)


def test_a_flag_that_was_not_given_does_not_win(file: Path) -> None:
    file.write_text("replicas = 2\n")

    assert load_settings(file, replicas=None).replicas == 2


def test_what_is_not_said_is_as_in_the_settings_to_begin_with(file: Path) -> None:
    file.write_text("max_rows = 8\n")
    base = Settings(max_rows=4, threads=2, model="a-model")

    settings = load_settings(file, base=base, model="another")

    assert (settings.max_rows, settings.threads, settings.model) == (8, 2, "another")


def test_a_file_is_read_as_utf_8(file: Path) -> None:
    file.write_bytes('model = "modèle.gguf"'.encode())

    assert load_settings(file).model == "modèle.gguf"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("replicas = \nmax_rows = 1", ["line 1"]),
        ("replicas = 'two'", ["replicas", "int"]),
        ("replicas = true", ["replicas", "bool"]),
        ("replicas = 1.5", ["replicas", "float"]),
        ("replicas = -1", ["replicas is -1", "0 to 64"]),
        ("replicas = 65", ["replicas is 65", "0 to 64"]),
        ("kv_cache_gb = nan", ["kv_cache_gb is nan"]),
        ("kv_cache_gb = inf", ["kv_cache_gb is inf"]),
        ("kv_cache_gb = -1", ["kv_cache_gb is -1"]),
        ("max_rows = 0", ["max_rows is 0"]),
        ("max_model_len = -1", ["max_model_len is -1"]),
        ("start_timeout_s = 0", ["start_timeout_s is 0"]),
        ("max_step_tokens = 8", ["max_step_tokens is 8", "max_rows (64)"]),
        ("replicsa = 2", ["replicsa", "replicas"]),
        ("[server]\nreplicas = 2", ["server", "no setting"]),
        ("log_level = 'loud'", ["log_level is 'loud'", "debug, info"]),
        ("listen = '127.0.0.1:7500'", ["listen is '127.0.0.1:7500'", "tcp://HOST:PORT"]),
        ("listen = 'tcp://127.0.0.1'", ["listen is 'tcp://127.0.0.1'"]),
        ("listen = 'tcp://127.0.0.1:65536'", ["65536", "at most 65535"]),
        ("listen = 'http://127.0.0.1:80'", ["listen is 'http://127.0.0.1:80'"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(
    file: Path, text: str, words: list[str]
) -> None:
    file.write_text(text)

    said = complaint(file)

    assert said.startswith(f"{file}: ")
    for word in words:
        assert word in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "listen",
    [
        "tcp://127.0.0.1:7500",
        "tcp://127.0.0.1:65535",
        "tcp://127.0.0.1:0",
        "tcp://*:*",
        "tcp://[::1]:7500",
        "ipc:///a/b",
    ],
)
def test_endpoints_may_be_tcp_or_ipc(listen: str) -> None:
    assert load_settings(None, listen=listen).listen == listen


def test_a_wrong_flag_is_not_blamed_on_the_file(file: Path) -> None:
    file.write_text("replicas = 2\n")

    assert complaint(file, replicas=-1) == "replicas is -1, and must be 0 to 64"


def test_an_unknown_flag_is_named() -> None:
    assert complaint(None, replicsa=2).startswith("replicsa is no setting")


def test_a_missing_file_is_named(file: Path) -> None:
    assert complaint(file) == f"{file}: No such file or directory"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert complaint(tmp_path).startswith(f"{tmp_path}: ")


def test_a_file_of_bytes_is_no_toml(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")

    assert complaint(file).startswith(f"{file}: ")


def test_a_way_of_routing_that_there_is_not_is_named_with_those_there_are() -> None:
    assert complaint(None, routing="random") == (
        "routing is 'random', and must be one of prefix_aware, least_loaded, round_robin"
    )
