"""Evaluation and output of the results: tables, the claims and whether they hold, and a JSON object."""

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
FIGURES = {
    "reused": 6,
    "of": 4,
    "tier": 4,
    "plain s": 7,
    "TierStore s": 9,
    "times sooner": 6,
    "equal": 8,
}
LONG = 1000
"""Restoring at least this many tokens from NVMe must be faster than computing them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that the demonstration tests.

    ``held`` is True if the claim holds, False if it does not, and None if it cannot be tested with the given
    options.
    """

    text: str
    held: bool | None


def hits(rows: Sequence[Row]) -> dict[str, int]:
    """Return, for each tier, the number of questions for which it was the slowest tier with reused pages."""
    return {tier: sum(row.tier == tier for row in rows) for tier in TIERS}


def judge(outcome: Outcome) -> list[Claim]:
    """Evaluate the results. Return the claims in the order in which they are shown."""
    before = hits([row for row in outcome.rows if not row.after_restart])
    after = hits([row for row in outcome.rows if row.after_restart])
    exact = [row for row in outcome.rows if row.exact]
    near = sum(row.verdict == "near-tie" for row in exact)
    other = sum(row.verdict == "other" for row in exact)
    slow = [row for row in outcome.rows if row.tier == "NVME" and row.tokens_reused >= LONG]
    late = [row for row in slow if row.ttft_s >= row.recompute_ttft_s]
    equal = Claim("equal answers: every answer used pages of a lossy codec", None)
    if exact:
        equal = Claim(
            f"{len(exact)} answers{_over_exact(outcome)}: {len(exact) - near - other} equal to plain transformers "
            f"token by token, {near} differ at a near-tie (top-2 logits < 1e-4 apart), {other} differ otherwise",
            other == 0,
        )
    faster = Claim(
        f"long restores are faster: no question found {LONG} tokens on disk; give --tokens {LONG + 24} or more",
        None,
    )
    if slow:
        faster = Claim(
            f"{len(slow)} restores of at least {LONG} tokens from NVMe, {len(late)} of them slower than recomputing"
            + _speedup(slow)
            + _disturbed(slow),
            not late,
        )
    claims = [
        equal,
        _documents_do_not_fit(outcome),
        *_hits_before(outcome, before),
        Claim(f"hits after the restart, when pages were only on disk: {_counts(after)}", after["NVME"] > 0),
        faster,
    ]
    if outcome.in_turn is not None:
        other = outcome.in_turn.other
        claims.append(
            Claim(f"asked in turn with hints, {other} answers differ from plain transformers", not other)
        )
    return claims


def _documents_do_not_fit(outcome: Outcome) -> Claim:
    sizes = outcome.sizes
    if sizes.fit:
        return Claim(
            f"more documents than memory: HBM and host memory ({sizes.hbm + sizes.host} pages) hold all documents "
            f"({sizes.documents} pages); give a smaller --hbm-documents or a larger --tokens",
            None,
        )
    return Claim(
        f"the documents ({sizes.documents} pages) do not fit into HBM and host memory ({sizes.hbm + sizes.host} pages)",
        True,
    )


def _hits_before(outcome: Outcome, found: dict[str, int]) -> Iterator[Claim]:
    """Yield the claims about hits before the restart.

    ``found`` is the number of hits in each tier. A tier must have hits if a question is certain to find its
    document there (``outcome.asked``).
    """
    asked = {tier.name for tier in outcome.asked}
    wanted = [tier for tier in TIERS if tier in asked or found[tier]]
    names = "every tier" if len(wanted) == len(TIERS) else " and ".join(wanted)
    if wanted:
        yield Claim(f"hits in {names}: {_counts(found)}", all(found[tier] for tier in wanted))
    if len(wanted) < len(TIERS):
        others = " and ".join(tier for tier in TIERS if tier not in wanted)
        yield Claim(f"hits in {others}: with these options, no question finds its document there", None)


def agreement(rows: Sequence[Row]) -> dict[str, int]:
    """Count how far answers from inexact pages agree with those of plain transformers.

    Return four counts by name: ``answers``, the number of such answers; ``equal``, the number of them that are equal
    to those of plain transformers; ``tokens``, the total number of their tokens; and ``agreeing``, the number of
    these tokens that come before the first difference in an answer.
    """
    inexact = [row for row in rows if not row.exact]
    return {
        "answers": len(inexact),
        "equal": sum(row.verdict == "same" for row in inexact),
        "tokens": sum(row.tokens for row in inexact),
        "agreeing": sum(row.agreeing for row in inexact),
    }


def as_json(outcome: Outcome, claims: Sequence[Claim]) -> dict[str, Any]:
    """Return the JSON object that ``--json`` prints."""
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
        "failed": [claim.text for claim in claims if claim.held is False],
        "rows": [{key: getattr(row, key) for key in keys} for row in rows],
    }


