"""What is asked of a model, with and without the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tierstore.types import Tier

Prompt = tuple[int, ...]

SEED = 7
"""Samples are drawn after this seed, with the store and without it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What decides the answer: ``rows`` of them to each prompt (samples, or all beams), ``new_tokens`` each."""

    prompts: tuple[Prompt, ...]
    new_tokens: int
    kind: Literal["greedy", "samples", "beams"] = "greedy"
    rows: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens that a model without any cache of earlier requests computes, of all rows."""
        return self.rows * sum(len(prompt) + self.new_tokens - 1 for prompt in self.prompts)

    @property
    def paddings(self) -> list[int]:
        """Columns of padding before each prompt."""
        width = max(map(len, self.prompts))
        return [width - len(prompt) for prompt in self.prompts]

    def tensors(self, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompts side by side, padded on the left, and their mask; int64 ``[prompts, columns]``."""
        pairs = list(zip(self.paddings, self.prompts, strict=True))
        ids = [[pad] * count + list(prompt) for count, prompt in pairs]
        mask = [[0] * count + [1] * len(prompt) for count, prompt in pairs]
        return torch.tensor(ids), torch.tensor(mask)

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        given: dict[str, Any] = {"max_new_tokens": self.new_tokens, "do_sample": self.kind == "samples"}
        if self.rows > 1:
            given["num_return_sequences"] = self.rows
        if self.kind == "beams":
            given["num_beams"] = self.rows
        return given


@dataclass(frozen=True, slots=True)
class Request:
    """A question as it is put to the store, and what must be found there.

    ``salt``: requests of one salt share pages. ``least_reused``: tokens of the prompts that must not be computed again;
    ``found_in``: the tier that ``least_found`` of them must come from.
    """

    case: str
    question: Question
    salt: bytes = b""
    chunk: int | None = None
    assisted: bool = False
    least_reused: int = 0
    found_in: Tier | None = None
    least_found: int = 0

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate`` over the store; those beyond the question's must not change the answer."""
        chunk = {} if self.chunk is None else {"prefill_chunk_size": self.chunk}
        return self.question.options() | chunk
