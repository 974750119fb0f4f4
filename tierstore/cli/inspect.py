"""The commands ``inspect``, ``verify`` and ``purge``, which work on a store's directory."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.cli.output import Json, Yes, print_json, progress, refusals
from tierstore.errors import ConfigError
from tierstore.types import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tierstore.nvme.inspection import HomeReport, ShardReport, ShardVerdict

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the store (nvme.path).")]
_SHOWN_KEYS = 20
_MODEL_ROOM, _LEAST_MODEL_ROOM = 60, 12
_DIGEST = re.compile("[0-9a-f]{64}")
_OTHERS_ROOM = 84
"""Approximate width of all columns except the model's, in characters."""


def inspect(directory: Directory, as_json: Json = False) -> None:
    """Show the contents of a store's directory. Changes nothing.

    Long model names are truncated; --json shows them in full.
    """
    from tierstore.nvme import inspection

    with refusals(as_json):
        report = inspection.inspect(directory)
    typer.echo(
        f"{report.path}: {format_size(report.disk_nbytes)} on disk, {len(report.shards)} model shard(s)"
        + (", on a read-only file system: open it with nvme.read_only" if report.read_only else "")
    )
    _show(report)
    if as_json:
        print_json(asdict(report))


def verify(directory: Directory, as_json: Json = False) -> None:
    """Read and check every record in a store's directory. Changes nothing.

    Exit code 1 if a record is bad or could not be checked.
    """
    from tierstore.nvme import inspection

    with refusals(as_json), _bars() as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, checked: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name[:16], total=total)
            bars.update(tasks[name], completed=checked)

        verdicts = inspection.verify(directory, show)
    for verdict in verdicts:
        _say(verdict)
    checked, bad = sum(verdict.checked for verdict in verdicts), sum(len(verdict.bad) for verdict in verdicts)
    skipped = sum(verdict.skipped is not None for verdict in verdicts)
    typer.echo(f"{checked} records checked, {bad} bad, {skipped} shard(s) not checked")
    if as_json:
        shards = [asdict(verdict) for verdict in verdicts]
        print_json({"ok": not bad and not skipped, "checked": checked, "bad": bad, "shards": shards})
    raise typer.Exit(1 if bad or skipped else 0)


