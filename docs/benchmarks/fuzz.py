"""Throws nonsense at a server's port while it serves, and looks whether anybody notices.

    python docs/benchmarks/fuzz.py --frames 1000000

Eight streams run all the time. Beside them four connections send random bytes, and frames that were
good before something was done to them: bytes changed, cut off, put in or swapped with those of
another, a field made another type, a length made huge. Some also speak no ZMQ at all. The model is
a script, so that every stream's tokens are known beforehand.

Half of the frames go to a server that reads and answers every one of them, for there its decoder
meets them all; the other half to one that ends connections as servers do. A line for each says how
many frames were sent and refused, how long it took, how many streams ended, and by how much the
server's memory grew from when it had read half of its frames to when it had read all. The exit
code is 1 when a stream had another token, a part of the server was restarted, or it grew by more
than `--max-growth` MiB.
"""

import argparse
import ctypes
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
import zmq

from callboard.actors import session
from callboard.actors.coordinator import FromClient, ToClient
from callboard.actors.patience import Patience
from callboard.actors.system import open_system
from callboard.actors.testing import ScriptedRunner
from callboard.actors.transport import open_zmq_network
from callboard.messages.base import Message, pack_ids
from callboard.messages.codec import encode_body, encode_frame, schema_hash
from callboard.messages.control import NodeStatus, Pause, Stop, Suspend
from callboard.messages.events import RequestStats
from callboard.messages.membership import (
    PROTOCOL_VERSION,
    Bye,
    Credit,
    Hello,
    Ping,
    Pong,
    ReplicaUp,
    Role,
    Welcome,
)
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    FinishReason,
    Submit,
    TextPrompt,
    TokenPrompt,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams
from callboard.supervision.app import ReplicaParts, replica, root
from callboard.supervision.engine import Engine, connect
from callboard.supervision.root import Address
from callboard.supervision.settings import Settings

NUM_STREAMS = 8
STREAM_TOKENS = 100
NUM_PEERS = 4
STRANGER_EVERY = 2000  # frames; whoever speaks no ZMQ
HELLO_EVERY = 20
SETTLE_S = 0.5
TIMEOUT_S = 1800.0

# Frames to begin with.


def good_frames() -> list[bytes]:
    """One of each message that a client may say, and of some that it may not."""
    submit = Submit(
        request_id="fuzz",
        prompt=TokenPrompt(token_ids=pack_ids([1, 2, 3])),
        params=SamplingParams(max_tokens=4, stop=("\n",), logit_bias={5: 1.0}),
        timeout_s=5.0,
    )
    delta = Delta(request_id="fuzz", start=0, token_ids=pack_ids([1]), finish=FinishReason.STOP)
    stats = RequestStats(
        finish=FinishReason.STOP,
        prompt_tokens=1,
        output_tokens=1,
        first_token_s=None,
        total_s=1.0,
    )
    messages: list[Message] = [
        hello(1),
        submit,
        msgspec.structs.replace(submit, prompt=TextPrompt(text="Once upon a time")),
        Abort(request_id="fuzz"),
        Ping(),
        Pong(),
        Credit(taken=7),
        Bye(),
        Accepted(request_id="fuzz", prompt_token_ids=pack_ids([1]), seed=1),
        TokensOut(deltas=(delta, delta)),
        stats,
        Welcome(name="me", session="abc", max_frame_bytes=1),
        ReplicaUp(pid=1),
        Pause(),
        Suspend(),
        Stop(),
    ]
    return [framed(message) for message in messages]


def hello(incarnation: int) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        role=Role.CLIENT,
        name="fuzz",
        incarnation=incarnation,
        schema=schema_hash(FromClient, ToClient),
    )


def framed(message: Message) -> bytes:
    return encode_frame(encode_body(message), message_id=1, sender="fuzz")


# What is done to them.

