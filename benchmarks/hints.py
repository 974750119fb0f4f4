"""The command ``bench hints``: how soon a document below HBM answers with a hint in time, a late one, and none."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from tierstore.bench.hinted import hint_rows
from tierstore.bench.hinted_pages import Pages, open_store, page_spec
from tierstore.bench.link import device_of
from tierstore.cli.bench import name_of
from tierstore.cli.output import print_json, progress, refusals, require_folder, wide_console
from tierstore.cli.studies import PAGE_SIZE
from tierstore.config import format_size
from tierstore.demo.documents import COMMON_LICENCES, require_texts
from tierstore.demo.model import ModelError, model_folder
from tierstore.errors import ConfigError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.bench.hinted import HintRow, Library, Round
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
            f"--docs {docs[0]} with --model {model}; allowed with smollm2 or the folder of a model"
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
        raise ConfigError(f"--from {name}; allowed: nvme, host, or both with a comma")
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
