"""Assemble the application ``tierstore`` from its commands and run it; signals, version and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib.metadata import version
from threading import Timer
from types import FrameType
from typing import Annotated, NoReturn

import typer

from tierstore.cli.archive import export, import_
from tierstore.cli.bench import arena, attention, bench, codec, copy, overlap, prefetch, ttft
from tierstore.cli.doctor import doctor
from tierstore.cli.inspect import inspect, purge, verify
from tierstore.cli.output import REFUSED, Json, print_json, said
from tierstore.cli.plan import plan
from tierstore.cli.replay import replay
from tierstore.cli.serve import serve
from tierstore.cli.studies import compare, engine, hints
from tierstore.cli.vllm_check import vllm_check
from tierstore.config import config_schema
from tierstore.demo.command import demo


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierstore {version('tierstore')}")
        raise typer.Exit


app = typer.Typer(
    help="A tiered KV cache for LLM inference: HBM, host memory and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, serve, compare, plan, replay, inspect, verify, purge, export):
    app.command()(command)
app.command("import")(import_)
app.command("vllm-check")(vllm_check)
for measurement in (codec, copy, engine, arena, attention, overlap, prefetch, hints, ttft):
    bench.command()(measurement)
app.add_typer(bench, name="bench")


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """A tiered KV cache for LLM inference: HBM, host memory and NVMe."""


def main() -> None:
    """Run the ``tierstore`` script.

    SIGTERM and SIGHUP end a command like an interrupt: it cleans up first. If standard output cannot be written,
    the command prints one line on standard error and ends with exit code 2.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
    sys.unraisablehook = _leave_after_all
    try:
        app()
    except OSError as error:
        typer.echo(f"tierstore: {said(error)}", err=True)
        sys.exit(REFUSED)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _leave_after_all(ignored: sys.UnraisableHookArgs) -> None:
    """Send a signal again if Python dropped its exception because an object was being finalized."""
    match ignored.exc_value:
        case SystemExit(code=int(code)) if code > 128:
            number = code - 128
        case KeyboardInterrupt():
            number = int(signal.SIGINT)
        case _:
            sys.__unraisablehook__(ignored)
            return
    again = Timer(0.01, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


@app.command("config-schema")
def show_config_schema(as_json: Json = False) -> None:
    """Print the JSON schema of a configuration file, for editors."""
    schema = config_schema()
    if as_json:
        print_json(schema)
    else:
        typer.echo(json.dumps(schema, indent=2))


app.command()(doctor)
