"""The texts of documents, by tenant, and their way into the store.

Texts are kept in memory, and in a folder if they are to survive a restart. The model reads each document once; after
a restart its pages are found in the store again.
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


State = Literal["waiting", "reading", "ready", "failed"]
"""``waiting``: for its turn, or for somebody who asks; ``ready``: all of it was in the store."""


class NotErasedError(Exception):
    """A document's pages could not be erased from the disk: a restart could bring them back."""


class Reading:
    """How far one document is. ``tell`` is the engine's; the rest may be asked from any thread."""

    def __init__(self, tokens: Sequence[int], keys: Sequence[PageKey]) -> None:
        self.tokens = array("I", tokens)  # 4 bytes a token: a list has 36
        self.keys = keys
        self.state: State = "waiting"
        self.read = 0
        self.why: str | None = None
        self._ticket: Ticket | None = None
        self._ended: Future[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether the engine has it, waiting or reading."""
        return self._ended is not None and not self._ended.done()

    def begin(self, engine: Engine, salt: bytes) -> None:
        """Have the engine read it. Raises what ``submit`` raises, and nothing is changed."""
        self._ended = Future()
        try:
            self._ticket = engine.submit(Ask(prompt=tuple(self.tokens), max_tokens=0, salt=salt), self.tell)
        except BaseException:
            self._end()  # somebody may wait for it already
            raise

    def tell(self, event: Event) -> None:
        """What the engine tells."""
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
        """All of it is in the store, whoever read it."""
        self.state, self.read, self.why = "ready", len(self.tokens), None

    def cancel(self) -> None:
        """It is read no further, and once this returns no page of it is on its way into the store. Idempotent."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket.wait()
        self._end()

    async def ended(self) -> None:
        """Waits until the engine is through with it, however that went; at once if it has it not."""
        if self._ended is not None:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    def _end(self) -> None:
        if self._ended is not None:
            with suppress(InvalidStateError):  # the engine's thread and whoever cancels may meet here
                self._ended.set_result(None)


class Question(Protocol):
    """One about a document, on its way through the engine."""

    def withdraw(self) -> None:
        """It ends with an error, soon."""

    def wait(self) -> None:
        """Until no page of it is on its way into the store."""


class Readings:
    """The documents of a library with what is known of their reading. Any thread; most calls may take seconds."""

    def __init__(self, library: Library, reader: Reader, engine: Engine, store: TierStore) -> None:
        self._library, self._reader, self._engine, self._store = library, reader, engine, store
        # One document comes or goes at a time; what is known is a dict, taken as it is.
        self._changing = Lock()
        self._known: dict[tuple[str, str], Reading] = {}
        self._questions: dict[tuple[str, str], WeakSet[Question]] = {}
        self._asking = Lock()  # over the questions
        self._closing = Flag()

    def add(self, tenant: str, name: str, text: str) -> tuple[Document, Reading]:
        """Keep a document and have it read, unless it is and its pages are there.

        Raises what ``submit`` raises, and OSError if it cannot be kept; then nothing is.
        """
        document = Document(tenant, name, text)
        reading = self.of(document)
        with self._changing:
            # Somebody may have added it meanwhile.
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
        """Of a document. The first time after a restart its text is taken apart again: a second a megabyte or so."""
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
        """Of a document, if that is known without work."""
        return self._known.get((document.tenant, document.id))

    def look(self, reading: Reading) -> int:
        """Pages of it that the store has now, from the first on. With all of them it is ready: a question may have had
        it read too."""
        stored = self._store.match(reading.keys).num_pages
        if stored == len(reading.keys) and not reading.under_way:
            reading.is_ready()
        return stored

    def remove(self, document: Document) -> None:
        """Forget a document, and evict its pages but those that another one of its tenant begins with.

        Returns when no restart brings its pages back. NotErasedError if one may, OSError if the document's file cannot
        be removed; then the document stays.
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
                        "the store goes on trying: delete the document again later"
                    )

    def asked(self, document: Document, reading: Reading, question: Question) -> None:
        """Once the engine has taken a question: it ends with its document, however the two meet."""
        with self._asking:
            self._questions.setdefault((document.tenant, document.id), WeakSet()).add(question)
        if self._library.get(document.tenant, document.id) is None:
            with self._changing:
                if self._library.get(document.tenant, document.id) is None:  # else it is back
                    self._evict(document, reading)

    def _evict(self, document: Document, reading: Reading) -> None:
        """The pages of a document that is gone, once nobody computes them any more."""
        with self._asking:
            questions = list(self._questions.pop((document.tenant, document.id), ()))
        for question in questions:
            question.withdraw()
        for question in questions:
            question.wait()
        shared = {key for other in self._library.all(document.tenant) for key in self.of(other).keys}
        self._store.evict([key for key in reading.keys if key not in shared])

    def recall(self) -> None:
        """After a restart: find what of every document is in the store. Takes a thread; ends at ``close``."""
        with suppress(StoreClosed):
            for document in self._library.all():
                if self._closing.is_set():
                    return
                self.of(document)

    def close(self) -> None:
        """Ends ``recall``."""
        self._closing.set()
