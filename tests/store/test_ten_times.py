"""Ten times what HBM and HOST hold, read back in random order, and again by another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("ten_times.py")


def run(directory: Path) -> str:
    command = [sys.executable, "-W", "error", str(PROGRAM), str(directory)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_everything_written_is_there_and_right_also_after_a_restart(tmp_path: Path) -> None:
    assert run(tmp_path / "store") == "filled, 480 pages read, all right\n"
    assert run(tmp_path / "store") == "reopened, 480 pages read, all right\n"
