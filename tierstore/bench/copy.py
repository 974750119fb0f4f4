"""Throughput of page copies between HBM and page-locked host memory, with and without a codec.

The pages are at random places in both memories. Each copy of pages is paired with one contiguous copy, the ceiling,
so that the two are measured under the same conditions. Results are medians over the pairs. With a codec, pages have
the shape of an 8B model's pages, and are encoded and decoded as in a store. Copies with a codec are compared with
the same copies without a codec.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore import codecs
from tierstore.bench.link import Ends, Rig, device_of, locked_arena, settle
from tierstore.codecs import LOSSY
from tierstore.codecs.lossy import PayloadLayout
from tierstore.errors import ConfigError
from tierstore.gpu.device import Between, open_device
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Tier, exact_size

if TYPE_CHECKING:
    from typing import Literal

    from numpy.typing import NDArray

    from tierstore.bench.link import Ceiling, Direction, Path
    from tierstore.types import Transfer

_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "both")
_COMPARED_NBYTES = 256 << 20
"""Maximum number of bytes that the check of the copied pages compares at a time."""


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One row of the copy benchmark. Rates are in GB/s (10^9 bytes/s).

    ``ratio`` is the median of the pairwise ratios of ``gbps`` to ``ceiling_gbps``, not the ratio of the
    medians.
    """

    direction: Direction
    piece_bytes: int
    num_pieces: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    path: str
    submit_ms: float
    """Time in milliseconds until all transfers have been submitted. Copies may still be in flight."""

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Pairs of slots to copy between: ``host[i]`` in host memory and ``there[i]`` on the device.

    The first ``split`` pairs are copied to the device, and the others to the host.
    """

    host: NDArray[np.int64]
    there: NDArray[np.int64]
    split: int

    @classmethod
    def of(cls, direction: Direction, pages: int) -> _Plan:
        chance = np.random.default_rng(0)
        split = {"h2d": pages, "d2h": 0, "both": pages // 2}[direction]
        return cls(chance.permutation(pages), chance.permutation(pages), split)

    def transfers(self, rig: Rig) -> list[Transfer]:
        up = rig.transfers(Tier.HBM, self.host[: self.split], self.there[: self.split])
        down = rig.transfers(Tier.HOST, self.host[self.split :], self.there[self.split :])
        return [one for two in zip(up, down, strict=False) for one in two] if up and down else up + down


def host_nbytes(device: str, batch_nbytes: int, contiguous_nbytes: int) -> int:
    """Return how much host memory ``copy_rows`` needs in bytes, including the memory for the ceiling and the checks."""
    if device != "cpu":
        return batch_nbytes + 2 * contiguous_nbytes
    return 4 * (batch_nbytes + contiguous_nbytes) + 3 * min(batch_nbytes, _COMPARED_NBYTES)


def copy_rows(
    device: str, piece_nbytes: int, batch_nbytes: int, pairs: int, path: Path, ceiling: Ceiling
) -> list[CopyRow]:
    """Measure copies of scattered pages: to the device, from the device, and in both directions at once.

    Args:
        device: The device, such as ``cuda:0``.
        piece_nbytes: Size of a contiguous piece of a page in device memory, in bytes.
        batch_nbytes: Total size of the pages in bytes.
        pairs: Number of measurements per direction, each paired with a run of the ceiling.
        path: How the pages are copied.
        ceiling: The contiguous copies to compare with.

    Raises:
        ConfigError: See ``Rig``.
        RuntimeError: A page was not copied correctly.
    """
    rig = Rig(device, piece_nbytes, batch_nbytes, path)
    try:
        return [_measured(rig, direction, pairs, ceiling) for direction in _DIRECTIONS]
    finally:
        rig.close()


def _measured(rig: Rig, direction: Direction, pairs: int, ceiling: Ceiling) -> CopyRow:
    plan = _Plan.of(direction, rig.num_pages)
    _fill(rig)
    before = rig.pages.clone()
    transfers = plan.transfers(rig)
    rig.run(transfers)
    _require_right(rig, before, plan)
    rates, ceilings, submits = [], [], []
    for _ in range(pairs):
        ceilings.append(ceiling.gbps(direction))
        seconds, submitted = rig.run(transfers)
        rates.append(rig.page_nbytes * rig.num_pages / seconds / 1e9)
        submits.append(submitted * 1e3)
    _require_right(rig, before, plan)
    return CopyRow(
        direction,
        rig.page_nbytes // rig.pieces,
        rig.num_pages * rig.pieces,
        median(rates),
        median(ceilings),
        median(rate / most for rate, most in zip(rates, ceilings, strict=True)),
        rig.path,
        median(submits),
    )


def _fill(rig: Rig) -> None:
    """Fill the pages in host memory and the pages on the device with different random bytes."""
    rig.storage.view(torch.int64).random_()
    for part in rig.parts():
        rig.host_rows[part].copy_(rig.pages[part].flatten(1))
    rig.storage.view(torch.int64).random_()


def _require_right(rig: Rig, before: torch.Tensor, plan: _Plan) -> None:
    """Raise RuntimeError unless the two pages of each pair are equal and correct.

    ``before`` contains the device's pages before the copies. Pages copied to the host must have these contents.
    """
    here = torch.cat([rig.host_rows[part].to(rig.device) for part in rig.parts()])
    there, host = (torch.from_numpy(side).to(rig.device) for side in (plan.there, plan.host))
    step = max(1, _COMPARED_NBYTES // rig.page_nbytes)
    for start in range(0, rig.num_pages, step):
        part = slice(start, start + step)
        expected = here[host[part]]
        right = torch.equal(rig.pages[there[part]].flatten(1), expected)
        if start >= plan.split:
            right = right and torch.equal(before[there[part]].flatten(1), expected)
        if not right:
            raise RuntimeError(f"pages of {exact_size(rig.page_nbytes)} were not copied correctly")


TOKEN_NBYTES = 32 * 2 * 8 * 128 * 2
"""Size of K and V of one token in an 8B model, in bytes: 32 layers, and 8 KV heads with 128 elements of 16 bits."""

_COMPARED = 4
"""Approximate number of pages that are also encoded and decoded on the CPU, to check the device's results."""

