"""Text streams: the pieces join up to the whole, and nothing after a stop string gets out."""

import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from callboard.gpu.loading.tokenizer import TextTokenizer
from callboard.gpu.text import TextStream, token_decoder


class Script:
    """A tokenizer in which token i is the i-th of the given texts or bytes."""

    strips_leading_space = False

    def __init__(self, *tokens: str | bytes, special: Iterable[int] = ()) -> None:
        self.tokens = [token.encode() if isinstance(token, str) else token for token in tokens]
        self.special_token_ids = frozenset(special)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: ids in the order of the alphabet, then "<s>" and "<tool>"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token_id for token_id, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def piece_tokenizer(*, strip: bool) -> Tokenizer:
    """SentencePiece with byte fallback, as its models are converted."""
    pieces = ["▁a", "▁", "▁▁", "b", "日", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def wrap(tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(tokenizer, name="test", special_tokens={"eos_token": "<s>"})


def pieces(stream: TextStream, ids: Iterable[int]) -> list[str]:
    return [*map(stream.push, ids), stream.finish()]


def read(
    tokens: Sequence[str], stop: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0
) -> tuple[str, str | None]:
    """Stream the tokens; return the text and the stop string that ended it."""
    stream = TextStream(
        Script(*tokens), stop=stop, include_stop=include_stop, min_tokens=min_tokens
    )
    text = "".join(pieces(stream, range(len(tokens))))
    assert stream.num_characters == len(text)
    return text, stream.stopped


# Decoding


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_join_to_the_full_decode_of_any_bytes(skip_special_tokens: bool) -> None:
    """Bad bytes, and added tokens between."""
    tokenizer = byte_tokenizer()
    wrapped = wrap(tokenizer)
    choices = random.Random(0)
    for _ in range(2000):
        ids = [choices.randrange(258) for _ in range(choices.randrange(12))]

        joined = "".join(pieces(TextStream(wrapped, skip_special_tokens=skip_special_tokens), ids))

        assert joined == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert joined == wrapped.decode(ids, skip_special_tokens=skip_special_tokens)


def test_pieces_join_to_the_full_decode_of_texts_in_many_scripts(
    reference: Mapping[str, Any],
) -> None:
    tokenizer = byte_tokenizer()
    for record in reference.values():
        text = record.prompt + record.output_text
        stream = TextStream(wrap(tokenizer), skip_special_tokens=False)

        assert "".join(pieces(stream, tokenizer.encode(text).ids)) == text


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_text_joins_to_the_full_decode(strip: bool) -> None:
    tokenizer = piece_tokenizer(strip=strip)
    wrapped = wrap(tokenizer)
    byte_ids = {byte: 6 + byte for byte in range(256)}
    words = [[i] for i in range(6)] + [[byte_ids[b] for b in c.encode()] for c in "é語🙂 "]
    choices = random.Random(1)
    for skip in (True, False):
        for _ in range(1000):
            ids = [*itertools.chain(*choices.choices(words, k=choices.randrange(7)))]

            joined = "".join(pieces(TextStream(wrapped, skip_special_tokens=skip), ids))

            assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream(Script("中".encode()[:2], "中".encode()[2:], "文"))

    assert pieces(stream, [0, 1, 2]) == ["", "中", "文", ""]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 5])
def test_finished_characters_are_not_lost_at_any_chunk_edge(interval: int) -> None:
    raw = "中文🙂é!".encode()
    chunks = [raw[i : i + interval] for i in range(0, len(raw), interval)]

    assert "".join(pieces(TextStream(Script(*chunks)), range(len(chunks)))) == "中文🙂é!"


def test_bad_bytes_and_a_cut_off_end_become_replacement_characters() -> None:
    stream = TextStream(Script(b"\xff", b"\xfe", b"\xc3", b"(", "🙂".encode()[:3]))

    text = "".join(pieces(stream, range(5)))

    assert text == "\ufffd\ufffd\ufffd(\ufffd"
    assert json.loads(json.dumps(text)) == text


