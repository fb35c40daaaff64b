"""A replica's own process, without its tree: what it says to its root, and when."""

import pytest
import trio
from trio.testing import MockClock

from callboard.actors.session import Joined, Left, Listener, Said
from callboard.actors.system import open_system
from callboard.actors.transport import MemoryNetwork, PeerKey
from callboard.messages.membership import ReplicaUp, Role, Welcome
from callboard.supervision.process import FromReplicaProcess, ReplicaOrder
from callboard.supervision.remote import ToRemote
from callboard.supervision.replica import _Replica
from callboard.supervision.settings import Settings


async def _nothing(replica: _Replica) -> None:
    """Stand in for the tree, and for a standard input that stays open."""


async def test_it_says_again_that_it_is_up_when_its_line_was_lost(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(_Replica, "_start", _nothing)
    monkeypatch.setattr(_Replica, "_end_with_parent", _nothing)
    network, peers = MemoryNetwork(), list[PeerKey]()
    up_in, up_out = trio.open_memory_channel[ReplicaUp](10)

    async def deliver(event: Said | Joined | Left) -> None:
        if isinstance(event, Said):
            peers.append(event.peer)
            await up_in.send(event.message)

    def welcome(session: str) -> Welcome:
        return Welcome(name="root", session=session, max_frame_bytes=listener.max_frame_bytes)

    async with open_system() as system, trio.open_nursery() as nursery:
        listener = Listener(
            system,
            network,
            "memory://control",
            name="root",
            inboxes={Role.REPLICA: FromReplicaProcess},
            outboxes={Role.REPLICA: ToRemote},
            welcome=welcome,
            deliver=deliver,
        )
        nursery.start_soon(listener.run)
        order = ReplicaOrder(
            name="replica-0",
            settings=Settings(),
            coordinator="memory://coordinator",
            control="memory://control",
        )
        nursery.start_soon(_Replica(order, system, network).run)
        with trio.fail_after(60):
            assert isinstance(await up_out.receive(), ReplicaUp)
            listener.drop(peers[-1], "it was silent")
            assert isinstance(await up_out.receive(), ReplicaUp)
        nursery.cancel_scope.cancel("it was seen")
