"""Runs the demonstration in two processes.

The first process asks each question with and without the store, and closes the store. The second process reopens the
store, whose pages are then only on disk, and asks all questions again. Every answer is compared with that of plain
transformers. At the end, the second process asks one question about each document in turn, like a batch job. While
one question is answered, a hint announces the next document.

``python -m tierstore.demo.run PLAN FOUND`` runs the second process.
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
    tiers_asked,
)
from tierstore.host.processors import Threads, use_fewer_threads, use_threads
from tierstore.prefetch import Prefetcher, ahead
from tierstore.store import TierStore
from tierstore.types import Tier


@dataclass(frozen=True, slots=True)
class InTurn:
    """Results of asking one question about each document in turn, with hints.

    ``pages``, ``waiting`` and ``ttft_s`` do not include the first document, because no hint could precede it.

    Attributes:
        pages: Number of prompt pages that were in the store when their question was asked.
        waiting: Number of these pages that were in HBM or host memory.
        ttft_s: Time to first token for each question, in seconds.
        read_bytes: Number of bytes that the prefetcher read from disk to host memory.
        loaded_bytes: Number of bytes that the prefetcher loaded into HBM.
        other: Number of answers that differ from those of plain transformers. Answers that differ at a near-tie, and
            answers computed from inexact pages, are not counted.
    """

    pages: int = 0
    waiting: int = 0
    ttft_s: Sequence[float] = ()
    read_bytes: int = 0
    loaded_bytes: int = 0
    other: int = 0


def ask_in_turn(session: Session, store: TierStore, plan: Plan, say: Callable[[str], None]) -> InTurn:
    """Ask the first question about each document in turn, with a hint for the next one.

    Before the call, all pages must be on disk only.
    """
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
"""Maximum number of repeated measurements of a question's two times to first token."""


class Times(NamedTuple):
    """Times to first token with and without the store, in seconds, and the number of repeated measurements."""

    restore_s: float
    recompute_s: float
    again: int


@dataclass(frozen=True, slots=True)
class Row:
    """One answered question. Times are in seconds.

    Attributes:
        document: Name of the document.
        question: Text of the question.
        tier: The slowest tier that reused pages came from, or "none" if no page was reused.
        tokens_reused: Number of reused prompt tokens.
        prompt_tokens: Number of tokens in the prompt.
        ttft_s: Time to first token with the store.
        recompute_ttft_s: Time to first token of plain transformers.
        after_restart: Whether the second process asked the question.
        answer: The answer with the store.
        verdict: Comparison of the answer with that of plain transformers. See ``answers.differs``.
        measured_again: How often both times to first token were measured again because a restore from NVMe seemed
            slower than plain transformers.
        exact: Whether the answer was computed from exact pages only. See ``StoredAnswer``.
        plain_answer: The answer of plain transformers.
        tokens: Number of tokens in ``plain_answer``.
        agreeing: Number of tokens before the first one that differs between the two answers.
        lost_tokens: Number of prompt tokens that were computed although they were in the store.
        why: The reason why stored tokens were computed again. Empty if ``lost_tokens`` is 0.
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
    lost_tokens: int = 0
    why: str = ""

    @property
    def sooner(self) -> float:
        """Return the time to first token of plain transformers, divided by the time with the store."""
        return self.recompute_ttft_s / self.ttft_s


_WHY = {
    "no_room": "HBM was full of pages that were in use or not saved yet",
    "late": "they did not arrive in the time that computing them takes",
    "failed": "reading them from disk failed or exceeded nvme.timeout",
}
"""Texts for the values of ``TierStoreCache.missing_because``."""


def lost(answer: StoredAnswer, prompt_tokens: int) -> tuple[int, str]:
    """Return how many prompt tokens were computed although they were in the store, and why.

    The last token of a prompt is not counted, because it is always computed.
    """
    count = min(answer.stored_tokens, prompt_tokens - 1) - answer.reused_tokens
    if count <= 0:
        return 0, ""
    because = answer.missing_because
    return count, "they were no longer in the store" if because is None else _WHY.get(because, because)


def open_store(session: Session, plan: Plan) -> TierStore:
    """Open the store that the plan describes, for pages of the session's model."""
    return TierStore.open(load_config(plan.store), session.spec(plan.page_size))


def ingest(session: Session, store: TierStore, plan: Plan, say: Say) -> None:
    """Compute every document once and put its pages into the store. ``say`` is called with the progress."""
    for number, ids in enumerate(plan.documents, 1):
        session.ingest(store, ids)
        say(f"ingested document {number} of {len(plan.documents)}, {len(ids)} tokens")


def ask_all(session: Session, store: TierStore, plan: Plan, say: Say, *, after_restart: bool) -> list[Row]:
    """Ask all questions in the plan's order, and return a row for each.

    If ``plan.plain`` does not contain the answer of plain transformers yet, the question is also asked without the
    store, and that answer is added to ``plan.plain``.
    """
    rows = []
    for number, index in enumerate(plan.order, 1):
        question = plan.questions[index]
        if index not in plan.plain:
            plan.plain[index] = session.plain(question.ids, plan.answer_tokens)
            fewer = use_fewer_threads(plan.plain[index].cores) if plan.adapts else None
            if fewer is not None:
                say(fewer.described())
        plain = plan.plain[index]
        answer = session.stored(store, question.ids, plan.answer_tokens)
        times = measured(session, store, question.ids, answer, plain)
        lost_tokens, why = lost(answer, len(question.ids))
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
            lost_tokens=lost_tokens,
            why=why,
        )
        rows.append(row)
        say(
            f"question {number} of {len(plan.order)}: plain transformers {row.recompute_ttft_s:.2f} s, TierStore "
            f"{row.ttft_s:.2f} s, {row.sooner:.1f} times sooner ({row.tokens_reused} of {row.prompt_tokens} tokens "
            f"from {row.tier}{f'; {lost_tokens} stored ones computed again: {why}' if why else ''})"
        )
    store.check()
    return rows


