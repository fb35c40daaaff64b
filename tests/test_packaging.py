"""The four folders at the root are imported as callboard.<folder>, three ways that must agree.

pyproject.toml says it to installers, the links in callboard/ say it to type checkers and bare
clones, and the folders themselves are what both have to match.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("actors", "gpu", "messages", "supervision")

FRONT_DOOR = {"__init__.py", "__main__.py", "logs.py", "py.typed", "version.py"}

BUILD = "import sys; from setuptools import build_meta; {call}(sys.argv[1])"

# An interpreter that has the libraries, but not the .pth file of the checkout's own installation.
RESOLVE = """
import importlib.util, site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
for name in sys.argv[3:]:
    spec = importlib.util.find_spec(name)
    print(spec.submodule_search_locations[0] if spec else "missing")
import callboard.messages.codec
print(callboard.messages.codec.__file__)
"""


def setuptools_table() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    table: dict[str, Any] = project["tool"]["setuptools"]
    return table


def packages_on_disk() -> set[str]:
    inits = [init for folder in FOLDERS for init in (ROOT / folder).rglob("__init__.py")]
    parts = [init.parent.relative_to(ROOT).parts for init in inits]
    return {"callboard", *(".".join(("callboard", *part)) for part in parts)}


def modules_under(root: Path) -> set[str]:
    found = {f"callboard/{path.name}" for path in (root / "callboard").glob("*.py")}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*.py"):
            found.add(f"callboard/{path.relative_to(root).as_posix()}")
    return found


def copy_of_the_repository(target: Path, *, links: bool) -> Path:
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (target / "callboard").mkdir()
    for path in (ROOT / "callboard").iterdir():
        if path.is_file():
            shutil.copy(path, target / "callboard")
    for folder in FOLDERS if links else ():
        (target / "callboard" / folder).symlink_to(Path("..") / folder)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    return target


def build(call: str, source: Path, output: Path) -> zipfile.ZipFile:
    """Build a wheel of a copy of the repository; `call` is a function of the build backend."""
    subprocess.run(
        [sys.executable, "-c", BUILD.format(call=f"build_meta.{call}"), str(output)],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=120,
    )
    [wheel] = output.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_packages_listed_are_the_ones_on_disk() -> None:
    listed = setuptools_table()["packages"]

    assert set(listed) == packages_on_disk()
    assert len(listed) == len(set(listed))


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_four_folders_are_mapped_and_no_others() -> None:
    mapped = setuptools_table()["package-dir"]

    assert mapped == {f"callboard.{folder}": folder for folder in FOLDERS}


def test_every_folder_has_its_link() -> None:
    links = {
        path.name: os.readlink(path) for path in (ROOT / "callboard").iterdir() if path.is_symlink()
    }

    assert links == {folder: f"../{folder}" for folder in FOLDERS}


def test_the_links_lead_to_the_folders() -> None:
    for folder in FOLDERS:
        assert (ROOT / "callboard" / folder).samefile(ROOT / folder)


def test_nothing_but_the_front_door_lies_in_the_package_itself() -> None:
    own = {path.name for path in (ROOT / "callboard").iterdir() if not path.is_symlink()}

    assert own - {"__pycache__"} <= FRONT_DOOR


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_an_editable_installation_finds_every_folder(tmp_path: Path, links: bool) -> None:
    """Also on a file system that has no links: the mapping of the installer is enough."""
    pytest.importorskip("setuptools", minversion="77")
    source = copy_of_the_repository(tmp_path / "source", links=links)
    site = tmp_path / "site"
    with build("build_editable", source, tmp_path / "wheels") as wheel:
        wheel.extractall(site)

    found = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c", RESOLVE),
            *(str(site), sysconfig.get_path("purelib")),
            *(f"callboard.{folder}" for folder in FOLDERS),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()

    real = [Path(line).resolve() for line in found]
    assert real == [
        *((source / folder).resolve() for folder in FOLDERS),
        (source / "messages" / "codec.py").resolve(),
    ]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_wheel_holds_every_module_once_and_under_its_import_name(
    tmp_path: Path, links: bool
) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = copy_of_the_repository(tmp_path / "source", links=links)
    with build("build_wheel", source, tmp_path / "wheels") as wheel:
        names = wheel.namelist()

    modules = [name for name in names if name.endswith(".py")]
    assert set(modules) == modules_under(source)
    assert len(modules) == len(set(modules))
    assert "callboard/py.typed" in names


@pytest.mark.parametrize(
    "statement",
    [
        "import callboard",
        "import callboard.messages",
        "import pkgutil, importlib, callboard.messages as m\n"
        "names = [found.name for found in pkgutil.iter_modules(m.__path__)]\n"
        "assert 'codec' in names\n"
        "for name in names: importlib.import_module('callboard.messages.' + name)",
    ],
    ids=["callboard", "callboard.messages", "every module of it"],
)
def test_importing_what_is_said_does_not_import_who_computes(statement: str) -> None:
    code = (
        f"{statement}\nimport sys\nprint(*{{'torch', 'trio', 'zmq', 'numpy'}} & set(sys.modules))"
    )

    imported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout

    assert imported.split() == []
