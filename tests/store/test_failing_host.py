"""Test that a page whose copy to HOST failed is saved later, so that callers waiting for its slot get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, read_soon, tiers, write
from tests.support.stalls import OUT


@pytest.mark.parametrize("pump", [False, True])
@pytest.mark.parametrize("nvme", [False, True])
def test_a_page_with_saved_successors_is_saved_although_host_failed_and_no_page_is_put(
    nvme: bool, pump: bool, tmp_path: Path
) -> None:
    """The page cannot be dropped, because its successors would become unreachable. The store must save it later."""
    bench = open_bench(tiers(4, 4, tmp_path if nvme else None), SPEC, spill=True, pump=pump)
    store, keys = bench.store, chain(2)
    bench.copies.fail_next(OUT, 0)
    write(store, keys[:1])
    assert store.drain(PATIENCE_S)
    with store.acquire(keys[:1]) as lease:
        write(store, keys[1:], lease)
        assert store.drain(PATIENCE_S)
    bench.copies.fail_next(OUT, 0)
    write(store, chain(1, "other"))
    assert store.drain(PATIENCE_S)
    store.free(store.allocate(4, timeout_s=PATIENCE_S))
    assert read_soon(store, keys) == 2
    store.check()
    bench.close()
