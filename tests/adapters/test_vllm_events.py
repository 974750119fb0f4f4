"""Test that events report each copy that was added or removed."""

from __future__ import annotations

from pathlib import Path

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_pool import hashes_of
from tests.adapters.vllm_stub import HOST
from tierstore.types import Tier


def test_events_report_every_copy_stored_and_removed_with_the_new_tier_first(
    tmp_path: Path,
) -> None:
    engine = Engine({**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20}}, events=True)
    engine.add(DOCUMENT, 2)
    engine.run()
    half = engine.half
    first = [(c.block.block_hash, c.tier, c.stored) for c in half.take_events()]
    want = hashes_of(engine.answers["r1"])[:5]
    assert [x for x in first if x[1] is Tier.HOST] == [(h, Tier.HOST, True) for h in want]
    assert {x for x in first if x[1] is Tier.NVME} == {(h, Tier.NVME, True) for h in want}
    half._tiers.store.demote(list(half._tiers.store._directory.residency.tables[Tier.HOST].copies), Tier.NVME)
    engine.step()
    assert {(c.tier, c.stored) for c in half.take_events()} == {(Tier.HOST, False)}
    engine.scheduler.reset_cache()
    assert {(c.tier, c.stored) for c in half.take_events()} == {(Tier.NVME, False)}
    assert half.take_events() == []
    engine.close()


def test_event_names_the_parent_block_and_the_tokens() -> None:
    engine = Engine(HOST, events=True)
    engine.add(DOCUMENT, 1)
    engine.run()
    blocks = [change.block for change in engine.half.take_events()]
    hashes = hashes_of(DOCUMENT)
    assert [block.block_hash for block in blocks] == hashes
    assert [block.parent for block in blocks] == [None, *hashes[:-1]]
    assert [block.tokens for block in blocks] == [(0, 1), (2, 0), (1, 2), (0, 1)]
    engine.close()


def test_events_are_not_kept_if_nobody_reads_them() -> None:
    engine = Engine(HOST)
    assert engine.half.take_events() == []
    assert list(engine.scheduler.take_events()) == []
    engine.close()
