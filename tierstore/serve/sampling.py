"""The next token of one answer."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
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
