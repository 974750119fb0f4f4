"""An answer's text as it comes: whole characters, and nothing beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.small import ids_of, tokenizer
from tierstore.serve.text import Spelling

WORDS = st.text(alphabet="ab ", min_size=1, max_size=4)


def pieces(text: str, stop: Sequence[str] = (), prompt: str = "x") -> tuple[list[str], Spelling]:
    spelling = Spelling(tokenizer(), ids_of(prompt), stop)
    found = [spelling.add(token) for token in ids_of(text)]
    return [*found, spelling.end()], spelling


def test_a_character_of_several_tokens_comes_once_it_is_whole() -> None:
    found, _ = pieces("a€ü🙂b")
    assert "".join(found) == "a€ü🙂b"
    assert "\ufffd" not in "".join(found)
    assert found[:4] == ["a", "", "", "€"]


def test_bytes_that_never_became_a_character_are_left_out() -> None:
    spelling = Spelling(tokenizer(), ids_of("x"))
    assert [spelling.add(token) for token in ids_of("a€")[:-1]] == ["a", "", ""]
    assert spelling.end() == ""


def test_special_tokens_are_no_text() -> None:
    found, _ = pieces("a<|end|>b")
    assert "".join(found) == "ab"


def test_a_stop_string_ends_the_answer_before_it() -> None:
    found, spelling = pieces("one. Two. Three", [". T"])
    assert ("".join(found), spelling.stopped) == ("one", True)


def test_what_may_begin_a_stop_string_waits_and_comes_if_it_does_not() -> None:
    found, spelling = pieces("a##b", ["###"])
    assert found == ["a", "", "", "##b", ""]
    assert not spelling.stopped


def test_what_waits_at_the_end_comes_then() -> None:
    found, _ = pieces("a##", ["###"])
    assert (found[-1], "".join(found)) == ("##", "a##")


@pytest.mark.parametrize("stop", [[], [""]])
def test_without_a_stop_string_nothing_waits(stop: list[str]) -> None:
    assert pieces("abc", stop)[0] == ["a", "b", "c", ""]


@given(text=st.text(alphabet="ab €", max_size=24), stop=st.lists(WORDS, max_size=3))
def test_an_answer_is_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    found, spelling = pieces(text, stop)
    # Whichever stop string is complete first ends it; of several that end together, the longest takes most away.
    ends = [(at + len(word), at) for word in stop if (at := text.find(word)) >= 0]
    want = text[: min(ends)[1]] if ends else text
    assert ("".join(found), spelling.stopped) == (want, bool(ends))
