"""The play: plain answers first, then the store answers, then a new process answers from the disk alone.

In the end that process asks for the documents in turn, each hinted while the one before it is answered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.demo.act import Row, ask_all, ingest, open_store, settle
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
from tierstore.demo.session import Session
from tierstore.demo.turns import InTurn

Say = Callable[[str], None]


class RestartError(RuntimeError):
    """The second process did not come to its end; the message carries what it said."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: the rows of both acts, and the sizes they were played with."""

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
        """What pages went through: the codec of host memory, or else of the disk."""
        return self.codec if self.host_codec == "none" else self.host_codec


def run_demo(
    model: Path, settings: Settings, say: Say, paths: Sequence[Path] = (), place: Path | None = None
) -> Outcome:
    """Play both acts with the model in folder ``model`` and return what happened; judges nothing.

    ``place``: where a temporary folder for the store's disk tier is made (default: the system's); it is removed at
    the end. Raises DocumentError, PlanError, RestartError, and the store's own errors.
    """
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
    )
    return plan, sizes, page_nbytes


def _second_act(plan: Plan, scratch: Path, say: Say) -> tuple[list[Row], InTurn]:
    """Ask everything again in a new process, and then the documents in turn."""
    plan_path, found_path = scratch / "plan.json", scratch / "found.json"
    plan.save(plan_path)
    command = [sys.executable, "-m", "tierstore.demo.act", str(plan_path), str(found_path)]
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
