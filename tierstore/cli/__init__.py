"""The command line: ``tierstore COMMAND``.

With ``--json``, the last line on standard output is one JSON object. Progress goes to standard error. Exit codes: 0
for success; 1 if the command ran and found something wrong (a bad record, a failed check, an answer of no); 2 if it
could not run as asked (an unknown option, a directory that is in use or not a store's); 130 if it was interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the ``tierstore`` script.

    An interrupt while modules load ends it at once: there is nothing to clean up yet.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from tierstore.cli.app import main as run  # takes most of the time of a short command

    try:
        signal.signal(signal.SIGINT, usual)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _end(number: int, _: FrameType | None) -> None:
    # Not an exception: an import may turn it into another one, or swallow it.
    os._exit(_INTERRUPTED)
