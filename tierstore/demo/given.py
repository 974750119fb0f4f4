"""What a user names, looked at before a model is fetched for it: texts to read, and the folder of a disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import ConfigError


def require_texts(docs: Sequence[Path]) -> None:
    """ConfigError unless each of ``--docs`` is a file or a folder. Reads nothing."""
    for path in docs:
        if not path.is_dir() and not path.is_file():
            found = "is no file" if path.exists() else "does not exist"
            raise ConfigError(f"--docs {path} {found}; allowed: text files, and folders of them")


def made_folder(place: Path) -> Path:
    """The folder ``--dir`` names, made if it is not there. ConfigError if it cannot be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if place.exists() else error.strerror
        raise ConfigError(f"--dir {place} cannot be used: {why}; allowed: a folder, new or not") from error
    return place
