"""How soon a document below HBM answers with a hint in good time, with a late one, and without: ``bench hints``.

Real copies through a store with an attached prefetcher. A ``Library`` says how a document is asked, so that pages
alone (an answer is a lease that is ready) and a model that answers over them are measured alike. Every case has had
the same before its clock runs: its document was asked twice (what is compiled or planned at first is), nothing was
done for ``REST_S``, and Python's collector does not look at what was there before the first answer.
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
from tierstore.config import format_size, load_config
from tierstore.demo.documents import COMMON_LICENCES, require_texts
from tierstore.demo.model import ModelError, model_folder
from tierstore.errors import ConfigError
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import Hint, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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


_AT_ONCE = 32


def page_spec(layers: int) -> PageSpec:
    """Pages of 64 tokens, 8 KV heads of 128 numbers of 2 bytes: 8 MiB with 32 layers."""
    return PageSpec(
        num_layers=layers, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="bench hints"
    )


def open_store(
    spec: PageSpec, pages: int, documents: int, device: str, place: Path | None = None
) -> TierStore:
    """HBM for one document and a little, host memory for all, and NVMe for all if there is a place for it."""
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
    """Fills pages one after the other and seals them; a sum of the bits of each."""
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
    """The HBM pages of a store of one KV group."""
    if isinstance(store.pages, GroupedPages):
        raise TypeError("the store has pages of several KV groups, expected one")
    return store.pages


def summed(tensor: torch.Tensor, slots: Sequence[int]) -> list[int]:
    """A sum of every page's bits, taken as whole numbers of 16."""
    sums = [tensor[slot].view(torch.int16).sum(dtype=torch.int64) for slot in slots]
    return [int(total) for total in torch.stack(sums).tolist()] if sums else []


class Pages:
    """``documents`` of so many pages of random bits, put into a store and saved."""

    def __init__(self, store: TierStore, documents: int, pages: int, page_size: int) -> None:
        self.store = store
        self._tensor = pages_of(store)
        self.documents = [store.keys([number + 1] * (pages * page_size)) for number in range(documents)]
        self._sums = [self._fill(number) for number in range(documents)]
        store.flush()

    def ask(self, number: int) -> Answer:
        """A lease on all pages; the answer is whether each has the bytes that were put."""
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
    """A store for a document of so many pages that lies in the tier."""

    Shelf = Callable[[int, Tier], Library]
    """Documents of so many tokens that lie in the tier."""


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
    """ConfigError for what cannot be done, before a model is loaded for it."""
    device_of(device)
    if docs and model in ("none", "random"):
        raise ConfigError(
            f"--docs {docs[0]} has no effect with --model {model}: use smollm2 or a model's folder"
        )
    require_texts(docs, folders=False)
    if place is not None:
        require_folder("--dir", place)


def _rows(library: Library, source: Tier, rounds: int) -> list[HintRow]:
    """Of the documents of one tier. Closes their store."""
    nbytes = len(library.documents[0]) * _page_nbytes(library.store)
    with library.store:
        return hint_rows(library, source, rounds, nbytes, partial(_say, source.name))


def _shelf(
    model: str, device: str, documents: int, layers: int, docs: list[Path] | None, scratch: Path
) -> Shelf:
    """What opens documents of so many tokens, in a store of their own that ends at the tier in which they lie."""

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
    """ConfigError where there is no such model."""
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
    """A round is over."""
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
