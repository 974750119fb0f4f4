"""The store's state machine with an admission policy that keeps some pages off the disk."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from hypothesis.stateful import invariant, precondition, rule

from tests.store.machine import HOST, SEQUENCES, Shape, sequences
from tests.store.secret_machine import SecretMachine
from tierstore.types import PageKey, Tier


class AdmittingMachine(SecretMachine):
    """Checks that pages demoted to disk are stored, and that admission refuses no page that precedes a stored one."""

    shapes: ClassVar[list[Shape]] = [(HOST, 200), (1, 200), (None, 200), (HOST, 6)]
    nvme_more: ClassVar[dict[str, object]] = {"admission": "second_hit"}

    @precondition(lambda self: self.roomy)
    @rule(keys=sequences)
    def send_down(self, keys: list[PageKey]) -> None:
        """Write pages and demote them to the disk immediately."""
        self.write(keys)
        readable = {key for key in keys if self.running.store.match([key]).num_pages}
        wanted = self.must_be_stored & readable
        if self.failures_planned or self.events or self.unwritten:
            return
        self.running.store.demote(keys, Tier.NVME)
        self.calm()
        nvme = self.running.directory.residency.tables[Tier.NVME]
        assert all(nvme.ready(key) for key in wanted), "a page that was demoted to the disk is not on it"

    @invariant()
    def admission_never_cuts_off_what_is_on_disk(self) -> None:
        if self.bench is None:
            return
        nvme = self.running.directory.residency.tables[Tier.NVME]
        for keys in SEQUENCES:
            if not self.tangled.isdisjoint(keys):
                continue
            for before, after in pairwise(keys):
                if nvme.ready(after):
                    lost = self.running.store.explain([before])[0]["lost"]
                    assert lost != "not_admitted", "the page before a page on disk was not admitted"


class WorthyMachine(AdmittingMachine):
    """Admits pages by expected cost, with a daily write budget that is soon used up."""

    nvme_more: ClassVar[dict[str, object]] = {"admission": "cost", "daily_writes": "100KiB"}
