"""A server's port under fire, in short; `make fuzz` does it at length."""

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[2] / "docs" / "benchmarks" / "fuzz.py"


def test_nonsense_at_the_port_harms_nobody_and_takes_no_memory() -> None:
    """Twenty thousand frames at two servers with eight streams each; takes some ten seconds."""
    fuzz = subprocess.run(
        [sys.executable, FUZZ, "--frames", "20000", "--max-growth", "16"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert fuzz.returncode == 0, fuzz.stdout + fuzz.stderr
    assert fuzz.stdout.count(", 0 wrong, 0 restarts, ") == 2
