"""Benchmark of all codecs: compression ratio, rates, numeric error, and the effect on a model's predictions.

To measure the effect, the model reads the first tokens of a text. Their K and V are encoded and decoded, and
the model reads the rest of the text with the result. Each next-token distribution is compared with the one
that the model computes from the exact K and V. The results are the mean Kullback-Leibler divergence, and the
share of positions with the same most likely token. The floor is the divergence that bfloat16 rounding causes without
a codec. To measure it, the model reads the same first tokens in pieces.
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
"""Number of tokens per piece, when the first tokens are read in pieces to measure the floor."""

NAMES = tuple(codecs.LOSS_CLASSES)
"""Names of the measured codecs: all existing codecs."""

_MOST_TIMED = 16
_ROUNDS = 5


class Goal(NamedTuple):
    """Goal of a codec: the minimum compression ratio, and the maximum mean divergence.

    The maximum is given in nats (``kl``), as a multiple of the floor (``floors``), or not at all.
    """

    ratio: float
    kl: float | None = None
    floors: float | None = None

    def most(self, floor: float | None) -> float | None:
        """Return the largest allowed divergence in nats, or None if there is no limit. ``floor`` is in nats."""
        return self.kl if self.floors is None or floor is None else self.floors * floor


GOALS = {
    "exp": Goal(1.45, 0.0),
    "fp8": Goal(2.0),
    "fp8+zstd": Goal(2.3),
    "int8+zstd": Goal(2.1, floors=1.2),
    "k8v4": Goal(2.3, 4e-3),
    "int4": Goal(3.2, 1e-2),
}
"""Goals of the codecs, for K and V of SmolLM2. A codec that is not listed has no goal."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """Results of one codec on all texts together.

    Rates are in MB (10^6 bytes) of uncompressed pages per second of CPU time, on one core. ``rel_error`` is the
    norm of the errors divided by the norm of the values; ``rel_error_k`` and ``rel_error_v`` are the same for K
    alone and for V alone. ``kl`` is the mean divergence over all tokens in nats, and ``kl_error`` is the
    standard error of ``kl`` over the texts (0 for a single text). ``top1`` is the share of positions with the
    same most likely token. ``kl``, ``kl_error`` and ``top1`` are None if no model is used.
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
        """Return the row as JSON-serializable data, with the ratio rounded to three decimals."""
        return asdict(self) | {"ratio": round(self.ratio, 3)}

    def meets(self, floor: float | None) -> bool:
        """Return whether the codec meets its goal. For a codec without a goal, the result is True.

        Compression ratios are rounded to three decimals before they are compared. ``floor`` is in nats.
        """
        goal = GOALS.get(self.codec, Goal(0.0))
        if round(self.ratio, 3) < goal.ratio:
            return False
        if self.kl is None:
            return True
        most = goal.most(floor)
        return most is None or self.kl <= most


class Distance(NamedTuple):
    """Distance between the predictions of two runs of the model over the same tokens.

    ``kl`` is the mean divergence in nats. ``top1`` is the share of positions with the same most likely token.
    """

    kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class Case:
    """A text that the model has read with exact K and V.

    ``pages`` contains K and V of the first tokens, and ``after`` contains the remaining token IDs. ``expected``
    contains the log-probabilities that the model computed for the remaining tokens, ``[tokens, vocabulary]``.
    """

    spec: PageSpec
    pages: list[Bytes]
    after: torch.Tensor
    expected: torch.Tensor


def read(
    reader: Reader, texts: Iterable[str], prefix: int, following: int, page_size: int
) -> Iterator[tuple[Case, Distance]]:
    """Let the model read each text, and yield it as a case together with its floor.

    The floor is the distance to a run that reads the prefix in pieces of ``PIECE`` tokens.

    Args:
        reader: The model.
        texts: The texts.
        prefix: Number of tokens whose K and V are encoded, rounded down to whole pages.
        following: Number of tokens to read after the prefix.
        page_size: Number of tokens per page.

    Raises:
        ValueError: A text has too few tokens, or the prefix is shorter than a page.
    """
    from tierstore.bench.codec import paged

    given, prefix = prefix, prefix - prefix % page_size
    if prefix < 1:
        raise ValueError(f"the prefix must have at least one page ({page_size} tokens), got {given} tokens")
    for text in texts:
        ids = reader.tokens(text, prefix + following)
        if ids.shape[1] < prefix + following:
            raise ValueError(
                f"a text has {ids.shape[1]} tokens, but at least {prefix + following} are needed"
            )
        before, after = ids[:, :prefix], ids[:, prefix:]
        kv = reader.read(before)
        expected = reader.go_on(kv, after)
        in_pieces = reader.go_on(reader.read(before, PIECE), after)
        spec, pages = paged(kv, page_size, reader.name)
        yield Case(spec, pages, after, expected), distance(expected, in_pieces)


