"""Chooses the tokens of an answer, and decodes them one by one into whole characters, up to a stop string."""

# transformers leaves some functions untyped:
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
"""Lower temperatures are treated as 0, because dividing the logits by them could overflow."""


class Sampler:
    """Chooses the tokens of one answer according to ``Sampling``.

    Each instance has its own random generator, so a seeded answer does not depend on other requests.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        """Seed the generator with ``sampling.seed``, or randomly if it is None."""
        self._greedy = sampling.temperature < _COLDEST
        self._chance = torch.Generator(device)
        if sampling.seed is None:
            self._chance.seed()
        else:
            self._chance.manual_seed(sampling.seed)
        # Warpers are called with the tokens so far. These three warpers do not read the tokens, so an empty tensor
        # is enough.
        self._before: Any = torch.empty(1, 0, dtype=torch.long, device=device)
        self._warpers: Any = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: torch.Tensor) -> int:
        """Return the ID of the token chosen from one row of logits, ``[1, vocabulary]``."""
        if self._greedy:
            return int(logits.argmax())
        warped: torch.Tensor = self._warpers(self._before, logits.float())
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._chance))


_CONTEXT = 8
"""Number of prompt tokens that are decoded together with the first tokens of the answer.

With some tokenizers, the preceding tokens determine whether a token's text starts with a space.
"""
_NO_CHARACTER = "\ufffd"
"""The replacement character: the decoder's output for incomplete or invalid UTF-8."""


class Spelling:
    """Decodes the tokens of one answer to text, one token at a time. Not thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """Prepare to decode the answer to a prompt.

        Args:
            tokenizer: The model's tokenizer.
            prompt: The token IDs of the prompt.
            stop: Strings that end the answer. Empty strings are ignored.
        """
        self._tokenizer = tokenizer.backend_tokenizer
        # The tokenizers library's DecodeStream is not used. It repeats the prompt if the prompt ends within a
        # character, and fails if a character is followed by invalid bytes.
        self._before, self._new = list(prompt[-_CONTEXT:]), list[int]()
        self._stop = tuple(word for word in stop if word)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found. If so, the answer is complete and ``add`` returns no more text."""

    def add(self, token: int) -> str:
        """Append a token and return the text that can be sent now, which may be empty.

        Incomplete characters and text that may be the start of a stop string are held back.
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
        """Append a token and return the characters that it completes, or "" if the last character is incomplete."""
        self._new.append(token)
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._new)
        if text.endswith(_NO_CHARACTER):
            return ""
        self._before, self._new = self._new, []
        return text[_alike(before, text) :]

    def end(self) -> str:
        """Return the text held back as the possible start of a stop string. Incomplete characters are lost."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, word: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``word``."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def _alike(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
