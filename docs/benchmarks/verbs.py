"""How long every verb takes in every state of an idle server, and PAUSE under load.

    python docs/benchmarks/verbs.py --rounds 100 --streams 16

runs real servers, with replicas in processes of their own, and prints two tables in Markdown.

Idle, a server for each state, with two replicas: each verb is sent in that state, and once more
when it has been answered; then the server is led back. STOP comes last. A row has both answers, the
state after each, and how long each took, as the caller sees it. Each must come within a second, but
where a row says that it reads weights: that takes as long as the model is large. Answers and states
must be those of docs/how-to/operate.md.

Under load, a server with one replica and one torch thread has so many streams under way all the
time. In each round it is unpaused, runs on to a random moment, is paused, and must make no step for
50 ms. A PAUSE is timed from its sending to its acknowledgement. Steps are timed in the same rounds,
by the gaps between the tokens of a stream, for a stream that runs gets one in each step; gaps in
which the server was unpaused are left out, since they hold a pause. The longest step that a PAUSE
is likely to meet is taken to be the 99th percentile of the gaps. Beside it stands the mean step, by
the steps that `status` counts. The median PAUSE may take a median step and 20 ms, the worst two of
the longest steps.

The exit code is 1 when a limit was missed. `make verbs` runs it with the default model.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import trio

from callboard.messages.base import unpack_ids
from callboard.messages.control import (
    AbortRequests,
    ControlReply,
    GetStatus,
    Pause,
    ReplicaStatus,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdateWeights,
    Verb,
    WeightsLevel,
)
from callboard.supervision.default_model import default_model
from callboard.supervision.engine import Engine, connect

LIMIT_S = 1.0
TIMEOUT_S = 60.0
STEP_MARGIN_S = 0.020
STILL_S = 0.050
RUN_S = (0.05, 0.5)
PROMPT_TOKENS = (16, 64)
NEW_TOKENS = (64, 192)
TOKEN_IDS = (100, 250)  # of prompts; there are these in every model
WARM_UP_STEPS = 10

SETTINGS = """
model = "{model}"
listen = "tcp://127.0.0.1:0"
replicas = {replicas}
threads = 1
log_level = "error"
"""


class Server(NamedTuple):
    """A server that runs."""

    endpoint: str
    process: "subprocess.Popen[str]"
    model: str


@contextmanager
def server(model: str, *, replicas: int) -> Iterator[Server]:
    """Run a server."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "verbs.toml"
        config.write_text(SETTINGS.format(model=model, replicas=replicas))
        command = [sys.executable, "-m", "callboard", "serve", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert "ready at" in ready, "the server did not start"
            try:
                yield Server(ready.split()[-1], process, model)
            finally:
                process.terminate()


def ms(seconds: float) -> str:
    """Return a time in milliseconds, as people read it."""
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:,.0f}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


# Every verb in every state, idle.

Order = Verb | GetStatus | AbortRequests

DROP = Suspend()
DISCARD = Suspend(weights=WeightsLevel.DISCARD)


class Scene(NamedTuple):
    """A state, and the verbs that lead there from running."""

    name: str
    state: State
    way: tuple[Verb, ...]


SCENES = (
    Scene("running", State.RUNNING, ()),
    Scene("paused", State.PAUSED, (Pause(),)),
    Scene("suspended, kv=drop", State.SUSPENDED, (DROP,)),
    Scene("suspended, kv=drop, weights=discard", State.SUSPENDED, (DISCARD,)),
)

REFUSED = "refused"
DONE = "done"

AFTER: dict[str, dict[State, State | None]] = {
    "PAUSE": {State.RUNNING: State.PAUSED},
    "UNPAUSE": {State.PAUSED: State.RUNNING, State.SUSPENDED: None},
    "SUSPEND": {State.RUNNING: State.SUSPENDED, State.PAUSED: State.SUSPENDED},
    "RESUME": {State.SUSPENDED: State.RUNNING},
    "STEP": {State.RUNNING: None, State.SUSPENDED: None},
    "UPDATE_WEIGHTS": {State.RUNNING: None},
}
"""The state a verb leads to where that is another one; None where it is refused."""


class Answer(NamedTuple):
    """What was answered to a verb, the state after it, and how long the answer took."""

    said: str
    state: str
    seconds: float


