"""Each way in which a task on a ZeroMQ socket could sleep for ever or lose a message, as a test.

Sockets are real, so the clock is too: every wait is bounded by TIMEOUT_S, which a passing test
does not come near. The stress test at the end looks for what nobody thought of;
CALLBOARD_STRESS_MESSAGES is its size.
"""

import errno
import fcntl
import os
import random
import signal
import socket as stdlib_socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import trio
import zmq
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from callboard.actors.zmq_socket import (
    EndpointError,
    FrameTooLarge,
    PeerGone,
    ZmqContext,
    ZmqSocket,
    open_zmq_context,
)

T = TypeVar("T")

TIMEOUT_S = 5
HWM = 4
MAX_MESSAGE_BYTES = 2048
STRESS_MESSAGES = int(os.environ.get("CALLBOARD_STRESS_MESSAGES", "20000"))


class Pair(NamedTuple):
    router: ZmqSocket
    dealer: ZmqSocket
    routing_id: bytes


@pytest.fixture
async def context() -> AsyncIterator[ZmqContext]:
    async with open_zmq_context() as context:
        yield context


@pytest.fixture
async def pair(context: ZmqContext) -> Pair:
    return await open_pair(context, "inproc://pair")


@pytest.fixture
def ipc_path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


async def open_pair(context: ZmqContext, endpoint: str) -> Pair:
    router = open_router(context)
    return await connect_dealer(context, router, router.bind(endpoint))


def open_router(context: ZmqContext, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> ZmqSocket:
    return context.router(max_message_bytes=max_message_bytes, send_hwm=HWM, receive_hwm=HWM)


def open_dealer(context: ZmqContext) -> ZmqSocket:
    return context.dealer(max_message_bytes=MAX_MESSAGE_BYTES, send_hwm=HWM, receive_hwm=HWM)


async def connect_dealer(context: ZmqContext, router: ZmqSocket, endpoint: str) -> Pair:
    dealer = open_dealer(context)
    dealer.connect(endpoint)
    with trio.fail_after(TIMEOUT_S):
        await dealer.send([b"hello"])
        routing_id, _ = await router.receive()
    return Pair(router, dealer, routing_id)


def fill(socket: ZmqSocket, frames: Sequence[bytes]) -> int:
    """Send until there is no room and return how many went."""
    for num_sent in range(100):
        try:
            socket.send_nowait(frames)
        except trio.WouldBlock:
            return num_sent
    raise AssertionError("there is always room")


def empty(socket: ZmqSocket) -> int:
    """Receive what is there and return how many came."""
    num_received = 0
    while True:
        try:
            socket.receive_nowait()
        except trio.WouldBlock:
            return num_received
        num_received += 1


async def receive(socket: ZmqSocket) -> list[bytes]:
    with trio.fail_after(TIMEOUT_S):
        return await socket.receive()


async def receive_into(messages: list[list[bytes]], socket: ZmqSocket) -> None:
    messages.append(await socket.receive())


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def outlast_the_throttle() -> None:
    """Let libzmq's send look at its commands again, which it does once in about a millisecond."""
    time.sleep(0.01)


async def test_a_receiver_wakes_though_a_send_ate_its_notification(pair: Pair) -> None:
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            pair.router.send_nowait([pair.routing_id, b"news"])
            outlast_the_throttle()
            pair.dealer.send_nowait([b"the eater"])

    assert received == [[b"news"]]


async def test_a_receiver_wakes_though_a_send_without_room_ate_its_notification(pair: Pair) -> None:
    received: list[list[bytes]] = []
    fill(pair.dealer, [b"filler"])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            pair.router.send_nowait([pair.routing_id, b"news"])
            with pytest.raises(trio.WouldBlock):
                pair.dealer.send_nowait([b"the eater"])

    assert received == [[b"news"]]


async def test_a_receiver_wakes_though_a_connect_ate_its_notification(pair: Pair) -> None:
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            pair.router.send_nowait([pair.routing_id, b"news"])
            pair.dealer.connect("inproc://elsewhere")

    assert received == [[b"news"]]


async def test_a_receiver_wakes_though_a_refused_send_ate_its_notification(pair: Pair) -> None:
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.router)
            await wait_all_tasks_blocked()
            pair.dealer.send_nowait([b"news"])
            outlast_the_throttle()
            with pytest.raises(PeerGone):
                pair.router.send_nowait([b"nobody", b"the eater"])

    assert received == [[pair.routing_id, b"news"]]


