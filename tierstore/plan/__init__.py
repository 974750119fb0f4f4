"""Planning: how much of a model's KV fits the tiers of a configuration, and what bringing it back costs.

``geometry`` reads a model and counts the work of its prefill, ``measure`` takes this machine's rates, ``forecast``
counts pages as the store would and puts all together. Nothing here opens a store or makes its directory.
"""

from __future__ import annotations
