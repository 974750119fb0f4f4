"""A state machine of the simulated engine: requests, aborts, preemptions, slow or failing copies, new weights.

The engine checks every cell that it reads. The machine draws random events, and requires that all work ends.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.adapters.vllm_engine import IN, OUT, Engine
from tests.adapters.vllm_pool import BLOCK, FULL, Kind, over_ranks
from tests.support.stalls import Lane
from tierstore.adapters.vllm import loads, saves
from tierstore.types import Tier

DOCUMENTS = ([0] * 9, [0, 0, 0, 0, 1, 2, 1, 2, 1], [1, 2] * 5, [2] * 4)
UP: Lane = (Tier.NVME, Tier.HOST)
DOWN: Lane = (Tier.HOST, Tier.NVME)
PAGE_NBYTES = 64
KINDS: tuple[tuple[Kind, ...], ...] = (
    FULL,
    (Kind(), Kind(window=3)),
    (Kind(size=4), Kind(window=5), Kind(window=5)),
    (Kind(chunk=4), Kind()),
    (Kind(window=4),),
    (Kind(), Kind(state=True)),
    (Kind(state=True, size=4), Kind(size=4), Kind(state=True, size=4), Kind(window=3)),
    (Kind(state=True),),
    (Kind(ring=True, size=4), Kind()),
    (Kind(mla=True),),
    (Kind(mla=True), Kind(window=3, mla=True)),
)
"""KV groups of models: full attention; full attention and a window; blocks of two sizes; local chunks and full
attention; a window alone; recurrent states with full attention, with full attention and a window, and alone; full
attention and a ring, which is not stored; MLA, alone and with a window over MLA.
"""


class EngineMachine(RuleBasedStateMachine):
    """Runs a simulated engine with random events. Copies and the disk are real, and gates can hold them back."""

    @initialize(
        ranks=st.sampled_from((1, 2, 2, 4)),
        ahead=st.integers(1, 2),
        host=st.integers(1, 6),
        nvme=st.booleans(),
        seed=st.integers(0, 9),
        kinds=st.sampled_from(KINDS),
        staged=st.booleans(),
        distributed=st.booleans(),
        apart=st.sampled_from((False, False, True)),
    )
    def start(
        self,
        ranks: int,
        ahead: int,
        host: int,
        nvme: bool,
        seed: int,
        kinds: tuple[Kind, ...],
        staged: bool,
        distributed: bool,
        apart: bool,
    ) -> None:
        self.folder = tempfile.mkdtemp()
        page_nbytes = PAGE_NBYTES * max(kind.size for kind in kinds) // BLOCK
        stages = min(2, ranks) if staged else 1
        context_ranks = ranks if distributed and not staged else 1
        if any(kind.window or kind.chunk for kind in kinds):
            context_ranks = 1  # vLLM cannot distribute these kinds
        kinds = over_ranks(kinds, context_ranks)
        page_nbytes = page_nbytes * (1 + stages) // 2  # the second stage has three layers, not two
        slots = host * len(kinds)
        config: dict[str, object] = {"host": {"capacity": ranks * slots * page_nbytes, "pin": "never"}}
        if nvme:
            config["nvme"] = {"path": self.folder, "capacity": ranks << 20, "flush": "10ms"}
        self.blocks = 8 * len(kinds)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(saves, "MOST_A_STEP", 1 + seed % 2)  # so that some saves wait
        self.patch.setattr(loads, "MOST_A_STEP", 1 + seed % 3)  # and some loads come in pieces
        self.patch.setattr(loads, "MOST_IF_IDLE", 1 + seed % 2)
        interval = (None, 0, 2 * math.lcm(*(kind.size for kind in kinds)))[seed % 3]
        self.engine = Engine(
            config,
            blocks=self.blocks,
            ranks=ranks,
            ahead=ahead,
            seed=seed,
            kinds=kinds,
            interval=interval,
            stages=stages,
            clears=seed % 3 == 2,
            context_ranks=context_ranks,
            interleave=1 + seed % 2,
            apart=apart,
        )
        self.copies_take_so_long(0.5)

    @precondition(lambda self: len(self.engine.requests) < 5)
    @rule(document=st.sampled_from(DOCUMENTS), tokens=st.integers(3, 9), more=st.integers(1, 4))
    def ask(self, document: list[int], tokens: int, more: int) -> None:
        self.engine.add(document[:tokens], more, self._name())

    @precondition(lambda self: len(self.engine.requests) < 5)
    @rule(
        document=st.sampled_from(DOCUMENTS),
        more=st.integers(1, 4),
        tokens=st.integers(2, 8),
        beside=st.booleans(),
    )
    def ask_for_what_another_connector_has(
        self, document: list[int], more: int, tokens: int, beside: bool
    ) -> None:
        self.engine.add(document, more, self._name(), elsewhere=tokens, beside=beside)

    @precondition(lambda self: len(self.engine.requests) < 5)
    @rule(document=st.sampled_from(DOCUMENTS), more=st.integers(1, 4))
    def ask_for_what_only_the_store_has(self, document: list[int], more: int) -> None:
        self.engine.forget()
        self.engine.add(document, more, self._name())

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.requests)
    @rule(number=st.integers(0, 4))
    def abort(self, number: int) -> None:
        names = list(self.engine.requests)
        self.engine.abort(names[number % len(names)])

    @precondition(lambda self: self.engine.running)
    @rule()
    def preempt(self) -> None:
        self.engine.preempt(self.engine.running[-1].request_id)

    @rule()
    def forget_the_engines_own_cache(self) -> None:
        self.engine.forget()

    @precondition(lambda self: not self.engine.epoch)
    @rule()
    def change_weights(self) -> None:
        self.engine.change_weights()

    @rule()
    def sleep(self) -> None:
        self.engine.sleep()

    @rule()
    def spill(self) -> None:
        self.engine.spill()

    @rule(pace=st.sampled_from([0.2, 0.5, 1.0]))
    def copies_take_so_long(self, pace: float) -> None:
        self.engine.pace = pace
        for gate in self.engine.copies:
            gate.hold(OUT, IN)
        for records in self.engine.records:
            records.hold(UP, DOWN)

    @rule(lane=st.sampled_from([OUT, IN]), rank=st.integers(0, 3), page=st.integers(0, 2))
    def fail_a_copy(self, lane: Lane, rank: int, page: int) -> None:
        self.engine.copies[rank % len(self.engine.copies)].fail_next(lane, page)

    @precondition(lambda self: self.engine.records)
    @rule(lane=st.sampled_from([UP, DOWN]), rank=st.integers(0, 3), page=st.integers(0, 2))
    def fail_the_disk(self, lane: Lane, rank: int, page: int) -> None:
        self.engine.records[rank % len(self.engine.records)].fail_next(lane, page)

    def _name(self) -> str:
        """Return the first id that vLLM would accept. Ids are reused as soon as vLLM has forgotten their request."""
        return next(name for number in count() if (name := f"r{number}") not in self.engine.requests)

    @invariant()
    def holds(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            for gate in [*self.engine.copies, *self.engine.records]:
                gate.open()
            if self.engine.broken:
                return
            self.engine.run()
            self.engine.check()
            assert len(self.engine.free) == self.blocks, "blocks leak"
            assert not self.engine.half._tiers.stores.busy, "blocks are held for ever"
            assert not self.engine.half._tiers.store._directory.leases.open, "leases leak"
        finally:
            self.patch.undo()
            self.engine.close()
            shutil.rmtree(self.folder, ignore_errors=True)
