"""Creates mounts that other processes do not see."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def unshare() -> None:
    """Move this process into new user and mount namespaces, so that other processes do not see its mounts.

    The process must have a single thread.

    Raises:
        OSError: The kernel does not allow new namespaces.
    """
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "user and mount namespaces are not available")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("--make-rprivate", "/")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)
