"""Codecs for pages of floats: the lossless ``exp``, lossy ones of stated bounds, and one way to make each by its name.

``fp8``, ``int8``, ``k8v4``, ``int4`` and ``int4-64`` give payloads whose length follows from the layout alone; with
``+zstd`` their codes are compressed, and the length depends on the numbers. ``lossy.LOSSY`` says what each does and
promises, docs/codecs.md how a payload is laid out. NumPy and zstandard only: no device, no disk, no thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tierstore.codecs import exp, lossy
from tierstore.codecs.lossy import LOSS_CLASSES, LOSSY, PayloadLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.page import PageLayout

__all__ = [
    "LOSSY",
    "LOSS_CLASSES",
    "PageDecoder",
    "PageEncoder",
    "decoder",
    "encoder",
    "fixed_nbytes",
    "saves",
]


class PageEncoder(Protocol):
    """One thread's maker of payloads; see ``exp.Encoder`` and ``lossy.Encoder``."""

    @property
    def name(self) -> str:
        """The codec's."""
        ...

    def encode(self, page: NDArray[np.uint8], out: NDArray[np.uint8]) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length; None where the page is to be kept raw."""
        ...


class PageDecoder(Protocol):
    """One thread's reader of payloads; see ``exp.Decoder`` and ``lossy.Decoder``."""

    @property
    def name(self) -> str:
        """The codec's."""
        ...

    def decode(self, payload: NDArray[np.uint8], page: NDArray[np.uint8]) -> None:
        """Fill ``page`` from ``payload``; IntegrityError for what no encoder of this codec and layout makes."""
        ...


def encoder(name: str, layout: PageLayout) -> PageEncoder | None:
    """An encoder of pages of ``layout`` for one thread; None for "none". ValueError for a name that is no codec's."""
    if _known(name) == "none":
        return None
    return exp.Encoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Encoder(LOSSY[name], layout)


def decoder(name: str, layout: PageLayout) -> PageDecoder | None:
    """A decoder of pages of ``layout`` for one thread; None for "none". ValueError for a name that is no codec's."""
    if _known(name) == "none":
        return None
    return exp.Decoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Decoder(LOSSY[name], layout)


def saves(name: str, layout: PageLayout) -> bool:
    """Whether pages of ``layout`` can be smaller with a codec: ``exp`` is for 16 bits, the lossy ones for floats.

    ValueError for a name that is no codec's.
    """
    if _known(name) == "none":
        return False
    return bool(
        exp.Geometry.of(layout).groups if name == "exp" else PayloadLayout.of(layout, LOSSY[name]).planes
    )


def fixed_nbytes(name: str, layout: PageLayout) -> int | None:
    """Length of every payload of a page of ``layout``; None where it depends on the numbers, or no page is encoded.

    ValueError for a name that is no codec's.
    """
    if _known(name) == "none":
        return layout.blob_nbytes
    return None if name == "exp" else lossy.fixed_nbytes(LOSSY[name], layout)


def _known(name: str) -> str:
    if name not in LOSS_CLASSES:
        raise ValueError(f"codec must be one of {', '.join(LOSS_CLASSES)}, got {name!r}")
    return name