class Row(NamedTuple):
    """A verb in a state, and its repetition there."""

    scene: str
    verb: str
    first: Answer
    again: Answer
    reads_weights: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        note = "reads weights" if self.reads_weights else ""
        answers = [(said, state, ms(seconds)) for said, state, seconds in (self.first, self.again)]
        return self.scene, self.verb, *answers[0], *answers[1], note

    def missed(self, wanted: tuple[str, str]) -> list[str]:
        """Say what is not as it should be."""
        wrong = []
        for which, answer in (("", self.first), (" again", self.again)):
            name = f"{self.verb}{which} when {self.scene}"
            kind = answer.said.partition(":")[0]
            if (kind, answer.state) != wanted:
                wrong.append(f"{name}: {answer.said}, now {answer.state}, not {' '.join(wanted)}")
            if answer.seconds > LIMIT_S and not (self.reads_weights and answer is self.first):
                wrong.append(f"{name}: {ms(answer.seconds)} ms")
        return wrong


def orders(model: str) -> list[tuple[str, Order]]:
    """Everything an operator can say."""
    return [
        ("STATUS", GetStatus()),
        ("ABORT", AbortRequests(all=True)),
        ("PAUSE", Pause()),
        ("UNPAUSE", Unpause()),
        ("STEP", Step()),
        ("SUSPEND kv=drop", DROP),
        ("SUSPEND kv=drop, weights=discard", DISCARD),
        ("RESUME", Resume()),
        ("UPDATE_WEIGHTS", UpdateWeights(source=model, version=1)),
        ("STOP", Stop()),
    ]


async def say(engine: Engine, order: Order) -> str:
    """Send an order and return the answer in words."""
    match order:
        case GetStatus():
            await engine.status()
            return DONE
        case AbortRequests():
            await engine.abort(all=True)
            return DONE
        case verb:
            return in_words(await engine.ask_tree(verb, TIMEOUT_S))


def in_words(reply: ControlReply) -> str:
    """Return what was answered to a verb."""
    if reply.late:
        return f"late: {', '.join(reply.late)}"
    return f"{REFUSED}: {reply.refused}" if reply.refused else DONE


async def timed(engine: Engine, order: Order) -> Answer:
    """Send an order, and ask for the state when it has been answered."""
    began = time.perf_counter()
    said = await say(engine, order)
    seconds = time.perf_counter() - began
    return Answer(said, (await engine.status()).state, seconds)


async def lead_to(engine: Engine, scene: Scene) -> None:
    """Bring an idle server from any state into that of a scene."""
    for verb in (Resume(), Unpause(), *scene.way):
        await engine.control(verb, TIMEOUT_S)


async def play(running: Server, scene: Scene) -> list[Row]:
    """Send every verb twice in one state, STOP at the end."""
    rows = []
    async with connect(running.endpoint) as engine:
        for name, order in orders(running.model):
            await lead_to(engine, scene)
            reads = reads_weights(order, scene)
            first, again = await timed(engine, order), await timed(engine, order)
            rows.append(Row(scene.name, name, first, again, reads))
    return rows


def reads_weights(order: Order, scene: Scene) -> bool:
    """Whether all weights are read, which takes as long as the model is large."""
    match order:
        case UpdateWeights():
            return scene.state is not State.RUNNING and DISCARD not in scene.way
        case Resume():
            return DISCARD in scene.way
        case _:
            return False


def wanted(row: Row, scene: Scene) -> tuple[str, str]:
    """Return what is to be answered, and the state after it, by docs/how-to/operate.md."""
    if row.verb == "STOP":
        return DONE, State.STOPPED
    if row.verb.startswith("SUSPEND") and scene.state is State.SUSPENDED:
        same = row.verb.endswith(scene.name.removeprefix("suspended, "))
        return DONE if same else REFUSED, State.SUSPENDED
    after = AFTER.get(row.verb.partition(" ")[0], {}).get(scene.state, scene.state)
    return (REFUSED, scene.state) if after is None else (DONE, after)


def idle(model: str) -> list[str]:
    """Print the row of every verb in every state, and return what was missed."""
    rows, missed = [], []
    for scene in SCENES:
        with server(model, replicas=2) as running:
            played = trio.run(play, running, scene)
        rows += [row.cells for row in played]
        missed += [miss for row in played for miss in row.missed(wanted(row, scene))]
    print_table(
        ("state", "verb", "answer", "then", "ms", "answer again", "then", "ms", ""),
        rows,
    )
    return missed


# PAUSE under load.


class Load:
    """Streams that are begun anew as they end, and the gaps between their tokens."""

    def __init__(self, engine: Engine, dice: random.Random) -> None:
        self.gaps: list[float] = []
        self.unpaused_at = 0.0
        self._engine = engine
        self._dice = dice

    async def stream(self) -> None:
        """Read one stream after the other."""
        while True:
            num_tokens = self._dice.randint(*PROMPT_TOKENS)
            prompt = [self._dice.randint(*TOKEN_IDS) for _ in range(num_tokens)]
            await self._read(prompt, self._dice.randint(*NEW_TOKENS))

    async def _read(self, prompt: list[int], max_tokens: int) -> None:
        before = None
        async with self._engine.submit(
            prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True
        ) as stream:
            async for delta in stream:
                now = time.perf_counter()
                one_token = len(unpack_ids(delta.token_ids)) == 1  # the end may come without any
                if one_token and before is not None and before > self.unpaused_at:
                    self.gaps.append(now - before)
                before = now


