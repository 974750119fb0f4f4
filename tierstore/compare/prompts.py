"""Prompts of real text, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tierstore.compare.request import Prompt, Question
from tierstore.demo.documents import find_documents

TEXTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens. The defaults are those of ``tierstore compare``; tests make it small."""

    long: int = 1080
    short: int = 632
    new: int = 24
    page: int = 32
    chunk: int = 150
    samples: int = 3
    beams: int = 4
    inside: int = 7
    """How far into a page a prompt follows a stored one before it leaves it."""
    tail: int = 60
    """The own part of a prompt that shares the rest."""
    turn: int = 45
    """A question of a chat."""

    def stored(self, length: int) -> int:
        """Tokens of a prompt of ``length`` that need not be computed once it was answered: those in full pages.

        Its last token always is.
        """
        return min(length - 1, (length + self.new - 1) // self.page * self.page)


def read_texts(tokenizer: PreTrainedTokenizerBase, sizes: Sizes, paths: Sequence[Path] = ()) -> list[Prompt]:
    """TEXTS different real texts of ``sizes.long`` tokens each. Raises DocumentError if there are too few."""
    found = find_documents(tokenizer, TEXTS, sizes.long, sizes.long * 5 // 4, paths)
    return [tuple(tokenizer(document.text, verbose=False)["input_ids"][: sizes.long]) for document in found]


def mixed_batch(texts: Sequence[Prompt], sizes: Sizes) -> Question:
    """Four prompts of different lengths, when the first text is stored and nothing else.

    One whole; one that shares three quarters of its pages; one that leaves it inside a page; one that is new, and so
    short that the columns of the third are reused beyond that page's begin: a batch begins at one column for all.
    """
    stored, *others = texts
    pages = sizes.long // sizes.page
    leaves = (pages - 3) * sizes.page + sizes.inside
    inside = stored[:leaves] + _unlike(stored[leaves], others[1])[: sizes.tail]
    shared = pages * 3 // 4 * sizes.page
    partly = stored[:shared] + _unlike(stored[shared], others[0])[: sizes.tail]
    new = _unlike(stored[0], others[2])[: sizes.tail + sizes.inside // 2]
    return Question((stored, partly, inside, new), sizes.new)


def forks_inside_a_page(text: Prompt, other: Prompt, sizes: Sizes) -> Prompt:
    """The beginning of ``text``, up to a token inside a page, and then another text."""
    leaves = (len(text) - sizes.tail) // sizes.page * sizes.page + sizes.inside
    return text[:leaves] + _unlike(text[leaves], other)[: sizes.tail]


def _unlike(token: int, text: Prompt) -> Prompt:
    """The text from its first word on that is another token than ``token``; the start token left out."""
    begin = next(i for i, each in enumerate(text) if i and each != token)
    return text[begin:]
