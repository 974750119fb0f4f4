"""``python -m benchmarks.compare``: the same as ``tierstore compare``."""

from __future__ import annotations

import sys

from tierstore.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "compare")
    main()
