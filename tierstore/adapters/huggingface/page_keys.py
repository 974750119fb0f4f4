"""The keys of a sequence's full pages: its prompt's are known from the start, later ones are made when asked for."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.adapters.huggingface.request import Terms
from tierstore.types import PageKey


class PageKeys:
    """Of one sequence. Not thread-safe, as the sequence."""

    def __init__(self, terms: Terms, prompt: Sequence[int] = (), keys: Sequence[PageKey] = ()) -> None:
        """``prompt``: that it was opened for, and ``keys`` of its full pages."""
        self._terms = terms
        self._prompt = prompt
        self._of_prompt = keys
        self._made: list[PageKey] = []

    def to(self, stop: int, known: Sequence[int]) -> list[PageKey]:
        """The keys of the first ``stop`` pages of the ``known`` tokens, which fill them."""
        if len(self._made) < stop:
            tokens = known[: stop * self._terms.pages.page_size]
            if len(self._of_prompt) >= stop and tokens == self._prompt[: len(tokens)]:
                return list(self._of_prompt[:stop])
            self._made = self._terms.store.keys(tokens, salt=self._terms.salt, extra=self._terms.extra)
        return self._made[:stop]

    def cut(self, pages: int) -> None:
        """The tokens of all pages but the first are others from now on."""
        del self._made[pages:]

    def copy(self) -> PageKeys:
        """The same for a fork."""
        other = PageKeys(self._terms, self._prompt, self._of_prompt)
        other._made = list(self._made)
        return other
