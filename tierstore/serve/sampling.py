"""Choose the next token of an answer, and decode its text: whole characters, up to a stop string."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tierstore.serve.request import Sampling

_COLDEST = 1e-5
"""Lower temperatures count as 0: dividing logits by them would overflow."""


class Sampler:
    """Chooses tokens by ``Sampling`` with its own generator: other requests do not change what a seed gives."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        """Without a seed, the generator is seeded by the system."""
        self._greedy = sampling.temperature < _COLDEST
        self._chance = torch.Generator(device)
        if sampling.seed is None:
            self._chance.seed()
        else:
            self._chance.manual_seed(sampling.seed)
        # The warpers take the tokens so far, and none of them reads them.
        self._before: Any = torch.empty(1, 0, dtype=torch.long, device=device)
        self._warpers: Any = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: torch.Tensor) -> int:
        """Choose a token from one row of logits, ``[1, vocabulary]``."""
        if self._greedy:
            return int(logits.argmax())
        warped: torch.Tensor = self._warpers(self._before, logits.float())
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._chance))


_CONTEXT = 8
"""Tokens of the prompt before the first one of the answer: whether it begins with a space depends on them."""
_NO_CHARACTER = "\ufffd"
"""The character to which incomplete or invalid bytes are decoded."""


class Spelling:
    """Decodes the text of one answer, token by token. For one thread at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """``stop`` strings end the answer; empty ones are ignored."""
        self._tokenizer = tokenizer.backend_tokenizer
        # Not the library's DecodeStream: it repeats a prompt that ends within a character, and fails if bytes after
        # a character make the run invalid.
        self._before, self._new = list(prompt[-_CONTEXT:]), list[int]()
        self._stop = tuple(word for word in stop if word)
        self._held = ""
        self.stopped = False
        """Whether a stop string came. No more text follows it."""

    def add(self, token: int) -> str:
        """Add a token and return the characters that are certain now.

        A possible beginning of a stop string is held back.
        """
        if self.stopped:
            return ""
        self._held += self._spelled(token)
        found = [at for word in self._stop if (at := self._held.find(word)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        kept = max((_begun(self._held, word) for word in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def _spelled(self, token: int) -> str:
        """Return the characters that this token completes."""
        self._new.append(token)
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._new)
        if text.endswith(_NO_CHARACTER):
            return ""
        self._before, self._new = self._new, []
        return text[_alike(before, text) :]

    def end(self) -> str:
        """Return the text that was held back. Incomplete characters are dropped."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, word: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``word``, which is not in the text."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def _alike(one: str, other: str) -> int:
    """Return the length of the common prefix."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
