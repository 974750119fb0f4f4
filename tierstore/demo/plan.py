"""What the demonstration will do: documents, questions, their order, and tiers that are too small for all.

A plan is plain data and goes to the second process as JSON, with the answers of the plain run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierstore.codecs.host_format import HostFormat
from tierstore.demo.answers import PlainAnswer, Session
from tierstore.demo.documents import Document
from tierstore.page import PageLayout, PageSpec

QUESTIONS = (
    "What is this text about?",
    "Who wrote or published it?",
    "What does it ask of the reader?",
    "Which words does it define?",
    "What does it forbid?",
    "How does it end?",
)


class PlanError(RuntimeError):
    """The documents are not suitable for the demonstration."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the demonstration. The defaults are those of ``tierstore demo``; tests use smaller ones."""

    num_documents: int = 6
    min_tokens: int = 2048
    max_tokens: int = 2304
    num_questions: int = 3
    answer_tokens: int = 12
    page_size: int = 64
    codec: str = "none"
    host_codec: str = "none"
    device: str = "cpu"
    hbm_documents: int = 1
    """Requests that fit in HBM."""
    threads: int | None = None
    """Threads of one operation on the CPU; None: as many as cores are free."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one document. ``ids`` is the whole prompt."""

    document: str
    text: str
    ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that both processes need. ``order`` has indices into ``questions``, ``store`` is a configuration."""

    model: str
    page_size: int
    answer_tokens: int
    store: dict[str, Any]
    documents: list[list[int]] = field(repr=False)
    questions: list[Question]
    order: list[int]
    plain: list[PlainAnswer]
    threads: int | None = None
    """Threads of one operation on the CPU: the same in both processes, as sums may differ with another number."""

    def save(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read what ``save`` wrote."""
        raw = json.loads(path.read_text())
        raw["questions"] = [Question(**question) for question in raw["questions"]]
        raw["plain"] = [PlainAnswer(**answer) for answer in raw["plain"]]
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages of the documents, and of tiers that cannot hold them all."""

    documents: int
    hbm: int
    host: int


def make_questions(session: Session, documents: Sequence[Document], count: int) -> list[Question]:
    """Return ``count`` questions about every document, document by document."""
    return [
        Question(document.name, text, session.prompt(document.text, text))
        for document in documents
        for text in QUESTIONS[:count]
    ]


def shared_prefixes(questions: Sequence[Question], per_document: int) -> list[list[int]]:
    """Return the common prefix of each document's questions, which is ingested."""
    prefixes = []
    for start in range(0, len(questions), per_document):
        first, *others = (question.ids for question in questions[start : start + per_document])
        length = len(first)
        for ids in others:
            pairs = zip(first, ids, strict=False)
            length = min(length, next((i for i, (a, b) in enumerate(pairs) if a != b), len(ids)))
        prefixes.append(first[:length])
    return prefixes


def mixed_order(num_documents: int, per_document: int) -> list[int]:
    """Return an order of all questions: two about a document in a row, the others after the next documents.

    A document is asked about while it is in HBM, after one other displaced it, and after all others did.
    """
    order = []
    for step in range(num_documents + per_document):
        for number in range(per_document):
            document = step - max(0, number - 1)
            if 0 <= document < num_documents:
                order.append(document * per_document + number)
    return order


def tier_sizes(
    documents: Sequence[Sequence[int]], questions: Sequence[Question], settings: Settings
) -> Sizes:
    """Return sizes: HBM for a few requests, host memory for three times as much, together less than the documents.

    Raises:
        PlanError: The documents are too few for that.
    """
    page = settings.page_size
    total = sum(len(ids) // page for ids in documents)
    request = max(-(-(len(question.ids) + settings.answer_tokens) // page) for question in questions)
    hbm = settings.hbm_documents * request + 2
    host = min(3 * hbm, (total - hbm) * 2 // 3)
    if host < request or hbm + host >= total:
        raise PlanError(
            f"{total} pages of documents fit into an HBM of {hbm} pages and as much host memory; "
            "use longer documents (--tokens) or fewer in HBM (--hbm-documents)"
        )
    return Sizes(total, hbm, host)


def store_config(
    sizes: Sizes, spec: PageSpec, num_questions: int, directory: Path, settings: Settings
) -> dict[str, Any]:
    """Return a configuration whose disk holds everything: documents, the rest of every prompt, answers, and a reserve.

    Host memory holds the same number of pages with every codec: if it held more, nothing would come from disk.
    """
    page_nbytes, held = spec.page_nbytes, HostFormat.of(settings.host_codec, PageLayout.of(spec))
    pages = 2 * (sizes.documents + 4 * num_questions) + 16
    return {
        "hbm": {"capacity": sizes.hbm * page_nbytes, "device": settings.device},
        "host": {"capacity": sizes.host * held.payload_nbytes, "codec": settings.host_codec},
        "nvme": {
            "path": str(directory),
            "capacity": pages * page_nbytes + (64 << 20),
            "codec": settings.codec,
        },
        # Some documents wait there for their turn: HBM has little room besides the one that is being answered.
        "prefetch": {"share_of_host": 0.5},
    }
