"""Codecs for pages of floats: the lossless ``exp`` and lossy ones with stated error bounds, by name.

``fp8``, ``int8``, ``k8v4``, ``int4`` and ``int4-64`` make payloads whose length follows from the layout alone; with
``+zstd`` their codes are compressed, and the length depends on the numbers. ``lossy.LOSSY`` describes each codec,
docs/codecs.md the layout of a payload. NumPy and zstandard only: no device, disk or thread.
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
    """Makes payloads, for one thread. See ``exp.Encoder`` and ``lossy.Encoder``."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        ...

    def encode(self, page: NDArray[np.uint8], out: NDArray[np.uint8]) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length; None if the page should be kept raw."""
        ...


class PageDecoder(Protocol):
    """Decodes payloads, for one thread. See ``exp.Decoder`` and ``lossy.Decoder``."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        ...

    def decode(self, payload: NDArray[np.uint8], page: NDArray[np.uint8]) -> None:
        """Fill ``page`` from ``payload``. IntegrityError if no encoder of this codec and layout can have made it."""
        ...


def encoder(name: str, layout: PageLayout) -> PageEncoder | None:
    """Make an encoder of pages of ``layout`` for one thread; None for "none". ValueError for an unknown name."""
    if _known(name) == "none":
        return None
    return exp.Encoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Encoder(LOSSY[name], layout)


def decoder(name: str, layout: PageLayout) -> PageDecoder | None:
    """Make a decoder of pages of ``layout`` for one thread; None for "none". ValueError for an unknown name."""
    if _known(name) == "none":
        return None
    return exp.Decoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Decoder(LOSSY[name], layout)


def saves(name: str, layout: PageLayout) -> bool:
    """Return whether a codec can make pages of ``layout`` smaller: ``exp`` needs 16-bit dtypes, lossy codecs floats.

    Raises:
        ValueError: The name is unknown.
    """
    if _known(name) == "none":
        return False
    return bool(
        exp.Geometry.of(layout).groups if name == "exp" else PayloadLayout.of(layout, LOSSY[name]).planes
    )


def fixed_nbytes(name: str, layout: PageLayout) -> int | None:
    """Return the length of every payload of a page of ``layout``; None if it varies or no page is encoded.

    Raises:
        ValueError: The name is unknown.
    """
    if _known(name) == "none":
        return layout.blob_nbytes
    return None if name == "exp" else lossy.fixed_nbytes(LOSSY[name], layout)


def _known(name: str) -> str:
    if name not in LOSS_CLASSES:
        raise ValueError(f"codec must be one of {', '.join(LOSS_CLASSES)}, got {name!r}")
    return name
