"""The commands, run in this process against a scripted tree that listens in a thread."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from callboard.actors.system import open_system
from callboard.actors.testing import ScriptedRunner
from callboard.actors.transport import ZmqNetwork
from callboard.actors.zmq_socket import open_zmq_context
from callboard.logs import ROOT
from callboard.messages.control import ControlReply, StatusReply
from callboard.messages.sampling import LogprobsMode, SamplingParams
from callboard.messages.steps import RunStep, StepDone
from callboard.supervision.app import ReplicaParts, replica, root
from callboard.supervision.cli import main as cli
from callboard.supervision.engine import Engine, connect
from callboard.supervision.root import Address
from callboard.supervision.settings import Settings
from callboard.version import __version__

COMMANDS = [
    "serve",
    "generate",
    "pause",
    "unpause",
    "step",
    "suspend",
    "resume",
    "update-weights",
    "stop",
    "abort",
    "status",
    "keys",
    "fetch-model",
]


class Letters:
    """A tokenizer of one token a letter, and the way back."""

    stopped = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{turn['role'][0]}{turn['content']}" for turn in messages)

    def continue_from(self, token_id: int) -> None:
        pass

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


class GatedRunner(ScriptedRunner):
    """A runner whose steps wait, on the device thread, while the gate is closed."""

    def __init__(self, server: "Server") -> None:
        super().__init__()
        self._server = server

    def execute(self, step: RunStep) -> StepDone:
        assert self._server.gate.wait(20.0), "the test forgot to open the gate"
        if self._server.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        return super().execute(step)


class Server:
    """A tree in a thread of its own; it listens at `endpoint` until closed."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder / 'server'}"
        self.gate = threading.Event()
        self.gate.set()
        self.interrupts = False  # whether a step interrupts the command that waits for it
        self._token: trio.lowlevel.TrioToken
        self._end: trio.Event
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))

    def __enter__(self) -> "Server":
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *error: object) -> None:
        self._token.run_sync_soon(self._end.set)
        self._thread.join(20.0)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._token, self._end = trio.lowlevel.current_trio_token(), trio.Event()
        async with (
            open_zmq_context() as context,
            open_system() as system,
            trio.open_nursery() as nursery,
        ):
            network, address, settings = ZmqNetwork(context), Address(self.endpoint), Settings()
            parts = ReplicaParts(
                make_runner=lambda: GatedRunner(self),
                codec=Letters(),
                text_for=self._text_for,
                vocab_size=1000,
                eos_token_ids=(),
            )
            top = root(
                system,
                network,
                settings,
                lambda name: replica(
                    system, network, name, parts, settings, coordinator=address.endpoint
                ),
                address=address,
                control_endpoint=f"{self.endpoint}.control",
            )
            cell = system.cell("root")
            nursery.start_soon(cell.run, lambda: top)
            await top.started.wait()
            self._ready.set()
            await self._end.wait()
            await cell.stop()

    def _text_for(self, params: SamplingParams) -> Letters:
        return Letters()


