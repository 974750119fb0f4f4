"""Whether two runs answered alike, the rules that tell rounding from a fault, and the table of the verdicts.

Greedy: near-tie if, at the first step that differs, the plain run's two best logits are less than NEAR_TIE apart.
Beams: near-tie if each answer's score (mean log-probability of its tokens, both as the plain model computes them) is
within NEAR_TIE of the plain answer's in its place. Samples: no rule; a draw that differs is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def show(console: Console, rows: Sequence[Row]) -> None:
    """A line for each case, what is wrong, and the sum."""
    table = Table("model", "case", "", box=box.SIMPLE_HEAD, header_style="bold")
    for name in ("reused", "fed", "to feed", "pages shared", "s"):
        table.add_column(name, justify="right")
    for row in rows:
        answered = row.fed > 0
        table.add_row(
            row.model,
            Text(row.case),
            Text(
                row.verdict if answered else "yes" if row.held else "no", style="" if row.held else "bold red"
            ),
            Text("\n".join(f"{count} {tier}" for tier, count in row.reused.items())),
            str(row.fed) if answered else "",
            str(row.to_feed) if answered else "",
            str(row.shared_pages or ""),
            f"{row.seconds:.1f}" if answered else "",
        )
    console.print(table)
    for row in rows:
        for line in (row.note, *(f"WRONG: {wrong}" for wrong in row.wrong)):
            if line:
                console.print(Text(f"{row.model}, {row.case}: {line}"), soft_wrap=True)
    console.print(Text(_sum(rows)), soft_wrap=True)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """``{"equal": bool, "near_ties": n, "rows": [...]}``; equal: every case held."""
    return {"equal": all_held(rows), "near_ties": near_ties(rows), "rows": [row.plain() for row in rows]}


def all_held(rows: Sequence[Row]) -> bool:
    """Whether no case differs, and all that was counted fits."""
    return all(row.held for row in rows)


def near_ties(rows: Sequence[Row]) -> int:
    """Cases in which rounding decided."""
    return sum(row.verdict == "near-tie" for row in rows)


def _sum(rows: Sequence[Row]) -> str:
    answered = [row for row in rows if row.fed]
    held = sum(row.held for row in answered)
    ties = near_ties(rows)
    tie = f", {ties} of them by a near-tie (decided by less than {NEAR_TIE:g})" if ties else ", no near-tie"
    lost = "" if all_held(rows) else "; NOT EVERYTHING HOLDS"
    return f"{held} of {len(answered)} cases answered as without the store{tie}{lost}"
