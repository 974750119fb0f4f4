"""A program that uses only the public API. It writes ten times the capacity of HBM and HOST, and reads all pages back.

It reads in random order. If the directory exists already, it only reads. Usage: ``python ten_times.py DIR``.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

import torch

import tierstore
from tierstore import PageKey, PageSpec, TierStore

DIRECTORY = Path(sys.argv[1])
HBM, HOST, LENGTH = 12, 36, 8
SPEC = PageSpec(num_layers=4, page_size=16, num_kv_heads=2, head_dim=32, dtype="float32", model="ten-times")
CONFIG = tierstore.load_config(
    {
        "hbm": {"capacity": HBM * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": HOST * SPEC.page_nbytes},
        "nvme": {"path": DIRECTORY, "capacity": "256MiB"},
    }
)
DOCUMENTS = [range(n * 1000, n * 1000 + 16 * LENGTH) for n in range(10 * (HBM + HOST) // LENGTH)]


def page(key: PageKey) -> torch.Tensor:
    data = bytearray(hashlib.shake_128(key).digest(SPEC.page_nbytes))
    return torch.frombuffer(data, dtype=torch.int32).view(SPEC.shape)


fresh = not DIRECTORY.exists()
with TierStore.open(CONFIG, SPEC) as store:
    pages = store.pages
    assert isinstance(pages, torch.Tensor)
    for tokens in DOCUMENTS if fresh else []:
        keys = store.keys(tokens)
        slots = store.allocate(len(keys), timeout_s=30)
        for key, slot in zip(keys, slots, strict=True):
            pages[slot].view(torch.int32).copy_(page(key))
        store.put(keys, slots)
    store.flush()
    read = 0
    for tokens in random.sample(DOCUMENTS, len(DOCUMENTS)):
        with store.acquire(store.keys(tokens)) as lease:
            assert lease.wait(30) is tierstore.LeaseState.READY
            assert not lease.missing, lease.missing
            for key, slot in zip(lease.keys, lease.slots, strict=True):
                assert torch.equal(pages[slot].view(torch.int32), page(key)), "wrong bytes"
                read += 1
    store.check()
    sys.stdout.write(f"{'filled' if fresh else 'reopened'}, {read} pages read, all right\n")
