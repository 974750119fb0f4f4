"""A check, in a child process, of whether an environment left by an earlier process is safe to open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tierstore.errors import ConfigError
from tierstore.nvme.directory_layout import DATA_FILE, FORMAT_VERSION, odd_kind, read_marker
from tierstore.nvme.lmdb_walker import read_meta

_PROGRAM = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("tierstore.nvme.lmdb_walker", run_name="__main__")
"""


class Examination(NamedTuple):
    """Result of ``examine``.

    Attributes:
        records: Number of records; 0 if there is a fault.
        fault: Why the environment must not be opened, or None.
    """

    records: int = 0
    fault: str | None = None


def examine(directory: Path, timeout_s: float = 600.0) -> Examination:
    """Check the environment in ``directory`` without changing it. No process may write to it meanwhile.

    If data.mdb is missing or empty, there is no fault, and the number of records is 0. Another format version is a
    fault; the environment is then not read. A check that takes longer than ``timeout_s`` seconds is a fault as well.

    Raises:
        ConfigError: The child process cannot be started or fails before it reads the environment.
    """
    data = directory / DATA_FILE
    odd = odd_kind(data)
    if odd is not None:
        return Examination(fault=f"{DATA_FILE} is {odd}")
    if not data.exists() or data.stat().st_size == 0:
        return Examination()
    marker = read_marker(directory)
    if marker is not None and marker.format_version != FORMAT_VERSION:
        return Examination(fault=f"its format is version {marker.format_version}, not {FORMAT_VERSION}")
    if not _has_meta(data):
        return Examination(fault="its meta pages cannot be read")
    return walk_apart(directory, timeout_s, "lmdb" if marker is None else marker.payload)


def walk_apart(directory: Path, timeout_s: float, payload: str = "lmdb") -> Examination:
    """Walk the environment's trees in a child process, because reading a damaged file can crash a process.

    Raises:
        ConfigError: The child process cannot be started or fails before it reads the environment.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _PROGRAM, package_root, str(directory), payload]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Examination(fault=f"the check of its catalogue took longer than {timeout_s:.0f} s")
    except OSError as error:
        raise ConfigError(
            f"nvme.path cannot be checked: the child process could not be started ({error})"
        ) from error
    begun, _, count = child.stdout.partition("\n")
    if begun != "walking":
        raise ConfigError(
            f"nvme.path cannot be checked: the child process failed: {child.stderr.strip()[-300:]}"
        )
    if child.returncode == 0:
        return Examination(records=int(count))
    if child.returncode < 0:
        return Examination(
            fault=f"the check of its catalogue was killed by {signal.Signals(-child.returncode).name}"
        )
    return Examination(fault=child.stderr.strip()[-300:])


def _has_meta(data: Path) -> bool:
    fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_meta(fd) is not None
    finally:
        os.close(fd)
