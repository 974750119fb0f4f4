"""The commands whose work is in ``benchmarks/`` of a checkout: ``compare``, ``bench engine`` and ``bench hints``."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from tierstore.cli.bench import Device, name_of
from tierstore.cli.output import (
    Json,
    print_json,
    progress,
    refusals,
    require_folder,
    require_memory,
    wide_console,
)
from tierstore.config import format_size
from tierstore.demo.documents import made_folder, require_texts
from tierstore.demo.model import ALLOWED, KNOWN, short_name
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierstore.bench.engine_copies import EngineRow
    from tierstore.bench.engine_tensors import Layout
    from tierstore.compare.judging import Row

WIDE = 130
"""Columns of the table where there is no terminal to ask."""


def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{ALLOWED}; may be repeated. All known ones if not given."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to read instead of this machine's licences."),
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where the models compute and HBM is: cpu, cuda or cuda:N, as in hbm.device.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Real models answer over the store as without it: greedy, batches, samples, beams, drafts, chunks, rollbacks.

    Each answer is held against transformers' own cache, token by token, in float32, and what the model
    computed against what was not reused. Prepares the models on first use. Exit code 1 if a case differs.
    """
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDE
    found: list[Row] = []
    with refusals(as_json):
        if find_spec("transformers") is None:
            raise ConfigError("compare needs transformers: in the checkout pip install -e '.[hf]'")
        if device != "cpu":
            from tierstore.gpu.device import require_device

            require_device(device)
        require_texts(docs or [])
        from tierstore.demo.model import default_cache_dir

        home = made_folder(place or default_cache_dir())
        with Status("starting", console=console) as status:

            def say(line: str) -> None:
                status.update(line)
                console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

            for name in model or KNOWN:
                found += _compare(name, docs or [], home, device, say)
    from tierstore.compare import report

    report.show(console, found)
    if as_json:
        print_json(report.as_json(found))
    raise typer.Exit(0 if report.all_held(found) else 1)


def _compare(
    name: str, docs: list[Path], home: Path, device: str, say: Callable[[str], None]
) -> Iterator[Row]:
    """The rows of one model; what cannot be prepared is a ConfigError."""
    from tierstore.compare import cases, prompts
    from tierstore.compare.subject import Subject, load_tokenizer
    from tierstore.demo.documents import DocumentError
    from tierstore.demo.model import ModelError, model_folder

    sizes = prompts.Sizes()
    try:
        folder = model_folder(name, say)
        say(f"{folder.name}: loading")
        texts = prompts.read_texts(load_tokenizer(folder), sizes, docs)
        subject = Subject.load(short_name(name) or folder.name, folder, device)
    except (ModelError, DocumentError, ValueError) as error:
        raise ConfigError(str(error)) from error
    with TemporaryDirectory(prefix="tierstore-compare-", dir=home) as scratch:
        yield from cases.compare(subject, texts, sizes, Path(scratch), say)


