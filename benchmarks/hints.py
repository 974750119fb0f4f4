"""``bench hints``: how soon a question about a document below HBM is answered, with and without a hint.

A hint comes in time, late, or not at all. The store makes real copies and has a prefetcher attached. A ``Library`` says
how to ask about a document. An answer is either a lease whose pages have all been loaded, or the output of a model that
reads the pages.

All cases are measured under the same conditions. Two questions about each document are asked in advance, so that
everything that is compiled or planned on first use is ready. Before each measured answer, nothing is asked for
``REST_S`` seconds. Objects that exist before the first answer are excluded from Python's garbage collection.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic_ns, perf_counter, sleep
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from rich.table import Table

from prefetch import Prefetcher
from tierstore.bench import measurement
from tierstore.bench.link import device_of
from tierstore.cli.bench import name_of
from tierstore.cli.output import print_json, progress, refusals, require_folder, wide_console
from tierstore.cli.studies import PAGE_SIZE
from tierstore.config import load_config
from tierstore.demo.documents import COMMON_LICENCES, require_texts
from tierstore.demo.model import ModelError, model_folder
from tierstore.errors import ConfigError
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Hint, Tier, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from tierstore.types import PageKey

Case = Literal["resident", "none", "late", "ahead"]
CASES: tuple[Case, ...] = ("resident", "none", "late", "ahead")
"""The cases that are compared.

In "resident", the pages are in HBM before the question. In the other cases, they are below HBM. "none" has no hint. In
"late", a hint precedes the question by half of the loading time. In "ahead", a hint precedes the question by more than
the loading time.
"""

LATE, AHEAD = 0.5, 1.25
AHEAD_S = 0.05
"""Leads of hints, the times by which they precede the question.

The lead is ``LATE`` times the document's loading time in the case "late", and ``AHEAD`` times the loading time plus
``AHEAD_S`` seconds in the case "ahead".
"""
REST_S = 0.5
"""Seconds without a question before each measured answer, including the lead of a hint.

This way, the clocks of an idle GPU slow down equally in all cases.
"""
_LOADS, _LOADS_S = 3, 3.0
"""The loading time is the median of at most ``_LOADS`` loads. No further load starts after ``_LOADS_S`` seconds."""
_WARM = 2
PATIENCE_S = 600.0


class Answer(NamedTuple):
    """An answer, and how long it took.

    Attributes:
        seconds: Time in seconds until the lease was ready or the first token was known.
        content: A value that is equal for equal answers.
    """

    seconds: float
    content: Hashable


class Asked(NamedTuple):
    """The answer in one case, and the lead of its hint in seconds. The lead is 0 without a hint."""

    answer: Answer
    lead_s: float


Round = dict[Case, Asked]


class Library(Protocol):
    """Documents in a store, with a method to ask questions about them."""

    store: TierStore

    @property
    def documents(self) -> Sequence[Sequence[PageKey]]:
        """The keys of the pages of each document."""
        ...

    def ask(self, number: int) -> Answer:
        """Acquire a document's pages, and answer. On return, the device has no work left for the answer."""
        ...


@dataclass(frozen=True, slots=True)
class HintRow:
    """The results of one case, over all rounds of all documents.

    Attributes:
        source: Name of the tier that the documents are in before each question, except in the case "resident".
        case: The case.
        nbytes: Size of a document's pages in bytes.
        load_s: Median of the seconds to load a document, without a model and without a hint.
        lead_s: Median of the seconds between the hint and the question. 0 without a hint.
        seconds: Median of the seconds until the answer.
        ratio: Median of the ratios of an answer's time to a reference time of the same round. The reference is the
            time of the resident answer. For "late", it is the best possible time: the time without a hint minus
            the lead, but at least the time of the resident answer.
        spread: The smallest and the largest of these ratios.
        pairs: Number of these ratios.
        equal: Whether each answer was the same as the answer without a hint in its round.
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
        """Return the row as a mapping of plain values, for JSON."""
        return asdict(self)


def hint_rows(
    library: Library, source: Tier, rounds: int, nbytes: int, note: Callable[[Round], None]
) -> list[HintRow]:
    """Measure all cases of every document ``rounds`` times. The order of the cases changes from round to round.

    Args:
        library: The documents.
        source: The tier that the documents are in before each question.
        rounds: Number of measurements of each case per document.
        nbytes: Size of a document's pages in bytes.
        note: Called with the answers of each round of a document.

    Returns:
        One row per case.

    Raises:
        RuntimeError: The documents cannot be brought to ``source``, or the prefetcher had an error.
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
            raise RuntimeError(
                "the prefetcher had an error, so the figures are invalid; see its log messages"
            )
    return [_row(case, found, source, nbytes, load_s) for case in CASES]


