"""Documents on their way into the store: read once by the model, and found there again after a restart."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Event as Flag
from threading import Lock
from typing import Literal, Protocol
from weakref import WeakSet

from tierstore.errors import StoreClosed
from tierstore.serve.engine import Engine, Ticket
from tierstore.serve.library import Document, Library
from tierstore.serve.model import Reader
from tierstore.serve.request import Ask, BusyError, Done, Event, Failed, Read, RefusedError
from tierstore.store import TierStore
from tierstore.types import PageKey

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
