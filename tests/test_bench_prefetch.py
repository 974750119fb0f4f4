"""Test ``bench prefetch`` at tiny sizes, and test the server that it simulates against cases computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prefetch import Compute
from tests.support.pages import chain
from tierstore.bench.prefetch import POLICIES, Memory, Outcome, Policy, Server, Sessions, Sizes, mean, p99
from tierstore.cli.app import app
from tierstore.replay.traces import Request
from tierstore.types import PageKey, Tier

SIZES = Sizes(
    hbm=6, host=20, nvme=100, read_s=4.0, load_s=1.0, prefill=Compute(2.0), block_tokens=1, decode_slots=1
)
A, B, C = chain(3, "a"), chain(3, "b"), chain(3, "c")


def request(at: float, keys: list[PageKey], more: int = 0, output: int = 0) -> Request:
    return Request(at, len(keys) + more, tuple(keys), output)


def served(policy: Policy, requests: list[Request], sizes: Sizes = SIZES) -> Outcome:
    return Server(policy, sizes, requests, 1.0).run(lambda n: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_in_no_tier_are_computed_under_every_policy(policy: Policy) -> None:
    found = served(policy, [request(0.0, A), request(1.0, B)])
    assert found.ttfts == [6.0, 11.0]
    assert found.stalls == [0.0, 0.0]
    assert (found.busy_s, found.makespan) == (12.0, 12.0)


def again(gap: float) -> list[Request]:
    """Return requests for A, then for B and C, which evict A from HBM, then for A again, ``gap`` seconds later."""
    return [request(0.0, A), request(10.0, B), request(20.0, C), request(30.0 + gap, A, more=1)]


def test_loads_on_look_up_are_waited_for() -> None:
    found = served("on-lookup", again(0.0))
    assert found.stalls[:3] == [0.0] * 3
    assert found.stalls[3] == 1.0  # three loads of 1 s overlap with 2 s of computing
    assert found.ttfts[3] == 3.0


def test_without_loads_everything_is_recomputed() -> None:
    assert served("none", again(0.0)).ttfts[3] == 8.0


def test_oracle_policy_never_stalls() -> None:
    found = served("oracle", again(0.0))
    assert found.stalls == [0.0] * 4
    assert found.brought == 0  # it keeps pages that are requested again, and drops the others


def test_pages_of_a_waiting_request_are_prefetched() -> None:
    queued = [request(0.0, A), request(10.0, B), request(20.0, C, output=200), request(20.5, A, more=1)]
    assert served("on-lookup", queued).stalls[3] == 1.0
    assert served("ours", queued).stalls[3] == 0.0


def test_pages_of_an_expected_turn_are_loaded_before_it_arrives() -> None:
    """Request A every 40 s, and evict its pages in between. After three pauses, the next turn is expected.

    No request waits for another one.
    """
    turns = [request(40.0 * turn, A[:2]) for turn in range(7)]
    others = [request(40.0 * turn + gap, chain(3, f"{turn}/{gap}")) for turn in range(7) for gap in (10, 20)]
    requests = sorted(turns + others, key=lambda each: each.at)
    assert served("on-lookup", requests).stalls[::3] == [0.0] + [2.0] * 6
    assert served("ours", requests).stalls[::3] == [0.0] + [2.0] * 3 + [0.0] * 3


def test_pages_from_disk_are_read_before_they_are_loaded_and_delay_computing() -> None:
    small = Sizes(
        hbm=3, host=3, nvme=100, read_s=4.0, load_s=1.0, prefill=Compute(2.0), block_tokens=1, decode_slots=1
    )
    sequence = [request(0.0, A[:2]), request(10.0, B[:2]), request(20.0, C[:2]), request(30.0, A[:2], more=1)]
    assert served("on-lookup", sequence, small).stalls[3] == 8.0


def test_request_larger_than_hbm_is_skipped() -> None:
    found = served("ours", [request(0.0, chain(6, "large")), request(0.0, A)])
    assert (found.too_long, len(found.stalls)) == (1, 1)


def test_pinned_pages_are_never_evicted_and_kept_pages_last() -> None:
    memory = Memory(SIZES)
    memory.store(A, 0.0)
    memory.store(B, 1.0)
    memory.pin(A[:1])
    memory.keep({A[1]})
    memory.make_room(2)
    assert set(memory.hbm) == {A[0], A[1], B[0], B[1]}
    memory.make_room(5)
    assert set(memory.hbm) == {A[0]}
    assert memory.match(A) == [Tier.HBM, Tier.HOST, Tier.HOST]


def test_prefetched_pages_displace_no_page_that_is_kept_or_in_use() -> None:
    memory = Memory(SIZES)
    memory.store(A, 0.0)
    memory.store(B, 1.0)
    memory.keep({*A, *B[:1]})
    assert memory.room_ahead()
    memory.hbm[C[0]] = 2.0
    assert memory.room_ahead()
    memory.hbm[C[1]] = 2.0
    assert not memory.room_ahead()
    assert set(memory.hbm) == {*A, B[0], C[0], C[1]}


def test_session_is_identified_by_its_pages_and_predicted_after_three_pauses() -> None:
    sessions, at = Sessions(), 0.0
    first = sessions.arrived(request(0.0, A[:2]), 0.0)
    for pause in (4.0, 9.0, 5.0):
        assert sessions.answered(first, request(at, A[:2]), at) is None
        at += pause
        assert sessions.arrived(request(at, A), at) == first
    assert sessions.answered(first, request(at, A), 20.0) == 25.0
    assert sessions.arrived(request(21.0, B), 21.0) != first


def test_request_with_only_a_common_prefix_is_another_session() -> None:
    sessions = Sessions()
    first = sessions.arrived(request(0.0, A[:1]), 0.0)
    sessions.answered(first, request(0.0, A[:1]), 5.0)
    assert sessions.arrived(request(9.0, A), 9.0) != first


def test_mean_and_p99_of_no_values_are_zero() -> None:
    assert (mean([]), p99([])) == (0.0, 0.0)
    assert p99([float(i) for i in range(200)]) == 198.0


def trace(folder: Path) -> Path:
    file = folder / "tiny.jsonl"
    rows = [
        {
            "timestamp": 300 * i,
            "input_length": 1300 + i,
            "output_length": 10,
            "hash_ids": [i % 4, 100 + i % 4, 200 + i],
        }
        for i in range(24)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


def test_bench_prefetch_prints_a_row_for_each_policy_and_use(tmp_path: Path) -> None:
    words = [
        "bench",
        "prefetch",
        str(trace(tmp_path)),
        "--hbm",
        "384MiB",
        "--host",
        "1GiB",
        "--requests",
        "20",
    ]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["utilisation"], row["policy"]) for row in rows] == [
        (u, p) for u in (0.7, 0.9) for p in POLICIES
    ]
    assert all(row["requests"] == 20 for row in rows)
    assert all(0.0 <= row["wasted"] <= 1.0 for row in rows)
    assert all(row["ttft_p99_s"] >= row["ttft_mean_s"] > 0.0 for row in rows)


@pytest.mark.parametrize(("option", "value"), [("--hbm", "1KiB"), ("--host", "1KiB")])
def test_bench_prefetch_refuses_a_tier_of_no_page(tmp_path: Path, option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["bench", "prefetch", str(trace(tmp_path)), option, value, "--json"])
    assert result.exit_code == 2
    assert "at least the size of one block" in json.loads(result.stdout.splitlines()[-1])["error"]
