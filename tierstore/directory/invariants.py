"""Checks of a store's invariants. A check raises AssertionError with a message that names the violation."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from tierstore.directory.lineage import ranked_unreachable
from tierstore.types import Tier, exact_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.directory import Directory
    from tierstore.directory.residency import Residency, TierTable
    from tierstore.types import PageKey

Slots = Counter[tuple[Tier, int]]


class Pending(Protocol):
    """The slots and pages that are in use until a caller's event has completed."""

    @property
    def writing(self) -> Sequence[tuple[Sequence[PageKey], Sequence[int]]]:
        """Pages that were put and whose bytes are not written yet, with their slots. Each page is pinned."""
        ...

    @property
    def retired(self) -> Sequence[int]:
        """Slots that their owner has freed, but that the device may still use."""
        ...


def check(directory: Directory, pending: Pending) -> None:
    """Check all invariants of residency, transfers and leases. Read-only; takes O(pages) time.

    Raises:
        AssertionError: An invariant does not hold.
    """
    check_residency(directory.residency)
    _check_transfers(directory)
    _check_pins(directory, pending)
    _check_leases(directory)


def check_residency(residency: Residency) -> None:
    """Check the invariants of residency alone: slots, eviction queues, lineage and restrictions.

    Raises:
        AssertionError: An invariant does not hold.
    """
    for tier, table in residency.tables.items():
        _check_slots(tier, table)
        _check_queues(residency, tier, table)
    _check_lineage(residency)
    _check_reach(residency)
    _check_memory_only(residency)


def _require(holds: bool, message: str) -> None:
    # Not an assert statement, because ``python -O`` removes those.
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
    for name, counter, number in zip(("arriving", "pinned", "idle"), counted, counts, strict=True):
        _require(
            counter == number, f"{tier.name}: {number} copies are {name}, but the counter says {counter}"
        )
    if table.num_slots is not None:
        _require(
            sorted(used + table.free) == list(range(table.num_slots)),
            f"{tier.name}: a slot is used twice, or is neither free nor used",
        )
    nbytes = sum(c.nbytes for c in table.copies.values()) + sum(d.nbytes for d in table.quarantine.values())
    _require(
        table.used_nbytes == nbytes,
        f"{tier.name}: copies take {exact_size(nbytes)}, but the counter says {exact_size(table.used_nbytes)}",
    )
    if table.budget_nbytes is not None:
        _require(
            nbytes <= table.budget_nbytes,
            f"{tier.name}: copies take {exact_size(nbytes)}, but the budget is {exact_size(table.budget_nbytes)}",
        )


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
    _require(set(table.droppable) == droppable, f"{tier.name}: the queue droppable contains the wrong pages")
    _require(set(table.dirty) == dirty, f"{tier.name}: the queue dirty contains the wrong pages")
    _require(set(table.mirrors) == mirrors, f"{tier.name}: the queue mirrors contains the wrong pages")
    fleeting = {key for key in leaves if key in residency.memory_only}
    _require(set(table.fleeting) == fleeting, f"{tier.name}: the queue fleeting contains the wrong pages")
    _require(set(table.leaves) == leaves, f"{tier.name}: the queue leaves contains the wrong pages")


def _check_lineage(residency: Residency) -> None:
    for child, parent in residency.lineage.links():
        _require(residency.held(child), "a page without a copy has a parent in the lineage")
        _require(residency.lineage.names(parent, child), "a page is not among its parent's children")


def _check_reach(residency: Residency) -> None:
    """Check that a page is marked as unreachable if and only if its parent is unreachable or missing.

    Also check that the copies of the page in all tiers are ranked accordingly.
    """
    orphans, lineage = residency.orphans, residency.lineage
    for table in residency.tables.values():
        for key, copy in table.copies.items():
            cut_off = key in orphans
            _require(
                ranked_unreachable(copy.rank) == cut_off,
                "a copy must be ranked as unreachable if and only if its page is unreachable",
            )
            if not orphans.pending:
                _require(
                    orphans.after(lineage.parent(key)) == cut_off,
                    "a page must be marked as unreachable if and only if its parent is unreachable or missing",
                )
    found = sum(residency.held(key) for key in orphans.keys)
    _require(found == len(orphans.keys), "a page without a copy is marked as unreachable")


