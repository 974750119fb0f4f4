"""How pages are encoded from now on, and what decodes those that are on disk.

Encoders and decoders serve one thread: whoever has a thread makes its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore import codecs
from tierstore.codec import NAMES, Codec
from tierstore.codecs import PageDecoder, PageEncoder
from tierstore.layout import PageLayout


@dataclass(frozen=True, slots=True)
class Coding:
    """``name``: of the codec that pages are written with. ``layout``: of the pages, without which none is encoded, and
    no encoded one can be read.
    """

    name: str = "none"
    layout: PageLayout | None = None

    def __post_init__(self) -> None:
        if self.name != "none" and self.layout is None:
            raise ValueError(f"codec is {self.name!r}; allowed with the layout of the pages")

    def encoder(self) -> PageEncoder | None:
        """For one thread; None: pages are stored as they are."""
        return None if self.layout is None else codecs.encoder(self.name, self.layout)

    def decoders(self) -> Decoders:
        """For one thread."""
        return Decoders(self.layout)


class Decoders:
    """The decoders of one thread, each made when a record first needs it."""

    def __init__(self, layout: PageLayout | None) -> None:
        self._layout = layout
        self._made: dict[Codec, PageDecoder | None] = {}

    def of(self, codec: Codec) -> PageDecoder | None:
        """What decodes payloads of ``codec``; None where nobody knows the pages' layout."""
        if self._layout is None or codec is Codec.NONE:
            return None
        if codec not in self._made:
            self._made[codec] = codecs.decoder(NAMES[codec], self._layout)
        return self._made[codec]
