"""The texts of documents, by tenant: in memory, and in a folder if they are to survive a restart."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock

from tierstore.errors import ConfigError

_log = logging.getLogger("tierstore.serve")
_SUFFIX, _PART = ".json", ".part"
_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its name. ``id`` is a digest of tenant and text: the same text twice is the same document."""

    tenant: str
    name: str
    text: str

    @property
    def id(self) -> str:
        """32 hex digits; says nothing of the text to who does not know it."""
        tenant, text = self.tenant.encode(), self.text.encode()
        return sha256(len(tenant).to_bytes(8, "big") + tenant + text).hexdigest()[:32]


class Library:
    """Documents by tenant and id. Any thread. With a folder, a document is there once its file is, whole.

    ``add`` and ``remove`` wait for the disk; the others never do.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Reads what the folder has; it is made if need be, for this user alone. ConfigError if that cannot be.

        A file that is damaged, or not this server's, is left out and left alone: the log names it. What a write left
        unfinished is removed.
        """
        self._folder = folder
        # Held over the disk's time, so that readers do without: they take a dict as it is.
        self._writing = Lock()
        self._documents: dict[tuple[str, str], Document] = {}
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(f"*{_PART}"):
                if _ID.fullmatch(unfinished.stem):  # a browser's downloads are called so too
                    unfinished.unlink()
            files = sorted(folder.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise ConfigError(
                f"--documents {folder}: {error.strerror}; allowed: a folder that can be written to"
            ) from error
        for file in files:
            document = _read(file)
            if document is not None:
                self._documents[document.tenant, document.id] = document

    def add(self, document: Document) -> Document:
        """The document as it is kept: what is there already keeps its name. OSError leaves nothing."""
        with self._writing:
            place = (document.tenant, document.id)
            if place not in self._documents:
                if self._folder is not None:
                    _write(self._folder / f"{document.id}{_SUFFIX}", document)
                self._documents[place] = document
            return self._documents[place]

    def get(self, tenant: str, id: str) -> Document | None:  # noqa: A002 - what it is called
        """The tenant's document; None if it has none of this id."""
        return self._documents.get((tenant, id))

    def all(self, tenant: str | None = None) -> list[Document]:
        """The tenant's, or everybody's, by name."""
        found = [d for d in list(self._documents.values()) if tenant in (None, d.tenant)]
        return sorted(found, key=lambda document: (document.name, document.id))

    def remove(self, document: Document) -> None:
        """Forgets it, on disk too. OSError leaves it."""
        with self.removing(document):
            pass

    @contextmanager
    def removing(self, document: Document) -> Iterator[None]:
        """Forgets it, and removes its file when the context ends. An error within, or OSError, leaves it."""
        place = (document.tenant, document.id)
        found = self._documents.pop(place, None)
        try:
            yield
            with self._writing:
                if self._folder is not None:
                    (self._folder / f"{document.id}{_SUFFIX}").unlink(missing_ok=True)
                    _sync(self._folder)
        except BaseException:
            if found is not None:
                self._documents[place] = found
            raise


def _write(file: Path, document: Document) -> None:
    """Whole or not at all, for this user alone."""
    part = file.with_suffix(_PART)
    fields = asdict(document) | {"digest": _digest(document)}
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
            json.dump(fields, out)
            out.flush()
            os.fsync(out.fileno())
        part.rename(file)
        _sync(file.parent)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _digest(document: Document) -> str:
    return sha256(json.dumps([document.tenant, document.name, document.text]).encode()).hexdigest()


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _read(file: Path) -> Document | None:
    """What the file holds, if its name and its digest say that it is what was written."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        document = Document(str(fields["tenant"]), str(fields["name"]), str(fields["text"]))
        if file.stem == document.id and fields["digest"] == _digest(document):
            return document
        why = "is not the text that was written"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        why = "is no document"
    _log.warning("%s %s; it is left out", file, why)
    return None
