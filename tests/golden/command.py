"""Runs the command line in this process, which has already imported torch."""

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
    """Run ``tierstore WORDS --json``, check its exit code, and return the JSON object in its last line."""
    result = run(*words, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout.splitlines()[-1])
