"""The codecs by name, as plain data: how keys and values are stepped, what is promised, and the loss class.

A loss class is part of the key namespace: pages of one class may stand for each other, pages of two never do. Codecs
that give back the same numbers are of one class: zstandard over codes loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tierstore.codecs.quantization import Fp8, Steps
from tierstore.keys import EXACT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tierstore.codecs.quantization import Bound, Shape


class Scheme(Protocol):
    """How one layer's keys or values become codes and scales; the room's own, see ``Steps`` and ``Fp8``."""

    @property
    def bound(self) -> Bound: ...
    @property
    def floored(self) -> bool: ...
    @property
    def most(self) -> float: ...
    def largest_scale(self, dtype: str) -> int: ...
    def members(self, shape: Shape) -> int: ...
    def sides(self, shape: Shape) -> tuple[int, int]: ...
    def code_nbytes(self, shape: Shape) -> int: ...
    def encode(
        self,
        numbers: NDArray[np.float32],
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
        spare: NDArray[np.float32],
    ) -> None: ...
    def decode(
        self,
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
        numbers: NDArray[np.float32],
        spare: NDArray[np.float32],
    ) -> None: ...
    def check(
        self,
        shape: Shape,
        dtype: str,
        scales: NDArray[np.uint16],
        floors: NDArray[np.float32],
        codes: NDArray[np.uint8],
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Lossy:
    """A lossy codec. ``keys`` is also for what has one plane, such as MLA's latent.

    ``zstd``: the codes are compressed, so a payload's length depends on the numbers; without it on the layout alone.
    """

    name: str
    loss_class: str
    keys: Scheme
    values: Scheme
    zstd: bool = False


_INT8 = Steps(8, "token", 64, signed=True)

LOSSY = {
    codec.name: codec
    for codec in (
        Lossy("fp8", "fp8", Fp8(), Fp8()),
        Lossy("fp8+zstd", "fp8", Fp8(), Fp8(), zstd=True),
        Lossy("int8", "int8", _INT8, _INT8),
        Lossy("int8+zstd", "int8", _INT8, _INT8, zstd=True),
        Lossy("k8v4", "k8v4", Steps(8, "channel", 64), Steps(4, "token", 32)),
        Lossy("int4", "int4", Steps(4, "channel", 32), Steps(4, "token", 32)),
        Lossy("int4-64", "int4-64", Steps(4, "channel", 64), Steps(4, "token", 64)),
    )
}
"""The lossy codecs by name."""

LOSS_CLASSES = {"none": EXACT, "exp": EXACT} | {name: codec.loss_class for name, codec in LOSSY.items()}
"""The loss class of every codec by its name."""