def place(store: TierStore, keys: Sequence[PageKey], tier: Tier) -> None:
    """Bring a document's pages to ``tier``, and remove their copies from the tiers above.

    Raises:
        RuntimeError: Not all pages are in the tier afterwards.
    """
    wanted = (tier,) * len(keys)
    if tier == Tier.HBM:
        _lease(store, keys)
    else:
        store.demote(keys, Tier.HOST)  # do not evict: without a disk, a page may be in HBM only
        store.drain(PATIENCE_S)
    if tier > Tier.HBM and store.match(keys).tiers != wanted:
        store.demote(keys, _lowest(store))
        store.drain(PATIENCE_S)
        if tier == Tier.HOST:  # a load into HBM leaves a copy in host memory
            _lease(store, keys)
            store.evict(keys, Tier.HBM)
    tiers = store.match(keys).tiers
    if tiers != wanted:
        places = {each.name: tiers.count(each) for each in sorted(set(tiers))}
        raise RuntimeError(
            f"not all of {len(keys)} pages could be brought to {tier.name}; pages found: "
            f"{', '.join(f'{number} in {name}' for name, number in places.items()) or 'none'}"
        )


def _lowest(store: TierStore) -> Tier:
    tiers = store.stats()["tiers"]
    assert isinstance(tiers, dict)
    return max(Tier[name] for name in tiers)


def _lease(store: TierStore, keys: Sequence[PageKey]) -> None:
    with store.acquire(keys) as lease:
        lease.wait(PATIENCE_S)


def _loads(library: Library, number: int, source: Tier) -> list[float]:
    """Load a document several times. Return the seconds from each ``acquire`` until all pages are in HBM."""
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
    """Measure one case for one document.

    In the case "resident", pages that the previous answer left in HBM are not loaded again.
    """
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


_AT_ONCE = 32


def page_spec(layers: int) -> PageSpec:
    """Return a page specification: 64 tokens, 8 KV heads, head dimension 128, bfloat16. A 32-layer page is 8 MiB."""
    return PageSpec(
        num_layers=layers, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="bench hints"
    )


