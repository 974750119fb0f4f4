"""Parts that commands share: ``--json``, ``--yes``, checks of arguments, and the output of results and errors."""

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
from tierstore.types import format_size

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

_Number = TypeVar("_Number", float, float | None, list[float] | None)

_CHECKOUT = Path(__file__).parents[2]

REFUSED = 2
"""Exit code of a command that could not run as requested."""

progress = Console(stderr=True)


def wide_console() -> Console:
    """Return a console for wide tables. Its lines may be longer than the terminal is wide."""
    return Console(width=1000, height=25)  # rich ignores the width on a dumb terminal unless both are set


def print_json(result: Mapping[str, object]) -> None:
    """Print ``result`` as one line of JSON. Call this last, so that it is the last line on standard output."""
    typer.echo(json.dumps(result, default=_plain))


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def finite(value: _Number) -> _Number:
    """Return the value, or raise a usage error if a number in it is infinite or NaN.

    This is the callback of every option that takes floats. ``min=`` and ``max=`` do not reject NaN, and ``min=`` alone
    does not reject infinity.
    """
    found = value if isinstance(value, list) else [value]
    strange = [number for number in found if number is not None and not isfinite(number)]
    if strange:
        raise typer.BadParameter(f"must be a finite number, got {strange[0]}")
    return value


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Return a context manager that turns errors into one line on standard error and exit code 2.

    It handles TierStoreError, OSError and MemoryError. With ``as_json``, a JSON object that contains the line is also
    printed to standard output.
    """
    try:
        yield
    except (TierStoreError, OSError, MemoryError) as error:
        line = said(error)
        typer.echo(f"tierstore: {line}", err=True)
        if as_json:
            print_json({"error": line})
        raise typer.Exit(REFUSED) from error


def is_checkout() -> bool:
    """Return whether this package runs from a checkout of the repository, which contains ``benchmarks/``."""
    return all((_CHECKOUT / name).is_file() for name in ("pyproject.toml", "benchmarks/__init__.py"))


def study(name: str) -> Any:
    """Import the module ``benchmarks.NAME`` from the checkout of the repository, and return it.

    Raises:
        ConfigError: This package was not imported from a checkout.
    """
    if not is_checkout():
        raise ConfigError(
            f"benchmarks/{name.partition('.')[0]} is not part of the installed package: "
            "run this command from a checkout of TierStore"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))  # an editable install may make only the package tierstore importable
    return import_module(f"benchmarks.{name}")


def size_of(option: str, text: str) -> int:
    """Parse a size, such as 64MiB, and return it in bytes.

    Raises:
        ConfigError: ``text`` is not a valid size. The message names ``option``.
    """
    from tierstore.config import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} must be {error}, got {text!r}") from error


def require_memory(options: Mapping[str, int], needed: int) -> None:
    """Raise ConfigError if ``needed`` bytes of memory are not available now.

    Args:
        options: The options that determine ``needed``, with their sizes in bytes, for the message.
        needed: Required memory in bytes.
    """
    from tierstore.host.free_memory import free_memory

    free = free_memory()
    if free is None or needed <= free.nbytes:
        return
    named = ", ".join(f"{option} {format_size(nbytes)}" for option, nbytes in options.items())
    raise ConfigError(
        f"{named} would need {format_size(needed)} of memory, but {free.described()}; choose smaller sizes"
    )


def require_folder(option: str, folder: Path) -> None:
    """Raise ConfigError unless ``folder``, the value of ``option``, exists. The message names the option."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder}: no such folder")


def require_place(what: str, file: Path) -> None:
    """Raise ConfigError unless a file may be created or replaced at this path.

    Its parent directory must exist, and the path must not be a directory, device, pipe or socket. ``what`` names
    the option or argument in the message.
    """
    if file.exists() and not file.is_file():
        found = "directory" if file.is_dir() else "device, pipe or socket"
        raise ConfigError(f"{what} {file} is a {found}; expected a regular file or a new name")
    if not file.parent.is_dir():
        raise ConfigError(f"{what} {file}: the folder {file.parent} does not exist")


def require_file(what: str, file: Path, expected: str) -> None:
    """Raise ConfigError unless ``file`` is an existing regular file.

    In the message, ``what`` names the option or argument, and ``expected`` describes the file.
    """
    if not file.is_file():
        found = "is a directory" if file.is_dir() else "no such file"
        raise ConfigError(f"{what} {file}: {found}, expected {expected}")


def said(error: TierStoreError | OSError | MemoryError) -> str:
    """Return the message for an error. For a system error, it contains the file's name but not the error number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError):
        return f"out of memory: {error}; choose smaller sizes" if str(error) else "out of memory"
    return str(error)
