"""A batch job's list of documents as hints: a window of those to come is brought up while one is worked on."""

from __future__ import annotations

from collections import deque
from itertools import count, islice
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from prefetch.waiting import Waiting
from tierstore.types import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey

_Document = TypeVar("_Document")


def ahead(
    store: TierStore,
    documents: Iterable[_Document],
    keys_of: Callable[[_Document], Sequence[PageKey]],
    *,
    window: int = 4,
    name: str = "batch",
    clock: Callable[[], float] = monotonic,
) -> Iterator[_Document]:
    """The documents, one after the other, each hinted while the ``window`` before it are worked on.

    ``keys_of`` a document is called once, ahead of its turn; ``documents`` is read no further than the window. The
    document in hand stays hinted until the next is asked for, so lease it before. When the iterator ends, or is closed,
    nothing is expected any more. ``name``: two batches at a time need two. ValueError for a window below 1.
    """
    pages = whole("window", window, 1)
    return _ahead(documents, keys_of, pages, Waiting(store, name=name, most=pages + 1, clock=clock))


def _ahead(
    documents: Iterable[_Document],
    keys_of: Callable[[_Document], Sequence[PageKey]],
    window: int,
    waiting: Waiting,
) -> Iterator[_Document]:
    source, numbers = iter(documents), count()
    coming: deque[tuple[str, _Document]] = deque()
    with waiting:
        while True:
            for document in islice(source, window + 1 - len(coming)):
                coming.append((str(next(numbers)), document))
                waiting.add(coming[-1][0], keys_of(document))
            if not coming:
                return
            yield coming[0][1]
            waiting.started(coming.popleft()[0])
