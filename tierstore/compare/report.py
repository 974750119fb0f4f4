"""What a comparison found: a table, and one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.compare.judging import NEAR_TIE, Row


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
