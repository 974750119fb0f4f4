"""``bench``: what this machine does with this store. A missed goal is a figure, not an error."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tierstore.cli.output import Json, print_json, progress, refusals

if TYPE_CHECKING:
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


def _show(device: str, found: list[Row], as_json: bool) -> None:
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=device)
    for row in found:
        goal = "" if row.goal is None else f"<= {row.goal:g}"
        table.add_row(row.what, f"{row.value:.2f}", row.unit, goal, "" if row.ok else "missed")
    Console().print(table)
    if as_json:
        print_json({"device": device, "rows": [row.plain() for row in found]})
