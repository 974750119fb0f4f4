"""The texts of documents by tenant, and the state of their reading into the store.

Texts are kept in memory, and in a folder if they are to survive a restart. The model reads each document once;
after a restart the store finds its pages again.
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
    """A text and its name. ``id`` is a digest of tenant and text: the same text twice is the same document."""

    tenant: str
    name: str
    text: str

    @property
    def id(self) -> str:
        """Return 32 hex digits that reveal nothing about the text."""
        tenant, text = self.tenant.encode(), self.text.encode()
        return sha256(len(tenant).to_bytes(8, "big") + tenant + text).hexdigest()[:32]


class Library:
    """Documents by tenant and id, thread-safe. With a folder, a document exists once its file is complete.

    ``add`` and ``remove`` wait for the disk; other calls never do.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Read the folder, or create it for this user alone.

        Damaged files and files of other programs are ignored and named in the log; unfinished writes are removed.

        Raises:
            ConfigError: The folder cannot be read or created.
        """
        self._folder = folder
        # Held during disk I/O. Methods that only look up documents read the dict without it.
        self._writing = Lock()
        self._documents: dict[tuple[str, str], Document] = {}
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in folder.glob(f"*{_PART}"):
                if _ID.fullmatch(unfinished.stem):  # browsers name unfinished downloads like this, too
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
        """Store a document and return it. An existing document keeps its name. OSError: nothing is stored."""
        with self._writing:
            place = (document.tenant, document.id)
            if place not in self._documents:
                if self._folder is not None:
                    _write(self._folder / f"{document.id}{_SUFFIX}", document)
                self._documents[place] = document
            return self._documents[place]

    def get(self, tenant: str, id: str) -> Document | None:  # noqa: A002 - what it is called
        """Return the tenant's document, or None."""
        return self._documents.get((tenant, id))

    def all(self, tenant: str | None = None) -> list[Document]:
        """Return the documents of a tenant, or of all tenants, sorted by name."""
        found = [d for d in list(self._documents.values()) if tenant in (None, d.tenant)]
        return sorted(found, key=lambda document: (document.name, document.id))

    def remove(self, document: Document) -> None:
        """Remove a document, also from the disk. After an OSError it still exists."""
        with self.removing(document):
            pass

    @contextmanager
    def removing(self, document: Document) -> Iterator[None]:
        """Remove a document at once, and its file at the end of the context. An error restores it."""
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
    """Write a file completely or not at all, readable by this user only."""
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
    """Read a file, or return None unless name and digest show that it is complete and ours."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        document = Document(str(fields["tenant"]), str(fields["name"]), str(fields["text"]))
        if file.stem == document.id and fields["digest"] == _digest(document):
            return document
        why = "is not the text that was written"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError):
        why = "is not a document"
    _log.warning("%s %s; ignoring it", file, why)
    return None


State = Literal["waiting", "reading", "ready", "failed"]
"""``waiting``: queued, or not read until a question is asked. ``ready``: all pages were in the store."""


class NotErasedError(Exception):
    """Pages of a document could not be erased from the disk, so a restart could bring them back."""


class Reading:
    """Tokens of a document and state of its reading. The engine calls ``tell``; the rest is thread-safe."""

    def __init__(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> None:
        self.tokens = array("I", tokens)  # 4 bytes per token, where a list takes 36
        self.keys = keys
        self.state: State = "waiting"
        self.read = 0
        self.why: str | None = None
        self._ticket: Ticket | None = None
        self._ended: Future[None] | None = None

    @property
    def under_way(self) -> bool:
        """Return whether the engine is reading the document, or has queued it."""
        return self._ended is not None and not self._ended.done()

    def begin(self, engine: Engine, salt: bytes) -> None:
        """Submit the document to the engine. Raises what ``submit`` raises, and then changes nothing."""
        self._ended = Future()
        try:
            self._ticket = engine.submit(Ask(prompt=tuple(self.tokens), max_tokens=0, salt=salt), self.tell)
        except BaseException:
            self._end()  # a caller may be waiting for it already
            raise

    def tell(self, event: Event) -> None:
        """Receive an event of the engine."""
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
        """Note that all of the document is in the store, for example because a question had it read."""
        self.state, self.read, self.why = "ready", len(self.tokens), None

    def cancel(self) -> None:
        """Stop reading. When this returns, no page of it is being put into the store any more. Idempotent."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket.wait()
        self._end()

    async def ended(self) -> None:
        """Wait until the engine has read it, has failed or was stopped. Returns at once if it has not begun."""
        if self._ended is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    def _end(self) -> None:
        if self._ended is not None:
            with suppress(InvalidStateError):  # the engine's thread and a caller that cancels may race here
                self._ended.set_result(None)


