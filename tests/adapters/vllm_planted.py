"""Bugs to plant in the vLLM connector. Each is a small change of behaviour, and its name says what goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from tests.support.planting import Plants
from tierstore.adapters.vllm import compat, config, hit, kv_groups, loads, saves, scheduler
from tierstore.adapters.vllm.hit import pages_to_load
from tierstore.adapters.vllm.keys import namespace
from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.adapters.vllm.loads import Loads
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.requests import Step, StepReader
from tierstore.adapters.vllm.saves import Stores
from tierstore.adapters.vllm.scheduler import SchedulerHalf
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.host.shared_memory import SharedMemory
from tierstore.ranks import Ranks, _Merging
from tierstore.types import Ack, Erase, LeaseState, PageKey, Tier, Transfer

PLANTED = Plants()


@PLANTED.bug
def no_fence(patch: pytest.MonkeyPatch) -> None:
    orders = SchedulerHalf.orders
    patch.setattr(SchedulerHalf, "orders", lambda self, *step: replace(orders(self, *step), fence=()))


@PLANTED.bug
def worker_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerHalf, "_wait_for", lambda self, slots: None)


@PLANTED.bug
def blocks_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    for name in ("pin", "unpin"):
        patch.setattr(compat.BlockPins, name, lambda self, blocks: None)


@PLANTED.bug
def sleep_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerHalf, "rest", lambda self: True)


@PLANTED.bug
def queued_copies_are_not_withdrawn(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Stores, blocks: Iterable[int]) -> tuple[int, ...]:
        for block in blocks:
            self._collected.pop(block, None)
        return ()

    patch.setattr(Stores, "reused", wrong)


@PLANTED.bug
def blocks_are_freed_before_they_are_copied(patch: pytest.MonkeyPatch) -> None:
    put = Stores._put

    def wrong(self: Stores, run: Sequence[Any]) -> None:
        put(self, run)
        self.busy.clear()

    patch.setattr(Stores, "_put", wrong)


@PLANTED.bug
def stored_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    orders = SchedulerHalf.orders

    def wrong(self: SchedulerHalf, *step: Any) -> Orders:
        found = orders(self, *step)
        return replace(found, before=found.before + found.after, after=())

    begin = WorkerHalf.begin

    def at_once(self: WorkerHalf, found: Orders) -> None:
        begin(self, found)
        self.go()

    patch.setattr(SchedulerHalf, "orders", wrong)
    patch.setattr(WorkerHalf, "begin", at_once)


@PLANTED.bug
def loads_start_into_blocks_that_are_read(patch: pytest.MonkeyPatch) -> None:
    start = Loads.start
    patch.setattr(Loads, "start", lambda self, busy, idle: start(self, frozenset(), idle))


@PLANTED.bug
def told_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    start = Loads.start

    def wrong(self: Loads, busy: Set[int], idle: bool) -> None:
        start(self, busy, idle)
        self._loaded.update(load.request_id for load in self._loads)

    patch.setattr(Loads, "start", wrong)


@PLANTED.bug
def failed_loads_count_as_loaded(patch: pytest.MonkeyPatch) -> None:
    settle = Loads.settle

    def wrong(self: Loads) -> list[Any]:
        failed = settle(self)
        self._loaded.update(self._failed)
        self._failed.clear()
        return failed

    patch.setattr(Loads, "settle", wrong)


@PLANTED.bug
def the_first_bad_block_is_not_told(patch: pytest.MonkeyPatch) -> None:
    take = Loads.take_failed
    patch.setattr(
        Loads, "take_failed", lambda self: {name: bad[1:] or bad for name, bad in take(self).items()}
    )


def a_gap_in_a_load_is_not_seen(patch: pytest.MonkeyPatch) -> None:
    """This bug is not in ``PLANTED``: 2,000 random walks did not find it, but ``test_vllm_requests`` does."""

    def blind(load: loads.Load) -> None:
        while load.leases and load.leases[0].wait(0) is not LeaseState.PENDING:
            lease = load.leases.popleft()
            lease.release()
            load.arrived += lease.num_pages

    patch.setattr(loads, "_end_pieces", blind)
    settle = Loads.settle

    def wrong(self: Loads) -> list[Any]:
        failed = settle(self)
        for load in failed:
            self._failed[load.request_id] = load.blocks[load.arrived :] or load.blocks[-1:]
        return failed

    patch.setattr(Loads, "settle", wrong)


@PLANTED.bug
def aborted_loads_are_never_told(patch: pytest.MonkeyPatch) -> None:
    finished = SchedulerHalf.finished

    def wrong(self: SchedulerHalf, request_id: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        finished(self, request_id, blocks, computed)
        assert self._tiers is not None
        loading = self._tiers.loads
        loading._loads = [x for x in loading._loads if x.request_id != request_id]

    patch.setattr(SchedulerHalf, "finished", wrong)


@PLANTED.bug
def an_id_is_told_of_only_once(patch: pytest.MonkeyPatch) -> None:
    take = Loads.take_loaded
    told: dict[Loads, set[str]] = {}

    def wrong(self: Loads) -> set[str]:
        before = told.setdefault(self, set())
        fresh = take(self) - before
        before |= fresh
        return fresh

    patch.setattr(Loads, "take_loaded", wrong)


@PLANTED.bug
def old_weights_are_offered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerHalf, "reset", lambda self: None)


@PLANTED.bug
def a_preempted_request_goes_on_counting(patch: pytest.MonkeyPatch) -> None:
    follow = SchedulerHalf._follow
    patch.setattr(
        SchedulerHalf,
        "_follow",
        lambda self, tiers, step: follow(self, tiers, replace(step, computed=step.computed + 2)),
    )


@PLANTED.bug
def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Ranks, rank: int, acks: Iterable[Ack]) -> None:
        for ack in acks:
            merging = self._merging.pop(ack.transfer_id, None)
            if merging is not None:
                self._acks.append(ack)

    patch.setattr(Ranks, "deliver", wrong)


@PLANTED.bug
def keys_leave_out_the_last_token(patch: pytest.MonkeyPatch) -> None:
    from tierstore.adapters.vllm.keys import KeyChain

    first = KeyChain.first

    def wrong(self: KeyChain, blocks: int) -> list[PageKey]:
        keys = first(self, blocks)
        return [keys[max(0, i - 1)] if i % 2 else key for i, key in enumerate(keys)]

    patch.setattr(KeyChain, "first", wrong)
    patch.setattr(KeyChain, "between", lambda self, begin, end: wrong(self, end)[begin:])


@PLANTED.bug
def blocks_count_the_tokens_of_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_groups, "_ranks", lambda spec, ranks: 1)


@PLANTED.bug
def groups_share_their_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "namespaces", lambda self, identity: (namespace(identity),) * len(self.all))


@PLANTED.bug
def only_the_first_groups_blocks_are_fenced(patch: pytest.MonkeyPatch) -> None:
    of = StepReader.of

    def wrong(self: StepReader, output: Any) -> list[Step]:
        return [
            replace(step, fresh=[b for b in step.fresh if b in step.tables[0]]) for step in of(self, output)
        ]

    patch.setattr(StepReader, "of", wrong)


@PLANTED.bug
def blocks_that_another_connector_fills_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerHalf, "_filled_by_others", lambda self, steps: [])


def without(found: Any, blocks: set[int]) -> Any:
    """Return the first tokens, keys and blocks of the pages that are not in ``blocks``, or of all if none is left."""
    left = [page for page in zip(*found, strict=True) if page[2] not in blocks]
    return tuple(zip(*left, strict=True)) if left else found


@PLANTED.bug
def a_hit_counts_without_its_windows(patch: pytest.MonkeyPatch) -> None:
    def wrong(groups: Groups, chains: Any, tables: Any, start: int, end: int) -> Any:
        found = pages_to_load(groups, chains, tables, start, end)
        windows = {block for group in groups.all if group.partial for block in tables[group.number]}
        return without(found, windows)

    patch.setattr(hit, "_windows", lambda groups, chains, start, end, find: [])
    patch.setattr(scheduler, "pages_to_load", wrong)


@PLANTED.bug
def a_hit_counts_without_its_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hit._StatesFound, "last_end", lambda self, start, end: end)

    def wrong(groups: Groups, chains: Any, tables: Any, start: int, end: int) -> Any:
        states = {block for group in groups.states for block in tables[group.number]}
        return without(pages_to_load(groups, chains, tables, start, end), states)

    patch.setattr(scheduler, "pages_to_load", wrong)


@PLANTED.bug
def a_state_is_stored_for_a_boundary_that_it_is_not_at(patch: pytest.MonkeyPatch) -> None:
    collect = Stores._collect_state

    def wrong(self: Stores, known: Any, group: Group, block: int, tokens: int) -> None:
        if whole := tokens // self._groups.unit * self._groups.unit:
            collect(self, known, group, block, whole)

    patch.setattr(Stores, "_collect_state", wrong)


def what_a_window_gave_back_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Store blocks that a sliding window has released. ``test_vllm_kv_groups`` finds this bug.

    It is not in ``PLANTED``, because about 2,000 walks of the state machine did not find it.
    """
    patch.setattr(Group, "first_needed", lambda self, tokens: 0)
    patch.setattr(saves, "NULL_BLOCK", -1)