def open_store(
    spec: PageSpec, pages: int, documents: int, device: str, place: Path | None = None
) -> TierStore:
    """Open a store with HBM for a little more than one document, and host memory for all documents.

    Args:
        spec: The page specification.
        pages: Number of pages per document.
        documents: Number of documents.
        device: Device of the HBM pages.
        place: Directory of an NVMe tier that holds all documents. None for a store without one.
    """
    nbytes = spec.page_nbytes
    spare = max(4, pages // 16)
    host: dict[str, object] = {"capacity": (documents * pages + 2 * spare) * nbytes}
    if device != "cpu":
        host["pin"] = "always"
    tree: dict[str, object] = {
        "hbm": {"capacity": (pages + spare) * nbytes, "device": device},
        "host": host,
    }
    if place is not None:
        disk_nbytes = (documents * pages + spare) * nbytes * 5 // 4 + (64 << 20)
        tree["nvme"] = {"path": str(place), "capacity": disk_nbytes}
    return TierStore.open(load_config(tree), spec)


def put(store: TierStore, keys: Sequence[PageKey], write: Callable[[torch.Tensor], object]) -> list[int]:
    """Put pages, which ``write`` fills one after another, and return the sum of each page (see ``summed``)."""
    tensor, sums = pages_of(store), []
    for start in range(0, len(keys), _AT_ONCE):
        with store.acquire(keys[max(0, start - 1) : start]) as parent:
            parent.wait(PATIENCE_S)
            slots = store.allocate(len(keys[start : start + _AT_ONCE]), PATIENCE_S)
            for slot in slots:
                write(tensor[slot])
            sums += summed(tensor, slots)
            store.put(keys[start : start + _AT_ONCE], slots, lease=parent)
    return sums


def pages_of(store: TierStore) -> torch.Tensor:
    """Return the HBM pages of a store with a single KV group. Raises TypeError if it has several."""
    if isinstance(store.pages, GroupedPages):
        raise TypeError("the store must have a single KV group, got several")
    return store.pages


def summed(tensor: torch.Tensor, slots: Sequence[int]) -> list[int]:
    """Return the sum of each page, whose bytes are read as 16-bit integers."""
    sums = [tensor[slot].view(torch.int16).sum(dtype=torch.int64) for slot in slots]
    return [int(total) for total in torch.stack(sums).tolist()] if sums else []


class Pages:
    """A library of documents with random contents, without a model. ``__init__`` puts the documents into the store."""

    def __init__(self, store: TierStore, documents: int, pages: int, page_size: int) -> None:
        self.store = store
        self._tensor = pages_of(store)
        self.documents = [store.keys([number + 1] * (pages * page_size)) for number in range(documents)]
        self._sums = [self._fill(number) for number in range(documents)]
        store.flush()

    def ask(self, number: int) -> Answer:
        """Acquire all pages of a document. The answer is whether the sum of each page is still the same."""
        begin = perf_counter()
        with self.store.acquire(self.documents[number]) as lease:
            lease.wait(PATIENCE_S)
            seconds = perf_counter() - begin
            return Answer(seconds, summed(self._tensor, lease.slots) == self._sums[number])

    def _fill(self, number: int) -> list[int]:
        generator = torch.Generator(self._tensor.device).manual_seed(number)

        def write(page: torch.Tensor) -> None:
            page.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=generator)

        return put(self.store, self.documents[number], write)


if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.hints import HintRow, Library, Round
    from tierstore.page import PageSpec
    from tierstore.store import TierStore

    Opened = Callable[[PageSpec, int, Tier], TierStore]
    """Opens a store, given a page specification, the pages per document, and the tier that holds the documents."""

    Shelf = Callable[[int, Tier], Library]
    """Creates a library, given the tokens per document and the tier that holds the documents."""


def run(
    *,
    model: str,
    device: str,
    tokens: int,
    disk_tokens: int | None,
    documents: int,
    layers: int,
    sources: str,
    rounds: int,
    docs: list[Path] | None,
    place: Path | None,
    as_json: bool,
) -> None:
    """Run the command with the options of ``tierstore bench hints``."""
    found: list[HintRow] = []
    with refusals(as_json):
        chosen = [_tier(name.strip()) for name in sources.split(",")]
        _require_given(model, device, docs or [], place)
        with tempfile.TemporaryDirectory(prefix="tierstore-hints-", dir=place) as scratch:
            shelf = _shelf(model, device, documents, layers, docs, Path(scratch))
            for source in chosen:
                length = disk_tokens if disk_tokens and source.name == "NVME" else tokens
                progress.print(f"{source.name}: documents of {length} tokens, {documents}")
                rows = _rows(shelf(length, source), source, rounds)
                _show(rows, f"{model} on {name_of(device)}")
                found += rows
    if as_json:
        print_json(
            {"device": name_of(device), "model": model, "tokens": tokens, "rows": [x.plain() for x in found]}
        )


def _require_given(model: str, device: str, docs: list[Path], place: Path | None) -> None:
    """Raise ConfigError for invalid options, before a model is loaded."""
    device_of(device)
    if docs and model in ("none", "random"):
        raise ConfigError(
            f"--docs {docs[0]} has no effect with --model {model}: use smollm2 or a model's folder"
        )
    require_texts(docs, folders=False)
    if place is not None:
        require_folder("--dir", place)


