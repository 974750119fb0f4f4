"""Collects the page keys and fingerprints by which pages on disk and in archives are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import tierstore
from tests.golden.trees import Tree

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
HOST_CODECS = ("none", "fp8", "int8", "k8v4", "int4", "int4-64")
DISK_CODECS = ("none", "exp", "fp8", "fp8+zstd", "int8", "int8+zstd", "k8v4", "int4", "int4-64")

TOKENS = [0, 1, 2, 3, 151_643, 2**31, 2**62, -1, 7, 7, 7, 7, 5]
"""Three pages of four tokens, and one more token."""

IDENTITIES: dict[str, dict[str, object]] = {
    "plain": {},
    "salt": {"salt": b"tenant"},
    "text": {"extra": ("lora-a",)},
    "bytes": {"extra": (b"lora-a",)},
    "integers": {"extra": (0, 255, -(2**70))},
    "ordered": {"extra": ("a", "b")},
    "placed": {"extra": ((5, b"image"),)},
    "placed-twice": {"extra": ((5, b"image"), (5, b"other"), (11, b"third"))},
    "mixed": {"salt": b"\x00", "extra": ("lora-a", b"\xff", 7, (4, b""))},
}
"""Arguments of ``TierStore.keys`` in addition to the tokens."""


def spec(**more: object) -> tierstore.PageSpec:
    fields: dict[str, object] = {
        "num_layers": 2,
        "page_size": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "model": "golden@1",
        **more,
    }
    return tierstore.PageSpec(**fields)  # type: ignore[arg-type]


SPECS: dict[str, tuple[tierstore.PageSpec, ...]] = {
    **{dtype: (spec(dtype=dtype),) for dtype in DTYPES},
    "mla": (spec(kind="mla", num_kv_heads=1),),
    "state": (spec(kind="state"),),
    "group-3": (spec(group=3),),
    "shard-2": (spec(shard=2),),
    "model": (spec(model="Modell-ä@2 tp=4"),),
    "two-groups": (spec(), spec(group=1, num_layers=1, head_dim=128)),
    "two-dtypes": (spec(), spec(group=1, dtype="float32")),
}


def _store(
    specs: Sequence[tierstore.PageSpec],
    path: Path | None = None,
    *,
    host: str | None = None,
    disk: str = "none",
) -> tierstore.TierStore:
    tree: dict[str, object] = {"hbm": {"capacity": "1MiB", "device": "cpu"}}
    if host is not None:
        tree["host"] = {"capacity": "1MiB", "codec": host, "pin": "never"}
    if path is not None:
        tree["nvme"] = {"path": str(path), "capacity": "4MiB", "codec": disk}
    return tierstore.TierStore.open(tierstore.load_config(tree), specs)


def fingerprints() -> Tree:
    """Return, for each set of page specs, the fingerprint of each spec, and that of a page with all these specs."""
    found: dict[str, Tree] = {}
    for name, specs in SPECS.items():
        with _store(specs) as store:
            page = store.stats()["fingerprint"]
        assert isinstance(page, str)
        found[name] = {"specs": [each.fingerprint for each in specs], "page": page}
    return found


def keys() -> Tree:
    """Return the keys of ``TOKENS`` for every set of page specs, and for every item of ``IDENTITIES``."""
    found: dict[str, Tree] = {}
    for name, specs in SPECS.items():
        with _store(specs) as store:
            found[name] = [key.hex() for key in store.keys(TOKENS)]
    with _store(SPECS["bfloat16"]) as store:
        for name, arguments in IDENTITIES.items():
            found[f"keys({name})"] = [
                key.hex()
                for key in store.keys(TOKENS, **arguments)  # type: ignore[arg-type]
            ]
        same = store.keys(TOKENS)
        for tokens in (tuple(TOKENS), np.array(TOKENS, dtype=np.int64), torch.tensor(TOKENS)):
            assert store.keys(tokens) == same
    return found


def loss_classes(scratch: Path) -> Tree:
    """Return a key and the directory names for every codec of host memory and of disk.

    Both the key and the names depend on the codec's loss class.
    """
    found: dict[str, Tree] = {}
    pairs = [(host, "none") for host in HOST_CODECS] + [(None, disk) for disk in DISK_CODECS]
    for host, disk in pairs:
        path = scratch / f"{host}-{disk}"
        with _store(SPECS["bfloat16"], path, host=host, disk=disk) as store:
            (first, *_) = store.keys(TOKENS)
        shards = [each.name for each in sorted(path.iterdir()) if each.is_dir()]
        found[f"host {host}, nvme {disk}"] = {"key": first.hex(), "directories": list(shards)}
    return found
