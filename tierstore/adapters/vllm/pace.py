"""How fast the engine computes prompts, learned from its own steps. Pure: the clock is the caller's.

A token takes a time of its own and one for each token before it: ``each + before * context``. Both are a weighted
least-squares line through the steps that computed prompts, the newest counting most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.requests import Step

_LEAST_TOKENS = 512
"""Smaller steps take the time of their launches."""
_OF_A_PROMPT = 16
"""A request with fewer tokens in a step is being answered."""
_MOSTLY = 0.9
_KEPT = 0.9
"""Weight of what was known before a step, against that step."""
_MOST_UNDER_WAY = 64
_SPREAD = 1e-3
"""Contexts that vary less than that, squared, of their mean's square say nothing of what context costs."""


class _Step(NamedTuple):
    ordered: float
    tokens: int
    context: float


class Pace:
    """Seconds of computing. Steps end in the order in which they were ordered, whether or not they are told of.

    The first one does not count: it compiles and allocates.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, _Step] = {}
        self._ended = 0.0
        self._warm = False
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def ordered(self, number: int, steps: Sequence[Step], now: float) -> bool:
        """Step ``number`` is about to run; whether it says something, so that its end is to be told."""
        prompts = [step for step in steps if step.scheduled >= _OF_A_PROMPT]
        tokens = sum(step.scheduled for step in prompts)
        if tokens < _LEAST_TOKENS or tokens < _MOSTLY * sum(step.scheduled for step in steps):
            return False
        context = sum(step.scheduled * (step.computed + step.scheduled / 2) for step in prompts) / tokens
        self._under_way[number] = _Step(now, tokens, context)
        if len(self._under_way) > _MOST_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        return True

    def ended(self, number: int, now: float) -> None:
        """Step ``number`` has ended. It ran from its order on, or from the end of the one before."""
        step = self._under_way.pop(number, None)
        if step is not None:
            begin = max(step.ordered, self._ended)
            if self._warm and now > begin:
                self._learn(step.tokens, step.context, (now - begin) / step.tokens)
            self._warm = True
        self._ended = now

    def seconds(self, start: int, end: int) -> float | None:
        """To compute the tokens from ``start`` to ``end`` of a prompt; None: not known yet."""
        if not self._weight:
            return None
        each, before = self._line()
        return each * (end - start) + before * (end * end - start * start) / 2

    def _learn(self, weight: float, context: float, token_s: float) -> None:
        self._weight = self._weight * _KEPT + weight
        self._x = self._x * _KEPT + weight * context
        self._xx = self._xx * _KEPT + weight * context * context
        self._y = self._y * _KEPT + weight * token_s
        self._xy = self._xy * _KEPT + weight * context * token_s

    def _line(self) -> tuple[float, float]:
        """Neither is below zero: no prompt is computed in less than no time."""
        mean, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread <= _SPREAD * mean * mean:
            return mean_y, 0.0
        before = max(0.0, (self._xy / self._weight - mean * mean_y) / spread)
        each = mean_y - before * mean
        return (each, before) if each >= 0 else (0.0, self._xy / self._xx)
