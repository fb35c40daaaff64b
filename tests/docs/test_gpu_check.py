"""The script that checks a GPU, on a machine that has none: everything but what needs the GPU."""

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from callboard.supervision.engine import open_engine
from callboard.supervision.settings import Settings

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"

SMALL = {"W1": [([1, 2, 3], 4)], "W2": [([5] * 40, 3), ([6], 5)], "W4": [([7] * 9, 1)]}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The scripts as modules, imported as they import one another."""
    names = ("gpu_check", "engine", "workloads")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            patch.delitem(sys.modules, name)


@pytest.fixture
def gpu_check(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CALLBOARD_WHEELS", raising=False)
    return scripts["gpu_check"]


def settings() -> Settings:
    return Settings(model="random:tiny", device="cpu", kv_cache_gb=0.01, threads=1)


# What is asked of it


def test_without_cuda_it_says_so_in_one_line_and_exits_with_2(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    code = gpu_check.main([])

    [line] = capsys.readouterr().out.splitlines()
    assert code == 2
    assert line.startswith("gpu-check needs a CUDA device: torch ")


def test_the_command_line_has_defaults_and_the_folder_of_wheels_comes_from_the_environment(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = gpu_check.parse([])
    monkeypatch.setenv("CALLBOARD_WHEELS", str(tmp_path))
    told = gpu_check.parse(["--json", "figures.json", "--deadline", "60", "--model", "m.gguf"])

    assert (plain.wheels, plain.deadline, plain.model) == (None, 570.0, "")
    assert (told.wheels, told.deadline, told.model) == (tmp_path, 60.0, "m.gguf")
    assert told.json == Path.cwd() / "figures.json"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--deadline", "0"], "--deadline is 0, and must be above 0"),
        (["--wheels", "/no/such/folder"], "the folder of wheels '/no/such/folder' is not there"),
    ],
)
def test_what_cannot_be_is_refused(
    gpu_check: Any, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(arguments)

    assert reason in capsys.readouterr().err


# Packages


def test_it_needs_what_the_engine_and_the_tests_need_and_no_tools(gpu_check: Any) -> None:
    names = set(map(gpu_check.distribution_of, gpu_check.requirements()))

    assert {"torch", "trio", "msgspec", "pyzmq", "pytest", "pytest-trio"} <= names
    assert not {"mypy", "ruff", "transformers"} & names
    assert gpu_check.missing_requirements() == []


def test_what_is_missing_is_named_with_the_way_to_bring_it(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "why_no_cuda", lambda: None)
    monkeypatch.setattr(gpu_check, "requirements", lambda: ["msgspec>=0.1", "no-such-thing>=2"])

    code = gpu_check.main([])

    output = capsys.readouterr().out
    assert code == 2
    assert "has no no-such-thing." in output
    assert "'no-such-thing>=2'" in output
    assert "CALLBOARD_WHEELS=wheels make gpu-check" in output


def write_wheel(folder: Path, name: str) -> None:
    """Write a wheel of one module with nothing in it."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_are_installed_beside_the_packages_of_this_python_and_go_again(
    gpu_check: Any, tmp_path: Path
) -> None:
    """Takes seconds: it makes an environment and runs pip in it."""
    write_wheel(tmp_path, "callboard_test_wheel")

    with gpu_check.throw_away_environment() as python:
        wanted = ["callboard_test_wheel"]
        installed = gpu_check.install(wanted, tmp_path, python, gpu_check.Clock(60))
        code = "import callboard_test_wheel, torch, msgspec; print(callboard_test_wheel.__file__)"
        done = gpu_check.run((python, "-c", code), 60, capture=True)
        none = gpu_check.install(["no_such_wheel"], tmp_path, python, gpu_check.Clock(60))

    assert installed
    assert done.error is None
    assert not none
    assert not Path(done.output.strip()).exists()
    assert not Path(python).exists()


# Tests


def test_it_runs_the_files_with_tests_marked_gpu(gpu_check: Any) -> None:
    files = {path.name for path in gpu_check.files_with_gpu_tests()}

    assert {"test_on_cuda.py", "test_attention_flash.py"} <= files
    assert "test_blocks.py" not in files


RESULTS = """
<testsuites><testsuite>
  <testcase classname="tests.a" name="good" />
  <testcase classname="tests.a" name="bad"><failure message="no">trace</failure></testcase>
  <testcase classname="tests.a" name="broken"><error message="no">trace</error></testcase>
  <testcase classname="tests.a" name="flash"><skipped message="no flash-attn" /></testcase>
</testsuite></testsuites>
"""


def test_results_of_tests_are_counted_and_named(gpu_check: Any, tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)

    assert gpu_check.read_results(tmp_path / "results.xml") == {
        "passed": 1,
        "failed": ["tests.a::bad", "tests.a::broken"],
        "skipped": {"tests.a::flash": "no flash-attn"},
    }


# Processes and time


