"""What a store says about itself: occupancy, one page's whereabouts, the snapshot behind ``stats()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierstore.build import Parts
    from tierstore.codecs.held import Held
    from tierstore.config import StoreConfig
    from tierstore.directory.directory import Directory
    from tierstore.directory.residency import TierTable
    from tierstore.metrics import Metrics, RankHealth
    from tierstore.types import PageKey


def occupancy(directory: Directory, tier: Tier) -> str:
    """One line for an error message: what the slots of a tier are doing."""
    states = ", ".join(f"{number} {state}" for state, number in _states(directory, tier).items())
    return f"{states}; {len(directory.leasing.open)} leases are open"


def explain_page(directory: Directory, key: PageKey) -> dict[str, object]:
    """Copies by tier ("ready" or "arriving", pins), whether the copy in HBM still waits for its writer's event, parent,
    whether all pages before it are there, whether only memory may hold it, or does until admission wants it on disk,
    why it went if lately."""
    copies = {
        tier.name: {"state": "ready" if copy.ready else "arriving", "pins": copy.pins}
        for tier, table in directory.residency.tables.items()
        if (copy := table.copies.get(key)) is not None
    }
    parent = directory.residency.lineage.parent(key)
    sink = directory.placement.sinks.open.get(key)
    not_admitted = key in directory.residency.memory_only.refused
    return {
        "key": key.hex(),
        "readable": directory.residency.where(key) is not None,
        "reachable": directory.residency.held(key) and key not in directory.residency.orphans,
        "copies": copies,
        "being_written": key in directory.placement.unwritten,
        "parent": None if parent is None else parent.hex(),
        "memory_only": key in directory.residency.memory_only and not not_admitted,
        "not_admitted": not_admitted,
        "going_down_to": None if sink is None else sink.target.name,
        "lost": directory.drops.fate(key),
    }


def held_or_retained(directory: Directory) -> list[PageKey]:
    """Keys under a lease or a retain hint, each once, wherever their pages are."""
    held = [key for lease in directory.leasing.open for key, _ in lease.held]
    leased = [key for lease in directory.leasing.open for key in lease.keys[: len(lease.slots)]]
    return list(dict.fromkeys([*held, *leased, *directory.hints.keys_retained]))


def of_hbm(directory: Directory, keys: Sequence[PageKey]) -> list[PageKey]:
    """Those of which HBM has a copy, or will once a load has ended."""
    table = directory.residency.tables.get(Tier.HBM)
    return [] if table is None else [key for key in keys if key in table.copies]


def stats(config: StoreConfig, parts: Parts) -> dict[str, object]:
    """Everything ``TierStore.stats`` returns; plain data.

    Where other processes hold the bytes, "hbm" and "host" are those of all ranks together, and "ranks" has each.
    """
    directory, layout = parts.directory, parts.layout
    ranks = {} if parts.ranks is None else parts.ranks()
    memory_only = directory.residency.memory_only
    tiers: dict[str, dict[str, object]] = {}
    for tier, table in directory.residency.tables.items():
        states = _states(directory, tier)
        for state, number in states.items():
            parts.metrics.pages(tier, state, number)
        held = layout if tier != Tier.HOST or parts.arena is None else parts.arena.held
        tiers[tier.name] = {**states, **_sizes(table, held.page_nbytes, held.slot_nbytes)}
    return {
        "config": config.effective(),
        "page_nbytes": layout.page_nbytes,
        "slot_nbytes": layout.slot_nbytes,
        "page_size": layout.page_size,
        "fingerprint": layout.fingerprint,
        "tiers": tiers,
        "memory_only": len(memory_only.keys) - len(memory_only.refused),
        "unreachable": len(directory.residency.orphans),
        "admission": None if parts.nvme is None else _admission(directory, layout.page_nbytes, parts.metrics),
        "leases": len(directory.leasing.open),
        "in_flight": {f"{s.name}->{d.name}": n for (s, d), n in directory.traffic.pages.items() if n},
        "bytes_per_s": {f"{s.name}->{d.name}": rate for (s, d), rate in directory.traffic.rates.items()},
        "failing": sorted(tier.name for tier in directory.space.failing),
        "hbm": {**parts.device.stats(), **_hbm_of(ranks)},
        "host": _host_of(ranks, config, parts.held) if parts.arena is None else parts.arena.stats(),
        "nvme": None if parts.nvme is None else parts.nvme.stats(),
        "ranks": [found.stats(rank) for rank, found in sorted(ranks.items())],
        "counters": parts.metrics.snapshot(),
    }


def _hbm_of(ranks: Mapping[int, RankHealth]) -> dict[str, object]:
    """Devices and routes of all ranks, each once, under the keys of ``HbmDevice.stats``."""
    if not ranks:
        return {}
    slow = {rank: found.slow_copies for rank, found in ranks.items()}
    return {
        "device": ", ".join(sorted({found.device for found in ranks.values()})),
        "copies": ", ".join(sorted({found.copies for found in ranks.values()})),
        "slow_copies": _reasons(slow),
    }


def _host_of(ranks: Mapping[int, RankHealth], config: StoreConfig, held: Held) -> dict[str, object] | None:
    """Host memory of all ranks together, under the keys of ``HostArena.stats``; None: there is none."""
    if not ranks or config.host is None:
        return None
    return {
        "pin_nbytes": sum(found.pin_nbytes for found in ranks.values()),
        "pinned_nbytes": sum(found.pinned_nbytes for found in ranks.values()),
        "unpinned_nbytes": sum(found.unpinned_nbytes for found in ranks.values()),
        "pinning": any(found.pinning for found in ranks.values()),
        "refused": _reasons({rank: found.refused for rank, found in ranks.items()}),
        "codec": config.host.codec,
        "slot_nbytes": held.slot_nbytes,
    }


def _reasons(by_rank: Mapping[int, str | None]) -> str | None:
    """One line that names every rank that has a reason."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(by_rank.items()) if why) or None


def _admission(directory: Directory, page_nbytes: int, metrics: Metrics) -> dict[str, object]:
    """What admission kept from the disk since open, and the budget of writes."""
    refused = directory.drops.refused
    found = directory.admitting.stats()
    metrics.admission(found["waiting_pages"] or 0, found["written_last_24h"] or 0, found["left_today"])
    return {"refused_pages": refused, "refused_nbytes": refused * page_nbytes, **found}


def _states(directory: Directory, tier: Tier) -> dict[str, int]:
    tables = directory.residency.tables
    table, lowest = tables[tier], tier == max(tables)
    return {
        "free": len(table.free),
        "resident": len(table.copies) - table.arriving,
        "arriving": table.arriving,
        "pinned": table.pinned,
        "mirrors" if lowest else "unsaved": len(table.mirrors if lowest else table.dirty),
        "droppable": len(table.droppable),
        "owned": len(table.owned),
        "quarantined": len(table.quarantine),
    }


def _sizes(table: TierTable, page_nbytes: int, slot_nbytes: int) -> dict[str, object]:
    if table.num_slots is None:
        return {"budget_nbytes": table.budget_nbytes, "used_nbytes": table.used_nbytes}
    return {
        "num_slots": table.num_slots,
        "payload_nbytes": table.num_slots * page_nbytes,
        "allocated_nbytes": table.num_slots * slot_nbytes,
    }
