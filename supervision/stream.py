"""The streams of requests as clients read them: of one request, or of several choices at once."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import trio

from callboard.messages.base import TokenIds
from callboard.messages.errors import CallboardError, Failure, RequestError, WireError
from callboard.messages.requests import Accepted, Delta, FinishReason, Submit
from callboard.supervision.record import Completion, RequestRecord

if TYPE_CHECKING:
    from callboard.supervision.engine import Engine

ABORT_TIMEOUT_S = 10.0


class _Arrivals:
    """Deltas nobody has read yet, each with the choice it is of."""

    def __init__(self) -> None:
        self._deltas: deque[tuple[int, Delta]] = deque()
        self._news = trio.Event()

    def put(self, choice: int, delta: Delta) -> None:
        """Add a delta, and wake whoever waits."""
        self._deltas.append((choice, delta))
        self.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._news.set()
        self._news = trio.Event()

    async def next(self, is_over: Callable[[], bool]) -> tuple[int, Delta] | None:
        """Return the next delta; None when there is none left and it is over."""
        while not self._deltas:
            if is_over():
                return None
            await self._news.wait()
        return self._deltas.popleft()


class RequestStream:
    """The deltas of one request as they come; `async for` ends after the one with a finish reason.

    `record` has what is known so far, read or not. Leaving the `async with` block early aborts the
    request; where there is no block, `aclose` does.
    """

    def __init__(
        self, engine: "Engine", submit: Submit, choice: int = 0, arrivals: _Arrivals | None = None
    ) -> None:
        self.request_id = submit.request_id
        self.choice = choice
        self.record = RequestRecord(submit.params, sent_at=trio.current_time())
        self.failure: Failure | None = None
        self.told = False  # whether it has been sent, so that a new server should hear of it
        self._engine = engine
        self._submit = submit
        self._arrivals = arrivals or _Arrivals()
        self._accepted = trio.Event()
        self._ended = trio.Event()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the engine reads it."""
        return self.record.prompt_token_ids

    @property
    def seed(self) -> int:
        """What its tokens are drawn with."""
        return self.record.seed

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None before it has."""
        return self.record.finish_reason

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended.is_set()

    async def __aenter__(self) -> "RequestStream":
        """Submit, and wait until the request is accepted. Raises what it is refused for."""
        await open_all([self])
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta. Raises RequestFailed when the engine could not go on."""
        self.check_thread()
        arrived = await self._arrivals.next(self._ended.is_set)
        if arrived is not None:
            return arrived[1]
        if self.failure is not None:
            raise self.failure.error()
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """Wait for the end and return the request whole, also what had been read before."""
        async for _ in self:
            pass
        return self.record.completion(self.request_id, self.choice)

    async def wait_ended(self) -> None:
        """Wait for the end, and read nothing."""
        await self._ended.wait()

    async def aclose(self) -> None:
        """Abort if the request has not ended, and wait until what it holds is free."""
        if not self._engine._knows(self):
            return
        if not self.told:
            self._engine._forget(self)  # it waited to be sent, so nobody holds anything for it
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + ABORT_TIMEOUT_S):
            try:
                await self._engine._abort(self.request_id)
                await self._ended.wait()
            except CallboardError:
                pass  # there is nobody left to hold anything for it
        self._engine._forget(self)

    # What the engine and its reading task call.

    def check_thread(self) -> None:
        """Raise WrongThread where the engine is not at home."""
        self._engine._check_thread()

    def check_new(self) -> None:
        """Raise RequestError where it was submitted before."""
        if self.told:
            raise RequestError(
                f"the stream of {self.request_id} was entered before",
                field="request_id",
                allowed="a stream that was not used yet",
            )

    async def send(self) -> None:
        """Submit the request. Raises RequestError when another of the same id is open."""
        self._engine._register(self)
        self.record.sent_at = trio.current_time()
        await self._engine._open(self, self._submit)

    async def wait_accepted(self) -> None:
        """Wait for the answer to that. Raises what the request is refused for."""
        await self._accepted.wait()
        if self.failure is not None:
            raise self.failure.error()

    def take_accepted(self, accepted: Accepted) -> None:
        """Note the acceptance."""
        self.record.accept(accepted.prompt_token_ids, accepted.seed)
        params = msgspec.structs.replace(self._submit.params, seed=accepted.seed)
        self._submit = msgspec.structs.replace(self._submit, params=params)
        self._accepted.set()

    def take_refused(self, failure: Failure) -> None:
        """End without a terminal delta: refused, or nobody is there to send one."""
        self.failure = failure
        self._end()

    def take(self, delta: Delta) -> None:
        """Merge a delta, and queue it for the reader if it is news. Raises WireError for nonsense.

        That is the end of the request, too.
        """
        if self.has_ended:
            return
        try:
            is_news = self.record.take(delta, trio.current_time())
        except WireError as error:
            self.take_refused(Failure(code="RequestFailed", message=str(error)))
            raise
        if is_news:
            self._arrivals.put(self.choice, delta)
        if delta.finish is not None:
            self.failure = delta.failure if delta.finish is FinishReason.ERROR else None
            self._end()

    def again(self) -> Submit:
        """Return the request as a server that knows nothing of it should get it."""
        delivered: TokenIds = self.record.packed_ids
        return msgspec.structs.replace(self._submit, delivered=delivered)

    def _end(self) -> None:
        self._engine._forget(self)
        self._accepted.set()
        self._ended.set()
        self._arrivals.wake()


