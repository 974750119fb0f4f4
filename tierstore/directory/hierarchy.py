"""The tiers of one store in their order, by their descriptions: which keep pages in slots, which as records.

A tier's name says only where it stands in the order. What the directory does with a tier follows from its description.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.types import TierDescription


class Hierarchy:
    """The tiers that a store has, fastest first. HBM is not among them where an engine owns it."""

    def __init__(self, tiers: Mapping[Tier, TierDescription]) -> None:
        self.tiers = {tier: tiers[tier] for tier in sorted(tiers)}
        self.lowest = max(tiers)
        self.records = tuple(tier for tier, each in self.tiers.items() if not each.in_memory)
        """The tiers that keep pages as records."""
        self.memory_floor = max(
            (tier for tier, each in self.tiers.items() if each.in_memory), default=Tier.HBM
        )
        """The slowest tier that is memory."""
        self.first_records = min(self.records, default=None)
        """The tier to which pages go from memory, if any: admission decides which do."""
        self.frozen = self.first_records is not None and self.tiers[self.first_records].read_only
        """Whether that tier takes nothing: then every page stays in memory that was not there when it was opened."""
        self.first_durable = min((tier for tier, each in self.tiers.items() if each.durable), default=None)
        """The tier in which a page first survives a restart, if any: ``flush`` and timed spills bring pages there."""

    def below(self, tier: Tier) -> Tier | None:
        """Return the next slower tier, or None. ``tier`` may be the HBM of an engine."""
        return next((other for other in self.tiers if other > tier), None)

    def above(self, tier: Tier) -> Tier | None:
        """Return the next faster tier, or None."""
        return next((other for other in reversed(self.tiers) if other < tier), None)