@pytest.fixture(scope="module")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def server(_running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server that commands find without being told."""
    monkeypatch.setenv("CALLBOARD_ENDPOINT", _running.endpoint)
    yield _running
    _running.gate.set()
    _running.interrupts = False
    for command in ("resume", "unpause"):
        cli.main([command])


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """A command sets logging up for its process; other tests are not to notice."""
    logger = logging.getLogger(ROOT)
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CALLBOARD_ENDPOINT", raising=False)
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.out)
        return shown


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command and return its exit code and what it printed."""

    def run(*arguments: str) -> Result:
        code = cli.main(list(arguments))
        return Result(code, *capsys.readouterr())

    return run


# What a stranger tries first


def test_help_shows_every_command_and_the_exit_codes(run: Any) -> None:
    result = run("--help")

    assert result.code == 0
    for command in COMMANDS:
        assert f" {command} " in result.out
    assert "64 the command line is wrong" in " ".join(result.out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_every_option_has_a_help_text(run: Any, command: str) -> None:
    result = run(command, "--help")

    assert result.code == 0
    assert result.out.split("Usage:")[1].strip().splitlines()[2].strip()
    for line in result.out.splitlines():
        words = line.strip("│ ").split()
        if words and words[0].startswith("--"):
            assert len(words) > 2, line


def test_no_command_at_all_shows_the_help(run: Any) -> None:
    result = run()

    assert result.code == 64
    assert "Commands" in result.out + result.err


def test_version_is_printed(run: Any) -> None:
    result = run("--version")

    assert (result.code, result.out) == (0, f"callboard {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nope"], "--nope"),
        (["pasue"], "pasue"),
        (["pause", "--nope"], "--nope"),
        (["pause", "now"], "now"),
        (["pause", "--mode", "nicely"], "keep"),
        (["pause", "--timeout", "soon"], "--timeout"),
        (["pause", "--timeout", "-1"], "--timeout"),
        (["step", "0"], "N"),
        (["step", "often"], "N"),
        (["suspend", "--kv", "some"], "drop"),
        (["update-weights"], "SOURCE"),
        (["update-weights", "new", "--version", "0"], "--version"),
        (["status", "--wait", "happy"], "running"),
        (["status", "--connect", "localhost:7500"], "tcp://HOST:PORT"),
        (["abort"], "--all"),
        (["abort", "some-id", "--all"], "--all"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--logit-bias", "7"], "ID=BIAS"),
        (["generate", "hi", "--bad-tokens", "1;2"], "ID,ID,..."),
        (["generate", "hi", "--logprobs-mode", "cooked"], "processed"),
        (["generate", "hi", "--connect", "ipc:///a", "--model", "b"], "exclude each other"),
        (["serve", "--replicas", "many"], "--replicas"),
    ],
)
def test_a_wrong_command_line_is_code_64_and_says_what_is_wrong(
    run: Any, arguments: list[str], complaint: str
) -> None:
    result = run(*arguments)

    assert result.code == 64
    assert complaint in result.err
    assert "--help" in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["status", "pause", "stop"])
def test_nobody_at_the_endpoint_is_code_2(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    endpoint = f"ipc://{tmp_path / 'nobody'}"
    monkeypatch.setattr(cli, "MIN_HANDSHAKE_S", 0.1)

    result = run(command, "--connect", endpoint, "--timeout", "0.1")

    assert result.code == 2
    assert result.err.startswith(f"callboard: nobody answers at {endpoint}")
    assert result.err.count("\n") == 1


def test_without_a_model_one_is_told_how_to_get_one(run: Any) -> None:
    for command in (["generate", "hi"], ["serve"]):
        result = run(*command)

        assert result.code == 1
        assert "callboard fetch-model" in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("replicas = -1", "replicas is -1"), ("repl = 1", "repl is no setting"), ("=", "line 1")],
)
def test_a_wrong_settings_file_is_named_by_serve(
    run: Any, tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)

    result = run("serve", "--config", str(path))

    assert result.code == 1
    assert result.err.startswith(f"callboard: {path}: ")
    assert complaint in result.err


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        ([], "join", 64),
        (["--join", "here"], "'here' is neither tcp://HOST:PORT nor ipc://PATH", 64),
        (["--join", "tcp://127.0.0.1:9", "--replicas", "0"], "'--replicas'", 64),
        (["--join", "tcp://127.0.0.1:9", "--name", "a/b"], "a host cannot be named 'a/b'", 1),
        (["--join", "tcp://127.0.0.1:9", "--keys", "none.key"], "none.key", 1),
        (["--join", "tcp://127.0.0.1:9", "--config", "none.toml"], "none.toml", 1),
    ],
)
def test_a_host_that_cannot_join_as_it_was_told_says_why(
    run: Any, arguments: list[str], complaint: str, code: int
) -> None:
    result = run("replica", *arguments)

    assert result.code == code
    assert complaint in result.err


# Verbs


VERBS = [
    (["pause"], "paused"),
    (["unpause"], "running"),
    (["suspend"], "suspended"),
    (["resume"], "running"),
]


@pytest.mark.parametrize(("command", "state"), VERBS)
def test_a_verb_says_what_happened(
    run: Any, server: Server, command: list[str], state: str
) -> None:
    result = run(*command)

    assert result.code == 0
    assert result.out.startswith(f"{command[0]}: now {state} (")
    assert result.err == ""


@pytest.mark.parametrize(("command", "state"), VERBS)
def test_a_verb_can_say_it_as_json(
    run: Any, server: Server, command: list[str], state: str
) -> None:
    result = run(*command, "--json")

    assert result.code == 0
    assert result.json["state"] == state
    assert set(result.json) == set(ControlReply.__struct_fields__)


