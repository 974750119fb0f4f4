"""Benchmarks of codecs on KV pages: the rates and compression ratio of ``exp``, and the speedup from a second thread.

The compression ratio is compared with its entropy limit. The pages come from a real model if its files are
available, and are synthetic otherwise. Each sample names its source.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard

from tierstore import codecs
from tierstore.bench.measurement import Row
from tierstore.codecs.exp import Decoder, Encoder, Geometry
from tierstore.page import PageLayout, PageSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from tierstore.bench.model import Reader

    Bytes = NDArray[np.uint8]
    Make = Callable[[], Callable[[], int]]

_ROUNDS = 7


class Rate(NamedTuple):
    """Rates of a codec in MB/s (10^6 bytes of uncompressed pages per second).

    ``elapsed`` is the rate of all threads together per wall time. ``core`` is the rate of the slowest thread per CPU
    time of that thread.
    """

    elapsed: float
    core: float


def codec_rows(sample: Sample, seconds: float) -> list[Row]:
    """Measure the codec ``exp`` on a sample: entropy limits, compression ratio and rates.

    Each rate is the best of 7 runs. Runs with one thread alternate with runs with two threads.

    Args:
        sample: The pages.
        seconds: Length of one run in seconds.

    Raises:
        RuntimeError: A page differs after encoding and decoding.
    """
    layout = PageLayout.of(sample.spec)
    geometry = Geometry.of(layout)
    payloads = _payloads(geometry, sample.pages)
    return [
        *_limits(geometry, sample.pages),
        _ratio(sample.pages, payloads),
        _zstd_alone(sample.pages),
        *_rates("encode", 250.0, seconds, _encoding("exp", layout, sample.pages)),
        *_rates("decode", 500.0, seconds, _decoding("exp", layout, payloads)),
    ]


def scaling_rows(sample: Sample, seconds: float) -> list[Row]:
    """Measure how much faster two threads are than one thread, for each lossy codec.

    Each rate is the best of 7 runs that take ``seconds`` seconds each.
    """
    layout = PageLayout.of(sample.spec)
    rows = []
    for name in codecs.LOSSY:
        stored = _stored(name, layout, sample.pages)
        works = {"encode": _encoding(name, layout, sample.pages), "decode": _decoding(name, layout, stored)}
        for what, make in works.items():
            rows.append(_rates(f"{name}: {what}", 0.0, seconds, make)[-1])
    return rows


def _payloads(geometry: Geometry, pages: list[Bytes]) -> list[Bytes]:
    """Encode all pages with ``exp`` and return the payloads. Pages that ``exp`` cannot shorten are left out.

    Raises:
        RuntimeError: A payload does not decode to its page.
    """
    encoder, decoder = Encoder(geometry), Decoder(geometry)
    out, back = (np.empty(geometry.page_nbytes, dtype=np.uint8) for _ in range(2))
    payloads = []
    for number, page in enumerate(pages):
        length = encoder.encode(page, out)
        if length is None:
            continue
        decoder.decode(out[:length], back)
        if not np.array_equal(back, page):
            raise RuntimeError(f"page {number} differs after encoding and decoding with exp")
        payloads.append(out[:length].copy())
    return payloads


def _ratio(pages: list[Bytes], payloads: list[Bytes]) -> Row:
    raw = sum(page.nbytes for page in pages)
    left = (len(pages) - len(payloads)) * pages[0].nbytes
    stored = sum(payload.nbytes for payload in payloads) + left
    return Row("exp: raw bytes / stored bytes", raw / stored, "x", at_least=1.45)


def _zstd_alone(pages: list[Bytes]) -> Row:
    compressor = zstandard.ZstdCompressor(level=1)
    stored = sum(len(compressor.compress(page.data)) for page in pages)
    return Row("zstandard level 1 on the unencoded page", sum(page.nbytes for page in pages) / stored, "x")


def _limits(geometry: Geometry, pages: list[Bytes]) -> list[Row]:
    """Return rows with the entropy limits of the compression ratio, and the order-0 entropies behind them.

    There are two entropies: that of the exponents, and that of the signs and mantissas. Both are averages over
    layers and over K and V, in bits per value.
    """
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


def _stored(name: str, layout: PageLayout, pages: list[Bytes]) -> list[Bytes]:
    """Encode all pages and return the payloads. Pages that the codec cannot encode are left out."""
    encoder, out = codecs.encoder(name, layout), np.empty(layout.blob_nbytes, dtype=np.uint8)
    assert encoder is not None
    lengths = ((page, encoder.encode(page, out)) for page in pages)
    return [out[:length].copy() for _, length in lengths if length is not None]


def _encoding(name: str, layout: PageLayout, pages: list[Bytes]) -> Make:
    """Return a function that creates the work function of one thread, with a separate encoder.

    The work function encodes all pages once and returns their size in bytes.
    """

    def make() -> Callable[[], int]:
        encoder, out = codecs.encoder(name, layout), np.empty(layout.blob_nbytes, dtype=np.uint8)
        assert encoder is not None

        def once() -> int:
            for page in pages:
                encoder.encode(page, out)
            return len(pages) * layout.blob_nbytes

        return once

    return make


def _decoding(name: str, layout: PageLayout, payloads: list[Bytes]) -> Make:
    def make() -> Callable[[], int]:
        decoder, out = codecs.decoder(name, layout), np.empty(layout.blob_nbytes, dtype=np.uint8)
        assert decoder is not None

        def once() -> int:
            for payload in payloads:
                decoder.decode(payload, out)
            return len(payloads) * layout.blob_nbytes

        return once

    return make


def _rates(what: str, goal: float, seconds: float, make: Make) -> list[Row]:
    alone, together = [], []
    for _ in range(_ROUNDS):
        alone.append(_run(1, seconds, make))
        together.append(_run(2, seconds, make))
    one, two = max(rate.elapsed for rate in alone), max(rate.elapsed for rate in together)
    return [
        Row(f"{what}, per second of CPU time", max(rate.core for rate in alone), "MB/s", at_least=goal),
        Row(f"{what}, one thread, elapsed", one, "MB/s"),
        Row(f"{what}, two threads, elapsed", two, "MB/s"),
        Row(f"{what}, two threads / one thread", two / one if one else 0.0, "x", at_least=1.8),
    ]


def _run(threads: int, seconds: float, make: Make) -> Rate:
    """Let ``threads`` threads repeat their work concurrently for ``seconds`` seconds, and return the rates."""
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


@dataclass(frozen=True, slots=True)
class Sample:
    """Pages as flat uint8 arrays, all with the same specification. ``source`` describes where they come from."""

    spec: PageSpec
    pages: list[NDArray[np.uint8]]
    source: str


def synthetic(tokens: int, page_size: int) -> Sample:
    """Return random bfloat16 pages in the shape of SmolLM2-135M pages.

    Every call returns the same pages. The values are normally distributed, with a different scale in each channel.
    """
    spec = PageSpec(
        num_layers=30, page_size=page_size, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="synthetic"
    )
    chance = np.random.default_rng(0)
    scales = np.exp2(chance.normal(size=(30, 2, 1, 3, 64))).astype(np.float32)
    pages = []
    for _ in range(max(1, tokens // page_size)):
        drawn = chance.standard_normal(spec.shape, dtype=np.float32) * scales
        pages.append((drawn.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8))
    return Sample(spec, pages, "synthetic bfloat16: normally distributed, with one scale per channel")


def sample(reader: Reader, name: str, text: str, tokens: int, page_size: int) -> Sample:
    """Let a model read the first ``tokens`` tokens of ``text``, and return the full pages of their K and V.

    Args:
        reader: The model.
        name: The name of the text, for the sample's ``source``.
        text: The text.
        tokens: Maximum number of tokens to read.
        page_size: Number of tokens per page.

    Raises:
        OSError: The text has fewer tokens than one page.
    """
    ids = reader.tokens(text, tokens)
    spec, pages = paged(reader.read(ids), page_size, reader.name)
    if not pages:
        raise OSError(
            f"{name} has only {ids.shape[1]} tokens, but a page needs {page_size}; use a longer text"
        )
    return Sample(spec, pages, f"{reader.name}, {name}, {len(pages) * page_size} tokens")


def paged(kv: torch.Tensor, page_size: int, model: str) -> tuple[PageSpec, list[NDArray[np.uint8]]]:
    """Divide ``kv``, bfloat16 ``[layers, 2, heads, tokens, head_dim]``, into full pages.

    Tokens after the last full page are left out. Return the specification of the pages, and the pages.
    """
    import torch

    numbers = (
        kv.transpose(2, 3).contiguous().view(torch.int16).numpy()
    )  # [layers, 2, tokens, heads, head_dim]
    spec = PageSpec(
        num_layers=numbers.shape[0],
        page_size=page_size,
        num_kv_heads=numbers.shape[3],
        head_dim=numbers.shape[4],
        dtype="bfloat16",
        model=model,
    )
    starts = range(0, numbers.shape[2] - page_size + 1, page_size)
    return spec, [
        np.ascontiguousarray(numbers[:, :, start : start + page_size]).reshape(-1).view(np.uint8)
        for start in starts
    ]


def unpaged(spec: PageSpec, pages: list[NDArray[np.uint8]]) -> torch.Tensor:
    """Return the tensor ``kv`` from which ``paged`` created these pages, without the tokens that ``paged`` left out."""
    import torch

    numbers = np.concatenate([page.view(np.int16).reshape(spec.shape) for page in pages], axis=2)
    return torch.from_numpy(numbers).view(torch.bfloat16).transpose(2, 3).contiguous()
