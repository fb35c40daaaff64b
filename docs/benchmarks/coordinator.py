"""What the coordinator does a second, with 64 replicas and 10,000 open requests.

    python docs/benchmarks/coordinator.py

route      a request taken in and given to a replica, by each policy: the pure part alone
submit     a request through the actor: its frame decoded, routed, and a frame for a replica encoded
step       a token of one request through the actor, in frames of all requests of a replica
end        the last token of one request, the same way

The frames come from memory, where they were made beforehand, and nobody decodes what comes out; so
what is measured is the coordinator's process in a server, without its sockets, and in CPU time.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import trio

from callboard.actors.coordinator import Coordinator, FromClient, ToClient
from callboard.actors.link import FromReplica, ToReplica
from callboard.actors.metrics import Metrics
from callboard.actors.placement import LeastLoaded, PeerKey, Placement, PrefixAware, RoundRobin
from callboard.actors.ref import LocalRef
from callboard.actors.routing import Routing
from callboard.actors.session import SESSION
from callboard.actors.system import open_system
from callboard.actors.transport import ClientPort, ServerPort, TrustingServerPort
from callboard.messages.base import Message, pack_ids
from callboard.messages.codec import (
    decode_body,
    decode_frame,
    encode_body,
    encode_frame,
    schema_hash,
)
from callboard.messages.membership import PROTOCOL_VERSION, Credit, Hello, Pong, Role
from callboard.messages.requests import Delta, FinishReason, Submit, TokenPrompt, TokensOut
from callboard.messages.sampling import SamplingParams

REPLICAS = 64
CLIENTS = 16
REQUESTS = 10_000
STEPS = 5
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 2048
FRAMES_PER_CREDIT = 256

TO_REPLICA: Any = SESSION | ToReplica

PORTS: dict[Role, tuple[object, object]] = {
    Role.CLIENT: (FromClient, ToClient),
    Role.REPLICA: (FromReplica, ToReplica),
}


class Wire(TrustingServerPort):
    """Both ends of a network that only the coordinator listens on; peers give credit at once."""

    def __init__(self) -> None:
        self.endpoint = "memory://coordinator"
        self.out: dict[PeerKey, list[bytes]] = {}
        self._sent: Counter[PeerKey] = Counter()
        self._frames: deque[tuple[PeerKey, bytes]] = deque()
        self._news = trio.Event()

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> ServerPort:
        return self

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> ClientPort:
        raise NotImplementedError("everybody is there already")

    async def receive(self) -> list[tuple[PeerKey, bytes]]:
        while not self._frames:
            self._news = trio.Event()
            await self._news.wait()
        await trio.lowlevel.checkpoint()
        return [self._frames.popleft() for _ in range(min(64, len(self._frames)))]

    def send_nowait(self, peer: PeerKey, frame: bytes) -> None:
        self.out.setdefault(peer, []).append(frame)
        self._sent[peer] += 1
        if self._sent[peer] % FRAMES_PER_CREDIT == 0:
            self.say(peer, Credit(taken=self._sent[peer]))

    def close(self) -> None:
        pass

    def say(self, peer: PeerKey, message: Message) -> None:
        self.feed([(peer, frame_of(message))])

    def feed(self, frames: Iterable[tuple[PeerKey, bytes]]) -> None:
        self._frames.extend(frames)
        self._news.set()

    async def stay_alive(self) -> None:
        while True:
            await trio.sleep(5.0)
            for peer in self._sent:
                self.say(peer, Pong())

    def take(self) -> dict[PeerKey, list[bytes]]:
        out, self.out = self.out, {}
        return out


def frame_of(message: Message) -> bytes:
    return encode_frame(encode_body(message), message_id=1)


def hello(role: Role, name: str) -> Hello:
    says, told = PORTS[role]
    return Hello(
        version=PROTOCOL_VERSION,
        role=role,
        name=name,
        incarnation=1,
        schema=schema_hash(says, told),
        instance=name,
    )


def submit(number: int, num_tokens: int = PROMPT_TOKENS) -> Submit:
    ids = [number % 1000, *range(num_tokens - 1)]
    return Submit(
        request_id=f"request-{number}",
        prompt=TokenPrompt(token_ids=pack_ids(ids)),
        params=SamplingParams(max_tokens=64, temperature=0.0),
    )


def policies() -> dict[str, Placement]:
    return {
        "least_loaded": LeastLoaded(),
        "round_robin": RoundRobin(),
        "prefix_aware": PrefixAware(weight=0.2, capacity=64),
    }


def route(placement: Placement, num_tokens: int) -> float:
    """Take requests in and give them away; returns how many a second."""
    routing = Routing(placement)
    for number in range(REPLICAS):
        routing.replica_joined(b"%d" % number, f"replica-{number}")
    submits = [submit(number, num_tokens) for number in range(REQUESTS)]
    began = time.process_time()
    for one in submits:
        routing.assign(routing.submit(b"client", one, 0.0))
    return REQUESTS / (time.process_time() - began)


class Count:
    """Counts calls of a method of an object, and waits until there were so many."""

    def __init__(self, owner: object, method: str) -> None:
        self._call = getattr(owner, method)
        self._left, self._done = 0, trio.Event()
        setattr(owner, method, self._counted)

    async def rate(self, count: int, start: Callable[[], None]) -> float:
        """Start something, and wait until there were so many; returns how many a second."""
        self._left, self._done = count, trio.Event()
        start()
        began = time.process_time()
        await self._done.wait()
        return count / (time.process_time() - began)

    def _counted(self, *args: object, **kwargs: object) -> object:
        result = self._call(*args, **kwargs)
        self._left -= 1
        if self._left == 0:
            self._done.set()
        return result


def given(out: dict[PeerKey, list[bytes]]) -> dict[PeerKey, list[str]]:
    """Return the wire ids of the requests that replicas were given."""
    ids: dict[PeerKey, list[str]] = {}
    for peer, frames in out.items():
        for frame in frames:
            message = decode_body(decode_frame(frame).body, TO_REPLICA)
            if isinstance(message, Submit):
                ids.setdefault(peer, []).append(message.request_id)
    return ids


def step(ids: list[str], start: int, finish: FinishReason | None = None) -> bytes:
    deltas = tuple(
        Delta(request_id=name, start=start, token_ids=pack_ids((7,)), text=" a word", finish=finish)
        for name in ids
    )
    return frame_of(TokensOut(deltas=deltas))


def print_rate(name: str, rate: float) -> None:
    print(f"{name:<32} {rate:>12,.0f} /s")


async def through_the_actor(placement: Placement) -> None:
    wire = Wire()
    async with open_system() as system, trio.open_nursery() as nursery:
        metrics, cell = system.cell("metrics"), system.cell("coordinator")
        coordinator = Coordinator(
            system,
            wire,
            wire.endpoint,
            metrics=LocalRef(metrics),
            placement=placement,
            control_endpoint=lambda: "",
            model="",
            bound=lambda endpoint: None,
        )
        await nursery.start(metrics.run, Metrics)
        await nursery.start(cell.run, lambda: coordinator)
        routing = coordinator._routing
        delivered = Count(routing, "deliver")
        hellos = [(b"replica %d" % n, hello(Role.REPLICA, f"replica-{n}")) for n in range(REPLICAS)]
        hellos += [(b"client %d" % n, hello(Role.CLIENT, f"client-{n}")) for n in range(CLIENTS)]
        frames = [(peer, frame_of(one)) for peer, one in hellos]
        await Count(wire, "send_nowait").rate(len(frames), lambda: wire.feed(frames))
        nursery.start_soon(wire.stay_alive)
        wire.take()

        frames = [(b"client %d" % (n % CLIENTS), frame_of(submit(n))) for n in range(REQUESTS)]
        assigned = Count(routing, "assign")
        print_rate("submit", await assigned.rate(REQUESTS, lambda: wire.feed(frames)))
        await trio.sleep(0.1)
        ids = given(wire.take())
        assert sum(map(len, ids.values())) == REQUESTS

        frames = [(peer, step(mine, n)) for n in range(STEPS) for peer, mine in ids.items()]
        print_rate(
            "step, tokens", await delivered.rate(STEPS * REQUESTS, lambda: wire.feed(frames))
        )

        frames = [(peer, step(mine, STEPS, FinishReason.STOP)) for peer, mine in ids.items()]
        print_rate("end", await delivered.rate(REQUESTS, lambda: wire.feed(frames)))
        nursery.cancel_scope.cancel()


def main() -> None:
    for num_tokens in (PROMPT_TOKENS, LONG_PROMPT_TOKENS):
        for name, placement in policies().items():
            print_rate(f"route {num_tokens:>5} tokens, {name}", route(placement, num_tokens))
    trio.run(through_the_actor, policies()["prefix_aware"])


if __name__ == "__main__":
    main()
