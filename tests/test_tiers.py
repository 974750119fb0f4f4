"""Run the tier contract for every tier: HBM slots, an engine's tensors, the host arena, the disk, a dictionary."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import torch

from tests.nvme.rig import PATIENCE_S, Rig, blank, key
from tests.support.kept_bytes import KeptBytes
from tests.tier_contract import Page, TierContract, TierUnderTest
from tierstore.codecs.exp import Decoder, Geometry
from tierstore.codecs.host_format import HostFormat
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.pool import CpuPool, GroupedPages
from tierstore.host.arena import HostArena
from tierstore.nvme import record_format
from tierstore.nvme.record_format import HEAD_NBYTES, Codec
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Tier, Transfer


class PoolUnderTest(TierUnderTest):
    """A CpuPool. ``look`` reads the tensors that callers get."""

    def __init__(self, spec: PageSpec, num_slots: int) -> None:
        self._pool = CpuPool(PageLayout.of(spec), num_slots)
        self._nbytes = spec.page_nbytes

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._pool.write(slot, page)

    def read(self, slots: Sequence[int]) -> list[Page]:
        found = [np.empty(self._nbytes, dtype=np.uint8) for _ in slots]
        for slot, page in zip(slots, found, strict=True):
            self._pool.read(slot, page)
        return found

    def look(self, slot: int) -> Page:
        pages = self._pool.pages
        assert not isinstance(pages, GroupedPages)
        return np.array(pages[slot].flatten().numpy())

    def close(self) -> None: ...


class EngineUnderTest(TierUnderTest):
    """An EnginePool with one tensor per layer and heads before tokens. ``look`` reads the engine's tensors."""

    def __init__(self, spec: PageSpec, num_slots: int) -> None:
        layers, planes, tokens, heads, dim = spec.shape
        self._tensors = [
            torch.zeros(num_slots, heads, tokens, planes, dim, dtype=torch.uint8) for _ in range(layers)
        ]
        self._pool = EnginePool(PageLayout.of(spec), [EnginePages(self._tensors, "BHNKD")])
        self._nbytes = spec.page_nbytes

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self._pool.write(slot, page)

    def read(self, slots: Sequence[int]) -> list[Page]:
        found = [np.empty(self._nbytes, dtype=np.uint8) for _ in slots]
        for slot, page in zip(slots, found, strict=True):
            self._pool.read(slot, page)
        return found

    def look(self, slot: int) -> Page:
        layers = [tensor[slot].numpy().transpose(2, 1, 0, 3) for tensor in self._tensors]
        return np.array(np.stack(layers).reshape(-1), dtype=np.uint8)

    def close(self) -> None: ...


class ArenaUnderTest(TierUnderTest):
    """A HostArena. ``look`` reads the memory of all slots with the stride that the layout gives."""

    def __init__(self, spec: PageSpec, num_slots: int) -> None:
        layout = PageLayout.of(spec)
        self._arena = HostArena(layout, num_slots)
        self._stride, self._nbytes = layout.slot_nbytes, spec.page_nbytes

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            np.copyto(self._arena.view(slot), page)

    def read(self, slots: Sequence[int]) -> list[Page]:
        return [self._arena.view(slot).copy() for slot in slots]

    def look(self, slot: int) -> Page:
        first = self._arena.view(0)
        memory = np.lib.stride_tricks.as_strided(
            first, shape=(self._arena.num_slots, self._nbytes), strides=(self._stride, 1)
        )
        return np.array(memory[slot])

    def close(self) -> None: ...


class DiskUnderTest(TierUnderTest):
    """An NVMe tier that stores pages in LMDB. ``look`` reads a copy of the LMDB file with the LMDB library."""

    def __init__(self, spec: PageSpec, home: Path, rig: Rig | None = None) -> None:
        self._home, self._nbytes = home / "disk", spec.page_nbytes
        self._copy = home / "copy"
        self._rig = rig or Rig(self._home, page_nbytes=spec.page_nbytes)

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        transfer = self._rig.transfer([key(slot) for slot in slots])
        self._rig.tier.submit_write(transfer, pages)
        assert self._rig.ack(transfer.id).ok
        assert self._rig.tier.sync(PATIENCE_S)

    def read(self, slots: Sequence[int]) -> list[Page]:
        transfer = self._rig.transfer([key(slot) for slot in slots])
        found = [blank(self._nbytes) for _ in slots]
        self._rig.tier.submit_read(transfer, found)
        assert self._rig.ack(transfer.id).num_ready == len(slots)
        return found

    def look(self, slot: int) -> Page:
        return self.record(slot)[HEAD_NBYTES:]

    def record(self, slot: int) -> Page:
        return np.frombuffer(self.value(slot, b"pages"), dtype=np.uint8)

    def value(self, slot: int, tree: bytes) -> bytes:
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir()
        data = next(self._home.glob("*/data.mdb"))
        shutil.copy(data, self._copy)
        with lmdb.open(str(self._copy), readonly=True, lock=False, max_dbs=8) as env:
            db = env.open_db(tree, create=False)
            with env.begin() as txn:
                found = txn.get(key(slot), db=db)
        assert isinstance(found, bytes)
        return found

    def close(self) -> None:
        self._rig.close()


