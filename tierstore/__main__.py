"""Entry point of ``python -m tierstore``, which is equivalent to the command ``tierstore``."""

from __future__ import annotations

from tierstore.cli import main

if __name__ == "__main__":
    main()