def test_bad_bytes_do_not_pile_up() -> None:
    stream = TextStream(Script(b"\xff"))

    assert [stream.push(0) for _ in range(1000)] == ["\ufffd"] * 1000


def test_a_tokenizer_that_strips_drops_one_space_at_the_start_only() -> None:
    stream = TextStream(wrap(piece_tokenizer(strip=True)))

    assert "".join(pieces(stream, [2, 0, 1])) == "  a "


def test_behind_a_prompt_the_first_space_is_one_between_words() -> None:
    tokenizer = wrap(piece_tokenizer(strip=True))
    stream = TextStream(tokenizer, stop=[" a"])
    stream.continue_from(0)

    assert "".join(pieces(stream, [2, 0, 1])) == "  "
    assert stream.stopped == " a"


def test_behind_a_special_token_a_text_begins() -> None:
    script = Script(" a", "<s>", special=[1])
    script.strips_leading_space = True
    stream = TextStream(script)
    stream.continue_from(1)

    assert "".join(pieces(stream, [0, 0])) == "a a"


def test_special_tokens_show_only_on_request() -> None:
    script = Script("a", "<end>", "b", special=[1])

    shown = TextStream(script, skip_special_tokens=False)

    assert "".join(pieces(TextStream(script), [0, 1, 2])) == "ab"
    assert "".join(pieces(shown, [0, 1, 2])) == "a<end>b"


def test_the_same_ids_give_the_same_pieces_again() -> None:
    choices = random.Random(2)
    script = Script(*(bytes([byte]) for byte in "añ🙂END".encode()), "EN", "D")
    ids = [choices.randrange(len(script.tokens)) for _ in range(300)]

    first = TextStream(script, stop=["ENDEND"])
    second = TextStream(script, stop=["ENDEND"])

    assert pieces(first, ids) == pieces(second, ids)
    assert first.num_characters == second.num_characters


@pytest.mark.parametrize("spec", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_of_another_kind_is_refused(spec: dict[str, object] | None) -> None:
    with pytest.raises(ValueError, match=str(spec and spec["type"])):
        token_decoder(spec)


# Stop strings


def test_a_stop_inside_a_token_cuts_the_rest_of_the_token() -> None:
    assert read(["so ", "END!! more", "even more"], ["END"]) == ("so ", "END")


def test_a_stop_across_tokens_never_shows_its_beginning() -> None:
    stream = TextStream(Script("so E", "N", "D", "!"), stop=["END"])

    assert pieces(stream, range(4)) == ["so ", "", "", "", ""]
    assert stream.stopped == "END"
    assert stream.num_tokens == 3


def test_both_forms_of_a_word_stop() -> None:
    """A word has other ids after a space than at a start."""
    assert read(["please", " stop", " it"], ["stop"]) == ("please ", "stop")
    assert read(["please\n", "stop", " it"], ["stop"]) == ("please\n", "stop")


def test_an_end_that_began_a_stop_is_flushed() -> None:
    assert read(["pi", "zz", "a, ja", "zz"], ["zzz"]) == ("pizza, jazz", None)


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "stopped"),
    [
        (["a", "b"], [], "ab", None),
        ([], ["x"], "", None),
        (["stop"], ["stop"], "", "stop"),
        (["a", "stop"], ["stop"], "a", "stop"),
        (["a", "st", "op", "b"], ["stop"], "a", "stop"),
        (["a", "xstopy", "b"], ["stop"], "ax", "stop"),  # also where no token ends
        (["a", "st"], ["stop"], "ast", None),
        (["op", "st"], ["stop"], "opst", None),
        (["a", "b"], ["a longer one than all the text"], "ab", None),
        (["a", "b", "c"], ["x", "b", "c"], "a", "b"),
        (["a", "b"], ["x", "y"], "ab", None),
    ],
)
def test_a_stop_is_found_where_it_ends_and_nowhere_else(
    tokens: list[str], stop: list[str], text: str, stopped: str | None
) -> None:
    assert read(tokens, stop) == (text, stopped)


