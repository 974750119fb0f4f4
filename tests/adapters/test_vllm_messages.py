"""Tests of the messages between scheduler and workers, of block tables, and of commands that wait for events."""

from __future__ import annotations

import pickle
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

from tests.support.events import ManualEvent
from tests.support.pages import chain
from tierstore.adapters.vllm import worker
from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.adapters.vllm.messages import Catalogue, Report
from tierstore.adapters.vllm.requests import StepReader
from tierstore.adapters.vllm.worker import CommandQueue
from tierstore.mover import LocalMover
from tierstore.pump import Wakeup
from tierstore.types import Ack, Erase, PageKey, Tier, Transfer


def test_catalogue_is_unchanged_by_packing() -> None:
    keys = chain(3)
    records = [(keys[0], None, 10), (keys[1], keys[0], 1 << 40), (keys[2], keys[1], 0)]
    packed: Catalogue = pickle.loads(pickle.dumps(Catalogue.of(5, 6, iter(records))))
    disk = packed.unpacked()
    assert (disk.record_nbytes, disk.budget_nbytes) == (5, 6)
    assert list(disk.records()) == records


def test_reports_of_ranks_and_steps_are_merged() -> None:
    one, two = Ack(1, True, 1, 1), Ack(2, True, 1, 1)
    both = Report({0: (one,)}, 3).merged(Report({1: (two,)}, 3)).merged(Report({0: (two,)}, 4))
    assert both.acks == {0: (one, two), 1: (two,)}
    assert both.number == 4


def test_all_blocks_of_a_skipped_group_are_fresh_when_a_request_starts() -> None:
    steps = StepReader(Groups((Group(1, 4),), skipped=("ring", "replayed")))
    new = SimpleNamespace(req_id="a", block_ids=([7], [1, 2, 3], [0, 4]), num_computed_tokens=8)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    output = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 4},
        finished_req_ids=set(),
    )
    (step,) = steps.of(output)
    assert step.fresh == [7, 3, 0, 4]


def test_block_tables_grow_and_restart_after_a_preemption() -> None:
    steps = StepReader(Groups((Group(0, 4), Group(1, 2))))
    new = SimpleNamespace(req_id="a", block_ids=([7, 8], [1, 2, 3]), num_computed_tokens=4)

    def output(cached: list[tuple[str, list[int] | None, int]], resumed: set[str], **scheduled: int) -> Any:
        return SimpleNamespace(
            scheduled_new_reqs=[new] if not cached else [],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                new_block_ids=[None if more is None else (more, [more[0] + 10]) for _, more, _ in cached],
                num_computed_tokens=[computed for _, _, computed in cached],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=set(),
        )

    (first,) = steps.of(output([], set(), a=4))
    assert (first.tables, first.fresh, first.first) == ([[7, 8], [1, 2, 3]], [8, 3], True)
    (second,) = steps.of(output([("a", [9], 8)], set(), a=1))
    assert (second.tables, second.fresh, second.first) == ([[7, 8, 9], [1, 2, 3, 19]], [9, 19], False)
    (third,) = steps.of(output([("a", None, 9)], set(), a=1))
    assert (third.tables, third.fresh) == ([[7, 8, 9], [1, 2, 3, 19]], [])
    (again,) = steps.of(output([("a", [1, 2, 3], 4)], {"a"}, a=6))
    assert (again.tables, again.fresh, again.first) == ([[1, 2, 3], [11]], [2, 3], True)


class FakeMover(LocalMover):
    """Collects the commands, and returns the acks that a test sets."""

    def __init__(self, polled: bool = False) -> None:
        super().__init__({}, None, {})
        self.got: list[Transfer | Erase] = []
        self.acks: list[Ack] = []
        self.asks = polled

    def submit(self, command: Transfer | Erase) -> None:
        self.got.append(command)

    def poll(self) -> list[Ack]:
        acks, self.acks = self.acks, []
        return acks

    @property
    def polled(self) -> bool:
        return self.asks


def copy_out(number: int, slot: int) -> Transfer:
    return Transfer(number, (PageKey(bytes(36)),), Tier.HBM, (slot,), Tier.HOST, (0,), 0, (None,))


def test_commands_waiting_for_events_start_in_order_without_blocking_others() -> None:
    mover, wakeup = FakeMover(), Wakeup()
    feed = CommandQueue(mover, wakeup)
    first, second = ManualEvent(), ManualEvent()
    second.happen()
    feed.submit(copy_out(1, 5), first)
    feed.submit(copy_out(2, 6), second)
    feed.submit(Erase(Tier.NVME, ()))
    feed.submit(copy_out(3, 7))
    assert [c.id for c in mover.got if isinstance(c, Transfer)] == [3]
    assert feed.reads({5})
    assert feed.reads({6})
    feed.check()
    first.happen()
    feed.advance()
    assert [c.id for c in mover.got if isinstance(c, Transfer)] == [3, 1, 2]
    mover.acks = [Ack(1, True, 1, 1)]
    assert [ack.transfer_id for ack in feed.take()] == [1]
    assert not feed.reads({5})
    assert feed.reads({6})
    assert feed.close(60.0)


def test_thread_does_not_exist_before_a_command_waits_for_an_event() -> None:
    mover = FakeMover(polled=True)
    feed = CommandQueue(mover, Wakeup())
    feed.submit(copy_out(1, 5))
    assert feed._thread is None
    mover.acks = [Ack(1, True, 1, 1)]
    assert [ack.transfer_id for ack in feed.take()] == [1]
    assert feed.close(60.0)


def test_thread_starts_a_command_once_its_event_has_occurred() -> None:
    mover, event = FakeMover(), ManualEvent()
    feed = CommandQueue(mover, Wakeup())
    feed.submit(copy_out(1, 5), event)
    deadline = monotonic() + 60.0
    event.happen()
    while not mover.got:
        assert monotonic() < deadline
        sleep(0.001)
    assert feed.close(60.0)


def test_thread_looks_more_often_if_a_load_waits_for_an_event() -> None:
    feed, event = CommandQueue(FakeMover(), Wakeup()), ManualEvent()
    feed.submit(copy_out(1, 5), event)
    assert feed._due_s() == worker._SAVE_POLL_S
    feed.submit(Transfer(2, (PageKey(bytes(36)),), Tier.HOST, (0,), Tier.HBM, (6,), 0, (None,)), event)
    assert feed._due_s() == worker._POLL_S < worker._SAVE_POLL_S
    assert feed.close(60.0)
