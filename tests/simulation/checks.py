"""What must be true during and after every run, whatever happened: the promises, as assertions."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import trio

from callboard.actors.actor import Cell
from callboard.actors.coordinator import Coordinator
from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.policy import SchedulingPolicy
from callboard.actors.routing import MAX_ATTEMPTS
from callboard.actors.scheduler import Scheduler
from callboard.actors.session import Left
from callboard.messages.base import Message
from callboard.messages.control import (
    AbortRequests,
    ControlReply,
    KVLevel,
    Pause,
    PauseMode,
    Resume,
    State,
    Step,
    Stop,
    Suspend,
    Unpause,
    Verb,
    WeightsLevel,
)
from callboard.messages.requests import FinishReason
from callboard.messages.steps import RunStep
from tests.simulation.device import alone, prompt_scores, texts_of

if TYPE_CHECKING:
    from tests.simulation.clients import Asked
    from tests.simulation.world import World


RELEASES = (Unpause, Resume, Step)
"""Verbs behind which a paused tree may run."""

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""How a request ends that has all it would have alone."""


class Sent:
    """A verb that was sent, and what else may have had its effect behind it."""

    def __init__(self, operator: str, verb: Verb | AbortRequests, *, now: float, tree: int) -> None:
        self.operator = operator
        self.verb = verb
        self.at = now
        self.tree = tree
        self.over_at = float("inf")
        self.crossed: list[Verb | AbortRequests] = []  # whose turn may come after its own


