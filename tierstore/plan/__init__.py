"""Planning: how much of a model's K and V fits into the tiers of a configuration, and how long a restore takes.

``geometry`` reads a model's config and counts the operations of its prefill. ``measure`` measures the rates of
this machine. ``forecast`` counts the pages that fit, as the store would, and combines the results. No store is
opened, and its directory is not created.
"""

from __future__ import annotations