def purge(
    directory: Directory,
    which: Annotated[
        str, typer.Option(help="all, damaged, or the first digits of a fingerprint as shown by `inspect`.")
    ] = "all",
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove the contents of a store's directory, after confirmation.

    Never removes data that a process uses, or files that TierStore did not write. Exit code 1 if something was
    kept, if the answer was no, or if no fingerprint matches.
    """
    from tierstore.nvme import inspection

    with refusals(as_json):
        if not which:
            raise typer.BadParameter(
                "--which must be all, damaged, or the first digits of a fingerprint, got an empty string"
            )
        report = inspection.inspect(directory)
        if which not in ("all", "damaged"):
            _require_one(report, which, as_json)
        question = f"Remove {which!r} of {report.path} ({format_size(report.disk_nbytes)} on disk in all)?"
        if not yes and not _agreed(question):
            _end_with_nothing_removed("nothing was removed", as_json)
        result = inspection.purge(directory, which)
    typer.echo(f"removed {len(result.removed)} shard(s), {format_size(result.freed_nbytes)} freed")
    for name, reason in result.kept:
        typer.echo(f"kept {name}: {reason}")
    if as_json:
        print_json(asdict(result))
    raise typer.Exit(1 if result.kept else 0)


def _require_one(report: HomeReport, which: str, as_json: bool) -> None:
    """Print a message and exit with code 1, unless the fingerprint of at least one shard starts with ``which``."""
    if any(shard.fingerprint.startswith(which) for shard in report.shards):
        return
    _end_with_nothing_removed(
        f"nothing was removed: no fingerprint in {report.path} begins with {which!r}; `tierstore inspect` lists them",
        as_json,
    )


def _agreed(question: str) -> bool:
    """Ask a question on standard error, and return whether the answer on standard input is yes.

    Raises:
        ConfigError: Standard input is closed, so no answer can come.
    """
    typer.echo(f"{question} [y/N]: ", err=True, nl=False)
    answer = "" if sys.stdin is None else sys.stdin.readline()
    if not answer:
        typer.echo(err=True)
        raise ConfigError(
            "cannot ask for confirmation: standard input is closed; use --yes to remove without asking"
        )
    return answer.strip().lower() in ("y", "yes")


def _end_with_nothing_removed(why: str, as_json: bool) -> NoReturn:
    typer.echo(why, err=True)
    if as_json:
        print_json({"removed": [], "freed_nbytes": 0, "kept": []})
    raise typer.Exit(1)


def _show(report: HomeReport) -> None:
    """Print one line per shard.

    The shard's name is never truncated, because ``purge --which`` accepts it. The model's name is truncated to the
    remaining width. If this width is too small, the models are listed before the table.
    """
    console = Console()
    names = [_name_of(shard) for shard in report.shards]
    models = [_cut(_model_of(shard), _MODEL_ROOM) for shard in report.shards]
    beside = console.width - _OTHERS_ROOM >= _LEAST_MODEL_ROOM
    table = Table(box=None, header_style="bold")
    table.add_column("shard", no_wrap=True, min_width=max(map(len, names), default=0))
    if beside:
        table.add_column("model", no_wrap=True, max_width=console.width - _OTHERS_ROOM)
    for column in ("dtype", "codec", "records", "page", "on disk", "capacity", "state"):
        table.add_column(column, overflow="fold")
    for name, model, shard in zip(names, models, report.shards, strict=True):
        cells = (name, model, *_row(shard)) if beside else (name, *_row(shard))
        table.add_row(*map(Text, cells))
    for name, model in [] if beside else zip(names, models, strict=True):
        typer.echo(f" model of {name}: {model}")
    console.print(table)


def _name_of(shard: ShardReport) -> str:
    return f"{shard.fingerprint[:12]}-{shard.name.partition('-')[2]}"


def _model_of(shard: ShardReport) -> str:
    """Return the model's name, followed by the identity that is part of the page keys, if the two differ.

    The identity is either a digest of the weights, which is shortened here, or another name.
    """
    name, model = shard.description.get("name"), _named(shard, "model")
    if not isinstance(name, str):
        return model
    return f"{name}, weights {model[:12]}" if _DIGEST.fullmatch(model) else f"{name} ({model})"


def _cut(text: str, room: int) -> str:
    """Return ``text`` as one line of at most ``room`` characters.

    A model's name may be long and have several lines, because an engine may put its whole configuration there.
    """
    line = " ".join(text.split())
    return line if len(line) <= room else f"{line[: room - 1]}…"


def _row(shard: ShardReport) -> tuple[str, ...]:
    if shard.damaged:
        state = "set aside as damaged; purge --which damaged removes it"
    elif shard.in_use_by is not None:
        state = f"in use by process {shard.in_use_by or 'unknown'}"
    else:
        state = f"damaged: {shard.fault}" if shard.fault else "closed"
    return (
        _named(shard, "dtype"),
        shard.codec or "",
        "" if shard.records is None else str(shard.records),
        "" if shard.page_nbytes is None else format_size(shard.page_nbytes),
        format_size(shard.disk_nbytes),
        "" if shard.capacity is None else format_size(shard.capacity),
        state,
    )


def _named(shard: ShardReport, what: str) -> str:
    """Return the values of the field ``what`` in the shard's KV groups, each value once, joined with commas."""
    groups = shard.description.get("groups")
    names = [str(group.get(what, "")) for group in groups] if isinstance(groups, list) else []
    return ", ".join(dict.fromkeys(names))


def _say(verdict: ShardVerdict) -> None:
    outcome = f"not checked: {verdict.skipped}" if verdict.skipped else f"{verdict.checked} records checked"
    typer.echo(f"{verdict.name}: {outcome}")
    for key, fault in verdict.bad[:_SHOWN_KEYS]:
        typer.echo(f"  {key.hex()}: {fault}")
    if len(verdict.bad) > _SHOWN_KEYS:
        typer.echo(f"  and {len(verdict.bad) - _SHOWN_KEYS} more")


def _bars() -> Progress:
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=progress,
        transient=True,
        disable=not progress.is_interactive,
    )
