"""``bench copy`` and ``bench arena``: the link between HBM and host memory, and the memory at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tierstore.cli.output import Json, print_json, progress, refusals, require_memory, size_of, wide_console
from tierstore.errors import ConfigError
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.bench.copy import CopyRow

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N, as in hbm.device.")]


def copy(
    device: Device = "cuda:0",
    pieces: Annotated[
        str, typer.Option(help="Sizes of a page, with commas; multiples of 4 KiB.")
    ] = "8MiB,2MiB,64KiB,32KiB,4KiB",
    batch: Annotated[str, typer.Option(help="Bytes of a batch.")] = "4GiB",
    contiguous: Annotated[str, typer.Option(help="Bytes of the contiguous copy beside it.")] = "1GiB",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of copies; the median counts.")] = 5,
    small: Annotated[
        str, typer.Option(help="Pieces up to this go by the copy kernel too, and as an engine's layers.")
    ] = "128KiB",
    codec: Annotated[
        str,
        typer.Option(
            help="A host.codec: pages that are held with it, beside the same pages held as they are. Sizes of whole "
            "tokens of an 8B model only: multiples of 128 KiB."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Scattered pages between HBM and page-locked memory, as a share of one contiguous copy in the same process."""
    if codec:
        _coded_copies(device, codec, pieces, batch, contiguous, pairs, as_json)
        return
    from tierstore.bench.copy import copy_rows, host_nbytes
    from tierstore.bench.link import Ceiling, device_of, require_piece

    found: list[CopyRow] = []
    with refusals(as_json):
        sizes = [size_of("--pieces", size) for size in pieces.split(",")]
        for piece in sizes:
            require_piece(piece)
        nbytes, most = size_of("--batch", batch), size_of("--small", small)
        block = size_of("--contiguous", contiguous)
        device_of(device)
        require_memory({"--batch": nbytes, "--contiguous": block}, host_nbytes(device, nbytes, block))
        ceiling = Ceiling(device, block)
        for piece in sizes:
            progress.print(f"pages of {format_size(piece)}")
            found += copy_rows(device, piece, nbytes, pairs, "straight", ceiling)
            if piece <= most:
                if device != "cpu":
                    found += copy_rows(device, piece, nbytes, pairs, "kernel", ceiling)
                found += copy_rows(device, piece, nbytes, pairs, "slab", ceiling)
    name = name_of(device)
    _show_copies(found, name)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _show_copies(found: list[CopyRow], title: str) -> None:
    header = ("way", "page", "pages", "GB/s", "ceiling", "ratio", "path", "submit ms")
    table = Table(*header, box=None, title=title)
    for row in found:
        rates = (f"{row.gbps:.2f}", f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        size, number = format_size(row.piece_bytes), str(row.num_pieces)
        table.add_row(row.direction, size, number, *rates, row.path, f"{row.submit_ms:.1f}")
    wide_console().print(table)


def _coded_copies(
    device: str, codec: str, pieces: str, batch: str, contiguous: str, pairs: int, as_json: bool
) -> None:
    from tierstore.bench.copy import TOKEN_NBYTES, CodedRow, coded_rows, require_codec
    from tierstore.bench.copy import coded_host_nbytes as host_nbytes
    from tierstore.bench.link import Ceiling, device_of

    found: list[CodedRow] = []
    with refusals(as_json):
        given = [size_of("--pieces", size) for size in pieces.split(",")]
        sizes, nbytes = [size for size in given if size % TOKEN_NBYTES == 0], size_of("--batch", batch)
        if not sizes:
            raise ConfigError(f"--pieces {pieces}; allowed with --codec: multiples of {TOKEN_NBYTES} bytes")
        require_codec(codec)
        block = size_of("--contiguous", contiguous)
        device_of(device)
        require_memory({"--batch": nbytes, "--contiguous": block}, host_nbytes(device, nbytes, block))
        ceiling = Ceiling(device, block)
        for size in sizes:
            progress.print(f"pages of {format_size(size)}")
            found += coded_rows(device, codec, size, nbytes, pairs, ceiling)
    name = name_of(device)
    header = ("way", "page", "pages", "payload", "GB/s", "as they are", "ratio", "ceiling", "error", "path")
    table = Table(*header, box=None, title=f"{name}, {codec}")
    for row in found:
        sizes_of = (format_size(row.piece_bytes), str(row.num_pieces), format_size(row.payload_bytes))
        rates = (f"{row.gbps:.2f}", f"{row.plain_gbps:.2f}", f"{row.ratio:.3f}", f"{row.ceiling_gbps:.2f}")
        table.add_row(row.direction, *sizes_of, *rates, f"{row.rel_error:.4f}", row.path)
    wide_console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def arena(
    device: Device = "cuda:0",
    size: Annotated[
        str, typer.Option(help="Bytes; as much as 64 GiB or half of the free memory if empty.")
    ] = "",
    as_json: Json = False,
) -> None:
    """How soon page-locked host memory can be used, beside torch's own."""
    from tierstore.bench.arena import arena_rows, default_nbytes

    with refusals(as_json):
        nbytes = size_of("--size", size) if size else default_nbytes()
        require_memory({"--size": nbytes}, nbytes)
        found = arena_rows(device, nbytes)
    name = name_of(device)
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=name)
    for row in found:
        table.add_row(row.what, f"{row.value:.3f}", row.unit, row.goal_text, "" if row.ok else "missed")
    Console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def name_of(device: str) -> str:
    import torch

    from tierstore.bench import measurement

    return measurement.device() if device == "cpu" else torch.cuda.get_device_name(device)