class Pauses:
    """What the rounds have measured."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.unpaused_s = 0.0  # for so long together it ran, and made so many steps:
        self.steps = 0
        self.moved = 0  # pauses in which a step was made
        self.fewest = sys.maxsize  # streams that were under way in a pause

    def report(self, gaps: Sequence[float]) -> list[str]:
        """Print the table, with steps timed by gaps, and return what was missed."""
        step, longest = statistics.median(gaps), statistics.quantiles(gaps, n=100)[-1]
        times: list[tuple[str, float, float | None]] = [
            (
                f"PAUSE, median of {len(self.seconds)}",
                statistics.median(self.seconds),
                step + STEP_MARGIN_S,
            ),
            ("PAUSE, worst", max(self.seconds), 2 * longest),
            (f"step, median of {len(gaps):,} gaps", step, None),
            ("step, 99th percentile", longest, None),
            ("step, longest", max(gaps), None),
            (f"step, mean of {self.steps} by `status`", self.unpaused_s / self.steps, None),
        ]
        print_table(
            ("under load", "ms", "limit"),
            [(name, ms(value), "" if limit is None else ms(limit)) for name, value, limit in times],
        )
        still = f"{1e3 * STILL_S:.0f} ms after its acknowledgement"
        print(f"pauses with a step within {still}: {self.moved}")
        print(f"fewest streams under way in a pause: {self.fewest}\n", flush=True)
        missed = [
            f"{name}: {ms(value)} ms, above {ms(limit)}"
            for name, value, limit in times
            if limit is not None and value > limit
        ]
        return [*missed, *["a step was made while paused"] * bool(self.moved)]


async def look(engine: Engine) -> ReplicaStatus:
    """Return what the only replica is doing."""
    return (await engine.status()).replicas[0]


async def all_under_way(engine: Engine, streams: int) -> None:
    """Wait until all streams decode, and the first steps, which take longer, have been made."""
    while (now := await look(engine)).running < streams or now.steps < WARM_UP_STEPS:
        await trio.sleep(STILL_S)


async def play_round(engine: Engine, load: Load, pauses: Pauses, run_s: float) -> None:
    """Let a paused server run for a while, pause it, and look whether it stands still."""
    steps = (await look(engine)).steps
    load.unpaused_at = time.perf_counter()
    await engine.unpause()
    await trio.sleep(run_s)
    sent_at = time.perf_counter()
    await engine.pause()
    paused_at = time.perf_counter()
    before = await look(engine)
    await trio.sleep(STILL_S)
    after = await look(engine)
    pauses.seconds.append(paused_at - sent_at)
    pauses.unpaused_s += paused_at - load.unpaused_at
    pauses.steps += before.steps - steps
    pauses.moved += after.steps != before.steps
    pauses.fewest = min(pauses.fewest, before.running + before.waiting)


async def pause_often(endpoint: str, *, rounds: int, streams: int, seed: int) -> list[str]:
    """Pause a server while streams run, print what that took, and return what was missed."""
    dice, pauses = random.Random(seed), Pauses()
    async with connect(endpoint) as engine, trio.open_nursery() as nursery:
        load = Load(engine, random.Random(seed + 1))
        for _ in range(streams):
            nursery.start_soon(load.stream)
        await all_under_way(engine, streams)
        await engine.pause()
        load.gaps.clear()
        for _ in range(rounds):
            await play_round(engine, load, pauses, dice.uniform(*RUN_S))
        nursery.cancel_scope.cancel("all rounds are over")
    return pauses.report(load.gaps)


def under_load(model: str, *, rounds: int, streams: int, seed: int) -> list[str]:
    """Run the rounds, and return what was missed."""
    with server(model, replicas=1) as running:
        return trio.run(
            lambda: pause_often(running.endpoint, rounds=rounds, streams=streams, seed=seed)
        )


def main() -> int:
    """Run both; the exit code is 1 when a limit was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="pauses under load")
    parser.add_argument("--streams", type=int, default=16, help="that run all the time")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments")
    parser.add_argument("--model", default="", help="without it, the default model")
    given = parser.parse_args()
    model = given.model or str(default_model())
    missed = idle(model)
    missed += under_load(model, rounds=given.rounds, streams=given.streams, seed=given.seed)
    for miss in missed:
        print(f"MISSED {miss}")
    print("a limit was missed" if missed else "every limit was kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
