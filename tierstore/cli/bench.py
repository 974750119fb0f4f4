"""``bench``: what this machine does with this store. A missed goal is a figure, not an error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tierstore.cli.output import (
    Json,
    finite,
    print_json,
    progress,
    refusals,
    require_folder,
    require_memory,
    size_of,
    wide_console,
)
from tierstore.errors import ConfigError
from tierstore.units import MOST_READERS, format_size

if TYPE_CHECKING:
    from tierstore.bench.measurement import Row
    from tierstore.bench.nvme import DiskRow, Stalls

PAYLOADS = ["lmdb", "extents"]
"""Where the tier may keep page bytes."""

BLOCK_NBYTES = 4096
"""Of a disk: what is read past the page cache is of whole ones."""

PAGE_NBYTES = 300
"""Python memory of a page in the tables, at least."""

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
    restored: Annotated[
        int, typer.Option("--restore-pages", min=1, help="Pages of 16 tokens of a restore without a card.")
    ] = 8192,
    place: Annotated[
        Path, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """The metadata core: time and memory a page, the longest hold of the lock, reopening a large catalogue.

    And what the host does for a restore from HOST, its pages as they are and as int8, while a link would carry them;
    and what the vLLM connector takes of the scheduler's time for as many blocks.

    Takes about two minutes at full size. Needs free disk space for the catalogue's nominal tier, which stays sparse.
    """
    from tierstore.bench import core as catalogue
    from tierstore.bench import core as running
    from tierstore.bench import core as scheduler
    from tierstore.bench import core as tables
    from tierstore.bench import measurement, restore

    found: list[Row] = []
    with refusals(as_json):
        require_folder("--dir", place)
        counts = {
            "--pages": pages, "--put-pages": put_pages, "--records": records, "--restore-pages": restored
        }  # fmt: skip
        option, most = max(counts.items(), key=lambda each: each[1])
        require_memory({option: most * PAGE_NBYTES}, most * PAGE_NBYTES)
    with refusals(as_json), TemporaryDirectory(prefix="tierstore-bench-", dir=place) as folder:
        progress.print("time of the tables and calls")
        found += tables.reserve_and_commit(pages)
        found += running.calls(pages)
        progress.print(f"a restore of {restored} pages without a card")
        found += restore.rows(restored, 16, "none") + restore.rows(restored, 16, "int8")
        progress.print(f"vLLM's scheduler with {restored} blocks")
        found += scheduler.scheduler_rows(restored)
        progress.print(f"holds of the lock while {put_pages} pages move")
        found += running.lock_holds(put_pages, Path(folder) / "held")
        progress.print(f"memory of {records} pages")
        found += tables.memory(records)
        progress.print(f"a catalogue of {records} records")
        for payload in ("lmdb", "extents"):
            found += catalogue.reopen(records, Path(folder) / f"reopened-{payload}", payload)
    _show(measurement.device(), found, as_json)


@bench.command()
def nvme(
    size: Annotated[
        str, typer.Option(help="Bytes of pages that are written and read in one run.")
    ] = "256MiB",
    page_sizes: Annotated[str, typer.Option(help="Page sizes, commas between.")] = "256KiB,1MiB,2MiB,8MiB",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, each with a raw one beside it.")] = 7,
    readers: Annotated[
        int, typer.Option(min=1, max=MOST_READERS, help="Threads that read, of everyone.")
    ] = 2,
    stall_size: Annotated[str, typer.Option(help="Bytes moved while a thread watches for stalls.")] = "2GiB",
    idle: Annotated[
        float,
        typer.Option(min=0.01, max=3600.0, callback=finite, help="Seconds of watching with nothing moved."),
    ] = 5.0,
    place: Annotated[
        Path, typer.Option("--dir", help="A folder on the disk to measure; one in it comes and goes.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """The disk tier beside the raw disk, plain LMDB and a file a page; and what a serving thread feels of it.

    At full size it writes about 100 GiB and takes some minutes, more on a slow disk; its folder takes 3 GiB at most.
    """
    from tierstore.bench import nvme as measured
    from tierstore.bench.measurement import device, load_average

    before = load_average()
    found: list[DiskRow] = []
    with refusals(as_json):
        pages = _page_sizes("--page-sizes", page_sizes)
        nbytes, stall_nbytes = size_of("--size", size), size_of("--stall-size", stall_size)
        require_folder("--dir", place)
    with refusals(as_json), TemporaryDirectory(prefix="tierstore-bench-", dir=place) as folder:
        for page_nbytes in pages:
            progress.print(f"pages of {format_size(page_nbytes)}")
            kinds = measured.disk_rows(
                page_nbytes,
                nbytes=nbytes,
                rounds=rounds,
                readers=readers,
                payloads=PAYLOADS,
                place=Path(folder),
            )
            number = len(measured.ways(PAYLOADS))
            for rows in track(kinds, "", number, console=progress, disable=not progress.is_terminal):
                found += rows
        progress.print(f"stalls while {stall_size} are written and read back")
        stalls = {"idle": measured.idle_stalls(idle)} | {
            payload: measured.stalls(payload, nbytes=stall_nbytes, readers=readers, place=Path(folder))
            for payload in PAYLOADS
        }
    _show_disk(found, stalls, [before, load_average()], device(), as_json)


def _page_sizes(option: str, text: str) -> list[int]:
    """The sizes in ``text``, commas between. ConfigError for what is none, and for parts of a block of a disk."""
    sizes = [size_of(option, part) for part in text.split(",")]
    if any(size % BLOCK_NBYTES for size in sizes):
        raise ConfigError(f"{option} {text}; allowed: multiples of {BLOCK_NBYTES} bytes, with commas")
    return sizes


def _show_disk(
    found: list[DiskRow], stalls: dict[str, Stalls], load: list[float], name: str, as_json: bool
) -> None:
    console = wide_console()
    console.print(_disk_table(found, name))
    for kind, found_stalls in stalls.items():
        console.print(
            f"stalls, {kind}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found_stalls._asdict().items())
        )
    console.print(f"load average before and after: {load[0]:.2f}, {load[1]:.2f}")
    if as_json:
        worst = max((stalls[payload] for payload in PAYLOADS), key=lambda each: each.p999)
        print_json(
            {
                "device": name,
                "load_average": load,
                "rows": [row.plain() for row in found],
                "stall_ms": worst._asdict(),
                "stalls_ms": {kind: each._asdict() for kind, each in stalls.items()},
            }
        )


def _disk_table(found: list[DiskRow], name: str) -> Table:
    columns = ("payload", "", "page", "GB/s", "raw", "ratio", "spread", "CPU s/GiB", "disk")
    table = Table(*columns, box=None, header_style="bold", title=name)
    for row in found:
        figures = (row.gbps, row.ceiling_gbps, row.ratio)
        table.add_row(
            row.payload,
            row.op,
            format_size(row.page_bytes),
            *[f"{figure:.2f}" for figure in figures],
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
            f"{row.cpu_s_per_gib:.2f}",
            f"{row.disk_per_byte:.2f}",
        )
    return table


def table_of(title: str, found: Sequence[Row]) -> Table:
    """A line a figure."""
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=title)
    for row in found:
        table.add_row(row.what, f"{row.value:.2f}", row.unit, row.goal_text, "" if row.ok else "missed")
    return table


def _show(device: str, found: list[Row], as_json: bool) -> None:
    Console().print(table_of(device, found))
    if as_json:
        print_json({"device": device, "rows": [row.plain() for row in found]})
