"""Codecs over KV pages: two threads compared with one, and the ratio of ``exp`` compared with its entropy limit.

The pages are a real model's if one is prepared, else synthetic; a sample names its source.
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
    """MB/s of page bytes: of all threads by elapsed time, and of a thread by its own CPU time."""

    elapsed: float
    core: float


def codec_rows(sample: Sample, seconds: float) -> list[Row]:
    """Measure every figure of ``sample``. Each rate is the best of 7 short runs, with one thread and two in turn.

    Args:
        seconds: Length of one run.

    RuntimeError if a page changes in the round trip.
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
    """Measure how much faster two threads are than one for each lossy codec, the best of 7 runs of ``seconds`` each."""
    layout = PageLayout.of(sample.spec)
    rows = []
    for name in codecs.LOSSY:
        stored = _stored(name, layout, sample.pages)
        works = {"encode": _encoding(name, layout, sample.pages), "decode": _decoding(name, layout, stored)}
        for what, make in works.items():
            rows.append(_rates(f"{name}: {what}", 0.0, seconds, make)[-1])
    return rows


def _payloads(geometry: Geometry, pages: list[Bytes]) -> list[Bytes]:
    """Return the payload of each page that has one. Each is decoded and compared."""
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
    """Return the order-0 entropy of both halves of a number, a mean over layers and planes, and the limit that
    follows.
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
    """Return the payload of each page that is encoded."""
    encoder, out = codecs.encoder(name, layout), np.empty(layout.blob_nbytes, dtype=np.uint8)
    assert encoder is not None
    lengths = ((page, encoder.encode(page, out)) for page in pages)
    return [out[:length].copy() for _, length in lengths if length is not None]


def _encoding(name: str, layout: PageLayout, pages: list[Bytes]) -> Make:
    """Return a function that makes a thread's work: all pages once, and their bytes."""

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
        Row(f"{what}, a core's own time", max(rate.core for rate in alone), "MB/s", at_least=goal),
        Row(f"{what}, one thread, elapsed", one, "MB/s"),
        Row(f"{what}, two threads, elapsed", two, "MB/s"),
        Row(f"{what}, two threads by one", two / one if one else 0.0, "x", at_least=1.8),
    ]


def _run(threads: int, seconds: float, make: Make) -> Rate:
    """Have every thread repeat its work until ``seconds`` are over."""
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
    """Pages of one spec, flat uint8 each. ``source`` says what they are."""

    spec: PageSpec
    pages: list[NDArray[np.uint8]]
    source: str


def synthetic(tokens: int, page_size: int) -> Sample:
    """Return bfloat16 pages of SmolLM2-135M's shape: normal numbers, a scale per channel, always the same."""
    spec = PageSpec(
        num_layers=30, page_size=page_size, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="synthetic"
    )
    chance = np.random.default_rng(0)
    scales = np.exp2(chance.normal(size=(30, 2, 1, 3, 64))).astype(np.float32)
    pages = []
    for _ in range(max(1, tokens // page_size)):
        drawn = chance.standard_normal(spec.shape, dtype=np.float32) * scales
        pages.append((drawn.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8))
    return Sample(spec, pages, "synthetic bfloat16: normal numbers, a scale a channel")


def sample(reader: Reader, name: str, text: str, tokens: int, page_size: int) -> Sample:
    """Return the full pages of the first ``tokens`` tokens of ``text``. OSError if there are none."""
    ids = reader.tokens(text, tokens)
    spec, pages = paged(reader.read(ids), page_size, reader.name)
    if not pages:
        raise OSError(f"{name} has {ids.shape[1]} tokens, less than a page of {page_size}")
    return Sample(spec, pages, f"{reader.name}, {name}, {len(pages) * page_size} tokens")


def paged(kv: torch.Tensor, page_size: int, model: str) -> tuple[PageSpec, list[NDArray[np.uint8]]]:
    """Return the full pages of ``kv``, bfloat16 ``[layers, 2, heads, tokens, head_dim]``."""
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
    """Return the tensor that ``paged`` was given, up to its last full page."""
    import torch

    numbers = np.concatenate([page.view(np.int16).reshape(spec.shape) for page in pages], axis=2)
    return torch.from_numpy(numbers).view(torch.bfloat16).transpose(2, 3).contiguous()
