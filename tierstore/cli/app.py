"""Assemble the application ``tierstore`` from its commands and run it; signals, version and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
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
from tierstore.demo.command import demo


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tierstore {version('tierstore')}")
        raise typer.Exit


app = typer.Typer(
    help="A tiered KV cache for LLM inference: HBM, host memory and NVMe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    ending = _Ending()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, ending.begin)
    sys.unraisablehook = _interrupt_again
    try:
        app()
    except OSError as error:
        typer.echo(f"tierstore: {said(error)}", err=True)
        sys.exit(REFUSED)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Ending:
    """End the command by SystemExit, raised again each second if it was lost.

    A library may drop what a signal handler raises: ``except:`` around an import, an attribute looked up from C, an
    object being finalized.
    """

    def __init__(self) -> None:
        self._leaving = SystemExit()

    def begin(self, number: int, _: FrameType | None) -> NoReturn:
        """Handle the first signal, and any later one: it also ends a clean-up that takes too long."""
        self._leaving = SystemExit(128 + number)
        signal.signal(signal.SIGALRM, self.insist)  # not before: until then it is no signal of ours
        signal.setitimer(signal.ITIMER_REAL, _INSIST_S, _INSIST_S)
        raise self._leaving

    def insist(self, _number: int, _frame: FrameType | None) -> None:
        """Raise again, unless the command is cleaning up because of the exception raised before."""
        error = sys.exception()
        while error is not None:
            if error is self._leaving:
                return
            error = error.__context__
        self._leaving = SystemExit(self._leaving.code)
        raise self._leaving


_INSIST_S = 1.0


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Send SIGINT again if Python dropped KeyboardInterrupt because an object was being finalized."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(ignored)
    elif isinstance(ignored.exc_value, KeyboardInterrupt):
        again = Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


def show_config_schema(as_json: Json = False) -> None:
    """Print the JSON schema of a configuration file, for editors."""
    from tierstore.config import config_schema

    schema = config_schema()
    if as_json:
        print_json(schema)
    else:
        typer.echo(json.dumps(schema, indent=2))


_GROUPS: dict[str, dict[str, Callable[..., None]]] = {
    "Serve, plan, check the machine": {
        "serve": serve,
        "plan": plan,
        "doctor": doctor,
        "vllm-check": vllm_check,
        "config-schema": show_config_schema,
    },
    "Look after a directory": {
        "inspect": inspect,
        "verify": verify,
        "purge": purge,
        "export": export,
        "import": import_,
    },
    "Measure": {"replay": replay},
    "Try it": {"demo": demo, "compare": compare},
}
"""Every command by the heading under which the help text and the documentation list it; also ``bench``."""

for _heading, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_heading)(_command)
for measurement in (codec, copy, engine, arena, attention, overlap, prefetch, hints, ttft):
    bench.command()(measurement)
app.add_typer(bench, name="bench", rich_help_panel="Measure")
