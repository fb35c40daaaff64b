"""The engine as a Python object: embedded in the caller's trio program, or a server far away.

    async with callboard.open_engine(model="model.gguf") as engine:
        [answer] = await engine.generate(["The capital of France is"], max_tokens=8)

    async with callboard.connect("tcp://127.0.0.1:7500") as engine:
        async with engine.submit("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")

Both speak the same messages to the same actors; only the transport differs.
"""

import contextlib
import itertools
import secrets
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import trio

from callboard.actors.coordinator import FromClient, ToClient
from callboard.actors.session import HANDSHAKE_TIMEOUT_S, Connection, Joined, Left, Said
from callboard.actors.system import ActorSystem, open_system
from callboard.actors.transport import MemoryNetwork, Network, open_zmq_network
from callboard.messages.base import Call
from callboard.messages.control import (
    AbortReply,
    AbortRequests,
    ControlReply,
    GetStatus,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    StatusReply,
    Step,
    Stop,
    Suspend,
    Unpause,
    UpdateWeights,
    Verb,
    WeightsLevel,
)
from callboard.messages.errors import (
    ActorStopped,
    CallboardError,
    ConfigError,
    ControlRefused,
    DeadlineExceeded,
    DeviceLost,
    Failure,
    RequestError,
    UnknownRequest,
    Unreachable,
    WireError,
    WrongThread,
)
from callboard.messages.membership import Role, Welcome
from callboard.messages.requests import (
    Abort,
    Accepted,
    Delta,
    Refused,
    Submit,
    TokensOut,
)
from callboard.messages.sampling import SamplingParams
from callboard.supervision.app import ReplicaParts, journal_of, replica, root
from callboard.supervision.keys import load_client_keys
from callboard.supervision.record import Completion
from callboard.supervision.root import Address, FromOperator, ToOperator, reachable
from callboard.supervision.settings import Settings, load_settings
from callboard.supervision.stream import ChoicesStream, RequestStream
from callboard.supervision.submission import (
    PromptLike,
    as_params,
    as_prompt,
    check_n,
    check_prompts,
    checked,
    choices_of,
)

R = TypeVar("R")

CONTROL_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 600.0
RECONNECT_TIMEOUT_S = 60.0
STATUS_INTERVAL_S = 0.1

MAX_AT_ONCE = 4096
"""Requests that one call of `generate` has open: more than run at once, and few enough to queue."""

_WITHOUT_MEMORY = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)


