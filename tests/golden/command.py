"""The command line in this process, where torch is loaded already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tierstore.cli.app import app


def run(*words: str | Path) -> Result:
    """Run ``tierstore WORDS``."""
    return CliRunner().invoke(app, [str(word) for word in words])


def told(*words: str | Path, exit_code: int = 0) -> Any:
    """The JSON object in the last line of ``tierstore WORDS --json``."""
    result = run(*words, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout.splitlines()[-1])