def engine(
    device: Device = "cuda:0",
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of a batch.")] = 2048,
    layouts: Annotated[
        str, typer.Option(help="Physical orders, with commas; all that vLLM has had if empty.")
    ] = "",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="Its KV heads.")] = 8,
    dim: Annotated[int, typer.Option(min=1, help="Their dimension.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of copies; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """An engine's blocks out and back by the connector's worker, as a share of one contiguous copy of as many bytes."""
    from tierstore.bench.engine_copies import engine_rows, host_nbytes
    from tierstore.bench.engine_tensors import LAYOUTS, Shape
    from tierstore.bench.link import Ceiling, device_of

    found: list[EngineRow] = []
    with refusals(as_json):
        shape = Shape(layers, heads, dim, block_size)
        wanted = _layouts_of(layouts) if layouts else LAYOUTS
        device_of(device)
        require_memory({"--blocks": blocks * shape.block_nbytes}, host_nbytes(device, shape, blocks))
        ceiling = Ceiling(device, blocks * shape.block_nbytes)
        for layout in wanted:
            progress.print(f"layout {layout}")
            found += engine_rows(device, shape, blocks, pairs, ceiling, [layout])
    name = name_of(device)
    header = ("layout", "way", "piece", "pieces", "GB/s", "ceiling", "ratio", "worker ms", "share", "path")
    table = Table(*header, box=None, title=name)
    for row in found:
        rates = (f"{row.gbps:.2f}", f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        worker = (f"{row.worker_ms:.1f}", f"{row.worker_share:.3f}")
        sizes = (format_size(row.piece_bytes), str(row.num_pieces))
        table.add_row(row.layout, row.direction, *sizes, *rates, *worker, row.path)
    wide_console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _layouts_of(text: str) -> list[Layout]:
    """ConfigError for a name that is none."""
    from tierstore.bench.engine_tensors import LAYOUTS

    names = text.split(",")
    for name in names:
        if name not in LAYOUTS:
            raise ConfigError(f"--layouts {name}; allowed: {', '.join(LAYOUTS)}")
    return cast("list[Layout]", names)


if TYPE_CHECKING:
    from collections.abc import Callable

    from tierstore.bench.hinted import HintRow, Library, Round
    from tierstore.page import PageSpec
    from tierstore.store import TierStore
    from tierstore.types import Tier

    Opened = Callable[[PageSpec, int, Tier], TierStore]
    """A store for a document of so many pages that lies in the tier."""

    Shelf = Callable[[int, Tier], Library]
    """Documents of so many tokens that lie in the tier."""

PAGE_SIZE = 64


def hints(
    model: Annotated[
        str,
        typer.Option(
            help="none: pages alone, an answer is a lease that is ready. smollm2, or the folder of a model: what it "
            "answers, in float32. random: a Llama of 8B shape and random weights over pages of random numbers."
        ),
    ] = "none",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N, as in hbm.device.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=PAGE_SIZE, help="Of a document.")] = 4096,
    disk_tokens: Annotated[
        int | None,
        typer.Option(min=PAGE_SIZE, help="Of one that lies on disk, if others than --tokens."),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Asked in turn.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, where it is none or random.")] = 32,
    sources: Annotated[
        str, typer.Option("--from", help="Where documents lie: nvme, host, or both.")
    ] = "nvme,host",
    rounds: Annotated[
        int, typer.Option(min=1, help="Every case once a round and document; medians count.")
    ] = 5,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files for a model's documents; the licences here if not given."),
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Asks documents that lie below HBM: no hint, a hint half of the loading time before, one longer than that before.

    Beside it the same document in HBM. Real copies; ``ratio`` is to the best there can be, see ``HintRow``.
    """
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
    from tierstore.bench.link import device_of

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
    from tierstore.bench.hinted import hint_rows

    nbytes = len(library.documents[0]) * _page_nbytes(library.store)
    with library.store:
        return hint_rows(library, source, rounds, nbytes, partial(_say, source.name))


def _shelf(
    model: str, device: str, documents: int, layers: int, docs: list[Path] | None, scratch: Path
) -> Shelf:
    """What opens documents of so many tokens, in a store of their own that ends at the tier in which they lie."""
    from tierstore.bench.hinted_pages import open_store

    def opened(spec: PageSpec, pages: int, source: Tier) -> TierStore:
        place = scratch / source.name if source.name == "NVME" else None
        return open_store(spec, pages, documents, device, place)

    if model == "none":
        return _of_pages(opened, documents, layers)
    if model == "random":
        return _of_random_model(opened, device, documents, layers)
    return _of_texts(opened, model, device, documents, docs)


def _of_pages(opened: Opened, documents: int, layers: int) -> Shelf:
    from tierstore.bench.hinted_pages import Pages, page_spec

    def alone(tokens: int, source: Tier) -> Library:
        pages = tokens // PAGE_SIZE
        return Pages(opened(page_spec(layers), pages, source), documents, pages, PAGE_SIZE)

    return alone


def _of_random_model(opened: Opened, device: str, documents: int, layers: int) -> Shelf:
    from tierstore.bench import hinted_model as models

    drawn = models.random_model(models.llama_8b(layers), device)

    def answered(tokens: int, source: Tier) -> Library:
        store = opened(models.spec_of_random(drawn, PAGE_SIZE), tokens // PAGE_SIZE + 1, source)
        ids = [[number + 1] * (tokens + models.QUESTION) for number in range(documents)]
        return models.Answers(store, drawn, ids, computed=False)

    return answered


def _of_texts(opened: Opened, model: str, device: str, documents: int, docs: list[Path] | None) -> Shelf:
    """ConfigError where there is no such model."""
    from tierstore.bench import hinted_model as models
    from tierstore.demo.documents import COMMON_LICENCES
    from tierstore.demo.model import ModelError, model_folder

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
    from tierstore.types import Tier

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