def measured(
    session: Session, store: TierStore, ids: list[int], answer: StoredAnswer, plain: PlainAnswer
) -> Times:
    """Return the times to first token with and without the store.

    If a restore from NVMe seems slower than plain transformers, both times are measured again, up to three times.
    The plain run may have been minutes ago, and other programs may have slowed down the machine since then. A
    restore that is really slower stays slower when it is measured again. Nothing is measured again if more than half
    of the prompt was computed.
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
    """Demote all pages, so that they are only on disk, and wait until they are durable."""
    for question in plan.questions:
        store.demote(store.keys(question.ids), Tier.NVME)
    store.drain(120.0)
    store.flush()


def main(plan_path: Path, found_path: Path) -> None:
    """Run the second process.

    Args:
        plan_path: The file from which to read the plan.
        found_path: The file to which to write the results, as JSON.
    """
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
    """The second process failed. The message contains its output."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of the demonstration: the rows of both processes, the results with hints, and the options."""

    documents: list[Document]
    sizes: Sizes
    page_nbytes: int
    rows: list[Row]
    codec: str = "none"
    host_codec: str = "none"
    device: str = "cpu"
    in_turn: InTurn | None = None
    asked: frozenset[Tier] = frozenset((Tier.HBM, Tier.HOST, Tier.NVME))
    """Tiers in which at least one question before the restart is certain to find its document's pages."""

    @property
    def lossy(self) -> str:
        """Return the codec that makes answers inexact: that of host memory or, if that is "none", that of the disk."""
        return self.codec if self.host_codec == "none" else self.host_codec


def run_demo(
    model: Path, settings: Settings, say: Say, paths: Sequence[Path] = (), place: Path | None = None
) -> Outcome:
    """Run both processes and return the results. ``report.judge`` evaluates them.

    Args:
        model: Folder of the model.
        settings: Sizes and options.
        say: Called with progress messages.
        paths: The user's text files and folders. If empty, texts of this machine are used.
        place: Folder in which a temporary folder for the disk tier is created. It is removed at the end. None means
            the system's default.

    Raises:
        DocumentError: Not enough long texts were found.
        RestartError: The second process failed.
        TierStoreError: The model is not supported, or the store failed.
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
        plan, sizes, page_nbytes = _prepare(session, documents, settings, model, Path(scratch), chosen, say)
        with open_store(session, plan) as store:
            ingest(session, store, plan, say)
            say("asking each question without and with the store; times to first token are in seconds")
            rows = ask_all(session, store, plan, say, after_restart=False)
            settle(session, store, plan)
        say("the store is closed; a new process opens it from disk")
        if plan.threads is not None:
            plan = replace(plan, threads=torch.get_num_threads())
        after, in_turn = _second_act(plan, Path(scratch), say)
    pages = [len(ids) // settings.page_size for ids in plan.documents]
    asked = tiers_asked(plan.order, pages, sizes)
    how = (settings.codec, settings.host_codec, settings.device)
    return Outcome(documents, sizes, page_nbytes, rows + after, *how, in_turn, asked)


def _prepare(
    session: Session,
    documents: list[Document],
    settings: Settings,
    model: Path,
    scratch: Path,
    threads: Threads | None,
    say: Say,
) -> tuple[Plan, Sizes, int]:
    """Create the plan, and report the sizes. Return the plan, the sizes, and the size of a page in bytes."""
    questions = make_questions(session, documents, settings.num_questions)
    prefixes = shared_prefixes(questions, settings.num_questions)
    sizes = tier_sizes(prefixes, questions, settings)
    spec = session.spec(settings.page_size)
    page_nbytes = spec.page_nbytes
    mib = page_nbytes / (1 << 20)
    say(
        f"documents: {sizes.documents} pages of {mib:.2f} MiB; HBM {sizes.hbm} pages ({sizes.hbm * mib:.0f} MiB), "
        f"host {sizes.host} pages ({sizes.host * mib:.0f} MiB): "
        + ("all of them fit" if sizes.fit else f"{sizes.documents - sizes.hbm - sizes.host} pages do not fit")
    )
    plan = Plan(
        model=str(model),
        page_size=settings.page_size,
        answer_tokens=settings.answer_tokens,
        store=store_config(sizes, spec, len(questions), scratch / "store", settings),
        documents=prefixes,
        questions=questions,
        order=mixed_order(len(documents), settings.num_questions),
        threads=torch.get_num_threads() if settings.device == "cpu" else None,
        adapts=threads is not None and threads.chosen,
    )
    return plan, sizes, page_nbytes


def _second_act(plan: Plan, scratch: Path, say: Say) -> tuple[list[Row], InTurn]:
    """Run the second process, pass its output on to ``say``, and return its results.

    Raises:
        RestartError: The process failed.
    """
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
                f"the second process exited with status {child.returncode}:\n{complaints.read()[-4000:]}"
            )
    found = json.loads(found_path.read_text())
    return [Row(**row) for row in found["rows"]], InTurn(**found["in_turn"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
