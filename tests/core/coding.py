"""Compares the coding kernels, on any device, with ``tierstore.codecs``, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.codecs.holding import Bytes, decoded, encoded
from tierstore.codecs import LOSSY
from tierstore.codecs.lossy import PayloadLayout
from tierstore.errors import IntegrityError
from tierstore.gpu import addresses
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.quant.coder import Coder
from tierstore.gpu.slabs import Batch, Share
from tierstore.page import PageLayout

FILL = 0xA5


class Bench:
    """Pages in slots in the memory of a device, and a buffer for their payloads.

    ``order`` lists the slots that each kernel call encodes or decodes, in this order. The slot tensor that the call
    receives begins with two other slots, which the call must ignore.
    """

    def __init__(
        self, name: str, layout: PageLayout, pages: Sequence[Bytes], kernels: ModuleType, device: str = "cpu"
    ) -> None:
        self.codec, self.layout, self.pages = LOSSY[name], layout, pages
        self.nbytes = PayloadLayout.of(layout, self.codec).fixed_nbytes
        self.stride = -(-self.nbytes // 16) * 16 + 16
        self.order = [*range(1, len(pages)), 0]
        self._device = device
        self._kernels = kernels

    def own_slots(self) -> None:
        """Put the pages into slots of a pool that this object creates."""
        pool = torch.zeros(len(self.pages) * self.layout.slot_nbytes, dtype=torch.uint8, device=self._device)
        rows = pool.view(len(self.pages), -1)[:, : self.layout.blob_nbytes]

        def write(slot: int, page: Bytes) -> None:
            rows[slot].copy_(torch.from_numpy(page))

        def read(slot: int) -> Bytes:
            return np.array(rows[slot].cpu().numpy())

        self.write: Callable[[int, Bytes], None] = write
        self.read: Callable[[int], Bytes] = read
        self._open(addresses.pool_strides(pool, self.layout), pool)

    def engine_slots(self, engine: Sequence[EnginePages]) -> None:
        """Put the pages into an engine's tensors."""
        pool = EnginePool(self.layout, engine)
        found = addresses.tensor_strides(pool.layers)
        assert found is not None

        def read(slot: int) -> Bytes:
            page = np.zeros(self.layout.blob_nbytes, dtype=np.uint8)
            pool.read(slot, page)
            return page

        self.write, self.read = pool.write, read
        self._open(found, None)

    def encode(self) -> tuple[list[Bytes], list[int]]:
        """Write the pages and encode them. Return payloads and error flags in the order of ``self.order``."""
        for slot, page in enumerate(self.pages):
            self.write(slot, page)
        self.payloads.fill_(FILL)
        flags = self._call(self.coder.encode)
        rows = self.payloads.cpu().numpy().reshape(-1, self.stride)
        assert (rows[:, self.nbytes :] == FILL).all(), "a kernel wrote beyond the end of a payload"
        return [row[: self.nbytes].copy() for row in rows], flags

    def decode(self, payloads: Sequence[Bytes]) -> tuple[list[Bytes], list[int]]:
        """Decode the payloads into the slots. Return pages and error flags in the order of ``self.order``."""
        for slot in range(len(self.pages)):
            self.write(slot, np.full(self.layout.blob_nbytes, FILL, dtype=np.uint8))
        rows = self.payloads.view(-1, self.stride)
        for row, payload in zip(rows, payloads, strict=True):
            row[: self.nbytes].copy_(torch.from_numpy(payload))
        flags = self._call(self.coder.decode)
        return [self.read(slot) for slot in self.order], flags

    def require_same(self, *, gaps: bool = True) -> None:
        """Assert that the kernels encode the pages and decode their payloads exactly like ``tierstore.codecs``.

        The codec must be able to represent all pages. If ``gaps``, bytes between KV groups are compared, too.
        """
        wanted = [self.encoded(slot) for slot in self.order]
        found, flags = self.encode()
        for want, payload in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(self._told(payload, gaps), self._told(want, gaps))
        assert not any(flags)
        pages, flags = self.decode(wanted)
        for want, page in zip(wanted, pages, strict=True):
            whole = decoded(self.codec, self.layout, want)
            for spec, offset in zip(self.layout.specs, self.layout.offsets, strict=True):
                part = slice(offset, offset + spec.page_nbytes)
                np.testing.assert_array_equal(page[part], whole[part])
            if gaps:
                np.testing.assert_array_equal(page, whole)
        assert not any(flags)

    def encoded(self, slot: int) -> Bytes:
        """Return the payload of a page, as encoded by ``tierstore.codecs``."""
        payload = encoded(self.codec, self.layout, self.pages[slot])
        assert payload is not None
        return payload

    def accepted(self, payload: Bytes) -> bool:
        """Return whether ``tierstore.codecs`` decodes the payload without an IntegrityError."""
        try:
            decoded(self.codec, self.layout, payload)
        except IntegrityError:
            return False
        return True

    def _open(self, found: tuple[addresses.GroupStrides, ...], pool: torch.Tensor | None) -> None:
        self.payloads = torch.empty(len(self.pages) * self.stride, dtype=torch.uint8, device=self._device)
        self.coder = Coder(self.codec, self.layout, found, pool, self.stride, self._kernels)

    def _call(self, act: Callable[[Share], None]) -> list[int]:
        before = [7, 9]
        slots = np.array([*before, *self.order], dtype=np.int64)
        flags = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
        batch = Batch(slots, torch.from_numpy(slots).to(self._device), flags)
        current: Any = None
        act(Share(batch, self.payloads, len(before), len(self.order), current))
        told: list[int] = flags.tolist()
        assert not any(told[: len(before)])
        return told[len(before) :]

    def _told(self, payload: Bytes, gaps: bool) -> Bytes:
        """Return the payload. If ``gaps`` is False, omit the bytes that encode gaps between KV groups."""
        if gaps:
            return payload
        places, known = PayloadLayout.of(self.layout, self.codec), np.ones(self.nbytes, dtype=bool)
        at = sum(plane.scale_nbytes + plane.floor_nbytes for plane in places.planes)
        ends = [o + s.page_nbytes for o, s in zip(self.layout.offsets, self.layout.specs, strict=True)]
        for start, end in places.gaps():
            byte = np.arange(start, end)
            inside = np.zeros(end - start, dtype=bool)
            for begin, stop in zip(self.layout.offsets, ends, strict=True):
                inside |= (begin <= byte) & (byte < stop)
            known[at : at + end - start] = inside
            at += end - start
        return payload[known]
