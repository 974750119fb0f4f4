"""Makes TierStore's tiers available to SGLang as a storage backend (L3), below SGLang's own host memory.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --hicache-mem-layout page_first \\
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "tierstore",
        "module_path": "tierstore.adapters.sglang", "class_name": "TierStoreStorage", "interface_v1": 1,
        "config": "tierstore.yaml"}'

Pages on disk are checksummed, and are found again after a restart. Their total size is limited. A page is found only
by an engine with the same model, revision, dtypes, layout, page size and parallelism. Where SGLang's host memory is
small, pages can also stay in host memory of TierStore, beside the disk or without one (``host_cache``).

Pages are copied through staging buffers (``staged_pages``), which consist of huge pages. There are two reasons. First,
a read that hangs may still write to its buffer much later, after SGLang has reused the memory for another page.
Second, a disk fills huge pages up to three times as fast as SGLang's memory pages of 4 KiB
(docs/benchmarks/disk.md). A page is copied to SGLang's memory only after its checksum was verified.

``storage`` is the backend, and the only module that imports SGLang. It requires SGLang 0.5.23. SGLang is imported when
``TierStoreStorage`` is first accessed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierStoreStorage"]


def __getattr__(name: str) -> Any:
    if name == "TierStoreStorage":
        from tierstore.adapters.sglang.storage import TierStoreStorage

        return TierStoreStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
