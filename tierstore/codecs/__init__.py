"""Codecs for pages of floating-point numbers: the lossless ``exp``, and lossy ones with stated error bounds.

The payloads of ``fp8``, ``int8``, ``k8v4``, ``int4`` and ``int4-64`` have a length that depends only on the
page layout. With ``+zstd``, codes are compressed and the length also depends on the page's contents.
``lossy.LOSSY`` defines each lossy codec; docs/codecs.md describes the layout of a payload. The package depends
only on NumPy and zstandard, and uses no device, disk or thread.
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
    """Encodes pages into payloads. Not thread-safe. See ``exp.Encoder`` and ``lossy.Encoder``."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        ...

    def encode(self, page: NDArray[np.uint8], out: NDArray[np.uint8]) -> int | None:
        """Write the payload of ``page`` into ``out`` and return its length in bytes.

        Return None if the codec cannot encode the page, or if encoding would save too little space.
        """
        ...


class PageDecoder(Protocol):
    """Decodes payloads into pages. Not thread-safe. See ``exp.Decoder`` and ``lossy.Decoder``."""

    @property
    def name(self) -> str:
        """Name of the codec."""
        ...

    def decode(self, payload: NDArray[np.uint8], page: NDArray[np.uint8]) -> None:
        """Fill ``page`` from ``payload``.

        Raises:
            IntegrityError: No encoder of this codec and layout can have written the payload.
        """
        ...


def encoder(name: str, layout: PageLayout) -> PageEncoder | None:
    """Create an encoder for pages of ``layout``. Return None if the codec is "none".

    Raises:
        ValueError: The name is unknown.
    """
    if _known(name) == "none":
        return None
    return exp.Encoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Encoder(LOSSY[name], layout)


def decoder(name: str, layout: PageLayout) -> PageDecoder | None:
    """Create a decoder for pages of ``layout``. Return None if the codec is "none".

    Raises:
        ValueError: The name is unknown.
    """
    if _known(name) == "none":
        return None
    return exp.Decoder(exp.Geometry.of(layout)) if name == "exp" else lossy.Decoder(LOSSY[name], layout)


def saves(name: str, layout: PageLayout) -> bool:
    """Return whether a codec can make pages of ``layout`` smaller.

    ``exp`` needs a 16-bit floating-point dtype, a lossy codec any floating-point dtype.

    Raises:
        ValueError: The name is unknown.
    """
    if _known(name) == "none":
        return False
    return bool(
        exp.Geometry.of(layout).groups if name == "exp" else PayloadLayout.of(layout, LOSSY[name]).planes
    )


def fixed_nbytes(name: str, layout: PageLayout) -> int | None:
    """Return the length in bytes that every payload of pages of ``layout`` has.

    For "none", it is the length of the page. Return None if the length varies, or if the codec does not encode
    pages of this layout.

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
