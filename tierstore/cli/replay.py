"""``replay``: what share of a trace's tokens a store would have had, with each policy and capacity."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tierstore.cli.output import Json, print_json, progress, refusals
from tierstore.config import StoreConfig, load_config
from tierstore.errors import ConfigError
from tierstore.types import Tier
from tierstore.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierstore.replay.rows import Row
    from tierstore.replay.simulation import Setting
    from tierstore.replay.traces import Trace


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Trace files: .jsonl (Mooncake), .json (kv-cache-tester); or folders."),
    ],
    model: Annotated[
        str,
        typer.Option(help="A folder with a config.json, or the name of a known model: the size of a page."),
    ] = "llama-3.1-8b",
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Size of HBM, such as 125GiB; may be repeated. 125GiB if not given."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Victim order of all tiers; may be repeated. lru and adaptive if not given."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Size of a HOST tier.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Size of an NVMe tier.")] = None,
    admission: Annotated[
        list[str] | None, typer.Option(help="Admission to NVMe; may be repeated. all if not given.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Tiers, policies and admission from this file instead of the options.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against capacity into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Replay traces through the directory and the policies that a store runs on. Copies are instant, no byte is kept.

    One page is one block of the trace. Rates are over the second half of a trace; the first half warms the tiers.
    """
    with refusals(as_json):
        if plot is not None and find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'tierstore[plot]'")
        from tierstore.replay.traces import read_traces

        found = read_traces(list(_files(traces)))
        configs = (
            [load_config(config)]
            if config is not None
            else list(
                _configs(
                    capacity or ["125GiB"], policy or ["lru", "adaptive"], host, nvme, admission or ["all"]
                )
            )
        )
        rows = _replay(found, configs, model)
        if plot is not None:
            from tierstore.replay.plot import draw

            draw(rows, plot)
    _show(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*.json*") if file.suffix in (".json", ".jsonl"))
        else:
            yield path


def _configs(
    capacities: Sequence[str],
    policies: Sequence[str],
    host: str | None,
    nvme: str | None,
    admissions: Sequence[str],
) -> Iterator[StoreConfig]:
    """A configuration each, checked as one of a store is."""
    for capacity in capacities:
        for policy in policies:
            for admission in admissions:
                tree: dict[str, object] = {"hbm": {"capacity": capacity, "device": "cpu", "policy": policy}}
                if host is not None:
                    tree["host"] = {"capacity": host, "policy": policy}
                if nvme is not None:
                    tree["nvme"] = {"path": ".", "capacity": nvme, "policy": policy, "admission": admission}
                yield load_config(tree)


def _setting(trace: Trace, config: StoreConfig, model: str) -> Setting:
    from tierstore.plan.geometry import read_model
    from tierstore.policy.recompute import doubling_depth
    from tierstore.replay.simulation import Setting

    specs = read_model(model).specs(trace.block_tokens)
    page_nbytes = sum(spec.page_nbytes for spec in specs)
    if config.hbm is None or config.hbm.capacity is None:
        raise ConfigError(
            "hbm.capacity is missing; a replay holds each request's pages in an HBM of the store's own"
        )
    sections = {Tier.HBM: config.hbm, Tier.HOST: config.host, Tier.NVME: config.nvme}
    there = {tier: section for tier, section in sections.items() if section is not None}
    pages = {tier: (section.capacity or 0) // page_nbytes for tier, section in there.items()}
    for tier, number in pages.items():
        if number == 0:
            raise ConfigError(
                f"{tier.name.lower()}.capacity is less than one block of {trace.name}; allowed: at least {page_nbytes}"
            )
    disk = config.nvme
    return Setting(
        pages=pages,
        policies={tier: section.policy for tier, section in there.items()},
        page_nbytes=page_nbytes,
        doubling_depth=min(doubling_depth(spec) for spec in specs),
        admission="all" if disk is None else disk.admission,
        daily_writes=None if disk is None else disk.daily_writes,
        flush_s=0.2 if disk is None else disk.flush,
    )


def _replay(traces: Sequence[Trace], configs: Sequence[StoreConfig], model: str) -> list[Row]:
    from tierstore.replay.rows import Bounds, row

    bounds, rows = Bounds(), []
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[doing]}"))
    with Progress(*columns, console=progress, transient=True) as bar:
        blocks = [sum(len(request.keys) for request in trace.requests) for trace in traces]
        task = bar.add_task("replay", total=sum(blocks) * len(configs), doing="")
        for trace in traces:
            for config in configs:
                setting = _setting(trace, config, model)
                bar.update(task, doing=f"{trace.name}, {setting.policies[Tier.HBM]}")
                rows.append(row(trace, setting, bounds, lambda pages: bar.advance(task, pages)))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table("trace", "policy", "admission", box=None, header_style="bold")
    for name in ("capacity", "hit rate", "knows the future", "share of it", "to NVMe"):
        table.add_column(name, justify="right")
    for row in rows:
        share = row.hit_rate / row.optimal_hit_rate if row.optimal_hit_rate else 0.0
        table.add_row(
            row.trace,
            row.policy,
            row.admission,
            format_size(row.capacity_bytes),
            f"{row.hit_rate:.4f}",
            f"{row.optimal_hit_rate:.4f}",
            f"{share:.3f}",
            format_size(row.nvme_bytes_written),
        )
    console = Console()
    console.print(table)
    for row in rows:
        if row.too_long:
            console.print(
                f"{row.trace}, {row.policy}, {format_size(row.capacity_bytes)}: {row.too_long} requests have more "
                "pages than HBM and were passed over",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
