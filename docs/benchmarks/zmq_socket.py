"""Speed of `callboard.actors.zmq_socket` between two processes, beside raw blocking pyzmq.

    python docs/benchmarks/zmq_socket.py

prints, over ipc and over tcp, how many messages of 200 bytes a second go one way (`send_nowait` to
`receive_batch(64)`), and the median round trip of our socket and of blocking pyzmq, measured in
turns so that both meet the same machine.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio
import zmq

from callboard.actors.zmq_socket import ZmqSocket, open_zmq_context

BODY = bytes(200)
NUM_ONE_WAY = 200_000
NUM_ROUND_TRIPS = 3_000
NUM_PASSES = 5
BATCH_SIZE = 64
HWM = 1000
MAX_MESSAGE_BYTES = 1 << 20
TIMEOUT_S = 60


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="callboard-") as folder:
        for transport, endpoint in (("ipc", f"ipc://{folder}/s"), ("tcp", "tcp://127.0.0.1:0")):
            rates, ours_s, raw_s = [], [], []
            for _ in range(NUM_PASSES):
                rates.append(measure("sink", endpoint, one_way_rate))
                ours_s.append(measure("echo", endpoint, round_trip_p50_s))
                raw_s.append(measure_raw(endpoint))
            print(
                f"{transport} one way: {statistics.median(rates):,.0f}/s, best {max(rates):,.0f}/s"
            )
            for name, times_s in (("ours", ours_s), ("raw pyzmq", raw_s)):
                median_us, best_us = 1e6 * statistics.median(times_s), 1e6 * min(times_s)
                print(f"{transport} round trip, {name}: {median_us:.0f} us, best {best_us:.0f} us")


@contextmanager
def peer_process(role: str, endpoint: str) -> Iterator[str]:
    """Run this file as the other side and yield the endpoint it is bound to.

    It is killed in the end, because it cannot know when its last message has left.
    """
    command = [sys.executable, __file__, role, endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def measure(
    role: str, endpoint: str, measurement: Callable[[ZmqSocket], Awaitable[float]]
) -> float:
    async def connect_and_measure(endpoint: str) -> float:
        with trio.fail_after(TIMEOUT_S):
            async with open_zmq_context() as context:
                dealer = context.dealer(
                    max_message_bytes=MAX_MESSAGE_BYTES, send_hwm=HWM, receive_hwm=HWM
                )
                dealer.connect(endpoint)
                await dealer.send([b"hello"])
                await dealer.receive()
                return await measurement(dealer)

    with peer_process(role, endpoint) as bound_endpoint:
        return trio.run(connect_and_measure, bound_endpoint)


async def one_way_rate(dealer: ZmqSocket) -> float:
    started_s = time.perf_counter()
    for _ in range(NUM_ONE_WAY):
        try:
            dealer.send_nowait([BODY])
        except trio.WouldBlock:
            await dealer.send([BODY])
    await dealer.receive()
    return NUM_ONE_WAY / (time.perf_counter() - started_s)


async def round_trip_p50_s(dealer: ZmqSocket) -> float:
    times_s = []
    for _ in range(NUM_ROUND_TRIPS):
        started_s = time.perf_counter()
        await dealer.send([BODY])
        await dealer.receive()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


def measure_raw(endpoint: str) -> float:
    times_s = []
    with (
        peer_process("raw-echo", endpoint) as bound_endpoint,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.connect(bound_endpoint)
        dealer.send(b"hello")
        dealer.recv()
        for _ in range(NUM_ROUND_TRIPS):
            started_s = time.perf_counter()
            dealer.send(BODY)
            dealer.recv()
            times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


async def serve(role: str, endpoint: str) -> None:
    with trio.move_on_after(TIMEOUT_S):
        async with open_zmq_context() as context:
            router = context.router(
                max_message_bytes=MAX_MESSAGE_BYTES, send_hwm=HWM, receive_hwm=HWM
            )
            print(router.bind(endpoint), flush=True)
            await router.send(await router.receive())
            await {"sink": receive_all, "echo": echo_all}[role](router)


async def receive_all(router: ZmqSocket) -> None:
    num_received = 0
    while num_received < NUM_ONE_WAY:
        messages = await router.receive_batch(BATCH_SIZE)
        num_received += len(messages)
    await router.send(messages[-1])
    await trio.sleep_forever()


async def echo_all(router: ZmqSocket) -> None:
    while True:
        await router.send(await router.receive())


def serve_raw(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.RCVTIMEO, 1000 * TIMEOUT_S)
        router.bind(endpoint)
        print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            router.send_multipart(router.recv_multipart())


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            main()
        case ["raw-echo", endpoint]:
            serve_raw(endpoint)
        case [role, endpoint]:
            trio.run(serve, role, endpoint)
