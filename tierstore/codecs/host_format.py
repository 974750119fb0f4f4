"""The format of pages in host memory: unchanged, or encoded by a codec with payloads of fixed length."""

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
    """The format in which slots of host memory store pages of ``layout``. Create it with ``of``.

    A page uses the first ``payload_nbytes`` bytes of its slot.
    """

    codec: str
    layout: PageLayout
    payload_nbytes: int

    @classmethod
    def of(cls, codec: str, layout: PageLayout) -> HostFormat:
        """Return the format of pages that are encoded with ``codec``.

        Raises:
            ValueError: The payloads of the codec vary in length or are not shorter than the pages.
        """
        nbytes = codecs.fixed_nbytes(codec, layout)
        if nbytes is not None:
            return cls(codec, layout, nbytes)
        dtypes = ", ".join(sorted({spec.dtype for spec in layout.specs}))
        raise ValueError(
            f"codec must be 'none' or encode pages of {dtypes} to a fixed length shorter than the page, got {codec!r}"
        )

    @property
    def encoded(self) -> bool:
        """Whether pages in host memory are encoded."""
        return self.codec != "none"

    @property
    def page_nbytes(self) -> int:
        """Number of bytes of host memory's capacity that a page takes: the size of its payload if pages are encoded."""
        return self.payload_nbytes if self.encoded else self.layout.page_nbytes

    @property
    def view_nbytes(self) -> int:
        """Size of a slot's view in bytes.

        For encoded pages it is rounded up to whole blocks, so that a disk can read directly into the view.
        """
        return self.slot_nbytes if self.encoded else self.payload_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Distance in bytes between the starts of adjacent slots."""
        return -(-self.payload_nbytes // ALIGNMENT) * ALIGNMENT


class Packer:
    """Encodes pages into slots of host memory. Not thread-safe."""

    def __init__(self, held: HostFormat) -> None:
        self._encoder = codecs.encoder(held.codec, held.layout)
        # Zeroed, because the bytes between KV groups are encoded too, although nothing may have written them.
        self.page = np.zeros(held.layout.blob_nbytes, dtype=np.uint8)
        """Scratch memory that the caller may fill with a page and pass to ``pack``."""

    def pack(self, page: Bytes, slot: Bytes) -> bool:
        """Fill ``slot`` with the payload of ``page``, followed by zeros.

        Return False if the codec cannot represent one of the page's elements.

        Args:
            page: Flat uint8. It is not changed.
            slot: Flat uint8 ``[view_nbytes]``. Its content is undefined if False is returned.
        """
        assert self._encoder is not None
        length = self._encoder.encode(page, slot)
        if length is None:
            return False
        slot[length:] = 0
        return True


class Unpacker:
    """Decodes slots of host memory into pages. Not thread-safe."""

    def __init__(self, held: HostFormat) -> None:
        self._held = held
        self._decoder = codecs.decoder(held.codec, held.layout)
        self.page = np.empty(held.layout.blob_nbytes, dtype=np.uint8)
        """Scratch memory that the caller may pass to ``unpack``, to be filled with a page."""

    def unpack(self, slot: Bytes, page: Bytes) -> None:
        """Fill ``page`` from ``slot``. Raises IntegrityError if ``pack`` cannot have written the slot."""
        assert self._decoder is not None
        self._decoder.decode(slot[: self._held.payload_nbytes], page)