class ExtentsUnderTest(DiskUnderTest):
    """An NVMe tier that stores pages in extent files. ``look`` finds a page there by its catalogue entry."""

    def __init__(self, spec: PageSpec, home: Path) -> None:
        super().__init__(spec, home, Rig(home / "disk", page_nbytes=spec.page_nbytes, payload="extents"))

    def record(self, slot: int) -> Page:
        block, extent = struct.unpack_from("<II", self.value(slot, b"catalogue"), 64)
        raw = next(self._home.glob(f"*/extent-{extent:05}.bin")).read_bytes()
        start = block * 4096
        return np.frombuffer(raw[start + 16 : start + 4096 + self._nbytes], dtype=np.uint8)


class EncodedDiskUnderTest(DiskUnderTest):
    """An NVMe tier with the codec ``exp``. ``look`` decodes the record itself."""

    def __init__(self, spec: PageSpec, home: Path) -> None:
        self._geometry = Geometry.of(PageLayout.of(spec))
        rig = Rig(
            home / "disk",
            page_nbytes=spec.page_nbytes,
            payload="lmdb",
            codec="exp",
            layout=PageLayout.of(spec),
        )
        super().__init__(spec, home, rig)

    def look(self, slot: int) -> Page:
        record = self.record(slot)
        head = record_format.parse(record[:HEAD_NBYTES].tobytes())
        assert (head.codec is Codec.EXP) == (self._nbytes > 1000)
        page = np.empty(self._nbytes, dtype=np.uint8)
        record_format.decode(head, record[HEAD_NBYTES:], page, Decoder(self._geometry))
        return page


class HeldDiskUnderTest(DiskUnderTest):
    """An NVMe tier below host memory that holds pages as int8. The tier stores the payloads without decoding them."""

    def __init__(self, spec: PageSpec, home: Path, payload: str) -> None:
        layout = PageLayout.of(spec)
        self._form = HostFormat.of("int8", layout)
        rig = Rig(
            home / "disk",
            page_nbytes=layout.blob_nbytes,
            payload=payload,
            layout=layout,
            held="int8",
        )
        super().__init__(spec, home, rig)
        self._nbytes = self._form.view_nbytes

    def look(self, slot: int) -> Page:
        head, payload = record_format.parse(self.record(slot)[:HEAD_NBYTES].tobytes()), super().look(slot)
        assert (head.codec, head.stored_nbytes) == (Codec.INT8, self._form.payload_nbytes)
        found = np.zeros(self._form.view_nbytes, dtype=np.uint8)
        found[: payload.nbytes] = payload
        return found


class DictionaryUnderTest(TierUnderTest):
    """A KeptBytes tier. ``look`` reads its dictionary."""

    def __init__(self, spec: PageSpec, num_slots: int) -> None:
        self._tier = KeptBytes(num_slots, spec.page_nbytes)
        self._nbytes = spec.page_nbytes

    def write(self, slots: Sequence[int], pages: Sequence[Page]) -> None:
        self._tier.submit_write(self._transfer(slots), pages)
        (ack,) = self._tier.poll()
        assert ack.ok

    def read(self, slots: Sequence[int]) -> list[Page]:
        found = [np.empty(self._nbytes, dtype=np.uint8) for _ in slots]
        self._tier.submit_read(self._transfer(slots), found)
        (ack,) = self._tier.poll()
        assert ack.num_ready == len(slots)
        return found

    def look(self, slot: int) -> Page:
        return np.frombuffer(self._tier.kept[key(slot)], dtype=np.uint8)

    def close(self) -> None:
        self._tier.close(PATIENCE_S)

    def _transfer(self, slots: Sequence[int]) -> Transfer:
        keys, places = tuple(key(slot) for slot in slots), tuple(slots)
        return Transfer(0, keys, Tier.HOST, places, Tier.REMOTE, places, 0, (None,) * len(keys))


class TestCpuPool(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return PoolUnderTest(spec, num_slots)


class TestEnginePool(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return EngineUnderTest(spec, num_slots)


class TestHostArena(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return ArenaUnderTest(spec, num_slots)


class TestNvmeTier(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return DiskUnderTest(spec, home)


class TestNvmeTierWithExp(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return EncodedDiskUnderTest(replace(spec, dtype="bfloat16", head_dim=2 * spec.head_dim), home)

    def pages(self, spec: PageSpec, number: int, seed: int = 0) -> list[Page]:
        """Return pages whose elements have similar exponents, so that ``exp`` can compress the pages."""
        found = super().pages(replace(spec, dtype="bfloat16", head_dim=2 * spec.head_dim), number, seed)
        for page in found:
            page[1::2] = 0x3F
        return found


class TestNvmeTierUnderEncodedMemory(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return HeldDiskUnderTest(replace(spec, dtype="float32"), home, "lmdb")

    def pages(self, spec: PageSpec, number: int, seed: int = 0) -> list[Page]:
        """Return random payloads, each followed by zeros, as a slot of encoded host memory contains them."""
        form = HostFormat.of("int8", PageLayout.of(replace(spec, dtype="float32")))
        found = [
            np.random.default_rng([seed, i]).integers(0, 256, form.view_nbytes, dtype=np.uint8)
            for i in range(number)
        ]
        for page in found:
            page[form.payload_nbytes :] = 0
        return found


class TestNvmeTierInExtents(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return ExtentsUnderTest(spec, home)


class TestDictionary(TierContract):
    def open(self, spec: PageSpec, num_slots: int, home: Path) -> TierUnderTest:
        return DictionaryUnderTest(spec, num_slots)
