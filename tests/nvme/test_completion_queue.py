"""Test which pages the acks of a job report when some are late, and how time is shared among concurrent transfers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nvme.rig import Rig, blank, key
from tierstore.nvme.completion_queue import Job, Shares
from tierstore.types import Failure, Tier, Transfer

TRANSFER = Transfer(7, tuple(key(n) for n in range(4)), Tier.NVME, (), Tier.HOST, (), 0, (None,) * 4)


def job() -> Job:
    return Job(TRANSFER, [blank()] * 4)


def test_late_pages_make_up_the_transfer_after_its_first_ack() -> None:
    work = job()
    assert [work.done(0, 10), work.late(3), work.done(2, Failure.INTEGRITY)] == [False, False, False]
    assert work.late(1)
    first = work.ack()
    assert (first.transfer_id, first.ok, first.num_ready, first.nbytes) == (7, False, 1, 10)
    assert (first.late, first.failures) == ((1, 3), ((2, Failure.INTEGRITY),))
    assert not work.done(3, 30)
    assert work.done(1, Failure.IO_ERROR)
    second = work.ack()
    assert (second.ok, second.num_ready, second.nbytes, second.late) == (False, 1, 30, ())
    assert second.failures == ((0, Failure.IO_ERROR),)
    assert second.seconds == 0.0  # late pages say nothing about the disk's throughput


def test_a_late_page_that_arrives_before_the_others_is_not_late() -> None:
    work = job()
    assert not work.late(0)
    assert not work.done(0, 5)
    assert [work.done(index, 5) for index in (1, 2, 3)] == [False, False, True]
    ack = work.ack()
    assert (ack.ok, ack.num_ready, ack.nbytes, ack.late, ack.failures) == (True, 4, 20, (), ())


def test_late_pages_of_several_sizes_keep_their_order() -> None:
    work = job()
    dues = [work.late(2), work.late(0), work.done(1, 11), work.done(3, 13)]
    assert dues == [False, False, False, True]
    assert replace(work.ack(), seconds=0.0).sizes == (11, 13)
    assert [work.done(2, 12), work.done(0, 10)] == [False, True]
    assert work.ack().sizes == (10, 12)


def test_each_moment_is_divided_among_the_jobs_in_progress() -> None:
    shares = Shares()
    one = shares.begin(10.0)
    two = shares.begin(12.0)
    three = shares.begin(11.0)  # a thread that read the clock before the previous one
    assert shares.end(one, 15.0) == pytest.approx(2.0 + 3.0 / 3)
    assert shares.end(two, 17.0) == pytest.approx(3.0 / 3 + 2.0 / 2)
    assert shares.end(three, 18.0) == pytest.approx(3.0 / 3 + 2.0 / 2 + 1.0)
    alone = shares.begin(100.0)  # the disk was idle since 18.0
    assert shares.end(alone, 101.0) == pytest.approx(1.0)


@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=8),
)
def test_shares_add_up_to_the_busy_time(spans: list[tuple[int, int]]) -> None:
    shares, begun, total = Shares(), dict[int, float](), 0.0
    events = [(start, 0, n) for n, (start, _) in enumerate(spans)]
    events += [(start + length, 1, n) for n, (start, length) in enumerate(spans)]
    for at, ends, n in sorted(events):
        if ends:
            total += shares.end(begun[n], float(at))
        else:
            begun[n] = shares.begin(float(at))
    busy = {moment for start, length in spans for moment in range(start, start + length)}
    assert total == pytest.approx(len(busy))


def test_seconds_of_a_concurrent_job_are_its_share() -> None:
    work = job()
    work.spent(0.5)
    work.spent(0.25)
    assert [work.done(index, 5) for index in range(4)][-1]
    assert work.ack().seconds == 0.75


def test_concurrent_transfers_report_at_most_the_elapsed_time_in_total(tmp_path: Path) -> None:
    # if queueing counted, the disk would look as many times slower as there are transfers in the queue
    rig = Rig(tmp_path, readers=4)
    numbers = range(64)
    started = time.monotonic()
    writes = [rig.submit_write([n]) for n in numbers]
    acks = [rig.ack(number) for number in writes]
    assert all(ack.ok and ack.seconds > 0 for ack in acks)
    assert sum(ack.seconds for ack in acks) <= time.monotonic() - started
    started = time.monotonic()
    reads = [rig.submit_read([n])[0] for n in numbers]
    acks = [rig.ack(number) for number in reads]
    assert all(ack.ok and ack.seconds > 0 for ack in acks)
    assert sum(ack.seconds for ack in acks) <= time.monotonic() - started
    rig.close()
