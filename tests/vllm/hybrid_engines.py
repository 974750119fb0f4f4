"""Engines of a small model with recurrent states, and the answers of vLLM without a connector."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm import hybrids, tiny_model
from tests.vllm.runner import Engines, Step, ask, interrupted, reset, talk

TOKENS = 24
"""Number of tokens of an answer."""


class Plain(NamedTuple):
    """vLLM's answers without a connector."""

    answers: list[list[int]]
    """The answers to the prompts, asked one after the other."""
    alike: bool
    """Whether the answers are the same if the prompts are asked together. Some of vLLM's CPU kernels round differently
    if other requests are in the same step.
    """
    steady: bool
    """Whether the answers are also the same if requests are preempted, so that generated tokens are computed again."""
    turns: list[dict[str, Any]]
    """The results of a conversation, with vLLM's own cache."""


class Hybrid:
    """One of the models in ``hybrids``, with its engines and its prompts."""

    def __init__(self, name: str, python: Path, home: Path) -> None:
        options = {"skip_tokenizer_init": True, **hybrids.OPTIONS.get(name, {})}
        self.engines = Engines(python, hybrids.save(name, home / "model"), home / "lives", options)
        self.unit = hybrids.BLOCKS[name]
        # Prompts end shortly before the end of a block, so an answer needs one more block and may be preempted.
        self.prompts = tiny_model.prompts(4, -(-300 // self.unit) * self.unit - 10)
        self.turns = tiny_model.prompts(12, 200)[8:]

    @property
    def whole(self) -> int:
        """Return the number of tokens in the full blocks of a prompt."""
        return len(self.prompts[0]) // self.unit * self.unit

    def life(self, *steps: Step, **more: Any) -> list[Any]:
        """Run an engine in a single process. Its token budget is small, so a prompt takes several engine steps."""
        options: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 4, **more}
        return self.engines.life(steps, in_process=True, **{**options, **self.engines.always})

    @cached_property
    def plain(self) -> Plain:
        """Compute the answers of vLLM without a connector."""
        alone, _, together, paused, turns = self.life(
            ask(self.prompts, TOKENS),
            reset(),
            ask(self.prompts, TOKENS, together=True),
            interrupted(self.prompts, TOKENS, ["reset"] * 4, every=6),
            talk(self.turns, TOKENS, forget=False),
        )
        answers, *others = ([answer["tokens"] for answer in each] for each in (alone, together, paused))
        assert len({tuple(answer) for answer in answers}) == len(self.prompts)
        assert re.findall(r"kv cache group sizes \((\d+),", self.engines.log()) == [str(self.unit)]
        alike, steady = (other == answers for other in others)
        return Plain(answers, alike, alike and steady, turns)
