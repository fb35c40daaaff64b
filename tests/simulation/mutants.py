"""Bugs on purpose, each put into the running product: the simulation has to find every one.

A mutant takes the place of one method or property for the time of a run. `seed` is one that finds
it; when the product or the simulation has changed, others are tried, and `make mutants` says which.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import trio

from callboard.actors import coordinator as coordinator_module
from callboard.actors.actor import Actor
from callboard.actors.clients import Client
from callboard.actors.coordinator import Coordinator
from callboard.actors.executor import Executor
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import Request
from callboard.actors.policy import SchedulingPolicy
from callboard.actors.routing import OpenRequest, Routing
from callboard.actors.scheduler import Scheduler
from callboard.actors.session import Left, _Flow, _Speaker
from callboard.messages.control import ControlReply, Pause, Suspend, Unpause, Verb
from callboard.messages.requests import (
    Accepted,
    Delta,
    FinishReason,
    Submit,
)
from callboard.messages.steps import DropRows, RunStep
from callboard.supervision import replica as replica_module
from callboard.supervision.engine import Engine
from callboard.supervision.lifecycle import Desired
from callboard.supervision.process import ReplicaProcess
from callboard.supervision.replica import _Replica
from callboard.supervision.root import Root
from callboard.supervision.stream import RequestStream
from callboard.supervision.supervisor import Child, Supervisor


class Mutant(msgspec.Struct, frozen=True):
    """A bug: its name, what is wrong, a seed that finds it, and how to put it in."""

    name: str
    what: str
    seed: int
    apply: Callable[[], Any]


MUTANTS: dict[str, Mutant] = {}


Replacement = tuple[Any, str, object]
"""An owner, the name of something it has, and what takes its place."""

Mutation = Callable[[], Replacement] | Callable[[], list[Replacement]]


def mutant(seed: int) -> Callable[[Mutation], Mutation]:
    """Enter a function that says what takes the place of what; its docstring is the bug."""

    def enter(function: Mutation) -> Mutation:
        @contextmanager
        def apply() -> Iterator[None]:
            given = function()
            with ExitStack() as stack:
                for owner, name, replacement in given if isinstance(given, list) else [given]:
                    stack.enter_context(patch.object(owner, name, replacement))
                yield

        name = function.__name__
        MUTANTS[name] = Mutant(name, function.__doc__ or "", seed, apply)
        return function

    return enter


# The coordinator and its ledger.


@mutant(seed=17)
def forgets_a_delivered_token() -> Replacement:
    """A request that is given to another replica is one delivered token short."""
    original = OpenRequest.for_replica

    def for_replica(request: OpenRequest, now: float) -> Submit:
        submit = original(request, now)
        return msgspec.structs.replace(submit, delivered=submit.delivered[:-4])

    return OpenRequest, "for_replica", for_replica


@mutant(seed=21)
def forgets_what_a_client_has() -> Replacement:
    """A client that says again what it has open gets its tokens from the first on again."""
    original = RequestStream.again

    def again(stream: RequestStream) -> Submit:
        return msgspec.structs.replace(original(stream), delivered=b"")

    return RequestStream, "again", again


@mutant(seed=17)
def draws_another_seed() -> Replacement:
    """A request goes on elsewhere with a seed of its own."""

    def accept(routing: Routing, request: OpenRequest, accepted: Accepted) -> Accepted | None:
        if request.accepted:
            return None
        request.accepted = True
        return msgspec.structs.replace(accepted, request_id=request.client_id)

    return Routing, "accept", accept


@mutant(seed=13)
def keeps_requests_of_clients_that_left() -> Replacement:
    """Nobody ends the requests of a client that is gone."""

    def forget_client(coordinator: Coordinator, client: Client) -> None:
        coordinator._clients.forget(client)

    return Coordinator, "_forget_client", forget_client


@mutant(seed=0)
def ends_a_request_twice() -> Replacement:
    """A request that the coordinator ends itself has two terminal deltas."""
    original = Coordinator._end

    def end(
        coordinator: Coordinator, requests: list[OpenRequest], reason: FinishReason, *rest: Any
    ) -> None:
        original(coordinator, requests, reason, *rest)
        for request in requests:
            client = coordinator._client_of(request)
            coordinator._tell(client, [(request, request.terminal(reason))])

    return Coordinator, "_end", end


@mutant(seed=0)
def does_not_give_out_again() -> Replacement:
    """What a lost replica ran is forgotten with it."""
    original = Routing.replica_left

    def replica_left(routing: Routing, replica: bytes, **options: Any) -> Any:
        again, hopeless = original(routing, replica, **options)
        for request in again:
            routing._unassigned.pop(request.number, None)
        return again, hopeless

    return Routing, "replica_left", replica_left


@mutant(seed=25)
def takes_any_request_of_an_open_id_for_the_open_one() -> Replacement:
    """Another request under an open id is not refused."""
    return coordinator_module, "repeats", lambda submit, ended: True


@mutant(seed=487)
def takes_a_request_for_the_one_before_it() -> Replacement:
    """The same request under an id that is used again ends as the earlier one did."""
    original = Engine._request

    def request(engine: Engine, *args: Any, **options: Any) -> Submit:
        return msgspec.structs.replace(original(engine, *args, **options), number=0)

    return Engine, "_request", request


# Scheduling.


@mutant(seed=0)
def keeps_the_blocks_of_aborted_rows() -> Replacement:
    """A row that is taken off the device does not give its blocks back."""
    original = Scheduler._release

    async def release(scheduler: Scheduler, rows: list[int], *, dropped: bool) -> None:
        if dropped and rows:
            await scheduler._executor.tell(DropRows(rows=tuple(rows)))
        else:
            await original(scheduler, rows, dropped=dropped)

    return Scheduler, "_release", release


@mutant(seed=3)
def pauses_with_a_step_under_way() -> Replacement:
    """PAUSE is acknowledged though a forward pass is running."""
    return Scheduler, "_is_busy", property(lambda scheduler: False)


@mutant(seed=5)
def loses_the_order_of_the_queue() -> Replacement:
    """A request that is taken off the device comes back as the youngest."""
    original = SchedulingPolicy._requeue

    def requeue(policy: SchedulingPolicy, request: Request) -> int:
        row = original(policy, request)
        policy._waiting.remove(request)
        policy._waiting.append(request)
        return row

    return SchedulingPolicy, "_requeue", requeue


@mutant(seed=6)
def never_cancels_deadlines() -> Replacement:
    """The timer of a request's deadline outlives the request."""
    return Scheduler, "_cancel_timer", lambda scheduler, request_id: None


