"""Runs a function in a process of its own, where nothing but what it does is in memory."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(function: Callable[..., None], *arguments: str) -> None:
    """Call a function of a test module; what other tests have left in the heap plays no part.

    An allocation may be made of pages that are free there and resident already, and then measures
    nothing.
    """
    file = Path(function.__code__.co_filename)
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    name = function.__name__
    program = f"import sys; from {module} import {name}; {name}(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, check=True, timeout=120)