def test_a_process_that_takes_too_long_is_ended_and_what_it_said_is_kept(gpu_check: Any) -> None:
    done = gpu_check.run(("sh", "-c", "echo one; sleep 60 & sleep 60"), 0.2, capture=True)

    assert (done.code, done.output) == (None, "one\n")
    assert done.error == "did not end within 0 s"


def test_a_process_imports_the_checkout_and_its_failure_is_told(gpu_check: Any) -> None:
    good = gpu_check.run((sys.executable, "-c", "import callboard.messages"), 60)
    bad = gpu_check.run(("sh", "-c", "exit 3"), 60)

    assert (good.error, bad.error) == (None, "exit code 3")


def test_time_is_never_less_than_none(gpu_check: Any) -> None:
    assert gpu_check.Clock(-1).at_most(5) == 0.0
    assert 4 < gpu_check.Clock(5).at_most(9) <= 5


# The benchmark


async def test_requests_are_timed(scripts: dict[str, Any]) -> None:
    async with open_engine(settings()) as engine:
        figures = await scripts["engine"].measure(engine, SMALL["W2"])
        alone = await scripts["engine"].measure(engine, SMALL["W4"])

    assert all(value > 0 for value in figures.values())
    assert figures["prompt_tokens_per_s"] == pytest.approx(41 / 8 * figures["output_tokens_per_s"])
    assert alone["itl_ms"] is None


async def test_the_benchmark_prints_what_the_check_reads_and_shows(
    scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_check = scripts["gpu_check"]

    await scripts["engine"].run(settings(), SMALL, repetitions=2)
    read = gpu_check.read_figures(capsys.readouterr().out + "a line of something else\n")

    assert read["engine"]["device"] == "cpu"
    assert read["engine"]["attention"] == "sdpa"
    assert list(read["workloads"]) == ["W1", "W2", "W4"]
    case = {"dtype": "float32", "attention": "sdpa", "error": None, **read}
    cells = gpu_check.row(case).split()
    assert cells[:2] == ["float32", "sdpa"]
    assert [cell == "-" for cell in cells[2:]] == [False, False, False, True, False]


def test_the_report_names_what_failed_and_was_skipped(gpu_check: Any) -> None:
    report = {
        "machine": {"gpu": "a GPU", "torch": "2.0"},
        "tests": {
            "passed": 3,
            "failed": ["tests.a::bad"],
            "skipped": {"tests.a::flash": "no flash-attn"},
            "error": "exit code 1",
        },
        "benchmark": [
            {
                "dtype": "float16",
                "attention": "flash",
                "workloads": {"W1": {"ttft_ms": 1234.56, "itl_ms": None}},
                "error": "did not end within 90 s",
            }
        ],
    }

    lines = gpu_check.summary(report).splitlines()

    assert lines[1:5] == [
        "a GPU, torch 2.0",
        "tests: 3 passed, 1 failed, 1 skipped (exit code 1)",
        "  failed: tests.a::bad",
        "  skipped: 1, no flash-attn",
    ]
    assert lines[-1].split() == [
        *("float16", "flash", "1,234.6", "-", "-", "-", "-"),
        *("did", "not", "end", "within", "90", "s"),
    ]
    assert not gpu_check.passed(report)


def test_random_weights_stand_in_for_a_model_that_is_not_there(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path))
    engine = scripts["engine"]

    with engine.model_or_random("") as model, engine.model_or_random("mine.gguf") as named:
        decoder = engine.read_config(model).decoder

    assert named == "mine.gguf"
    assert model.startswith("random:")
    assert (decoder.num_layers, decoder.vocab_size, decoder.head_dim) == (30, 49152, 64)


def test_the_stand_in_has_the_shape_of_the_default_model(
    scripts: dict[str, Any], default_model: Path, tmp_path: Path
) -> None:
    engine = scripts["engine"]
    (tmp_path / "config.json").write_text(json.dumps(engine.DEFAULT_MODEL_SHAPE))

    ours = engine.read_config(f"random:{tmp_path / 'config.json'}").decoder

    theirs = engine.read_config(str(default_model)).decoder
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert {**to_dict(ours), "rms_norm_eps": 0} == {**to_dict(theirs), "rms_norm_eps": 0}


def to_dict(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_the_workloads_are_the_same_each_time_and_fresh_in_each_repetition(
    scripts: dict[str, Any],
) -> None:
    workloads = scripts["workloads"]
    made = workloads.make()

    sizes = {
        name: (len(work), sum(len(prompt) for prompt, _ in work), sum(num for _, num in work))
        for name, work in made.items()
    }

    assert made == workloads.make()
    assert sizes == {
        "W1": (1, 128, 64),
        "W2": (16, 2294, 1024),
        "W3": (64, 8427, 4744),
        "W4": (1, 2048, 1),
    }
    once, again = workloads.fresh(made["W1"], 0), workloads.fresh(made["W1"], 1)
    assert all(one != other for one, other in zip(once[0][0], again[0][0], strict=True))
    assert max(workloads.within(made["W1"], 100)[0][0]) < 100
