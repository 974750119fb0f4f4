"""``tierstore`` in a process of its own."""

from __future__ import annotations

import sys

# A program that a shell starts in the background ignores interrupts, and so do its children, unless they say otherwise.
COMMAND = (
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from tierstore.cli import main; main()",
)
