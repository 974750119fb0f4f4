"""Program that a test kills: it writes, erases and syncs in a loop, and prints what is durable.

``sync N`` means that pages below N are durable, ``gone N`` that the erase of pages below N is durable.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.nvme.rig import PATIENCE_S, Rig


def main() -> None:
    home, first = Path(sys.argv[1]), int(sys.argv[2])
    rig = Rig(home, payload=sys.argv[3])
    for _ in rig.tier.records():
        pass
    number = first
    sys.stdout.write("open\n")
    sys.stdout.flush()
    while True:
        writes = [rig.submit_write(range(number + i, number + i + 3)) for i in range(0, 9, 3)]
        number += 9
        if (number - first) % 27 == 0 and number - first > 100:
            rig.erase(range(first, number - 100))
        for write in writes:
            assert rig.ack(write).ok
        if rig.tier.sync(PATIENCE_S):
            sys.stdout.write(f"sync {number}\n")
            if (number - first) % 27 == 0 and number - first > 100:
                sys.stdout.write(f"gone {number - 100}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
