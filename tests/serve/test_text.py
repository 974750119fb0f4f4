"""Tests of the text that is sent while an answer is generated: whole characters, and nothing after a stop string."""

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


def test_a_character_of_several_tokens_is_sent_once_it_is_complete() -> None:
    found, _ = pieces("a€ü🙂b")
    assert "".join(found) == "a€ü🙂b"
    assert "\ufffd" not in "".join(found)
    assert found[:4] == ["a", "", "", "€"]


def test_bytes_that_never_complete_a_character_are_dropped() -> None:
    spelling = Spelling(tokenizer(), ids_of("x"))
    assert [spelling.add(token) for token in ids_of("a€")[:-1]] == ["a", "", ""]
    assert spelling.end() == ""


def test_special_tokens_are_not_in_the_text() -> None:
    found, _ = pieces("a<|end|>b")
    assert "".join(found) == "ab"


def test_a_stop_string_ends_the_answer_before_it() -> None:
    found, spelling = pieces("one. Two. Three", [". T"])
    assert ("".join(found), spelling.stopped) == ("one", True)


def test_possible_start_of_a_stop_string_is_held_back() -> None:
    found, spelling = pieces("a##b", ["###"])
    assert found == ["a", "", "", "##b", ""]
    assert not spelling.stopped


def test_text_held_back_at_the_end_is_sent() -> None:
    found, _ = pieces("a##", ["###"])
    assert (found[-1], "".join(found)) == ("##", "a##")


@pytest.mark.parametrize("stop", [[], [""]])
def test_without_a_stop_string_no_text_is_held_back(stop: list[str]) -> None:
    assert pieces("abc", stop)[0] == ["a", "b", "c", ""]


@pytest.mark.parametrize("prompt", ["x", "hello", "hello\ufffd", "hello €", "\ufffd\ufffd"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_no_part_of_the_prompt_is_repeated_however_it_ends(prompt: str, cut: int) -> None:
    ids = ids_of(prompt)
    spelling = Spelling(tokenizer(), ids[: len(ids) - cut])
    assert "".join(spelling.add(token) for token in ids_of("world")).lstrip("\ufffd") == "world"


def test_character_begun_by_the_prompt_is_completed_in_the_answer() -> None:
    first, *rest = ids_of("€")
    spelling = Spelling(tokenizer(), [*ids_of("x"), first])
    assert "".join(spelling.add(token) for token in [*rest, *ids_of("!")]) == "€!"


def fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Gemma's and Llama 2's: successive byte tokens are decoded only if all are valid."""
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


def test_invalid_bytes_after_a_character_do_not_end_the_answer() -> None:
    letter = ord("c")
    spelling = Spelling(fallback(), [257])
    found = [spelling.add(token) for token in (258, letter, 0xFF, 257, 258)]
    assert found[:3] == ["b", "c", ""]
    assert "".join(found).endswith(" ab")


@given(st.lists(st.integers(0, 258), min_size=1, max_size=8), st.lists(st.integers(0, 258), max_size=24))
def test_any_sequence_of_tokens_is_decoded(prompt: list[int], answer: list[int]) -> None:
    for spoken in (tokenizer(), fallback()):
        spelling = Spelling(spoken, prompt)
        text = "".join(spelling.add(token) for token in answer) + spelling.end()
        assert len(text) <= sum(len(spoken.decode([token])) for token in answer) + len(prompt)


@given(text=st.text(alphabet="ab €", max_size=24), stop=st.lists(WORDS, max_size=3))
def test_an_answer_is_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    found, spelling = pieces(text, stop)
    # The first complete stop string ends the answer. If several end at the same place, the longest is removed.
    ends = [(at + len(word), at) for word in stop if (at := text.find(word)) >= 0]
    want = text[: min(ends)[1]] if ends else text
    assert ("".join(found), spelling.stopped) == (want, bool(ends))
