"""Benchmarks that are part of a checkout but not of the wheel.

They compare TierStore with plain transformers, and measure the copies of the vLLM connector, the effect of hints, and
other ways to keep pages on a disk. A benchmark may import ``tierstore`` and ``prefetch``, but not the other way round.
The command line loads them by name (``tierstore compare``, ``tierstore bench engine``, ``tierstore bench hints``).
"""
