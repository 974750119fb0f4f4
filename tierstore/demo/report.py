"""The results of the demonstration: a table, its claims and whether they hold, one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.demo.run import InTurn, Outcome, Row

TIERS = ("HBM", "HOST", "NVME")
TEXTS = {"document": 0.2, "question": 0.3, "answer": 0.5}
FIGURES = {"reused": 6, "of": 4, "tier": 4, "TTFT s": 7, "recompute s": 11, "equal": 8}
LONG = 1000
"""A restore of at least this many tokens from NVMe must be faster than computing them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of the demonstration, and whether it holds."""

    text: str
    held: bool


def hits(rows: Sequence[Row]) -> dict[str, int]:
    """Count questions by the slowest tier that their pages came from."""
    return {tier: sum(row.tier == tier for row in rows) for tier in TIERS}


def judge(outcome: Outcome) -> list[Claim]:
    """Return the claims in the order in which they are printed."""
    before = hits([row for row in outcome.rows if not row.after_restart])
    after = hits([row for row in outcome.rows if row.after_restart])
    exact = [row for row in outcome.rows if row.exact]
    near = sum(row.verdict == "near-tie" for row in exact)
    other = sum(row.verdict == "other" for row in exact)
    slow = [row for row in outcome.rows if row.tier == "NVME" and row.tokens_reused >= LONG]
    late = [row for row in slow if row.ttft_s >= row.recompute_ttft_s]
    sizes = outcome.sizes
    claims = [
        Claim(
            f"{len(exact)} answers{_over_exact(outcome)}: {len(exact) - near - other} equal to plain transformers "
            f"token by token, {near} differ at a near-tie (top-2 logits < 1e-4 apart), {other} differ otherwise",
            other == 0,
        ),
        Claim(
            f"the documents ({sizes.documents} pages) do not fit HBM and host together ({sizes.hbm + sizes.host})",
            sizes.documents > sizes.hbm + sizes.host,
        ),
        Claim(f"hits in every tier: {_counts(before)}", all(before.values())),
        Claim(f"after the restart, hits from disk: {_counts(after)}", after["NVME"] > 0),
        Claim(
            f"{len(slow)} restores of at least {LONG} tokens from NVMe, {len(late)} of them slower than recomputing"
            + _speedup(slow)
            + _disturbed(slow),
            not late,
        ),
    ]
    if outcome.in_turn is not None:
        other = outcome.in_turn.other
        claims.append(
            Claim(f"asked in turn with hints, {other} answers differ from plain transformers", not other)
        )
    return claims


def agreement(rows: Sequence[Row]) -> dict[str, int]:
    """Compare answers over pages that went through a lossy codec with those of plain transformers."""
    inexact = [row for row in rows if not row.exact]
    return {
        "answers": len(inexact),
        "equal": sum(row.verdict == "same" for row in inexact),
        "tokens": sum(row.tokens for row in inexact),
        "agreeing": sum(row.agreeing for row in inexact),
    }


def as_json(outcome: Outcome, claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the object that ``--json`` prints."""
    rows = outcome.rows
    keys = (
        "document",
        "question",
        "tier",
        "tokens_reused",
        "ttft_s",
        "recompute_ttft_s",
        "after_restart",
        "answer",
        "measured_again",
        "exact",
        "plain_answer",
        "tokens",
        "agreeing",
    )
    return {
        "answers_equal": all(row.verdict != "other" for row in rows if row.exact),
        "codec": outcome.codec,
        "host_codec": outcome.host_codec,
        "device": outcome.device,
        "inexact": agreement(rows),
        "near_ties": sum(row.verdict == "near-tie" for row in rows),
        "hits": hits([row for row in rows if not row.after_restart]),
        "restart_hits": hits([row for row in rows if row.after_restart]),
        "in_turn": None if outcome.in_turn is None else asdict(outcome.in_turn),
        "failed": [claim.text for claim in claims if not claim.held],
        "rows": [{key: getattr(row, key) for key in keys} for row in rows],
    }


