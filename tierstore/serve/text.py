"""An answer's tokens as text, as they come: whole characters only, and nothing beyond a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

_CONTEXT = 8
"""Tokens of the prompt that the first one is spelled after: whether it begins with a space depends on them."""


class Spelling:
    """The text of one answer. For one thread at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """``stop``: strings that end the answer; an empty one ends none."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt[-_CONTEXT:]), skip_special_tokens=True)
        self._stop = tuple(word for word in stop if word)
        self._held = ""
        self.stopped = False
        """Whether a stop string came: nothing follows."""

    def add(self, token: int) -> str:
        """The characters that are certain now; those that may turn out to begin a stop string wait."""
        if self.stopped:
            return ""
        self._held += self._stream.step(self._tokenizer, token) or ""
        found = [at for word in self._stop if (at := self._held.find(word)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        kept = max((_begun(self._held, word) for word in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def end(self) -> str:
        """What waited, as no stop string came of it. Bytes that never became a character are left out."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, word: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``word``, which is not in it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
