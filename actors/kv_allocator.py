"""The KV allocator: owns the block ids of a replica, and who holds which."""

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.gpu.blocks import BlockPool
from callboard.messages.blocks import BlockRequest, BlocksGranted, ReleaseBlocks, ReserveBlocks
from callboard.messages.steps import DeviceReady, RowId

KVAllocatorInbox = ReserveBlocks | ReleaseBlocks | DeviceReady


class KVAllocator(Actor[KVAllocatorInbox]):
    """Answers one question a step; a row gets all it asks for or nothing."""

    def __init__(self, scheduler: ActorRef[BlocksGranted]) -> None:
        self._scheduler = scheduler
        self._pool: BlockPool | None = None
        self._held: dict[RowId, list[int]] = {}

    async def receive(self, message: KVAllocatorInbox) -> None:
        """Handle one message."""
        match message:
            case ReserveBlocks() if self._pool is not None:
                await self._scheduler.tell(self._reserve(message, self._pool))
            case ReserveBlocks():
                pass  # asked of an earlier life; the DeviceReady that will come begins a new round
            case ReleaseBlocks(rows=rows):
                self._release(rows)
            case DeviceReady(num_blocks=num_blocks):
                # One more than may be handed out: the pool keeps a block for padding to write to.
                self._pool = BlockPool(num_blocks + 1)
                self._held.clear()

    def details(self) -> dict[str, int | float | str]:
        """Return the counters `status` shows."""
        pool = self._pool
        if pool is None:
            return {"blocks_total": 0, "blocks_free": 0}
        return {"blocks_total": pool.usable, "blocks_free": pool.free}

    def _reserve(self, question: ReserveBlocks, pool: BlockPool) -> BlocksGranted:
        granted: dict[RowId, tuple[int, ...]] = {}
        for wanted in question.grow:
            self._grant(pool, wanted, granted)
        if len(granted) == len(question.grow):
            for wanted in question.admit:
                if not self._grant(pool, wanted, granted):
                    break
        return BlocksGranted(step=question.step, blocks=granted, free=pool.free)

    def _grant(
        self, pool: BlockPool, wanted: BlockRequest, granted: dict[RowId, tuple[int, ...]]
    ) -> bool:
        if wanted.count > pool.free:
            return False
        blocks = pool.allocate(wanted.count) if wanted.count else []
        self._held.setdefault(wanted.row, []).extend(blocks)
        granted[wanted.row] = tuple(blocks)
        return True

    def _release(self, rows: tuple[RowId, ...]) -> None:
        for row in rows:
            blocks = self._held.pop(row, None)
            if blocks and self._pool is not None:
                self._pool.release(blocks)