async def test_a_sender_wakes_though_a_receive_ate_its_notification(pair: Pair) -> None:
    num_sent = fill(pair.dealer, [b"filler"])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.dealer.send, [b"last"])
            await wait_all_tasks_blocked()
            assert empty(pair.router) == num_sent
            assert empty(pair.dealer) == 0

    assert await receive(pair.router) == [pair.routing_id, b"last"]


async def test_a_throttled_send_sees_room_while_a_receiver_leads(pair: Pair) -> None:
    received: list[list[bytes]] = []
    fill(pair.dealer, [b"filler"])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            outlast_the_throttle()
            fill(pair.dealer, [b"the throttle starts here"])
            empty(pair.router)
            await pair.dealer.send([b"throttled"])
            pair.router.send_nowait([pair.routing_id, b"done"])

    assert await receive(pair.router) == [pair.routing_id, b"throttled"]


async def test_a_cancelled_leader_hands_on_the_lead(pair: Pair) -> None:
    received: list[list[bytes]] = []
    leader_scope = trio.CancelScope()

    async def lead() -> None:
        with leader_scope:
            await pair.dealer.receive()

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead)
            await wait_all_tasks_blocked()
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            leader_scope.cancel()
            await wait_all_tasks_blocked()
            pair.router.send_nowait([pair.routing_id, b"for the second"])

    assert received == [[b"for the second"]]


async def test_a_satisfied_leader_hands_on_the_lead(pair: Pair) -> None:
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(receive_into, received, pair.dealer)
            for number in range(3):
                await wait_all_tasks_blocked()
                assert pair.dealer.statistics().num_waiting_readers == 3 - number
                pair.router.send_nowait([pair.routing_id, bytes([number])])

    assert received == [[b"\0"], [b"\1"], [b"\2"]]


async def test_one_notification_serves_as_many_receivers_as_messages(pair: Pair) -> None:
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            for number in range(5):
                pair.router.send_nowait([pair.routing_id, bytes([number])])

    assert sorted(received) == [[bytes([number])] for number in range(5)]


async def test_short_timeouts_neither_lose_nor_repeat_nor_reorder(pair: Pair) -> None:
    rng = random.Random(1)
    num_messages = 1000
    received: list[int] = []

    async def send_all() -> None:
        for number in range(num_messages):
            await until_not_timed_out(rng, partial(pair.dealer.send, [number.to_bytes(2)]))

    async def receive_all() -> None:
        while len(received) < num_messages:
            _, body = await until_not_timed_out(rng, pair.router.receive)
            received.append(int.from_bytes(body))

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            nursery.start_soon(receive_all)

    assert received == list(range(num_messages))
    assert empty(pair.router) == 0


async def until_not_timed_out(rng: random.Random, call: Callable[[], Awaitable[T]]) -> T:
    while True:
        with trio.move_on_after(rng.uniform(50e-6, 100e-6)):
            return await call()


