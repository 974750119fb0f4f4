"""``bench overlap``: what streaming pages costs compute, and how much of it compute hides."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tierstore.cli.bench_card import Device, name_of
from tierstore.cli.output import Json, print_json, progress, refusals, require_memory, size_of, wide_console
from tierstore.errors import ConfigError
from tierstore.units import format_size, parse_size

if TYPE_CHECKING:
    from tierstore.bench.link import Direction, Path
    from tierstore.bench.overlap import BesideRow, OverlapRow

_WAYS: tuple[tuple[Path, str, tuple[Direction, ...]], ...] = (
    ("straight", "2MiB", ("h2d", "d2h", "both")),
    ("kernel", "32KiB", ("h2d", "d2h")),
    ("slab", "32KiB", ("h2d", "d2h")),
)


def overlap(
    device: Device = "cuda:0",
    restored: Annotated[str, typer.Option(help="Bytes of the lease that is restored.")] = "16GiB",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of its pages, of 128 KiB a token.")] = 64,
    layers: Annotated[int, typer.Option(min=1, max=256, help="Layers of its pages, a power of two.")] = 32,
    compute: Annotated[str, typer.Option(help="Lengths of compute, as parts of copying.")] = "0.8,1,1.25",
    matrix: Annotated[int, typer.Option(min=8, help="Side of the square matrices multiplied.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, or pairs; the median counts.")] = 5,
    read: Annotated[str, typer.Option(help="Bytes that the kernels beside the copies move.")] = "4GiB",
    times: Annotated[int, typer.Option(min=3, help="How often they do, while a batch streams.")] = 20,
    batch: Annotated[str, typer.Option(help="Bytes of that batch.")] = "4GiB",
    as_json: Json = False,
) -> None:
    """Compute beside streaming: a lease restored layer by layer, and memory-bound kernels beside each way to copy."""
    from tierstore.bench.link import device_of
    from tierstore.bench.overlap import host_nbytes, overlap_rows, pages_of

    with refusals(as_json):
        lease, reading = size_of("--restored", restored), size_of("--read", read)
        streamed, parts = size_of("--batch", batch), _parts_of(compute)
        spec = pages_of(layers, page_size)
        device_of(device)
        require_memory({"--restored": lease}, host_nbytes(device, lease))
        beside_nbytes = 2 * (reading + streamed) if device == "cpu" else streamed
        require_memory({"--read": reading, "--batch": streamed}, beside_nbytes)
        progress.print("a lease restored under compute")
        hidden = overlap_rows(device, spec, lease, rounds, matrix, parts)
        beside = _beside(device, reading, times, streamed, rounds)
    name = name_of(device)
    _show(name, hidden, beside)
    if as_json:
        print_json(
            {"device": name, "rows": [*(row.plain() for row in hidden), *(row.plain() for row in beside)]}
        )


def _parts_of(text: str) -> list[float]:
    """ConfigError unless it is numbers above 0."""
    with suppress(ValueError):
        found = [float(part) for part in text.split(",")]
        if all(0 < part < inf for part in found):
            return found
    raise ConfigError(f"--compute {text}; allowed: numbers above 0, with commas")


def _beside(device: str, read: int, times: int, batch: int, pairs: int) -> list[BesideRow]:
    from tierstore.bench.link import Ceiling
    from tierstore.bench.overlap import Contiguous, Copying, Pages, Reading, beside_row

    kernels = (Reading(device, read), Copying(device, read))
    ceiling = Ceiling(device, batch // 4)
    directions: tuple[Direction, ...] = ("h2d", "d2h", "both")
    block = Contiguous(ceiling, 4)
    found = [beside_row(kernel, block, d, times, pairs) for kernel in kernels for d in directions]
    del block, ceiling
    for path, size, ways in _WAYS:
        if device == "cpu" and path == "kernel":
            continue
        progress.print(f"kernels beside pages, {path}")
        pages = Pages(device, parse_size(size), batch, path)
        try:
            found += [beside_row(kernel, pages, d, times, pairs) for kernel in kernels for d in ways]
        finally:
            pages.rig.close()
    return found


def _show(name: str, hidden: list[OverlapRow], beside: list[BesideRow]) -> None:
    console = wide_console()
    columns = ("compute ms", "beside a block", "copy ms", "both ms", "first layer", "GB/s")
    found = Table("compute / copy", *columns, "overlap", "reachable", "ideal", box=None, title=name)
    for row in hidden:
        times = (row.compute_ms, row.beside_ms, row.copy_ms, row.both_ms, row.first_layer_ms, row.gbps)
        parts = (f"{x:.3f}" for x in (row.overlap, row.reachable, row.ideal))
        found.add_row(f"{row.wanted:g}", *(f"{x:.1f}" for x in times), *parts)
    console.print(found)
    console.print(
        f"{hidden[0].num_pages} pages of {format_size(hidden[0].page_bytes)} in {hidden[0].groups} layer groups"
    )
    table = Table(
        "kernel", "beside", "way", "piece", "slower by", "share of HBM", "GB/s", "alone TB/s", box=None
    )
    for one in beside:
        shares = (f"{one.slowdown:.1%}", f"{one.share:.1%}")
        rates = (f"{one.gbps:.1f}", f"{one.alone_tbps:.2f}")
        table.add_row(one.kernel, one.way, one.direction, format_size(one.piece_bytes), *shares, *rates)
    console.print(table)
