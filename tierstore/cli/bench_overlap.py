"""``bench overlap``: what streaming pages costs compute, and how much of it compute hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tierstore.cli.bench_card import Device, name_of
from tierstore.cli.output import Json, print_json, progress, refusals, size_of
from tierstore.units import format_size, parse_size

if TYPE_CHECKING:
    from tierstore.bench.beside import BesideRow
    from tierstore.bench.link import Direction, Path
    from tierstore.bench.overlap import OverlapRow

_WAYS: tuple[tuple[Path, str, Direction], ...] = (
    ("straight", "2MiB", "h2d"),
    ("straight", "2MiB", "d2h"),
    ("straight", "2MiB", "both"),
    ("kernel", "32KiB", "h2d"),
    ("kernel", "32KiB", "d2h"),
    ("slab", "32KiB", "h2d"),
    ("slab", "32KiB", "d2h"),
)


def overlap(
    device: Device = "cuda:0",
    restored: Annotated[str, typer.Option(help="Bytes of the lease that is restored.")] = "16GiB",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of its pages, of 128 KiB a token.")] = 64,
    matrix: Annotated[int, typer.Option(min=8, help="Side of the square matrices multiplied.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, or pairs; the median counts.")] = 5,
    read: Annotated[str, typer.Option(help="Bytes that the kernel beside the copies reads.")] = "4GiB",
    times: Annotated[int, typer.Option(min=3, help="How often it does, while a batch streams.")] = 20,
    batch: Annotated[str, typer.Option(help="Bytes of that batch.")] = "4GiB",
    as_json: Json = False,
) -> None:
    """Compute beside streaming: a lease restored layer by layer, and a memory-bound kernel beside each way to copy."""
    from dataclasses import replace

    from tierstore.bench.overlap import LLAMA_8B, overlap_row

    with refusals(as_json):
        lease, reading = size_of("--restored", restored), size_of("--read", read)
        streamed = size_of("--batch", batch)
        progress.print("a lease restored under compute")
        spec = replace(LLAMA_8B, page_size=page_size)
        hidden = overlap_row(device, spec, lease, rounds, matrix)
        beside = _beside(device, reading, times, streamed, rounds)
    name = name_of(device)
    _show(name, hidden, beside)
    if as_json:
        print_json({"device": name, "rows": [hidden.plain(), *(row.plain() for row in beside)]})


def _beside(device: str, read: int, times: int, batch: int, pairs: int) -> list[BesideRow]:
    from tierstore.bench.beside import Contiguous, Pages, Reading, beside_row
    from tierstore.bench.link import Ceiling

    reading = Reading(device, read)
    ceiling = Ceiling(device, batch // 4)
    directions: tuple[Direction, ...] = ("h2d", "d2h", "both")
    block = Contiguous(ceiling, 4)
    found = [beside_row(reading, block, direction, times, pairs) for direction in directions]
    del block, ceiling
    for path, size, direction in _WAYS:
        if device == "cpu" and path == "kernel":
            continue
        progress.print(f"a kernel beside pages, {path}, {direction}")
        pages = Pages(device, parse_size(size), batch, path)
        try:
            found.append(beside_row(reading, pages, direction, times, pairs))
        finally:
            pages.rig.close()
    return found


def _show(name: str, hidden: OverlapRow, beside: list[BesideRow]) -> None:
    console = Console(width=110)
    columns = ("layer groups", "compute ms", "beside a block", "copy ms", "both ms")
    found = Table(*columns, "overlap", "reachable", "ideal", box=None, title=name)
    times = (f"{x:.1f}" for x in (hidden.compute_ms, hidden.beside_ms, hidden.copy_ms, hidden.both_ms))
    parts = (f"{x:.3f}" for x in (hidden.overlap, hidden.reachable, hidden.ideal))
    found.add_row(str(hidden.groups), *times, *parts)
    console.print(found)
    console.print(
        f"{hidden.num_pages} pages of {format_size(hidden.page_bytes)} at {hidden.gbps:.1f} GB/s, "
        f"the first layer after {hidden.first_layer_ms:.1f} ms"
    )
    table = Table("beside", "way", "piece", "slower by", "share of HBM", "GB/s", "alone TB/s", box=None)
    for row in beside:
        shares = (f"{row.slowdown:.1%}", f"{row.share:.1%}")
        rates = (f"{row.gbps:.1f}", f"{row.alone_tbps:.2f}")
        table.add_row(row.way, row.direction, format_size(row.piece_bytes), *shares, *rates)
    console.print(table)