async def test_a_full_peer_makes_its_sender_neither_spin_nor_block_others(
    context: ZmqContext, pair: Pair
) -> None:
    other = await connect_dealer(context, pair.router, "inproc://pair")
    num_filled = fill(pair.router, [pair.routing_id, b"filler"])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.router.send, [pair.routing_id, b"last"])
            await wait_all_tasks_blocked()
            num_sleeps_before = pair.router.statistics().num_sleeps
            started_s = trio.current_time()
            for number in range(20):
                await pair.router.send([other.routing_id, bytes([number])])
                assert await other.dealer.receive() == [bytes([number])]
                await trio.sleep(0.001)
            elapsed_s = trio.current_time() - started_s
            num_sleeps = pair.router.statistics().num_sleeps - num_sleeps_before
            assert empty(pair.dealer) == num_filled

    # Twice a 2 ms timer, and up to twice a round for the commands of the other peer.
    assert num_sleeps <= 2 * (elapsed_s / 0.002) + 2 * 20
    assert await receive(pair.dealer) == [b"last"]


async def test_a_blocked_sender_hears_that_its_peer_left(pair: Pair) -> None:
    """Nothing tells of it: EVENTS shows no room before, while and after the peer goes."""
    fill(pair.router, [pair.routing_id, b"filler"])

    async def expect_peer_gone() -> None:
        with pytest.raises(PeerGone, match=pair.routing_id.hex()):
            await pair.router.send([pair.routing_id, b"too late"])

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_peer_gone)
            await wait_all_tasks_blocked()
            pair.dealer.close()


