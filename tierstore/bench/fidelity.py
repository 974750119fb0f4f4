"""Cost and effect of codecs: ratio, rates, numeric error, and the change of next-token distributions.

The first tokens of a text are read, their K and V are encoded and decoded, and the model reads the rest of the text
on them. The distribution of each next token is compared with that over the exact K and V: mean Kullback-Leibler
divergence, and how often the likeliest token is the same. The floor is the effect of bfloat16: the same tokens read
in pieces.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import thread_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tierstore import codecs
from tierstore.page import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from tierstore.bench.model import Reader
    from tierstore.page import PageSpec

    Bytes = NDArray[np.uint8]

PIECE = 256
"""Tokens read at a time for the floor."""

NAMES = tuple(codecs.LOSS_CLASSES)
"""Every codec is measured."""

_MOST_TIMED = 16
_ROUNDS = 5


class Goal(NamedTuple):
    """Least ratio and greatest divergence, in nats or as a multiple of the floor."""

    ratio: float
    kl: float | None = None
    floors: float | None = None

    def most(self, floor: float | None) -> float | None:
        """Return the greatest divergence, given the floor's."""
        return self.kl if self.floors is None or floor is None else self.floors * floor


GOALS = {
    "exp": Goal(1.45, 0.0),
    "fp8": Goal(2.0),
    "fp8+zstd": Goal(2.3),
    "int8+zstd": Goal(2.1, floors=1.2),
    "k8v4": Goal(2.3, 4e-3),
    "int4": Goal(3.2, 1e-2),
}
"""Goals of the codecs on SmolLM2's K and V."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec on all texts together. Rates: MB/s of page bytes per core, by CPU time.

    ``rel_error`` is the norm of the errors divided by the norm of the numbers, for K and V together and for each.
    ``kl`` is a mean in nats over all tokens, ``kl_error`` its standard error over texts (0 with one text). ``kl``,
    ``kl_error`` and ``top1`` are None without a model.
    """

    codec: str
    ratio: float
    encode_mbps: float
    decode_mbps: float
    rel_error: float
    rel_error_k: float
    rel_error_v: float
    kl: float | None
    kl_error: float | None
    top1: float | None

    def plain(self) -> dict[str, object]:
        """Return the row for JSON, ratios with three decimals."""
        return asdict(self) | {"ratio": round(self.ratio, 3)}

    def meets(self, floor: float | None) -> bool:
        """Return whether the codec meets its goal, if it has one. Ratios count with three decimals."""
        goal = GOALS.get(self.codec, Goal(0.0))
        if round(self.ratio, 3) < goal.ratio:
            return False
        if self.kl is None:
            return True
        most = goal.most(floor)
        return most is None or self.kl <= most


class Distance(NamedTuple):
    """Distance of two runs over the same tokens."""

    kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Case:
    """A text that was read: its K and V in pages, the rest of it, and the distributions over that."""

    spec: PageSpec
    pages: list[Bytes]
    after: torch.Tensor
    expected: torch.Tensor


def read(
    reader: Reader, texts: Iterable[str], prefix: int, following: int, page_size: int
) -> Iterator[tuple[Case, Distance]]:
    """Yield each text as a case, with its floor: the same tokens read ``PIECE`` at a time.

    ``prefix`` is rounded down to whole pages. ValueError if a text has fewer tokens.
    """
    from tierstore.bench.codec import paged

    prefix -= prefix % page_size
    for text in texts:
        ids = reader.tokens(text, prefix + following)
        if prefix < 1 or ids.shape[1] < prefix + following:
            raise ValueError(
                f"a text has {ids.shape[1]} tokens, but {prefix + following} and a whole page are needed"
            )
        before, after = ids[:, :prefix], ids[:, prefix:]
        kv = reader.read(before)
        expected = reader.go_on(kv, after)
        in_pieces = reader.go_on(reader.read(before, PIECE), after)
        spec, pages = paged(kv, page_size, reader.name)
        yield Case(spec, pages, after, expected), distance(expected, in_pieces)


def distance(expected: torch.Tensor, found: torch.Tensor) -> Distance:
    """Return the distance between log-probabilities ``[tokens, vocabulary]``."""
    kl = (expected.exp() * (expected - found)).sum(dim=-1)
    same = expected.argmax(dim=-1) == found.argmax(dim=-1)
    return Distance(float(kl.mean()), float(same.float().mean()))


def mean(distances: Sequence[Distance]) -> Distance:
    """Return the mean over runs of equally many tokens."""
    return Distance(*(float(np.mean(each)) for each in zip(*distances, strict=True)))


def standard_error(figures: Sequence[float]) -> float:
    """Return the standard error of the mean, 0 for a single figure."""
    return float(np.std(figures, ddof=1) / np.sqrt(len(figures))) if len(figures) > 1 else 0.0


