"""The ``tierstore`` application: collects the commands, runs one, and handles signals and exit codes."""

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
from tierstore.cli.sglang_check import sglang_check
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
    """Run the command that the arguments name.

    SIGTERM and SIGHUP make the command clean up and exit, as Ctrl+C does. If writing to standard output fails,
    one line is printed to standard error and the exit code is 2.
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
    """Signal handlers that end the command.

    They raise SystemExit, and raise it again every second until it takes effect, because a library may drop an
    exception that a signal handler raises: in an ``except:`` around an import, in an attribute lookup from C, or
    in a finalizer.
    """

    def __init__(self) -> None:
        self._leaving = SystemExit()

    def begin(self, number: int, _: FrameType | None) -> NoReturn:
        """Handle a termination signal: raise SystemExit. A second signal interrupts the clean-up."""
        self._leaving = SystemExit(128 + number)
        signal.signal(
            signal.SIGALRM, self.insist
        )  # not set earlier, because a command may use SIGALRM itself
        signal.setitimer(signal.ITIMER_REAL, _INSIST_S, _INSIST_S)
        raise self._leaving

    def insist(self, _number: int, _frame: FrameType | None) -> None:
        """Handle the timer: raise SystemExit again, unless the command is already handling the previous one."""
        error = sys.exception()
        while error is not None:
            if error is self._leaving:
                return
            error = error.__context__
        self._leaving = SystemExit(self._leaving.code)
        raise self._leaving


_INSIST_S = 1.0


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Handle exceptions that Python ignored in finalizers. See ``sys.unraisablehook``.

    After a KeyboardInterrupt, send SIGINT to this process again. Ignore a SystemExit, because ``_Ending`` raises it
    again.
    """
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
        "sglang-check": sglang_check,
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
"""All commands except ``bench``, grouped under headings for the help text and the documentation."""

for _heading, _commands in _GROUPS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_heading)(_command)
for measurement in (codec, copy, engine, arena, attention, overlap, prefetch, hints, ttft):
    bench.command()(measurement)
app.add_typer(bench, name="bench", rich_help_panel="Measure")
