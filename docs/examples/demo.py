"""A tour of Callboard on one machine: `make demo`.

Starts a real server with a small real model, asks it things, then pauses, suspends, resumes and
stops it while requests are under way, and checks that nothing was lost.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

import callboard
from callboard import ChatMessage, Completion, Engine, SamplingParams
from callboard.messages.control import StatusReply

REFERENCE = Path(__file__).parents[2] / "tests" / "reference" / "smollm2-135m-greedy.jsonl"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
MIB = 2**20

QUESTIONS = [
    "The three primary colours are",
    "Water boils at",
    "Once upon a time there was a",
    "The opposite of hot is",
    "def add(a, b):",
    "In 1969 the first man",
    "A haiku about rain:\n",
    "The sum of 2 and 3 is",
    "My favourite season is",
    "The largest planet is",
    "To make tea, first",
]


def main() -> None:
    """Run the tour; any surprise is an exception and a non-zero exit code."""
    with server() as endpoint:
        trio.run(tour, endpoint)
    say("The server has exited by itself with code 0. That is all: nothing was lost.")


async def tour(endpoint: str) -> None:
    """Everything a client and an operator can do, in order."""
    async with callboard.connect(endpoint) as engine:
        await complete(engine)
        await chat(engine)
        await batch(engine)
        await stream(engine)
        await pause(engine)
        await suspend(engine)
        await stop(engine)


async def complete(engine: Engine) -> None:
    """One prompt."""
    head("A completion: the model goes on from a text")
    [answer] = await engine.generate(["The capital of France is"], GREEDY)
    show("The capital of France is", answer)


async def chat(engine: Engine) -> None:
    """One conversation."""
    head("A chat: the model answers a question")
    question = ChatMessage(role="user", content="What is the capital of France?")
    [answer] = await engine.generate([[question]], GREEDY)
    show(question.content, answer)


async def batch(engine: Engine) -> None:
    """Sixteen prompts of all kinds at once, five of which have known right answers."""
    head("Sixteen different prompts at once, in one batch")
    known = [json.loads(line) for line in REFERENCE.read_text().splitlines()]
    answers: dict[str, Completion] = {}

    async def ask(name: str, prompt: str, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_special_tokens=False)
        [answers[name]] = await engine.generate([prompt], params)

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for entry in known:
            nursery.start_soon(ask, entry["name"], entry["prompt"], len(entry["output_ids"]))
        for question in QUESTIONS:
            nursery.start_soon(ask, question, question, 24)
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for answer in answers.values())
    for entry in known:
        right = answers[entry["name"]].token_ids == entry["output_ids"]
        say(f"{entry['name']:>12}: {len(entry['output_ids'])} tokens, the " + same(right))
    for question in QUESTIONS[:3]:
        show(question, answers[question])
    say(f"{len(answers)} answers, {tokens} new tokens in {seconds:.1f} s.")


async def stream(engine: Engine) -> None:
    """Text as it comes."""
    head("A stream: every token is shown when it is made")
    prompt = "Once upon a time, in a small theatre,"
    print(f"    {prompt}", end="", flush=True)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=60)
    async with engine.submit(prompt, params) as deltas:
        async for delta in deltas:
            print(delta.text.replace("\n", "\n    "), end="", flush=True)
    print()


async def pause(engine: Engine) -> None:
    """PAUSE, submit while paused, UNPAUSE."""
    head("PAUSE: the device stops, requests stay")
    undisturbed = await engine.generate(QUESTIONS[:4], GREEDY)
    answers: list[list[Completion]] = []

    async def ask() -> None:
        answers.append(await engine.generate(QUESTIONS[:4], GREEDY))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until_running(engine)
        reply = await engine.pause()
        say(f"Paused {reply.seconds * 1000:.0f} ms after the order, in the middle of 4 requests.")
        before = steps(await engine.status())
        nursery.start_soon(ask)
        await trio.sleep(0.5)
        status = await engine.status()
        held = status.replicas[0]
        say(
            f"Half a second later {steps(status) - before} steps were made. 4 more requests came "
            f"in and wait: {held.running} halted in mid-sentence, {held.waiting} queued."
        )
        await engine.unpause()
        say("Unpaused.")
    equal = all(
        [a.token_ids for a in some] == [a.token_ids for a in undisturbed] for some in answers
    )
    say("All 8 have finished with the " + same(equal, "tokens of an undisturbed run"))


async def suspend(engine: Engine) -> None:
    """SUSPEND frees memory, RESUME takes it back; the requests survive."""
    head("SUSPEND: the memory is given back, requests stay")
    undisturbed = await engine.generate(QUESTIONS[:4], GREEDY)
    answers: list[Completion] = []

    async def ask() -> None:
        answers.extend(await engine.generate(QUESTIONS[:4], GREEDY))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until_running(engine)
        pid = (await engine.status()).replicas[0].pid
        before = resident_mib(pid)
        reply = await engine.suspend(kv="drop", weights="discard")
        after = resident_mib(pid)
        say(
            f"Suspended: KV cache and weights are gone, {reply.bytes_freed / MIB:.0f} MiB freed in "
            f"{reply.seconds:.1f} s."
        )
        say(f"The operating system saw process {pid} shrink from {before} to {after} MiB.")
        reply = await engine.resume()
        say(f"Resumed in {reply.seconds:.1f} s; now {resident_mib(pid)} MiB.")
    equal = [a.token_ids for a in answers] == [a.token_ids for a in undisturbed]
    say("The 4 requests have finished with the " + same(equal, "tokens of an undisturbed run"))


async def stop(engine: Engine) -> None:
    """STOP."""
    head("STOP: every request gets its last message, then the server ends")
    reply = await engine.stop()
    say(f"Stopped in {reply.seconds * 1000:.0f} ms.")


async def until_running(engine: Engine) -> None:
    """Wait until the requests are being worked on."""
    begun = steps(await engine.status())
    while steps(status := await engine.status()) < begun + 3 or not status.replicas[0].running:
        await trio.sleep(0.01)


@contextmanager
def server() -> Iterator[str]:
    """Run `callboard serve` at a free port; yields its endpoint and checks how it ends."""
    head("Starting a server with SmolLM2-135M-Instruct on this machine's CPU")
    command = [sys.executable, "-m", "callboard", "serve", "--listen", "tcp://127.0.0.1:0"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.startswith("callboard: ready at "):
            raise SystemExit(f"the server did not start: {line}")
        endpoint = line.split()[-1]
        say(f"Ready at {endpoint} after {time.perf_counter() - start:.1f} s.")
        yield endpoint
        if process.wait(timeout=60) != 0:
            raise SystemExit(f"the server exited with code {process.returncode}")
    finally:
        process.kill()
        process.wait()


def steps(status: StatusReply) -> int:
    """Return how many forward passes there have been."""
    return status.replicas[0].steps


def resident_mib(pid: int) -> int:
    """Return the memory a process really has, in MiB, as the operating system counts it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // MIB


def same(equal: bool, what: str = "tokens of the reference") -> str:
    """Say that two results are equal, or end the demo."""
    if not equal:
        raise SystemExit(f"not the {what}: this is a bug")
    return f"{what}."


def show(prompt: str, answer: Completion) -> None:
    """Print a prompt and its answer on one line."""
    print(f"    {prompt!r} → {answer.text!r}", flush=True)


def head(text: str) -> None:
    """Print a headline."""
    print(f"\n{text}", flush=True)


def say(text: str) -> None:
    """Print a sentence."""
    print(f"    {text}", flush=True)


if __name__ == "__main__":
    main()