@mutant(seed=338)
def evicts_before_the_token_has_come() -> Replacement:
    """A row that waits is evicted while its last token is still under way, and again, for ever."""

    def evict_beyond_limit(policy: SchedulingPolicy) -> list[int]:
        evicted: list[int] = []
        while policy._paused_limit is not None and policy._starved:
            if sum(request.blocks for request in policy._starved) <= policy._paused_limit:
                break
            newest = max(policy._starved, key=lambda request: request.order)
            evicted.append(policy._requeue(newest))
        return evicted

    return SchedulingPolicy, "_evict_beyond_limit", evict_beyond_limit


@mutant(seed=0)
def drops_the_output_of_evicted_rows() -> Replacement:
    """What a row had generated is lost when it is taken off the device."""
    original = Request.checkpoint

    def checkpoint(request: Request) -> None:
        original(request)
        request.output = array("i")

    return Request, "checkpoint", checkpoint


# Blocks.


@mutant(seed=0)
def forgets_a_release() -> Replacement:
    """Of several rows that give their blocks back at once, the last one keeps them."""
    original = KVAllocator._release

    def release(allocator: KVAllocator, rows: tuple[int, ...]) -> None:
        original(allocator, rows[:-1] if len(rows) > 1 else rows)

    return KVAllocator, "_release", release


@mutant(seed=2)
def keeps_its_promises_for_ever() -> Replacement:
    """Who waits for a prefix waits also when nobody is going to compute it."""
    return KVAllocator, "_keep_promises", lambda allocator, row, hashes: None


@mutant(seed=22)
def keeps_the_cache_of_dropped_memory() -> Replacement:
    """The prefix cache is believed though its memory was given back."""

    async def on_suspend(allocator: KVAllocator, verb: Suspend) -> Any:
        return allocator.ack(verb)

    return KVAllocator, "on_suspend", on_suspend


# The device.


@mutant(seed=46)
def runs_steps_of_an_earlier_life() -> Replacement:
    """A step that was planned for a device that is gone runs on the next one."""
    original = Executor.receive

    async def receive(executor: Executor, message: Any) -> None:
        if isinstance(message, RunStep):
            message = msgspec.structs.replace(message, life=executor.cell.lives)
        await original(executor, message)

    return Executor, "receive", receive


@mutant(seed=4)
def keeps_the_memory_when_suspended() -> Replacement:
    """SUSPEND is acknowledged, and nothing was freed."""

    async def on_suspend(executor: Executor, verb: Suspend) -> Any:
        return executor.ack(verb)

    return Executor, "on_suspend", on_suspend


@mutant(seed=89)
def takes_memory_when_restarted_suspended() -> Replacement:
    """A device that is restarted while the tree is suspended allocates all the same."""
    original = Executor.on_start

    async def on_start(executor: Executor) -> None:
        executor.cell.suspended = None
        await original(executor)

    return Executor, "on_start", on_start


