"""Planning: how much of a model's KV fits the tiers of a configuration, and what bringing it back costs.

``geometry`` reads a model, ``prefill`` counts its work, ``sizes`` counts pages as the store would, ``measure`` takes
this machine's rates, ``forecast`` puts them together. Nothing here opens a store or makes its directory.
"""

from __future__ import annotations
