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
        for wanted in question.grow:
            self._grant(pool, wanted, granted)
        new = _NewRows(granted, question.budget, may_split=question.may_split)
        if len(granted) == len(question.grow):
            for asked in question.admit:
                self._admit(pool, asked, new)
                if new.budget == 0 or (asked.row in new.denied and not asked.may_be_overtaken):
                    break
        return BlocksGranted(
            step=question.step,
            blocks=granted,
            cached=new.cached,
            chunks=new.chunks,
            denied=tuple(new.denied),
        )

    def _admit(self, pool: BlockPool, wanted: PrefixRequest, new: "_NewRows") -> None:
        """Give a new row its blocks, unless it had better wait for those others compute."""
        num_cached = len(pool.match(wanted.hashes))
        missing = wanted.hashes[num_cached:]
        if missing and missing[0] in self._promised:
            return
        start = num_cached * self._block_tokens
        rest = wanted.prompt_tokens - start
        chunk = min(rest, wanted.chunk_tokens, new.budget)
        if chunk < rest and not new.may_split:
            return
        count = blocks_for(start + chunk, self._block_tokens) - num_cached
        try:
            blocks = pool.acquire(wanted.hashes, count)
        except OutOfBlocks:
            new.denied.append(wanted.row)
            return
        new.take(wanted.row, blocks, num_cached=num_cached, chunk=chunk, is_rest=chunk == rest)
        self._held[wanted.row] = blocks
        self._promises[wanted.row] = missing
        self._promised.update(dict.fromkeys(missing, wanted.row))

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


class _NewRows:
    """What the new rows of one step have got, and what is left for those behind them."""

    def __init__(
        self, blocks: dict[RowId, tuple[int, ...]], budget: int, *, may_split: bool
    ) -> None:
        self.blocks = blocks
        self.budget = budget
        self.may_split = may_split
        self.cached: dict[RowId, int] = {}
        self.chunks: dict[RowId, int] = {}
        self.denied: list[RowId] = []

    def take(
        self, row: RowId, blocks: list[int], *, num_cached: int, chunk: int, is_rest: bool
    ) -> None:
        """Note what a row gets."""
        self.blocks[row] = tuple(blocks)
        self.chunks[row] = chunk
        self.budget -= chunk
        self.may_split &= is_rest
        if num_cached:
            self.cached[row] = num_cached
