"""The whole tree on one page. Read this first.

    root                        one_for_one     verbs arrive here
     ├─ metrics                                 adds up what the others report
     ├─ coordinator                             where clients and replicas meet
     ├─ replicas                one_for_one
     │   └─ replica-0, …        rest_for_one    in a process of its own, or in this one
     │       ├─ scheduler                       owns the requests
     │       ├─ device          one_for_all
     │       │   ├─ kv_allocator                owns the block ids
     │       │   └─ executor                    owns the device thread and its tensors
     │       ├─ tokenizer                       checks requests, text to ids
     │       └─ link                            the line to the coordinator
     └─ joined                  one_for_one     in a server: a child for each host that came
         └─ joined/NAME                         passes verbs on to
             └─ NAME            one_for_one     there: its replicas, NAME-0, …, as above

Children start in that order, so a link tells the coordinator of a replica that can run. Names are
paths (`replica-0/scheduler`), and a ref is good before, between and after the lives of its actor.
"""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from callboard.actors.actor import Actor
from callboard.actors.coordinator import Coordinator
from callboard.actors.executor import Executor, Runner
from callboard.actors.journal import Journal, open_journal
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.ledger import TextOut
from callboard.actors.link import Link
from callboard.actors.metrics import Metrics
from callboard.actors.placement import LeastLoaded, Placement, PrefixAware, RoundRobin
from callboard.actors.ref import LocalRef
from callboard.actors.scheduler import Scheduler
from callboard.actors.system import ActorSystem
from callboard.actors.tickets import Tickets
from callboard.actors.tokenizer import TextCodec, Tokenizer
from callboard.actors.transport import Network
from callboard.messages.errors import CallboardError, DeviceLost, StepStuck
from callboard.messages.sampling import SamplingParams
from callboard.supervision.joined import JoinedHosts
from callboard.supervision.root import JOINED, REPLICAS, Address, Root
from callboard.supervision.settings import Settings
from callboard.supervision.spec import ChildSpec, Intensity, Strategy
from callboard.supervision.supervisor import Supervisor
from callboard.version import __version__

SUPERVISOR_SHUTDOWN_S = 30.0


class ReplicaParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica needs besides actors; tests put scripts in its place."""

    make_runner: Callable[[], Runner]
    codec: TextCodec | None
    text_for: Callable[[SamplingParams], TextOut] | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_prompt_chars: int | None = None


def replica(
    system: ActorSystem,
    network: Network,
    name: str,
    parts: ReplicaParts,
    settings: Settings,
    *,
    coordinator: str,
    ticket: str = "",
    own_process: bool = False,
) -> Supervisor:
    """Return the supervisor of one replica; everything in it runs in this process.

    Where that is the replica's own, it ends with a device that only a new process can use again.
    Elsewhere a step that is stuck costs the thread that is in it.
    """
    beyond_repair = (DeviceLost, StepStuck) if own_process else (DeviceLost,)

    def ref(child: str) -> LocalRef[Any]:
        return LocalRef(system.cell(f"{name}/{child}"))

    def device() -> Actor[Any]:
        return Supervisor(
            system,
            [
                spec("kv_allocator", lambda: KVAllocator(ref("scheduler"))),
                spec(
                    "executor",
                    lambda: Executor(
                        parts.make_runner,
                        scheduler=ref("scheduler"),
                        allocator=ref("kv_allocator"),
                        step_timeout_s=settings.step_timeout_s or math.inf,
                    ),
                ),
            ],
            strategy=Strategy.ONE_FOR_ALL,
        )

    def spec(child: str, start: Callable[[], Actor[Any]], shutdown_s: float = 5.0) -> ChildSpec:
        return ChildSpec(
            name=f"{name}/{child}", start=start, shutdown_s=shutdown_s, escalates=beyond_repair
        )

    return Supervisor(
        system,
        [
            spec(
                "scheduler",
                lambda: scheduler(
                    ref,
                    settings,
                    text_for=parts.text_for,
                    eos_token_ids=parts.eos_token_ids,
                ),
            ),
            spec("device", device, SUPERVISOR_SHUTDOWN_S),
            spec(
                "tokenizer",
                lambda: Tokenizer(
                    parts.codec,
                    vocab_size=parts.vocab_size,
                    max_prompt_chars=parts.max_prompt_chars,
                    scheduler=ref("scheduler"),
                    out=ref("link"),
                ),
            ),
            spec(
                "link",
                lambda: Link(
                    system,
                    network,
                    coordinator,
                    replica=name,
                    tokenizer=ref("tokenizer"),
                    ticket=ticket,
                ),
            ),
        ],
        strategy=Strategy.REST_FOR_ONE,
    )


def scheduler(ref: Callable[[str], Any], settings: Settings, **options: Any) -> Scheduler:
    """Return a replica's scheduler; `ref` gives it its siblings by name."""
    limit = settings.paused_limit_blocks
    return Scheduler(
        allocator=ref("kv_allocator"),
        executor=ref("executor"),
        out=ref("link"),
        prefill_chunk_tokens=settings.prefill_chunk_tokens or None,
        prefix_caching=settings.prefix_caching,
        paused_limit=None if limit < 0 else limit,
        pipeline_depth=settings.pipeline_depth,
        **options,
    )


