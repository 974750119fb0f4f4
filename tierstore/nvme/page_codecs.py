"""How pages become payloads of records, and payloads become pages again.

Memory holds pages unchanged or encoded (``host.codec``). Encoded pages go to disk as they are, or with their codes
compressed. An encoder or decoder serves one thread; each thread makes its own.
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
    """The page is intact, but memory cannot hold it in its form."""


def allowed_over(held: str) -> tuple[str, ...]:
    """Return the codecs that pages encoded as ``held`` may be written with."""
    return tuple(name for name in ("none", held, f"{held}+zstd") if name == "none" or name in LOSSY)


@dataclass(frozen=True, slots=True)
class Coding:
    """How pages are encoded on their way to disk.

    Attributes:
        name: Codec that pages are written with.
        layout: Layout of the pages. Without it no page is encoded, and no encoded page can be read.
        held: Codec that pages in memory are encoded with already.
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
        """How memory holds a page; None: unchanged."""
        return None if self.held == "none" or self.layout is None else HostFormat.of(self.held, self.layout)

    @property
    def on_disk(self) -> str:
        """The codec of the records, except for pages that it does not make smaller."""
        return self.held if self.name == "none" else self.name

    @property
    def changes(self) -> bool:
        """Whether a record's payload differs from what memory holds."""
        return self.name not in ("none", self.held)

    @property
    def plain(self) -> Codec:
        """The codec in a record's head if its payload is the page as memory holds it."""
        return CODECS[self.held]

    def raw_nbytes(self, payload: Bytes) -> int:
        """Return the length of the page that memory holds as ``payload``."""
        return payload.nbytes if self.held == "none" or self.layout is None else self.layout.blob_nbytes

    def encoder(self) -> PageEncoder | None:
        """Make an encoder of pages as memory holds them, for one thread. None if they are stored unchanged."""
        if self.layout is None or not self.changes:
            return None
        if self.held == "none":
            return codecs.encoder(self.name, self.layout)
        return CodeCompressor(LOSSY[self.name], self.layout)

    def decoders(self) -> Decoders:
        """Make the decoders for one thread."""
        return Decoders(self.layout, self.form)


class Decoders:
    """Turns records into pages as memory holds them. For one thread; each decoder is made when first needed."""

    def __init__(self, layout: PageLayout | None, form: HostFormat | None = None) -> None:
        self._layout = layout
        self._form = form
        self._plain = Codec.NONE if form is None else CODECS[form.codec]
        self._made: dict[Codec, PageDecoder | None] = {}
        self._spreader: CodeExpander | None = None
        self._packer: Packer | None = None

    def of(self, codec: Codec) -> PageDecoder | None:
        """Return the decoder of ``codec``; None if the pages' layout is unknown."""
        if self._layout is None or codec is Codec.NONE:
            return None
        if codec not in self._made:
            self._made[codec] = codecs.decoder(NAMES[codec], self._layout)
        return self._made[codec]

    def fill(self, head: Head, payload: Bytes, out: Bytes) -> None:
        """Fill ``out``, a page or a slot's view, from the payload of a verified record.

        A payload in the form that memory holds is already at the beginning of ``out``. If this raises, the content of
        ``out`` is undefined.

        Raises:
            IntegrityError: The payload is not a page of this length, or its codec has no decoder.
            UnfitError: Memory cannot hold the page.
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
            raise IntegrityError(f"the record's page has {head.raw_nbytes} bytes, expected {wanted}")

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
                f"the page has numbers that {form.codec!r}, the codec of host memory, cannot represent"
            )