def test_a_verb_can_be_repeated(run: Any, server: Server) -> None:
    assert [run("pause").code for _ in range(3)] == [0, 0, 0]


def test_step_says_how_many_were_run(run: Any, server: Server) -> None:
    run("pause")
    with held_request(server.endpoint):
        plain, as_json = run("step"), run("step", "7", "--json")

    assert plain.code == 0
    assert plain.out.startswith("step: now paused (")
    assert plain.out.endswith("ms, 1 steps, 1 requests kept)\n")
    assert (as_json.json["steps"], as_json.json["requests"]) == (1, 0)


def test_what_runs_is_not_stepped(run: Any, server: Server) -> None:
    result = run("step")

    assert (result.code, result.out) == (1, "")
    assert result.err == "callboard: step refused: the tree is running: pause first\n"


def test_new_weights_are_named_by_their_source_and_version(run: Any, server: Server) -> None:
    run("pause")

    done = run("update-weights", "new", "--version", "3", "--keep-kv")
    next_one = run("update-weights", "newer", "--json")

    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("update-weights: now paused (")
    assert (next_one.code, next_one.json["state"]) == (0, "paused")
    shown = run("status", "--json").json
    assert (shown["model"], shown["weights_version"]) == ("newer", 4)
    assert "weights_version=4" in run("status").out


def test_what_runs_gets_no_new_weights(run: Any, server: Server) -> None:
    result = run("update-weights", "new")

    assert (result.code, result.out) == (1, "")
    assert result.err == "callboard: update-weights refused: the tree is running: pause first\n"


def test_suspend_says_how_much_was_freed(run: Any, server: Server) -> None:
    shown = run("suspend", "--weights", "discard", "--json").json

    assert shown["bytes_freed"] == 3000


def test_a_refused_verb_is_code_1_with_the_reason(run: Any, server: Server) -> None:
    run("suspend")

    result = run("unpause")

    assert (result.code, result.out) == (1, "")
    assert result.err == "callboard: unpause refused: the tree is suspended: resume first\n"


def test_a_refused_verb_is_json_too(run: Any, server: Server) -> None:
    run("suspend")

    result = run("unpause", "--json")

    assert result.code == 1
    assert result.json["refused"] == "the tree is suspended: resume first"


def test_a_verb_whose_time_is_over_is_code_3_and_names_who_was_late(
    run: Any, server: Server
) -> None:
    server.gate.clear()
    with held_request(server.endpoint):
        result = run("pause", "--timeout", "0.3")
        as_json = run("pause", "--timeout", "0.3", "--json")
        server.gate.set()

    assert result.code == as_json.code == 3
    assert "replica-0/scheduler" in result.err
    assert as_json.json["late"] == ["replica-0/scheduler"]
    assert as_json.json["state"] == "pausing"


@contextmanager
def held_request(endpoint: str) -> Iterator[None]:
    """Have a request run while the block lasts, and let it end then."""
    accepted = threading.Event()

    async def generate() -> None:
        async with connect(endpoint) as engine, engine.submit([1], max_tokens=2) as stream:
            accepted.set()
            await stream.completion()

    thread = threading.Thread(target=trio.run, args=(generate,))
    thread.start()
    assert accepted.wait(10.0)
    yield
    cli.main(["unpause"])
    thread.join(20.0)
    assert not thread.is_alive()


# Status


def test_status_shows_the_tree(run: Any, server: Server) -> None:
    result = run("status")

    assert result.code == 0
    assert result.out.startswith(f"callboard {__version__} at {server.endpoint}: running\n")
    for part in ("metrics", "coordinator", "replicas", "replica-0/scheduler", "steps="):
        assert part in result.out


def test_status_as_json_sums_up_each_replica(run: Any, server: Server) -> None:
    shown = run("status", "--json").json

    [one] = shown["replicas"]
    assert set(shown) == set(StatusReply.__struct_fields__)
    assert {"steps", "running", "waiting", "paused", "pid", "restarts"} <= set(one)
    assert one["blocks_total"] == one["blocks_free"] == 64


def test_status_can_wait(run: Any, server: Server) -> None:
    assert run("status", "--wait", "running").code == 0


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_nobody_can_wait_for_what_no_server_says(run: Any, server: Server, state: str) -> None:
    result = run("status", "--wait", state)

    assert result.code == 64
    assert f"a server that has {state} has no process" in result.err


