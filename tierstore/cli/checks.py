"""Checks of what is there, as ``doctor`` and ``vllm-check`` tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.cli.output import print_json


@dataclass(frozen=True, slots=True)
class Check:
    """``state``: "ok"; "note", something would not work or work slower, and ``why``; "fail", nothing would work."""

    name: str
    value: str
    state: Literal["ok", "note", "fail"] = "ok"
    why: str = ""


def tell(checks: Sequence[Check], as_json: bool, **more: object) -> None:
    """Show them all and end the command; exit code 1 if nothing would work. ``more``: of the JSON object alone."""
    failed = [check.name for check in checks if check.state == "fail"]
    table = Table("", "found", "", "why", box=None, header_style="bold")
    for check in checks:
        table.add_row(check.name, Text(check.value), check.state, Text(check.why))
    Console().print(table)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"ok": not failed, "failed": failed, **more, "checks": rows})
    raise typer.Exit(1 if failed else 0)