WRONG: list[Any] = [
    None,
    True,
    -1,
    2**63,
    -(2**63),
    1e308,
    "",
    "x" * 300,
    b"\xff\xfe",
    [],
    {},
    [[[]]],
    {"type": "Submit"},
]
HUGE = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 2000,
    b"\x81\xa1a" * 500,
]


def nonsense(dice: random.Random, good: list[bytes]) -> bytes:
    """Return one frame that is most probably no good."""
    frame = dice.choice(good)
    match dice.randrange(7):
        case 0:
            return dice.randbytes(dice.randrange(300))
        case 1:
            return changed(dice, frame)
        case 2:
            return frame[: dice.randrange(len(frame))]
        case 3:
            place = dice.randrange(len(frame))
            return frame[:place] + dice.randbytes(dice.randrange(1, 9)) + frame[place:]
        case 4:
            other = dice.choice(good)
            return frame[: dice.randrange(len(frame))] + other[dice.randrange(len(other)) :]
        case 5:
            place = dice.randrange(len(frame))
            return frame[:place] + dice.choice(HUGE) + frame[place:]
        case _:
            return retyped(dice, frame)


def changed(dice: random.Random, frame: bytes) -> bytes:
    tampered = bytearray(frame)
    for _ in range(dice.randrange(1, 4)):
        tampered[dice.randrange(len(tampered))] = dice.randrange(256)
    return bytes(tampered)


def retyped(dice: random.Random, frame: bytes) -> bytes:
    """Put a value of some other type anywhere into a frame."""
    tree = msgspec.msgpack.decode(frame)
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = dice.choice(keys)
        if not (isinstance(place[key], (list, dict)) and place[key] and dice.random() < 0.8):
            break
        place = place[key]
    place[key] = dice.choice(WRONG)
    return msgspec.msgpack.encode(tree)


def send_nonsense(endpoint: str, num_frames: int, seed: int) -> None:
    """Send from several connections, of which every other one never reads what it is told."""
    dice, good = random.Random(seed), good_frames()
    with zmq.Context() as context:
        peers = [open_peer(context, endpoint) for _ in range(NUM_PEERS)]
        for number in range(num_frames):
            peer = peers[number % NUM_PEERS]
            if dice.randrange(HELLO_EVERY) == 0:
                peer.send(framed(hello(number)))
            else:
                peer.send(nonsense(dice, good))
            if number % NUM_PEERS % 2 == 0:
                read(peer)
            if number % STRANGER_EVERY == 0:
                speak_no_zmq(endpoint, dice)
        for peer in peers:
            peer.close(linger=5000)


def open_peer(context: "zmq.Context[Any]", endpoint: str) -> "zmq.Socket[bytes]":
    peer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    peer.immediate = True
    peer.sndtimeo = 20_000
    peer.connect(endpoint)
    return peer


def read(peer: "zmq.Socket[bytes]") -> None:
    try:
        while True:
            peer.recv(zmq.DONTWAIT)
    except zmq.Again:
        return


def speak_no_zmq(endpoint: str, dice: random.Random) -> None:
    with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as stranger:
        stranger.sendall(dice.randbytes(dice.randrange(1, 200)))


# The server.


class Endless(Patience):
    """Answers everything."""

    def spend(self, peer: bytes, now: float) -> bool:
        return True


