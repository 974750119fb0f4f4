"""The command line: ``tierstore COMMAND``.

With ``--json``, the last line on standard output is one JSON object. Progress is printed to standard error.

Exit codes:

- 0: The command succeeded.
- 1: The command ran and found a problem, such as a bad record or a failed check, or the user declined to confirm.
- 2: The command could not run as requested, for example because of an unknown option or a directory in use.
- 130: The command was interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line. This is the entry point of the ``tierstore`` script.

    Ctrl+C while modules are being imported ends the process at once, because there is nothing to clean up yet.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from tierstore.cli.app import main as run  # this import takes most of the time of a short command

    try:
        signal.signal(signal.SIGINT, usual)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _end(number: int, _: FrameType | None) -> None:
    # Do not raise an exception instead: code that imports modules may catch it.
    os._exit(_INTERRUPTED)