def test_status_that_waits_in_vain_is_code_3_with_what_it_saw(run: Any, server: Server) -> None:
    result = run("status", "--wait", "paused", "--timeout", "0.3")

    assert (result.code, result.out) == (3, "")
    assert "not paused within" in result.err
    assert "but running" in result.err


# Requests


def test_generate_prints_text_as_it_comes(run: Any, server: Server) -> None:
    result = run("generate", "ab", "--max-tokens", "3", "--connect", server.endpoint)

    assert (result.code, result.out) == (0, "cde\n")


def test_generate_finds_the_server_by_the_environment(run: Any, server: Server) -> None:
    assert run("generate", "ab", "--max-tokens", "2").out == "cd\n"


def test_generate_takes_several_prompts(run: Any, server: Server) -> None:
    result = run("generate", "a", "x", "--max-tokens", "1")

    assert result.out.splitlines() == ["'a' → 'b' (length)", "'x' → 'y' (length)"]


def test_generate_prints_a_json_object_a_line(run: Any, server: Server) -> None:
    result = run("generate", "a", "x", "--max-tokens", "1", "--json", "--logprobs", "0")

    shown = [json.loads(line) for line in result.out.splitlines()]
    assert [one["text"] for one in shown] == ["b", "y"]
    assert [one["token_ids"] for one in shown] == [[98], [121]]
    assert {one["finish_reason"] for one in shown} == {"length"}


def test_generate_can_give_several_answers_to_each_prompt(run: Any, server: Server) -> None:
    options = ["--max-tokens", "1", "--n", "2", "--seed", "5"]
    plain = run("generate", "a", "x", *options)
    as_json = run("generate", "a", *options, "--json")

    assert plain.out.splitlines() == [
        "'a' → 'b' (length)",
        "'a' #1 → 'b' (length)",
        "'x' → 'y' (length)",
        "'x' #1 → 'y' (length)",
    ]
    shown = [json.loads(line) for line in as_json.out.splitlines()]
    assert [(one["choice"], one["seed"]) for one in shown] == [(0, 5), (1, 6)]


def test_generate_as_json_says_what_it_took(run: Any, server: Server) -> None:
    shown = run("generate", "ab", "--max-tokens", "3", "--json").json

    assert (shown["usage"]["prompt_tokens"], shown["usage"]["output_tokens"]) == (2, 3)
    assert isinstance(shown["events"], list)
    assert 0 < shown["time_to_first_token_s"] < shown["latency_s"]


