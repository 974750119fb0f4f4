"""The documents of each tenant, and the progress of reading them into the store.

Texts are kept in memory. If a directory is given, they are also kept in files, so that they survive a restart. The
model reads each document once. After a restart, pages that are still in the store are reused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event as Flag
from threading import Lock
from typing import Literal, Protocol
from weakref import WeakSet

from tierstore.errors import ConfigError, StoreClosed
from tierstore.serve.engine import Engine, Ticket
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask, BusyError, Done, Event, Failed, Read, RefusedError
from tierstore.store import TierStore
from tierstore.types import PageKey

_log = logging.getLogger("tierstore.serve")
_SUFFIX, _PART = ".json", ".part"
_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Document:
    """A named text that belongs to a tenant.

    The ID depends only on the tenant and the text. A tenant that adds the same text twice gets the same document.
    """

    tenant: str
    name: str
    text: str

    @property
    def id(self) -> str:
        """Return the document's ID: the first 32 hex digits of a SHA-256 of tenant and text."""
        tenant, text = self.tenant.encode(), self.text.encode()
        return sha256(len(tenant).to_bytes(8, "big") + tenant + text).hexdigest()[:32]


class Library:
    """The documents of all tenants, found by tenant and ID. Thread-safe.

    If the library has a directory, a document exists once its file has been written completely. ``add``, ``remove``
    and ``removing`` wait for the disk; other calls do not.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Load all documents from ``folder``.

        If the directory is missing, it is created with access for this user only. JSON files that are damaged or
        come from other programs are logged and ignored. Files that an interrupted write left behind are deleted.

        Args:
            folder: The directory, or None to keep documents in memory only.

        Raises:
            ConfigError: The directory cannot be created, read or written.
        """
        self._folder = folder
        # Held while files are written or deleted. Methods that only look up documents do not take this lock.
        self._writing = Lock()
        self._documents: dict[tuple[str, str], Document] = {}
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(f"*{_PART}"):
                if _ID.fullmatch(unfinished.stem):  # keeps other .part files, such as a browser's downloads
                    unfinished.unlink()
            files = sorted(folder.glob(f"*{_SUFFIX}"))
        except OSError as error:
            raise ConfigError(
                f"--documents {folder}: cannot read and write the folder: {error.strerror}"
            ) from error
        for file in files:
            document = _read(file)
            if document is not None:
                self._documents[document.tenant, document.id] = document

    def add(self, document: Document) -> Document:
        """Store a document and return it.

        If the tenant already has a document with the same text, return that document, which keeps its name.

        Raises:
            OSError: The file cannot be written. The document is not stored.
        """
        with self._writing:
            place = (document.tenant, document.id)
            if place not in self._documents:
                if self._folder is not None:
                    _write(self._folder / f"{document.id}{_SUFFIX}", document)
                self._documents[place] = document
            return self._documents[place]

    def get(self, tenant: str, id: str) -> Document | None:  # noqa: A002 - the API's name for it
        """Return the tenant's document with this ID, or None if the tenant has no such document."""
        return self._documents.get((tenant, id))

    def all(self, tenant: str | None = None) -> list[Document]:
        """Return the documents of ``tenant`` (None: of all tenants), sorted by name."""
        found = [d for d in list(self._documents.values()) if tenant in (None, d.tenant)]
        return sorted(found, key=lambda document: (document.name, document.id))

    def remove(self, document: Document) -> None:
        """Remove a document and its file.

        Raises:
            OSError: The file cannot be deleted. The document still exists.
        """
        with self.removing(document):
            pass

    @contextmanager
    def removing(self, document: Document) -> Iterator[None]:
        """Return a context manager that removes a document on entry and deletes its file on exit.

        If the block or the deletion raises an exception, the document is put back.
        """
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
    """Write a document to a file, atomically and durably, with access for this user only."""
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
    """Load a document from a file. If the file is not a valid document, log a warning and return None."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        document = Document(str(fields["tenant"]), str(fields["name"]), str(fields["text"]))
        if file.stem == document.id and fields["digest"] == _digest(document):
            return document
        why = "does not match its name and digest"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        why = "is not a document that this server wrote"
    _log.warning("ignoring a file in the documents folder: %s %s", file, why)
    return None


State = Literal["waiting", "reading", "ready", "failed"]
"""The state of a document.

