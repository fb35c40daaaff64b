"""What happens in one run, drawn from its seed before it begins: a page one can read.

Times are in simulated seconds since the tree came up.
"""

import random

import msgspec

from callboard.messages.control import (
    AbortRequests,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    Step,
    Suspend,
    Unpause,
    Verb,
    WeightsLevel,
)
from callboard.messages.sampling import SamplingParams
from tests.simulation.determinism import stream
from tests.simulation.network import FAR_AWAY, NO_DELAY, SAME_ROOM

SECOND = "second-operator"
"""The name of the process of the operator who is not alone."""

VOCABULARY = 200
EOS = 199


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What fits on a device."""

    block_tokens: int
    num_blocks: int
    max_rows: int
    max_step_tokens: int
    max_model_len: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request a client makes, and what becomes of its interest in it."""

    at: float
    prompt: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    timeout_s: float | None = None
    leave_after_tokens: int | None = None
    cancel_after_s: float | None = None
    request_id: str | None = None  # None: one of the engine's
    followers: tuple["Ask", ...] = ()  # under its id, each `at` seconds behind the end before it
    repeated_after_s: float | None = None  # submitted again while it is open
    reset_after_s: float | None = None  # when its client's connection is reset once it was made
    clashes_after_s: float | None = None  # another is submitted under its id while it is open


class ClientPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A client process: its requests, and whether it goes before they have ended."""

    asks: tuple[Ask, ...]
    closes_at: float | None = None
    dies_at: float | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A verb of the operator, and how long it may take."""

    at: float
    verb: Verb | AbortRequests
    timeout_s: float


