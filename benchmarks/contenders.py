"""Alternatives to the NVMe tier that ``bench nvme`` measures too: plain LMDB, and one file per page."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from tierstore.bench.core import synthetic_key
from tierstore.bench.nvme import Contender, capacity_for
from tierstore.bench.raw_disk import whole

if TYPE_CHECKING:
    from pathlib import Path

    from tierstore.bench.nvme import Bytes, Load, Make


class FilePerPage(Contender):
    """One file per page. Each file is synced to disk separately, as in the simplest possible disk tier."""

    def write(self) -> None:
        for index, page in enumerate(self.load.pages):
            fd = os.open(self.folder / str(index), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                whole(os.write(fd, page.data), page.nbytes)
                os.fdatasync(fd)
            finally:
                os.close(fd)

    def read(self, out: Bytes) -> None:
        def one(index: int) -> None:
            fd = os.open(self.folder / str(index), os.O_RDONLY | os.O_CLOEXEC)
            try:
                whole(os.preadv(fd, [out[index].data], 0), out.shape[1])
            finally:
                os.close(fd)

        self._spread(one)

    def close(self) -> None: ...


class PlainLmdb(Contender):
    """LMDB with its default options.

    Each transaction puts a batch of pages. Reads copy pages from the memory map. Pages have no checksums.
    """

    def __init__(self, folder: Path, load: Load) -> None:
        super().__init__(folder, load)
        self._env = self._open()

    def write(self) -> None:
        pages, batch = self.load.pages, self.load.batch_pages
        for start in range(0, len(pages), batch):
            with self._env.begin(write=True) as txn:
                for index in range(start, min(start + batch, len(pages))):
                    txn.put(synthetic_key(index), pages[index].data)

    def cool(self) -> None:
        self._env.close()  # the kernel does not drop mapped pages from its cache
        super().cool()
        self._env = self._open()

    def read(self, out: Bytes) -> None:
        def one(index: int) -> None:
            with self._env.begin(buffers=True) as txn:
                value = txn.get(synthetic_key(index))
                if value is None:
                    raise OSError(f"LMDB does not have page {index}, which was written to it")
                np.copyto(out[index], np.frombuffer(value, dtype=np.uint8))

        self._spread(one)

    def close(self) -> None:
        self._env.close()

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self.folder), map_size=capacity_for(self.load.pages.nbytes), mode=0o600)


CONTENDERS: dict[str, Make] = {"plain LMDB": PlainLmdb, "file per page": FilePerPage}
"""Contenders by name, in the order of their rows in ``bench nvme``, after the tier and the raw file."""
