"""Writes, unpacks and describes directories and archives. Those of an earlier version are kept, packed, in ``data/``.

The content of a page follows from its key, so every page can be checked, whichever version wrote it. Only public calls
and the command line are used.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

import tierstore
from tests.golden.command import told
from tests.golden.trees import DATA, Tree

PATIENCE_S = 60.0
PAGE_SIZE = 8
SPEC = tierstore.PageSpec(
    num_layers=2, page_size=PAGE_SIZE, num_kv_heads=2, head_dim=64, dtype="bfloat16", model="golden@1"
)
SECOND = tierstore.PageSpec(
    num_layers=1, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=64, dtype="float16", group=1, model="golden@1"
)

TRUNK = list(range(6 * PAGE_SIZE))
BRANCH = [*TRUNK[: 3 * PAGE_SIZE], *range(1000, 1000 + 3 * PAGE_SIZE)]
"""The first three pages of ``TRUNK``, followed by three other pages."""
ERASED = list(range(2000, 2000 + 4 * PAGE_SIZE))
"""A document whose last two pages were evicted after they had been written."""
DOCUMENTS = {"trunk": TRUNK, "branch": BRANCH, "erased": ERASED}
KEPT = {"trunk": 6, "branch": 6, "erased": 2}
NUM_PAGES = 6 + 3 + 2


@dataclass(frozen=True)
class Case:
    """One directory: its payload, its codec, and the page spec of each KV group."""

    payload: str
    codec: str
    specs: tuple[tierstore.PageSpec, ...] = (SPEC,)

    @property
    def name(self) -> str:
        groups = "" if len(self.specs) == 1 else f"-{len(self.specs)}-groups"
        return f"{self.payload}-{self.codec}{groups}"

    @property
    def page_nbytes(self) -> int:
        return sum(spec.page_nbytes for spec in self.specs)


CASES = (
    *(Case(payload, codec) for payload in ("lmdb", "extents") for codec in ("none", "exp", "int8")),
    Case("lmdb", "none", (SPEC, SECOND)),
    Case("extents", "none", (SPEC, SECOND)),
)


def nvme_section(case: Case, path: Path) -> dict[str, object]:
    return {
        "path": str(path),
        "capacity": "4MiB",
        "codec": case.codec,
        "payload": case.payload,
        "flush": "10ms",
    }


def config_file(case: Case, path: Path) -> Path:
    """Write a configuration file next to the folder ``path``, which contains the case's NVMe tier. Return the file."""
    file = path.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({"nvme": nvme_section(case, path)}), encoding="utf-8")
    return file


def store_config(case: Case, path: Path | None) -> dict[str, object]:
    """Return a configuration with enough HBM for all pages and, if there is a path, the case's NVMe tier."""
    tree: dict[str, object] = {"hbm": {"capacity": 32 * case.page_nbytes, "device": "cpu"}}
    return tree if path is None else {**tree, "nvme": nvme_section(case, path)}


def open_store(case: Case, path: Path | None) -> tierstore.TierStore:
    """Open a store with the configuration of ``store_config``."""
    return tierstore.TierStore.open(tierstore.load_config(store_config(case, path)), case.specs)


def parts_of(store: tierstore.TierStore, slot: int) -> tuple[torch.Tensor, ...]:
    """Return the page in a slot, as one tensor per KV group."""
    page = store.pages[slot]
    return page if isinstance(page, tuple) else (page,)


def content(key: tierstore.PageKey, part: torch.Tensor, group: int) -> torch.Tensor:
    """Return one KV group of a page: multiples of 1/32 between -4 and 4, which are exact in every 16-bit dtype."""
    raw = hashlib.shake_128(key + bytes([group])).digest(part.numel())
    numbers = torch.frombuffer(bytearray(raw), dtype=torch.uint8).float().sub(128).div(32)
    return numbers.view(part.shape).to(part.dtype)


