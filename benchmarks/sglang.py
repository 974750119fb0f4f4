"""Compares TierStore's storage backend for SGLang with SGLang's own ``file`` backend and with the raw disk.

    python -m benchmarks.sglang --dir DISK --json

Each backend gets the same pages through SGLang's own interface, in batches of 128 pages, from host memory that
SGLang's allocator provides. A run writes all pages, waits until they are on disk, drops them from the page cache and
reads them back, in batches in random order. Each run of a backend is paired with a run of the raw disk: a preallocated
file that is read and written with direct I/O, page by page, with buffers in huge pages, the same number of reading
threads and the same order.

``file`` is called as SGLang calls it: its pages are tensors, and are copied from and to host memory. It does not sync
its files. The time to write them includes ``os.sync``, so that both backends are measured until all bytes are on disk.

If the package ``mooncake`` is installed, SGLang's backend for Mooncake is measured as well, over TCP on the loopback
interface. In the first part it keeps pages in memory only, so its rates are not those of a disk. In the second part it
also writes them to files, and finds them there after a restart.

The second part changes 1,000 random bytes in the files of each backend, and counts the pages that are returned with
wrong bytes. Bytes in TierStore's catalogue are changed in a separate run, because the tier starts empty if one of them
is damaged.

The Python that runs this must have SGLang and TierStore. Without a GPU, ``--prepare MODULE:NAME`` calls a function
that replaces the parts of SGLang that need one, such as ``tests.sglang.shims:install``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, Popen
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore.bench.nvme import Load, RawFile, batch_pages_of, capacity_for
from tierstore.bench.raw_disk import aligned, forget
from tierstore.config import parse_size
from tierstore.nvme.directory_layout import DATA_FILE

BATCH = 128
"""Number of pages per call of a backend, as in SGLang."""

TOKENS = 64
"""Number of tokens per page."""

SIZES = ("64KiB", "256KiB", "1MiB", "2MiB", "8MiB")
GOALS = {"read": 0.95, "write": 0.90}

Bytes = NDArray[np.uint8]


class Pool:
    """A host pool of K and V in the layout page_first, in memory of SGLang's allocator."""

    layout = "page_first"
    page_size = TOKENS
    dtype = torch.bfloat16
    head_num = 1
    head_dim = 64
    storage_format_tag = None

    def __init__(self, pages: int, page_nbytes: int) -> None:
        from sglang.srt.mem_cache.storage.mmap import alloc_mmap

        self.layer_num = page_nbytes // (2 * TOKENS * self.head_dim * 2)
        self.size = pages * TOKENS
        shape = (2, self.size, self.layer_num, self.head_num, self.head_dim)
        self.kv_buffer: torch.Tensor = alloc_mmap(shape, self.dtype)
        self.part_nbytes = page_nbytes // 2
        self.size_per_token = page_nbytes // TOKENS

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return the addresses and sizes of the buffers of these pages, as SGLang's pools do."""
        base, plane = self.kv_buffer.data_ptr(), self.size * self.size_per_token // 2
        token = self.part_nbytes // TOKENS
        starts = [base + index * token for index in indices.tolist()[::TOKENS]]
        addresses = [at for start in starts for at in (start, start + plane)]
        return addresses, [self.part_nbytes] * len(addresses)

    def get_ksize_per_token(self) -> int:
        """Return the size in bytes of the K of a token. Mooncake's backend asks for it."""
        return self.size_per_token // 2

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a copy of a page as a flat tensor."""
        return self.kv_buffer[:, index : index + TOKENS].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a tensor of zeros with the size of a page."""
        return torch.zeros(2 * TOKENS * self.layer_num * self.head_dim, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        """Copy a flat tensor to a page."""
        self.kv_buffer[:, index : index + TOKENS] = page.reshape(
            2, TOKENS, self.layer_num, self.head_num, self.head_dim
        )

    def page(self, number: int) -> Bytes:
        """Return the bytes of a page, uint8 ``[2, page_nbytes / 2]``."""
        place = self.kv_buffer[:, number * TOKENS : (number + 1) * TOKENS]
        found: Bytes = place.view(torch.uint8).reshape(2, -1).numpy()
        return found


class Backend(ABC):
    """A storage backend with the pages of one pool."""

    name: ClassVar[str]

    def __init__(self, folder: Path, pool: Pool, readers: int = 0) -> None:
        self.folder, self.pool = folder, pool

    @abstractmethod
    def write(self, numbers: Sequence[int]) -> None:
        """Store a batch of pages."""

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> list[bool]:
        """Read a batch of pages into the pool. Return which pages arrived."""

    @abstractmethod
    def flush(self) -> None:
        """Return once all pages are on disk."""

    @abstractmethod
    def close(self) -> None:
        """Close the backend."""

    def cool(self) -> None:
        """Drop the backend's files from the page cache."""
        for path in self.folder.rglob("*"):
            if path.is_file() and "lock" not in path.name:
                forget(path)


class Ours(Backend):
    """TierStore's backend with the interface v1."""

    name = "TierStore"

    def __init__(self, folder: Path, pool: Pool, readers: int) -> None:
        super().__init__(folder, pool)
        from tierstore.adapters.sglang.storage import TierStoreStorage

        nvme = {
            "path": str(folder),
            "capacity": capacity_for(pool.size * pool.size_per_token),
            "payload": "extents",
            "readers": readers,
            "timeout": 600.0,
        }
        self._storage = TierStoreStorage(_config({"interface_v1": 1, "config": {"nvme": nvme}}), {})
        self._storage.register_mem_pool_host(pool)
        self._storage.on_host_pools_registered()
        for pages in self._storage._opened().values():
            pages._memory[:, ::4096] = 0  # page faults do not disturb measurements, as with the raw file

    def write(self, numbers: Sequence[int]) -> None:
        stored = self._storage.batch_set_v1([*map(_key, numbers)], _tokens(numbers))
        assert all(stored)

    def read(self, numbers: Sequence[int]) -> list[bool]:
        found: list[bool] = self._storage.batch_get_v1([*map(_key, numbers)], _tokens(numbers))
        return found

    def flush(self) -> None:
        assert self._storage.flush(600.0)

    def close(self) -> None:
        self._storage.close()


class File(Backend):
    """SGLang's ``file`` backend, which SGLang calls with tensors."""

    name = "file"

    def __init__(self, folder: Path, pool: Pool, readers: int) -> None:
        super().__init__(folder, pool)
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        folder.mkdir(parents=True, exist_ok=True)
        self._storage = HiCacheFile(_config({}), str(folder))
        self._storage.register_mem_pool_host(pool)

    def write(self, numbers: Sequence[int]) -> None:
        pages = [self.pool.get_data_page(number * TOKENS) for number in numbers]
        assert self._storage.batch_set([*map(_key, numbers)], pages)

    def read(self, numbers: Sequence[int]) -> list[bool]:
        targets = [self.pool.get_dummy_flat_data_page() for _ in numbers]
        pages = self._storage.batch_get([*map(_key, numbers)], targets)
        for number, page in zip(numbers, pages, strict=True):
            if page is not None:
                self.pool.set_from_flat_data_page(number * TOKENS, page)
        return [page is not None for page in pages]

    def flush(self) -> None:
        os.sync()

    def close(self) -> None: ...


class Mooncake(Backend):
    """SGLang's backend for Mooncake over TCP on the loopback interface. One process is the store and its only client.

    Mooncake keeps pages in memory. With ``on_disk``, it also copies them to files, in which it finds them after a
    restart. It writes these files in buckets every 10 s and keeps the last bucket in memory until it is full.
    """

    name = "Mooncake"

    def __init__(self, folder: Path, pool: Pool, readers: int, *, on_disk: bool = False) -> None:
        super().__init__(folder, pool)
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        folder.mkdir(parents=True, exist_ok=True)
        self._on_disk = on_disk
        port, metrics = _free_port(), _free_port()
        program = Path(_mooncake_folder() or "") / "mooncake_master"
        command = [
            f"--rpc_port={port}",
            f"--metrics_port={metrics}",
            f"--enable_offload={str(on_disk).lower()}",
        ]
        self._master = Popen([str(program), *command], stdout=DEVNULL, stderr=DEVNULL)
        extra = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{port}",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 2 * pool.size * pool.size_per_token,
            "check_server": False,
            **({"enable_ssd_offload": True, "ssd_offload_path": str(folder)} if on_disk else {}),
        }
        try:
            _wait_for_port(port)
            self._storage = MooncakeStore(_config(extra), pool)
            self._storage.register_mem_pool_host(pool)
        except BaseException:
            self._master.kill()
            self._master.wait()
            raise

    def write(self, numbers: Sequence[int]) -> None:
        assert all(self._storage.batch_set_v1([*map(_key, numbers)], _tokens(numbers)))

    def read(self, numbers: Sequence[int]) -> list[bool]:
        found: list[bool] = self._storage.batch_get_v1([*map(_key, numbers)], _tokens(numbers))
        return found

    def flush(self) -> None:
        """Return once no file has grown for longer than the interval at which Mooncake writes files."""
        seen, quiet = -1, 0
        while self._on_disk and quiet < 3:
            sleep(5.0)
            now = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            seen, quiet = now, quiet + 1 if now == seen and now else 0

    def cool(self) -> None: ...

    def close(self) -> None:
        self._storage.close()
        self._master.terminate()
        self._master.wait()


