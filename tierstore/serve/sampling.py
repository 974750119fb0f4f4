"""The next token of one answer, and the answer's text: whole characters only, and nothing beyond a stop string."""

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
"""A temperature below it is 0: logits divided by it would be no numbers any more."""


class Sampler:
    """Chooses by ``Sampling``, with chance of its own: other requests do not change what a seed gives."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        """Without a seed, chance is the system's."""
        self._greedy = sampling.temperature < _COLDEST
        self._chance = torch.Generator(device)
        if sampling.seed is None:
            self._chance.seed()
        else:
            self._chance.manual_seed(sampling.seed)
        # What these warpers are given of the text before, which none of them reads.
        self._before: Any = torch.empty(1, 0, dtype=torch.long, device=device)
        self._warpers: Any = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(float(sampling.top_p)))

    def choose(self, logits: torch.Tensor) -> int:
        """Of one row of logits, ``[1, vocabulary]``."""
        if self._greedy:
            return int(logits.argmax())
        warped: torch.Tensor = self._warpers(self._before, logits.float())
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._chance))


_CONTEXT = 8
"""Tokens of the prompt that the first one is spelled after: whether it begins with a space depends on them."""
_NO_CHARACTER = "\ufffd"
"""What bytes are decoded to that are no character, or not yet."""


class Spelling:
    """The text of one answer. For one thread at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """``stop``: strings that end the answer; an empty one ends none."""
        self._tokenizer = tokenizer.backend_tokenizer
        # Not the library's DecodeStream: it tells a prompt that ends within a character again, and fails where bytes
        # after a character make the run of them none.
        self._before, self._new = list(prompt[-_CONTEXT:]), list[int]()
        self._stop = tuple(word for word in stop if word)
        self._held = ""
        self.stopped = False
        """Whether a stop string came: nothing follows."""

    def add(self, token: int) -> str:
        """The characters that are certain now; those that may turn out to begin a stop string wait."""
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
        """The characters that this token completes, after those before it."""
        self._new.append(token)
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._new)
        if text.endswith(_NO_CHARACTER):
            return ""
        self._before, self._new = self._new, []
        return text[_alike(before, text) :]

    def end(self) -> str:
        """What waited, as no stop string came of it. Bytes that never became a character are left out."""
        text, self._held = self._held, ""
        return text


def _begun(text: str, word: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``word``, which is not in it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


def _alike(one: str, other: str) -> int:
    """How many characters at the beginning of both are the same."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
