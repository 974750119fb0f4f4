"""Tests of questions about documents on a slow disk.

The engine, the disk and the clock are simulated. The scheduler side of the connector is real.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks.queued_documents import (
    CONTENDERS,
    Contender,
    Machine,
    Result,
    Simulation,
    Workload,
    main,
    run,
)
from tests.support import lanes

WORK = Workload(documents=6, in_host=3.0, rounds=3)
"""A small workload. The tests run it with large blocks, which are faster to simulate and lead to the same decisions."""


@cache
def result(contender: Contender, disk_gbps: float, at_a_time: int) -> Result:
    return run(Machine(disk_gbps * 1e9, block=256), WORK, contender, at_a_time)


@pytest.mark.parametrize(("disk_gbps", "gain"), [(0.5, 1.0), (2.0, 1.2), (7.0, 1.9)])
@pytest.mark.parametrize("at_a_time", lanes.some([2, 4, 8], (4).__eq__))
def test_with_several_questions_at_a_time_no_disk_makes_the_engine_slower(
    disk_gbps: float, gain: float, at_a_time: int
) -> None:
    found = result("if_faster", disk_gbps, at_a_time).questions_per_s
    assert found >= gain * result("compute", disk_gbps, at_a_time).questions_per_s
    assert found >= 0.75 * result("always", disk_gbps, at_a_time).questions_per_s


@pytest.mark.parametrize(("disk_gbps", "gain"), [(0.5, 1.0), (2.0, 1.1), (7.0, 1.9)])
@pytest.mark.parametrize("at_a_time", [1, 4])
def test_restarted_engine_with_all_prompts_on_disk_learns_its_compute_rate(
    disk_gbps: float, gain: float, at_a_time: int
) -> None:
    machine = Machine(disk_gbps * 1e9, block=256)
    found = run(machine, WORK, "if_faster", at_a_time, restarted=True)
    compute = run(machine, WORK, "compute", at_a_time, restarted=True)
    assert found.questions_per_s >= gain * compute.questions_per_s
    assert found.worst_ttft_s <= compute.worst_ttft_s + 4.0


@pytest.mark.parametrize("disk_gbps", [0.5, 2.0, 7.0])
def test_single_questions_take_at_most_a_quarter_longer_than_the_better_alternative(
    disk_gbps: float,
) -> None:
    found = result("if_faster", disk_gbps, 1)
    best = min(result(contender, disk_gbps, 1).median_ttft_s for contender in ("compute", "always"))
    assert found.median_ttft_s <= 1.25 * best
    assert found.worst_ttft_s <= 1.5 * result("compute", disk_gbps, 1).worst_ttft_s


def test_connector_that_always_loads_is_noticed() -> None:
    always, compute = result("always", 0.5, 4), result("compute", 0.5, 4)
    assert always.questions_per_s < 0.5 * compute.questions_per_s
    assert always.loaded > 0.99


@pytest.mark.parametrize("link_gbps", [0.5, 50.0])
def test_pages_in_host_memory_are_loaded_over_a_fast_link_and_computed_beside_a_slow_one(
    link_gbps: float,
) -> None:
    work = Workload(documents=3, in_host=4.0, rounds=2)
    found = run(Machine(7e9, link_gbps * 1e9, block=256), work, "if_faster", 1)
    compute = run(Machine(7e9, block=256), work, "compute", 1)
    assert found.median_ttft_s <= 1.05 * compute.median_ttft_s
    assert (found.loaded > 0.9) == (link_gbps == 50.0)


@pytest.mark.parametrize(("link_gbps", "gain"), [(0.5, 0.99), (2.0, 1.3), (7.0, 2.2)])
def test_with_several_questions_at_a_time_no_link_makes_the_engine_slower(
    link_gbps: float, gain: float
) -> None:
    """Choose between loading and computing. At 2 GB/s, always loading would be 0.58 times as fast as computing."""
    work = Workload(documents=6, in_host=7.5, rounds=3)
    found = run(Machine(7e9, link_gbps * 1e9, block=256), work, "if_faster", 4)
    compute = run(Machine(7e9, block=256), work, "compute", 4)
    assert found.questions_per_s >= gain * compute.questions_per_s
    assert found.loaded > 0.3 or link_gbps == 0.5


@pytest.mark.parametrize("in_host", [0.25, 1.1])
def test_a_load_waits_for_host_memory_that_is_full_instead_of_failing(in_host: float) -> None:
    """Load four prompts of 131,072 tokens. Host memory is smaller, so each page that is loaded must evict another."""
    work = Workload(documents=1, tokens=131072, in_host=in_host)
    simulation = Simulation(Machine(7e9, block=512), work, "always")
    for _ in range(2):
        simulation.loaded = simulation.prompted = 0
        for document in range(1, 5):  # computes the documents and writes them to disk
            simulation.ask(document)
        answered = 0
        while answered < 4:
            answered += len(simulation.step())
    assert simulation.loaded / simulation.prompted > 0.98
    assert simulation.failed == 0
    simulation.close()


def test_a_load_waits_for_host_memory_that_fills_with_prompts_which_are_being_stored() -> None:
    """Load two prompts, and compute and store two others, with host memory for a quarter of a prompt."""
    work = Workload(documents=2, tokens=131072, in_host=0.25)
    machine = Machine(7e9, block=256)
    simulation, alone = Simulation(machine, work, "always"), Simulation(machine, work, "compute")
    for each, documents in ((simulation, (0, 1, 8, 9)), (alone, (8, 9))):
        for document in documents:
            each.ask(document)
        answered = 0
        while answered < len(documents):
            answered += len(each.step())
    assert simulation.loaded / simulation.prompted == pytest.approx(0.5, rel=0.01)
    assert simulation.failed == 0
    assert simulation.now <= 1.1 * alone.now
    simulation.close()


def test_runs_are_deterministic() -> None:
    machine, work = Machine(2e9, block=512), Workload(documents=4, in_host=2.0, rounds=1)
    assert run(machine, work, "if_faster", 4) == run(machine, work, "if_faster", 4)


def test_the_command_prints_a_row_for_each_run() -> None:
    app = Typer()
    app.command()(main)
    words = ["--disk", "7", "--at-a-time", "2", "--rounds", "1", "--block", "512", "--json"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0, printed.output
    rows = json.loads(printed.stdout.splitlines()[-1])["rows"]
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    assert all(f"{row['questions_per_s']:.2f}" in printed.stdout for row in rows)