async def serve() -> None:
    """Run a whole server in this process, and end with the standard input."""
    parts = ReplicaParts(
        make_runner=lambda: ScriptedRunner(num_blocks=1024, max_rows=64, max_step_tokens=256),
        codec=None,
        text_for=None,
        vocab_size=1000,
        eos_token_ids=(),
    )
    settings = Settings()
    async with open_zmq_network() as network, open_system() as system, trio.open_nursery() as all_:
        address = Address("tcp://127.0.0.1:0")
        top = root(
            system,
            network,
            settings,
            lambda name: replica(
                system, network, name, parts, settings, coordinator=address.endpoint
            ),
            address=address,
            control_endpoint="tcp://127.0.0.1:0",
        )
        cell = system.cell("root")
        all_.start_soon(cell.run, lambda: top)
        all_.start_soon(trim)
        await top.started.wait()
        print(address.endpoint, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        await cell.stop()
        all_.cancel_scope.cancel("the comparison is over")


async def trim() -> None:
    """Keep giving back what was freed: after a queue was long once, malloc would keep it."""
    malloc_trim = ctypes.CDLL(None).malloc_trim
    while True:
        malloc_trim(0)
        await trio.sleep(SETTLE_S / 2)


@contextmanager
def other_process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# The comparison.


class Watch:
    """What the clients of a server saw meanwhile."""

    def __init__(self) -> None:
        self.ended = 0
        self.wrong: list[str] = []

    async def stream(self, engine: Engine, number: int) -> None:
        """Generate again and again, and compare."""
        expected = [(number + 1 + place) % 1000 for place in range(STREAM_TOKENS)]
        while True:
            [answer] = await engine.generate([[number]], max_tokens=STREAM_TOKENS)
            if answer.token_ids != expected:
                self.wrong.append(f"stream {number}: {answer.token_ids}")
            self.ended += 1


def private_mib(pid: int) -> float:
    """Return what a process has made for itself, in memory and swapped out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(int(sizes[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024


def restarts_in(node: NodeStatus) -> int:
    return node.restarts + sum(restarts_in(child) for child in node.children)


async def counters(engine: Engine) -> dict[str, Any]:
    """Return what the coordinator has counted."""
    tree = (await engine.status()).tree
    return next(node for node in tree.children if node.name == "coordinator").details


async def settled(engine: Engine) -> dict[str, Any]:
    """Wait until the server has read all that was sent; returns what it has counted."""
    before: dict[str, Any] = {}
    while (now := await counters(engine))["frames_refused"] != before.get("frames_refused"):
        before = now
        await trio.sleep(SETTLE_S)
    return now


async def compare(how: str, num_frames: int, seed: int, max_growth_mib: float) -> bool:
    """Run one server under fire twice over, and say how it went."""
    watch, began, sizes = Watch(), time.monotonic(), list[float]()
    with trio.fail_after(TIMEOUT_S), other_process(how) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        async with connect(endpoint) as engine, trio.open_nursery() as nursery:
            for number in range(NUM_STREAMS):
                nursery.start_soon(watch.stream, engine, number)
            for half in range(2):
                fuzz = [endpoint, str(num_frames // 2), str(2 * seed + half)]
                await trio.run_process([sys.executable, __file__, "peers", *fuzz])
                counted = await settled(engine)
                sizes.append(private_mib(server.pid))
            restarts = restarts_in((await engine.status()).tree)
            nursery.cancel_scope.cancel("all was sent and read")
    growth = sizes[1] - sizes[0]
    print(
        f"{how}: {num_frames} frames in {time.monotonic() - began:.1f} s, "
        f"{counted['frames_refused']} refused, {counted['peers_cut_off']} connections ended, "
        f"{watch.ended} streams of {STREAM_TOKENS} tokens, {len(watch.wrong)} wrong, "
        f"{restarts} restarts, {growth:.1f} MiB grown to {sizes[1]:.0f}",
        flush=True,
    )
    for line in watch.wrong[:5]:
        print(line)
    return watch.ended > 0 and not watch.wrong and restarts == 0 and growth <= max_growth_mib


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-growth", type=float, default=16.0, metavar="MiB")
    options = parser.parse_args()
    went_well = [
        trio.run(compare, how, options.frames // 2, options.seed, options.max_growth)
        for how in ("patient", "strict")
    ]
    return 0 if all(went_well) else 1


RAW = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    match sys.argv[1:]:
        case ["peers", endpoint, num_frames, seed]:
            send_nonsense(endpoint, int(num_frames), int(seed))
        case ["patient"]:
            setattr(session, "Patience", Endless)  # noqa: B010
            trio.run(serve)
        case ["strict"]:
            trio.run(serve)
        case _:
            sys.exit(main())
