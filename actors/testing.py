"""Public fakes: a runner that computes nothing, for tests, simulations and benchmarks."""

from collections.abc import Callable

from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.control import Weights
from callboard.messages.steps import Admit, DeviceReady, RowId, RowSampling, RunStep, StepDone

NextToken = Callable[[list[int]], int]
"""From all tokens of a sequence so far to the next one."""


def count_up(tokens: list[int]) -> int:
    """Return the last token plus one, within a vocabulary of 1,000."""
    return (tokens[-1] + 1) % 1000


class _Row:
    """A sequence, and its blocks of a cache that holds token ids for keys and values."""

    def __init__(self, admit: Admit, cache: dict[int, list[int]], block_tokens: int) -> None:
        self.tokens = unpack_ids(admit.prompt)
        self.sampling: RowSampling = admit.sampling
        self.position = admit.sampling.first_position
        self.length = admit.cached_tokens
        self.target = len(self.tokens)
        self.blocks = list(admit.blocks)
        self._cache = cache
        self._block_tokens = block_tokens
        self._check_shared()

    @property
    def has_room(self) -> bool:
        return self.length < len(self.blocks) * self._block_tokens

    def feed(self, num_tokens: int) -> None:
        """Put the next tokens into the cache."""
        for _ in range(num_tokens):
            assert self.has_room, "more tokens than blocks for them"
            number, offset = divmod(self.length, self._block_tokens)
            if offset == 0:
                self._cache[self.blocks[number]] = []
            held = self._cache[self.blocks[number]]
            assert len(held) == offset, "somebody else wrote to this block"
            held.append(self.tokens[self.length])
            self.length += 1

    def _check_shared(self) -> None:
        for start in range(0, self.length, self._block_tokens):
            held = self._cache[self.blocks[start // self._block_tokens]]
            wanted = self.tokens[start : start + self._block_tokens]
            assert held == wanted, "a shared block holds something else"


class ScriptedRunner:
    """A `Runner` whose model is a Python function, as strict about blocks as a real cache is."""

    def __init__(
        self,
        next_token: NextToken = count_up,
        *,
        block_tokens: int = 4,
        num_blocks: int = 64,
        max_rows: int = 16,
        max_step_tokens: int = 64,
        max_model_len: int = 1024,
    ) -> None:
        self._next_token = next_token
        self._room = DeviceReady(
            block_tokens=block_tokens,
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
        )
        self._rows: dict[RowId, _Row] = {}
        self._cache: dict[int, list[int]] = {}
        self._left: set[RowId] = set()  # with the last step
        self.loaded = False
        self.allocated = False
        self.weights = Weights(source="script", version=0)
        self.prepared: Weights | None = None
        self.steps = 0

    @property
    def rows(self) -> list[RowId]:
        """The rows that are here, in the order in which they came."""
        return list(self._rows)

    def load(self) -> None:
        """Pretend to load."""
        self.loaded = True

    def allocate(self) -> None:
        """Pretend to allocate."""
        self.allocated = True

    def free_weights(self) -> int:
        """Pretend to free."""
        was, self.loaded = self.loaded, False
        return 1000 * was

    def free_kv(self) -> int:
        """Forget all rows."""
        was, self.allocated = self.allocated, False
        self._rows.clear()
        self._cache.clear()
        return 2000 * was

    def offload_weights(self) -> int:
        """Pretend to offload."""
        return self.free_weights()

    def offload_kv(self) -> int:
        """Pretend to offload; the rows stay."""
        was, self.allocated = self.allocated, False
        return 2000 * was

    def prepare_weights(self, weights: Weights) -> None:
        """Pretend to read."""
        self.prepared = weights

    def commit_weights(self, weights: Weights) -> None:
        """Say from now on that these weights make the tokens."""
        self.weights, self.prepared = weights, None

    def cancel_weights(self) -> None:
        """Forget what was prepared."""
        self.prepared = None

    def room(self) -> DeviceReady:
        """Return what the constructor was given."""
        return self._room

    def describe(self) -> dict[str, int | float | str]:
        """Say that this is no device."""
        return {
            "device": "script",
            "weights_version": self.weights.version,
            "loaded": int(self.loaded),
            "allocated": int(self.allocated),
        }

    def start_over(self) -> None:
        """Forget all rows, and keep what is loaded and allocated."""
        self._rows.clear()
        self._cache.clear()

    def drop(self, rows: tuple[RowId, ...]) -> None:
        """Forget rows."""
        for row in rows:
            self._rows.pop(row, None)

    def choose(self, tokens: list[int], position: int, sampling: RowSampling) -> int:
        """Return a row's next token, its output's number `position`; of the script here.

        A subclass may have it depend on how the row samples, too.
        """
        return self._next_token(tokens)

    def execute(self, step: RunStep) -> StepDone:
        """Run one step by the same rules as the real runner."""
        assert self.loaded, "a step without weights"
        assert self.allocated, "a step without a cache"
        self.steps += 1
        prefilled: set[RowId] = set()
        num_tokens = self._admit(step, prefilled)
        for chunk in step.continues:
            if chunk.row in self._left:
                continue
            self._rows[chunk.row].blocks += chunk.blocks
            self._rows[chunk.row].feed(chunk.num_tokens)
            num_tokens += chunk.num_tokens
            prefilled.add(chunk.row)
        for grant in step.grants:
            if grant.row not in self._left:
                self._rows[grant.row].blocks.append(grant.block)
        return self._sample(step.step, prefilled, num_tokens)

    def _admit(self, step: RunStep, prefilled: set[RowId]) -> int:
        for admit in step.admits:
            assert admit.row not in self._rows, "a row twice"
            row = self._rows[admit.row] = _Row(admit, self._cache, self._room.block_tokens)
            row.feed(admit.num_tokens)
            prefilled.add(admit.row)
        assert len(self._rows) <= self._room.max_rows, "more rows than there are places"
        return sum(admit.num_tokens for admit in step.admits)

    def _sample(self, step: int, prefilled: set[RowId], num_tokens: int) -> StepDone:
        rows, sampled, stopped, full = [], [], [], []
        for row_id, row in list(self._rows.items()):
            if row_id not in prefilled:
                if row.length < row.target or not row.has_room:
                    continue  # half prefilled, or starved
                row.feed(1)
                num_tokens += 1
            if row.length < row.target:
                continue
            if row.sampling.max_tokens == 0:
                full.append(row_id)
                continue
            token = self.choose(row.tokens, row.position, row.sampling)
            row.tokens.append(token)
            row.position += 1
            rows.append(row_id)
            sampled.append(token)
            sampling = row.sampling
            if token in sampling.stop_token_ids and row.position > sampling.min_tokens:
                stopped.append(row_id)
            elif row.position >= sampling.max_tokens:
                full.append(row_id)
        self._left = {*stopped, *full}
        self.drop((*stopped, *full))
        assert num_tokens <= self._room.max_step_tokens, "more tokens than a step may feed"
        return StepDone(
            step=step,
            rows=tuple(rows),
            token_ids=pack_ids(sampled),
            stopped=tuple(stopped),
            full=tuple(full),
            num_tokens=num_tokens,
            weights_version=self.weights.version,
        )
