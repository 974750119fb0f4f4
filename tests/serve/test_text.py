"""An answer's text as it comes: whole characters, and nothing beyond a stop string."""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.serve.small import ids_of, tokenizer
from tierstore.serve.sampling import Spelling

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


@pytest.mark.parametrize("prompt", ["x", "hello", "hello\ufffd", "hello €", "\ufffd\ufffd"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_nothing_of_the_prompt_is_told_again_however_it_ends(prompt: str, cut: int) -> None:
    ids = ids_of(prompt)
    spelling = Spelling(tokenizer(), ids[: len(ids) - cut])
    assert "".join(spelling.add(token) for token in ids_of("world")).lstrip("\ufffd") == "world"


def test_a_character_that_the_prompt_began_is_the_answers() -> None:
    first, *rest = ids_of("€")
    spelling = Spelling(tokenizer(), [*ids_of("x"), first])
    assert "".join(spelling.add(token) for token in [*rest, *ids_of("!")]) == "€!"


def fallback() -> PreTrainedTokenizerFast:
    """Spelt as Gemma's and Llama 2's are: a run of bytes is characters if all of it is."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "\u2581a": 257, "b": 258}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_bytes_that_make_a_character_before_them_none_end_no_answer() -> None:
    letter = ord("c")
    spelling = Spelling(fallback(), [257])
    found = [spelling.add(token) for token in (258, letter, 0xFF, 257, 258)]
    assert found[:3] == ["b", "c", ""]
    assert "".join(found).endswith(" ab")


@given(st.lists(st.integers(0, 258), min_size=1, max_size=8), st.lists(st.integers(0, 258), max_size=24))
def test_whatever_tokens_come_they_are_spelt(prompt: list[int], answer: list[int]) -> None:
    for spoken in (tokenizer(), fallback()):
        spelling = Spelling(spoken, prompt)
        text = "".join(spelling.add(token) for token in answer) + spelling.end()
        assert len(text) <= sum(len(spoken.decode([token])) for token in answer) + len(prompt)


@given(text=st.text(alphabet="ab €", max_size=24), stop=st.lists(WORDS, max_size=3))
def test_an_answer_is_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    found, spelling = pieces(text, stop)
    # Whichever stop string is complete first ends it; of several that end together, the longest takes most away.
    ends = [(at + len(word), at) for word in stop if (at := text.find(word)) >= 0]
    want = text[: min(ends)[1]] if ends else text
    assert ("".join(found), spelling.stopped) == (want, bool(ends))
