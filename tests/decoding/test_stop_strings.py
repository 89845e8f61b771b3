"""Stop strings that begin or end inside a token, or inside a character."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bass_jax.decoding.stop_strings import StopStrings
from tests.letters import Letters

LETTERS = Letters(26)


def ids(text: str) -> np.ndarray:
    return LETTERS.encode_batch([text])[0]


def feed(stops: StopStrings, parts, row: int = 0):
    """Pushes parts until the row ends. Returns the number of tokens that were kept, and the streamed text."""
    num, text = 0, ""
    for i, part in enumerate(parts):
        kept, new = stops.push(row, part, i == len(parts) - 1)
        num, text = num + kept, text + new
        if stops.is_hit[row]:
            break
    assert stops.texts[row] == text
    return num, text


@pytest.mark.parametrize(
    "parts, strings, num, text",
    [
        (["abc"], [], 3, "abc"),
        (["abc"], ["b"], 2, "a"),
        (["a", "b", "c"], ["bc"], 3, "a"),
        (["aab", "cd"], ["abc"], 4, "a"),
        (["xaba", "bcz"], ["abc"], 6, "xab"),
        (["ab", "ab", "ac"], ["abac"], 6, "ab"),
        (["abc"], ["zz"], 3, "abc"),
        (["za", "b"], ["abc"], 3, "zab"),
        (["abcd"], ["bcd", "bc"], 3, "a"),
        (["abcd"], ["cd", "bc"], 3, "a"),
        (["aaa"], ["aa"], 2, ""),
        (["abc"], ["abc"], 3, ""),
        (["", "ab", "", "c"], ["bc"], 3, "a"),
    ],
)
def test_a_row_ends_with_the_token_that_completes_a_stop_string(parts, strings, num, text):
    """The text ends before the stop string."""
    assert feed(StopStrings(LETTERS, strings, 1), [ids(part) for part in parts]) == (num, text)


@given(
    text=st.text("ab", max_size=24),
    strings=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_the_result_does_not_depend_on_how_many_tokens_arrive_at_a_time(text, strings, cuts):
    """A row always ends with the first token that completes a stop string."""
    ends = [text.find(string) + len(string) for string in strings if string in text]
    num = min(ends, default=len(text))
    expected = text[:num]
    if ends:
        expected = expected[: min(start for string in strings if (start := expected.find(string)) >= 0)]
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [ids(text[start:end]) for start, end in itertools.pairwise(bounds)]
    assert feed(StopStrings(LETTERS, strings, 1), parts) == (num, expected)


def test_text_is_held_back_only_while_it_can_begin_a_stop_string():
    stops = StopStrings(LETTERS, ["stop"], 1)
    assert [stops.push(0, ids(part), False)[1] for part in ("as", "to", "s", "x")] == ["a", "", "sto", "sx"]


def test_rows_do_not_share_text():
    stops = StopStrings(LETTERS, ["ab"], 2)
    assert stops.push(0, ids("a"), False) == (1, "")
    assert stops.push(1, ids("b"), False) == (1, "b")
    assert stops.push(0, ids("b"), False) == (1, "")
    assert stops.is_hit.tolist() == [True, False]


def test_stop_strings_with_characters_of_several_tokens():
    """The euro sign has three bytes in three tokens. An incomplete one becomes a replacement character."""
    letters = Letters(5, (b"\xe2", b"\x82", b"\xac", b"x", b"y"))
    assert feed(StopStrings(letters, ["€y"], 1), [np.array(part) for part in ([3, 0], [1], [2], [4, 3])]) == (5, "x")
    assert feed(StopStrings(letters, ["€y"], 1), [np.array(part) for part in ([3, 0], [1])]) == (3, "x\ufffd")
    assert feed(StopStrings(letters, [], 1), [np.array(part) for part in ([3, 0, 1], [2, 3])]) == (5, "x€x")


def test_invalid_stop_strings_are_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        StopStrings(None, ["a"], 1)
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(LETTERS, ["a", ""], 1)
    assert StopStrings(None, [], 1).push(0, ids("abc"), True) == (3, "")