def _mooncake_folder() -> str | None:
    """Return the folder of the package ``mooncake``, or None if it is not installed."""
    spec = find_spec("mooncake")
    return None if spec is None or not spec.submodule_search_locations else spec.submodule_search_locations[0]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for_port(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            sleep(0.1)
        else:
            return
    raise OSError(f"mooncake_master does not listen on port {port}")


def backends() -> tuple[type[Backend], ...]:
    """Return the backends to compare. Mooncake is left out if its package is not installed."""
    if _mooncake_folder() is None:
        sys.stderr.write("without Mooncake: install mooncake-transfer-engine-non-cuda to measure it\n")
        return (Ours, File)
    return (Ours, File, Mooncake)


def _config(extra: dict[str, Any]) -> Any:
    names = ("tp_rank", "pp_rank", "attn_cp_rank", "dp_rank", "dcp_rank")
    sizes = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")
    return SimpleNamespace(
        **dict.fromkeys(names, 0),
        **dict.fromkeys(sizes, 1),
        is_mla_model=False,
        is_storage_writer=True,
        enable_storage_metrics=False,
        model_name="benchmark",
        tp_lcm_size=None,
        should_split_heads=False,
        logical_page_size=None,
        extra_config=extra,
    )


def _key(number: int) -> str:
    return f"{number:064x}"


def _tokens(numbers: Sequence[int]) -> torch.Tensor:
    return (torch.tensor(numbers)[:, None] * TOKENS + torch.arange(TOKENS)).reshape(-1)


def _batches(pages: int, rng: np.random.Generator | None = None) -> list[range]:
    """Return the batches of a run, in random order if ``rng`` is given."""
    batches = [range(start, min(start + BATCH, pages)) for start in range(0, pages, BATCH)]
    if rng is not None:
        rng.shuffle(batches)
    return batches


def _filled(pool: Pool, seed: int) -> Bytes:
    """Fill a pool with random bytes. Return them, uint8 ``[pages, page_nbytes]``, in memory for direct I/O."""
    rng = np.random.default_rng(seed)
    pages = pool.size // TOKENS
    content = aligned(pages, 2 * pool.part_nbytes)
    for number in range(pages):
        content[number] = rng.integers(0, 256, content.shape[1], dtype=np.uint8)
        pool.page(number)[:] = content[number].reshape(2, -1)
    return content


def _wrong(pool: Pool, content: Bytes, found: Sequence[bool]) -> int:
    return sum(
        arrived and not np.array_equal(pool.page(number).reshape(-1), content[number])
        for number, arrived in enumerate(found)
    )


def _timed(act: Callable[[], object], nbytes: int) -> float:
    began = perf_counter()
    act()
    return nbytes / (perf_counter() - began) / 1e9


def _run(backend: Backend, content: Bytes, order: list[range]) -> dict[str, float]:
    """Write and read all pages once. Return the rates in GB/s."""
    pages = len(content)

    def write() -> None:
        for batch in _batches(pages):
            backend.write(batch)
        backend.flush()

    def read() -> None:
        for batch in order:
            assert all(backend.read(batch))

    rates = {"write": _timed(write, content.nbytes)}
    backend.cool()
    backend.pool.kv_buffer.zero_()
    rates["read"] = _timed(read, content.nbytes)
    assert _wrong(backend.pool, content, [True] * pages) == 0
    return rates


def _raw(folder: Path, content: Bytes, order: list[range], readers: int) -> dict[str, float]:
    nbytes = content.shape[1]
    load = Load(
        content,
        [n for batch in order for n in batch],
        batch_pages_of(content.nbytes, nbytes, "extents"),
        readers,
    )
    disk = RawFile(folder, load)
    out = aligned(*content.shape)
    try:
        rates = {"write": _timed(disk.write, content.nbytes)}
        disk.cool()
        rates["read"] = _timed(lambda: disk.read(out), content.nbytes)
    finally:
        disk.close()
    return rates


def rates(
    place: Path, page_nbytes: int, nbytes: int, rounds: int, readers: int
) -> Iterator[dict[str, object]]:
    """Yield a row for each backend and direction: its median rate, and its median share of the raw disk's rate."""
    pool = Pool(nbytes // page_nbytes, page_nbytes)
    content = _filled(pool, 0)
    kinds = backends()
    runs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {each.name: [] for each in kinds}
    for turn in range(rounds):
        order = _batches(len(content), np.random.default_rng(turn))
        for kind in kinds:
            raw = _raw(place / "raw", content, order, readers)
            shutil.rmtree(place / "raw")
            for number in range(len(content)):
                pool.page(number)[:] = content[number].reshape(2, -1)
            backend = kind(place / kind.name, pool, readers)
            try:
                runs[kind.name].append((_run(backend, content, order), raw))
            finally:
                backend.close()
                shutil.rmtree(place / kind.name)
    for name, pairs in runs.items():
        for what in ("write", "read"):
            shares = sorted(mine[what] / raw[what] for mine, raw in pairs)
            yield {
                "page_nbytes": page_nbytes,
                "backend": name,
                "what": what,
                "medium": "memory" if name == Mooncake.name else "disk",
                "gbps": round(median(mine[what] for mine, _ in pairs), 3),
                "raw_gbps": round(median(raw[what] for _, raw in pairs), 3),
                "share": round(median(shares), 3),
                "shares": [round(share, 3) for share in shares],
                "goal": GOALS[what] if name == Ours.name else None,
            }


def damage(place: Path, page_nbytes: int, nbytes: int, changes: int) -> Iterator[dict[str, object]]:
    """Yield a row for each backend: how many pages were wrong, missing and intact after ``changes`` changed bytes."""
    mooncake = partial(Mooncake, on_disk=True)
    turns: list[tuple[str, Callable[[Path, Pool, int], Backend], str]] = [
        (Ours.name, Ours, "pages"),
        (Ours.name, Ours, "catalogue"),
        (File.name, File, "pages"),
    ]
    if Mooncake in backends():
        turns += [(Mooncake.name, mooncake, "pages"), (Mooncake.name, mooncake, "catalogue")]
    for name, kind, where in turns:
        pool = Pool(nbytes // page_nbytes, page_nbytes)
        content = _filled(pool, 1)
        folder = place / name
        backend = kind(folder, pool, 2)
        for batch in _batches(len(content)):
            backend.write(batch)
        backend.flush()
        backend.close()
        changed = _change(folder, changes, where)
        backend = kind(folder, pool, 2)
        pool.kv_buffer.zero_()
        found: list[bool] = []
        for batch in _batches(len(content)):
            found += _each(backend, batch)
        wrong = _wrong(pool, content, found)
        backend.close()
        shutil.rmtree(folder)
        yield {
            "backend": name,
            "files": where,
            "pages": len(content),
            "changed_bytes": changed,
            "wrong": wrong,
            "missing": len(found) - sum(found),
            "intact": sum(found) - wrong,
        }


def _each(backend: Backend, batch: range) -> list[bool]:
    """Read pages one by one, because a backend may end a batch at the first missing page."""
    return [backend.read([number])[0] for number in batch]


def _change(folder: Path, changes: int, where: str) -> int:
    """Change random bytes in the files with pages or in the catalogue, uniformly over all bytes written to them."""
    rng = np.random.default_rng(2)
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    catalogue = [path for path in found if path.name == DATA_FILE or path.suffix == ".meta"]
    extents = [path for path in found if path.name.startswith("extent") or path.suffix == ".bucket"]
    files = catalogue if where == "catalogue" else extents or found
    sizes = np.array([_written(path) for path in files], dtype=np.int64)
    ends = np.cumsum(sizes)
    for position in rng.integers(0, ends[-1], changes).tolist():
        number = int(np.searchsorted(ends, position, side="right"))
        at = position - int(ends[number] - sizes[number])
        with files[number].open("r+b") as stream:
            stream.seek(at)
            (old,) = stream.read(1)
            stream.seek(at)
            stream.write(bytes([old ^ int(rng.integers(1, 256))]))
    os.sync()
    return changes


def _written(path: Path) -> int:
    """Return the length of a file without the zeros at its end, which no page has filled yet."""
    end = path.stat().st_size
    with path.open("rb") as stream:
        while end > 0:
            start = max(0, end - (1 << 20))
            stream.seek(start)
            kept = len(stream.read(end - start).rstrip(b"\0"))
            if kept:
                return start + kept
            end = start
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--page-sizes", default=",".join(SIZES), help="sizes of a page, separated by commas")
    parser.add_argument("--size", default="1GiB", help="size of all pages of a run")
    parser.add_argument("--rounds", type=int, default=3, help="number of pairs of runs")
    parser.add_argument("--readers", type=int, default=4, help="number of reading threads")
    parser.add_argument("--changes", type=int, default=1000, help="number of bytes to change; 0: no damage")
    parser.add_argument("--damage-page", default="64KiB", help="size of a page in the second part")
    parser.add_argument("--damage-size", default="256MiB", help="size of all pages in the second part")
    parser.add_argument("--prepare", help="a function, MODULE:NAME, to call before SGLang is imported")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    args = parser.parse_args(argv)
    if args.prepare:
        module, _, name = args.prepare.partition(":")
        getattr(import_module(module), name)()
    sizes = [parse_size(size) for size in args.page_sizes.split(",")] if args.page_sizes else []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = Path(folder)
        for page_nbytes in sizes:
            for row in rates(place, page_nbytes, parse_size(args.size), args.rounds, args.readers):
                _tell(row, args.json)
        if args.changes:
            for row in damage(
                place, parse_size(args.damage_page), parse_size(args.damage_size), args.changes
            ):
                _tell(row, args.json)


def _tell(row: dict[str, object], as_json: bool) -> None:
    text = json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