def show(console: Console, outcome: Outcome, claims: Sequence[Claim]) -> None:
    """Print all results: the tables, the claims, and a summary of three lines."""
    for title, after in (("Before the restart", False), ("After the restart, in a new process", True)):
        console.print(
            _table(title, [row for row in outcome.rows if row.after_restart == after], console.width)
        )
    console.print(
        "Tier: the slowest one that pages of the prompt came from. The times are seconds from the tokenized prompt to "
        "the first token. TierStore's times include the restore. Plain transformers was timed once, before the "
        "restart.\n"
    )
    if outcome.rows:
        row = outcome.rows[0]
        said = f"{row.question} {row.answer.strip()}"
        console.print(Text(f"The first question, with its answer as far as it was generated: {said}\n"))
    if outcome.in_turn is not None:
        console.print(Text(in_turn(outcome.in_turn) + "\n"))
    if outcome.lossy != "none":
        _compare(console, outcome)
    for line in computed_again(outcome.rows):
        console.print(Text(line + "\n", style="yellow"))
    marks = {True: ("holds  ", "green"), False: ("FAILED ", "bold red"), None: ("not shown: ", "dim")}
    for claim in claims:
        console.print(Text.assemble(marks[claim.held], claim.text))
    console.print()
    for line in remembered(outcome):
        console.print(Text(line, style="bold"))


def computed_again(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line of text for each reason why stored tokens were computed again."""
    for why in dict.fromkeys(row.why for row in rows if row.why):
        of = [row for row in rows if row.why == why]
        yield (
            f"{sum(row.lost_tokens for row in of)} stored tokens of {len(of)} questions were computed again: {why}. "
            "The answers are the same, but come later."
        )


def remembered(outcome: Outcome) -> list[str]:
    """Return the summary.

    The summary says how much was reused, how much sooner answers began, and how many answers equal those of plain
    transformers.
    """
    rows = outcome.rows
    reused, prompts = (sum(getattr(row, name) for row in rows) for name in ("tokens_reused", "prompt_tokens"))
    ours, plain = (median(getattr(row, name) for row in rows) for name in ("ttft_s", "recompute_ttft_s"))
    sooner = plain / ours
    same = sum(row.verdict == "same" for row in rows)
    near = sum(row.verdict == "near-tie" for row in rows)
    how = "times sooner" if sooner >= 1 else "times as fast"
    all_or_some = f"all {len(rows)}" if same == len(rows) else f"{same} of {len(rows)}"
    but = f"; {near} differ at a near-tie, {len(rows) - same - near} otherwise" if same < len(rows) else ""
    times = (
        f"{sooner:.1f} {how}, after {ours:.2f} s instead of {plain:.2f} s (medians of {len(rows)} questions)"
    )
    return [
        f"Reused: {reused:,} of {prompts:,} prompt tokens came from the store and were not computed again.",
        f"Sooner: the first token came {times}.",
        f"Equal: {all_or_some} answers are those of plain transformers, token by token{but}.",
    ]


def in_turn(found: InTurn) -> str:
    """Describe the results of asking about one document after another, with hints."""
    read, loaded = (f"{nbytes / (1 << 20):.1f} MiB" for nbytes in (found.read_bytes, found.loaded_bytes))
    return (
        f"One question about each document, hinted while the previous one was answered: {found.waiting} of "
        f"{found.pages} pages were in memory when they were requested, and first tokens came after "
        f"{_span(found.ttft_s)}. The prefetcher started {read} from disk and {loaded} into HBM."
    )


def _span(seconds: Sequence[float]) -> str:
    if not seconds:
        return "an unknown time (only one document)"
    return f"{min(seconds):.2f} to {max(seconds):.2f} s (median {median(seconds):.2f})"


def _table(title: str, rows: Sequence[Row], width: int) -> Table:
    """Return a table that is ``width`` characters wide.

    Numbers are shown in full, and texts are cut to the remaining width.
    """
    table = Table(
        title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    room = max(20, width - sum(FIGURES.values()) - 24)
    for name, share in TEXTS.items():
        table.add_column(name, width=int(room * share), overflow="ellipsis", no_wrap=True)
    for name, columns in FIGURES.items():
        table.add_column(name, width=columns, justify="right")
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    return table


def _cells(row: Row) -> Iterator[str]:
    yield from (row.document, row.question, row.answer)
    yield from (str(row.tokens_reused), str(row.prompt_tokens), row.tier)
    yield from (
        f"{row.recompute_ttft_s:.2f}",
        f"{row.ttft_s:.2f}",
        f"{row.sooner:.1f}",
        "yes" if row.verdict == "same" else row.verdict,
    )


def _over_exact(outcome: Outcome) -> str:
    return "" if all(row.exact for row in outcome.rows) else " from pages that no lossy codec has changed"


def _compare(console: Console, outcome: Outcome) -> None:
    """Print each answer from inexact pages below that of plain transformers, with the number of tokens that agree."""
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
        f"{found['answers']} answers from pages that went through {outcome.lossy}: {found['equal']} equal to plain "
        f"transformers; {found['agreeing']} of {found['tokens']} tokens come before the first one that differs\n"
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
    ratios = sorted(row.sooner for row in rows)
    return f"; restoring was {ratios[0]:.1f} to {ratios[-1]:.1f} times as fast"