def codec_row(
    name: str,
    spec: PageSpec,
    texts: Sequence[list[Bytes]],
    reader: Reader | None = None,
    cases: Sequence[Case] = (),
) -> CodecRow:
    """Measure one codec on the pages of each text; with ``reader`` and ``cases``, the model reads on over decoded
    pages.
    """
    both = _Both(name, PageLayout.of(spec))
    stored, squares, found = 0, np.zeros((2, 2)), []
    for number, pages in enumerate(texts):
        back = [np.empty_like(page) for page in pages]
        for page, decoded in zip(pages, back, strict=True):
            payload = both.encode(page)
            stored += payload.nbytes
            both.decode(payload, decoded)
            squares += _squares(spec, page, decoded)
        if reader is not None:
            found.append(_moved(reader, cases[number], back))
    moved = mean(found) if found else None
    errors = np.sqrt(squares[0] / np.maximum(squares[1], 1e-300))
    rates = _rates(both, [page for pages in texts for page in pages][:_MOST_TIMED])
    return CodecRow(
        name,
        sum(page.nbytes for pages in texts for page in pages) / stored,
        *rates,
        float(np.sqrt(squares[0].sum() / max(squares[1].sum(), 1e-300))),
        float(errors[0]),
        float(errors[1]),
        None if moved is None else moved.kl,
        None if moved is None else standard_error([each.kl for each in found]),
        None if moved is None else moved.top1,
    )


def _moved(reader: Reader, case: Case, pages: list[Bytes]) -> Distance:
    from tierstore.bench.codec import unpaged

    return distance(case.expected, reader.go_on(unpaged(case.spec, pages), case.after))


class _Both:
    """Encoder and decoder of one codec, for one thread; "none" copies."""

    def __init__(self, name: str, layout: PageLayout) -> None:
        self._encoder, self._decoder = codecs.encoder(name, layout), codecs.decoder(name, layout)
        self._out = np.empty(layout.blob_nbytes, dtype=np.uint8)

    def encode(self, page: Bytes) -> Bytes:
        """Return the payload in a scratch buffer, or the page if it is stored raw."""
        if self._encoder is None:
            np.copyto(self._out, page)
            return self._out
        length = self._encoder.encode(page, self._out)
        return page if length is None else self._out[:length]

    def decode(self, stored: Bytes, page: Bytes) -> None:
        """Fill ``page`` from the result of ``encode``."""
        if self._decoder is None or stored.nbytes == page.nbytes:
            np.copyto(page, stored)
        else:
            self._decoder.decode(stored, page)


def _squares(spec: PageSpec, page: Bytes, back: Bytes) -> NDArray[np.float64]:
    """Return the sums of squares of errors and of numbers, ``[2, K and V]``, for bfloat16 pages."""
    numbers, found = _numbers(spec, page), _numbers(spec, back)
    axes = (0, 2, 3, 4)
    return np.stack([np.square(found - numbers).sum(axes), np.square(numbers).sum(axes)])


def _numbers(spec: PageSpec, page: Bytes) -> NDArray[np.float64]:
    bits = page.view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64).reshape(spec.shape)


def _rates(both: _Both, pages: list[Bytes]) -> tuple[float, float]:
    """Return MB/s of encoding and of decoding, the best of several runs."""
    stored, back = [both.encode(page).copy() for page in pages], np.empty_like(pages[0])
    nbytes = sum(page.nbytes for page in pages)
    encoding = min(_seconds(pages, both.encode) for _ in range(_ROUNDS))
    decoding = min(_seconds(stored, lambda each: both.decode(each, back)) for _ in range(_ROUNDS))
    return nbytes / encoding / 1e6, nbytes / decoding / 1e6


def _seconds(pieces: list[Bytes], act: Callable[[Bytes], object]) -> float:
    begin = thread_time()
    for piece in pieces:
        act(piece)
    return max(thread_time() - begin, 1e-9)


def draw(rows: Sequence[CodecRow], floor: float, source: str, file: Path) -> None:
    """Plot ratio against divergence into ``file``, in the format of its suffix. OSError if it cannot be written.

    Lossless codecs are at the lower edge, as their divergence is 0. ValueError if matplotlib does not know the
    suffix.
    """
    from matplotlib.figure import Figure  # no pyplot: it keeps state and wants a display

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    found = [(row.codec, row.ratio, row.kl) for row in rows if row.kl is not None]
    edge = min([floor, *(kl for _, _, kl in found if kl > 0)]) / 3
    for name, ratio, kl in found:
        height = max(kl, edge)
        axes.plot(ratio, height, "o" if kl > 0 else "v", color="C0")
        axes.annotate(name, (ratio, height), xytext=(5, 5), textcoords="offset points")
    axes.axhline(floor, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        "bfloat16 read in pieces", (1, floor), xytext=(2, 3), textcoords="offset points", color="0.4"
    )
    axes.set(
        yscale="log", xlabel="raw bytes by stored bytes", ylabel="mean KL divergence, nats", title=source
    )
    axes.margins(x=0.12, y=0.15)
    figure.savefig(file)
