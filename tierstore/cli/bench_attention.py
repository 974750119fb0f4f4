"""``bench attention``: attention over scattered pages beside torch's own over one piece of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tierstore.cli.bench_card import Device, name_of
from tierstore.cli.output import Json, print_json, progress, refusals, wide_console
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from tierstore.bench.attention import AttentionRow


def attention(
    device: Device = "cuda:0",
    context: Annotated[
        int, typer.Option(min=1, help="Tokens in pages, of all sequences of a batch.")
    ] = 131072,
    batches: Annotated[str, typer.Option(help="Sequences that decode together, with commas.")] = "1,16",
    suffixes: Annotated[str, typer.Option(help="New tokens over them, with commas.")] = "64,4096",
    layers: Annotated[int, typer.Option(min=1, help="Layers of a page, and of a decoding step.")] = 32,
    filled: Annotated[int, typer.Option(min=1, help="Layers that new tokens go through in one run.")] = 4,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page, of 4 KiB a token and layer.")] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """Attention of an 8B model over pages, as a share of SDPA's best kernel over contiguous K and V in this process."""
    from tierstore.bench.attention import Pool, decode_row, prefill_row

    found: list[AttentionRow] = []
    with refusals(as_json):
        together, new = _numbers("--batches", batches), _numbers("--suffixes", suffixes)
        if max(together, default=1) > context:
            raise ConfigError(
                f"--batches {batches}; allowed: up to --context, {context}: a token each at least"
            )
        rounded = (batch * -(-(context // batch) // page_size) * page_size for batch in together)
        pool = Pool(device, max([context + max(new, default=0), *rounded]), layers, page_size)
        for batch in together:
            progress.print(f"decoding {batch} of {context // batch} tokens")
            found.append(decode_row(pool, batch, context // batch, pairs))
        for queries in new:
            progress.print(f"{queries} new tokens over {context}")
            found.append(prefill_row(pool, context, queries, min(filled, layers), pairs))
    name = name_of(device)
    _show(name, found)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _numbers(option: str, words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",") if word.strip()]
    except ValueError:
        found = [0]
    if not all(number >= 1 for number in found):
        raise ConfigError(f"{option} {words}; allowed: numbers of at least 1, with commas between")
    return found


def _show(name: str, rows: list[AttentionRow]) -> None:
    header = (
        "what",
        "batch",
        "context",
        "new",
        "ms/layer",
        "SDPA",
        "ratio",
        "TB/s",
        "TFLOP/s",
        "error",
        "by",
    )
    table = Table(*header, "memory", box=None, title=name)
    for row in rows:
        sizes = (str(row.batch), str(row.context), str(row.queries))
        times = (f"{row.ms:.3f}", f"{row.ceiling_ms:.3f} {row.ceiling}", f"{row.ratio:.3f}")
        rates = (f"{row.tbps:.3f}", f"{row.tflops:.0f}", f"{row.rel_error:.1e}", row.backend)
        table.add_row(row.what, *sizes, *times, *rates, f"{row.memory_layers:.2f}")
    wide_console().print(table)
