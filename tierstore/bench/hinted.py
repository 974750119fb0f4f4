"""How soon a document answers that lies below HBM, with a hint in good time, with one that came late, and without.

Real copies through a store with an attached prefetcher. A ``Library`` says how a document is asked, so that pages alone
and a model that answers over them are measured alike. Every case has had the same before its clock runs: its document
was asked twice (what is compiled or planned at first is), nothing was done for ``REST_S``, and Python's collector does
not look at what was there before the first answer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from time import monotonic_ns, perf_counter, sleep
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from prefetch import Prefetcher
from tierstore.bench import measurement
from tierstore.types import Hint, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey

Case = Literal["resident", "none", "late", "ahead"]
CASES: tuple[Case, ...] = ("resident", "none", "late", "ahead")
"""Pages in HBM; below it and no hint; a hint half of the loading time before; one longer than that before."""

LATE, AHEAD = 0.5, 1.25
AHEAD_S = 0.05
"""Leads, in loading times of the document; the longer one and so many seconds."""
REST_S = 0.5
"""Before every answer nothing is asked so long, a hint's lead included: a card's clocks fall for all cases alike."""
_LOADS, _LOADS_S = 3, 3.0
"""The loading time is the median of so many loads, or of those that began within so many seconds."""
_WARM = 2
PATIENCE_S = 600.0


class Answer(NamedTuple):
    """``seconds`` until it was there; ``content``: equal for equal answers."""

    seconds: float
    content: Hashable


class Asked(NamedTuple):
    """A case of a round, and the lead that its hint had, 0 without one."""

    answer: Answer
    lead_s: float


Round = dict[Case, Asked]


class Library(Protocol):
    """Documents in a store."""

    store: TierStore

    @property
    def documents(self) -> Sequence[Sequence[PageKey]]:
        """The keys of their pages."""
        ...

    def ask(self, number: int) -> Answer:
        """Takes a lease on a document and answers. Nothing is left to do for it then, on the device neither."""
        ...


@dataclass(frozen=True, slots=True)
class HintRow:
    """One case. Seconds are medians; ``ratio`` is the median, ``spread`` the least and most, over pairs.

    ``ratio`` is to the pair's resident answer; of "late" to what it could be at best, the pair's answer without a hint
    less the lead, or the resident one if that is longer. ``load_s``: a lease on the document, without a model and
    without a hint. ``equal``: every answer was that of the case without hints.
    """

    source: str
    case: Case
    nbytes: int
    load_s: float
    lead_s: float
    seconds: float
    ratio: float
    spread: tuple[float, float]
    pairs: int
    equal: bool

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def hint_rows(
    library: Library, source: Tier, rounds: int, nbytes: int, note: Callable[[Round], None]
) -> list[HintRow]:
    """All cases of every document, ``rounds`` times, one beside the other in an order that changes.

    ``note`` is told each round of a document once it is over.
    """
    numbers = range(len(library.documents))
    with Prefetcher.attach(library.store) as prefetcher, measurement.at_rest():
        load_s = median([took for number in numbers for took in _loads(library, number, source)])
        for number in numbers:
            for _ in range(_WARM):
                library.ask(number)
        found: list[Round] = []
        for turn in range(rounds):
            for number in numbers:
                order = CASES[turn % len(CASES) :] + CASES[: turn % len(CASES)]
                found.append({case: _asked(library, number, source, case, load_s) for case in order})
                note(found[-1])
        if prefetcher.stats()["faults"]:
            raise RuntimeError("the prefetcher met an error; its log says which")
    return [_row(case, found, source, nbytes, load_s) for case in CASES]


def place(store: TierStore, keys: Sequence[PageKey], tier: Tier) -> None:
    """The document's pages are in ``tier``, saved below it, and nowhere above it. RuntimeError if that cannot be."""
    wanted = (tier,) * len(keys)
    if tier == Tier.HBM:
        _lease(store, keys)
    else:
        store.demote(keys, Tier.HOST)  # not evicted: without a disk a page may be in HBM alone yet
        store.drain(PATIENCE_S)
    if tier > Tier.HBM and store.match(keys).tiers != wanted:
        store.demote(keys, _lowest(store))
        store.drain(PATIENCE_S)
        if tier == Tier.HOST:  # where pages stay on their way up
            _lease(store, keys)
            store.evict(keys, Tier.HBM)
    tiers = store.match(keys).tiers
    if tiers != wanted:
        places = {each.name: tiers.count(each) for each in sorted(set(tiers))}
        raise RuntimeError(
            f"{len(keys)} pages cannot all be brought to {tier.name}: {places or 'none is there'}"
        )


def _lowest(store: TierStore) -> Tier:
    tiers = store.stats()["tiers"]
    assert isinstance(tiers, dict)
    return max(Tier[name] for name in tiers)


def _lease(store: TierStore, keys: Sequence[PageKey]) -> None:
    with store.acquire(keys) as lease:
        lease.wait(PATIENCE_S)


def _loads(library: Library, number: int, source: Tier) -> list[float]:
    """Seconds from a look-up to the last page in HBM, of several."""
    keys, found = library.documents[number], list[float]()
    begin = perf_counter()
    while len(found) < _LOADS and (not found or perf_counter() - begin < _LOADS_S):
        place(library.store, keys, source)
        asked = perf_counter()
        with library.store.acquire(keys) as lease:
            lease.wait(PATIENCE_S)
            found.append(perf_counter() - asked)
    return found


def _asked(library: Library, number: int, source: Tier, case: Case, load_s: float) -> Asked:
    """Where the last answer left a document in HBM, the resident case reads nothing again."""
    store, keys = library.store, tuple(library.documents[number])
    place(store, keys, Tier.HBM if case == "resident" else source)
    lead = {"late": LATE * load_s, "ahead": AHEAD * load_s + AHEAD_S}.get(case, 0.0)
    sleep(max(0.0, REST_S - lead))
    begin = perf_counter()
    if lead:
        store.hint(Hint("document", monotonic_ns(), keys, deadline_s=lead))
        sleep(max(0.0, lead - (perf_counter() - begin)))
        lead = perf_counter() - begin
    answer = library.ask(number)
    store.hint(Hint("document", monotonic_ns(), ()))
    store.drain(PATIENCE_S)
    return Asked(answer, lead)


def _row(case: Case, found: Sequence[Round], source: Tier, nbytes: int, load_s: float) -> HintRow:
    ratios = []
    for pair in found:
        (answer, lead), resident = pair[case], pair["resident"].answer.seconds
        best = max(resident, pair["none"].answer.seconds - lead) if case == "late" else resident
        ratios.append(answer.seconds / best)
    return HintRow(
        source=source.name,
        case=case,
        nbytes=nbytes,
        load_s=load_s,
        lead_s=median(pair[case].lead_s for pair in found),
        seconds=median(pair[case].answer.seconds for pair in found),
        ratio=median(ratios),
        spread=(min(ratios), max(ratios)),
        pairs=len(found),
        equal=all(pair[case].answer.content == pair["none"].answer.content for pair in found),
    )
