"""An actor of one's own under a supervisor: it fails, is restarted, and goes on."""

import trio

from callboard import Actor
from callboard.actors.ref import LocalRef
from callboard.actors.system import open_system
from callboard.messages.base import Call, Message
from callboard.messages.errors import ActorFailed
from callboard.supervision.spec import ChildSpec
from callboard.supervision.supervisor import Supervisor


class Note(Message, frozen=True):
    """Anyone → divider: keep this number."""

    number: int


class Divide(Call[int], frozen=True):
    """Anyone → divider: how often does this go into what you keep?"""

    by: int


class Divider(Actor[Note | Divide]):
    def __init__(self) -> None:
        self.number = 0

    async def receive(self, message: Note | Divide) -> object:
        match message:
            case Note(number=number):
                self.number = number
                return None
            case Divide(by=by):
                return self.number // by


async def main() -> None:
    async with open_system() as system, trio.open_nursery() as nursery:
        top = system.cell("top")
        divider: LocalRef[Note | Divide] = LocalRef(system.cell("divider"))
        children = [ChildSpec(name="divider", start=Divider)]

        async def live(task_status: trio.TaskStatus[None]) -> None:
            await top.run(lambda: Supervisor(system, children), task_status=task_status)

        await nursery.start(live)
        await divider.tell(Note(number=42))
        before = await divider.ask(Divide(by=6))
        try:
            await divider.ask(Divide(by=0))
        except ActorFailed as error:
            print(error)
        after = await divider.ask(Divide(by=6))
        print(before, after)
        await top.stop()


trio.run(main)