class Checks:
    """Notes what is promised while a simulation runs, and finds what was not kept."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.broken: list[str] = []
        self.asked: list[Asked] = []
        self.losses = 0  # of replicas, as coordinators see it
        self.device_failures: Counter[str] = Counter()
        self._held_still = False  # between an acknowledged PAUSE and what ends it
        self._without: Suspend | None = None  # memory that may not be taken
        self._running: Counter[str] = Counter()  # forward passes under way, by process
        self._tree = 1  # how many roots there have been
        self._under_way: list[Sent] = []  # verbs that may have their effect yet
        self._aborts: list[Sent] = []
        self._answered: set[tuple[bytes, int]] = set()
        self._last_turns: Counter[bytes] = Counter()  # ids of the verbs that had them, by operator
        self._nans: list[str] = []
        self._orders: dict[str, tuple[int, int]] = {}  # of requests, when they were first seen

    def broke(self, what: str) -> None:
        """Note a promise that was not kept."""
        self._world.log("", "BROKEN", what)
        self.broken.append(what)

    # The device.

    def forward_begins(self, process: str, step: RunStep) -> None:
        """A forward pass begins."""
        self._world.log(process, "forward", step)
        if self._held_still:
            self.broke(f"{process} began a forward pass while paused")
        self._running[process] += 1

    def forward_ends(self, process: str) -> None:
        """A forward pass has ended, with its process or by itself."""
        self._running[process] = 0

    def takes_cache(self, process: str) -> None:
        """A runner allocates its KV cache."""
        if self._without is not None and self._without.kv is KVLevel.DROP:
            self.broke(f"{process} allocated a cache while suspended")

    def takes_weights(self, process: str) -> None:
        """A runner loads its weights."""
        if self._without is not None and self._without.weights is WeightsLevel.DISCARD:
            self.broke(f"{process} loaded weights while suspended")

    def nan_injected(self) -> str:
        """Return the message of a row that is about to fail."""
        self._nans.append(f"the logits are NaN (number {len(self._nans)})")
        return self._nans[-1]

    # Verbs.

    def verb_sent(self, operator: str, verb: Verb | AbortRequests) -> Sent:
        """An operator is about to send a verb: from now on its effects are expected."""
        if isinstance(verb, RELEASES):
            self._held_still = False
        if isinstance(verb, Resume):
            self._without = None
        sent = Sent(operator, verb, now=trio.current_time(), tree=self._tree)
        if _aborts(verb):
            self._aborts.append(sent)
        for other in self._under_way:
            other.crossed.append(verb)
            if other.operator != operator:
                sent.crossed.append(other.verb)
        if isinstance(verb, Verb):
            self._under_way.append(sent)
        return sent

    def verb_answered(self, sent: Sent, reply: ControlReply) -> None:
        """A verb was acknowledged, refused, or some part was late."""
        if not _had_its_turn(reply) and not isinstance(sent.verb, Stop):
            return  # and those before it may yet have theirs
        self._is_over(sent)
        if not reply.done:
            return
        verb = sent.verb
        expected = {
            # A tree of which some part was late to suspend or resume is paused throughout.
            Pause: (State.PAUSED, State.SUSPENDED, State.SUSPENDING, State.RESUMING),
            Unpause: (State.RUNNING,),
            Suspend: (State.SUSPENDED,),
            Resume: (State.RUNNING, State.PAUSED, State.PAUSING),  # where a PAUSE was late
            Step: (State.PAUSED,),
            Stop: (State.STOPPED,),
        }[type(verb)]
        if reply.state not in expected:
            self.broke(f"{reply.verb} was acknowledged in the state {reply.state}")
        if sent.tree != self._tree:
            return
        crossed = tuple(sent.crossed)
        if isinstance(verb, Pause | Suspend | Step) and not _any(crossed, RELEASES):
            self._held_still = True
            for process, count in self._running.items():
                if count:
                    self.broke(f"{reply.verb} was acknowledged with {process} in a forward pass")
        if isinstance(verb, Suspend) and not _any(crossed, Resume):
            self._without = verb
            self._check_memory(verb)

    def question_answered(self, peer: bytes, message_id: int, answer: object) -> None:
        """Root answers what a peer has asked: once, and verbs in the order of their turns."""
        question = (peer, message_id)
        if question in self._answered:
            self.broke(f"{peer.hex()} was answered twice")
        self._answered.add(question)
        if isinstance(answer, ControlReply) and _had_its_turn(answer):
            if message_id < self._last_turns[peer]:
                self.broke(f"{answer.verb} was obeyed behind a verb that was sent later")
            self._last_turns[peer] = message_id

    def tree_ended(self) -> None:
        """Root was killed: nothing that was said to it holds for the next one."""
        self._tree += 1
        self._under_way.clear()
        self._held_still = False
        self._without = None
        self._running.clear()

    def verb_was_not_sent(self, sent: Sent) -> None:
        """There was nobody to send a verb to: it has no effect."""
        if sent in self._under_way:
            self._under_way.remove(sent)

    def verb_over(self, sent: Sent, *, done: bool) -> None:
        """Nobody waits for a verb's answer any more; one that was not done may go on."""
        if done:
            sent.over_at = trio.current_time()

    def _is_over(self, answered: Sent) -> None:
        """The verbs of one operator have their turns in the order in which they were sent."""
        if answered not in self._under_way:
            return
        later = self._under_way[self._under_way.index(answered) + 1 :]
        self._under_way = [
            sent for sent in self._under_way if sent.operator != answered.operator or sent in later
        ]

    def _check_memory(self, verb: Suspend) -> None:
        for name, runner in self._world.runners():
            if verb.kv is KVLevel.DROP and runner.allocated:
                self.broke(f"suspend was acknowledged with the cache of {name} allocated")
            if verb.weights is WeightsLevel.DISCARD and runner.loaded:
                self.broke(f"suspend was acknowledged with the weights of {name} loaded")

    # Actors.

    def life_ended(self, name: str, error: BaseException) -> None:
        """An actor failed with an error; planned ones and ours are no surprise."""
        if not self._world.is_expected(error):
            self.broke(f"{name} failed of {type(error).__name__}: {error}")

    def message_handled(self, cell: Cell, message: Message) -> None:
        """Blocks are conserved, queues in order and the gone forgotten after every message."""
        actor = cell.actor
        if isinstance(actor, Coordinator) and isinstance(message, Left):
            left_open = actor._routing._by_client.get(message.peer)
            if left_open:
                self.broke(f"{list(left_open)} are open, and their client has left")
        if isinstance(actor, Scheduler):
            self._check_order(cell.name, actor._policy)
        if isinstance(actor, KVAllocator) and actor._pool is not None:
            held = Counter(block for blocks in actor._held.values() for block in blocks)
            actor._pool.audit()
            references = actor._pool.statistics().references
            if references != sum(held.values()):
                self.broke(f"{cell.name}: {references} references, {sum(held.values())} held")

    def _check_order(self, name: str, policy: SchedulingPolicy) -> None:
        """Requests wait by priority, then in the order in which they were accepted."""
        orders = [request.order for request in policy._waiting]
        if orders != sorted(orders):
            self.broke(f"{name}: requests wait in the order {orders}")
        for request in policy._waiting:
            if self._orders.setdefault(request.request_id, request.order) != request.order:
                self.broke(f"{name}: {request.request_id} has lost its place")

    # After the run.

    def check_requests(self) -> None:
        """Every request has ended once, as it would have alone or with a reason not to."""
        for asked in self.asked:
            for problem in self._problems_of(asked):
                self.broke(f"{asked.name}: {problem}")

    def _problems_of(self, asked: "Asked") -> list[str]:
        problems = list(asked.problems)
        if asked.client_died:
            return problems
        was_open = asked.accepted and not asked.ran_again  # when the other one came
        if asked.num_clashes and was_open and not self._is_disturbed(asked):
            problems.append("has seen no refusal of another request under its id")
        if not asked.stream.has_ended:  # who has left waits for the end for some seconds only
            return problems if asked.left else [*problems, "has not ended"]
        reason = asked.stream.finish_reason
        if reason is None:
            return problems + self._problems_of_refusal(asked)
        problems += _problems_of_output(asked, reason)
        if reason not in WHOLE:
            problems += self._problems_of_end(asked, reason)
        return problems

    def _is_disturbed(self, asked: "Asked") -> bool:
        """Whether what a client says, or is answered, may have been lost."""
        world = self._world
        return bool(
            world.stopping or asked.client_closed or world.has_reset or world.scenario.faults
        )

    def _problems_of_end(self, asked: "Asked", reason: FinishReason) -> list[str]:
        match reason:
            case FinishReason.ABORT:
                fine = asked.left or self._was_aborted(asked)
                return [] if fine else ["was aborted, and nobody wanted that"]
            case FinishReason.DEADLINE:
                due = asked.sent_at + (asked.timeout_s or float("inf"))
                fine = asked.ended_at >= due - 1e-6
                return [] if fine else [f"ended by a deadline at {asked.ended_at}, due {due}"]
            case _:
                failure = asked.stream.failure
                return [] if self._may_fail(failure) else [f"failed: {failure}"]

    def _problems_of_refusal(self, asked: "Asked") -> list[str]:
        failure = asked.stream.failure
        assert failure is not None
        if asked.client_closed or self._world.stopping:
            return []
        if self._world.was_away_too_long and failure.code == "Unreachable":
            return []
        if asked.accepted:
            return [f"was accepted and then lost: {failure}"]
        if asked.may_be_refused_for_its_id and "in use" in failure.message:
            return []
        num_tokens = len(asked.prompt) + (asked.params.max_tokens or 0)
        is_too_long = num_tokens > self._world.scenario.room.max_model_len
        fine = is_too_long and failure.code == "SequenceOverflow"
        return [] if fine else [f"was refused: {failure}"]

    def _was_aborted(self, asked: "Asked") -> bool:
        if self._world.stopping or asked.client_closed:
            return True
        return any(
            abort.at <= asked.ended_at and asked.sent_at <= abort.over_at for abort in self._aborts
        )

    def _may_fail(self, failure: Any) -> bool:
        if failure is None:
            return False
        if failure.message in self._nans:
            return True
        return "lost" in failure.message and self.losses >= MAX_ATTEMPTS

    def check_tables(self) -> None:
        """With nothing under way, nobody remembers anything of it."""
        for process in self._world.processes.values():
            if process.alive and process.system is not None:
                for cell in list(process.system.cells.values()):
                    self._check_cell(cell)
                timers = process.system.timers
                alive = [entry for entry in timers._heap if entry[2].callback is not None]
                if len(alive) > 8:
                    self.broke(f"{process.name} has {len(alive)} timers")
        for name, runner in self._world.runners():
            if runner.rows:
                self.broke(f"the device of {name} has the rows {runner.rows}")

    def _check_cell(self, cell: Cell) -> None:
        actor = cell.actor
        depth = cell.mailbox.statistics().depth
        if depth:
            self.broke(f"{depth} messages wait for {cell.name}")
        if any(not reply.settled for reply in cell._deferred):
            self.broke(f"{cell.name} has not answered everybody")
        if isinstance(actor, KVAllocator):
            self._check_empty(cell.name, actor, ("_held", "_promised", "_promises"))
            pool = actor._pool
            if pool is not None and pool.free != pool.usable:
                self.broke(f"{cell.name} has {pool.free} of {pool.usable} blocks free")
        if isinstance(actor, Scheduler):
            self._check_empty(cell.name, actor, ("_timers", "_pausing"))
            policy = actor._policy
            names = ("_waiting", "_starved", "_flights", "_proposed")
            self._check_empty(cell.name, policy, names)
            if len(policy.ledger) or policy.ledger.num_rows:
                self.broke(f"{cell.name} keeps {len(policy.ledger)} requests")
            if actor._stepping is not None or policy._prefilling or policy._suspect:
                self.broke(f"{cell.name} is not done with something")
        if isinstance(actor, Coordinator):
            self._check_containers(cell.name, actor._routing)

    def _check_empty(self, name: str, holder: object, tables: tuple[str, ...]) -> None:
        for table in tables:
            if getattr(holder, table):
                self.broke(f"{name}: {table} is {getattr(holder, table)}")

    def _check_containers(self, name: str, holder: object) -> None:
        """Whatever holds things is empty, but for what holds only what is empty."""
        for table, content in vars(holder).items():
            if table == "_names":  # of the replicas that are there
                continue
            items = content.values() if isinstance(content, dict) else content
            if isinstance(content, dict | list | set) and any(items):
                self.broke(f"{name}: {table} is {content}")