_CODED_DIRECTIONS: tuple[Literal["h2d", "d2h"], ...] = ("h2d", "d2h")


@dataclass(frozen=True, slots=True)
class CodedRow:
    """One row of the codec copy benchmark: copies with a codec, compared with copies without it.

    Rates are in GB/s (10^9 bytes of uncompressed pages per second). ``gbps`` is the rate with the codec, and
    ``plain_gbps`` is the rate without it. ``ratio`` is the median of the pairwise ratios of ``gbps`` to
    ``plain_gbps``, not the ratio of the medians. ``rel_error`` is the error of the decoded pages relative to their
    norm.
    """

    direction: str
    codec: str
    piece_bytes: int
    num_pieces: int
    gbps: float
    plain_gbps: float
    ratio: float
    ceiling_gbps: float
    """Rate of one contiguous copy without a codec, in GB/s."""
    payload_bytes: int
    rel_error: float
    path: str
    submit_ms: float

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return asdict(self)


class _Side(Ends):
    """Slots on a device and in host memory, with copies between the two. In host memory, pages may be encoded."""

    def __init__(self, name: str, layout: PageLayout, num_pages: int, codec: str) -> None:
        device = open_device(name)
        pool = device.open_pool(layout, num_pages)
        assert not isinstance(pool.pages, GroupedPages)
        self.pages = pool.pages
        arena = locked_arena(name, layout, num_pages, codec)
        copies = device.open_copies(Between(pool, arena, lambda: None))
        super().__init__(device_of(name), arena, copies, layout.page_nbytes)
        self.path = str(device.stats()["copies"])
        chance = np.random.default_rng(0)
        self.host, self.there = chance.permutation(num_pages), chance.permutation(num_pages)
        self.down = self.transfers(Tier.HOST, self.host, self.there)
        self.up = self.transfers(Tier.HBM, self.host, self.there)

    def moves(self, direction: str) -> list[Transfer]:
        """Return the transfers that copy all pages in the given direction, "h2d" or "d2h"."""
        return self.up if direction == "h2d" else self.down