``waiting``: the document is queued, or it will be read when the next question about it is asked. ``reading``:
the engine is reading it. ``ready``: all its pages were in the store when that was last checked. ``failed``:
the engine could not read it.
"""


class NotErasedError(Exception):
    """Pages of a document could not be erased from disk, so they might be found again after a restart."""


class Reading:
    """The tokens and page keys of a document, and the progress of reading it into the store.

    Only the engine's thread calls ``tell``. All other methods are thread-safe.
    """

    def __init__(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> None:
        self.tokens = array("I", tokens)  # 4 bytes per token; a list of ints would take 36
        self.keys = keys
        self.state: State = "waiting"
        self.read = 0
        self.why: str | None = None
        self._ticket: Ticket | None = None
        self._ended: Future[None] | None = None

    @property
    def under_way(self) -> bool:
        """Return whether the engine has the document in its queue or is reading it."""
        return self._ended is not None and not self._ended.done()

    def begin(self, engine: Engine, salt: bytes) -> None:
        """Submit the document to the engine, which reads it without generating an answer.

        Raises the exceptions of ``Engine.submit``. If it raises one, ``under_way`` is False afterwards.
        """
        self._ended = Future()
        try:
            self._ticket = engine.submit(Ask(prompt=tuple(self.tokens), max_tokens=0, salt=salt), self.tell)
        except BaseException:
            self._end()  # wakes callers of ended() that are already waiting
            raise

    def tell(self, event: Event) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case Read(tokens):
                self.state, self.read = "reading", tokens
            case Done():
                self.is_ready()
                self._end()
            case Failed(why):
                self.state, self.why = "failed", why
                self._end()

    def is_ready(self) -> None:
        """Set the state to ``ready``. Call this when the whole document is in the store."""
        self.state, self.read, self.why = "ready", len(self.tokens), None

    def cancel(self) -> None:
        """Cancel reading, and wait up to 30 s until the engine stores no more pages of the document. Idempotent."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket.wait()
        self._end()

    async def ended(self) -> None:
        """Wait until the engine has read the document, or until reading has failed or has been cancelled.

        Return at once if the document was never submitted.
        """
        if self._ended is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    def _end(self) -> None:
        if self._ended is not None:
            with suppress(InvalidStateError):  # the engine's thread and cancel() may both get here
                self._ended.set_result(None)


class Question(Protocol):
    """A question that the engine is answering about a document."""

    def withdraw(self) -> None:
        """Cancel the question, so that its client receives an error. Does not wait."""

    def wait(self) -> None:
        """Wait until the engine has finished the question and stores no more pages for it."""


