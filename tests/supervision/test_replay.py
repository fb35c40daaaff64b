import random
from pathlib import Path

import pytest
import trio

from callboard.actors.kv_allocator import KVAllocator
from callboard.actors.testing import ScriptedRunner
from callboard.messages.control import PauseMode
from callboard.supervision.app import ReplicaParts
from callboard.supervision.cli.main import main
from callboard.supervision.engine import open_engine
from callboard.supervision.replay import arrows, diagram, read, run_again
from callboard.supervision.settings import Settings


def scripted() -> ReplicaParts:
    return ReplicaParts(
        make_runner=lambda: ScriptedRunner(num_blocks=12, max_rows=6, max_step_tokens=16),
        codec=None,
        text_for=None,
        vocab_size=1000,
        eos_token_ids=(0,),
    )


async def write_journal(folder: Path, **settings: object) -> None:
    """A conversation with waiting, evictions, aborts, a pause and a suspension."""
    choose = random.Random(1)
    async with (
        open_engine(msgspec_settings(folder, **settings), parts=scripted()) as engine,
        trio.open_nursery() as nursery,
    ):

        async def ask(number: int) -> None:
            prompt = [choose.randint(1, 3) for _ in range(choose.randint(1, 14))]
            async with engine.submit(
                prompt, max_tokens=choose.randint(1, 20), request_id=f"r{number}"
            ) as stream:
                async for _ in stream:
                    if number % 5 == 4:
                        break

        for number in range(20):
            nursery.start_soon(ask, number)
        await engine.pause(PauseMode.KEEP)
        await engine.suspend()
        await engine.resume()
        await engine.unpause()


def msgspec_settings(folder: Path, **settings: object) -> Settings:
    return Settings(journal=str(folder), model="script", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [{}, {"pipeline_depth": 2}, {"prefill_chunk_tokens": 3, "prefix_caching": False}],
    ids=str,
)
async def test_what_schedulers_and_allocators_did_they_do_again(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    await write_journal(tmp_path, **settings)

    [process] = read(tmp_path)
    verdicts = await trio.to_thread.run_sync(run_again, process)

    assert {verdict.actor for verdict in verdicts} == {
        "replica-0/scheduler",
        "replica-0/kv_allocator",
    }
    for verdict in verdicts:
        assert (verdict.difference, verdict.skipped) == ("", "")
        assert verdict.alike > 20


async def test_one_that_does_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_journal(tmp_path)
    release = KVAllocator._release

    def forget_one(self: KVAllocator, rows: tuple[int, ...]) -> None:
        release(self, tuple(row for row in rows if row != 3))

    monkeypatch.setattr(KVAllocator, "_release", forget_one)
    [process] = read(tmp_path)
    verdicts = await trio.to_thread.run_sync(run_again, process)

    found = {verdict.actor: verdict.difference for verdict in verdicts}
    assert "to replica-0/scheduler" in found["replica-0/kv_allocator"]
    assert found["replica-0/scheduler"] == ""


async def test_a_life_without_its_beginning_is_not_run_again(tmp_path: Path) -> None:
    await write_journal(tmp_path)
    [entries] = read(tmp_path)

    verdicts = await trio.to_thread.run_sync(run_again, entries[len(entries) // 2 :])

    assert all("beginning" in verdict.skipped for verdict in verdicts)


async def test_a_diagram_draws_each_message_from_its_sender_to_its_receiver(
    tmp_path: Path,
) -> None:
    await write_journal(tmp_path)
    shown = list(arrows(read(tmp_path), actors=["replica-0/kv_allocator"]))

    lines = list(diagram(shown))

    assert len(lines) == len(shown) + 1
    asked = next(line for line in lines if "ReserveBlocks(step=1)" in line)
    answered = next(line for line in lines if "BlocksGranted(step=1)" in line)
    assert ("<" in asked) != (">" in asked)
    assert (">" in answered) == ("<" in asked)  # the other way
    assert "replica-0/scheduler" in lines[0]


async def test_a_diagram_can_be_about_one_request(tmp_path: Path) -> None:
    await write_journal(tmp_path)
    labels = [arrow.label for arrow in arrows(read(tmp_path), about="r7")]
    assert labels
    assert labels[0].startswith("Said Submit(request_id=r7")
    assert all("RunStep" not in label for label in labels)


def test_an_empty_diagram_has_no_lines() -> None:
    assert list(diagram([])) == []


def journal_in(folder: Path) -> Path:
    trio.run(write_journal, folder)
    return folder


def test_the_command_shows_a_diagram_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal_in(tmp_path)
    assert main(["replay", str(tmp_path), "--actor", "replica-0/executor", "--limit", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert main(["replay", str(tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert "replica-0/scheduler, life 1: " in said
    assert said.count("all alike") == 2


def test_what_processes_wrote_is_kept_apart_whatever_names_and_ids_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, process in enumerate(
        ["replica-0-20260101T000000-11", "replica-0-20260101T000000-12"]
    ):
        alone = journal_in(tmp_path / str(number))
        [file] = alone.iterdir()
        entries = file.read_bytes()
        # As if the file had been full half way, at the end of an entry.
        half = boundary_near(entries, len(entries) // 2)
        (tmp_path / f"{process}-0001.journal").write_bytes(entries[:half])
        (tmp_path / f"{process}-0002.journal").write_bytes(entries[half:])
    apart = [list(arrows(read(tmp_path / str(number)))) for number in range(2)]

    assert main(["replay", str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out.count("all alike") == 4
    together = list(arrows(read(tmp_path)))
    assert together == sorted([*apart[0], *apart[1]], key=lambda arrow: arrow.at)


def boundary_near(entries: bytes, wanted: int) -> int:
    """Return where in a journal's file the first entry begins that is behind `wanted`."""
    place = 0
    while place < wanted:
        place += 4 + int.from_bytes(entries[place : place + 4], "little")
    return place


@pytest.mark.parametrize("content", [None, b"\x05\x00\x00\x00hello"], ids=["none", "other"])
def test_what_is_no_journal_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "x.journal").write_bytes(content)
    assert main(["replay", str(tmp_path)]) == 1
    assert "journal" in capsys.readouterr().err
