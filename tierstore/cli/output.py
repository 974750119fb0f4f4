"""Options and output that the commands share: ``--json``, checks of arguments, results, errors."""

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

from tierstore.errors import ConfigError, TierStoreError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

_Number = TypeVar("_Number", float, float | None, list[float] | None)

_CHECKOUT = Path(__file__).parents[2]

REFUSED = 2
"""Exit code of a command that could not run as asked."""

progress = Console(stderr=True)


def format_size(nbytes: int) -> str:
    """Return ``config.format_size``, without importing pydantic for a command that shows no size."""
    from tierstore import config

    return config.format_size(nbytes)


def wide_console() -> Console:
    """Return a console for tables of numbers. Its lines are as long as they need to be."""
    return Console(width=1000, height=25)  # both are needed: a dumb terminal counts as one of 80 columns


def print_json(result: Mapping[str, object]) -> None:
    """Print one line of JSON, always the last on standard output."""
    typer.echo(json.dumps(result, default=_plain))


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def finite(value: _Number) -> _Number:
    """Return the value if it is finite, or raise a usage error. Callback of every option that takes floats.

    ``min=`` alone accepts "inf", and no comparison refuses "nan".
    """
    found = value if isinstance(value, list) else [value]
    strange = [number for number in found if number is not None and not isfinite(number)]
    if strange:
        raise typer.BadParameter(f"{strange[0]} is not a finite number")
    return value


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turn a library error, a system error or a lack of memory into one line on standard error and exit code 2."""
    try:
        yield
    except (TierStoreError, OSError, MemoryError) as error:
        line = said(error)
        typer.echo(f"tierstore: {line}", err=True)
        if as_json:
            print_json({"error": line})
        raise typer.Exit(REFUSED) from error


def is_checkout() -> bool:
    """Return whether this package runs from a checkout of the repository, with ``benchmarks/`` beside it."""
    return all((_CHECKOUT / name).is_file() for name in ("pyproject.toml", "benchmarks/__init__.py"))


def study(name: str) -> Any:
    """Import the module ``benchmarks.NAME`` from the checkout.

    Raises:
        ConfigError: The package is installed without the checkout.
    """
    if not is_checkout():
        raise ConfigError(
            f"benchmarks/{name.partition('.')[0]} is not part of the installed package: "
            "run this command from a checkout of TierStore"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))  # an editable install may expose only the packages of the wheel
    return import_module(f"benchmarks.{name}")


def size_of(option: str, text: str) -> int:
    """Return in bytes the size that ``option`` gives. ConfigError if ``text`` is not a size."""
    from tierstore.config import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} must be {error}, got {text!r}") from error


def require_memory(options: Mapping[str, int], needed: int) -> None:
    """Raise ConfigError if the options need more bytes than are available now.

    Args:
        options: The sizes to name in the message, by option.
        needed: Bytes that follow from them.
    """
    from tierstore.host.free_memory import free_memory

    free = free_memory()
    if free is None or needed <= free.nbytes:
        return
    named = ", ".join(f"{option} {format_size(nbytes)}" for option, nbytes in options.items())
    raise ConfigError(
        f"{named} would need {format_size(needed)} of memory, and {free.described()}; choose smaller sizes"
    )


def require_folder(option: str, folder: Path) -> None:
    """Raise ConfigError unless the folder exists."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder}: no such folder")


def require_place(what: str, file: Path) -> None:
    """Raise ConfigError unless a file can be written there: the folder exists, and the name is not a directory or
    device.
    """
    if file.exists() and not file.is_file():
        found = "directory" if file.is_dir() else "device, pipe or socket"
        raise ConfigError(f"{what} {file} is a {found}, not a file name")
    if not file.parent.is_dir():
        raise ConfigError(f"{what} {file}: the folder {file.parent} does not exist")


def require_file(what: str, file: Path, expected: str) -> None:
    """Raise ConfigError unless the file exists. ``expected`` says what it should be."""
    if not file.is_file():
        found = "is a directory" if file.is_dir() else "no such file"
        raise ConfigError(f"{what} {file}: {found}, expected {expected}")


def said(error: TierStoreError | OSError | MemoryError) -> str:
    """Return a system error without its number but with its file, other errors as they are."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"out of memory: {error}; choose smaller sizes" if str(error) else "out of memory"
    return str(error)
