"""Test ``Chunks``, the tier below an engine's host memory, with random calls, and test that planted bugs are found."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.adapters.chunk_machine import ChunkMachine
from tests.support import lanes, planting
from tests.support.planting import SEARCH, Bug
from tierstore.adapters import chunks

BUGS = [
    Bug(
        "a chunk being read is evicted",
        "            if key in self._reading:\n                continue\n",
        "",
    ),
    Bug(
        "a late read ends its job",
        "        if not job.moving:\n            del",
        "        if True:\n            del",
    ),
    Bug("writes in flight take no space", "(self._in_flight + 1) * cost", "cost"),
    Bug("a write in flight counts as new", " and mine not in self._writing", ""),
    Bug("a clear forgets no write in flight", "        self._writing.clear()\n", ""),
    Bug(
        "a clear leaves writes in flight on disk",
        "        self._tier.submit_erase(list(self._writing))\n",
        "",
    ),
    Bug(
        "a chunk from before a clear is held",
        "self._writing.get(page) == ack.transfer_id",
        "page in self._writing",
    ),
    Bug("a lost chunk is kept", "failure not in _KEPT", "failure in _KEPT"),
    Bug("an evicted chunk still counts", "self._used -= self._held.pop(key)", "self._held.pop(key)"),
    Bug("an evicted chunk stays on disk", "        self._tier.submit_erase(gone)\n", ""),
    Bug(
        "a lost chunk arrived",
        "job.lost.update(key for key, failure in ended if failure is not None)",
        "pass",
    ),
    Bug(
        "a failed write is held",
        "for key, failure in ended if failure is None]",
        "for key, failure in ended]",
    ),
    Bug(
        "an end is forgotten",
        "        self._done.append(\n",
        "        self._done.clear() or self._done.append(\n",
    ),
    Bug(
        "rows are mixed up",
        "rows = [self._memory[int(place)] for place in places]",
        "rows = [self._memory[int(place)] for place in places][::-1]",
    ),
]


def test_random_engine_loads_only_its_own_chunks_and_no_lost_one() -> None:
    run_state_machine_as_test(
        ChunkMachine, settings=settings(max_examples=lanes.examples(50, 400), stateful_step_count=40)
    )


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_machine_finds(bug: Bug) -> None:
    class Planted(ChunkMachine):
        code = planting.load(chunks, bug)

    with pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(Planted, settings=SEARCH)
