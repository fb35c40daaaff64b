"""Standard input, output and error, which a process may be started without or lose."""

import os
import sys


def open_standard_streams() -> None:
    """Have something at all three descriptors: where one is closed, what is nowhere.

    Otherwise the next file or socket that is opened would be taken for it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, and so this one
            os.set_inheritable(nowhere, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115  # for good


def announce(line: str) -> None:
    """Write a line where a person, or a script that waits for it, sees it at once.

    Where nobody reads any more, or there is no room, this and all later lines go nowhere: a server
    goes on without them.
    """
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
