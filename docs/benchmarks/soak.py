"""Kill replica processes at random moments under load, and count what the streams have lost.

A real server runs two replicas of a tiny model. In each round sixteen streams run, greedy and
sampled, and one of the replicas is killed (kill -9) at a random moment. Each stream must say what
it says when nothing is killed. Memory and file descriptors of the server are measured when both
replicas are back. Run `make soak`, or this file with `--help`.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from callboard.messages.base import unpack_ids
from callboard.messages.control import State
from callboard.messages.errors import CallboardError
from callboard.supervision.engine import Engine, connect

STREAMS = 16
REPLICAS = 2
MAX_TOKENS = 160
ROUND_S = 120.0

# In float64, so that no rounding shows in a token whatever runs together.
SETTINGS = f"""
model = "random:tiny"
dtype = "float64"
listen = "tcp://127.0.0.1:0"
replicas = {REPLICAS}
threads = 1
kv_cache_gb = 0.02
max_model_len = 256
max_restarts = 1000000
log_level = "critical"
"""


class Tally(msgspec.Struct):
    """What was wrong with the streams of all rounds."""

    lost: int = 0
    duplicated: int = 0
    changed: int = 0
    failed: list[str] = []

    @property
    def clean(self) -> bool:
        """Whether nothing was."""
        return not (self.lost or self.duplicated or self.changed or self.failed)


class Measure(msgspec.Struct, frozen=True):
    """What the server's root process held after a round."""

    megabytes: float
    descriptors: int


def options(number: int) -> dict[str, Any]:
    """Every other stream is greedy; the others have a seed each."""
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    return {"max_tokens": MAX_TOKENS, "ignore_eos": True, **drawn}


async def listen(engine: Engine, number: int, tally: Tally) -> list[int]:
    """Read one stream to its end, noting tokens that come twice or not at all."""
    tokens: list[int] = []
    try:
        async with engine.submit([number + 1, 7, 3], **options(number)) as stream:
            async for delta in stream:
                tally.lost += max(0, delta.start - len(tokens))
                tally.duplicated += max(0, len(tokens) - delta.start)
                tokens += unpack_ids(delta.token_ids)
    except CallboardError as error:
        tally.failed.append(str(error))
    return tokens


async def listen_to_all(engine: Engine, tally: Tally) -> list[list[int]]:
    """Read all streams at once."""
    said: list[list[int]] = [[] for _ in range(STREAMS)]

    async def run(number: int) -> None:
        said[number] = await listen(engine, number, tally)

    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(run, number)
    return said


async def kill_one(engine: Engine, rng: random.Random, within_s: float) -> None:
    """Kill a replica at a random moment of the time that the streams take."""
    pids = [one.pid for one in (await engine.status()).replicas]
    await trio.sleep(rng.uniform(0.0, within_s))
    os.kill(rng.choice(pids), signal.SIGKILL)


async def all_up(engine: Engine) -> None:
    """Wait until every replica has a device."""
    while True:
        status = await engine.status()
        replicas = status.replicas
        if status.state is State.RUNNING and all(one.blocks_total for one in replicas):
            return
        await trio.sleep(0.1)


def compare(said: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], tally: Tally) -> None:
    """Count tokens that are missing at the end, and tokens that are others."""
    for mine, right in zip(said, wanted, strict=True):
        tally.lost += max(0, len(right) - len(mine))
        tally.duplicated += max(0, len(mine) - len(right))
        tally.changed += sum(a != b for a, b in zip(mine, right, strict=False))


def measure(pid: int) -> Measure:
    """Measure the root process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Measure(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd")))


async def soak(endpoint: str, pid: int, *, rounds: int, seconds: float, seed: int) -> bool:
    """Run the rounds; returns whether all was right."""
    rng, tally = random.Random(seed), Tally()
    measures: list[Measure] = []
    async with connect(endpoint) as engine:
        began = time.monotonic()
        wanted = await listen_to_all(engine, tally)
        alone_s = time.monotonic() - began
        while len(measures) < rounds and time.monotonic() - began < seconds:
            with trio.fail_after(ROUND_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(kill_one, engine, rng, alone_s)
                    said = await listen_to_all(engine, tally)
                compare(said, wanted, tally)
                await all_up(engine)
            measures.append(measure(pid))
            if len(measures) % 10 == 1:
                report(len(measures), measures[-1], tally)
    return judge(measures, tally, time.monotonic() - began)


def report(number: int, now: Measure, tally: Tally) -> None:
    """Print where it stands."""
    wrong = f"lost {tally.lost}, duplicated {tally.duplicated}, changed {tally.changed}"
    sizes = f"{now.megabytes:.1f} MB, {now.descriptors} descriptors"
    sys.stdout.write(f"round {number}: {wrong}, failed {len(tally.failed)}; {sizes}\n")
    sys.stdout.flush()


def judge(measures: Sequence[Measure], tally: Tally, took_s: float) -> bool:
    """Print the sum of it and say whether the streams were right and nothing grew."""
    report(len(measures), measures[-1], tally)
    for reason in sorted(set(tally.failed)):
        sys.stdout.write(f"failed: {reason}\n")
    third = max(1, len(measures) // 3)
    early, late = measures[:third], measures[-third:]
    megabytes = [statistics.median(one.megabytes for one in part) for part in (early, late)]
    descriptors = [statistics.median(one.descriptors for one in part) for part in (early, late)]
    sys.stdout.write(
        f"{len(measures)} kills in {took_s:.0f} s, {len(measures) * STREAMS} streams; "
        f"first and last third: {megabytes[0]:.1f} and {megabytes[1]:.1f} MB, "
        f"{descriptors[0]:g} and {descriptors[1]:g} descriptors\n"
    )
    return tally.clean and megabytes[1] < 1.05 * megabytes[0] and descriptors[1] <= descriptors[0]


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Run a server; yields its endpoint and process id."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "soak.toml"
        config.write_text(SETTINGS)
        command = [sys.executable, "-m", "callboard", "serve", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert "ready at" in ready, "the server did not start"
            try:
                yield ready.split()[-1], process.pid
            finally:
                process.terminate()


def main() -> int:
    """Run it; the exit code is 0 when no token was lost, duplicated or changed and nothing grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no round after that")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with server() as (endpoint, pid):
        right = trio.run(
            lambda: soak(endpoint, pid, rounds=given.rounds, seconds=given.seconds, seed=given.seed)
        )
    sys.stdout.write("all right\n" if right else "NOT right\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