def show(console: Console, outcome: Outcome, claims: Sequence[Claim]) -> None:
    """Print the table and the claims."""
    for title, after in (("Before the restart", False), ("After the restart, in a new process", True)):
        console.print(
            _table(title, [row for row in outcome.rows if row.after_restart == after], console.width)
        )
    console.print(
        "Tier: the slowest one that pages of the prompt came from. TTFT: time to first token from the "
        "tokenized prompt, restore included.\n"
    )
    if outcome.in_turn is not None:
        console.print(Text(in_turn(outcome, outcome.in_turn) + "\n"))
    if outcome.lossy != "none":
        _compare(console, outcome)
    for claim in claims:
        mark = Text("holds  ", style="green") if claim.held else Text("FAILED ", style="bold red")
        console.print(mark + Text(claim.text, style=""))


def in_turn(outcome: Outcome, found: InTurn) -> str:
    """Describe what the prefetcher did and how much it helped."""
    read, loaded = (f"{nbytes / (1 << 20):.1f} MiB" for nbytes in (found.read_bytes, found.loaded_bytes))
    cold = [row.ttft_s for row in outcome.rows if row.after_restart and row.tier == "NVME"]
    without = f"; from disk without hints {_span(cold)}" if cold else ""
    return (
        f"The documents in turn, each hinted while the one before it was answered: {found.waiting} of {found.pages} "
        f"pages were in memory when they were asked for, first tokens after {_span(found.ttft_s)}{without}. The "
        f"prefetcher started {read} from disk and {loaded} into HBM."
    )


def _span(seconds: Sequence[float]) -> str:
    if not seconds:
        return "no time at all"
    return f"{min(seconds):.2f} to {max(seconds):.2f} s (median {median(seconds):.2f})"


def _table(title: str, rows: Sequence[Row], width: int) -> Table:
    """Return a table: figures in full, texts in the width that is left."""
    table = Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    room = max(20, width - sum(FIGURES.values()) - 16)
    for name, share in TEXTS.items():
        table.add_column(name, width=int(room * share), overflow="ellipsis", no_wrap=True)
    for name, columns in FIGURES.items():
        table.add_column(name, width=columns, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    return table


def _cells(row: Row) -> Iterator[str]:
    yield from (row.document, row.question, row.answer)
    yield from (str(row.tokens_reused), str(row.prompt_tokens), row.tier)
    yield from (
        f"{row.ttft_s:.2f}",
        f"{row.recompute_ttft_s:.2f}",
        "yes" if row.verdict == "same" else row.verdict,
    )


def _over_exact(outcome: Outcome) -> str:
    return "" if all(row.exact for row in outcome.rows) else " over pages that no lossy codec has touched"


def _compare(console: Console, outcome: Outcome) -> None:
    """Print answers over inexact pages next to the exact ones, and how far they agree."""
    inexact = [row for row in outcome.rows if not row.exact]
    for row in inexact:
        console.print(
            Text(
                f"{row.document}: {row.question}\n  exact: {row.plain_answer}\n  {outcome.lossy}: {row.answer}  "
                f"({row.agreeing} of {row.tokens} tokens)"
            )
        )
    found = agreement(outcome.rows)
    console.print(
        f"{found['answers']} answers over pages that went through {outcome.lossy}: {found['equal']} equal to plain "
        f"transformers; {found['agreeing']} of {found['tokens']} tokens before the first that differs\n"
    )


def _counts(by_tier: dict[str, int]) -> str:
    return ", ".join(f"{count} {tier}" for tier, count in by_tier.items())


def _disturbed(rows: Sequence[Row]) -> str:
    again = sum(row.measured_again > 0 for row in rows)
    if not again:
        return ""
    return f"; {again} measured again, restore and recompute side by side: the machine was busy with something else"


def _speedup(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    ratios = sorted(row.recompute_ttft_s / row.ttft_s for row in rows)
    return f"; restoring was {ratios[0]:.1f} to {ratios[-1]:.1f} times as fast"