def put_documents(store: tierstore.TierStore) -> None:
    """Put all documents into a store, and evict the last two pages of ``ERASED``."""
    for tokens in DOCUMENTS.values():
        keys = store.keys(tokens)
        held = store.match(keys).num_pages
        slots = store.allocate(len(keys) - held)
        for key, slot in zip(keys[held:], slots, strict=True):
            for group, part in enumerate(parts_of(store, slot)):
                part.copy_(content(key, part, group))
        store.put(keys[held:], slots, parent=keys[held - 1] if held else None)
    assert store.flush().complete
    assert store.evict(store.keys(ERASED)[KEPT["erased"] :]) == 2
    assert store.flush_evictions() == 0


def digests(store: tierstore.TierStore, tokens: list[int]) -> dict[str, str]:
    """Return, by key, the SHA-256 of the bytes of each of the document's pages that the store has."""
    keys = store.keys(tokens)
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is tierstore.LeaseState.READY
        found = {}
        for key, slot in zip(keys, lease.slots, strict=False):
            raw = b"".join(
                part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts_of(store, slot)
            )
            found[key.hex()] = hashlib.sha256(raw).hexdigest()
        return found


def digests_put(store: tierstore.TierStore, tokens: list[int], kept: int) -> dict[str, str]:
    """Return the digests of a document's first ``kept`` pages, computed from the bytes that ``put_documents`` puts."""
    found = {}
    (slot,) = store.allocate(1)
    for key in store.keys(tokens)[:kept]:
        parts = parts_of(store, slot)
        raws = [
            content(key, part, group).view(torch.uint8).numpy().tobytes() for group, part in enumerate(parts)
        ]
        found[key.hex()] = hashlib.sha256(b"".join(raws)).hexdigest()
    store.free([slot])
    return found


def documents_of(store: tierstore.TierStore) -> Tree:
    """Return the digests of the pages of every document, as read from the store."""
    return {name: dict(digests(store, tokens)) for name, tokens in DOCUMENTS.items()}


def files_in(path: Path) -> Tree:
    """Return the names of all files below a directory, with the contents of its JSON files."""
    found: dict[str, Tree] = {}
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if file.suffix == ".json":
            found[name] = json.loads(file.read_text(encoding="utf-8"))
        else:
            found[name] = "directory" if file.is_dir() else "file"
    return found


def described(case: Case, path: Path) -> Tree:
    """Return a description of a directory: its files, and the output of ``inspect`` and ``verify``."""
    inspected, verified = told("inspect", path), told("verify", path)
    assert isinstance(inspected, dict)
    for shard in inspected["shards"]:
        del shard["disk_nbytes"]  # depends on the block size of the file system
    return {"files": files_in(path), "inspect": inspected["shards"], "verify": verified}


def exported_to(archive: Path, case: Case, home: Path) -> Tree:
    """Export every page of a closed directory to one file. Returns the command's report without the file's path."""
    found = told("export", "--config", config_file(case, home), "--all", archive)
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name != "path"}


def make(case: Case, scratch: Path) -> Tree:
    """Make a directory and an archive, and pack them into a file in ``data/``. Returns a description of both."""
    home, archive = scratch / case.name, scratch / f"{case.name}.tier"
    with open_store(case, home) as store:
        put_documents(store)
    before = described(case, home)
    exported = exported_to(archive, case, home)
    DATA.mkdir(exist_ok=True)
    with tarfile.open(DATA / f"{case.name}.tar.xz", "w:xz") as packed:
        for path in (archive, home, *sorted(home.rglob("*"))):
            _add(packed, path, str(path.relative_to(scratch)))
    with open_store(case, home) as store:
        return {"directory": before, "export": exported, "pages": documents_of(store)}


def unpack(case: Case, into: Path) -> tuple[Path, Path]:
    """Unpack the case's directory and its archive. Returns their paths."""
    with tarfile.open(DATA / f"{case.name}.tar.xz") as packed:
        packed.extractall(into, filter="data")
    return into / case.name, into / f"{case.name}.tier"


def _add(packed: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    if path.is_dir():
        entry.type, entry.mode = tarfile.DIRTYPE, 0o700
        packed.addfile(entry)
    else:
        raw = path.read_bytes()
        entry.size, entry.mode = len(raw), 0o600
        packed.addfile(entry, io.BytesIO(raw))
