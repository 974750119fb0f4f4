"""What must hold at every moment of a store. Each check names the first violation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from tierstore.directory.lineage import ranked_unreachable
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.directory import Directory
    from tierstore.directory.residency import Residency, TierTable
    from tierstore.types import PageKey

Slots = Counter[tuple[Tier, int]]


class Pending(Protocol):
    """What waits for a caller's event and holds slots until then."""

    @property
    def writing(self) -> Sequence[tuple[Sequence[PageKey], Sequence[int]]]:
        """Pages sealed before their bytes are written, and their slots. Each holds a pin."""
        ...

    @property
    def retired(self) -> Sequence[int]:
        """Slots given up whose last use has not ended."""
        ...


def check(directory: Directory, pending: Pending) -> None:
    """Raise AssertionError unless every invariant of residency, transfers and leases holds. O(pages), changes
    nothing.
    """
    check_residency(directory.residency)
    _check_transfers(directory)
    _check_pins(directory, pending)
    _check_leases(directory)


def check_residency(residency: Residency) -> None:
    """Check the invariants of residency alone."""
    for tier, table in residency.tables.items():
        _check_slots(tier, table)
        _check_queues(residency, tier, table)
    _check_lineage(residency)
    _check_reach(residency)
    _check_memory_only(residency)


def _require(holds: bool, message: str) -> None:
    # Not an assert statement: it must speak under -O as well.
    if not holds:
        raise AssertionError(message)


def _check_slots(tier: Tier, table: TierTable) -> None:
    used = [copy.slot for copy in table.copies.values()] + [*table.quarantine, *table.owned]
    _require(len(set(used)) == len(used), f"{tier.name}: a slot is used twice")
    copies = table.copies.values()
    counts = (
        sum(not c.ready for c in copies),
        sum(c.pins > 0 for c in copies),
        sum(c.ready and not c.pins for c in copies),
    )
    counted = (table.arriving, table.pinned, table.idle)
    _require(counted == counts, f"{tier.name}: {counted} copies arriving, pinned, idle; there are {counts}")
    if table.num_slots is not None:
        _require(
            sorted(used + table.free) == list(range(table.num_slots)),
            f"{tier.name}: a slot leaked or is shared",
        )
    nbytes = sum(c.nbytes for c in table.copies.values()) + sum(d.nbytes for d in table.quarantine.values())
    _require(table.used_nbytes == nbytes, f"{tier.name}: {table.used_nbytes} bytes accounted, {nbytes} held")
    if table.budget_nbytes is not None:
        _require(nbytes <= table.budget_nbytes, f"{tier.name}: {nbytes} bytes exceed {table.budget_nbytes}")


def _check_queues(residency: Residency, tier: Tier, table: TierTable) -> None:
    droppable: set[PageKey] = set()
    dirty: set[PageKey] = set()
    mirrors: set[PageKey] = set()
    leaves: set[PageKey] = set()
    for key, copy in table.copies.items():
        if not copy.ready or copy.pins:
            continue
        if key in residency.orphans:
            droppable.add(key)
        elif tier != residency.memory_only.lowest_for(key):
            (droppable if residency.saved_below(key, tier) else dirty).add(key)
        elif residency.where(key) != tier:
            above = [t.copies[key] for t in residency.tables.values() if t is not table and t.ready(key)]
            (droppable if any(c.pins for c in above) else mirrors).add(key)
        elif not residency.lineage.has_children(key):
            droppable.add(key)
        if key in dirty and (residency.where(key) != tier or not residency.lineage.has_children(key)):
            leaves.add(key)
    _require(set(table.droppable) == droppable, f"{tier.name}: droppable pages out of step")
    _require(set(table.dirty) == dirty, f"{tier.name}: unsaved evictable pages out of step")
    _require(set(table.mirrors) == mirrors, f"{tier.name}: mirrors out of step")
    fleeting = {key for key in leaves if key in residency.memory_only}
    _require(set(table.fleeting) == fleeting, f"{tier.name}: memory-only leaves out of step")
    _require(set(table.leaves) == leaves, f"{tier.name}: unsaved leaves out of step")


def _check_lineage(residency: Residency) -> None:
    for child, parent in residency.lineage.links():
        _require(residency.held(child), "a child without a copy is linked")
        _require(residency.lineage.names(parent, child), "a child is not among its parent's children")


