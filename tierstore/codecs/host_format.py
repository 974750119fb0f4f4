"""How host memory holds pages: unchanged, or as payloads of a codec that gives all of them one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore import codecs
from tierstore.page import ALIGNMENT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.page import PageLayout

    Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostFormat:
    """The form of pages of ``layout`` in a slot, of which ``payload_nbytes`` are used. Make it with ``of``."""

    codec: str
    layout: PageLayout
    payload_nbytes: int

    @classmethod
    def of(cls, codec: str, layout: PageLayout) -> HostFormat:
        """Return the form of pages that ``codec`` gives.

        Raises:
            ValueError: The codec gives payloads of different lengths, or pages that it does not make shorter.
        """
        nbytes = codecs.fixed_nbytes(codec, layout)
        if nbytes is not None:
            return cls(codec, layout, nbytes)
        dtypes = ", ".join(sorted({spec.dtype for spec in layout.specs}))
        raise ValueError(
            f"codec must be 'none' or encode every page of {dtypes} to one length shorter than the page, got {codec!r}"
        )

    @property
    def encoded(self) -> bool:
        """Whether pages are held in an encoded form."""
        return self.codec != "none"

    @property
    def page_nbytes(self) -> int:
        """Bytes of a tier's capacity that a page takes: its own length, or that of its payload."""
        return self.payload_nbytes if self.encoded else self.layout.page_nbytes

    @property
    def view_nbytes(self) -> int:
        """Bytes of a slot's view: the page, or the payload and the rest of its last block.

        A disk can read directly into it.
        """
        return self.slot_nbytes if self.encoded else self.payload_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Distance between slots in bytes."""
        return -(-self.payload_nbytes // ALIGNMENT) * ALIGNMENT


class Packer:
    """Encodes pages into slots. For one thread."""

    def __init__(self, held: HostFormat) -> None:
        self._encoder = codecs.encoder(held.codec, held.layout)
        # Zeros: what lies between KV groups is packed too, and nobody may write it.
        self.page = np.zeros(held.layout.blob_nbytes, dtype=np.uint8)
        """Where a page may be put before it is packed."""

    def pack(self, page: Bytes, slot: Bytes) -> bool:
        """Fill ``slot`` (a view of ``view_nbytes``) with the payload of ``page`` (flat uint8, not changed).

        Returns False if the codec cannot represent one of its numbers; the content of ``slot`` is then undefined.
        """
        assert self._encoder is not None
        length = self._encoder.encode(page, slot)
        if length is None:
            return False
        slot[length:] = 0
        return True


class Unpacker:
    """Decodes slots into pages. For one thread."""

    def __init__(self, held: HostFormat) -> None:
        self._held = held
        self._decoder = codecs.decoder(held.codec, held.layout)
        self.page = np.empty(held.layout.blob_nbytes, dtype=np.uint8)
        """Where a page may be put when it is unpacked."""

    def unpack(self, slot: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``slot``. IntegrityError if ``pack`` cannot have made it."""
        assert self._decoder is not None
        self._decoder.decode(slot[: self._held.payload_nbytes], page)
