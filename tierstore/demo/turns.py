"""Documents asked in turn, each hinted while the one before it is answered: what a batch job would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prefetch import Prefetcher, ahead
from tierstore.demo.plan import Plan
from tierstore.demo.session import Session, differs
from tierstore.store import TierStore
from tierstore.types import Tier


@dataclass(frozen=True, slots=True)
class InTurn:
    """What came of it. Counts are of the documents after the first, which nobody could hint ahead.

    ``pages``: of their prompts that the store has, ``waiting``: those that were in memory when the document was asked
    for. ``ttft_s``: each one's first token. ``read_bytes``, ``loaded_bytes``: what the prefetcher started into host
    memory and into HBM. ``other``: answers over exact pages that differ from the plain run's, not at a near-tie; of all
    documents.
    """

    pages: int = 0
    waiting: int = 0
    ttft_s: Sequence[float] = ()
    read_bytes: int = 0
    loaded_bytes: int = 0
    other: int = 0


def ask_in_turn(session: Session, store: TierStore, plan: Plan, say: Callable[[str], None]) -> InTurn:
    """One question of each document, in the documents' order. All pages are on disk only when it begins."""
    firsts = range(0, len(plan.questions), len(plan.questions) // len(plan.documents))
    keys = {index: store.keys(plan.questions[index].ids) for index in firsts}
    found = InTurn()
    with Prefetcher.attach(store) as prefetcher:
        for number, index in enumerate(ahead(store, firsts, keys.__getitem__, window=1), 1):
            tiers = store.match(keys[index]).tiers
            answer = session.stored(store, plan.questions[index].ids, plan.answer_tokens)
            verdict = differs(plan.plain[index], answer.tokens) if answer.exact else "same"
            found = replace(found, other=found.other + (verdict == "other"))
            waiting = sum(tier < Tier.NVME for tier in tiers)
            say(
                f"in turn: document {number} of {len(firsts)}, {waiting} of {len(tiers)} pages were in memory, "
                f"first token after {answer.ttft_s:.2f} s"
            )
            if number > 1:
                found = replace(
                    found,
                    pages=found.pages + len(tiers),
                    waiting=found.waiting + waiting,
                    ttft_s=(*found.ttft_s, answer.ttft_s),
                )
        figures = prefetcher.stats()
    return replace(
        found, read_bytes=int(str(figures["read_bytes"])), loaded_bytes=int(str(figures["loaded_bytes"]))
    )
