"""Write ten times the capacity of HBM and HOST, and read all pages back, also in another process."""

from __future__ import annotations

from pathlib import Path

from tests.support import forked

PROGRAM = Path(__file__).with_name("ten_times.py")


def run(directory: Path) -> str:
    done = forked.run(PROGRAM.read_text(encoding="utf-8"), directory, strict=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_written_page_is_found_and_right_after_a_restart(tmp_path: Path) -> None:
    assert run(tmp_path / "store") == "filled, 480 pages read, all right\n"
    assert run(tmp_path / "store") == "reopened, 480 pages read, all right\n"