class Question(Protocol):
    """A question about a document that the engine is answering."""

    def withdraw(self) -> None:
        """Make the question end with an error soon."""

    def wait(self) -> None:
        """Wait until no page of it is being put into the store any more."""


class Readings:
    """The documents of a library and the state of their reading. Thread-safe; most calls may take seconds."""

    def __init__(self, library: Library, reader: Reader, engine: Engine, store: TierStore) -> None:
        self._library, self._reader, self._engine, self._store = library, reader, engine, store
        # Serializes adding and removing documents. Methods that only look up read the dict without it.
        self._changing = Lock()
        self._known: dict[tuple[str, str], Reading] = {}
        self._questions: dict[tuple[str, str], WeakSet[Question]] = {}
        self._asking = Lock()  # guards the questions
        self._closing = Flag()

    def add(self, tenant: str, name: str, text: str) -> tuple[Document, Reading]:
        """Store a document and have the engine read it, unless it is stored and its pages are in the store.

        Raises what ``submit`` raises, and OSError if it cannot be stored; then nothing changes.
        """
        document = Document(tenant, name, text)
        reading = self.of(document)
        with self._changing:
            # Another thread may have added it meanwhile.
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
        """Return the reading of a document.

        The first call after a restart tokenizes the text, about a second per megabyte.
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
        """Return the reading of a document, or None if its text has not been tokenized."""
        return self._known.get((document.tenant, document.id))

    def look(self, reading: Reading) -> int:
        """Return how many leading pages of the document the store has now.

        If all pages are there, the reading becomes ready: a question may have had the document read.
        """
        stored = self._store.match(reading.keys).num_pages
        if stored == len(reading.keys) and not reading.under_way:
            reading.is_ready()
        return stored

    def remove(self, document: Document) -> None:
        """Remove a document and evict its pages, except those shared with the tenant's other documents.

        Returns once no restart can bring the pages back.

        Raises:
            NotErasedError: A restart might bring pages back; the document stays.
            OSError: The file cannot be removed; the document stays.
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
                        f"{pending} of its pages cannot be erased from the disk, which refuses writes or hangs; "
                        "the store keeps trying: delete the document again later"
                    )

    def asked(self, document: Document, reading: Reading, question: Question) -> None:
        """Register a question that the engine took, so that it ends if the document is or was removed."""
        with self._asking:
            self._questions.setdefault((document.tenant, document.id), WeakSet()).add(question)
        if self._library.get(document.tenant, document.id) is None:
            with self._changing:
                if self._library.get(document.tenant, document.id) is None:  # otherwise it was added again
                    self._evict(document, reading)

    def _evict(self, document: Document, reading: Reading) -> None:
        """Evict the pages of a removed document, after the engine has stopped computing them."""
        with self._asking:
            questions = list(self._questions.pop((document.tenant, document.id), ()))
        for question in questions:
            question.withdraw()
        for question in questions:
            question.wait()
        shared = {key for other in self._library.all(document.tenant) for key in self.of(other).keys}
        self._store.evict([key for key in reading.keys if key not in shared])

    def recall(self) -> None:
        """Find out which pages of every document the store has after a restart.

        Runs in a thread of its own and ends at ``close``.
        """
        with suppress(StoreClosed):
            for document in self._library.all():
                if self._closing.is_set():
                    return
                self.of(document)

    def close(self) -> None:
        """End ``recall``."""
        self._closing.set()
