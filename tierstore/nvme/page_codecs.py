"""How pages become payloads of records and payloads become pages again.

Memory holds pages as they are, or encoded (``host.codec``); what is encoded there goes to disk as it is, or with its
codes compressed as well. Encoders and decoders serve one thread: whoever has a thread makes its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierstore import codecs
from tierstore.codecs import LOSSY, PageDecoder, PageEncoder
from tierstore.codecs.host_format import HostFormat, Packer
from tierstore.codecs.lossy import CodeCompressor, CodeExpander
from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.record_format import CODECS, NAMES, Codec, Head
from tierstore.page import PageLayout

Bytes = NDArray[np.uint8]


class UnfitError(IntegrityError):
    """The page is what was written, and memory cannot hold it in its form."""


def allowed_over(held: str) -> tuple[str, ...]:
    """The codecs that pages held so may be written with."""
    return tuple(name for name in ("none", held, f"{held}+zstd") if name == "none" or name in LOSSY)


@dataclass(frozen=True, slots=True)
class Coding:
    """``name``: of the codec that pages are written with. ``layout``: of the pages, without which none is encoded, and
    no encoded one can be read. ``held``: the codec that pages are encoded with in memory already.
    """

    name: str = "none"
    layout: PageLayout | None = None
    held: str = "none"

    def __post_init__(self) -> None:
        if self.layout is None and (self.name, self.held) != ("none", "none"):
            raise ValueError(f"codec {self.name!r} needs the layout of the pages, got layout=None")
        if self.held != "none" and self.name not in allowed_over(self.held):
            allowed = ", ".join(allowed_over(self.held))
            raise ValueError(
                f"codec must be one of {allowed} over pages held as {self.held!r}, got {self.name!r}"
            )

    @property
    def form(self) -> HostFormat | None:
        """How memory holds a page; None: as it is."""
        return None if self.held == "none" or self.layout is None else HostFormat.of(self.held, self.layout)

    @property
    def on_disk(self) -> str:
        """The codec that records are of, but for pages that it does not make smaller."""
        return self.held if self.name == "none" else self.name

    @property
    def changes(self) -> bool:
        """Whether a record's payload is another than what memory holds."""
        return self.name not in ("none", self.held)

    @property
    def plain(self) -> Codec:
        """What a record says whose payload is the page as memory holds it."""
        return CODECS[self.held]

    def raw_nbytes(self, payload: Bytes) -> int:
        """Length of the page that memory holds as ``payload``."""
        return payload.nbytes if self.held == "none" or self.layout is None else self.layout.blob_nbytes

    def encoder(self) -> PageEncoder | None:
        """For one thread, of pages as memory holds them; None: they are stored so."""
        if self.layout is None or not self.changes:
            return None
        if self.held == "none":
            return codecs.encoder(self.name, self.layout)
        return CodeCompressor(LOSSY[self.name], self.layout)

    def decoders(self) -> Decoders:
        """For one thread."""
        return Decoders(self.layout, self.form)


class Decoders:
    """What turns records into pages as memory holds them, for one thread; each part is made when it is first needed."""

    def __init__(self, layout: PageLayout | None, form: HostFormat | None = None) -> None:
        self._layout = layout
        self._form = form
        self._plain = Codec.NONE if form is None else CODECS[form.codec]
        self._made: dict[Codec, PageDecoder | None] = {}
        self._spreader: CodeExpander | None = None
        self._packer: Packer | None = None

    def of(self, codec: Codec) -> PageDecoder | None:
        """What decodes payloads of ``codec``; None where nobody knows the pages' layout."""
        if self._layout is None or codec is Codec.NONE:
            return None
        if codec not in self._made:
            self._made[codec] = codecs.decoder(NAMES[codec], self._layout)
        return self._made[codec]

    def fill(self, head: Head, payload: Bytes, out: Bytes) -> None:
        """Fill ``out``, a page or a slot's view, from the payload of a record that was verified.

        A payload that is as memory holds it is the beginning of ``out`` already. IntegrityError if it is no page of
        this length, or there is no decoder of its codec; UnfitError if memory cannot hold it. ``out`` may
        hold anything then.
        """
        there = np.may_share_memory(payload, out)
        if head.codec is self._plain:
            self._require_length(head, out)
            assert there, "what memory holds is read to where it is held"
        elif self._form is None:
            record_format.decode(head, payload.copy() if there else payload, out, self.of(head.codec))
        else:
            self._repack(self._form, head, payload.copy() if there else payload, out)

    def _require_length(self, head: Head, out: Bytes) -> None:
        wanted = out.nbytes if self._form is None else self._form.layout.blob_nbytes
        stored = out.nbytes if self._form is None else self._form.payload_nbytes
        if (head.raw_nbytes, head.stored_nbytes) != (wanted, stored):
            raise IntegrityError(f"record of a page of {head.raw_nbytes} bytes, not {wanted}")

    def _repack(self, form: HostFormat, head: Head, payload: Bytes, slot: Bytes) -> None:
        squeezed = f"{form.codec}+zstd"
        if head.raw_nbytes == form.layout.blob_nbytes and NAMES[head.codec] == squeezed:
            self._spreader = self._spreader or CodeExpander(LOSSY[squeezed], form.layout)
            self._spreader.decode(payload, slot)
            return
        self._packer = self._packer or Packer(form)
        page = self._packer.page
        record_format.decode(head, payload, page, self.of(head.codec))
        if not self._packer.pack(page, slot):
            raise UnfitError(f"numbers that {form.codec!r}, the codec of host memory, cannot state")
