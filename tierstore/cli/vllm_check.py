"""``vllm-check``: what the vLLM that is installed offers to TierStore."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.doctor import tell
from tierstore.cli.output import Json, refusals
from tierstore.errors import ConfigError


def vllm_check(
    source: Annotated[
        Path | None,
        typer.Option(help="A folder that holds the package vllm, unpacked; default: what is installed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what the installed vLLM supports, without starting it. Exit code 1 if the connector would not work."""
    from tierstore.cli.vllm_source import every_check

    with refusals(as_json):
        package = _package(source)
        checks = list(every_check(package))
    tell(checks, as_json, package=str(package))


def _package(source: Path | None) -> Path:
    if source is not None:
        folder = source.expanduser().absolute()
        for package in (folder, folder / "vllm"):
            if package.name == "vllm" and package.is_dir():
                return package
        raise ConfigError(f"--source {source}: holds no folder vllm; allowed: one that does")
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("vLLM is not installed here; allowed: a Python that has it, or --source FOLDER")
    return Path(found.submodule_search_locations[0])
