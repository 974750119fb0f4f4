"""The NVMe tier: page records in LMDB or in extent files, one writer, some readers.

Import its modules; this file imports nothing.
"""

from __future__ import annotations
