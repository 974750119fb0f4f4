"""Helpers for tests of the NVMe tier: pages that are generated from a number, and a tier that waits for its acks."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.codecs.host_format import HostFormat
from tierstore.nvme.catalogue import Catalogue
from tierstore.nvme.tier import NvmeTier
from tierstore.nvme.writer import Writer
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Ack, PageKey, Tier, Transfer

PAGE = 8192
CAPACITY = 4 << 20
FINGERPRINT = "ab12"
PATIENCE_S = 60.0

LAYOUT = PageLayout.of(
    PageSpec(num_layers=8, page_size=16, num_kv_heads=1, head_dim=64, dtype="bfloat16", model="test")
)
"""Layout of a 32 KiB page, for tiers with a codec."""

PAYLOADS = ("lmdb", "extents")
default_payload = "auto"
"""Payload of a ``Rig`` that is opened without one; the fixture ``payload`` sets it. Small tiers use lmdb for auto."""


def key(number: int) -> PageKey:
    return PageKey(hashlib.sha256(b"page %d" % number).digest() + bytes(4))


def page(number: int, version: int = 0, nbytes: int = PAGE) -> NDArray[np.uint8]:
    return np.random.default_rng([number, version]).integers(0, 256, nbytes, dtype=np.uint8)


def blank(nbytes: int = PAGE) -> NDArray[np.uint8]:
    return np.full(nbytes, 0xA5, dtype=np.uint8)


def first_size(message: str) -> int:
    """Return the first exact size in a message, in bytes: 6144 for "6 KiB (6,144 bytes)"."""
    found = re.search(r"\(([0-9,]+) bytes\)", message)
    assert found is not None, message
    return int(found[1].replace(",", ""))


def data_file(home: Path, fingerprint: str = FINGERPRINT, shard: int = 0) -> Path:
    return home / f"{fingerprint}-{shard}" / "data.mdb"


def extent_files(home: Path, fingerprint: str = FINGERPRINT) -> list[Path]:
    return sorted(data_file(home, fingerprint).parent.glob("extent-*.bin"))


def find(home: Path, needle: bytes, fingerprint: str = FINGERPRINT) -> tuple[Path, int]:
    """Return the file and the offset of the only occurrence of these bytes on disk."""
    found = []
    for path in (data_file(home, fingerprint), *extent_files(home, fingerprint)):
        raw = path.read_bytes()
        position = raw.find(needle)
        while position >= 0:
            found.append((path, position))
            position = raw.find(needle, position + 1)
    assert len(found) == 1, found
    return found[0]


def writer_of(tier: NvmeTier) -> Writer:
    """Return the writer of a tier that was opened for writing."""
    assert isinstance(tier._writer, Writer)
    return tier._writer


def catalogue_of(tier: NvmeTier) -> Catalogue:
    """Return the catalogue of a tier that was opened for writing."""
    assert isinstance(tier._catalogue, Catalogue)
    return tier._catalogue


def on_disk(home: Path) -> int:
    """Return the disk space that a tier's directory takes, in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in [home, *home.rglob("*")])


def change(path: Path, position: int, new: bytes) -> None:
    """Overwrite bytes of a file, starting at ``position``."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(new)


class Rig:
    """An open tier, with methods that submit operations and wait for their acks."""

    def __init__(
        self,
        home: Path,
        *,
        capacity: int = CAPACITY,
        page_nbytes: int = PAGE,
        fingerprint: str = FINGERPRINT,
        shard: int = 0,
        payload: str | None = None,
        timeout_s: float = PATIENCE_S,
        readers: int | None = None,
        codec: str = "none",
        layout: PageLayout | None = None,
        held: str = "none",
        batch_nbytes: int | None = None,
    ) -> None:
        self.home = home
        self.page_nbytes = page_nbytes
        self.view_nbytes = page_nbytes if layout is None else HostFormat.of(held, layout).view_nbytes
        self._woken = threading.Event()
        self._acks: dict[int, Ack] = {}
        self._last_id = 0
        self.tier = NvmeTier.open(
            home,
            capacity=capacity,
            fingerprint=fingerprint,
            shard=shard,
            page_nbytes=page_nbytes,
            wake=self._woken.set,
            description={"model": "test"},
            payload=payload or default_payload,
            timeout_s=timeout_s,
            readers=readers,
            codec=codec,
            layout=layout,
            held=held,
            batch_nbytes=batch_nbytes,
        )

    def transfer(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None] | None = None) -> Transfer:
        self._last_id += 1
        return Transfer(
            id=self._last_id,
            keys=tuple(keys),
            src=Tier.HOST,
            src_slots=(),
            dst=Tier.NVME,
            dst_slots=(),
            nbytes=0,
            parents=tuple(parents) if parents is not None else (None,) * len(keys),
        )

    def submit_write(self, numbers: Sequence[int], version: int = 0) -> int:
        transfer = self.transfer([key(n) for n in numbers])
        self.tier.submit_write(transfer, [page(n, version, self.page_nbytes) for n in numbers])
        return transfer.id

    def submit_read(self, numbers: Sequence[int]) -> tuple[int, list[NDArray[np.uint8]]]:
        transfer = self.transfer([key(n) for n in numbers])
        out = [blank(self.view_nbytes) for _ in numbers]
        self.tier.submit_read(transfer, out)
        return transfer.id, out

    def ack(self, transfer_id: int) -> Ack:
        deadline = time.monotonic() + PATIENCE_S
        while transfer_id not in self._acks:
            self._woken.clear()
            self._acks.update((ack.transfer_id, ack) for ack in self.tier.poll())
            if transfer_id in self._acks:
                break
            assert self._woken.wait(max(0.0, deadline - time.monotonic())), "no ack came"
        return self._acks.pop(transfer_id)

    def write(self, numbers: Sequence[int], version: int = 0) -> Ack:
        return self.ack(self.submit_write(numbers, version))

    def read(self, numbers: Sequence[int]) -> tuple[Ack, list[NDArray[np.uint8]]]:
        transfer_id, out = self.submit_read(numbers)
        return self.ack(transfer_id), out

    def erase(self, numbers: Sequence[int]) -> None:
        self.tier.submit_erase([key(n) for n in numbers])

    def present(self, numbers: Sequence[int], version: int = 0) -> set[int]:
        """Return which of ``numbers`` can be read, and assert that these pages have the expected bytes."""
        ack, out = self.read(numbers)
        lost = {index for index, _ in ack.failures} | set(ack.late)
        there = [(index, n) for index, n in enumerate(numbers) if index not in lost]
        for index, n in there:
            np.testing.assert_array_equal(out[index], page(n, version, self.page_nbytes))
        return {n for _, n in there}

    def close(self) -> None:
        assert self.tier.close(PATIENCE_S)


def wait_until_writable(rig: Rig) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while rig.tier.stats()["read_only"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def data_file_is_read_only(
    home: Path, fingerprint: str = FINGERPRINT, *, name: str = "data.mdb"
) -> Iterator[None]:
    """Make all open descriptors of the file ``name`` refuse writes, with an error other than that of a full disk."""
    path = data_file(home, fingerprint).resolve().with_name(name)
    open_now = [int(name) for name in os.listdir("/proc/self/fd")]
    ours = [fd for fd in open_now if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
    assert ours
    reading = os.open(path, os.O_RDONLY)
    swapped = {fd: os.dup(fd) for fd in ours}
    for fd in ours:
        os.dup2(reading, fd)
    try:
        yield
    finally:
        for fd, kept in swapped.items():
            os.dup2(kept, fd)
            os.close(kept)
        os.close(reading)