def distance(expected: torch.Tensor, found: torch.Tensor) -> Distance:
    """Return the distance between two tensors of log-probabilities ``[tokens, vocabulary]``.

    The divergence is that of ``found`` from ``expected``.
    """
    kl = (expected.exp() * (expected - found)).sum(dim=-1)
    same = expected.argmax(dim=-1) == found.argmax(dim=-1)
    return Distance(float(kl.mean()), float(same.float().mean()))


def mean(distances: Sequence[Distance]) -> Distance:
    """Return the mean of several distances. All must cover the same number of tokens."""
    return Distance(*(float(np.mean(each)) for each in zip(*distances, strict=True)))


def standard_error(figures: Sequence[float]) -> float:
    """Return the standard error of the mean, or 0 if there are fewer than two values."""
    return float(np.std(figures, ddof=1) / np.sqrt(len(figures))) if len(figures) > 1 else 0.0


def codec_row(
    name: str,
    spec: PageSpec,
    texts: Sequence[list[Bytes]],
    reader: Reader | None = None,
    cases: Sequence[Case] = (),
) -> CodecRow:
    """Measure one codec.

    Args:
        name: Name of the codec.
        spec: Specification of the pages.
        texts: The pages of each text.
        reader: The model, or None if the codec's effect on predictions is not measured.
        cases: The case of each text, if there is a model.
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
    """Encoder and decoder of one codec. With the codec "none", each copies the page. Not thread-safe."""

    def __init__(self, name: str, layout: PageLayout) -> None:
        self._encoder, self._decoder = codecs.encoder(name, layout), codecs.decoder(name, layout)
        self._out = np.empty(layout.blob_nbytes, dtype=np.uint8)

    def encode(self, page: Bytes) -> Bytes:
        """Encode a page and return its payload, or the page itself if the codec cannot encode it.

        The payload is overwritten by the next call.
        """
        if self._encoder is None:
            np.copyto(self._out, page)
            return self._out
        length = self._encoder.encode(page, self._out)
        return page if length is None else self._out[:length]

    def decode(self, stored: Bytes, page: Bytes) -> None:
        """Decode ``stored``, a result of ``encode``, into ``page``."""
        if self._decoder is None or stored.nbytes == page.nbytes:
            np.copyto(page, stored)
        else:
            self._decoder.decode(stored, page)


def _squares(spec: PageSpec, page: Bytes, back: Bytes) -> NDArray[np.float64]:
    """Return sums over a bfloat16 page, ``[2, 2]``: rows are squared errors and squared values, columns K and V."""
    numbers, found = _numbers(spec, page), _numbers(spec, back)
    axes = (0, 2, 3, 4)
    return np.stack([np.square(found - numbers).sum(axes), np.square(numbers).sum(axes)])


def _numbers(spec: PageSpec, page: Bytes) -> NDArray[np.float64]:
    bits = page.view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64).reshape(spec.shape)


def _rates(both: _Both, pages: list[Bytes]) -> tuple[float, float]:
    """Return the rates of encoding and decoding in MB per second of CPU time, each the best of 5 runs."""
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
    """Plot the divergence of each codec against its compression ratio. The suffix of ``file`` sets the file format.

    The divergence axis is logarithmic. Codecs with divergence 0 are drawn at the lower end of this axis.

    Raises:
        OSError: The file cannot be written.
        ValueError: matplotlib does not support the suffix.
    """
    from matplotlib.figure import Figure  # not pyplot, which has global state and may need a display

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
