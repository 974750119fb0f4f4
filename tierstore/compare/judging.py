"""Whether two runs answered alike, and the rules by which rounding is told from a fault.

Greedy: near-tie if, at the first step that differs, the plain run's two best logits are less than NEAR_TIE apart.
Beams: near-tie if each answer's score (mean log-probability of its tokens, both as the plain model computes them) is
within NEAR_TIE of the plain answer's in its place. Samples: no rule; a draw that differs is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

NEAR_TIE = 1e-4

Verdict = Literal["equal", "near-tie", "different"]
Answers = list[list[int]]
Score = Callable[[int, Sequence[int]], float]
"""An answer's score: number of the answer, its tokens."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What the model answers without the store. ``gaps``: of each greedy token, its logit minus the runner-up's."""

    answers: Answers
    gaps: list[list[float]] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class Row:
    """One case. ``reused``: tokens of the prompts by the tier they were found in.

    ``fed``: tokens the model computed, as counted; ``to_feed``: those that were not reused. ``wrong``: what does not
    hold beside the answer; ``note``: figures worth reading.
    """

    case: str
    model: str
    verdict: Verdict
    reused: dict[str, int]
    fed: int
    to_feed: int
    shared_pages: int = 0
    seconds: float = 0.0
    wrong: tuple[str, ...] = ()
    note: str = ""

    @property
    def held(self) -> bool:
        """The answer is the plain one, up to a near-tie, and everything beside it holds."""
        return self.verdict != "different" and not self.wrong

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"held": self.held}


def greedy_verdict(plain: Plain, found: Answers) -> Verdict:
    """The worst of all rows."""
    if len(found) != len(plain.answers):
        return "different"
    verdict: Verdict = "equal"
    for one, other, gaps in zip(plain.answers, found, plain.gaps, strict=True):
        if one == other:
            continue
        pairs = enumerate(zip(one, other, strict=False))
        step = next((i for i, (a, b) in pairs if a != b), len(gaps))
        if step >= len(gaps) or gaps[step] >= NEAR_TIE:
            return "different"
        verdict = "near-tie"
    return verdict


def beam_verdict(plain: Plain, found: Answers, score: Score) -> Verdict:
    """All beams in their order."""
    if found == plain.answers:
        return "equal"
    if [len(answer) for answer in found] != [len(answer) for answer in plain.answers]:
        return "different"
    pairs = enumerate(zip(plain.answers, found, strict=True))
    near = all(abs(score(i, one) - score(i, other)) < NEAR_TIE for i, (one, other) in pairs if one != other)
    return "near-tie" if near else "different"