EVERY_FIELD = {
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "7"], 7),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "seed": (["--seed", "3"], 3),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "2"], 2),
    "stop": (["--stop", "x", "--stop", "y"], ("x", "y")),
    "stop_token_ids": (["--stop-token-id", "5", "--stop-token-id", "6"], (5, 6)),
    "include_stop": (["--include-stop"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "skip_special_tokens": (["--special"], False),
    "logprobs": (["--logprobs", "2"], 2),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", "7=-5", "--logit-bias", "8=0.5"], {7: -5.0, 8: 0.5}),
    "bad_words": (["--bad-word", "no", "--bad-word", "never"], ("no", "never")),
    "bad_token_ids": (["--bad-tokens", "1,2", "--bad-tokens", "3"], ((1, 2), (3,))),
    "logprobs_mode": (["--logprobs-mode", "processed"], LogprobsMode.PROCESSED),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
}


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """Take note of the parameters of what is generated, and generate nothing."""
    asked: list[SamplingParams] = []

    async def generate(engine: Any, prompts: Any, params: SamplingParams, **options: Any) -> Any:
        asked.append(params)
        return []

    monkeypatch.setattr(Engine, "generate", generate)
    return asked


def test_every_sampling_parameter_has_an_option(
    run: Any, server: Server, asked_for: list[SamplingParams]
) -> None:
    words = [word for option, _ in EVERY_FIELD.values() for word in option]

    run("generate", "a", "--json", *words)

    [params] = asked_for
    assert msgspec.structs.asdict(params) == {name: one for name, (_, one) in EVERY_FIELD.items()}


def test_without_options_generation_is_greedy_and_else_as_by_default(
    run: Any, server: Server, asked_for: list[SamplingParams]
) -> None:
    run("generate", "a", "--json")

    assert asked_for == [SamplingParams(temperature=0.0, max_tokens=128)]


def test_generate_can_chat(run: Any, server: Server) -> None:
    assert run("generate", "a", "--chat", "--max-tokens", "1", "--json").json[
        "prompt_token_ids"
    ] == [ord("u"), ord("a")]


def test_a_wrong_option_of_a_request_is_code_1_and_named(run: Any, server: Server) -> None:
    result = run("generate", "a", "--top-p", "7")

    assert result.code == 1
    assert "top_p is 7.0" in result.err


def test_a_request_whose_time_is_over_is_code_3(run: Any, server: Server) -> None:
    run("pause")

    result = run("generate", "a", "--timeout", "0.3")

    assert result.code == 3
    assert "no answer in time" in result.err


def test_an_interrupt_is_code_130_without_a_word(run: Any, server: Server) -> None:
    server.interrupts = True

    result = run("generate", "a", "x", "--max-tokens", "1")

    assert (result.code, result.out, result.err) == (130, "", "")


def test_abort_says_how_many_there_were(run: Any, server: Server) -> None:
    plain, as_json = run("abort", "--all"), run("abort", "nobody's", "--json")

    assert (plain.code, plain.out) == (0, "abort: 0 requests\n")
    assert (as_json.code, as_json.json) == (0, {"aborted": 0})


# Stop


def test_stop_ends_requests_and_says_so(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tmp_path) as server:
        monkeypatch.setenv("CALLBOARD_ENDPOINT", server.endpoint)

        result = run("stop", "--json")
        refused = run("pause")

    assert (result.code, result.json["state"]) == (0, "stopped")
    assert refused.code == 1
    assert "stopped" in refused.err


def test_a_reader_that_has_gone_ends_a_command_quietly(default_model: Path) -> None:
    command = [sys.executable, "-m", "callboard", "fetch-model"]
    environment = {**os.environ, "CALLBOARD_CACHE": str(default_model.parent)}

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)

    assert process.returncode == cli.REFUSED
    assert errors == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_some_of_its_standard_streams_does_what_it_is_told(
    tmp_path: Path, closed: str
) -> None:
    command = f"{sys.executable} -m callboard"
    program = f"{command} keys --dir {tmp_path}/keys {closed} && {command} --version {closed}"

    ended = subprocess.run(["sh", "-c", program], capture_output=True, timeout=60, check=False)

    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr
    assert (tmp_path / "keys" / "server.key").exists()
    assert (">&-" in closed.split()) == (ended.stdout == b"")


# Keys


def test_keys_are_made_and_their_files_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"

    assert cli.main(["keys", "--dir", str(folder)]) == 0
    made = capsys.readouterr().out.splitlines()
    assert cli.main(["keys", "--dir", str(folder), "--add", "alice", "--role", "replica"]) == 0
    added = capsys.readouterr().out.splitlines()

    assert sorted(made + added) == sorted(str(path) for path in folder.rglob("*.*"))
    assert added == [str(folder / "alice.key"), str(folder / "allowed" / "alice.pub")]


def test_a_key_without_a_name_replaces_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["keys", "--dir", str(tmp_path)]) == 0
    before = (tmp_path / "server.key").read_text()

    assert cli.main(["keys", "--dir", str(tmp_path), "--add", "", "--force"]) == 1

    assert "'' is no name for a key" in capsys.readouterr().err
    assert (tmp_path / "server.key").read_text() == before


def test_keys_that_exist_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["keys", "--dir", str(tmp_path)]) == 0
    before = (tmp_path / "server.key").read_text()

    assert cli.main(["keys", "--dir", str(tmp_path)]) == 1
    assert "server.key exists; --force replaces it" in capsys.readouterr().err
    assert (tmp_path / "server.key").read_text() == before
    assert cli.main(["keys", "--dir", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "server.key").read_text() != before


@pytest.mark.parametrize("words", [["status"], ["pause"], ["generate", "x"], ["abort", "r1"]])
def test_a_command_takes_its_key_from_the_environment(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CALLBOARD_KEYS", "/nowhere/my.key")
    monkeypatch.setenv("CALLBOARD_ENDPOINT", "tcp://127.0.0.1:1")

    assert cli.main(words) == 1
    assert "/nowhere/my.key: No such file" in capsys.readouterr().err


def test_a_server_does_not_listen_to_everybody_without_being_told_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serve", "--model", "random:tiny", "--listen", "tcp://0.0.0.0:0"]) == 1
    assert "can be reached from other machines" in capsys.readouterr().err