async def test_closing_wakes_everybody(pair: Pair) -> None:
    fill(pair.dealer, [b"filler"])

    async def expect_closed(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await call()

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(expect_closed, pair.dealer.receive)
                nursery.start_soon(expect_closed, partial(pair.dealer.send, [b"one more"]))
            await wait_all_tasks_blocked()
            pair.dealer.close()


async def test_a_closed_socket_refuses_everything_but_closing(pair: Pair) -> None:
    with pair.dealer as dealer:
        assert not dealer.closed
    pair.dealer.close()

    assert pair.dealer.closed
    with pytest.raises(trio.ClosedResourceError):
        await pair.dealer.receive()
    with pytest.raises(trio.ClosedResourceError):
        await pair.dealer.send([b"late"])
    with pytest.raises(trio.ClosedResourceError):
        pair.dealer.receive_nowait()
    with pytest.raises(trio.ClosedResourceError):
        pair.dealer.send_nowait([b"late"])
    with pytest.raises(trio.ClosedResourceError):
        pair.dealer.connect("inproc://pair")


async def test_every_call_is_a_checkpoint(pair: Pair) -> None:
    with trio.fail_after(TIMEOUT_S):
        for _ in range(2):
            with assert_checkpoints():
                await pair.dealer.send([b"there is room"])
        with assert_checkpoints():
            await pair.router.receive()
        with assert_checkpoints():
            await pair.router.receive_batch(8)


async def test_a_cancelled_call_does_nothing(pair: Pair) -> None:
    pair.router.send_nowait([pair.routing_id, b"stays"])

    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(trio.Cancelled):
            await pair.dealer.send([b"is not sent"])
        with pytest.raises(trio.Cancelled):
            await pair.dealer.receive()

    assert empty(pair.router) == 0
    assert empty(pair.dealer) == 1


async def test_a_call_cancelled_as_it_ends_is_done_or_undone(pair: Pair) -> None:
    """The cancellation comes before or after the end, as trio's shuffled schedule has it."""
    num_sent = num_received = 0
    cancel_soon = trio.lowlevel.current_trio_token().run_sync_soon

    for _ in range(20):
        with trio.CancelScope() as scope:
            cancel_soon(scope.cancel)
            await pair.dealer.send([b"sent?"])
            num_sent += 1
        assert empty(pair.router) == num_sent - num_received
        num_received = num_sent
    for _ in range(20):
        pair.router.send_nowait([pair.routing_id, b"received?"])
        with trio.CancelScope() as scope:
            cancel_soon(scope.cancel)
            await pair.dealer.receive()
            num_received += 1
        num_received += empty(pair.dealer)

    assert num_received == num_sent + 20


async def test_a_batch_takes_what_is_there_up_to_its_maximum(pair: Pair) -> None:
    for number in range(5):
        pair.dealer.send_nowait([bytes([number])])

    with trio.fail_after(TIMEOUT_S):
        first = await pair.router.receive_batch(3)
        rest = await pair.router.receive_batch(3)

    assert [body for _, body in first] == [b"\0", b"\1", b"\2"]
    assert [body for _, body in rest] == [b"\3", b"\4"]
    with pytest.raises(ValueError, match="max_messages is 0"):
        await pair.router.receive_batch(0)


async def test_an_unknown_peer_is_refused_at_once(pair: Pair) -> None:
    with pytest.raises(PeerGone, match=b"nobody".hex()):
        await pair.router.send([b"nobody", b"hello?"])
    with pytest.raises(PeerGone, match=b"nobody".hex()):
        pair.router.send_nowait([b"nobody", b"hello?"])


async def test_a_dealer_without_a_live_peer_has_no_room(context: ZmqContext) -> None:
    dealer = open_dealer(context)
    dealer.connect("tcp://127.0.0.1:1")

    with pytest.raises(trio.WouldBlock):
        dealer.send_nowait([b"is anybody there?"])


async def test_frames_that_are_no_message_are_refused_whole(pair: Pair) -> None:
    not_bytes: Sequence[bytes] = [pair.routing_id, "text"]  # type: ignore[list-item]

    with pytest.raises(ValueError, match=r"\[body\] here, not 2 frames"):
        await pair.dealer.send([b"one", b"two"])
    with pytest.raises(ValueError, match=r"\[routing_id, body\] here, not 1 frames"):
        pair.router.send_nowait([pair.routing_id])
    with pytest.raises(TypeError, match="not str"):
        pair.router.send_nowait(not_bytes)

    pair.router.send_nowait([pair.routing_id, b"the next is whole"])
    assert await receive(pair.dealer) == [b"the next is whole"]


async def test_a_too_large_frame_is_refused_by_its_sender(pair: Pair) -> None:
    with pytest.raises(FrameTooLarge, match="2049 bytes, of at most 2048"):
        await pair.dealer.send([bytes(MAX_MESSAGE_BYTES + 1)])

    assert empty(pair.router) == 0


async def test_a_too_large_frame_is_not_delivered(context: ZmqContext, ipc_path: Path) -> None:
    """libzmq drops the connection at such a frame; the dealer comes back by itself."""
    router = open_router(context, max_message_bytes=1024)
    pair = await connect_dealer(context, router, router.bind(f"ipc://{ipc_path}"))

    await pair.dealer.send([bytes(1025)])

    with trio.fail_after(TIMEOUT_S):
        while True:
            with trio.move_on_after(0.01):
                await pair.dealer.send([b"small"])
                _, body = await router.receive()
                break
    assert body == b"small"


def test_an_interrupt_does_not_split_a_message() -> None:
    class InterruptedFrames(list[bytes]):
        def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
            if index == -1:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    received: list[list[bytes]] = []

    async def main() -> None:
        async with open_zmq_context() as context:
            pair = await open_pair(context, "inproc://pair")
            pair.router.send_nowait(InterruptedFrames([pair.routing_id, b"whole"]))
            received.append(pair.dealer.receive_nowait())
            await trio.lowlevel.checkpoint()  # the interrupt comes here

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)

    assert received == [[b"whole"]]


async def test_statistics_count_what_was_done_and_who_waits(pair: Pair) -> None:
    fill(pair.dealer, [b"filler"])
    before = pair.dealer.statistics()

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.dealer.send, [b"last"])
            nursery.start_soon(pair.dealer.receive)
            await wait_all_tasks_blocked()
            waiting = pair.dealer.statistics()
            empty(pair.router)
            pair.router.send_nowait([pair.routing_id, b"reply"])
    after = pair.dealer.statistics()

    assert (before.num_waiting_readers, before.num_waiting_writers) == (0, 0)
    assert (waiting.num_waiting_readers, waiting.num_waiting_writers) == (1, 1)
    assert (after.num_waiting_readers, after.num_waiting_writers) == (0, 0)
    assert waiting.num_sleeps == before.num_sleeps + 2
    assert after.num_sends == before.num_sends + 1
    assert after.num_receives == before.num_receives + 1


