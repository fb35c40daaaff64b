"""The prefix cache: hashes that name blocks of tokens, and the index of the blocks that hold them.

What is in a KV block depends on its own tokens and on all before them, so its hash covers its
tokens and its parent's hash. Knows nothing of reference counts and free ids: see `BlockPool`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from callboard.messages.base import BYTES_PER_ID, pack_ids

BlockHash = bytes
"""16 bytes that stand for all tokens up to the end of a block; nobody can find two that collide."""

HASH_BYTES = 16


def block_hashes(
    tokens: Sequence[int], block_tokens: int, *, salt: bytes, weights_version: int
) -> list[BlockHash]:
    """Return the hash of each complete block of a sequence of token ids.

    Sequences with another salt (say, another tenant's) or other weights share no hash.
    """
    root = root_hash(salt=salt, weights_version=weights_version)
    return extend_hashes(root, tokens, block_tokens)


def root_hash(*, salt: bytes, weights_version: int) -> BlockHash:
    """Return what stands for the empty sequence: the parent of a first block, for hashing."""
    version = weights_version.to_bytes(8, "little")  # fixed width, or the salt could imitate it
    return blake2b(version + salt, digest_size=HASH_BYTES, person=b"prefix root").digest()


def extend_hashes(parent: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Return the hashes of the complete blocks that `tokens` fill behind the block `parent`."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}, and must be at least 1")
    packed = pack_ids(tokens)
    num_bytes = block_tokens * BYTES_PER_ID
    hashes = []
    for end in range(num_bytes, len(packed) + 1, num_bytes):
        parent = blake2b(parent + packed[end - num_bytes : end], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class _Entry(msgspec.Struct, kw_only=True):
    """A cached block: `uses` is 1 if somebody holds it, plus 1 for each child that is in use."""

    block_hash: BlockHash
    parent: int | None
    uses: int


class PrefixIndex:
    """Finds the block computed for a hash, and knows which cached block to give up next.

    Every cached block but the first of a sequence has its parent in the index too. A block is in
    use while somebody holds it or any block behind it; the others are idle, in the order in which
    they fell idle. So a child always stands before its parent, the first of the idle has no child
    left, and evicting it orphans nobody. Every operation takes constant time a block of the
    sequence it is about.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # a dict is slow to pop from the front

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    @property
    def num_idle(self) -> int:
        """How many blocks could be evicted, one after another."""
        return len(self._idle)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are idle."""
        return sum(block in self._idle for block in blocks)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence; changes nothing."""
        matched: list[int] = []
        parent = None
        for block_hash in hashes:
            block = self._blocks.get(block_hash)
            if block is None or self._entries[block].parent != parent:
                break
            matched.append(block)
            parent = block
        return matched

    def add(self, block: int, block_hash: BlockHash, parent_hash: BlockHash | None) -> bool:
        """Enter a computed block that somebody holds; False when its parent is not cached.

        And when its parent is idle: then the holder has a copy of that, and to keep the cached one
        for it, too, would take blocks that nobody has asked for.

        A hash keeps the block that came first. Raises ValueError when the block has another hash.
        """
        entry = self._entries.get(block)
        if entry is not None and entry.block_hash != block_hash:
            raise ValueError(
                f"block {block} is cached under a different hash, {entry.block_hash.hex()}, "
                f"than {block_hash.hex()}: its content cannot have changed"
            )
        if block_hash in self._blocks:
            return True
        parent = None
        if parent_hash is not None:
            parent = self._blocks.get(parent_hash)
            if parent is None or parent in self._idle:
                return False
            self.hold(parent)
        self._blocks[block_hash] = block
        self._entries[block] = _Entry(block_hash=block_hash, parent=parent, uses=1)
        return True

    def hold(self, block: int) -> None:
        """Note that a cached block has its first holder: it and all before it are in use."""
        current: int | None = block
        while current is not None:
            entry = self._entries[current]
            entry.uses += 1
            if entry.uses > 1:
                return
            del self._idle[current]
            current = entry.parent

    def let_go(self, block: int) -> None:
        """Note that a cached block has lost its last holder: it falls idle with its last child."""
        current: int | None = block
        while current is not None:
            entry = self._entries[current]
            entry.uses -= 1
            if entry.uses > 0:
                return
            self._idle[current] = None
            current = entry.parent

    def evict(self) -> int:
        """Drop the block that has been idle longest, and return it."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._entries.pop(block).block_hash]
        return block

    def audit(self, held: set[int]) -> None:
        """Raise AssertionError unless the index agrees with itself and with who is held."""
        entries = self._entries
        if self._blocks != {entry.block_hash: block for block, entry in entries.items()}:
            raise AssertionError("hashes and cached blocks do not name each other")
        uses = {block: int(block in held) for block in entries}
        for block in self._children_first():
            parent = entries[block].parent
            if parent is not None:
                uses[parent] += uses[block] > 0
        if uses != {block: entry.uses for block, entry in entries.items()}:
            raise AssertionError("a cached block counts other uses than it has")
        if set(self._idle) != {block for block, count in uses.items() if count == 0}:
            raise AssertionError("the idle blocks are not those that are not in use")
        age = {block: place for place, block in enumerate(self._idle)}
        for block in age:
            parent = entries[block].parent
            if parent in age and age[parent] < age[block]:
                raise AssertionError(f"block {parent} would be evicted before its child {block}")

    def _children_first(self) -> list[int]:
        """Return every cached block behind all its children."""
        children: dict[int | None, list[int]] = {}
        for block, entry in self._entries.items():
            children.setdefault(entry.parent, []).append(block)
        found = children.get(None, [])[:]
        for block in found:  # grows while it is walked
            found += children.get(block, [])
        if len(found) != len(self._entries):
            raise AssertionError("a cached block is an orphan, or its own ancestor")
        return found[::-1]
