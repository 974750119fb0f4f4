"""The command line that runs ``tierstore`` in a separate process."""

from __future__ import annotations

import sys

# A program that a shell starts in the background ignores SIGINT, and its children inherit this. So it is reset here.
COMMAND = (
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from tierstore.cli import main; main()",
)
