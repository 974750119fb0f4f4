"""Traces replayed through the objects of a store: what is read, what is hit, what the bound says, what is printed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.core.order_model import ORDERS
from tests.support.pages import SPEC, tiers
from tierstore import assembly, invariants
from tierstore.assembly import assemble
from tierstore.cli.app import app
from tierstore.errors import ConfigError
from tierstore.layout import PageLayout
from tierstore.policy import choosing
from tierstore.replay import simulation
from tierstore.replay.bound import clairvoyant_hits
from tierstore.replay.rows import Bounds, row
from tierstore.replay.simulation import Setting, Simulation, replay
from tierstore.replay.traces import Request, Trace, read_traces
from tierstore.types import PageKey, Tier

runner = CliRunner()


def mooncake(file: Path, rows: Sequence[tuple[int, list[int]]]) -> Path:
    """Requests of so many tokens and these blocks, a second apart."""
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": tokens, "output_length": 1, "hash_ids": blocks})
        for i, (tokens, blocks) in enumerate(rows)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def chats(number: int, turns: int) -> list[tuple[int, list[int]]]:
    """Chats that share their first block and take turns, each turn two blocks longer; between them, one-off prompts."""
    rows, fresh = [], itertools.count(1000)
    for turn in range(1, turns + 1):
        for chat in range(number):
            rows.append(
                (512 * (1 + 2 * turn) + 7, [0, *(100 * chat + i for i in range(1, 2 * turn + 1)), 99])
            )
            rows.append((512 * 3, [0, next(fresh), next(fresh)]))
    return rows


def chat_trace(tmp_path: Path, number: int = 3, turns: int = 6) -> Trace:
    return read_traces([mooncake(tmp_path / "chats.jsonl", chats(number, turns))])[0]


def setting(pages: int, policy: str = "lru", **more: object) -> Setting:
    return Setting({Tier.HBM: pages}, {Tier.HBM: policy}, 1 << 20, 48.0, **more)  # type: ignore[arg-type]


def ignore(pages: int) -> None:
    pass


# -- reading ----------------------------------------------------------------------------------------------------


def test_a_mooncake_file_is_read_without_blocks_that_are_not_full(tmp_path: Path) -> None:
    trace = read_traces([mooncake(tmp_path / "t.jsonl", [(1030, [5, 6, 7]), (512, [5]), (1536, [5, 6, 8])])])[
        0
    ]
    assert (trace.name, trace.block_tokens) == ("t", 512)
    first, second, third = trace.requests
    assert [len(r.keys) for r in trace.requests] == [2, 1, 3]
    assert (second.keys, third.keys[:2]) == (first.keys[:1], first.keys)
    assert [r.at for r in trace.requests] == [0.0, 1.0, 2.0]


def test_sessions_of_a_folder_are_interleaved_and_share_nothing(tmp_path: Path) -> None:
    for name, times in (("a", (0.0, 2.0)), ("b", (1.0, 3.0))):
        requests = [{"t": t, "in": 130, "hash_ids": [1, 2, 3], "type": "n"} for t in times]
        (tmp_path / f"{name}.json").write_text(json.dumps({"block_size": 64, "requests": requests}))
    (trace,) = read_traces([tmp_path / "b.json", tmp_path / "a.json"])
    assert (trace.name, trace.block_tokens, [r.at for r in trace.requests]) == (
        tmp_path.name,
        64,
        [0, 1, 2, 3],
    )
    a, b, again, _ = trace.requests
    assert a.keys == again.keys
    assert set(a.keys).isdisjoint(b.keys)
    assert len(a.keys) == 2


def test_a_block_is_known_by_all_before_it(tmp_path: Path) -> None:
    requests = [{"t": i, "in": 128, "hash_ids": [i, 9], "type": "n"} for i in (1, 2)]
    (tmp_path / "s.json").write_text(json.dumps({"block_size": 64, "requests": requests}))
    first, second = read_traces([tmp_path / "s.json"])[0].requests
    assert first.keys[1] != second.keys[1]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("t.jsonl", "nonsense\n", "t.jsonl:1: is not JSON"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}\n', "hash_ids"),
        ("t.jsonl", '{"timestamp": "x", "input_length": 5, "hash_ids": []}\n', "timestamp is 'x'"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5, "hash_ids": ["a"]}\n', "whole numbers"),
        ("t.json", "[]", "allowed: an object"),
        ("t.json", '{"requests": []}', "block_size"),
        ("t.json", '{"block_size": 64, "requests": [3]}', "request 0"),
        ("t.csv", "", "allowed: a .jsonl file"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_traces([tmp_path / name])


# -- the bound --------------------------------------------------------------------------------------------------


def requests_of(*sequences: str) -> list[Request]:
    """A request a word, a block a letter; words that begin alike share blocks."""
    made = []
    for i, word in enumerate(sequences):
        keys = tuple(PageKey(word[: n + 1].encode()) for n in range(len(word)))
        made.append(Request(float(i), len(word), keys))
    return made


def test_the_bound_keeps_what_comes_back_first_and_refuses_what_never_does() -> None:
    assert clairvoyant_hits(requests_of("ab", "cd", "ef", "ab"), 2) == [0, 0, 0, 2]
    assert clairvoyant_hits(requests_of("ab", "cd", "cd", "ab"), 2) == [0, 0, 2, 0]
    assert clairvoyant_hits(requests_of("ab", "ac", "ab"), 2) == [0, 1, 2]
    assert clairvoyant_hits(requests_of("abc", "abc"), 2) == [0, 2]


def best_possible(requests: Sequence[Request], pages: int) -> int:
    """The most hits of any way to keep prefix-closed sets, by trying all of them."""
    states = {frozenset[PageKey](): 0}
    for request in requests:
        following: dict[frozenset[PageKey], int] = {}
        for kept, hits in states.items():
            found = sum(1 for _ in itertools.takewhile(kept.__contains__, request.keys))
            everything = sorted(kept.union(request.keys))
            for size in range(min(pages, len(everything)) + 1):
                for chosen in map(frozenset, itertools.combinations(everything, size)):
                    if all(len(key) == 1 or key[:-1] in chosen for key in chosen):
                        following[chosen] = max(following.get(chosen, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize(
    "words",
    [
        ("a", "b", "c", "a", "b"),
        ("ab", "c", "ad", "ab", "c"),
        ("ab", "ac", "b", "ab", "b"),
        ("abc", "d", "ab", "d"),
    ],
)
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_on_small_trees_nobody_does_better_than_the_bound(words: tuple[str, ...], pages: int) -> None:
    requests = requests_of(*words)
    assert sum(clairvoyant_hits(requests, pages)) == best_possible(requests, pages)


# -- the simulation ---------------------------------------------------------------------------------------------


def plain_lru(trace: Trace, pages: int) -> int:
    """Pages hit over the second half by an LRU list, tails older than heads."""
    kept: dict[PageKey, None] = {}
    total, half = 0, len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        hits = sum(1 for _ in itertools.takewhile(kept.__contains__, request.keys))
        total += hits if number >= half else 0
        for key in reversed(request.keys):
            kept.pop(key, None)
            kept[key] = None
        while len(kept) > pages:
            del kept[next(iter(kept))]
    return total


@pytest.mark.parametrize("pages", [14, 20, 40, 200])
def test_lru_hits_what_an_lru_list_hits(tmp_path: Path, pages: int) -> None:
    trace = chat_trace(tmp_path)
    outcome = replay(trace, setting(pages), ignore)
    assert outcome.hit_tokens == 512 * plain_lru(trace, pages)
    assert outcome.asked_tokens == sum(r.tokens for r in trace.requests[len(trace.requests) // 2 :])


@pytest.mark.parametrize("policy", ORDERS)
def test_no_order_beats_the_bound_and_all_are_one_where_everything_fits(tmp_path: Path, policy: str) -> None:
    trace = chat_trace(tmp_path)
    for pages in (14, 20, 40):
        found = row(trace, setting(pages, policy), Bounds(), ignore)
        assert 0 < found.hit_rate <= found.optimal_hit_rate
    everything = row(trace, setting(400, policy), Bounds(), ignore)
    assert everything.hit_rate == everything.optimal_hit_rate


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("admission", ["all", "second_hit", "cost"])
def test_the_directory_is_sound_after_every_request(tmp_path: Path, policy: str, admission: str) -> None:
    pages = {Tier.HBM: 14, Tier.HOST: 8, Tier.NVME: 20}
    simulated = Simulation(Setting(pages, dict.fromkeys(pages, policy), 1 << 20, 48.0, admission=admission))
    for request in chat_trace(tmp_path, 3, 5).requests:
        found = simulated.serve(request)
        assert list(simulated.directory.residency.match(request.keys)) == [Tier.HBM] * len(request.keys)
        assert len(found) <= len(request.keys)
        invariants.check_residency(simulated.directory.residency)
        assert not simulated.directory.leasing.open
        assert simulated.directory.traffic.idle()


def test_more_tiers_hit_more_and_second_hit_writes_less(tmp_path: Path) -> None:
    trace = chat_trace(tmp_path, 4, 6)
    pages = {Tier.HBM: 14, Tier.HOST: 6, Tier.NVME: 30}
    found = {
        admission: replay(
            trace, Setting(pages, dict.fromkeys(pages, "lru"), 1 << 20, 48.0, admission), ignore
        )
        for admission in ("all", "second_hit")
    }
    alone = replay(trace, setting(14), ignore)
    assert found["all"].hit_tokens > alone.hit_tokens
    assert set(found["all"].hits) >= {Tier.HBM, Tier.NVME}
    assert 0 < found["second_hit"].nvme_written < found["all"].nvme_written / 2
    assert found["all"].moved["HOST,NVME"] == found["all"].nvme_written // ((1 << 20) + 4096) * (1 << 20)


def test_a_request_that_hbm_cannot_hold_is_passed_over_and_counted(tmp_path: Path) -> None:
    outcome = replay(chat_trace(tmp_path, 1, 6), setting(9), ignore)
    assert outcome.too_long == 2
    assert outcome.hit_tokens > 0


def test_the_simulator_runs_on_the_very_objects_that_a_store_runs_on(tmp_path: Path) -> None:
    more = {"policy": "adaptive"}
    config = tiers(
        4, 4, tmp_path / "disk", hbm_more=more, host_more=more, nvme_more={**more, "admission": "cost"}
    )
    parts = assemble(config, PageLayout.of(SPEC), lambda: None)
    pages = {Tier.HBM: 4, Tier.HOST: 4, Tier.NVME: 4}
    simulated = Simulation(Setting(pages, dict.fromkeys(pages, "adaptive"), 1 << 20, 48.0, admission="cost"))
    assert type(simulated.directory) is type(parts.directory)
    for tier, table in parts.directory.residency.tables.items():
        mine = simulated.directory.residency.tables[tier]
        assert (type(mine), type(mine.policy)) == (type(table), type(table.policy))
    assert type(simulated.directory.admitting) is type(parts.directory.admitting)
    assert type(simulated.directory.admitting._admission) is type(parts.directory.admitting._admission)
    for name in ("make_policy", "make_admission", "make_history"):
        assert vars(simulation)[name] is vars(assembly)[name] is vars(choosing)[name]
    parts.mover.close(10.0)


# -- orders that learn ------------------------------------------------------------------------------------------


def returning(tmp_path: Path) -> Trace:
    """Chats whose turns come long after a plain LRU has forgotten them, among prompts that never come back."""
    fresh = itertools.count(10_000)
    rows = []
    for turn in range(1, 40):
        for chat in range(8):
            rows.append((512 * 6, [100 * chat + i for i in range(1, 7)]))
            rows += [(512 * 4, [next(fresh) for _ in range(4)]) for _ in range(6)]
        assert turn
    return read_traces([mooncake(tmp_path / "returning.jsonl", rows)])[0]


@pytest.mark.parametrize("policy", ["session", "adaptive"])
def test_what_comes_back_late_is_kept_and_what_never_does_is_not(tmp_path: Path, policy: str) -> None:
    trace = returning(tmp_path)
    lru, found = (replay(trace, setting(64, name), ignore).hit_rate for name in ("lru", policy))
    assert lru == 0
    assert found > 0.5 * Bounds().rate(trace, 64)


def test_adaptive_follows_lru_where_recency_is_the_better_signal(tmp_path: Path) -> None:
    """Chats of a few quick turns, each gone for good after its last: the older a chat, the less it is worth."""
    rows = []
    for start in range(0, 400, 2):
        for turn in range(1, 9):
            for chat in (start, start + 1):
                rows.append((512 * (2 + turn), [100 * chat + i for i in range(1, 3 + turn)]))
    trace = read_traces([mooncake(tmp_path / "quick.jsonl", rows)])[0]
    lru, adaptive = (replay(trace, setting(24, name), ignore).hit_rate for name in ("lru", "adaptive"))
    assert adaptive >= 0.98 * lru


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_a_policy_and_capacity(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    args = [
        "replay",
        str(file),
        "--capacity",
        "1GiB",
        "--capacity",
        "2GiB",
        "--policy",
        "lru",
        "--policy",
        "lfu",
    ]
    result = runner.invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(r["policy"], r["capacity_bytes"]) for r in rows] == [
        ("lru", 1 << 30),
        ("lfu", 1 << 30),
        ("lru", 2 << 30),
        ("lfu", 2 << 30),
    ]
    assert all(r["trace"] == "chats" and 0 < r["hit_rate"] <= r["optimal_hit_rate"] for r in rows)
    assert all(r["nvme_bytes_written"] == 0 for r in rows)


def test_the_command_takes_tiers_and_policies_from_a_configuration(tmp_path: Path) -> None:
    file = mooncake(tmp_path / "chats.jsonl", chats(3, 5))
    config = tmp_path / "c.yaml"
    config.write_text(
        "hbm: {capacity: 1GiB, device: cpu, policy: slru}\nhost: {capacity: 512MiB}\n"
        f"nvme: {{path: {tmp_path}, capacity: 4GiB, admission: second_hit}}\n"
    )
    result = runner.invoke(app, ["replay", str(tmp_path), "--config", str(config), "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert (found["policy"], found["admission"]) == ("slru/lru/lru", "second_hit")
    assert found["nvme_bytes_written"] > 0
    assert file.exists()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--capacity", "1KiB"], "less than one block"),
        (["--policy", "random"], "hbm.policy is 'random'"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--capacity", "lots"], "hbm.capacity is 'lots'"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_line(tmp_path: Path, args: list[str], complaint: str) -> None:
    file = mooncake(tmp_path / "t.jsonl", [(512, [1])])
    result = runner.invoke(app, ["replay", str(file), *args])
    assert result.exit_code == 2
    assert complaint in result.output


def test_the_plot_has_a_line_a_policy_and_one_for_the_bound(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, picture = mooncake(tmp_path / "t.jsonl", chats(2, 4)), tmp_path / "out.svg"
    args = ["replay", str(file), "--capacity", "1GiB", "--capacity", "2GiB", "--plot", str(picture)]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000
