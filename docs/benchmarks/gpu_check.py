"""Everything that needs a GPU, in one command: the tests marked `gpu`, then a short benchmark.

    make gpu-check
    python docs/benchmarks/gpu_check.py --json figures.json

It runs out of a checkout with the Python and the torch that are there, needs no network, and ends
within ten minutes. What it found is printed, and written as JSON. The benchmark is engine.py, in
half precision, with each attention backend that can run here.

Python packages that are missing are taken from a folder of wheels, named by CALLBOARD_WHEELS or
--wheels, and installed into an environment that is deleted in the end. Without such a folder it
says what is missing and how to fill one.

Exit codes: 0 everything passed; 1 something failed or ran out of time; 2 it cannot run here, for
want of CUDA or of packages.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

DEADLINE_S = 570.0
TESTS_S = 270.0
CASE_S = 90.0
INSTALL_S = 120.0
FIND_S = 30.0

FIND_FLASH = "import sys, importlib.util; sys.exit(importlib.util.find_spec('flash_attn') is None)"

DTYPES = ("bfloat16", "float16")

COLUMNS = (  # heading, workload, figure
    ("W1 TTFT ms", "W1", "ttft_ms"),
    ("W1 ITL ms", "W1", "itl_ms"),
    ("W2 tok/s", "W2", "output_tokens_per_s"),
    ("W3 tok/s", "W3", "output_tokens_per_s"),
    ("W4 prompt tok/s", "W4", "prompt_tokens_per_s"),
)

HOW_TO_CARRY = """\
This Python ({python}) has no {names}.
Carry the packages as wheels. On a machine with a network:
    python -m pip download --dest wheels --only-binary=:all: \\
        --python-version {python} --implementation cp \\
        --platform manylinux_2_28_{machine} --platform manylinux_2_17_{machine} \\
        --platform manylinux2014_{machine} \\
        {requirements}
and here, with that folder:
    CALLBOARD_WHEELS=wheels make gpu-check"""


class Clock:
    """The time that is left, shared out to what is still to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - monotonic())

    def at_most(self, seconds: float) -> float:
        return min(seconds, self.left())


class Case(NamedTuple):
    """One way to run the benchmark."""

    dtype: str
    attention: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    clock = Clock(arguments.deadline)
    if (reason := why_no_cuda()) is not None:
        print(f"gpu-check needs a CUDA device: {reason}")
        return 2
    wanted = missing_requirements()
    if wanted and arguments.wheels is None:
        print(how_to_carry(wanted))
        return 2
    if arguments.wheels is not None and any(arguments.wheels.glob("flash_attn-*.whl")):
        wanted.append("flash-attn")
    if not wanted:
        return check(arguments, clock, sys.executable)
    with throw_away_environment() as python:
        if not install(wanted, arguments.wheels, python, clock):
            print(how_to_carry(wanted))
            return 2
        return check(arguments, clock, python)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--wheels",
        type=absolute,
        default=os.environ.get("CALLBOARD_WHEELS") or None,
        help="folder of wheels for packages that are missing (default: CALLBOARD_WHEELS)",
    )
    parser.add_argument(
        "--json",
        type=absolute,
        default=ROOT / "build" / "gpu-check.json",
        help="where the figures are written (default: %(default)s)",
    )
    parser.add_argument("--model", default="", help="to benchmark; see engine.py")
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="for everything together (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    if arguments.deadline <= 0:
        parser.error(f"--deadline is {arguments.deadline:g}, and must be above 0")
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"the folder of wheels {str(arguments.wheels)!r} is not there")
    return arguments


def absolute(path: str) -> Path:
    return Path(path).absolute()


def check(arguments: argparse.Namespace, clock: Clock, python: str) -> int:
    """Run the tests, then the benchmark; write down what is known after each part.

    `python` is the interpreter that has all the packages.
    """
    report: dict[str, Any] = {"machine": describe_machine(), "benchmark": []}
    print(json.dumps(report["machine"]), flush=True)
    report["tests"] = run_tests(clock, python)
    save(report, arguments.json)
    cases = possible_cases(python)
    for index, case in enumerate(cases):
        share_s = clock.left() / (len(cases) - index)
        timeout_s = min(CASE_S, share_s)
        report["benchmark"].append(run_case(case, arguments.model, timeout_s, python))
        save(report, arguments.json)
    print(summary(report))
    print(f"figures: {arguments.json}")
    return 0 if passed(report) else 1


def passed(report: dict[str, Any]) -> bool:
    tests_passed = report["tests"]["error"] is None
    return tests_passed and all(case["error"] is None for case in report["benchmark"])


