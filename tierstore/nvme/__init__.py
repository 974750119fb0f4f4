"""The NVMe tier: page records in LMDB or in extent files, with one writer thread and several reader threads.

Import its modules directly; this package exports nothing.
"""

from __future__ import annotations