class Crash(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An actor fails before or behind its message number `message`, or at a time."""

    name: str
    message: int = 0
    behind: bool = False
    at: float | None = None


class DeviceFault(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A forward pass of a replica does not go well."""

    replica: int
    step: int
    kind: str  # error, error_behind, out_of_memory, hang, nan; load: it is that of weights
    killed_after_s: float = 0.0  # how long a hanging one is watched
    for_good: bool = False  # from then on no load goes well, also when other faults are over


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica's process is killed; where it has none, its supervisor fails."""

    replica: int
    at: float


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connections between two processes are reset."""

    one: str
    other: str
    at: float


class Partition(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Two processes cannot reach each other for some time."""

    one: str
    other: str
    at: float
    seconds: float
    one_way: bool


class RootKill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The root's process is killed, and another root begins at its address some time later."""

    at: float
    back_after_s: float


Fault = Crash | DeviceFault | Kill | Reset | Partition | RootKill


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is not left to the scheduler and the network."""

    seed: int
    replicas: int
    in_processes: bool  # each replica in a process of its own, or all in root's
    pipeline_depth: int
    prefill_chunk_tokens: int
    prefix_caching: bool
    paused_limit_blocks: int
    room: Room
    delays: tuple[float, float]
    step_s: tuple[float, float]
    load_s: tuple[float, float]  # loading weights, and allocating a cache
    window: int  # frames a side may send without credit
    clients: tuple[ClientPlan, ...]
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]
    stops_at: float | None  # with everything under way; else when all has ended
    drain_s: float
    seconds: float
    second_orders: tuple[Order, ...] = ()  # of an operator beside the first; none: there is none
    second_waits: bool = True  # for an answer, before it gives its next order
    from_the_start: bool = False  # times count, and faults happen, from before the tree is up


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed: that of an even one is plain."""
    scenario = draw_plain(seed)
    if seed % 2 == 0:
        return scenario
    for add in (
        with_second_operator,
        with_ids_used_again,
        with_faults_at_the_start,
        with_another_root,
    ):
        scenario = add(scenario)
    return scenario


def draw_plain(seed: int) -> Scenario:
    """Return the scenario of a seed without what only some scenarios have on top."""
    return _Draw(seed).scenario()


def with_second_operator(scenario: Scenario) -> Scenario:
    """Let a second operator give orders in some scenarios, most at about the time of the first."""
    rng = stream(scenario.seed, "second operator")
    if rng.random() > 0.5:
        return scenario
    times = [rng.uniform(0.0, scenario.seconds) for _ in range(rng.choice((1, 2, 4, 8)))]
    if scenario.orders:
        times += [rng.choice(scenario.orders).at + rng.uniform(-0.05, 0.05) for _ in times]
    waits = rng.random() < 0.5
    if not waits:
        times = [at for at in times[:8] for _ in range(rng.choice((1, 2, 3)))]
    orders = [
        Order(at=round(max(0.0, at), 4), verb=_verb(rng), timeout_s=rng.choice((0.2, 2.0, 10.0)))
        for at in sorted(times)
    ]
    return msgspec.structs.replace(
        scenario,
        second_orders=tuple(orders),
        second_waits=waits,
        faults=(*scenario.faults, *_faults_between(rng, "root", SECOND, scenario.seconds)),
    )


def with_ids_used_again(scenario: Scenario) -> Scenario:
    """Let clients use ids again, of requests that have ended and of open ones, in some scenarios.

    The ids are their own, and the same for all clients.
    """
    rng = stream(scenario.seed, "ids used again")
    if rng.random() > 0.5:
        return scenario
    clients = []
    for plan in scenario.clients:
        asks = [_used_again(rng, ask, plan, f"id-{number}") for number, ask in enumerate(plan.asks)]
        clients.append(msgspec.structs.replace(plan, asks=tuple(asks)))
    return msgspec.structs.replace(scenario, clients=tuple(clients))


def _used_again(rng: random.Random, ask: Ask, plan: ClientPlan, request_id: str) -> Ask:
    kind = rng.random()
    if ask.n > 1 or kind < 0.3:
        return ask
    if kind < 0.5:
        return msgspec.structs.replace(ask, repeated_after_s=rng.uniform(0.0, 0.3))
    if kind < 0.7:
        return msgspec.structs.replace(ask, clashes_after_s=rng.uniform(0.0, 0.3))
    others = [ask, *(other for other in plan.asks if other.n == 1)]  # itself twice as often
    followers = [
        msgspec.structs.replace(
            rng.choice(others),
            at=rng.choice((0.0, 0.0, 0.01, 0.3)),
            reset_after_s=rng.uniform(0.0, 0.01) if rng.random() < 0.2 else None,
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    return msgspec.structs.replace(ask, request_id=request_id, followers=tuple(followers))


def with_faults_at_the_start(scenario: Scenario) -> Scenario:
    """Let everything begin, and go wrong, while the tree starts, in some scenarios."""
    rng = stream(scenario.seed, "faults at the start")
    if rng.random() > 0.3:
        return scenario
    faults = [_fault_at_the_start(rng, scenario) for _ in range(rng.choice((1, 1, 2, 3)))]
    return msgspec.structs.replace(
        scenario, from_the_start=True, faults=(*scenario.faults, *faults)
    )


def _fault_at_the_start(rng: random.Random, scenario: Scenario) -> Fault:
    replica = rng.randrange(scenario.replicas)
    at = round(rng.uniform(0.0, rng.choice((0.1, 0.5, 1.0))), 4)
    kind = rng.random()
    if kind < 0.1:
        step = rng.choice((1, 2, 2, 3))
        return DeviceFault(replica=replica, step=step, kind="load", for_good=rng.random() < 0.4)
    if kind < 0.2:
        return Kill(replica=replica, at=at)
    if kind < 0.6:
        part = rng.choice(("", "/scheduler", "/device", "/kv_allocator", "/tokenizer", "/link"))
        name = rng.choice(("coordinator", "metrics", *[f"replica-{replica}{part}"] * 4))
        by_message = rng.random() < 0.5
        return Crash(
            name=name,
            message=rng.randint(1, 8) if by_message else 0,
            behind=rng.random() < 0.5,
            at=None if by_message else at,
        )
    clients = [f"client-{index}" for index in range(len(scenario.clients))]
    other = rng.choice((*clients, "operator", *[f"replica-{replica}"] * 4))
    if kind < 0.8:
        return Reset(one="root", other=other, at=at)
    return Partition(
        one="root",
        other=other,
        at=at,
        seconds=rng.choice((0.1, 1.0, 20.0)),
        one_way=rng.random() < 0.3,
    )


def with_another_root(scenario: Scenario) -> Scenario:
    """Let root be killed in some scenarios in which replicas have processes of their own."""
    rng = stream(scenario.seed, "another root")
    might_end_anyway = scenario.from_the_start or scenario.stops_at is not None
    if not scenario.in_processes or might_end_anyway or rng.random() > 0.5:
        return scenario
    times = [rng.uniform(0.0, scenario.seconds)]
    times += [order.at + rng.uniform(0.0, 0.1) for order in scenario.orders]
    at = min(rng.choice(times), scenario.seconds)
    back_after_s = rng.choice((0.1, 0.1, 1.0, 5.0, 20.0, 100.0))
    kill = RootKill(at=round(at, 4), back_after_s=back_after_s)
    return msgspec.structs.replace(scenario, faults=(*scenario.faults, kill))


def _faults_between(rng: random.Random, one: str, other: str, seconds: float) -> list[Fault]:
    """Draw what goes wrong between two processes; most of the time nothing does."""
    at = round(rng.uniform(0.0, seconds), 4)
    kind = rng.random()
    if kind < 0.1:
        return [Reset(one=one, other=other, at=at)]
    if kind < 0.2:
        seconds = rng.choice((0.1, 1.0, 20.0))
        one_way = rng.random() < 0.3
        return [Partition(one=one, other=other, at=at, seconds=seconds, one_way=one_way)]
    return []


class _Draw:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = stream(seed, "scenario")
        rng = self._rng
        self._seconds = rng.choice((0.3, 1.0, 2.0))
        self._replicas = rng.choice((1, 1, 2, 2, 3))
        self._in_processes = rng.random() < 0.6
        self._num_clients = rng.choice((1, 2, 2, 3))
        block_tokens = rng.choice((1, 2, 4, 4, 8))
        max_model_len = rng.choice((24, 32, 48))
        least = -(-max_model_len // block_tokens)
        max_rows = rng.randint(2, 8)
        self._room = Room(
            block_tokens=block_tokens,
            num_blocks=least + rng.choice((0, 0, 1, least // 2, 3 * least)),
            max_rows=max_rows,
            max_step_tokens=max_rows + rng.choice((0, 4, 16, 56)),
            max_model_len=max_model_len,
        )
        self._stems = [self._tokens(rng.randint(4, 14)) for _ in range(2)]
        self._orders = self._draw_orders()

    def scenario(self) -> Scenario:
        rng = self._rng
        return Scenario(
            seed=self._seed,
            replicas=self._replicas,
            in_processes=self._in_processes,
            pipeline_depth=rng.choice((1, 2)),
            prefill_chunk_tokens=rng.choice((0, 0, 3, 7)),
            prefix_caching=rng.random() < 0.7,
            paused_limit_blocks=rng.choice((-1, -1, 0, 3)),
            room=self._room,
            delays=rng.choice((NO_DELAY, SAME_ROOM, SAME_ROOM, FAR_AWAY)),
            step_s=rng.choice(((0.0, 0.0), (0.001, 0.02), (0.01, 0.1))),
            load_s=rng.choice(((0.0, 0.0), (0.01, 0.3))),
            window=rng.choice((4, 16, 1024, 1024)),
            clients=tuple(self._client() for _ in range(self._num_clients)),
            orders=tuple(self._orders),
            faults=tuple(self._faults()),
            stops_at=self._time() if rng.random() < 0.15 else None,
            drain_s=rng.choice((0.0, 0.0, 0.05, 5.0)),
            seconds=self._seconds,
        )

    def _time(self) -> float:
        return round(self._rng.uniform(0.0, self._seconds), 4)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCABULARY - 1) for _ in range(count))

    # Requests.

    def _client(self) -> ClientPlan:
        rng = self._rng
        num_asks = rng.randint(1, 24 // self._num_clients)
        fate = rng.random()
        return ClientPlan(
            asks=tuple(sorted((self._ask() for _ in range(num_asks)), key=lambda ask: ask.at)),
            closes_at=self._time() if fate < 0.06 else None,
            dies_at=self._time() if 0.06 <= fate < 0.12 else None,
        )

    def _ask(self) -> Ask:
        rng = self._rng
        stem = rng.choice(self._stems) if rng.random() < 0.6 else ()
        prompt = (*stem[: rng.randint(1, 14)], *self._tokens(rng.randint(0 if stem else 1, 6)))
        most = self._room.max_model_len - len(prompt)
        fits = rng.random() > 0.02
        max_tokens = rng.choice((0, 1, 3, 6, 10, 14)) if fits else most + 1
        temperature = rng.choice((0.0, 1.0))
        leaves = rng.random()
        return Ask(
            at=self._time() * rng.choice((0.2, 1.0)),
            prompt=prompt,
            params=SamplingParams(
                temperature=temperature,
                seed=rng.choice((None, rng.randrange(1000))) if temperature else None,
                max_tokens=min(max_tokens, most) if fits else max_tokens,
                stop=tuple(self._stop_strings()),
                stop_token_ids=self._tokens(3) if rng.random() < 0.2 else (),
                ignore_eos=rng.random() < 0.2,
                logprobs=rng.choice((None, None, 0)),
                prompt_logprobs=0 if rng.random() < 0.15 else None,
            ),
            n=rng.choice((1, 1, 1, 1, 1, 2, 3)),
            priority=rng.choice((0, 0, 0, 1, -1)),
            timeout_s=rng.choice((0.05, 0.3, 1.0)) if rng.random() < 0.12 else None,
            leave_after_tokens=rng.randint(0, 4) if leaves < 0.08 else None,
            cancel_after_s=self._time() if 0.08 <= leaves < 0.15 else None,
        )

    def _stop_strings(self) -> list[str]:
        rng = self._rng
        if rng.random() > 0.15:
            return []
        return ["".join(rng.choices("abcdefghij", k=rng.randint(1, 2))) for _ in range(2)]

    # The operator.

    def _draw_orders(self) -> list[Order]:
        rng = self._rng
        count = rng.choice((0, 1, 2, 4, 8))
        times = sorted(self._time() for _ in range(count))
        return [
            Order(at=at, verb=_verb(rng), timeout_s=rng.choice((0.2, 2.0, 10.0, 30.0)))
            for at in times
        ]

    # Faults.

    def _fault_time(self) -> float:
        """Draw any time, or one close to a verb."""
        if not self._orders or self._rng.random() < 0.5:
            return self._time()
        at = self._rng.choice(self._orders).at + self._rng.uniform(-0.1, 0.05)
        return round(min(max(0.0, at), self._seconds), 4)

    def _faults(self) -> list[Fault]:
        count = self._rng.choice((0, 0, 1, 1, 2, 3))
        return [self._fault() for _ in range(count)]

    def _fault(self) -> Fault:
        rng = self._rng
        replica = rng.randrange(self._replicas)
        kind = rng.random()
        if kind < 0.45:
            return self._crash(replica)
        if kind < 0.65:
            return DeviceFault(
                replica=replica,
                step=rng.randint(1, 25),
                kind=rng.choice(("error", "error_behind", "out_of_memory", "hang", "nan", "nan")),
                killed_after_s=rng.uniform(0.1, 3.0),
            )
        if kind < 0.75:
            return Kill(replica=replica, at=self._fault_time())
        one, other = self._pair(replica)
        if kind < 0.88:
            return Reset(one=one, other=other, at=self._fault_time())
        return Partition(
            one=one,
            other=other,
            at=self._fault_time(),
            seconds=rng.choice((0.1, 1.0, 20.0)),
            one_way=rng.random() < 0.3,
        )

    def _crash(self, replica: int) -> Crash:
        rng = self._rng
        parts = (
            "scheduler",
            "scheduler",
            "device",
            "kv_allocator",
            "executor",
            "tokenizer",
            "link",
        )
        part = rng.choice((*parts, "coordinator", "coordinator", "metrics", "replica"))
        if part in parts:
            name = f"replica-{replica}/{part}"
        else:
            name = f"replica-{replica}" if part == "replica" else part
        if part in ("device", "replica") or rng.random() < 0.2:
            return Crash(name=name, at=self._fault_time())
        return Crash(name=name, message=rng.randint(1, 60), behind=rng.random() < 0.5)

    def _pair(self, replica: int) -> tuple[str, str]:
        rng = self._rng
        clients = [f"client-{index}" for index in range(self._num_clients)]
        others = [*clients, "operator"]
        others += [f"replica-{replica}" if self._in_processes else "root"] * 2
        return "root", rng.choice(others)


def _verb(rng: random.Random) -> Verb | AbortRequests:
    kind = rng.choice(
        (
            "pause",
            "pause",
            "unpause",
            "unpause",
            "suspend",
            "suspend",
            "resume",
            "step",
            "abort",
        )
    )
    match kind:
        case "pause":
            mode = rng.choice((PauseMode.KEEP, PauseMode.KEEP, PauseMode.DRAIN, PauseMode.ABORT))
            return Pause(mode=mode, drain_s=rng.choice((0.0, 0.05, 1.0)))
        case "unpause":
            return Unpause()
        case "suspend":
            return Suspend(kv=rng.choice(tuple(KVLevel)), weights=rng.choice(tuple(WeightsLevel)))
        case "resume":
            return Resume()
        case "step":
            return Step(count=rng.randint(1, 3))
        case _:
            return AbortRequests(all=True)
