"""Studies outside the wheel: the comparison with plain transformers, an engine's copies, hints, the disk's contenders.

A study may import ``tierstore`` and ``prefetch``; neither of them imports a study. The command line finds the studies
in a checkout (``tierstore compare``, ``tierstore bench engine``, ``tierstore bench hints``).
"""
