"""Ways to keep pages on a disk without a tier, measured beside it by ``bench nvme``: plain LMDB, and a file a page."""

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
    """A file a page, each made durable by itself: the simplest disk tier there is."""

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
    """LMDB as it comes: ``put`` in transactions of a batch, ``get`` through the map. Nothing is checked."""

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
        self._env.close()  # the kernel keeps what is mapped
        super().cool()
        self._env = self._open()

    def read(self, out: Bytes) -> None:
        def one(index: int) -> None:
            with self._env.begin(buffers=True) as txn:
                value = txn.get(synthetic_key(index))
                if value is None:
                    raise OSError("LMDB does not have a page that it was given")
                np.copyto(out[index], np.frombuffer(value, dtype=np.uint8))

        self._spread(one)

    def close(self) -> None:
        self._env.close()

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self.folder), map_size=capacity_for(self.load.pages.nbytes), mode=0o600)


CONTENDERS: dict[str, Make] = {"plain LMDB": PlainLmdb, "file per page": FilePerPage}
"""The rows of ``bench nvme`` after those of the tier and of the raw file."""