class Engine:
    """A client of the tree; made by `open_engine` and `connect`."""

    def __init__(self, system: ActorSystem, network: Network, endpoint: str) -> None:
        self._system = system
        self._network = network
        self._numbers = itertools.count(1)
        self._prefix = secrets.token_hex(4)
        self._streams: dict[str, RequestStream] = {}
        self._thread = threading.get_ident()
        self._nursery: trio.Nursery
        self._control_turn = trio.Lock()
        self._control: Connection | None = None
        self._sessions = 0
        self._met = ""  # the session in which the server has heard of what is open
        self._gone = False  # whether the server has been away for longer than anybody waits
        self._closed = False
        self._connection = Connection(
            system,
            network,
            endpoint,
            role=Role.CLIENT,
            name=f"client-{self._prefix}",
            inbox=ToClient,
            outbox=FromClient,
            deliver=self._deliver,
        )

    # Requests.

    def submit(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> RequestStream:
        """Return the stream of a request, for `async with`; options are SamplingParams' fields.

        Raises RequestError for an option that does not exist or has the wrong type.
        """
        request = self._request(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            **options,
        )
        return RequestStream(self, request)

    def submit_choices(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        n: int,
        **options: Any,
    ) -> ChoicesStream:
        """Return the stream of `n` choices for one prompt, for `async with`; else as `submit`.

        Each is a request of its own (ID, ID#1, ID#2, …) that finds their prompt in the prefix
        cache. With a seed, choice i has seed + i, and is what a request with that seed gives.
        """
        return ChoicesStream(self, choices_of(self._request(prompt, params, **options), n))

    @overload
    async def generate(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        return_errors: Literal[False] = False,
        **options: Any,
    ) -> list[Completion]: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        return_errors: bool,
        **options: Any,
    ) -> list[Completion | CallboardError]: ...

    async def generate(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        return_errors: bool = False,
        **options: Any,
    ) -> list[Completion] | list[Completion | CallboardError]:
        """Run several prompts and return their completions in order; MAX_AT_ONCE at a time.

        With `n` there are so many of each prompt, one behind the other; see `submit_choices`.
        Raises the first error, and the other requests are aborted then. With `return_errors` the
        errors of requests come in the places of their completions, and the others go on.
        """
        self._check_thread()
        check_n(n)
        check_prompts(prompts)
        asked: list[RequestStream | CallboardError] = []
        for prompt in prompts:
            try:
                choices = choices_of(self._request(prompt, params, **options), n)
            except RequestError as error:
                if not return_errors:
                    raise
                asked += [error] * n
            else:
                asked += [RequestStream(self, one, choice) for choice, one in enumerate(choices)]
        return await _run_all(asked, return_errors=return_errors)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestStream:
        """Submit a request that is to run whether or not somebody reads it; options as of `submit`.

        It has been accepted when this returns; raises what it is refused for. What is not read is
        kept, and bounded by the request's max_tokens. It ends as any other, or by `aclose`.
        """
        return await self.submit(prompt, params, request_id=request_id, **options).__aenter__()

    def get_request(self, request_id: str) -> RequestStream:
        """Return the open request of that id. Raises UnknownRequest when there is none.

        One that has ended is forgotten here; whoever keeps its stream has it still.
        """
        try:
            return self._streams[request_id]
        except KeyError:
            raise UnknownRequest(f"no request {request_id!r} is open here") from None

    @property
    def num_open(self) -> int:
        """How many requests of this client have not ended."""
        return len(self._streams)

    def has_unfinished_requests(self) -> bool:
        """Return whether a request of this client has not ended."""
        return bool(self._streams)

    async def abort(self, request_id: str = "", *, all: bool = False) -> AbortReply:
        """Abort every client's request of that id, or all there are."""
        return await self._ask(AbortRequests(request_id=request_id, all=all), CONTROL_TIMEOUT_S)

    # Control. Each returns after its effect, and raises ControlRefused or DeadlineExceeded.

    async def pause(
        self,
        mode: PauseMode | str = PauseMode.KEEP,
        *,
        drain_s: float = 60.0,
        timeout: float = CONTROL_TIMEOUT_S,
    ) -> ControlReply:
        """Run no forward pass from the return on; mode drain takes up to `drain_s` longer."""
        verb = Pause(mode=PauseMode(mode), drain_s=drain_s)
        extra = drain_s if verb.mode is PauseMode.DRAIN else 0.0
        return await self.control(verb, timeout + extra)

    async def unpause(self, *, timeout: float = CONTROL_TIMEOUT_S) -> ControlReply:
        """Step again."""
        return await self.control(Unpause(), timeout)

    async def suspend(
        self,
        *,
        kv: KVLevel | str = KVLevel.DROP,
        weights: WeightsLevel | str = WeightsLevel.KEEP,
        timeout: float = CONTROL_TIMEOUT_S,
    ) -> ControlReply:
        """Pause and free device memory; the reply has the bytes the system got back."""
        verb = Suspend(kv=KVLevel(kv), weights=WeightsLevel(weights))
        return await self.control(verb, timeout)

    async def resume(self, *, timeout: float = CONTROL_TIMEOUT_S) -> ControlReply:
        """Take the memory back and return to the state SUSPEND found."""
        return await self.control(Resume(), timeout)

    async def update_weights(
        self,
        source: str,
        *,
        version: int | None = None,
        keep_kv: bool = False,
        timeout: float = UPDATE_TIMEOUT_S,
    ) -> ControlReply:
        """Compute with other weights from now on, in all replicas, or in none if one cannot.

        The engine must be paused or suspended; where it has freed its weights it reads these at
        `resume`. `source` is named as the servers see it, and must be of the shape of the present
        model; its tokenizer is not read. `version` is above the present one, by default one more;
        each token is told with that of the weights that made it. Repeating an update with its
        version is harmless. Running requests go on behind their tokens, and all of these are
        computed again; with `keep_kv` the old weights' keys and values stay.

        Raises WeightsError, naming replica, file and tensor, where the weights cannot be used: then
        the old ones still are. Raises DeadlineExceeded where some part has not said that it has
        taken them: then repeat it.
        """
        verb = UpdateWeights(source=source, version=version or 0, keep_kv=keep_kv)
        return await self.control(verb, timeout)

    async def stop(
        self, *, drain_s: float = 0.0, timeout: float = CONTROL_TIMEOUT_S
    ) -> ControlReply:
        """Give open requests `drain_s` seconds, end the rest, and end the engine."""
        return await self.control(Stop(drain_s=drain_s), timeout + drain_s)

    async def step(self, count: int = 1, *, timeout: float = CONTROL_TIMEOUT_S) -> ControlReply:
        """Run so many forward passes in a paused engine; it is paused again on return.

        The reply has the number of `steps` that were run, fewer where there was nothing left to
        run, and of `requests` still open. What they produced comes on the requests' streams. Raises
        ControlRefused when the engine is not paused, or is suspended.
        """
        return await self.control(Step(count=count), timeout)

    async def reset(self, *, timeout: float = CONTROL_TIMEOUT_S) -> int:
        """End every open request and forget the prefix cache; returns how many requests there were.

        All requests of all clients are aborted; ours have their terminal delta when this returns.
        Then the KV cache is freed and allocated anew, empty, and the tree is running or paused as
        before. What is submitted meanwhile is kept. Raises ControlRefused while suspended.
        """
        deadline = trio.current_time() + timeout
        state = (await self.status(timeout=timeout)).state
        if state not in (State.RUNNING, State.PAUSED):
            resume = ": resume first" if state in _WITHOUT_MEMORY else ""
            raise ControlRefused(f"reset: the tree is {state}{resume}")
        streams = list(self._streams.values())
        aborted = await self._ask(AbortRequests(all=True), deadline - trio.current_time())
        with trio.move_on_at(deadline):
            for stream in streams:
                await stream.wait_ended()
        if not all(stream.has_ended for stream in streams):
            raise DeadlineExceeded(f"reset: some requests have not ended in {timeout:g} s")
        for verb in (Suspend(kv=KVLevel.DROP), Resume()):
            await self.control(verb, deadline - trio.current_time())
        return aborted.aborted

    async def status(self, *, timeout: float = CONTROL_TIMEOUT_S) -> StatusReply:
        """Return the state of the whole and the tree."""
        return await self._ask(GetStatus(), timeout)

    async def ask_tree(self, verb: Verb, timeout: float) -> ControlReply:
        """Send a verb and return the answer, be it that it was refused or that parts were late."""
        return await self._ask(verb, timeout)

    async def control(self, verb: Verb, timeout: float) -> ControlReply:
        """Send a verb. Raises ControlRefused, or DeadlineExceeded naming who did not answer.

        What it is refused for is a WeightsError where that is what keeps a part from obeying.
        """
        reply = await self.ask_tree(verb, timeout)
        if reply.failure is not None:
            raise reply.failure.error()
        if reply.refused:
            raise ControlRefused(f"{reply.verb}: {reply.refused}")
        if reply.late:
            raise DeadlineExceeded(f"{reply.verb}: no answer in time from {', '.join(reply.late)}")
        return reply

    async def wait_for(self, state: State, *, timeout: float) -> StatusReply:
        """Wait until the tree is in a state. Raises DeadlineExceeded with the last one seen."""
        seen = "unknown"
        with trio.move_on_after(timeout):
            while True:
                status = await self.status(timeout=timeout)
                if status.state is state:
                    return status
                seen = status.state
                await trio.sleep(STATUS_INTERVAL_S)
        raise DeadlineExceeded(f"not {state} within {timeout:.3g} s, but {seen}")

    def _request(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Submit:
        number = next(self._numbers)
        submit = Submit(
            request_id=f"{self._prefix}-{number}" if request_id is None else request_id,
            prompt=as_prompt(prompt),
            params=as_params(params, options),
            priority=priority,
            timeout_s=timeout_s,
            number=number,
        )
        return checked(submit)

    # The connection.

    async def _run(self, nursery: trio.Nursery, timeout: float) -> Welcome:
        self._nursery = nursery
        nursery.start_soon(self._read)
        return await self._connection.wait_welcome(timeout)

    async def _read(self) -> None:
        try:
            await self._connection.run()
        finally:
            # Cancelled with its user, it must not leave streams waiting for their end.
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._end_streams(Failure(code="ActorStopped", message="the engine was closed"))
        self._connection.close()
        self._drop_control()

    def _register(self, stream: RequestStream) -> None:
        """Let a stream hear what is said to its id. Raises RequestError when another does."""
        if stream.request_id in self._streams:
            raise RequestError(
                f"the request id {stream.request_id} is in use",
                field="request_id",
                allowed="a new id",
            )
        self._streams[stream.request_id] = stream

    def _knows(self, stream: RequestStream) -> bool:
        return self._streams.get(stream.request_id) is stream

    def _forget(self, stream: RequestStream) -> None:
        if self._knows(stream):
            del self._streams[stream.request_id]

    def _end_streams(self, failure: Failure) -> None:
        for stream in list(self._streams.values()):
            stream.take_refused(failure)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise WrongThread(
                "the engine belongs to the thread in which it was opened; from another one, call "
                "trio.from_thread.run with that thread's trio token"
            )

    def _check_open(self) -> None:
        self._check_thread()
        if self._closed:
            raise ActorStopped("the engine was closed")

    async def _open(self, stream: RequestStream, submit: Submit) -> None:
        """Submit a request. While the server is away for a moment it waits here for its return.

        Raises Unreachable when the server has been given up.
        """
        while True:
            self._check_open()
            met = self._met
            try:
                await self._send(submit)
            except Unreachable:
                if self._gone:
                    raise
                if self._met != met:
                    continue  # it has come back, and heard of what was open then
            stream.told = True
            return

    async def _send(self, message: Submit | Abort) -> None:
        """Send within the session whose server knows what is open here. Raises Unreachable.

        In one that has just begun it would be said before `_meet` says all that is open, and twice.
        """
        self._check_open()
        if self._connection.session != self._met:
            raise Unreachable("the server does not know us yet")
        await self._connection.send(message)

    async def _abort(self, request_id: str) -> None:
        """Tell the server to end a request, in whatever session it is open. Raises Unreachable."""
        while True:
            met = self._met
            try:
                await self._send(Abort(request_id=request_id))
                return
            except Unreachable:
                if self._met == met:
                    raise

    async def _ask(self, call: Call[R], timeout: float) -> R:
        self._check_open()
        deadline = trio.current_time() + timeout
        control = self._control
        # While the connection is made verbs stand in line for it, and none passes them.
        if control is None or control.welcome is None or self._control_turn.locked():
            control = None
            with trio.move_on_at(deadline):  # each wait in there may last for the whole of it
                control = await self._connect_control(timeout)
        if control is None:
            if self._connection.present and timeout < HANDSHAKE_TIMEOUT_S:
                raise DeadlineExceeded(f"no answer to {type(call).__name__} in {timeout:g} s")
            raise Unreachable(f"nobody answers at {self._connection.endpoint} ({timeout:g} s)")
        return await control.ask(call, timeout=deadline - trio.current_time())

    async def _connect_control(self, timeout: float) -> Connection:
        """Return the connection for verbs, made when it is first needed.

        Where the server is another by the time that it answers, one is made to that.
        """
        async with self._control_turn:
            while True:
                control = self._control or await self._open_control(timeout)
                try:
                    if control.welcome is None:
                        await control.wait_welcome(timeout)
                    return control
                except ActorStopped:
                    if self._control is control:
                        raise

    async def _open_control(self, timeout: float) -> Connection:
        welcome = await self._connection.wait_welcome(timeout)
        control = self._control = Connection(
            self._system,
            self._network,
            self._control_endpoint(welcome),
            role=Role.OPERATOR,
            name=f"operator-{self._prefix}",
            inbox=ToOperator,
            outbox=FromOperator,
            deliver=_ignore,
        )
        self._nursery.start_soon(control.run)
        return control

    def _control_endpoint(self, welcome: Welcome) -> str:
        return reachable(welcome.control_endpoint, beside=self._connection.endpoint)

    def _drop_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    async def _deliver(self, event: Said | Joined | Left) -> None:
        match event:
            case Said(message=TokensOut(deltas=deltas)):
                for delta in deltas:
                    self._take(delta)
            case Said(message=Accepted() as accepted):
                if (stream := self._streams.get(accepted.request_id)) is not None:
                    stream.take_accepted(accepted)
            case Said(message=Refused() as refused):
                if (stream := self._streams.get(refused.request_id)) is not None:
                    stream.take_refused(refused.failure)
            case Joined(hello=Welcome() as welcome):
                self._meet(welcome)
            case Left(reason=reason, for_good=True):
                self._give_up(reason)
            case Left(reason=reason):
                self._nursery.start_soon(self._give_up_later, reason, self._sessions)

    def _take(self, delta: Delta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return
        try:
            stream.take(delta)
        except WireError:
            # It has ended here over nonsense, and holds something there.
            with contextlib.suppress(Unreachable):
                self._connection.send_nowait(Abort(request_id=delta.request_id))

    def _meet(self, welcome: Welcome) -> None:
        """A server that knows nothing of us: tell it what is open, and go on behind it."""
        self._sessions += 1
        self._gone = False
        if welcome.session != self._connection.session:
            return  # it is over already; where there is another, that will be met, too
        self._met = welcome.session
        if self._control is not None and self._control.endpoint != self._control_endpoint(welcome):
            self._drop_control()
        # Where it is gone again, it comes back with another session, or is given up.
        with contextlib.suppress(Unreachable):
            for stream in [stream for stream in self._streams.values() if stream.told]:
                # Not `send`: credit comes through the very task that calls this.
                self._connection.send_nowait(stream.again())

    async def _give_up_later(self, reason: str, session: int) -> None:
        """End all streams when the server does not come back in time."""
        await trio.sleep(RECONNECT_TIMEOUT_S)
        if self._sessions == session:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._gone = True
        self._end_streams(Failure(code="Unreachable", message=f"the server is gone: {reason}"))


@asynccontextmanager
async def open_engine(
    settings: Settings | None = None, *, parts: ReplicaParts | None = None, **overrides: Any
) -> AsyncGenerator[Engine]:
    """Run the whole tree inside the caller's trio program, without processes or sockets.

    Overrides are fields of `Settings`, e.g. `model=`, `kv_cache_gb=`. `parts` puts scripted parts
    in the place of a model. Raises ConfigError, ModelError or StartFailed when it cannot start.
    """
    if settings is not None and overrides:
        raise ConfigError("give open_engine a Settings or its fields, not both")
    settings = settings or load_settings(None, **overrides)
    if settings.replicas == 0:
        raise ConfigError("replicas is 0, and nobody can join an embedded engine")
    if parts is None:
        from callboard.supervision.model import replica_parts  # it imports torch

        parts = await trio.to_thread.run_sync(replica_parts, settings)
    made_of = parts
    network = MemoryNetwork()
    address = Address("memory://coordinator")
    async with (
        _plain_errors(3 if settings.journal else 2),
        journal_of(settings, "engine") as journal,
        open_system(journal) as system,
        trio.open_nursery() as nursery,
    ):
        top = root(
            system,
            network,
            settings,
            lambda name: replica(
                system, network, name, made_of, settings, coordinator=address.endpoint
            ),
            address=address,
            control_endpoint="memory://control",
            escalates=(DeviceLost,),
        )
        cell = system.cell("root")

        async def run_root() -> None:
            exited = await cell.run(lambda: top)
            if top.start_failure is not None:
                raise top.start_failure
            if exited.failure is not None:
                raise exited.failure.error()

        nursery.start_soon(run_root)
        await top.started.wait()
        engine = Engine(system, network, address.endpoint)
        try:
            await engine._run(nursery, HANDSHAKE_TIMEOUT_S)
            yield engine
        finally:
            engine._close()
            with trio.CancelScope(shield=True):
                await cell.stop(timeout=30.0)
            nursery.cancel_scope.cancel("the engine was closed")


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    timeout: float = HANDSHAKE_TIMEOUT_S,
    keys: Path | str | None = None,
) -> AsyncGenerator[Engine]:
    """Connect to a running server, with the key file of a client or operator where it wants one.

    Raises Unreachable or why the server does not welcome us: ProtocolMismatch, AccessDenied,
    TooManyPeers; and ConfigError for a key file that is wrong.
    """
    client_keys = None if keys is None else load_client_keys(Path(keys))
    async with (
        _plain_errors(2),
        open_zmq_network(client_keys=client_keys) as network,
        open_system() as system,
        trio.open_nursery() as nursery,
    ):
        engine = Engine(system, network, endpoint)
        try:
            await engine._run(nursery, timeout)
            yield engine
        finally:
            engine._close()
            nursery.cancel_scope.cancel("the connection was closed")


async def _run_all(
    asked: Sequence[RequestStream | CallboardError], *, return_errors: bool
) -> list[Any]:
    """Run requests, begun in order; returns what came of each, errors where they are wanted."""
    ended: list[RequestStream | Completion | CallboardError] = list(asked)
    failed: list[CallboardError] = []
    room = trio.Semaphore(MAX_AT_ONCE)

    async def run(place: int, stream: RequestStream) -> None:
        try:
            async with stream:
                ended[place] = await stream.completion()
        except CallboardError as error:
            ended[place] = error
            if not return_errors:
                failed.append(error)
                nursery.cancel_scope.cancel("another request failed")
        finally:
            room.release()

    async with trio.open_nursery() as nursery:
        for place, stream in enumerate(asked):
            if isinstance(stream, RequestStream):
                await room.acquire()
                nursery.start_soon(run, place, stream)
    if failed:
        raise failed[0]
    return ended


async def _ignore(event: Said | Joined | Left) -> None:
    """Nothing but answers comes over the operators' connection."""


@asynccontextmanager
async def _plain_errors(num_nurseries: int) -> AsyncGenerator[None]:
    """Raise as it was what our own nurseries put into groups: they are no affair of the caller."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        for _ in range(num_nurseries):
            if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # raising it here made the group its context
