"""What a message costs between actors of one process, in four figures.

    python docs/benchmarks/actors.py

hop        from `tell_nowait` to the first line of `receive`, the actor being idle (one task switch)
burst      a message among a thousand told at once, handled without a task switch between them
ask        from `ask` to its answer, one at a time; and how many a second with 32 in flight
PAUSE      from asking it to its answer, behind 900 queued messages of 50 µs each: one such message,
           then one or two turns of the actor, of 200 µs each, before the asker's turn comes
"""

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from callboard.actors.actor import Actor
from callboard.actors.ref import LocalRef
from callboard.actors.system import ActorSystem, open_system
from callboard.messages.base import Call, Message
from callboard.messages.control import Pause

HOPS = 5_000
BURST = 1_000
BURSTS = 50
ASKS = 5_000
IN_FLIGHT = 32
BACKLOG = 900
WORK_S = 50e-6
PAUSES = 20


class Note(Message, frozen=True):
    sent_at: float


class Question(Call[int], frozen=True):
    number: int


class Work(Message, frozen=True):
    """Keeps the actor busy, without a checkpoint, as computing does."""


class Worker(Actor[Note | Question | Work]):
    capacity = BURST

    def __init__(self) -> None:
        self.hops: list[float] = []
        self.handled = 0

    async def receive(self, message: Note | Question | Work) -> object:
        self.handled += 1
        match message:
            case Note():
                self.hops.append(time.perf_counter() - message.sent_at)
                return None
            case Question():
                return message.number
            case Work():
                spin(WORK_S)
                return None


WorkerRef = LocalRef[Note | Question | Work]
Measure = Callable[[WorkerRef, Worker], Awaitable[tuple[str, str]]]


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


async def hop(ref: WorkerRef, worker: Worker) -> tuple[str, str]:
    for sent in range(1, HOPS + 1):
        ref.tell_nowait(Note(time.perf_counter()))
        while len(worker.hops) < sent:
            await trio.lowlevel.checkpoint()
    return "hop, median", microseconds(statistics.median(worker.hops))


async def burst(ref: WorkerRef, worker: Worker) -> tuple[str, str]:
    before, began = worker.handled, time.perf_counter()
    for number in range(1, BURSTS + 1):
        for _ in range(BURST):
            ref.tell_nowait(Note(0.0))
        while worker.handled < before + number * BURST:
            await trio.lowlevel.checkpoint()
    return "burst, a message", microseconds((time.perf_counter() - began) / (BURST * BURSTS))


async def ask(ref: WorkerRef, worker: Worker) -> tuple[str, str]:
    times = [await seconds_of(Question(number), ref) for number in range(ASKS)]
    return "ask, median", microseconds(statistics.median(times))


async def asks_in_flight(ref: WorkerRef, worker: Worker) -> tuple[str, str]:
    async def ask_many() -> None:
        for number in range(ASKS // 4):
            await ref.ask(Question(number))

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(IN_FLIGHT):
            nursery.start_soon(ask_many)
    asks_per_s = IN_FLIGHT * (ASKS // 4) / (time.perf_counter() - began)
    return f"asks, {IN_FLIGHT} in flight", f"{asks_per_s:,.0f} /s"


async def pause(ref: WorkerRef, worker: Worker) -> tuple[str, str]:
    times = []
    for _ in range(PAUSES):
        done = worker.handled + BACKLOG
        for _ in range(BACKLOG):
            ref.tell_nowait(Work())
        times.append(await seconds_of(Pause(), ref))
        while worker.handled < done:
            await trio.lowlevel.checkpoint()
    return f"PAUSE behind {BACKLOG}, median", microseconds(statistics.median(times))


async def seconds_of(call: Call[Any], ref: WorkerRef) -> float:
    began = time.perf_counter()
    await ref.ask(call)
    return time.perf_counter() - began


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"


async def measure(system: ActorSystem, nursery: trio.Nursery) -> None:
    measures: tuple[Measure, ...] = (hop, burst, ask, asks_in_flight, pause)
    for one in measures:
        worker = Worker()
        cell = system.cell(one.__name__)
        await nursery.start(cell.run, lambda worker=worker: worker)
        name, value = await one(LocalRef(cell), worker)
        print(f"{name:<28} {value:>14}")
        await cell.stop()


async def main() -> None:
    async with open_system() as system, trio.open_nursery() as nursery:
        await measure(system, nursery)


if __name__ == "__main__":
    trio.run(main)
