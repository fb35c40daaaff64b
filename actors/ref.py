"""The address of an actor: by name, typed by what it can be told, good across its restarts."""

import contextvars
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import trio

from callboard.actors.mailbox import Letter, Reply
from callboard.messages.base import Call, Message
from callboard.messages.errors import ActorStopped, DeadlineExceeded

if TYPE_CHECKING:
    from callboard.actors.actor import Cell

M_contra = TypeVar("M_contra", bound=Message, contravariant=True)
R = TypeVar("R")

DEFAULT_ASK_TIMEOUT_S = 5.0

current_cell: contextvars.ContextVar["Cell | None"] = contextvars.ContextVar(
    "current_cell", default=None
)
"""The actor whose task this is, so that a message sent while handling another names its cause."""


class ActorRef(Protocol[M_contra]):
    """What any actor looks like from outside, in this process or another."""

    @property
    def name(self) -> str:
        """The actor's name."""
        ...

    async def tell(self, message: M_contra) -> None:
        """Queue a message; waits for room, or raises MailboxFull, by the mailbox's way."""
        ...

    def tell_nowait(self, message: M_contra) -> None:
        """Queue a message now; raises MailboxFull or ActorStopped."""
        ...

    async def ask(self, call: Call[R], *, timeout: float = DEFAULT_ASK_TIMEOUT_S) -> R:
        """Send a call and wait for its answer, at most `timeout` seconds.

        Raises DeadlineExceeded, ActorStopped, ActorFailed, MailboxFull, or what the actor answered.
        """
        ...


class LocalRef(Generic[M_contra]):
    """The address of an actor in this process."""

    __slots__ = ("_cell",)

    def __init__(self, cell: "Cell") -> None:
        self._cell = cell

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._cell.name

    async def tell(self, message: M_contra) -> None:
        """Queue a message; see `ActorRef.tell`."""
        try:
            self._displace(await self._cell.mailbox.put(self._letter(message)))
        except ActorStopped as error:
            raise self._stopped(message) from error

    def tell_nowait(self, message: M_contra) -> None:
        """Queue a message now; see `ActorRef.tell_nowait`."""
        try:
            self._displace(self._cell.mailbox.put_nowait(self._letter(message)))
        except ActorStopped as error:
            raise self._stopped(message) from error

    async def ask(self, call: Call[R], *, timeout: float = DEFAULT_ASK_TIMEOUT_S) -> R:
        """Send a call and wait for its answer; see `ActorRef.ask`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        deadline = trio.current_time() + timeout
        reply = Reply()
        letter = self._letter(call, deadline=deadline, reply=reply)
        timer = self._cell.system.timers.at(deadline, lambda: self._expire(reply, call, timeout))
        try:
            await self._put_before(letter, deadline)
            return cast(R, await reply.wait())
        finally:
            timer.cancel()

    def __repr__(self) -> str:
        return f"<ref {self.name}>"

    async def _put_before(self, letter: Letter, deadline: float) -> None:
        mailbox = self._cell.mailbox
        try:
            if not mailbox.must_wait(letter):
                # The wait for the answer is the checkpoint.
                self._displace(mailbox.put_nowait(letter))
                return
            with trio.move_on_at(deadline):
                await mailbox.put(letter)
                return
        except ActorStopped as error:
            raise self._stopped(letter.message) from error
        raise DeadlineExceeded(f"{self.name} had no room for {type(letter.message).__name__}")

    def _letter(
        self, message: Message, *, deadline: float = float("inf"), reply: Reply | None = None
    ) -> Letter:
        sender = current_cell.get()
        return Letter(
            message,
            message_id=self._cell.system.next_message_id(),
            cause=0 if sender is None else sender.handling,
            deadline=deadline,
            reply=reply,
        )

    def _displace(self, displaced: Letter | None) -> None:
        if displaced is not None:
            self._cell.bury(displaced, "mailbox_full")

    def _stopped(self, message: Message) -> ActorStopped:
        self._cell.system.dead_letters.add(self.name, "stopped", message)
        return ActorStopped(f"{self.name} has stopped")

    def _expire(self, reply: Reply, call: Message, timeout: float) -> None:
        reply.fail(
            DeadlineExceeded(f"{self.name} did not answer {type(call).__name__} in {timeout:g} s")
        )
