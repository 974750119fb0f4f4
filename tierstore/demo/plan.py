"""What the demonstration is going to do: documents, questions, their order, and tiers too small to hold them.

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
    """The documents cannot show what the demonstration is for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the play. The defaults are those of ``tierstore demo``; tests make it small."""

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
    """Requests that HBM has room for."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of one document. ``ids``: the whole prompt."""

    document: str
    text: str
    ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything both processes need. ``order``: indices into ``questions``; ``store``: a configuration to load."""

    model: str
    page_size: int
    answer_tokens: int
    store: dict[str, Any]
    documents: list[list[int]] = field(repr=False)
    questions: list[Question]
    order: list[int]
    plain: list[PlainAnswer]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
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
    """Pages of the documents, and of tiers that cannot hold them together."""

    documents: int
    hbm: int
    host: int


def make_questions(session: Session, documents: Sequence[Document], count: int) -> list[Question]:
    """``count`` questions of every document, document by document."""
    return [
        Question(document.name, text, session.prompt(document.text, text))
        for document in documents
        for text in QUESTIONS[:count]
    ]


def shared_prefixes(questions: Sequence[Question], per_document: int) -> list[list[int]]:
    """Of every document, the ids that all its questions begin with: what is ingested."""
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
    """Indices of all questions: two of a document in a row, its others after the next documents were visited.

    So a document is asked for while it is in HBM, after one other pushed it out, and after all the others did.
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
    """HBM for so many requests and little more, host for three times that; together smaller than the documents.

    Raises PlanError if the documents are too few for that.
    """
    page = settings.page_size
    total = sum(len(ids) // page for ids in documents)
    request = max(-(-(len(question.ids) + settings.answer_tokens) // page) for question in questions)
    hbm = settings.hbm_documents * request + 2
    host = min(3 * hbm, (total - hbm) * 2 // 3)
    if host < request or hbm + host >= total:
        raise PlanError(
            f"{total} pages of documents do not exceed an HBM of {hbm} pages and as much host memory; "
            "allowed: longer documents (--tokens), fewer of them in HBM (--hbm-documents)"
        )
    return Sizes(total, hbm, host)


def store_config(
    sizes: Sizes, spec: PageSpec, num_questions: int, directory: Path, settings: Settings
) -> dict[str, Any]:
    """A configuration whose disk holds everything: documents, the rest of every prompt, answers, and slack.

    Host memory gets room for as many pages whatever holds them: with more of them nothing would come from disk.
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
        # A document or more waits there for its turn: HBM has room for little beside the one that is answered.
        "prefetch": {"share_of_host": 0.5},
    }
