"""Damages files that an engine has left on disk."""

from __future__ import annotations

from pathlib import Path

from tests.nvme.rig import change


def flip_every(home: Path, share: int, page_nbytes: int, rank: int = 0) -> int:
    """Change one byte in every ``share``-th slot of a rank's extent files below ``home``.

    Return the number of bytes changed.
    """
    files = sorted(home.rglob(f"*-{rank}/extent-*.bin"))
    assert files, f"no extent file below {home}"
    slot = 4096 + -(-page_nbytes // 4096) * 4096
    changed = 0
    for path in files:
        for position in range(slot // 2, path.stat().st_size, share * slot):
            with path.open("rb") as file:
                file.seek(position)
                old = file.read(1)
            change(path, position, bytes([old[0] ^ 0x10]))
            changed += 1
    return changed