class ChoicesStream:
    """The deltas of several choices for one prompt, each with its choice, as they come.

    Leaving the `async with` block early aborts all that have not ended.
    """

    def __init__(self, engine: "Engine", submits: Sequence[Submit]) -> None:
        self._arrivals = _Arrivals()
        self._streams = [
            RequestStream(engine, submit, choice, self._arrivals)
            for choice, submit in enumerate(submits)
        ]

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests, one a choice."""
        return [stream.request_id for stream in self._streams]

    @property
    def records(self) -> list[RequestRecord]:
        """What is known of each choice so far."""
        return [stream.record for stream in self._streams]

    async def __aenter__(self) -> "ChoicesStream":
        """Submit all, and wait until they are accepted. Raises what the first is refused for."""
        await open_all(self._streams)
        return self

    async def __aexit__(self, *error: object) -> None:
        await close_all(self._streams)

    def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        """Return the next delta of any choice, and of which. Raises what one of them failed of."""
        arrived = await self._arrivals.next(self._is_over)
        if arrived is not None:
            return arrived
        for stream in self._streams:
            if stream.failure is not None:
                raise stream.failure.error()
        raise StopAsyncIteration

    async def completions(self) -> list[Completion]:
        """Wait for all to end and return them in order of choice, whole."""
        async for _ in self:
            pass
        return [
            stream.record.completion(stream.request_id, stream.choice) for stream in self._streams
        ]

    def _is_over(self) -> bool:
        has_failed = any(stream.failure is not None for stream in self._streams)
        return has_failed or all(stream.has_ended for stream in self._streams)


async def open_all(streams: Sequence[RequestStream]) -> None:
    """Submit requests, and wait until all are accepted; if one is not, all are aborted.

    Raises what the first of them is refused for. One that was submitted before is not aborted.
    """
    for stream in streams:
        stream.check_thread()
        stream.check_new()
    try:
        for stream in streams:
            await stream.send()
        for stream in streams:
            await stream.wait_accepted()
    except BaseException:
        await close_all(streams)
        raise


async def close_all(streams: Sequence[RequestStream]) -> None:
    """Abort what has not ended, and wait until what they hold is free."""
    with trio.CancelScope(shield=True):  # each has a deadline of its own
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(stream.aclose)
