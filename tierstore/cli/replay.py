"""The ``replay`` command, which simulates request traces and shows the hit rate of each policy and capacity."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.table import Table

from tierstore.cli.output import (
    Json,
    print_json,
    progress,
    refusals,
    require_folder,
    require_place,
    size_of,
    wide_console,
)
from tierstore.errors import ConfigError
from tierstore.types import Tier, exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tierstore.config import StoreConfig
    from tierstore.replay.simulation import Row, Setting
    from tierstore.replay.traces import Trace


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Trace files: .jsonl (Mooncake), .json (kv-cache-tester); or folders of them."),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Folder with a config.json, or the name of a known model. Determines the page size."
        ),
    ] = "llama-3.1-8b",
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="Size of HBM, such as 125GiB; may be repeated. Default: 125GiB."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy of all tiers; may be repeated. Default: lru and adaptive."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Size of a HOST tier.")] = None,
    nvme: Annotated[str | None, typer.Option(help="Size of an NVMe tier.")] = None,
    admission: Annotated[
        list[str] | None,
        typer.Option(help="Admission policy of the NVMe tier; may be repeated. Default: all."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Configuration file that sets tiers, policies and admission, instead of the options."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of hit rate against capacity.")] = None,
    bounds: Annotated[
        Path | None,
        typer.Option(
            help="Folder that caches the hits of the optimal policy. Default: ~/.cache/tierstore/bounds."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay request traces with the store's bookkeeping and policies, and show the hit rates.

    Page contents are not stored, and copies take no time. Each block in a trace is one page. Hit rates are
    measured over the second half of a trace, because the first half fills the tiers.
    """
    with refusals(as_json):
        _check(plot, config, {"capacity": capacity, "policy": policy, "host": host, "nvme": nvme}, admission)
        if bounds is not None and bounds.exists():
            require_folder("--bounds", bounds)
        from tierstore.replay.traces import read_traces

        found = read_traces(list(_files(traces)))
        if config is not None:
            from tierstore.config import load_config

            configs = [load_config(config)]
        else:
            sizes, policies = capacity or ["125GiB"], policy or ["lru", "adaptive"]
            configs = list(_configs(sizes, policies, host, nvme, admission or ["all"]))
        rows = _replay(found, configs, model, bounds)
        if plot is not None:
            from tierstore.replay.plot import draw

            draw(rows, plot)
    _show(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})


def _check(
    plot: Path | None, config: Path | None, tiers: Mapping[str, object], admission: list[str] | None
) -> None:
    """Raise ConfigError if options contradict each other, have no effect, or would fail after the replay.

    ``tiers`` contains the values of the options that ``--config`` replaces.
    """
    if config is not None:
        given = [name for name, value in {**tiers, "admission": admission}.items() if value]
        if given:
            raise ConfigError(f"--{given[0]} cannot be combined with --config, which already sets it")
    elif admission and tiers["nvme"] is None:
        raise ConfigError("--admission has no effect without --nvme: there is no tier to admit pages to")
    if plot is not None:
        require_place("--plot", plot)
        if find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: run pip install 'tierstore[plot]'")
        from tierstore.replay.plot import require_format

        require_format(plot)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(file for file in path.rglob("*.json*") if file.suffix in (".json", ".jsonl"))
        if not found:
            raise ConfigError(f"{path} has no .json or .jsonl files")
        yield from found


def _configs(
    capacities: Sequence[str],
    policies: Sequence[str],
    host: str | None,
    nvme: str | None,
    admissions: Sequence[str],
) -> Iterator[StoreConfig]:
    """Yield a configuration for each combination of capacity, policy and admission.

    Raises:
        ConfigError: An option is invalid. The message names the option.
    """
    from tierstore.config import WITHDRAWN_POLICIES, Admission, Policy, load_config

    for option, text in (*(("--capacity", each) for each in capacities), ("--host", host), ("--nvme", nvme)):
        if text is not None:
            size_of(option, text)
    for policy in policies:
        if policy in WITHDRAWN_POLICIES:
            raise ConfigError(
                f"--policy {policy}: this version no longer has this eviction policy; "
                f"use {WITHDRAWN_POLICIES[policy]} instead"
            )
    _require_known("--policy", policies, get_args(Policy))
    _require_known("--admission", admissions, get_args(Admission))
    for capacity in capacities:
        for policy in policies:
            for admission in admissions:
                tree: dict[str, object] = {"hbm": {"capacity": capacity, "device": "cpu", "policy": policy}}
                if host is not None:
                    tree["host"] = {"capacity": host, "policy": policy}
                if nvme is not None:
                    tree["nvme"] = {"path": ".", "capacity": nvme, "policy": policy, "admission": admission}
                yield load_config(tree)


def _require_known(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{option} must be one of {', '.join(known)}, got {name!r}")


def _setting(trace: Trace, config: StoreConfig, model: str) -> Setting:
    from tierstore.plan.geometry import read_model
    from tierstore.policy.registry import doubling_depth
    from tierstore.replay.simulation import Setting

    specs = read_model(model).specs(trace.block_tokens)
    page_nbytes = sum(spec.page_nbytes for spec in specs)
    if config.hbm is None or config.hbm.capacity is None:
        raise ConfigError(
            "hbm.capacity is missing: set it, because a replay keeps the pages of each request in HBM"
        )
    sections = {Tier.HBM: config.hbm, Tier.HOST: config.host, Tier.NVME: config.nvme}
    there = {tier: section for tier, section in sections.items() if section is not None}
    pages = {tier: (section.capacity or 0) // page_nbytes for tier, section in there.items()}
    for tier, number in pages.items():
        if number == 0:
            raise ConfigError(
                f"{tier.name.lower()}.capacity must be at least {exact_size(page_nbytes)} (one block of "
                f"{trace.name}), got {exact_size(there[tier].capacity or 0)}"
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


def _replay(
    traces: Sequence[Trace], configs: Sequence[StoreConfig], model: str, folder: Path | None
) -> list[Row]:
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    from tierstore.replay.bounds import Bounds, user_folder
    from tierstore.replay.simulation import row

    jobs = [(trace, _setting(trace, config, model)) for trace in traces for config in configs]
    bounds, rows = Bounds(folder or user_folder()), []
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[doing]}"))
    with Progress(*columns, console=progress, transient=True, disable=not progress.is_interactive) as bar:
        blocks = sum(len(request.keys) for trace, _ in jobs for request in trace.requests)
        task = bar.add_task("replay", total=blocks, doing="")
        for trace, setting in jobs:
            bar.update(task, doing=f"{trace.name}, {setting.policies[Tier.HBM]}")
            rows.append(row(trace, setting, bounds, lambda pages: bar.advance(task, pages)))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table("trace", box=None, header_style="bold")
    for name in ("policy", "admission"):
        table.add_column(name)
    for name in ("capacity", "hit rate", "knows the future", "share of it", "to NVMe", "pages/s"):
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
            f"{row.pages_per_second:,.0f}",
        )
    console = wide_console()
    console.print(table)
    for row in rows:
        if row.too_long:
            console.print(
                f"{row.trace}, {row.policy}, {format_size(row.capacity_bytes)}: "
                f"skipped {row.too_long} requests with more pages than HBM",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