async def test_a_leader_is_kicked_when_another_call_finds_its_message(pair: Pair) -> None:
    num_kicks = pair.dealer.statistics().num_kicks
    received: list[list[bytes]] = []

    with trio.fail_after(TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, pair.dealer)
            await wait_all_tasks_blocked()
            pair.router.send_nowait([pair.routing_id, b"news"])
            pair.dealer.send_nowait([b"looks at EVENTS because somebody waits"])

    assert pair.dealer.statistics().num_kicks == num_kicks + 1


async def test_a_socket_refuses_other_threads_and_other_runs(pair: Pair) -> None:
    def use_in_another_run() -> None:
        trio.run(pair.dealer.receive)

    with pytest.raises(RuntimeError, match="the trio run that opened it"):
        await trio.to_thread.run_sync(pair.dealer.receive_nowait)
    with pytest.raises(RuntimeError, match="the trio run that opened it"):
        await trio.to_thread.run_sync(pair.dealer.close)
    with pytest.raises(RuntimeError, match="the trio run that opened it"):
        await trio.to_thread.run_sync(use_in_another_run)


async def test_binding_returns_the_real_endpoint(context: ZmqContext) -> None:
    router = open_router(context)

    endpoint = router.bind("tcp://127.0.0.1:0")

    assert endpoint.startswith("tcp://127.0.0.1:")
    assert not endpoint.endswith(":0")
    await connect_dealer(context, router, endpoint)


