"""What the codec ``exp`` makes of KV pages: ratio beside the entropy limit, rates a core, two threads against one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard

from tierstore.bench.rows import Row
from tierstore.codecs.exp import Decoder, Encoder, Geometry
from tierstore.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tierstore.bench.kv import Sample

    Bytes = NDArray[np.uint8]

_ROUNDS = 7


class Rate(NamedTuple):
    """MB a second of page bytes: by the clock, all threads together, and by a thread's own processor time."""

    elapsed: float
    core: float


def codec_rows(sample: Sample, seconds: float) -> list[Row]:
    """Every figure of ``sample``; each rate is the best of 7 short runs, one thread and two in turn.

    ``seconds``: of one run. RuntimeError if a page does not come back as it was.
    """
    geometry = Geometry.of(PageLayout.of(sample.spec))
    payloads = _payloads(geometry, sample.pages)
    return [
        *_limits(geometry, sample.pages),
        _ratio(sample.pages, payloads),
        _zstd_alone(sample.pages),
        *_rates("encode", 250.0, seconds, lambda: _encoding(geometry, sample.pages)),
        *_rates("decode", 500.0, seconds, lambda: _decoding(geometry, payloads)),
    ]


def _payloads(geometry: Geometry, pages: list[Bytes]) -> list[Bytes]:
    """The payload of each page that is worth one; each is decoded and compared."""
    encoder, decoder = Encoder(geometry), Decoder(geometry)
    out, back = (np.empty(geometry.page_nbytes, dtype=np.uint8) for _ in range(2))
    payloads = []
    for number, page in enumerate(pages):
        length = encoder.encode(page, out)
        if length is None:
            continue
        decoder.decode(out[:length], back)
        if not np.array_equal(back, page):
            raise RuntimeError(f"page {number} did not come back as it was")
        payloads.append(out[:length].copy())
    return payloads


def _ratio(pages: list[Bytes], payloads: list[Bytes]) -> Row:
    raw = sum(page.nbytes for page in pages)
    left = (len(pages) - len(payloads)) * pages[0].nbytes
    stored = sum(payload.nbytes for payload in payloads) + left
    return Row("exp: raw bytes by stored bytes", raw / stored, "x", at_least=1.45)


def _zstd_alone(pages: list[Bytes]) -> Row:
    compressor = zstandard.ZstdCompressor(level=1)
    stored = sum(len(compressor.compress(page.data)) for page in pages)
    return Row("zstandard 1 on the raw page", sum(page.nbytes for page in pages) / stored, "x")


def _limits(geometry: Geometry, pages: list[Bytes]) -> list[Row]:
    """Order-0 entropy of the two halves of a number, a mean over layers and planes, and what follows from it."""
    group = geometry.groups[0]
    words = np.stack([page[group.offset : group.end].view("<u2") for page in pages])
    rows = words.reshape(len(pages), group.rows, -1).swapaxes(0, 1).reshape(group.rows, -1)
    exponents = float(np.mean([_entropy(row >> 7 & 0xFF) for row in rows]))
    others = float(np.mean([_entropy(row & 0x7F | row >> 8 & 0x80) for row in rows]))
    return [
        Row("entropy of an exponent", exponents, "bits of 8"),
        Row("entropy of sign and mantissa", others, "bits of 8"),
        Row("entropy limit", 16 / (exponents + others), "x"),
        Row("entropy limit, exponents only", 16 / (exponents + 8), "x"),
    ]


def _entropy(values: NDArray[np.integer[Any]]) -> float:
    shares = np.bincount(values, minlength=256) / values.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def _encoding(geometry: Geometry, pages: list[Bytes]) -> Callable[[], int]:
    encoder, out = Encoder(geometry), np.empty(geometry.page_nbytes, dtype=np.uint8)

    def once() -> int:
        for page in pages:
            encoder.encode(page, out)
        return len(pages) * geometry.page_nbytes

    return once


def _decoding(geometry: Geometry, payloads: list[Bytes]) -> Callable[[], int]:
    decoder, out = Decoder(geometry), np.empty(geometry.page_nbytes, dtype=np.uint8)

    def once() -> int:
        for payload in payloads:
            decoder.decode(payload, out)
        return len(payloads) * geometry.page_nbytes

    return once


def _rates(what: str, goal: float, seconds: float, make: Callable[[], Callable[[], int]]) -> list[Row]:
    alone, together = [], []
    for _ in range(_ROUNDS):
        alone.append(_run(1, seconds, make))
        together.append(_run(2, seconds, make))
    one, two = max(rate.elapsed for rate in alone), max(rate.elapsed for rate in together)
    return [
        Row(f"{what}, a core's own time", max(rate.core for rate in alone), "MB/s", at_least=goal),
        Row(f"{what}, one thread, elapsed", one, "MB/s"),
        Row(f"{what}, two threads, elapsed", two, "MB/s"),
        Row(f"{what}, two threads by one", two / one if one else 0.0, "x", at_least=1.8),
    ]


def _run(threads: int, seconds: float, make: Callable[[], Callable[[], int]]) -> Rate:
    """Every thread repeats its own act until ``seconds`` are over."""
    begin_together = Barrier(threads)

    def work(_: int) -> Rate:
        act = make()
        begin_together.wait()
        done, begin, cpu = 0, perf_counter(), thread_time()
        while True:
            done += act()
            elapsed = perf_counter() - begin
            if elapsed >= seconds:
                return Rate(done / elapsed / 1e6, done / max(thread_time() - cpu, 1e-9) / 1e6)

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    return Rate(sum(rate.elapsed for rate in found), min(rate.core for rate in found))
