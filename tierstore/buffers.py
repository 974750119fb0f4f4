"""Memory that pages are read into and written from: in huge pages, which is what makes a disk fast.

Past the page cache a disk is given the addresses of a transfer page by page. From pages of 4 KiB that is two thousand
for 8 MiB, which are cut into many small requests: a fast disk then gives a third of what it gives into huge pages
(docs/measurements.md, "Memory that a disk reads into").
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HUGE_NBYTES = 2 << 20
"""Of a huge page; larger ones of other machines are multiples of it."""

_WORTH_NBYTES = 64 << 10


def buffer(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed flat memory of its own, on a page boundary, and on that of a huge page from 64 KiB on.

    Untouched it costs nothing; touched, whole huge pages where the kernel has them (transparent_hugepage ``always`` or
    ``madvise``). It returns to the system with the last view. A forked child has no such memory: else a transfer under
    way while a process forks could go to the child's copy.
    """
    import numpy as np  # here: who wants only the geometry of pages loads nothing heavy

    huge = nbytes >= _WORTH_NBYTES
    unit = HUGE_NBYTES if huge else mmap.PAGESIZE
    length = max(1, -(-nbytes // unit)) * unit
    # Private: shared memory has huge pages only where an administrator gave it some.
    mapping = mmap.mmap(-1, length + (unit if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in [mmap.MADV_DONTFORK, *([mmap.MADV_HUGEPAGE] if huge else [])]:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    start = -whole.ctypes.data % unit
    return whole[start : start + nbytes]
