"""``bench``: what this machine does with this store. A missed goal is a figure, not an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tierstore.cli.output import Json, print_json, progress, refusals

if TYPE_CHECKING:
    from tierstore.bench.kv import Sample
    from tierstore.bench.rows import Row

bench = typer.Typer(help="Measure this machine and this store.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine and this store."""


@bench.command()
def core(
    pages: Annotated[int, typer.Option(min=1, help="Pages of the sequence that is matched and held.")] = 6250,
    put_pages: Annotated[int, typer.Option(min=1, help="Pages put while the lock is watched.")] = 10_000,
    records: Annotated[
        int, typer.Option(min=1, help="Resident pages whose memory is counted, and of the catalogue.")
    ] = 1_000_000,
    place: Annotated[
        Path, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """The metadata core: time and memory a page, the longest hold of the lock, reopening a large catalogue.

    Takes about two minutes at full size. Needs free disk space for the catalogue's nominal tier, which stays sparse.
    """
    from tierstore.bench import catalogue, rows, running, tables

    found: list[Row] = []
    with refusals(as_json), TemporaryDirectory(prefix="tierstore-bench-", dir=place) as folder:
        progress.print("time of the tables and calls")
        found += tables.reserve_and_commit(pages)
        found += running.calls(pages)
        progress.print(f"holds of the lock while {put_pages} pages move")
        found += running.lock_holds(put_pages, Path(folder) / "held")
        progress.print(f"memory of {records} pages")
        found += tables.memory(records)
        progress.print(f"a catalogue of {records} records")
        found += catalogue.reopen(records, Path(folder) / "reopened")
    _show(rows.device(), found, as_json)


@bench.command()
def codec(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text whose KV is compressed.")] = 3072,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 64,
    seconds: Annotated[float, typer.Option(min=0.0, help="Of one run; there are 28.")] = 0.25,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model; else the demo's, if it is prepared.")
    ] = None,
    text: Annotated[Path, typer.Option(help="What the model reads.")] = Path(
        "/usr/share/common-licenses/GPL-3"
    ),
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Made-up pages, no model.")] = False,
    as_json: Json = False,
) -> None:
    """The lossless codec on real KV: ratio beside the entropy limit, rates a core, two threads against one."""
    from tierstore.bench import codec as measured
    from tierstore.bench import rows

    before = rows.load_average()
    with refusals(as_json):
        sample = _kv(tokens, page_size, None if synthetic else model, text, synthetic)
        progress.print(f"{len(sample.pages)} pages of {sample.spec.page_nbytes} bytes: {sample.source}")
        found = measured.codec_rows(sample, seconds)
    facts = {"source": sample.source, "load_average": [before, rows.load_average()]}
    _show(rows.device(), found, as_json, facts)


def _kv(tokens: int, page_size: int, model: Path | None, text: Path, synthetic: bool) -> Sample:
    """Pages of the model asked for, or of the demo's where it is prepared and there is a text; else synthetic ones."""
    from tierstore.bench import kv
    from tierstore.demo.known import SMOLLM2
    from tierstore.demo.model import is_prepared, prepared_folder

    folder = model or prepared_folder(SMOLLM2)
    if synthetic or (model is None and not (is_prepared(folder) and text.is_file())):
        return kv.synthetic(tokens, page_size)
    progress.print(f"computing KV of {text} with {folder.name}")
    return kv.of_model(folder, text, tokens, page_size)


def _show(
    device: str, found: list[Row], as_json: bool, facts: Mapping[str, object] = MappingProxyType({})
) -> None:
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=device)
    for row in found:
        table.add_row(row.what, f"{row.value:.2f}", row.unit, row.goal_text, "" if row.ok else "missed")
    console = Console()
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' ')}: {value}")
    if as_json:
        print_json({"device": device, **facts, "rows": [row.plain() for row in found]})
