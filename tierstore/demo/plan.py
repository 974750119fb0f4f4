"""The plan of the demonstration: documents, questions and their order, and the sizes of the tiers.

HBM and host memory together are too small for all documents. A plan is plain data, which the first process passes to
the second as JSON, together with the answers of plain transformers.
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
from tierstore.types import Tier

QUESTIONS = (
    "What is this text about?",
    "Who wrote or published it?",
    "What does it ask of the reader?",
    "Which words does it define?",
    "What does it forbid?",
    "How does it end?",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and options of the demonstration. The defaults are those of ``tierstore demo``.

    ``min_tokens`` and ``max_tokens`` limit the length of a document, and ``num_questions`` is the number of questions
    per document. ``answer_tokens`` is the maximum length of an answer, and ``page_size`` is in tokens.
    """

    num_documents: int = 4
    min_tokens: int = 1024
    max_tokens: int = 1152
    num_questions: int = 2
    answer_tokens: int = 10
    page_size: int = 64
    codec: str = "none"
    host_codec: str = "none"
    device: str = "cpu"
    hbm_documents: int = 1
    """Number of documents, each with a question and its answer, that fit into HBM."""
    threads: int | None = None
    """Number of threads per CPU operation. None means the number of free cores."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document. ``ids`` are the token IDs of the whole prompt."""

    document: str
    text: str
    ids: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """The data that both processes need.

    ``model`` is the model's folder, and ``store`` the configuration of the store. ``documents`` contains, for each
    document, the token IDs that all prompts about it start with. ``order`` lists the questions in the order in
    which they are asked, as indices into ``questions``.
    """

    model: str
    page_size: int
    answer_tokens: int
    store: dict[str, Any]
    documents: list[list[int]] = field(repr=False)
    questions: list[Question]
    order: list[int]
    plain: dict[int, PlainAnswer] = field(default_factory=dict)
    """Answers of plain transformers, by index of the question. The first process adds them."""
    threads: int | None = None
    """Number of threads per CPU operation. None means torch's default."""
    adapts: bool = False
    """Whether the first process reduces the number of threads when it finds that threads wait for cores."""

    def save(self, path: Path) -> None:
        """Write the plan to a JSON file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file that ``save`` wrote."""
        raw = json.loads(path.read_text())
        raw["questions"] = [Question(**question) for question in raw["questions"]]
        raw["plain"] = {int(index): PlainAnswer(**answer) for index, answer in raw["plain"].items()}
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The total number of pages in all documents, and the numbers of pages that fit into HBM and into host memory."""

    documents: int
    hbm: int
    host: int

    @property
    def fit(self) -> bool:
        """Return whether all documents fit into HBM and host memory together."""
        return self.documents <= self.hbm + self.host


def make_questions(session: Session, documents: Sequence[Document], count: int) -> list[Question]:
    """Return the first ``count`` of ``QUESTIONS`` for each document, grouped by document."""
    return [
        Question(document.name, text, session.prompt(document.text, text))
        for document in documents
        for text in QUESTIONS[:count]
    ]


def shared_prefixes(questions: Sequence[Question], per_document: int) -> list[list[int]]:
    """Return, for each document, the token IDs that all prompts about it start with.

    ``questions`` are grouped by document, with ``per_document`` questions for each.
    """
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
    """Return the order in which to ask the questions, as indices, so that all tiers have hits.

    With one question per document, the order of the documents is the reverse of the order of ingestion. With two,
    the second question directly follows the first for every other document; for the remaining documents, it comes
    after a question about the next document. With three or more, the second question directly follows the first,
    while the document is in HBM. Later questions come after questions about later documents.
    """
    if per_document == 1:
        return list(reversed(range(num_documents)))
    steps = []
    for document in range(num_documents):
        for number in range(per_document):
            apart = document % 2 if per_document == 2 and number else max(0, number - 1)
            steps.append((document + apart, number, document * per_document + number))
    return [index for _, _, index in sorted(steps)]


def tier_sizes(
    documents: Sequence[Sequence[int]], questions: Sequence[Question], settings: Settings
) -> Sizes:
    """Choose the sizes of HBM and host memory.

    HBM has space for ``settings.hbm_documents`` requests, and host memory is up to three times as large as HBM. If
    there are many documents, the two tiers together are too small for all of them. If there are so few documents
    that all fit (``Sizes.fit``), HBM is no larger than necessary.
    """
    page = settings.page_size
    total = sum(len(ids) // page for ids in documents)
    request = max(-(-(len(question.ids) + settings.answer_tokens) // page) for question in questions)
    hbm = min(settings.hbm_documents, len(documents)) * request + 2
    host = max(request, min(3 * hbm, (total - hbm) * 4 // 5))
    return Sizes(total, hbm, host)


def tiers_asked(order: Sequence[int], documents: Sequence[int], sizes: Sizes) -> frozenset[Tier]:
    """Return the tiers in which at least one question is certain to find its document's pages.

    The result assumes LRU eviction. It also assumes that host memory contains copies of the pages in HBM.

    Args:
        order: Indices of the questions, in the order in which they are asked. The indices are grouped by document.
        documents: Number of pages of each document, in the order of ingestion.
        sizes: Number of pages that fit into HBM and into host memory.
    """
    per_document, found = len(order) // len(documents), set[Tier]()
    used = list(range(len(documents)))
    for index in order:
        document = index // per_document
        later = sum(documents[other] + _MORE for other in used[used.index(document) + 1 :])
        pages = documents[document]
        if not later and pages + _MORE <= sizes.hbm:
            found.add(Tier.HBM)
        elif sizes.hbm + _MORE < pages + later and pages + later + _MORE <= sizes.host:
            found.add(Tier.HOST)
        elif sizes.hbm + sizes.host < pages + later:
            found.add(Tier.NVME)
        used.remove(document)
        used.append(document)
    return frozenset(found)


_MORE = 2
"""Minimum number of pages for the questions and answers about a document, besides the pages of the document itself."""


def store_config(
    sizes: Sizes, spec: PageSpec, num_questions: int, directory: Path, settings: Settings
) -> dict[str, Any]:
    """Return the configuration of the store.

    The disk has space for the documents, the rest of every prompt and all answers, with a reserve. Host memory has
    space for ``sizes.host`` pages, whatever the codec. If the size of host memory in bytes were fixed, a compact
    codec would make all pages fit into host memory, and no page would come from disk.
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
        # Documents that are read ahead wait in host memory, because HBM has little space besides the document
        # that is being asked about.
        "prefetch": {"share_of_host": 0.5},
    }
