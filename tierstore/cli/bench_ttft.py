"""``bench ttft``: how soon an answer over a long stored prefix begins, from each tier."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tierstore.cli.bench_card import Device, name_of
from tierstore.cli.output import Json, print_json, progress, refusals, require_folder, wide_console
from tierstore.errors import ConfigError
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.bench.ttft import TtftRow

MOST = 1 << 24
"""Tokens: what memory has no room for is refused by the store, but the tokens themselves are made before it."""


def ttft(
    device: Device = "cuda:0",
    shape: Annotated[str, typer.Option(help="llama-3.1-8b, or tiny; weights are random.")] = "llama-3.1-8b",
    prefix: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of the stored prefix.")] = 131072,
    question: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens that follow it.")] = 64,
    page_size: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of a page.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Answers from each tier; the median counts.")] = 5,
    chunk: Annotated[
        str,
        typer.Option(
            help="Tokens computed at a time where nothing is stored, several sizes with commas; empty: 65536, or "
            "16384 where the device has no room for so many."
        ),
    ] = "",
    host_codecs: Annotated[str, typer.Option(help="Codecs of host memory besides none.")] = "int8",
    disk_codecs: Annotated[str, typer.Option(help="Codecs of the disk, with commas.")] = "none,exp,int8",
    disk_prefix: Annotated[
        int, typer.Option(min=0, max=MOST, help="Tokens of the prefix on disk; 0: as above.")
    ] = 0,
    readers: Annotated[int, typer.Option(min=1, max=64, help="Threads that read the disk.")] = 8,
    dir_: Annotated[
        Path | None,
        typer.Option("--dir", help="A folder on the disk; the system's for temporary files if empty."),
    ] = None,
    as_json: Json = False,
) -> None:
    """How soon an answer over a long stored prefix begins, beside what moving its bytes takes, and computing it."""
    from tierstore.bench.ttft import SHAPES, Ask, Bench

    found: list[TtftRow] = []
    with refusals(as_json):
        if shape not in SHAPES:
            raise ConfigError(f"--shape {shape}; allowed: {', '.join(SHAPES)}")
        for option, tokens in (("--prefix", prefix), ("--disk-prefix", disk_prefix)):
            if 0 < tokens < page_size:
                raise ConfigError(f"{option} {tokens}; allowed: a page of {page_size} tokens or more")
        if dir_ is not None:
            require_folder("--dir", dir_)
        chunks = _chunks(chunk)
        ask = Ask(
            device=device, shape=shape, prefix=prefix, question=question, page_size=page_size, rounds=rounds
        )
        ask.require_room(disk_prefix)
        chunks = chunks or [ask.chunk(disk_prefix)]
        progress.print("a model of random weights")
        bench = Bench(ask)
        for row in bench.memory_rows(chunks):
            _tell(row, found)
        for codec in _names(host_codecs):
            _tell(bench.coded_row(codec), found)
        with TemporaryDirectory(prefix="tierstore-ttft-", dir=dir_) as place:
            for codec in _names(disk_codecs):
                _tell(bench.disk_row(codec, disk_prefix or prefix, Path(place) / codec, readers), found)
    name = name_of(device)
    _show(name, found)
    if as_json:
        print_json({"device": name, "parameters": bench.parameters, "rows": [row.plain() for row in found]})


def _chunks(words: str) -> list[int]:
    """ConfigError unless all are numbers of tokens."""
    names = _names(words)
    if not all(name.isascii() and name.isdigit() and 0 < int(name) <= MOST for name in names):
        raise ConfigError(f"--chunk {words}; allowed: numbers of tokens from 1 to {MOST}, with commas")
    return [int(name) for name in names]


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _tell(row: TtftRow, found: list[TtftRow]) -> None:
    found.append(row)
    beside = f", {row.ratio:.3f} of the {row.floor}'s {row.floor_ms:.1f} ms" if row.ratio else ""
    progress.print(f"{row.tier} {row.codec}: {row.ttft_ms:.1f} ms{beside}")


def _show(name: str, found: list[TtftRow]) -> None:
    table = Table(
        "from", "codec", "tokens", "first token ms", "least", "most", "request ms", "moved", "floor ms", "of",
        "GB/s", "ratio", "same token", "error", box=None, title=name,
    )  # fmt: skip
    for row in found:
        times = (f"{x:.1f}" for x in (row.ttft_ms, row.least_ms, row.most_ms, row.request_ms))
        floor = (f"{row.floor_ms:.1f}", row.floor, f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        rest = (str(row.same_token), f"{row.rel_error:.4f}")
        table.add_row(row.tier, row.codec, str(row.prefix), *times, format_size(row.nbytes), *floor, *rest)
    console = wide_console()
    console.print(table)
    by_way = {(row.tier, row.codec): row.ttft_ms for row in found}
    whole, every = by_way.get(("HOST", "none")), [row for row in found if row.tier == "none"]
    for row in every:
        console.print(
            f"computed {row.chunk} tokens at a time: {row.ttft_ms:.0f} ms, {row.tflops:.0f} TFLOP/s, once"
        )
    computed = min(every, key=lambda row: row.ttft_ms, default=None)
    if computed is not None:
        for (tier, codec), taken in by_way.items():
            if tier != "none":
                console.print(f"{tier} {codec}: {computed.ttft_ms / taken:.1f} times sooner")
    for (tier, codec), taken in by_way.items():
        if whole and tier == "HOST" and codec != "none":
            console.print(f"HOST {codec}: {taken / whole:.3f} of HOST none")
