"""The pages tell the truth: their code runs, their commands exist, their links lead somewhere."""

import io
import logging
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from callboard.supervision.cli.main import app, main
from callboard.supervision.settings import DEFAULT_ENDPOINT, load_settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)
NUMBER = r"\d+(?:\.\d+)?"

LANGUAGES = {"console", "python", "text", "toml"}

RUN = {"abort", "generate", "pause", "resume", "status", "step", "suspend", "unpause"}
"""The commands that are run with a real server; of the others only the options are checked."""

START_S = 120
STOP_S = 60


class Block(NamedTuple):
    """A fenced block, and the text block right behind it, which is what it prints."""

    page: Path
    line: int
    language: str
    source: str
    printed: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    behind = {
        first.start(): second[2]
        for first, second in pairwise(found)
        if second[1] == "text" and not text[first.end() : second.start()].strip()
    }
    for match in found:
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[1], match[2], behind.get(match.start(), ""))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def name_of(block: Block) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def in_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands set up logging for a process of their own."""
    logger = logging.getLogger("callboard")
    before = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[str]:
    """The endpoint of `callboard serve` with the default model; stopped by `callboard stop`."""
    with tempfile.TemporaryDirectory(prefix="callboard-docs-") as folder:
        endpoint = f"ipc://{folder}/server"
        options = ["--model", str(default_model), "--listen", endpoint, "--kv-cache-gb", "0.1"]
        with serving(options) as process:
            waited = run(["status", "--wait", "running", "--timeout", str(START_S)], endpoint)
            assert process.stdout is not None
            assert (waited.code, process.stdout.readline()) == (
                0,
                f"callboard: ready at {endpoint}\n",
            )
            yield endpoint
            assert run(["stop"], endpoint).code == 0
            assert process.wait(timeout=STOP_S) == 0


@contextmanager
def serving(options: list[str]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "callboard", "serve", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Ran(NamedTuple):
    code: int
    printed: str


def run(words: list[str], endpoint: str) -> Ran:
    """Run a command in this process; what it prints is both streams in one."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setenv("CALLBOARD_ENDPOINT", endpoint)
        code = main(words)
    return Ran(code, printed.getvalue())


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {name_of(block) for block in BLOCKS if block.language not in LANGUAGES} == set()


# Python


@pytest.mark.parametrize(
    "block",
    {block.source: block for block in reversed(in_language("python"))}.values(),
    ids=name_of,
)
def test_a_program_runs_and_prints_what_is_said(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint = request.getfixturevalue("server") if DEFAULT_ENDPOINT in block.source else ""
    request.getfixturevalue("default_model")
    program = tmp_path / "program.py"
    program.write_text(block.source.replace(DEFAULT_ENDPOINT, endpoint))
    capfd.readouterr()

    runpy.run_path(str(program), run_name="__main__")

    assert block.printed in ("", capfd.readouterr().out)


def test_every_example_but_the_tour_is_shown_on_a_page() -> None:
    shown = {block.source for block in in_language("python")}
    examples = {path.name: path.read_text() for path in (DOCS / "examples").glob("*.py")}

    assert {name for name, source in examples.items() if source not in shown} == {"demo.py"}


# Commands


class Step(NamedTuple):
    """A command of a session, and what it is said to print."""

    words: list[str]
    printed: str


def steps_of(source: str) -> Iterator[Step]:
    assert source.startswith("$ "), "a console block begins with a command"
    for part in re.split(r"^\$ ", source, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield Step(shlex.split(command), printed)


def all_steps() -> Iterator[tuple[Block, Step]]:
    for block in in_language("console"):
        for step in steps_of(block.source):
            yield block, step


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(step.words, id=f"{name_of(block)} {step.words[0]}")
        for block, step in all_steps()
    ],
)
def test_a_command_that_is_shown_exists_with_its_options(words: list[str]) -> None:
    while "=" in words[0]:
        words = words[1:]
    match words:
        case ["callboard", name, *arguments]:
            group: Any = typer.main.get_command(app)
            group.commands[name].make_context(name, arguments)
        case ["make", *targets]:
            assert set(targets) <= set(TARGET.findall((ROOT / "Makefile").read_text()))
        case [".venv/bin/python" | ".venv/bin/pytest", *paths]:
            assert [path for path in paths if not (ROOT / path).exists()] == []
        case [".venv/bin/mypy"] | ["mv", _, _] | ["echo", "$?"] | ["kill", "-TERM", _]:
            pass
        case _:
            pytest.fail(f"nothing is known about {shlex.join(words)}")


@pytest.mark.parametrize(
    "page",
    sorted({block.page for block, step in all_steps() if step.words[0] == "callboard"}),
    ids=lambda page: page.name,
)
def test_a_session_goes_as_the_page_says(page: Path, server: str) -> None:
    """Numbers may differ, and `...` stands for anything."""
    code = 0
    for block in blocks_of(page):
        for step in steps_of(block.source) if block.language == "console" else ():
            match step.words:
                case ["callboard", name, *arguments] if name in RUN:
                    words = [name, *(word.replace(DEFAULT_ENDPOINT, server) for word in arguments)]
                    code, printed = run(words, server)
                    said = step.printed.replace(DEFAULT_ENDPOINT, server)
                    assert not said or is_like(printed, said), f"{name_of(block)}: {printed}"
                case ["echo", "$?"]:
                    assert step.printed == f"{code}\n", name_of(block)
    assert run(["status"], server).printed.splitlines()[0].endswith(": running")


def is_like(printed: str, said: str) -> bool:
    parts = re.split(rf"({NUMBER}|\.\.\.)", said)
    pattern = "".join(map(pattern_of, parts))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def pattern_of(part: str) -> str:
    if re.fullmatch(NUMBER, part):
        return NUMBER
    return ".*" if part == "..." else re.escape(part)


# Settings


@pytest.mark.parametrize("block", in_language("toml"), ids=name_of)
def test_a_file_of_settings_is_taken(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "callboard.toml"
    path.write_text(block.source)

    settings = load_settings(path)

    assert {key: getattr(settings, key) for key in tomllib.loads(block.source)} == tomllib.loads(
        block.source
    )


# Links and folders


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each link within the repository."""
    for target in LINK.findall(prose_of(page)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors_of(page: Path) -> set[str]:
    headings = HEADING.findall(prose_of(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        f"{path}#{anchor}"
        for path, anchor in links_of(page)
        if not path.exists() or (anchor and anchor not in anchors_of(path))
    ]

    assert broken == []


def test_the_index_lists_every_page_and_example() -> None:
    index = DOCS / "README.md"
    files = {*DOCS.rglob("*.md"), *(DOCS / "examples").glob("*.py")} - {index}

    assert files - {path for path, _ in links_of(index)} == set()


def test_the_front_page_names_the_folders() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [ROOT / folder for folder in table["package-dir"].values()]
    named = [path for path, _ in links_of(ROOT / "README.md") if path.is_dir()]

    assert sorted(named) == sorted(folders)