def _check_memory_only(residency: Residency) -> None:
    memory_only = residency.memory_only
    _require(memory_only.refused <= memory_only.keys, "a page that admission refused is not memory-only")
    for key in memory_only.keys:
        _require(residency.held(key), "a page without a copy is marked as memory-only")
        for tier, table in residency.tables.items():
            _require(
                tier <= memory_only.floor or key not in table.copies,
                f"a memory-only page has a copy in {tier.name}",
            )
    for child, parent in [] if memory_only.frozen else residency.lineage.links():
        if parent in memory_only and child not in memory_only and residency.where(child) is not None:
            _require(memory_only.will_lift(parent), "a page that may be stored follows a memory-only page")


def _check_transfers(directory: Directory) -> None:
    targets = Counter((t.dst, slot) for t in directory.transfers.open.values() for slot in t.dst_slots)
    targets.update((Tier.HBM, load.slot) for load in directory.loads.by_slot.values() if not load.submitted)
    for tier, table in directory.residency.tables.items():
        taken = {copy.slot for copy in table.copies.values()} | table.quarantine.keys()
        written = {slot for target, slot in targets if target == tier}
        _require(
            written <= taken,
            f"{tier.name}: a slot that is being written belongs to no copy and no quarantine",
        )
        for copy in table.copies.values():
            writers = targets[tier, copy.slot]
            expected = 0 if copy.ready else 1
            _require(
                writers == expected,
                f"{tier.name} slot {copy.slot}: {writers} transfers write it, expected {expected}",
            )


def _check_pins(directory: Directory, pending: Pending) -> None:
    want = _expected_pins(directory, pending)
    writers = Counter((t.dst, slot) for t in directory.transfers.open.values() for slot in t.dst_slots)
    retired = Counter((Tier.HBM, slot) for slot in pending.retired)
    for tier, table in directory.residency.tables.items():
        for copy in table.copies.values():
            expected = want.pop((tier, copy.slot), 0)
            _require(
                copy.pins == expected,
                f"{tier.name} slot {copy.slot}: has {copy.pins} pins, expected {expected}",
            )
        for slot, dead in table.quarantine.items():
            expected = want.pop((tier, slot), 0) + writers[tier, slot] + retired[tier, slot]
            _require(
                dead.holders == expected,
                f"{tier.name} slot {slot}: quarantined with {dead.holders} holders, expected {expected}",
            )
    named = ", ".join(f"{tier.name} slot {slot}" for tier, slot in list(want)[:3])
    _require(not want, f"pinned slots that have no copy and are not in quarantine: {named}")


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
            want.update((lease.tier, slot) for slot in lease.slots)
            want.update((Tier.HBM, slot) for _, slot in lease.held)
        want.update((Tier.HBM, slot) for _, slots in pending.writing for slot in slots)
    return want


def _check_leases(directory: Directory) -> None:
    if not directory.owns_hbm:
        return
    for lease in directory.leases.open:
        table = directory.residency.tables[lease.tier]
        for i, slot in enumerate(lease.slots):
            copy = table.copies.get(lease.keys[i])
            current = copy is not None and copy.slot == slot
            _require(
                current or slot in table.quarantine,
                f"page {i} of a lease is no longer in {lease.tier.name} slot {slot}, and the slot is not in quarantine",
            )
            if copy is not None and current and not lease.released:
                _require(
                    copy.ready == (i not in lease.waiting),
                    f"page {i} of a lease is {'readable' if copy.ready else 'in flight'}, but the lease "
                    f"{'waits' if copy.ready else 'does not wait'} for it",
                )
