"""The KV allocator: owns the block ids of a replica, and who holds which."""

from callboard.actors.actor import Actor
from callboard.actors.ref import ActorRef
from callboard.gpu.blocks import BlockPool
from callboard.gpu.memory import blocks_for
from callboard.gpu.prefix import BlockHash
from callboard.messages.blocks import (
    BlockRequest,
    BlocksGranted,
    CacheBlocks,
    Computed,
    PrefixRequest,
    ReleaseBlocks,
    ReserveBlocks,
)
from callboard.messages.control import (
    ControlReply,
    KVLevel,
    Suspend,
    UpdatePhase,
    UpdateWeights,
    WeightsLevel,
)
from callboard.messages.errors import OutOfBlocks
from callboard.messages.steps import DeviceReady, RowId

KVAllocatorInbox = ReserveBlocks | CacheBlocks | ReleaseBlocks | DeviceReady


class KVAllocator(Actor[KVAllocatorInbox]):
    """Answers one question a step; a row gets all it asks for or nothing."""

    def __init__(self, scheduler: ActorRef[BlocksGranted]) -> None:
        self._scheduler = scheduler
        self._pool: BlockPool | None = None
        self._block_tokens = 0
        self._held: dict[RowId, list[int]] = {}  # in the order of the rows' block tables
        self._promised: dict[BlockHash, RowId] = {}  # blocks that a row is about to compute
        self._promises: dict[RowId, tuple[BlockHash, ...]] = {}

    async def receive(self, message: KVAllocatorInbox) -> None:
        """Handle one message."""
        match message:
            case ReserveBlocks() if self._pool is not None:
                await self._scheduler.tell(self._reserve(message, self._pool))
            case ReserveBlocks():
                pass  # asked of an earlier life; the DeviceReady that will come begins a new round
            case CacheBlocks(computed=computed):
                self._cache(computed)
            case ReleaseBlocks(rows=rows):
                self._release(rows)
            case DeviceReady(num_blocks=num_blocks, block_tokens=block_tokens):
                # One more than may be handed out: the pool keeps a block for padding to write to.
                self._pool = BlockPool(num_blocks + 1)
                self._block_tokens = block_tokens
                self._held.clear()
                self._promised.clear()
                self._promises.clear()

    async def on_suspend(self, verb: Suspend) -> ControlReply | None:
        """Forget what is cached: its memory goes, or the weights do, and others may come back."""
        goes = verb.kv is KVLevel.DROP or verb.weights is WeightsLevel.DISCARD
        if goes and self._pool is not None:
            self._pool.forget_all()
        return self.ack(verb)

    async def on_update_weights(self, verb: UpdateWeights) -> ControlReply | None:
        """Forget what is cached: other weights have not computed it."""
        if verb.phase is UpdatePhase.COMMIT and self._pool is not None:
            self._pool.forget_all()
        return self.ack(verb)

    def details(self) -> dict[str, int | float | str]:
        """Return the counters `status` shows."""
        pool = self._pool
        if pool is None:
            return {"blocks_total": 0, "blocks_free": 0}
        statistics = pool.statistics()
        return {
            "blocks_total": pool.usable,
            "blocks_free": pool.free,
            "blocks_cached": statistics.cached,
            "prefix_hits": statistics.hits,
            "prefix_misses": statistics.misses,
        }

    def _reserve(self, question: ReserveBlocks, pool: BlockPool) -> BlocksGranted:
        granted: dict[RowId, tuple[int, ...]] = {}
        cached: dict[RowId, int] = {}
        deferred: list[RowId] = []
        for wanted in question.grow:
            self._grant(pool, wanted, granted)
        if len(granted) == len(question.grow):
            for new in question.admit:
                self._admit(pool, new, granted, cached, deferred)
                if not (new.may_be_overtaken or new.row in granted or new.row in deferred):
                    break
        return BlocksGranted(
            step=question.step,
            blocks=granted,
            free=pool.free,
            cached=cached,
            deferred=tuple(deferred),
        )

    def _admit(
        self,
        pool: BlockPool,
        new: PrefixRequest,
        granted: dict[RowId, tuple[int, ...]],
        cached: dict[RowId, int],
        deferred: list[RowId],
    ) -> None:
        """Give a new row its blocks, unless it had better wait for those others compute."""
        num_cached = len(pool.match(new.hashes))
        missing = new.hashes[num_cached:]
        if missing and missing[0] in self._promised:
            deferred.append(new.row)
            return
        start = num_cached * self._block_tokens
        end = start + min(new.chunk_tokens, new.prompt_tokens - start)
        count = blocks_for(end, self._block_tokens) - num_cached
        try:
            blocks = pool.acquire(new.hashes, count)
        except OutOfBlocks:
            return
        self._held[new.row] = blocks
        granted[new.row] = tuple(blocks)
        if num_cached:
            cached[new.row] = num_cached
        self._promises[new.row] = missing
        self._promised.update(dict.fromkeys(missing, new.row))

    def _grant(
        self, pool: BlockPool, wanted: BlockRequest, granted: dict[RowId, tuple[int, ...]]
    ) -> bool:
        if wanted.count > pool.free:
            return False
        blocks = pool.allocate(wanted.count) if wanted.count else []
        self._held.setdefault(wanted.row, []).extend(blocks)
        granted[wanted.row] = tuple(blocks)
        return True

    def _cache(self, computed: tuple[Computed, ...]) -> None:
        for part in computed:
            self._keep_promises(part.row, part.hashes)
            if self._pool is not None and part.row in self._held:
                _register(self._pool, self._held[part.row], part)

    def _release(self, rows: tuple[RowId, ...]) -> None:
        for row in rows:
            self._keep_promises(row, self._promises.pop(row, ()))
            blocks = self._held.pop(row, None)
            if blocks and self._pool is not None:
                self._pool.release(blocks)

    def _keep_promises(self, row: RowId, hashes: tuple[BlockHash, ...]) -> None:
        """Let nobody wait for these blocks any more: they are computed, or never will be."""
        for block_hash in hashes:
            if self._promised.get(block_hash) == row:
                del self._promised[block_hash]


def _register(pool: BlockPool, blocks: list[int], part: Computed) -> None:
    """Let others find these of a row's blocks, up to the first that only copies a cached one.

    What continues the copy is not found: it would keep the original from being evicted, and the
    row might then need more blocks than there are.
    """
    if part.first and not pool.is_cached(blocks[part.first - 1]):
        return
    parent = part.parent or None
    for block, block_hash in zip(blocks[part.first :], part.hashes, strict=False):
        pool.register(block, block_hash, parent)
        if not pool.is_cached(block):
            return
        parent = block_hash
