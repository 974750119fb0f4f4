"""What the commands share: the ``--json`` option, and results and errors on the right stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from tierstore.errors import TierStoreError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

REFUSED = 2
"""Exit code: it could not be done as asked."""

progress = Console(stderr=True)


def print_json(result: Mapping[str, object]) -> None:
    """One line, always the last on standard output."""
    typer.echo(json.dumps(result, default=_plain))


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn an error of the library or of the system into one clear line and exit code 2."""
    try:
        yield
    except (TierStoreError, OSError) as error:
        typer.echo(f"tierstore: {error}", err=True)
        if as_json:
            print_json({"error": str(error)})
        raise typer.Exit(REFUSED) from error
