"""Play many seeds on all cores, or show one: see docs/how-to/simulate.md.

python -m tests.simulation.run --seeds 5000
python -m tests.simulation.run --show 1234
python -m tests.simulation.run --mutants
"""

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.pool import Pool

from tests.simulation.log import describe
from tests.simulation.mutants import MUTANTS
from tests.simulation.world import Result, simulate

SEEDS_AT_ONCE = 20
REAL_LIMIT_S = 120
"""A seed that takes longer than this is stuck in a loop that lets no simulated time pass."""

MUTANT_SEEDS = 2_000


def main() -> int:
    """Do what the command line says; returns the exit code, 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description="Simulate the whole tree, seed by seed.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to play")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", type=int, metavar="SEED", help="play one and print its log")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="with this bug in the product")
    parser.add_argument("--mutants", action="store_true", help="look for each bug on purpose")
    options = parser.parse_args()
    if options.show is not None:
        return show(options.show, options.mutant)
    if options.mutants:
        return find_mutants(options.jobs)
    return play_all(range(options.start, options.start + options.seeds), options.jobs)


def show(seed: int, mutant: str | None) -> int:
    """Print the scenario of a seed, what happened, and which promises were not kept."""
    result = play_one(seed, mutant)
    for field in result.scenario.__struct_fields__:
        value = getattr(result.scenario, field)
        items = value if isinstance(value, tuple) and value else [value]
        for item in items:
            say(f"{field:<22} {describe(item)}")
    for line in result.log.lines():
        say(line)
    for broken in result.broken:
        say(f"BROKEN: {broken}")
    say(f"{result.seconds:.1f} simulated seconds, {len(result.log)} events")
    return 1 if result.broken else 0


def play_all(seeds: range, jobs: int) -> int:
    """Play seeds in as many processes, and say how to see those that broke a promise."""
    began, played, failed = time.monotonic(), 0, 0
    for some, broken in _in_processes(seeds, jobs):
        played += some
        for seed, what in broken:
            failed += 1
            say(f"seed {seed}: {what}")
            say(f"    {sys.executable} -m tests.simulation.run --show {seed}")
        seconds = time.monotonic() - began
        if played % 200 < some or played == len(seeds):
            say(f"{played} of {len(seeds)} seeds, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def find_mutants(jobs: int) -> int:
    """Look for a seed that finds each mutant; says which it is, and fails when one has none."""
    with _pool(jobs) as pool:
        unfound = 0
        for name, seed in pool.imap(find_mutant, MUTANTS):
            unfound += seed is None
            say(f"{name:<40} {'NOT FOUND' if seed is None else f'seed {seed}'}")
    return 1 if unfound else 0


def find_mutant(name: str, seeds: int = MUTANT_SEEDS) -> tuple[str, int | None]:
    """Return the first seed that finds a mutant: the one it names, or else one from 0 on."""
    for seed in (MUTANTS[name].seed, *range(seeds)):
        signal.alarm(REAL_LIMIT_S)
        if play_one(seed, name).broken and not play_one(seed).broken:
            return name, seed
    return name, None


def play_one(seed: int, mutant: str | None = None) -> Result:
    """Play one seed, with a bug on purpose or without."""
    with nullcontext() if mutant is None else MUTANTS[mutant].apply():
        return simulate(seed)


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _in_processes(seeds: range, jobs: int) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    some = [seeds[at : at + SEEDS_AT_ONCE] for at in range(0, len(seeds), SEEDS_AT_ONCE)]
    with _pool(jobs) as pool:
        yield from pool.imap_unordered(_play_some, some)


def _pool(jobs: int) -> Pool:
    return multiprocessing.get_context("spawn").Pool(jobs, _prepare)


def _prepare() -> None:
    gc.collect()
    gc.freeze()  # what was imported need not be looked at again
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _give_up)


class Stuck(BaseException):
    """A run that takes too long."""


def _give_up(number: int, frame: object) -> None:
    raise Stuck(f"it has taken {REAL_LIMIT_S} s")


def _play_some(seeds: range) -> tuple[int, list[tuple[int, str]]]:
    broken = []
    for seed in seeds:
        signal.alarm(REAL_LIMIT_S)
        result = simulate(seed)
        signal.alarm(0)
        if result.broken:
            broken.append((seed, result.broken[0]))
    gc.collect()
    return len(seeds), broken


if __name__ == "__main__":
    sys.exit(main())