# Verbs and supervision.


@mutant(seed=58)
def forgets_to_unpause_the_restarted() -> list[Replacement]:
    """A part that is being restarted while the tree is unpaused stays paused."""
    ask, path = Supervisor._ask, Desired.path

    async def ask_who_is_up(
        supervisor: Supervisor, child: Child, verb: Verb, deadline: float
    ) -> ControlReply:
        if isinstance(verb, Unpause) and not child.up.is_set():
            return ControlReply(verb="unpause", state=child.cell.state)
        return await ask(supervisor, child, verb, deadline)

    def path_to_less(desired: Desired, born: Desired) -> tuple[Verb, ...]:
        return tuple(verb for verb in path(desired, born) if not isinstance(verb, Unpause))

    return [(Supervisor, "_ask", ask_who_is_up), (Desired, "path", path_to_less)]


@mutant(seed=702)
def restarts_running_what_is_paused() -> Replacement:
    """A part that is restarted while the tree is paused runs."""
    original = Desired.after

    def after(desired: Desired, verb: Any) -> Desired:
        return desired if isinstance(verb, Pause) else original(desired, verb)

    return Desired, "after", after


@mutant(seed=113)
def repairs_nothing_before_all_are_up() -> Replacement:
    """A child that fails while the next ones start, which may rely on it, has to wait for them."""
    original = Supervisor.start_children

    async def start_children(supervisor: Supervisor) -> None:
        repair = supervisor._repair
        supervisor._repair = trio.sleep_forever  # type: ignore[method-assign]
        await original(supervisor)
        supervisor.spawn(repair)

    return Supervisor, "start_children", start_children


@mutant(seed=0)
def loses_its_turn() -> Replacement:
    """A verb that is refused keeps the others waiting."""
    original = Root._do

    async def do(root: Root, verb: Any, deadline: float) -> Any:
        reply = await original(root, verb, deadline)
        if reply.refused:
            root._turn = type(root._turn)()
            root._turn.acquire_nowait()
            root._turn.release = lambda: None  # type: ignore[method-assign]
        return reply

    return Root, "_do", do


@mutant(seed=27)
def lets_verbs_overtake_each_other() -> list[Replacement]:
    """Of verbs that come together a later one may be obeyed before an earlier one."""

    async def spawn(actor: Actor[Any], task: Callable[..., Any], *args: object) -> None:
        actor.spawn(task, *args)

    async def start(nursery: trio.Nursery, task: Callable[..., Any], *args: object) -> None:
        nursery.start_soon(task, *args)

    return [(Actor, "spawn_in_order", spawn), (replica_module, "start_in_order", start)]


@mutant(seed=28)
def goes_deaf_when_an_earlier_line_ends() -> Replacement:
    """The end of a line that was replaced long ago counts as that of the present one."""
    original = ReplicaProcess._deliver

    async def deliver(process: ReplicaProcess, event: Any) -> None:
        if isinstance(event, Left):
            event = msgspec.structs.replace(event, peer=process._peer)
        await original(process, event)

    return ReplicaProcess, "_deliver", deliver


@mutant(seed=1)
def outlives_its_root() -> Replacement:
    """A replica's process does not end with its parent."""

    async def end_with_parent(replica: _Replica) -> None:
        await trio.sleep_forever()

    return _Replica, "_end_with_parent", end_with_parent


@mutant(seed=1)
def speaks_to_the_root_that_was() -> Replacement:
    """An operator's engine goes on to send verbs to where the server before this one listened."""
    return Engine, "_control_endpoint", lambda engine, welcome: "sim://control"


# Sessions.


@mutant(seed=0)
def loses_frames_without_credit() -> Replacement:
    """What is said to a peer that is out of credit is not kept for it."""
    original = _Flow.post

    def post(flow: _Flow, frame: bytes) -> None:
        if not flow.blocked:
            original(flow, frame)

    return _Flow, "post", post


@mutant(seed=6)
def answers_nobody_when_a_session_ends() -> Replacement:
    """Questions to a peer that is gone are left to their deadlines; its end is not told."""
    original = _Speaker._tell

    def tell(speaker: _Speaker, event: Any, flow: Any = None) -> None:
        if not isinstance(event, Left):
            original(speaker, event, flow)

    return _Speaker, "_tell", tell


@mutant(seed=0)
def says_the_last_text_twice() -> Replacement:
    """The delta in which a request ends has its text twice."""
    original = Routing.deliver

    def deliver(routing: Routing, request: OpenRequest, delta: Delta) -> Delta:
        told = original(routing, request, delta)
        return msgspec.structs.replace(told, text=told.text * (2 if told.finish else 1))

    return Routing, "deliver", deliver
