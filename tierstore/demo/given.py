"""What a user names, looked at before a model is fetched for it: texts to read, and the folder of a disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import ConfigError


def require_texts(docs: Sequence[Path], *, folders: bool = True) -> None:
    """ConfigError unless each of ``--docs`` is a file, or a folder where those are taken. Reads nothing."""
    for path in docs:
        if path.is_file() or (folders and path.is_dir()):
            continue
        found = "is a folder" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        more = ", and folders of them" if folders else ""
        raise ConfigError(f"--docs {path} {found}; allowed: text files{more}")


def made_folder(place: Path) -> Path:
    """The folder ``--dir`` names, made if it is not there. ConfigError if it cannot be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if place.exists() else error.strerror
        raise ConfigError(f"--dir {place} cannot be used: {why}; allowed: a folder, new or not") from error
    return place