class Readings:
    """The documents in a library and the progress of reading them into the store.

    Thread-safe. Most calls may block for seconds, because they tokenize text or wait for the disk.
    """

    def __init__(self, library: Library, reader: Reader, engine: Engine, store: TierStore) -> None:
        self._library, self._reader, self._engine, self._store = library, reader, engine, store
        # Held while documents are added or removed. Methods that only look up documents do not take this lock.
        self._changing = Lock()
        self._known: dict[tuple[str, str], Reading] = {}
        self._questions: dict[tuple[str, str], WeakSet[Question]] = {}
        self._asking = Lock()  # guards _questions
        self._closing = Flag()

    def add(self, tenant: str, name: str, text: str) -> tuple[Document, Reading]:
        """Store a document. Submit it to the engine, unless all its pages are in the store or it is already being read.

        Returns:
            The document and the progress of reading it.

        Raises:
            RefusedError, BusyError, StoreClosed: See ``Engine.submit``. A new document is not stored.
            OSError: The file cannot be written. The document is not stored.
        """
        document = Document(tenant, name, text)
        reading = self.of(document)
        with self._changing:
            # Another thread may have added the document since of() was called.
            reading = self._known.get((tenant, document.id), reading)
            new = self._library.get(tenant, document.id) is None
            document = self._library.add(document)
            try:
                if self.look(reading) < len(reading.keys) and not reading.under_way:
                    reading.begin(self._engine, tenant.encode())
            except (RefusedError, BusyError, StoreClosed):
                if new:
                    self._library.remove(document)
                raise
            self._known[tenant, document.id] = reading
        return document, reading

    def of(self, document: Document) -> Reading:
        """Return the tokens of a document and the progress of reading it.

        The first call for a document tokenizes the text, which takes about a second per megabyte.
        """
        known = self.known(document)
        if known is None:
            tokens = self._reader.about(document.text)
            keys = self._store.keys(tokens, salt=document.tenant.encode())
            known = Reading(tokens, keys)
            self.look(known)
            if self._library.get(document.tenant, document.id) is not None:
                known = self._known.setdefault((document.tenant, document.id), known)
        return known

    def known(self, document: Document) -> Reading | None:
        """Return the tokens of a document and the progress of reading it, or None if it has not been tokenized."""
        return self._known.get((document.tenant, document.id))

    def look(self, reading: Reading) -> int:
        """Return how many pages of the document are in the store, counted from its beginning without a gap.

        If all pages are in the store and the engine is not reading the document, set the state to ``ready``. The
        pages may also have been stored while the engine answered a question.
        """
        stored = self._store.match(reading.keys).num_pages
        if stored == len(reading.keys) and not reading.under_way:
            reading.is_ready()
        return stored

    def remove(self, document: Document) -> None:
        """Remove a document and evict its pages, except pages shared with other documents of the tenant.

        If the engine is still reading the document, the reading is cancelled. Running questions about the document
        fail. This method waits until the pages have been erased from disk, so that they are not found again after a
        restart.

        Raises:
            NotErasedError: Some pages could not be erased from disk. The document is kept.
            OSError: The file cannot be deleted. The document is kept.
        """
        with self._changing:
            reading = self.of(document)
            with self._library.removing(document):
                self._known.pop((document.tenant, document.id), None)
                reading.cancel()
                self._evict(document, reading)
                pending = self._store.flush_evictions()
                if pending:
                    raise NotErasedError(
                        f"{pending} of its pages could not be erased, because disk writes fail or hang; "
                        "the store keeps trying: delete the document again later"
                    )

    def asked(self, document: Document, reading: Reading, question: Question) -> None:
        """Register a question that the engine has accepted, so that the question fails if the document is removed.

        If the document has already been removed, fail the question now, and evict the document's pages again.
        """
        with self._asking:
            self._questions.setdefault((document.tenant, document.id), WeakSet()).add(question)
        if self._library.get(document.tenant, document.id) is None:
            with self._changing:
                # Check again, because the document may have been added anew in the meantime.
                if self._library.get(document.tenant, document.id) is None:
                    self._evict(document, reading)

    def _evict(self, document: Document, reading: Reading) -> None:
        """Fail the questions about a removed document, wait until the engine has ended them, and evict its pages.

        Pages that other documents of the tenant share are kept.
        """
        with self._asking:
            questions = list(self._questions.pop((document.tenant, document.id), ()))
        for question in questions:
            question.withdraw()
        for question in questions:
            question.wait()
        shared = {key for other in self._library.all(document.tenant) for key in self.of(other).keys}
        self._store.evict([key for key in reading.keys if key not in shared])

    def recall(self) -> None:
        """Tokenize all documents, and look up which of their pages are in the store.

        The server runs this in a separate thread after a restart. Returns early once ``close`` is called.
        """
        with suppress(StoreClosed):
            for document in self._library.all():
                if self._closing.is_set():
                    return
                self.of(document)

    def close(self) -> None:
        """Make ``recall`` return once it has finished its current document. Does not wait."""
        self._closing.set()