def save(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


# The machine


def why_no_cuda() -> str | None:
    """Say why there is no CUDA device; None where there is one."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees none"
    return None


def describe_machine() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # untyped in torch
    }


def possible_cases(python: str) -> list[Case]:
    """Return what the benchmark can run here; bfloat16 and flash-attn need capability 8."""
    import torch

    is_recent = torch.cuda.get_device_capability(0) >= (8, 0)
    dtypes = DTYPES if is_recent else ("float16",)
    has_flash = is_recent and run((python, "-c", FIND_FLASH), FIND_S).error is None
    backends = ("flash", "sdpa") if has_flash else ("sdpa",)
    return [Case(dtype, backend) for dtype in dtypes for backend in backends]


# Packages


def requirements() -> list[str]:
    """Return what the engine and its tests need, as pyproject.toml says it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for_tests = project["optional-dependencies"]["dev"]
    return [
        *project["dependencies"],
        *(one for one in for_tests if distribution_of(one) in ("pytest", "pytest-trio")),
    ]


def missing_requirements() -> list[str]:
    return [one for one in requirements() if not is_installed(distribution_of(one))]


def distribution_of(requirement: str) -> str:
    """Return the name that a requirement begins with."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def how_to_carry(missing: list[str]) -> str:
    return HOW_TO_CARRY.format(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        machine=platform.machine(),
        names=", ".join(map(distribution_of, missing)),
        requirements=" ".join(f"'{one}'" for one in missing),
    )


def install(wanted: list[str], wheels: Path, python: str, clock: Clock) -> bool:
    """Install into the environment of `python`; pip says what is wrong where it fails."""
    print(f"installing from {wheels}: {', '.join(wanted)}", flush=True)
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    command = (*pip, "--no-index", "--find-links", str(wheels), *wanted)
    return run(command, clock.at_most(INSTALL_S)).error is None


@contextmanager
def throw_away_environment() -> Iterator[str]:
    """Yield the Python of a new environment that also sees the packages of this one."""
    with tempfile.TemporaryDirectory(prefix="callboard-gpu-check-") as folder:
        venv.create(folder, system_site_packages=True, symlinks=True, with_pip=False)
        # Where this Python is itself of an environment, "system" would be the one below it.
        [packages] = Path(folder).glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in own_packages()]
        (packages / "outer.pth").write_text("\n".join(lines) + "\n")
        yield f"{folder}/bin/python"


def own_packages() -> list[str]:
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


# The tests


def run_tests(clock: Clock, python: str) -> dict[str, Any]:
    """Run the tests marked gpu and return how they went; `error` is None when all passed."""
    with tempfile.TemporaryDirectory(prefix="callboard-gpu-check-") as folder:
        results = Path(folder) / "results.xml"
        command = (
            *(python, "-m", "pytest", "-m", "gpu", "--rootdir", str(ROOT)),
            *("--junitxml", str(results)),
            # This torch and Python are not those the tests are developed with: what they warn of
            # is shown, but is no failure here.
            *("--override-ini", "filterwarnings=default", "-p", "no:cacheprovider"),
            *map(str, files_with_gpu_tests()),
        )
        done = run(command, clock.at_most(TESTS_S))
        counted = read_results(results) if results.exists() else {"passed": 0}
    if done.error is None and counted["passed"] == 0:
        return {**counted, "error": "no test ran"}
    return {**counted, "error": done.error}


def files_with_gpu_tests() -> list[Path]:
    """Return the files that mention the mark; the others may import packages that are not here."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in files if "mark.gpu" in path.read_text()]


def read_results(path: Path) -> dict[str, Any]:
    """Return how many tests passed, which failed and which were skipped, out of JUnit's XML."""
    failed, skipped, num_passed = [], {}, 0
    for test in ElementTree.parse(path).iter("testcase"):
        name = f"{test.get('classname')}::{test.get('name')}"
        skip = test.find("skipped")
        if skip is not None:
            skipped[name] = skip.get("message", "")
        elif test.find("failure") is not None or test.find("error") is not None:
            failed.append(name)
        else:
            num_passed += 1
    return {"passed": num_passed, "failed": failed, "skipped": skipped}


# The benchmark


def run_case(case: Case, model: str, timeout_s: float, python: str) -> dict[str, Any]:
    """Run engine.py once and return its figures; what it had measured when it failed is kept."""
    print(f"\nbenchmark: {case.dtype}, {case.attention}", flush=True)
    command = (
        *(python, str(HERE / "engine.py"), "--device", "cuda", "--model", model),
        *("--dtype", case.dtype, "--attention", case.attention),
    )
    done = run(command, timeout_s, capture=True)
    print(done.output, end="", flush=True)
    return {**case._asdict(), **read_figures(done.output), "error": done.error}


def read_figures(output: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    workloads = {line.pop("workload"): line for line in lines if "workload" in line}
    engine: dict[str, Any] = next((line for line in lines if "start_s" in line), {})
    return {"engine": engine, "workloads": workloads}


def summary(report: dict[str, Any]) -> str:
    """Return the report as a few lines for people."""
    tests = report["tests"]
    failed, reasons = tests.get("failed", []), Counter(tests.get("skipped", {}).values())
    lines = [
        "",
        f"{report['machine']['gpu']}, torch {report['machine']['torch']}",
        f"tests: {tests['passed']} passed, {len(failed)} failed, {reasons.total()} skipped"
        + (f" ({tests['error']})" if tests["error"] else ""),
        *(f"  failed: {name}" for name in failed),
        *(f"  skipped: {count}, {reason}" for reason, count in reasons.items()),
        " ".join([f"{'':18}", *(heading for heading, *_ in COLUMNS)]),
    ]
    return "\n".join(lines + [row(case) for case in report["benchmark"]])


def row(case: dict[str, Any]) -> str:
    cells = [f"{case['dtype'] + ' ' + case['attention']:18}"]
    for heading, workload, figure in COLUMNS:
        value = case["workloads"].get(workload, {}).get(figure)
        cells.append(f"{'-' if value is None else format(value, ',.1f'):>{len(heading)}}")
    return " ".join(cells) + (f"  {case['error']}" if case["error"] else "")


# Other processes


class Done(NamedTuple):
    """A process that has ended: its exit code, or None where its time was over."""

    code: int | None
    output: str
    timeout_s: float

    @property
    def error(self) -> str | None:
        if self.code is None:
            return f"did not end within {self.timeout_s:.0f} s"
        return f"exit code {self.code}" if self.code else None


def run(command: Sequence[str], timeout_s: float, *, capture: bool = False) -> Done:
    """Run a command that can import the checkout, and end it and its children when time is over."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE if capture else None,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return Done(process.returncode, output or "", timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(None, output or "", timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


if __name__ == "__main__":
    sys.exit(main())
