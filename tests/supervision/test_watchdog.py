import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import trio

from callboard.supervision.watchdog import STUCK_LOOP, Silence, turn_of, watched_loop


def test_silence_is_counted_in_turns_and_ends_with_any_new_sign() -> None:
    silence = Silence()

    assert [silence.look(sign, 0.5) for sign in (1, 1, 1, 2, 2)] == [0.0, 0.5, 1.0, 0.0, 0.5]


@pytest.mark.parametrize(("timeout_s", "turn_s"), [(0.5, 0.05), (30.0, 1.0)])
def test_there_are_enough_looks_and_not_too_many(timeout_s: float, turn_s: float) -> None:
    assert turn_of(timeout_s) == turn_s


async def test_a_loop_that_turns_is_left_alone() -> None:
    given_up = threading.Event()

    with watched_loop(1.0, give_up=given_up.set):
        await trio.sleep(1.5)

    assert not given_up.is_set()


async def test_a_loop_that_is_stuck_is_given_up() -> None:
    given_up = threading.Event()

    with watched_loop(0.2, give_up=given_up.set):
        given_up.wait(5.0)  # and blocks the loop

    assert given_up.is_set()


async def test_a_loop_is_not_watched_when_that_is_off() -> None:
    threads = threading.active_count()

    with watched_loop(0):
        assert threading.active_count() == threads


async def test_the_watcher_ends_with_the_block() -> None:
    threads = threading.active_count()

    with watched_loop(10.0):
        assert threading.active_count() == threads + 1

    assert threading.active_count() == threads


def test_a_stuck_process_writes_its_stacks_and_ends_with_a_code_of_its_own() -> None:
    program = f"""
import time, trio
from callboard.supervision.watchdog import watched_loop

def stand_still():
    time.sleep(60)

async def main():
    with watched_loop({0.2}):
        stand_still()

trio.run(main)
"""
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )

    assert ended.returncode == STUCK_LOOP
    assert "stand_still" in ended.stderr
    assert time.monotonic() - began < 20.0


def test_a_server_whose_loop_is_stuck_ends_with_that_code(tmp_path: Path) -> None:
    """So that a service manager starts it again; its replicas end with it."""
    config = tmp_path / "callboard.toml"
    config.write_text('model = "random:tiny"\nloop_timeout_s = 0.2\n')
    program = f"""
import time
from callboard.supervision import serve
from callboard.supervision.cli.main import main

async def stand_still(*_, **__):
    time.sleep(60)

serve.serve = stand_still
main(["serve", "--config", {str(config)!r}])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )

    assert ended.returncode == STUCK_LOOP
    assert "stand_still" in ended.stderr