def has_ipv6() -> bool:
    try:
        with stdlib_socket.create_server(("::1", 0), family=stdlib_socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_an_address_may_be_of_ipv6(context: ZmqContext) -> None:
    router = open_router(context)

    endpoint = router.bind("tcp://[::1]:0")

    assert endpoint.startswith("tcp://[::1]:")
    await connect_dealer(context, router, endpoint)


async def test_a_host_that_nobody_knows_is_said_to_be_none(context: ZmqContext) -> None:
    with pytest.raises(EndpointError, match="no such name or address"):
        open_router(context).bind("tcp://no-such-interface:0")


async def test_a_tcp_port_in_use_is_refused_by_name(context: ZmqContext) -> None:
    with stdlib_socket.create_server(("127.0.0.1", 0)) as occupant:
        endpoint = f"tcp://127.0.0.1:{occupant.getsockname()[1]}"

        with pytest.raises(EndpointError, match=endpoint) as raised:
            open_router(context).bind(endpoint)

    assert raised.value.errno == errno.EADDRINUSE


async def test_a_malformed_endpoint_is_refused_by_name(context: ZmqContext) -> None:
    with pytest.raises(EndpointError, match="carrier pigeon"):
        open_dealer(context).connect("carrier pigeon")
    with pytest.raises(EndpointError, match="carrier pigeon"):
        open_router(context).bind("carrier pigeon")


async def test_a_live_ipc_path_is_not_taken_over(context: ZmqContext, ipc_path: Path) -> None:
    pair = await open_pair(context, f"ipc://{ipc_path}")

    with pytest.raises(EndpointError, match=f"ipc://{ipc_path}") as raised:
        open_router(context).bind(f"ipc://{ipc_path}")

    assert raised.value.errno == errno.EADDRINUSE
    await connect_dealer(context, pair.router, f"ipc://{ipc_path}")


async def test_a_closed_socket_leaves_its_ipc_path_free(
    context: ZmqContext, ipc_path: Path
) -> None:
    open_router(context).bind(f"ipc://{ipc_path.with_name('other')}")
    first = await open_pair(context, f"ipc://{ipc_path}")

    first.router.close()

    assert list_names(ipc_path.parent) == ["other", "other.lock"]
    await open_pair(context, f"ipc://{ipc_path}")


async def test_a_dead_process_s_ipc_socket_is_replaced(context: ZmqContext, ipc_path: Path) -> None:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as dead:
        dead.bind(str(ipc_path))

    await open_pair(context, f"ipc://{ipc_path}")


async def test_a_file_that_is_no_socket_is_not_replaced(
    context: ZmqContext, ipc_path: Path
) -> None:
    await trio.Path(ipc_path).write_text("precious")

    with pytest.raises(EndpointError, match="not a socket of this user"):
        open_router(context).bind(f"ipc://{ipc_path}")

    assert await trio.Path(ipc_path).read_text() == "precious"
    assert list_names(ipc_path.parent) == [ipc_path.name]


async def test_closing_deletes_only_its_own_ipc_socket(context: ZmqContext, ipc_path: Path) -> None:
    router = open_router(context)
    router.bind(f"ipc://{ipc_path}")
    await trio.Path(ipc_path).unlink()
    await trio.Path(ipc_path).write_text("precious")

    router.close()

    assert await trio.Path(ipc_path).read_text() == "precious"


async def test_a_lock_file_deleted_while_it_is_taken_does_not_count(
    context: ZmqContext, ipc_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closing owner deletes it, perhaps after we opened it and before we locked it."""
    real_flock = fcntl.flock

    def flock_too_late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        ipc_path.with_name("socket.lock").unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    open_router(context).bind(f"ipc://{ipc_path}")

    with pytest.raises(EndpointError, match="another socket is bound"):
        open_router(context).bind(f"ipc://{ipc_path}")


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/" + 107 * "x", errno.ENAMETOOLONG),
        ("/no/such/folder/socket", errno.ENOENT),
        ("@abstract", errno.EINVAL),
        ("*", errno.EINVAL),
        ("", errno.EINVAL),
    ],
)
async def test_an_ipc_endpoint_without_a_usable_path_is_refused(
    context: ZmqContext, path: str, number: int
) -> None:
    with pytest.raises(EndpointError) as raised:
        open_router(context).bind(f"ipc://{path}")

    assert raised.value.errno == number
    assert raised.value.filename == f"ipc://{path}"


@pytest.mark.parametrize("limit", ["max_message_bytes", "send_hwm", "receive_hwm"])
async def test_a_socket_without_limits_is_refused(context: ZmqContext, limit: str) -> None:
    limits: Any = {"max_message_bytes": 1024, "send_hwm": 1, "receive_hwm": 1, limit: 0}

    with pytest.raises(ValueError, match=f"{limit}=0"):
        context.dealer(**limits)


async def test_the_end_of_a_context_closes_its_sockets() -> None:
    async with open_zmq_context() as context:
        pair = await open_pair(context, "inproc://pair")

    assert pair.router.closed
    assert pair.dealer.closed
    with pytest.raises(trio.ClosedResourceError):
        open_dealer(context)


async def test_unsent_messages_do_not_delay_the_end_of_a_context(
    context: ZmqContext, ipc_path: Path
) -> None:
    router = open_router(context)
    endpoint = router.bind(f"ipc://{ipc_path}")

    async with open_zmq_context(grace_s=TIMEOUT_S) as sender_context:
        _, dealer, _ = await connect_dealer(sender_context, router, endpoint)
        with trio.move_on_after(0.05) as until_full:
            while True:
                await dealer.send([bytes(MAX_MESSAGE_BYTES)])

    assert until_full.cancelled_caught


async def test_the_end_of_a_context_has_a_deadline() -> None:
    context = ZmqContext(grace_s=0.01)
    forgotten = context._context.socket(zmq.DEALER)

    with pytest.raises(trio.TooSlowError):
        await context.aclose()

    forgotten.close()


async def test_a_cancelled_context_still_ends() -> None:
    with trio.CancelScope() as scope:
        async with open_zmq_context() as context:
            pair = await open_pair(context, "inproc://pair")
            scope.cancel()

    assert pair.dealer.closed
    assert context._context.closed


class Tally:
    """Counts the messages of one direction of one pair, each by its number."""

    def __init__(self, num_messages: int) -> None:
        self.to_send = iter(range(num_messages))
        self.counts = bytearray(num_messages)
        self.num_received = 0
        self.complete = trio.Event()

    def note(self, message: list[bytes]) -> None:
        self.counts[int.from_bytes(message[-1])] += 1
        self.num_received += 1
        if self.num_received == len(self.counts):
            self.complete.set()


async def send_numbers(
    socket: ZmqSocket, address: list[bytes], numbers: Iterator[int], rng: random.Random
) -> None:
    """Send each number once, in one of the ways there are."""
    for number in numbers:
        frames = [*address, number.to_bytes(4)]
        match rng.choices(("wait", "nowait", "time out", "pause"), (60, 30, 5, 1))[0]:
            case "nowait":
                try:
                    socket.send_nowait(frames)
                except trio.WouldBlock:
                    await socket.send(frames)
            case "time out":
                await until_not_timed_out(rng, partial(socket.send, frames))
            case way:
                await trio.sleep(rng.uniform(0, 0.001) if way == "pause" else 0)
                await socket.send(frames)


async def receive_numbers(socket: ZmqSocket, tally: Tally, rng: random.Random) -> None:
    """Receive until cancelled, in each of the ways there are."""
    while True:
        match rng.choices(("wait", "batch", "nowait", "time out", "pause"), (50, 30, 10, 5, 1))[0]:
            case "wait":
                tally.note(await socket.receive())
            case "batch":
                for message in await socket.receive_batch(rng.randint(1, 8)):
                    tally.note(message)
            case "nowait":
                try:
                    tally.note(socket.receive_nowait())
                except trio.WouldBlock:
                    tally.note(await socket.receive())
            case "time out":
                tally.note(await until_not_timed_out(rng, socket.receive))
            case _:
                await trio.sleep(rng.uniform(0, 0.001))


async def watch_progress(tallies: Sequence[Tally], pairs: Sequence[Pair]) -> None:
    while True:
        before = sum(tally.num_received for tally in tallies)
        await trio.sleep(5)
        if before == sum(tally.num_received for tally in tallies):
            sockets = [socket for pair in pairs for socket in (pair.router, pair.dealer)]
            raise AssertionError([socket.statistics() for socket in sockets])


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
async def test_under_stress_every_message_arrives_exactly_once(
    context: ZmqContext, tmp_path: Path, transport: str
) -> None:
    """Four pairs, both ways at once, two senders and two receivers a socket, hardly any room."""
    endpoints = {
        "inproc": "inproc://{}",
        "ipc": f"ipc://{tmp_path}/{{}}",
        "tcp": "tcp://127.0.0.1:0",
    }
    pairs = [await open_pair(context, endpoints[transport].format(n)) for n in range(4)]
    tallies = [Tally(STRESS_MESSAGES // 3 // 8) for _ in range(8)]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_progress, tallies, pairs)
        for n, pair in enumerate(pairs):
            up, down = tallies[2 * n : 2 * n + 2]
            for m in range(2):
                rng = random.Random(10 * n + m)
                nursery.start_soon(send_numbers, pair.dealer, [], up.to_send, rng)
                nursery.start_soon(receive_numbers, pair.router, up, rng)
                nursery.start_soon(send_numbers, pair.router, [pair.routing_id], down.to_send, rng)
                nursery.start_soon(receive_numbers, pair.dealer, down, rng)
        for tally in tallies:
            await tally.complete.wait()
        nursery.cancel_scope.cancel()

    assert all(set(tally.counts) == {1} for tally in tallies)
    assert [empty(socket) for pair in pairs for socket in (pair.router, pair.dealer)] == 8 * [0]
