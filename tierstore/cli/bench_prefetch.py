"""``bench prefetch``: how long requests wait for their pages, by when loads start. Simulated; no byte moves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Table

from tierstore.cli.output import Json, finite, print_json, progress, refusals, size_of, wide_console
from tierstore.cli.replay import _files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.bench.prefetch import PrefetchRow


def prefetch(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Trace files: .jsonl (Mooncake), .json (kv-cache-tester); or folders."),
    ],
    hbm: Annotated[str, typer.Option(help="Bytes of KV in HBM.")] = "40GiB",
    host: Annotated[str, typer.Option(help="Bytes in host memory.")] = "100GiB",
    nvme: Annotated[str, typer.Option(help="Bytes on NVMe.")] = "1TiB",
    disk: Annotated[str, typer.Option(help="Bytes a second from NVMe.")] = "6GB",
    link: Annotated[str, typer.Option(help="Bytes a second into HBM.")] = "54GB",
    token: Annotated[str, typer.Option(help="Bytes of KV a token.")] = "128KiB",
    utilisation: Annotated[
        list[float] | None,
        typer.Option(min=0.01, max=1.0, callback=finite, help="May be repeated. .7 and .9 if not given."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many of each trace.")] = None,
    as_json: Json = False,
) -> None:
    """Requests of a trace, first come, first served, with loads that start never, on look-up, on hints, or foreseen.

    The server prefills one request at a time, in the time measured of an 8B model on an H200, and decodes 32 at a time.
    """
    from tierstore.bench.prefetch import Capacities, first, prefetch_rows
    from tierstore.replay.traces import read_traces

    rows: list[PrefetchRow] = []
    with refusals(as_json):
        capacities = Capacities(
            hbm=size_of("--hbm", hbm),
            host=size_of("--host", host),
            nvme=size_of("--nvme", nvme),
            nvme_bytes_per_s=size_of("--disk", disk),
            link_bytes_per_s=size_of("--link", link),
            token_nbytes=size_of("--token", token),
        )
        levels = utilisation or [0.7, 0.9]
        for trace in read_traces(list(_files(traces))):
            part = replace(trace, requests=tuple(first(trace, requests)))
            columns = (*Progress.get_default_columns()[:3], TextColumn("{task.fields[doing]}"))
            with Progress(
                *columns, console=progress, transient=True, disable=not progress.is_interactive
            ) as bar:
                total = len(part.requests) * (1 + 4 * len(levels))
                task = bar.add_task(trace.name, total=total, doing="")
                step = partial(_step, bar, task)
                rows += prefetch_rows(part, capacities, levels, step)
    _show(rows)
    if as_json:
        print_json({"rows": [row.plain() for row in rows]})


def _step(bar: Progress, task: TaskID, doing: str, served: int) -> None:
    bar.update(task, advance=served, doing=doing)


def _show(rows: Sequence[PrefetchRow]) -> None:
    table = Table("trace", "use", "policy", box=None, header_style="bold")
    for name in ("stall mean", "p99", "of on-lookup", "", "TTFT mean", "p99", "wasted"):
        table.add_column(name, justify="right")
    base = {(r.trace, r.utilisation): r for r in rows if r.policy == "on-lookup"}
    for row in rows:
        other = base[row.trace, row.utilisation]
        table.add_row(
            row.trace,
            f"{row.utilisation:g}",
            row.policy,
            f"{row.stall_mean_s:.4f}",
            f"{row.stall_p99_s:.3f}",
            _ratio(row.stall_mean_s, other.stall_mean_s),
            _ratio(row.stall_p99_s, other.stall_p99_s),
            f"{row.ttft_mean_s:.2f}",
            f"{row.ttft_p99_s:.2f}",
            f"{row.wasted:.1%}",
        )
    wide_console().print(table)


def _ratio(found: float, base: float) -> str:
    return f"{found / base:.2f}" if base else "-"