def coded_host_nbytes(device: str, batch_nbytes: int, contiguous_nbytes: int) -> int:
    """Return the maximum amount of host memory, in bytes, that ``coded_rows`` and its ceiling need."""
    if device != "cpu":
        return 2 * (batch_nbytes + contiguous_nbytes)
    return 5 * batch_nbytes + 4 * contiguous_nbytes


def require_codec(codec: str) -> None:
    """Raise ConfigError unless the codec is a lossy codec that the HOST tier supports."""
    if codec not in LOSSY or LOSSY[codec].zstd:
        allowed = ", ".join(name for name, each in LOSSY.items() if not each.zstd)
        raise ConfigError(f"--codec must be a codec of host memory ({allowed}), got {codec!r}")


def coded_rows(
    device: str, codec: str, page_nbytes: int, batch_nbytes: int, pairs: int, ceiling: Ceiling
) -> list[CodedRow]:
    """Measure copies to and from the device with a codec, and the same copies without it.

    Args:
        device: The device, such as ``cuda:0``.
        codec: Name of a lossy codec that the HOST tier supports.
        page_nbytes: Size of a page in bytes, a multiple of ``TOKEN_NBYTES``.
        batch_nbytes: Total size of the pages in bytes.
        pairs: Number of measurements per direction.
        ceiling: The contiguous copies to compare with.

    Raises:
        ConfigError: The page size, the codec or the device is not supported.
        RuntimeError: The device encodes or decodes differently from the CPU, or errors exceed the codec's
            bound.
    """
    layout = PageLayout.of(_spec(page_nbytes))
    require_codec(codec)
    number = max(2, batch_nbytes // page_nbytes)
    plain, coded = _Side(device, layout, number, "none"), _Side(device, layout, number, codec)
    try:
        rel_error = _checked(coded, codec, layout)
        _fill_side(plain)
        sides = plain, coded
        return [
            _coded_row(sides, codec, rel_error, direction, pairs, ceiling) for direction in _CODED_DIRECTIONS
        ]
    finally:
        plain.close()
        coded.close()


def _coded_row(
    sides: tuple[_Side, _Side],
    codec: str,
    rel_error: float,
    direction: Literal["h2d", "d2h"],
    pairs: int,
    ceiling: Ceiling,
) -> CodedRow:
    coded = sides[1]
    nbytes, number = coded.pages[0].nbytes, len(coded.host)
    for side in sides:
        side.run(side.moves(direction))
    rates: tuple[list[float], list[float]] = ([], [])
    ceilings, submits = [], []
    for _ in range(pairs):
        ceilings.append(ceiling.gbps(direction))
        for side, found in zip(sides, rates, strict=True):
            seconds, submitted = side.run(side.moves(direction))
            found.append(nbytes * number / seconds / 1e9)
        submits.append(submitted * 1e3)
    return CodedRow(
        direction,
        codec,
        nbytes,
        number,
        median(rates[1]),
        median(rates[0]),
        median(b / a for a, b in zip(*rates, strict=True)),
        median(ceilings),
        coded.arena.held.payload_nbytes,
        rel_error,
        coded.path,
        median(submits),
    )


def _fill_side(side: _Side) -> None:
    """Fill the device's pages with normally distributed values. Each channel has a different scale."""
    chance = torch.Generator(device=side.device).manual_seed(0)
    channels = torch.randn(
        (*side.pages.shape[1:3], 1, *side.pages.shape[4:]), device=side.device, generator=chance
    )
    for page in side.pages:
        numbers = torch.randn(page.shape, device=side.device, generator=chance)
        page.copy_(numbers * torch.exp2(2 * channels))
    settle(side.device)


def _checked(side: _Side, codec: str, layout: PageLayout) -> float:
    """Copy the pages to the host and back, and compare some of them with results computed on the CPU.

    Return the relative error of all pages. See ``_error``.

    Raises:
        RuntimeError: The device encodes or decodes differently from the CPU, or errors exceed the codec's
            bound.
    """
    _fill_side(side)
    before = side.pages.clone()
    some = [int(slot) for slot in side.there[:: max(1, len(side.there) // _COMPARED)]]
    wanted = [_by_cpu(codec, layout, before[slot]) for slot in some]
    side.run(side.down)
    places = dict(zip(side.there.tolist(), side.host.tolist(), strict=True))
    for slot, (payload, _) in zip(some, wanted, strict=True):
        if not np.array_equal(side.arena.view(places[slot])[: len(payload)], payload):
            raise RuntimeError(f"a payload of {codec} differs from the one that the CPU encodes")
    side.pages.zero_()
    settle(side.device)
    side.run(side.up)
    for slot, (_, page) in zip(some, wanted, strict=True):
        if not np.array_equal(_bytes_of(side.pages[slot]), page):
            raise RuntimeError(f"a page of {codec} differs from the one that the CPU decodes")
    return _error(side.pages, before, codec, layout)


def _error(after: torch.Tensor, before: torch.Tensor, codec: str, layout: PageLayout) -> float:
    """Return the norm of the errors of all pages, divided by the norm of their values.

    Raises:
        RuntimeError: In some page, the error of K or V in one layer exceeds the codec's bound.
    """
    whole = moved = 0.0
    planes = PayloadLayout.of(layout, LOSSY[codec]).planes
    for now, then in zip(after, before, strict=True):
        norms = then.float().flatten(2).norm(dim=2)
        errors = (now.float() - then.float()).flatten(2).norm(dim=2)
        for plane in planes:
            allowed = plane.scheme.bound.frobenius(plane.scheme.members(plane.shape), plane.dtype)
            if bool((errors[:, plane.index] > allowed * norms[:, plane.index]).any()):
                raise RuntimeError(f"errors of codec {codec} exceed its bound")
        whole += float(norms.square().sum())
        moved += float(errors.square().sum())
    return float((moved / whole) ** 0.5)


def _by_cpu(
    codec: str, layout: PageLayout, page: torch.Tensor
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encode a page on the CPU. Return the payload, and the page that the CPU decodes from it, both as uint8."""
    encoder, decoder = codecs.encoder(codec, layout), codecs.decoder(codec, layout)
    assert encoder is not None
    assert decoder is not None
    raw = _bytes_of(page)
    out, back = np.empty_like(raw), np.empty_like(raw)
    length = encoder.encode(raw, out)
    assert length is not None
    decoder.decode(out[:length], back)
    return out[:length], back


def _bytes_of(page: torch.Tensor) -> NDArray[np.uint8]:
    return np.array(page.cpu().contiguous().view(torch.uint8).flatten().numpy())


def _spec(page_nbytes: int) -> PageSpec:
    """Return the specification of an 8B model's pages of ``page_nbytes`` bytes.

    Raises:
        ConfigError: ``page_nbytes`` is not a multiple of ``TOKEN_NBYTES``.
    """
    token = TOKEN_NBYTES
    if page_nbytes % token:
        raise ConfigError(
            f"with a codec, the page size must be a multiple of {exact_size(token)} (one token), got "
            f"{exact_size(page_nbytes)}"
        )
    return PageSpec(
        num_layers=32,
        page_size=page_nbytes // token,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        model="bench",
    )
