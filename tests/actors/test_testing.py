import pytest

from callboard.actors.testing import ScriptedRunner, count_up
from callboard.messages.base import pack_ids, unpack_ids
from callboard.messages.steps import Admit, Continue, Grant, RowSampling, RunStep, StepDone


def admit(
    row: int = 1,
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    num_tokens: int | None = None,
    blocks: int = 1,
    max_tokens: int = 9,
    min_tokens: int = 0,
    stops: tuple[int, ...] = (),
    first_position: int = 0,
) -> Admit:
    return Admit(
        row=row,
        prompt=pack_ids(prompt),
        num_tokens=len(prompt) if num_tokens is None else num_tokens,
        blocks=tuple(range(16 * row, 16 * row + blocks)),
        sampling=RowSampling(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            first_position=first_position,
        ),
    )


def runner(
    *, block_tokens: int = 4, max_rows: int = 16, max_step_tokens: int = 64
) -> ScriptedRunner:
    scripted = ScriptedRunner(
        block_tokens=block_tokens, max_rows=max_rows, max_step_tokens=max_step_tokens
    )
    scripted.load()
    scripted.allocate()
    return scripted


def tokens(done: StepDone) -> dict[int, int]:
    return dict(zip(done.rows, unpack_ids(done.token_ids), strict=True))


def test_it_counts_up_and_wraps_at_its_vocabulary() -> None:
    assert count_up([5, 6]) == 7
    assert count_up([999]) == 0


def test_a_row_gets_a_token_a_step_from_all_tokens_so_far() -> None:
    scripted = runner()
    first = scripted.execute(RunStep(step=1, admits=(admit(), admit(2, (8,)))))
    assert tokens(first) == {1: 4, 2: 9}
    assert first.num_tokens == 4
    second = scripted.execute(RunStep(step=2))
    assert tokens(second) == {1: 5, 2: 10}
    assert second.num_tokens == 2


def test_a_prompt_in_parts_samples_when_it_is_whole() -> None:
    scripted = runner()
    assert tokens(scripted.execute(RunStep(step=1, admits=(admit(num_tokens=2),)))) == {}
    assert tokens(scripted.execute(RunStep(step=2))) == {}  # half prefilled rows do not decode
    rest = Continue(row=1, num_tokens=1, blocks=())
    assert tokens(scripted.execute(RunStep(step=3, continues=(rest,)))) == {1: 4}


def test_a_row_without_room_waits_for_its_grant() -> None:
    scripted = runner(block_tokens=4)
    scripted.execute(RunStep(step=1, admits=(admit(),)))
    assert tokens(scripted.execute(RunStep(step=2))) == {1: 5}
    assert tokens(scripted.execute(RunStep(step=3))) == {}
    grant = Grant(row=1, block=7)
    assert tokens(scripted.execute(RunStep(step=4, grants=(grant,)))) == {1: 6}


def test_a_stop_token_ends_a_row_once_it_has_its_least_tokens() -> None:
    scripted = runner()
    done = scripted.execute(
        RunStep(step=1, admits=(admit(1, stops=(4,)), admit(2, stops=(4,), min_tokens=1)))
    )
    assert (done.stopped, done.full) == ((1,), ())
    assert tokens(scripted.execute(RunStep(step=2))) == {2: 5}


def test_a_row_is_full_counting_the_tokens_of_its_earlier_life() -> None:
    scripted = runner()
    done = scripted.execute(RunStep(step=1, admits=(admit(max_tokens=3, first_position=2),)))
    assert done.full == (1,)
    assert tokens(scripted.execute(RunStep(step=2))) == {}


def test_dropped_rows_are_gone_and_unknown_ones_ignored() -> None:
    scripted = runner()
    scripted.execute(RunStep(step=1, admits=(admit(),)))
    scripted.drop((1, 77))
    assert tokens(scripted.execute(RunStep(step=2))) == {}


def test_freeing_the_cache_forgets_all_rows_and_says_the_bytes_once() -> None:
    scripted = runner()
    scripted.execute(RunStep(step=1, admits=(admit(),)))
    assert (scripted.free_kv(), scripted.free_kv()) == (2000, 0)
    assert (scripted.free_weights(), scripted.free_weights()) == (1000, 0)
    described = scripted.describe()
    assert (described["loaded"], described["allocated"]) == (0, 0)
    scripted.load()
    scripted.allocate()
    assert tokens(scripted.execute(RunStep(step=2))) == {}


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (RunStep(step=1, admits=(admit(), admit())), "a row twice"),
        (RunStep(step=1, admits=(admit(prompt=(1,) * 5),)), "more tokens than blocks"),
        (RunStep(step=1, admits=(admit(1), admit(2), admit(3))), "more rows than there are places"),
        (RunStep(step=1, admits=(admit(prompt=(1,) * 11, blocks=3),)), "more tokens than a step"),
    ],
)
def test_a_step_that_a_real_device_could_not_run_is_an_error(step: RunStep, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        runner(max_rows=2, max_step_tokens=10).execute(step)


def test_a_step_without_weights_or_cache_is_an_error() -> None:
    scripted = ScriptedRunner()
    with pytest.raises(AssertionError, match="without weights"):
        scripted.execute(RunStep(step=1))
    scripted.load()
    with pytest.raises(AssertionError, match="without a cache"):
        scripted.execute(RunStep(step=1))
