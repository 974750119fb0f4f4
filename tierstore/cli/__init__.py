"""The command line: ``tierstore COMMAND``.

Each command takes ``--json``: its last line on standard output is then one JSON object. Exit codes: 0 all is well;
1 the command ran and something is wrong (a bad record, a check that failed, an answer of no); 2 it could not be done
as asked (unknown option, a directory that is not a store's or is in use). Progress goes to standard error.
"""

from __future__ import annotations

from tierstore.cli.app import app, main

__all__ = ["app", "main"]
