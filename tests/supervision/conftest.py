"""Replica processes that are real, and start in half a second: their model is a script."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPLICA = """
import sys, time, types

from callboard.actors.testing import ScriptedRunner
from callboard.messages.errors import ConfigError
from callboard.supervision.app import ReplicaParts


class Runner(ScriptedRunner):
    def execute(self, step):
        time.sleep(0.002)
        return super().execute(step)


def replica_parts(settings):
    if settings.model == "missing.gguf":
        raise ConfigError("missing.gguf: no such file")
    return ReplicaParts(
        make_runner=Runner, codec=None, text_for=None, vocab_size=1000, eos_token_ids=()
    )


sys.modules["callboard.supervision.model"] = types.SimpleNamespace(replica_parts=replica_parts)

from callboard.supervision.replica import main

sys.exit(main())
"""

Play = Callable[[str], None]


@pytest.fixture
def play_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return what makes replica processes run a shell command instead."""

    def play(command: str) -> None:
        program = tmp_path / "replica.sh"
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return play


@pytest.fixture
def scripted_replicas(tmp_path: Path, play_replica: Play) -> None:
    """Make replica processes run the script above, without torch."""
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    play_replica(f"exec {sys.executable} {script}")