def _rows(library: Library, source: Tier, rounds: int) -> list[HintRow]:
    """Measure how soon questions about documents in ``source`` are answered, and close the store."""
    nbytes = len(library.documents[0]) * _page_nbytes(library.store)
    with library.store:
        return hint_rows(library, source, rounds, nbytes, partial(_say, source.name))


def _shelf(
    model: str, device: str, documents: int, layers: int, docs: list[Path] | None, scratch: Path
) -> Shelf:
    """Return a function that creates a library whose store has no tier below the one that holds the documents."""

    def opened(spec: PageSpec, pages: int, source: Tier) -> TierStore:
        place = scratch / source.name if source.name == "NVME" else None
        return open_store(spec, pages, documents, device, place)

    if model == "none":
        return _of_pages(opened, documents, layers)
    if model == "random":
        return _of_random_model(opened, device, documents, layers)
    return _of_texts(opened, model, device, documents, docs)


def _of_pages(opened: Opened, documents: int, layers: int) -> Shelf:
    def alone(tokens: int, source: Tier) -> Library:
        pages = tokens // PAGE_SIZE
        return Pages(opened(page_spec(layers), pages, source), documents, pages, PAGE_SIZE)

    return alone


def _of_random_model(opened: Opened, device: str, documents: int, layers: int) -> Shelf:
    from benchmarks import hinted_model as models

    drawn = models.random_model(models.llama_8b(layers), device)

    def answered(tokens: int, source: Tier) -> Library:
        store = opened(models.spec_of_random(drawn, PAGE_SIZE), tokens // PAGE_SIZE + 1, source)
        ids = [[number + 1] * (tokens + models.QUESTION) for number in range(documents)]
        return models.Answers(store, drawn, ids, computed=False)

    return answered


def _of_texts(opened: Opened, model: str, device: str, documents: int, docs: list[Path] | None) -> Shelf:
    """Load the model, and return a function that creates a library of texts. Raises ConfigError on failure."""
    from benchmarks import hinted_model as models

    files = docs or sorted(COMMON_LICENCES.glob("*"))
    try:
        folder = model_folder(model, progress.print)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    loaded = models.load_model(folder, device)

    def read(tokens: int, source: Tier) -> Library:
        try:
            ids = models.texts(folder, files, documents, tokens + models.QUESTION)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        store = opened(models.spec_of(loaded, PAGE_SIZE), tokens // PAGE_SIZE + 1, source)
        return models.Answers(store, loaded, ids)

    return read


def _say(source: str, asked: Round) -> None:
    """Print the times of one round."""
    told = [
        f"{case} {each.answer.seconds:.4f}" + (f" (hint {each.lead_s:.4f} before)" if each.lead_s else "")
        for case, each in asked.items()
    ]
    progress.print(f"{source}: {', '.join(told)}", soft_wrap=True)


def _tier(name: str) -> Tier:
    if name.upper() not in ("NVME", "HOST"):
        raise ConfigError(f"--from must be nvme, host, or both separated by a comma, got {name!r}")
    return Tier[name.upper()]


def _page_nbytes(store: TierStore) -> int:
    found = store.stats()["page_nbytes"]
    assert isinstance(found, int)
    return found


def _show(rows: list[HintRow], title: str) -> None:
    header = ("from", "hint", "document", "load s", "lead s", "answer s", "ratio", "", "pairs", "answers")
    table = Table(*header, box=None, title=title)
    for row in rows:
        times = (f"{row.load_s:.4f}", f"{row.lead_s:.4f}", f"{row.seconds:.4f}", f"{row.ratio:.2f}")
        spread = f"{row.spread[0]:.2f} to {row.spread[1]:.2f}"
        equal = "equal" if row.equal else "DIFFER"
        table.add_row(row.source, row.case, format_size(row.nbytes), *times, spread, str(row.pairs), equal)
    wide_console().print(table)