def root(
    system: ActorSystem,
    network: Network,
    settings: Settings,
    start_replica: Callable[[str], Actor[Any]],
    *,
    address: Address,
    control_endpoint: str,
    escalates: tuple[type[CallboardError], ...] = (),
    tickets: Tickets | None = None,
) -> Root:
    """Return the root of a tree whose replicas `start_replica` makes by name.

    `escalates` names the failures of a replica that another start of it cannot mend. With `tickets`
    only replicas that have one may register.
    """
    coordinator: LocalRef[Any] = LocalRef(system.cell("coordinator"))
    top: Root

    def listen() -> Actor[Any]:
        return Coordinator(
            system,
            network,
            address.endpoint,
            metrics=LocalRef(system.cell("metrics")),
            placement=_placement(settings),
            control_endpoint=lambda: top.control_endpoint,
            model=settings.model,
            bound=address.set,
            tickets=tickets,
        )

    def own_replicas() -> Actor[Any]:
        return replicas(system, settings, start_replica, "replica", escalates=escalates)

    children = [
        ChildSpec(name="metrics", start=Metrics),
        ChildSpec(name="coordinator", start=listen),
        ChildSpec(
            name=REPLICAS,
            start=own_replicas,
            shutdown_s=SUPERVISOR_SHUTDOWN_S,
            escalates=escalates,
        ),
    ]
    hosts: LocalRef[Any] = LocalRef(system.cell(JOINED))
    if tickets is not None:
        children.append(
            ChildSpec(
                name=JOINED,
                start=partial(JoinedHosts, system, settings, tickets, lambda: top.listener),
                shutdown_s=SUPERVISOR_SHUTDOWN_S,
            )
        )
    top = Root(
        system,
        children,
        network=network,
        control_endpoint=control_endpoint,
        address=address,
        model=settings.model,
        version=__version__,
        coordinator=coordinator,
        hosts=None if tickets is None else hosts,
    )
    return top


def replicas(
    system: ActorSystem,
    settings: Settings,
    start_replica: Callable[[str], Actor[Any]],
    name: str,
    *,
    escalates: tuple[type[CallboardError], ...] = (),
) -> Supervisor:
    """Return the supervisor of `replicas` replicas, which are called by a name and a number."""
    specs = [
        ChildSpec(
            name=one, start=_starter(start_replica, one), shutdown_s=25.0, escalates=escalates
        )
        for one in (f"{name}-{index}" for index in range(settings.replicas))
    ]
    intensity = Intensity(restarts=settings.max_restarts, period_s=settings.restart_period_s)
    return Supervisor(system, specs, intensity=intensity)


def journal_of(settings: Settings, process: str) -> AbstractAsyncContextManager[Journal | None]:
    """Open the journal of a process, if the settings want one."""
    folder = Path(settings.journal) if settings.journal else None
    return open_journal(folder, process, about=msgspec.msgpack.encode(settings))


def _placement(settings: Settings) -> Placement:
    if settings.routing == "round_robin":
        return RoundRobin()
    # Where replicas share no prefixes, it does not matter where they are.
    if settings.routing == "least_loaded" or not settings.prefix_caching:
        return LeastLoaded()
    return PrefixAware(weight=settings.prefix_weight, capacity=settings.max_rows)


def _starter(start_replica: Callable[[str], Actor[Any]], name: str) -> Callable[[], Actor[Any]]:
    return lambda: start_replica(name)