def test_text_that_turns_out_not_to_stop_is_released_at_once() -> None:
    stream = TextStream(Script("a-", "-", "b"), stop=["--END"])

    assert pieces(stream, range(3)) == ["a", "", "--b", ""]


def test_only_as_much_is_held_back_as_could_still_begin_a_stop() -> None:
    stream = TextStream(Script("xaab", "aab", "c"), stop=["aabaac"])

    assert pieces(stream, range(3)) == ["x", "aab", "aabc", ""]


def test_the_stop_that_ends_first_counts_in_whatever_order_they_are_named() -> None:
    for stop in itertools.permutations(["world", "lo", "hello wo"]):
        assert read(["hello world"], stop) == ("hel", "lo")


def test_of_stops_that_end_together_the_longest_counts() -> None:
    for stop in (["D", "END"], ["END", "D"]):
        assert read(["the END"], stop) == ("the ", "END")


def test_the_stop_does_not_depend_on_how_the_text_is_cut_into_tokens() -> None:
    text = "abcabcabdabcdabcab"
    for size in range(1, len(text)):
        tokens = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(tokens, ["abcd", "dab", "bcabd"]) == ("abca", "bcabd")


def test_a_slow_search_finds_the_same_stop() -> None:
    choices = random.Random(3)
    for _ in range(3000):
        tokens = ["".join(choices.choices("ab", k=choices.randint(1, 3))) for _ in range(8)]
        stop = ["".join(choices.choices("ab", k=choices.randint(2, 5))) for _ in range(2)]
        text = "".join(tokens)
        ends = [
            (end, end - len(s), s)
            for s in stop
            for end in range(len(s), len(text) + 1)
            if text[:end].endswith(s)
        ]
        expected = (text, None) if not ends else (text[: min(ends)[1]], min(ends)[2])

        assert read(tokens, stop) == expected


def test_the_stop_is_part_of_the_text_when_asked_for() -> None:
    assert read(["so E", "ND!"], ["END"], include_stop=True) == ("so END", "END")


def test_a_stop_may_end_in_the_middle_of_bytes() -> None:
    stream = TextStream(Script("日".encode() + "本".encode()[:1], "本".encode()[1:]), stop=["日"])

    assert pieces(stream, [0, 1]) == ["", "", ""]
    assert stream.stopped == "日"


def test_a_stop_made_by_the_flushed_end_counts() -> None:
    stream = TextStream(Script(b"ab\xe6"), stop=["\ufffd"])

    assert pieces(stream, [0]) == ["ab", ""]
    assert stream.stopped == "\ufffd"


def test_stops_wait_for_the_minimum_of_tokens() -> None:
    assert read(["END", "END", "END"], ["END"], min_tokens=2) == ("END", "END")
    assert read(["E", "ND", "x"], ["END"], min_tokens=2) == ("", "END")
    assert read(["ab", "x", "ab"], ["ab", "abab"], min_tokens=2) == ("abx", "ab")
    assert read(["END"], ["END"], min_tokens=2) == ("END", None)


# Costs


def test_memory_is_that_of_the_longest_stop_not_of_the_text() -> None:
    stream = TextStream(Script("a", "b"), stop=["a" * 1000 + "b", "ba"])
    tracemalloc.start()
    for _ in range(20_000):
        stream.push(0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert stream.num_characters == 19_000
    assert held < 100_000


def test_a_token_costs_the_same_early_and_late() -> None:
    stream = TextStream(Script("word ", b"\xe6"), stop=["Observation:", "\n\nUser:"])

    def cost_of_1000() -> float:
        start = time.process_time()
        for _ in range(1000):
            stream.push(0)
            stream.push(1)
        return time.process_time() - start

    early = min(cost_of_1000() for _ in range(3))
    for _ in range(10_000):
        stream.push(0)
    late = min(cost_of_1000() for _ in range(3))

    assert late < 5 * early
