"""Verdicts on the answers of two runs, rules that distinguish rounding from faults, and the table of the results.

Answers that differ only because of rounding count as a near-tie:

- Greedy: at the first step that differs, the two largest logits of the plain run are less than NEAR_TIE apart.
- Beams: the score of each answer differs by less than NEAR_TIE from that of the plain answer at the same position. The
  score is the mean log-probability of the answer's tokens. The plain model computes both scores.
- Samples: an answer that differs never counts as a near-tie.
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
"""Function that returns the score of an answer, given the answer's index and its tokens."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The answers of the model without the store.

    With greedy decoding, ``gaps`` contains, for each row and step, the largest logit minus the second largest one.
    """

    answers: Answers
    gaps: list[list[float]] = field(default_factory=list, repr=False)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case.

    ``reused`` is the number of prompt tokens that were reused, by tier. ``fed`` is the number of tokens that the model
    actually computed, and ``to_feed`` the number that it had to compute because they were not reused.
    ``shared_pages`` is the number of pages that at least two rows of the batch used. ``wrong`` describes everything
    that is wrong, and ``note`` gives more figures.
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
        """Whether the answers are equal or nearly tied, and nothing else is wrong."""
        return self.verdict != "different" and not self.wrong

    def plain(self) -> dict[str, Any]:
        """Return the row as JSON-serializable data."""
        return asdict(self) | {"held": self.held}


def greedy_verdict(plain: Plain, found: Answers) -> Verdict:
    """Return the worst verdict of all rows of greedy answers."""
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
    """Return the verdict on the answers of a beam search, which are compared in order."""
    if found == plain.answers:
        return "equal"
    if [len(answer) for answer in found] != [len(answer) for answer in plain.answers]:
        return "different"
    pairs = enumerate(zip(plain.answers, found, strict=True))
    near = all(abs(score(i, one) - score(i, other)) < NEAR_TIE for i, (one, other) in pairs if one != other)
    return "near-tie" if near else "different"


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the table of all cases, then notes and everything that is wrong, then a summary."""
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
    """Return ``{"equal": bool, "near_ties": n, "rows": [...]}``. ``equal`` is the result of ``all_held``."""
    return {"equal": all_held(rows), "near_ties": near_ties(rows), "rows": [row.plain() for row in rows]}


def all_held(rows: Sequence[Row]) -> bool:
    """Return whether no answer differs and nothing else is wrong in any case."""
    return all(row.held for row in rows)


def near_ties(rows: Sequence[Row]) -> int:
    """Return the number of cases whose verdict is a near-tie."""
    return sum(row.verdict == "near-tie" for row in rows)


def _sum(rows: Sequence[Row]) -> str:
    answered = [row for row in rows if row.fed]
    held = sum(row.held for row in answered)
    ties = near_ties(rows)
    tie = f", {ties} of them by a near-tie (decided by less than {NEAR_TIE:g})" if ties else ", no near-tie"
    lost = "" if all_held(rows) else "; NOT EVERYTHING HOLDS"
    return f"{held} of {len(answered)} cases answered as without the store{tie}{lost}"
