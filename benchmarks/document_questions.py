"""Questions about documents, as ``queued_documents`` and ``throttled_engine`` ask them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class Documents:
    """Documents, not all of which fit into host memory or into the engine's own cache, and questions about them.

    Attributes:
        documents: Number of documents.
        tokens: Tokens of a document.
        question: Tokens of a question.
        answer: Tokens of an answer.
        in_host: Number of documents that fit into host memory.
        in_hbm: Number of documents that fit into the engine's own cache, in HBM.
    """

    documents: int
    tokens: int
    question: int
    answer: int
    in_host: float
    in_hbm: float


def ask_about(
    documents: Iterable[int], at_a_time: int, ask: Callable[[int], object], step: Callable[[], int]
) -> None:
    """Ask one question about each document. Return once all of them have been answered.

    Args:
        documents: The documents, in the order of the questions.
        at_a_time: Number of questions that are in the engine at the same time, except at the end.
        ask: Adds a question about this document to the engine.
        step: Runs a step of the engine, and returns the number of questions that it has answered.
    """
    todo, under_way = deque(documents), 0
    while todo or under_way:
        while todo and under_way < at_a_time:
            ask(todo.popleft())
            under_way += 1
        under_way -= step()
