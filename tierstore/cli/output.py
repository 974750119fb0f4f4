"""What the commands share: the ``--json`` option, and results and errors on the right stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from tierstore.config import format_size, parse_size
from tierstore.errors import ConfigError, TierStoreError
from tierstore.host.free_memory import available_nbytes

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_Number = TypeVar("_Number", float, float | None, list[float] | None)

_CHECKOUT = Path(__file__).parents[2]

REFUSED = 2
"""Exit code: it could not be done as asked."""

progress = Console(stderr=True)


def wide_console() -> Console:
    """For tables of numbers: lines are as long as they need, since a number that is cut says nothing."""
    return Console(width=1000, height=25)  # both, or a dumb terminal counts as one of 80 columns


def print_json(result: Mapping[str, object]) -> None:
    """One line, always the last on standard output."""
    typer.echo(json.dumps(result, default=_plain))


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def finite(value: _Number) -> _Number:
    """The callback of every option that takes a float, or several: "inf" passes a ``min`` alone, and "nan" whatever
    compares. A usage error for them."""
    found = value if isinstance(value, list) else [value]
    strange = [number for number in found if number is not None and not isfinite(number)]
    if strange:
        raise typer.BadParameter(f"{strange[0]}; allowed: a finite number")
    return value


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn an error of the library or of the system into one clear line and exit code 2; want of memory, too."""
    try:
        yield
    except (TierStoreError, OSError, MemoryError) as error:
        line = said(error)
        typer.echo(f"tierstore: {line}", err=True)
        if as_json:
            print_json({"error": line})
        raise typer.Exit(REFUSED) from error


def is_checkout() -> bool:
    """Whether this package lies in a checkout of the repository, with ``benchmarks/`` beside it."""
    return all((_CHECKOUT / name).is_file() for name in ("pyproject.toml", "benchmarks/__init__.py"))


def study(name: str) -> Any:
    """Import the module ``benchmarks.NAME`` of the checkout. ConfigError where this package is in none."""
    if not is_checkout():
        raise ConfigError(
            f"benchmarks/{name.partition('.')[0]} is not part of the installed package: "
            "run this command from a checkout of TierStore"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))  # an editable install may expose the packages of the wheel alone
    return import_module(f"benchmarks.{name}")


def size_of(option: str, text: str) -> int:
    """Bytes of a size that an option names. ConfigError for what is none."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}; allowed: {error}") from error


def require_memory(options: Mapping[str, int], needed: int) -> None:
    """ConfigError if so many bytes, which follow from these options, are more than is available now."""
    available = available_nbytes()
    if available is None or needed <= available:
        return
    named = ", ".join(f"{option} {format_size(nbytes)}" for option, nbytes in options.items())
    raise ConfigError(
        f"{named}: needs {format_size(needed)} of memory in all; "
        f"allowed: smaller ones, for at most {format_size(available)} that are available"
    )


def require_folder(option: str, folder: Path) -> None:
    """ConfigError unless there is such a folder."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder}: no such folder; allowed: one that is there")


def require_place(what: str, file: Path) -> None:
    """ConfigError unless a file can have this name: its folder is there, and it is none itself."""
    if file.exists() and not file.is_file():
        found = "directory" if file.is_dir() else "device, pipe or socket"
        raise ConfigError(f"{what} {file} is a {found}; allowed: the name of a file")
    if not file.parent.is_dir():
        raise ConfigError(
            f"{what} {file}: no such folder as {file.parent}; allowed: a file in a folder that is there"
        )


def require_file(what: str, file: Path, allowed: str) -> None:
    """ConfigError unless there is such a file."""
    if not file.is_file():
        found = "is a directory" if file.is_dir() else "no such file"
        raise ConfigError(f"{what} {file}: {found}; allowed: {allowed}")


def said(error: TierStoreError | OSError | MemoryError) -> str:
    """An error of the system without its number, and with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"out of memory: {error}; allowed: smaller sizes" if str(error) else "out of memory"
    return str(error)