def _check_reach(residency: Residency) -> None:
    """Check that a page's reachability follows from its parent, and that its ranks in all tiers agree."""
    orphans, lineage = residency.orphans, residency.lineage
    for table in residency.tables.values():
        for key, copy in table.copies.items():
            cut_off = key in orphans
            _require(ranked_unreachable(copy.rank) == cut_off, "a page out of reach is not the next to leave")
            if not orphans.pending:
                _require(
                    orphans.after(lineage.parent(key)) == cut_off,
                    "a page that can be reached, or not, is wrong",
                )
    found = sum(residency.held(key) for key in orphans.keys)
    _require(found == len(orphans.keys), "a page that is gone is remembered as out of reach")


def _check_memory_only(residency: Residency) -> None:
    memory_only = residency.memory_only
    _require(memory_only.refused <= memory_only.keys, "a refused page may be stored")
    for key in memory_only.keys:
        _require(residency.held(key), "a memory-only page that is gone is remembered")
        for tier, table in residency.tables.items():
            _require(
                tier <= memory_only.floor or key not in table.copies, f"a memory-only page in {tier.name}"
            )
    for child, parent in [] if memory_only.frozen else residency.lineage.links():
        if parent in memory_only and child not in memory_only and residency.where(child) is not None:
            _require(memory_only.will_lift(parent), "a page that may be stored follows one that may not")


def _check_transfers(directory: Directory) -> None:
    targets = Counter((t.dst, slot) for t in directory.transfers.open.values() for slot in t.dst_slots)
    targets.update((Tier.HBM, load.slot) for load in directory.loads.by_slot.values() if not load.submitted)
    for tier, table in directory.residency.tables.items():
        taken = {copy.slot for copy in table.copies.values()} | table.quarantine.keys()
        written = {slot for target, slot in targets if target == tier}
        _require(written <= taken, f"{tier.name}: a slot that is still being written is not held for it")
        for copy in table.copies.values():
            writers = targets[tier, copy.slot]
            _require(writers == (0 if copy.ready else 1), f"{tier.name} slot {copy.slot}: {writers} writers")


def _check_pins(directory: Directory, pending: Pending) -> None:
    want = _expected_pins(directory, pending)
    writers = Counter((t.dst, slot) for t in directory.transfers.open.values() for slot in t.dst_slots)
    retired = Counter((Tier.HBM, slot) for slot in pending.retired)
    for tier, table in directory.residency.tables.items():
        for copy in table.copies.values():
            expected = want.pop((tier, copy.slot), 0)
            _require(
                copy.pins == expected, f"{tier.name} slot {copy.slot}: {copy.pins} pins, {expected} holders"
            )
        for slot, dead in table.quarantine.items():
            expected = want.pop((tier, slot), 0) + writers[tier, slot] + retired[tier, slot]
            _require(
                dead.holders == expected,
                f"{tier.name} slot {slot}: quarantined for {dead.holders}, not {expected}",
            )
    _require(not want, f"pins on slots that nobody holds: {list(want)[:3]}")


def _expected_pins(directory: Directory, pending: Pending) -> Slots:
    tables = directory.residency.tables
    want: Slots = Counter()
    for transfer in directory.transfers.open.values():
        if transfer.src in tables:
            want.update((transfer.src, slot) for slot in transfer.src_slots)
    want.update(
        (load.source, load.source_slot) for load in directory.loads.by_slot.values() if not load.submitted
    )
    if directory.owns_hbm:
        for lease in directory.leases.open:
            want.update((Tier.HBM, slot) for slot in lease.slots)
            want.update((Tier.HBM, slot) for _, slot in lease.held)
        want.update((Tier.HBM, slot) for _, slots in pending.writing for slot in slots)
    return want


def _check_leases(directory: Directory) -> None:
    if not directory.owns_hbm:
        return
    table = directory.residency.tables[Tier.HBM]
    for lease in directory.leases.open:
        for i, slot in enumerate(lease.slots):
            copy = table.copies.get(lease.keys[i])
            current = copy is not None and copy.slot == slot
            _require(current or slot in table.quarantine, f"leased page {i} moved away from HBM slot {slot}")
            if copy is not None and current and not lease.released:
                _require(copy.ready == (i not in lease.waiting), f"leased page {i}: readiness out of step")
