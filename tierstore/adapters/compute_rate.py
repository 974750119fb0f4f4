"""Estimates how long a model takes to compute prompt tokens, from the durations of its steps.

A step is one forward pass over a batch. The vLLM connector uses the estimate to decide whether pages on
disk are worth loading. The transformers adapter uses it to decide how long a request waits for
stored pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_TOKENS = 512
"""By default, steps with fewer prompt tokens than this are not measured: launching kernels dominates their time."""
_OF_A_PROMPT = 16
"""A request with fewer tokens than this in a step counts as decoding."""
_MOSTLY = 0.9
"""A step is measured only if at least this fraction of its tokens are prompt tokens."""
_STEPS_KEPT = 0.9
"""Factor by which each new step reduces the weight of all earlier steps."""
_MOST_UNDER_WAY = 64
"""Maximum number of steps that wait for ``ended``. Beyond it, the oldest one is forgotten."""
_SPREAD = 1e-3
"""A slope is fitted only if the variance of context lengths exceeds this fraction of their squared mean."""


class Computed(Protocol):
    """The tokens of one request in a step."""

    @property
    def computed(self) -> int:
        """Return how many tokens of the request were computed before this step."""
        ...

    @property
    def scheduled(self) -> int:
        """Return how many tokens of the request this step computes."""
        ...


class _Step(NamedTuple):
    ordered: float
    tokens: int
    context: float
    good: bool


class ComputeRate:
    """Estimates the time to compute prompt tokens.

    The time per token is modelled as a linear function of the number of tokens before it. Call ``ordered``
    before each step, and ``ended`` at least after those steps for which ``ordered`` returned True. Steps must
    end in the order of their ``ordered`` calls. Only good steps are measured: those that have at least
    ``least_tokens`` prompt tokens and few other tokens. The first good step is ignored, because its time includes
    compilation and allocation.

    Args:
        least_tokens: Minimum number of prompt tokens in a good step. The default suits a GPU.
        rough: Whether all steps are measured until the second good step has ended. The time is then overestimated,
            because a token takes longer in a small step, and the step's other tokens take time too.
    """

    def __init__(self, least_tokens: int = _LEAST_TOKENS, *, rough: bool = False) -> None:
        self.least_tokens = least_tokens
        self.known = False
        """Whether the estimate is based on a good step, and not on rough measurements."""
        self._rough = rough
        self._under_way: dict[int, _Step] = {}
        self._ended = 0.0
        self._warm = False
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def ordered(self, number: int, steps: Sequence[Computed], now: float) -> bool:
        """Record that step ``number`` is about to run.

        Args:
            number: ID of the step.
            steps: The step's requests.
            now: Current time in seconds, on the same monotonic clock as in ``ended``.

        Returns:
            Whether the step is measured, so that ``ended`` must be called.
        """
        prompts = [step for step in steps if step.scheduled >= _OF_A_PROMPT]
        tokens = sum(step.scheduled for step in prompts)
        good = tokens >= max(1, self.least_tokens, _MOSTLY * sum(step.scheduled for step in steps))
        if not good and (not tokens or self.known or not self._rough):
            return False
        context = sum(step.scheduled * (step.computed + step.scheduled / 2) for step in prompts) / tokens
        self._under_way[number] = _Step(now, tokens, context, good)
        if len(self._under_way) > _MOST_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        return True

    def ended(self, number: int, now: float) -> None:
        """Record that step ``number`` has finished. If it is measured, update the estimate.

        The duration of a step is measured from the call of ``ordered`` for this step, or from the previous call
        of ``ended`` if that was later.
        """
        step = self._under_way.pop(number, None)
        if step is not None:
            begin = max(step.ordered, self._ended)
            exact = step.good and self._warm
            if now > begin and (exact or (self._rough and not self.known)):
                if exact and not self.known:
                    self.known = True
                    self._weight = self._x = self._xx = self._y = self._xy = 0.0  # drop rough measurements
                self._learn(step.tokens, step.context, (now - begin) / step.tokens)
            self._warm |= step.good
        self._ended = now

    def seconds(self, start: int, end: int) -> float | None:
        """Return the estimated time, in seconds, to compute tokens ``[start, end)`` of a prompt.

        Return None before the first estimate. If all measured steps had about the same context, the effect of the
        context is unknown. For tokens with less context, the result is then the shortest possible time.
        """
        if not self._weight:
            return None
        each, before = self._line()
        if not before and self._x:
            each *= min(1.0, (start + end) / 2 / (self._x / self._weight))
        return each * (end - start) + before * (end * end - start * start) / 2

    def _learn(self, weight: float, context: float, token_s: float) -> None:
        self._weight = self._weight * _STEPS_KEPT + weight
        self._x = self._x * _STEPS_KEPT + weight * context
        self._xx = self._xx * _STEPS_KEPT + weight * context * context
        self._y = self._y * _STEPS_KEPT + weight * token_s
        self._xy = self._xy * _STEPS_KEPT + weight * context * token_s

    def _line(self) -> tuple[float, float]:
        """Return the time per token without context, and the extra time per token of context, in seconds.

        Neither is negative.
        """
        mean, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread <= _SPREAD * mean * mean:
            return mean_y, 0.0
        before = max(0.0, (self._xy / self._weight - mean * mean_y) / spread)
        each = mean_y - before * mean
        return (each, before) if each >= 0 else (0.0, self._xy / self._xx)
