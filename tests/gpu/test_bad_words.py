import random

import numpy as np
import numpy.typing as npt

from callboard.gpu.bad_words import BadWords


def ids(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def completing(words: BadWords, *lines: int) -> list[set[int]]:
    """The tokens that must not come next, line by line."""
    index, tokens = words.completing(np.array(lines))
    found: list[set[int]] = [set() for _ in lines]
    for place, token in zip(index.tolist(), tokens.tolist(), strict=True):
        found[place].add(token)
    return found


def test_nothing_is_forbidden_where_nobody_asked() -> None:
    words = BadWords()
    words.write(1, (), ids(1, 2))
    words.push(np.array([1]), ids(3))

    assert completing(words, 0, 1) == [set(), set()]


def test_the_last_token_is_forbidden_once_all_before_it_have_come() -> None:
    words = BadWords()
    words.write(1, [(3, 4, 5)], ids())
    forbidden = []

    for token in (4, 3, 3, 4, 4):
        words.push(np.array([1]), ids(token))
        forbidden += completing(words, 1)

    assert forbidden == [set(), set(), set(), {5}, set()]


def test_output_from_before_counts() -> None:
    words = BadWords()
    words.write(1, [(3, 4, 5), (4, 6), (9, 3, 4, 7)], ids(1, 3, 4))

    assert completing(words, 1) == [{5, 6}]


def test_a_sequence_longer_than_the_output_does_not_come_yet() -> None:
    words = BadWords()
    words.write(1, [(3, 3, 5)], ids(3))

    assert completing(words, 1) == [set()]


def test_token_zero_is_a_token_like_any_other() -> None:
    words = BadWords()
    words.write(1, [(0, 1), (0, 0, 2)], ids(0))
    words.write(2, [(0, 1)], ids())

    assert completing(words, 1, 2) == [{1}, set()]


def test_longer_sequences_of_a_later_line_leave_earlier_lines_as_they_are() -> None:
    words = BadWords()
    words.write(1, [(1, 2)], ids(7, 1))
    words.write(5, [(9,) * 40] * 3, ids(*[9] * 100))

    assert completing(words, 5, 1, 0) == [{9}, {2}, set()]


def test_it_agrees_with_a_slow_search() -> None:
    choose = random.Random(2)
    words = BadWords()
    lines = (1, 2, 4)
    sequences = {
        line: [
            tuple(choose.randrange(3) for _ in range(choose.randrange(2, 6)))
            for _ in range(line * 4)
        ]
        for line in lines
    }
    output: dict[int, list[int]] = {line: [] for line in lines}
    for line in lines:
        words.write(line, sequences[line], ids())

    for _ in range(200):
        tokens = [choose.randrange(3) for _ in lines]
        words.push(np.array(lines), ids(*tokens))
        for line, token in zip(lines, tokens, strict=True):
            output[line].append(token)
        expected = [
            {last for *before, last in sequences[line] if output[line][-len(before) :] == before}
            for line in lines
        ]
        assert completing(words, *lines) == expected