@PLANTED.bug
def a_failed_load_is_gone_on_from_without_its_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "whole", True)


@PLANTED.bug
def ranks_with_different_kv_store_it_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(config, "replicas_of", lambda parallel, groups: parallel.tensor_parallel_size)


@PLANTED.bug
def ranks_do_not_share_their_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedMemory, "open", lambda handle: SharedMemory.create(handle.nbytes))


@PLANTED.bug
def only_the_owner_loads_a_page(patch: pytest.MonkeyPatch) -> None:
    owned = WorkerHalf._owned

    def wrong(self: WorkerHalf, command: Transfer | Erase) -> Transfer | Erase | None:
        if isinstance(command, Erase) or command.dst != Tier.HBM:
            return owned(self, command)
        part = owned(self, replace(command, dst=Tier.HOST))
        return replace(part, dst=Tier.HBM) if isinstance(part, Transfer) else None

    patch.setattr(WorkerHalf, "_owned", wrong)


@PLANTED.bug
def a_page_is_there_before_its_owner_has_stored_it(patch: pytest.MonkeyPatch) -> None:
    of = _Merging.of

    def wrong(transfer: Transfer, ranks: int, replicas: int) -> _Merging:
        merging = of(transfer, ranks, replicas)
        if replicas > 1 and transfer.dst == Tier.HOST:
            merging.open_by_rank = [list(range(len(transfer.keys))) for _ in range(ranks)]
            merging.told = set()
            merging.complete = ranks - 1
        return merging

    patch.setattr(_Merging, "of", wrong)