def _problems_of_output(asked: "Asked", reason: FinishReason) -> list[str]:
    """Compare what a request has with what it would have alone."""
    record, params = asked.stream.record, asked.params
    tokens, prompt = record.token_ids, list(asked.prompt)
    expected = alone(prompt, params, record.seed)
    problems = []
    if tokens and not asked.accepted:
        problems.append("has tokens, and was never accepted")
    if tokens != expected.tokens[: len(tokens)]:
        problems.append(f"has {tokens}, and alone {expected.tokens}")
    if reason in WHOLE:
        if (tokens, reason) != (expected.tokens, expected.finish):
            problems.append(f"ended by {reason} with {tokens}, alone {expected}")
        if record.text != expected.text:
            problems.append(f"has the text {record.text!r}, alone {expected.text!r}")
    elif record.text not in texts_of(tokens, params):
        problems.append(f"has the text {record.text!r} of {tokens}")
    logprobs = expected.logprobs[: len(tokens)]
    if params.logprobs is not None and tokens and record.logprobs != logprobs:
        problems.append(f"has the log-probs {record.logprobs}, alone {logprobs}")
    scores = record.prompt_logprobs
    is_due = params.prompt_logprobs is not None and (reason in WHOLE or scores is not None)
    if is_due and scores != prompt_scores(prompt):
        problems.append(f"has the prompt log-probs {scores}")
    return problems


def _had_its_turn(answer: ControlReply) -> bool:
    """Whether a verb has stood in line, which STOP does not, and come to its turn."""
    return answer.verb != "stop" and "root" not in answer.late


def _any(verbs: tuple[object, ...], kinds: Any) -> bool:
    return any(isinstance(verb, kinds) for verb in verbs)


def _aborts(verb: Verb | AbortRequests) -> bool:
    match verb:
        case Pause(mode=mode):
            return mode is not PauseMode.KEEP
        case Stop() | AbortRequests():
            return True
        case _:
            return False
