"""The order of a store's tiers, and the properties that follow from their descriptions.

A tier's number (``Tier``) determines only its position in the order. All other behaviour depends on the
tier's description.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.types import TierDescription


class Hierarchy:
    """The tiers of a store, fastest first. HBM is not included if an engine owns it."""

    def __init__(self, tiers: Mapping[Tier, TierDescription]) -> None:
        self.tiers = {tier: tiers[tier] for tier in sorted(tiers)}
        self.lowest = max(tiers)
        self.records = tuple(tier for tier, each in self.tiers.items() if not each.in_memory)
        """The tiers that store pages as records."""
        self.memory_floor = max(
            (tier for tier, each in self.tiers.items() if each.in_memory), default=Tier.HBM
        )
        """The slowest tier that is memory."""
        self.first_records = min(self.records, default=None)
        """The fastest record tier, to which pages are written from memory, or None.

        Admission decides which pages are written there.
        """
        self.frozen = self.first_records is not None and self.tiers[self.first_records].read_only
        """Whether ``first_records`` is read-only. If so, all pages that are put stay in memory."""
        self.first_durable = min((tier for tier, each in self.tiers.items() if each.durable), default=None)
        """The fastest tier in which pages survive a restart, or None.

        It is the destination of ``flush`` and timed spills.
        """

    def below(self, tier: Tier) -> Tier | None:
        """Return the next slower tier, or None. ``tier`` may be HBM that an engine owns."""
        return next((other for other in self.tiers if other > tier), None)

    def above(self, tier: Tier) -> Tier | None:
        """Return the next faster tier, or None."""
        return next((other for other in reversed(self.tiers) if other < tier), None)
