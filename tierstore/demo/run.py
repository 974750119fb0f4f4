"""Run the demonstration: plain answers first, then answers over the store, then a new process with only the disk.

Each process opens the store of a plan, asks all questions and compares every answer with the plain run's. At the
end, the second process asks about the documents in turn and hints each while the one before it is answered, like a
batch job. Run as ``python -m tierstore.demo.run PLAN FOUND``, this module is the second process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from prefetch import Prefetcher, ahead
from tierstore.config import load_config
from tierstore.demo.answers import PlainAnswer, Session, StoredAnswer, agreeing, differs
from tierstore.demo.documents import Document, find_documents
from tierstore.demo.plan import (
    Plan,
    Settings,
    Sizes,
    make_questions,
    mixed_order,
    shared_prefixes,
    store_config,
    tier_sizes,
)
from tierstore.host.processors import use_threads
from tierstore.store import TierStore
from tierstore.types import Tier


@dataclass(frozen=True, slots=True)
class InTurn:
    """Results of asking in turn. Counts leave out the first document, which could not be hinted ahead.

    ``pages`` of the prompts are in the store, ``waiting`` of them were in memory when the document was asked about.
    ``ttft_s`` has each time to first token. ``read_bytes`` and ``loaded_bytes`` are what the prefetcher moved to
    host memory and to HBM. ``other`` counts answers over exact pages that differ from the plain run's, near-ties
    aside, of all documents.
    """

    pages: int = 0
    waiting: int = 0
    ttft_s: Sequence[float] = ()
    read_bytes: int = 0
    loaded_bytes: int = 0
    other: int = 0


def ask_in_turn(session: Session, store: TierStore, plan: Plan, say: Callable[[str], None]) -> InTurn:
    """Ask one question about each document, in order. At the beginning all pages are on disk only."""
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


Say = Callable[[str], None]

MEASURED_AGAIN = 3
"""How often a pair of times is measured again at most."""


class Times(NamedTuple):
    """Times to first token, and how often they were measured again."""

    restore_s: float
    recompute_s: float
    again: int


@dataclass(frozen=True, slots=True)
class Row:
    """One answered question. ``tier`` is the slowest one that pages came from, "none" without a hit.

    ``verdict`` is "same", "near-tie" or "other", compared with the plain run. Times are in seconds.
    ``measured_again`` counts how often both times were measured again, side by side, because a restore from NVMe
    seemed slower than an earlier recompute. ``exact``: no page went through a lossy codec. ``plain_answer`` is the
    answer without the store; its first ``agreeing`` of ``tokens`` tokens are those of ``answer``.
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
    """Open the plan's store for the pages of the model."""
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
    """Return both times to first token, measured again side by side while the restore from NVMe seems slower.

    The plain run is minutes old: other programs may have slowed the machine since. A restore that is really slow
    stays slow, and so does an answer that computed most of its prompt.
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
    """Move every page to disk, so that a new process finds all of them there."""
    for question in plan.questions:
        store.demote(store.keys(question.ids), Tier.NVME)
    store.drain(120.0)
    store.flush()


def main(plan_path: Path, found_path: Path) -> None:
    """Run the second process."""
    plan = Plan.load(plan_path)
    if plan.threads is not None:
        use_threads("cpu", plan.threads)
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


class RestartError(RuntimeError):
    """The second process failed. The message has its output."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results: the rows of both processes, and the sizes of the demonstration."""

    documents: list[Document]
    sizes: Sizes
    page_nbytes: int
    rows: list[Row]
    codec: str = "none"
    host_codec: str = "none"
    device: str = "cpu"
    in_turn: InTurn | None = None

    @property
    def lossy(self) -> str:
        """Return the codec that pages went through: that of host memory, or else of the disk."""
        return self.codec if self.host_codec == "none" else self.host_codec


def run_demo(
    model: Path, settings: Settings, say: Say, paths: Sequence[Path] = (), place: Path | None = None
) -> Outcome:
    """Run both processes with the model in folder ``model`` and return the results, without judging them.

    Args:
        place: Where the temporary folder of the disk tier is created (default: the system's) and finally removed.

    Raises DocumentError, PlanError, RestartError, and the store's own errors.
    """
    chosen = use_threads(settings.device, settings.threads)
    if chosen is not None:
        say(chosen.described())
    say("loading the model")
    session = Session(model, settings.device)
    documents = find_documents(
        session.tokenizer, settings.num_documents, settings.min_tokens, settings.max_tokens, paths
    )
    for document in documents:
        say(f"document: {document.name}, {document.num_tokens} tokens")
    with tempfile.TemporaryDirectory(prefix="tierstore-demo-", dir=place) as scratch:
        plan, sizes, page_nbytes = _prepare(session, documents, settings, model, Path(scratch), say)
        with open_store(session, plan) as store:
            ingest(session, store, plan, say)
            rows = ask_all(session, store, plan, say, after_restart=False)
            settle(session, store, plan)
        say("the store is closed; a new process opens it from disk")
        after, in_turn = _second_act(plan, Path(scratch), say)
    how = (settings.codec, settings.host_codec, settings.device)
    return Outcome(documents, sizes, page_nbytes, rows + after, *how, in_turn)


def _prepare(
    session: Session, documents: list[Document], settings: Settings, model: Path, scratch: Path, say: Say
) -> tuple[Plan, Sizes, int]:
    """Make the plan and have plain transformers answer its questions."""
    questions = make_questions(session, documents, settings.num_questions)
    prefixes = shared_prefixes(questions, settings.num_questions)
    sizes = tier_sizes(prefixes, questions, settings)
    spec = session.spec(settings.page_size)
    page_nbytes = spec.page_nbytes
    mib = page_nbytes / (1 << 20)
    say(
        f"documents: {sizes.documents} pages of {mib:.2f} MiB; HBM {sizes.hbm} pages ({sizes.hbm * mib:.0f} MiB), "
        f"host {sizes.host} pages ({sizes.host * mib:.0f} MiB): together {sizes.documents - sizes.hbm - sizes.host} "
        "pages too small for them"
    )
    plain = []
    for number, question in enumerate(questions, 1):
        plain.append(session.plain(question.ids, settings.answer_tokens))
        say(
            f"plain transformers: question {number} of {len(questions)}, first token after {plain[-1].ttft_s:.2f} s"
        )
    plan = Plan(
        model=str(model),
        page_size=settings.page_size,
        answer_tokens=settings.answer_tokens,
        store=store_config(sizes, spec, len(questions), scratch / "store", settings),
        documents=prefixes,
        questions=questions,
        order=mixed_order(len(documents), settings.num_questions),
        plain=plain,
        threads=torch.get_num_threads() if settings.device == "cpu" else None,
    )
    return plan, sizes, page_nbytes


def _second_act(plan: Plan, scratch: Path, say: Say) -> tuple[list[Row], InTurn]:
    """Ask everything again in a new process, and then about the documents in turn."""
    plan_path, found_path = scratch / "plan.json", scratch / "found.json"
    plan.save(plan_path)
    command = [sys.executable, "-m", "tierstore.demo.run", str(plan_path), str(found_path)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            say(f"after the restart: {line.strip()}")
        if child.wait():
            complaints.seek(0)
            raise RestartError(
                f"the second process ended with {child.returncode}:\n{complaints.read()[-4000:]}"
            )
    found = json.loads(found_path.read_text())
    return [Row(**row) for row in found["rows"]], InTurn(**found["in_turn"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
