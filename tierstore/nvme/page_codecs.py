"""Conversion of pages to the payloads of records and back.

Host memory contains pages unchanged or encoded (``host.codec``). Pages that are encoded in memory are written to
disk as they are, or with their codes (the quantized values) compressed. Encoders and decoders are not thread-safe,
so each thread creates its own.
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
from tierstore.types import exact_size

Bytes = NDArray[np.uint8]


class UnfitError(IntegrityError):
    """The page is intact, but the codec of host memory cannot represent it."""


def allowed_over(held: str) -> tuple[str, ...]:
    """Return the allowed values of nvme.codec if pages in memory are encoded with ``held``.

    "none" writes pages as they are in memory.
    """
    return tuple(name for name in ("none", held, f"{held}+zstd") if name == "none" or name in LOSSY)


@dataclass(frozen=True, slots=True)
class Coding:
    """How pages are encoded when they are written to disk.

    Attributes:
        name: Codec with which pages are written; "none" writes them as they are in memory.
        layout: Layout of the pages. If None, pages are not encoded, and encoded pages cannot be read.
        held: Codec with which the pages in memory are already encoded.
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
                f"codec must be one of {allowed} if host.codec is {self.held!r}, got {self.name!r}"
            )

    @property
    def form(self) -> HostFormat | None:
        """Format of encoded pages in memory, or None if pages in memory are not encoded."""
        return None if self.held == "none" or self.layout is None else HostFormat.of(self.held, self.layout)

    @property
    def on_disk(self) -> str:
        """Codec of the records, except of pages for which its encoder returns None.

        These pages are stored as they are in memory. See ``PageEncoder.encode``.
        """
        return self.held if self.name == "none" else self.name

    @property
    def changes(self) -> bool:
        """Whether pages in memory get another encoding when they are written to disk."""
        return self.name not in ("none", self.held)

    @property
    def plain(self) -> Codec:
        """Codec in the head of a record whose payload is the page exactly as it is in memory."""
        return CODECS[self.held]

    def raw_nbytes(self, payload: Bytes) -> int:
        """Return the unencoded length, in bytes, of the page that ``payload`` contains."""
        return payload.nbytes if self.held == "none" or self.layout is None else self.layout.blob_nbytes

    def encoder(self) -> PageEncoder | None:
        """Create an encoder of pages in memory, for one thread. Return None if pages are stored unchanged."""
        if self.layout is None or not self.changes:
            return None
        if self.held == "none":
            return codecs.encoder(self.name, self.layout)
        return CodeCompressor(LOSSY[self.name], self.layout)

    def decoders(self) -> Decoders:
        """Create the decoders for one thread."""
        return Decoders(self.layout, self.form)


class Decoders:
    """The decoders of one thread, which convert records to pages in the format of host memory.

    Not thread-safe. Each decoder is created on first use.
    """

    def __init__(self, layout: PageLayout | None, form: HostFormat | None = None) -> None:
        self._layout = layout
        self._form = form
        self._plain = Codec.NONE if form is None else CODECS[form.codec]
        self._made: dict[Codec, PageDecoder | None] = {}
        self._spreader: CodeExpander | None = None
        self._packer: Packer | None = None

    def of(self, codec: Codec) -> PageDecoder | None:
        """Return the decoder of ``codec``, or None if pages need no decoding or their layout is unknown."""
        if self._layout is None or codec is Codec.NONE:
            return None
        if codec not in self._made:
            self._made[codec] = codecs.decoder(NAMES[codec], self._layout)
        return self._made[codec]

    def fill(self, head: Head, payload: Bytes, out: Bytes) -> None:
        """Fill ``out`` from the payload of a verified record.

        ``out`` is a page or, if host memory contains encoded pages, the view of a slot. A payload in the format of
        host memory must already be at the start of ``out``. If an exception is raised, the content of ``out`` is
        undefined.

        Raises:
            IntegrityError: The payload is not a page of this length, or its codec has no decoder.
            UnfitError: The codec of host memory cannot represent the page.
        """
        there = np.may_share_memory(payload, out)
        if head.codec is self._plain:
            self._require_length(head, out)
            assert there, "a payload in the format of host memory must already be in out"
        elif self._form is None:
            record_format.decode(head, payload.copy() if there else payload, out, self.of(head.codec))
        else:
            self._repack(self._form, head, payload.copy() if there else payload, out)

    def _require_length(self, head: Head, out: Bytes) -> None:
        wanted = out.nbytes if self._form is None else self._form.layout.blob_nbytes
        stored = out.nbytes if self._form is None else self._form.payload_nbytes
        if (head.raw_nbytes, head.stored_nbytes) != (wanted, stored):
            raise IntegrityError(
                f"the record holds a page of {exact_size(head.raw_nbytes)} stored in {exact_size(head.stored_nbytes)}, "
                f"expected {exact_size(wanted)} stored in {exact_size(stored)}"
            )

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
            raise UnfitError(
                f"the codec of host memory ({form.codec!r}) cannot represent some values of the page"
            )
