"""The ``plan`` command: what fits into each tier, how long a restore takes, and how fast streamed documents decode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.cli.output import Json, finite, print_json, progress, refusals, wide_console
from tierstore.errors import ConfigError
from tierstore.types import exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierstore.plan.forecast import Document, Plan


def plan(
    config: Annotated[Path, typer.Option(help="Configuration file.")],
    model: Annotated[str, typer.Option(help="Folder with a config.json, or the name of a known model.")],
    dtype: Annotated[
        str | None, typer.Option(help="dtype of the pages. Default: the dtype of the model.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per page, instead of the configuration's page_size.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Length of a document in tokens; may be repeated. Default: 8192."),
    ] = None,
    questions: Annotated[
        int,
        typer.Option(
            min=1,
            help="Questions on each document that are decoded together. They share the pages that stream from host "
            "memory because the document does not fit into HBM.",
        ),
    ] = 1,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            callback=finite,
            help="Prompt tokens that your engine computes per second, instead of a prediction.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that computes and has HBM: cpu, cuda or cuda:N. Default: hbm.device or, without an hbm "
            "section, this machine's GPU. Without a GPU, no time is predicted."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how many tokens of a model fit into each tier, and how restoring compares with recomputing.

    For documents that do not fit into HBM, also shows how fast they can be decoded while the pages that are not
    in HBM stream from host memory.

    Measures a copy, the disk (with a temporary file of at most 256 MiB) and a matrix multiplication on this
    machine. Does not open a store. Exit code 1 if a store with this configuration and model could not be
    opened on this machine.
    """
    with refusals(as_json):
        from tierstore.config import is_device, load_config

        loaded = load_config(config)
        if device is not None and not is_device(device):
            raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
        if device is not None and loaded.hbm is not None:
            loaded = loaded.model_copy(update={"hbm": loaded.hbm.model_copy(update={"device": device})})
        from tierstore.plan.geometry import read_model

        geometry = read_model(model)  # before torch is imported, which takes seconds
        from tierstore.plan.forecast import forecast, measure, page_layout

        loaded, layout = page_layout(loaded, geometry, page_size, dtype)
        rates = measure(loaded, geometry, layout, prefill_tokens_per_s, progress.print, device)
        found = forecast(loaded, geometry, layout, rates, tokens or [8192], questions)
    _show(wide_console(), found)
    if as_json:
        print_json(found.plain())
    raise typer.Exit(1 if found.sizes.refused else 0)


def _show(console: Console, found: Plan) -> None:
    for line in _head(found):
        console.print(Text(line), soft_wrap=True)
    console.print(_tiers(found))
    console.print(_documents(found))
    streamed = [one for one in found.documents if one.decode is not None and one.decode.streamed_pages]
    if streamed:
        console.print(_streams(found, streamed))
    for line in _rates(found):
        console.print(Text(line), soft_wrap=True)
    for kind, lines in (("refused", found.sizes.refused), ("note", found.warnings)):
        for line in lines:
            console.print(Text(f"{kind}: {line}"), soft_wrap=True)


def _head(found: Plan) -> Iterator[str]:
    model, layout = found.geometry, found.layout
    heads = f"{model.num_kv_heads} KV heads of {model.head_dim}"
    kept = heads if model.kind == "mha" else f"latents of {model.head_dim}"
    yield f"{model.name}: {model.num_layers} layers, {kept}, {layout.specs[0].dtype}"
    per_token, padding = layout.page_nbytes // layout.page_size, layout.slot_nbytes - layout.page_nbytes
    size = format_size(layout.page_nbytes) + (f" (and {exact_size(padding)} of padding)" if padding else "")
    yield f"{exact_size(per_token)} per token, stored and reused in pages of {layout.page_size} tokens = {size}"


def _tiers(found: Plan) -> Table:
    table = Table("tier", box=None, header_style="bold")
    for name in ("capacity", "pages", "tokens"):
        table.add_column(name, justify="right")
    for size in found.sizes.tiers:
        tokens = None if size.pages is None else size.pages * found.layout.page_size
        capacity = "the engine's" if size.capacity is None else format_size(size.capacity)
        table.add_row(size.tier.name, capacity, _count(size.pages), _count(tokens))
    return table


def _documents(found: Plan) -> Table:
    table = Table("document of", "tier", box=None, header_style="bold")
    for name in ("documents", "restored in", "recomputed in", "times sooner"):
        table.add_column(name, justify="right")
    for document in found.documents:
        for restore in document.tiers:
            table.add_row(
                f"{document.tokens} tokens",
                restore.tier,
                _count(restore.documents),
                _seconds(restore.seconds),
                _seconds(document.recompute_s),
                "-" if restore.sooner is None else _short(restore.sooner),
            )
    return table


def _streams(found: Plan, documents: Sequence[Document]) -> Table:
    table = Table("document of", box=None, header_style="bold")
    for name in ("questions", "streamed tokens", "bytes per step", "ring", "time per step", "tokens per s"):
        table.add_column(name, justify="right")
    for document in documents:
        decode = document.decode
        assert decode is not None
        table.add_row(
            f"{document.tokens} tokens",
            str(found.questions),
            str(decode.streamed_pages * found.layout.page_size),
            format_size(decode.streamed_nbytes),
            format_size(decode.ring_nbytes),
            _seconds(decode.step_s),
            "-" if decode.tokens_per_s is None else _short(decode.tokens_per_s),
        )
    return table


def _rates(found: Plan) -> Iterator[str]:
    rates = found.rates
    yield f"HOST -> HBM: {_speed(rates.copy.per_s)}{rates.copy.how}"
    if rates.read is not None:
        yield f"disk: {_speed(rates.read.per_s)}{rates.read.how}"
    speed = "" if rates.prefill.per_s is None else f"{_short(rates.prefill.per_s / 1e9)} GFLOP/s, "
    if rates.per_token:
        speed = f"{rates.prefill.per_s:g} tokens/s, "
    yield f"prefill: {speed}{rates.prefill.how}"
    recompute = (
        "the prefill rate" if rates.per_token else "the model's operations at the prefill rate, a lower bound"
    )
    restore = "the copy rate" if rates.read is None else "the copy and disk rates"
    restores = any(rate is not None and rate.per_s is not None for rate in (rates.copy, rates.read))
    if rates.prefill.per_s is None:
        yield f"restore times are predicted from {restore}" if restores else "no time is predicted"
    elif restores:
        yield f"restore times are predicted from {restore}, recompute times from {recompute}"
    else:
        yield f"recompute times are predicted from {recompute}"
    if any(document.decode is not None and document.decode.tokens_per_s for document in found.documents):
        yield "times per step are predicted from the copy rate, a lower bound: the copies alone take this long"


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{_short(seconds)} s"


def _speed(per_s: float | None) -> str:
    return "" if per_s is None else f"{_short(per_s / 1e9)} GB/s, "


def _short(number: float) -> str:
    """Format a number with three significant digits, or as an integer from 100 on, without an exponent."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
