"""Planning: how much of a model's KV fits the tiers of a configuration, and what a restore costs.

``geometry`` reads a model and counts the work of its prefill, ``measure`` takes this machine's rates, ``forecast``
counts pages as the store would and puts everything together. Nothing here opens a store or creates its directory.
"""

from __future__ import annotations
