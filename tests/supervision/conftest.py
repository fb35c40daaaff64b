"""Replica processes that are real, and start in half a second: their model is a script.

The first prompt of a test that begins with 900 hangs its device, with 901 it loses it, and with 902
it hangs the event loop; any other counts up.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPLICA = """
import pathlib, sys, time, types

import trio

from callboard.actors.testing import ScriptedRunner
from callboard.messages.base import unpack_ids
from callboard.messages.errors import ConfigError, DeviceLost
from callboard.supervision.app import ReplicaParts


done = pathlib.Path(sys.argv[0]).with_suffix(".done")


class Runner(ScriptedRunner):
    token = None

    def execute(self, step):
        time.sleep(0.002)
        for admit in step.admits:
            first = unpack_ids(admit.prompt)[0]
            if first < 900 or done.exists():
                continue
            done.touch()
            match first:
                case 900:
                    time.sleep(3600)
                case 901:
                    raise DeviceLost("script: its context is dead")
                case 902:
                    trio.from_thread.run_sync(time.sleep, 3600, trio_token=Runner.token)
        return super().execute(step)


def replica_parts(settings):
    if settings.model == "missing.gguf":
        raise ConfigError("missing.gguf: no such file")
    Runner.token = trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
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
