"""Tests of reading traces, and of the errors for files that are not valid traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.traces import mooncake
from tierstore.errors import ConfigError
from tierstore.replay.traces import read_traces


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


def test_block_key_depends_on_all_blocks_before_it(tmp_path: Path) -> None:
    requests = [{"t": i, "in": 128, "hash_ids": [i, 9], "type": "n"} for i in (1, 2)]
    (tmp_path / "s.json").write_text(json.dumps({"block_size": 64, "requests": requests}))
    first, second = read_traces([tmp_path / "s.json"])[0].requests
    assert first.keys[1] != second.keys[1]


ONE = '{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n'
SESSION = '{"block_size": 64, "requests": [{"t": 0, "in": 64, "hash_ids": [1]}, %s]}'


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "t.jsonl",
            ONE + "\nnonsense\n",
            "t.jsonl:3 is not valid JSON (Expecting value at column 1, near 'nonsense'), expected a JSON object",
        ),
        ("t.jsonl", ONE + "[1]\n", "t.jsonl:2 is [1], expected an object"),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5}\n',
            "t.jsonl:1: hash_ids is missing, expected a list of whole numbers",
        ),
        (
            "t.jsonl",
            '{"timestamp": "x", "input_length": 5, "hash_ids": []}\n',
            "t.jsonl:1: timestamp is 'x', expected a time of 0 or more",
        ),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5.5, "hash_ids": []}\n',
            "t.jsonl:1: input_length is 5.5, expected a whole number of 0 or more",
        ),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5, "hash_ids": [1, "a"]}\n',
            "t.jsonl:1: hash_ids[1] is 'a', expected a signed 64-bit whole number",
        ),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 1100, "hash_ids": [1]}\n',
            "t.jsonl:1: hash_ids has 1 IDs, expected at least 2, one for each full block",
        ),
        ("t.jsonl", "\n", "t.jsonl is empty, expected one request per line"),
        ("t.json", "[]", "t.json is [], expected an object"),
        (
            "t.json",
            '{"block_size": 64,\n "requests": ]}',
            "t.json:2 is not valid JSON (Expecting value at column 14, near ']}'), expected a JSON object",
        ),
        (
            "t.json",
            '{"block_size": true, "requests": []}',
            "t.json: block_size is True, expected a whole number of 1 or more",
        ),
        (
            "t.json",
            '{"block_size": 64, "requests": {}}',
            "t.json: requests is {}, expected a list of objects",
        ),
        (
            "t.json",
            '{"block_size": 64, "requests": []}',
            "t.json has no requests, expected at least one",
        ),
        (
            "t.json",
            SESSION % "3",
            "t.json: requests[1] is 3, expected an object with t, in and hash_ids",
        ),
        (
            "t.json",
            SESSION % '{"t": -1, "in": 64, "hash_ids": [1]}',
            "t.json: requests[1]: t is -1, expected a time of 0 or more",
        ),
        ("t.csv", "", "t.csv ends in '.csv', expected a .jsonl file of requests or .json files of sessions"),
    ],
)
def test_invalid_trace_is_refused_with_location_value_and_expectation(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_traces([tmp_path / name])
    assert str(caught.value) == f"{tmp_path}/{complaint}"


def test_a_file_that_is_not_text_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(ONE.encode() + b'{"timestamp": \xff}')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2 contains the invalid byte 0xff, expected UTF-8 text"):
        read_traces([tmp_path / "t.jsonl"])


def test_sessions_of_two_block_sizes_in_a_folder_are_refused_by_both_their_names(tmp_path: Path) -> None:
    for name, size in (("a", 64), ("b", 32)):
        requests = [{"t": 0, "in": size, "hash_ids": [1]}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"block_size": size, "requests": requests}))
    with pytest.raises(ConfigError, match=r"b\.json: block_size is 32, but 64 in .*a\.json"):
        read_traces([tmp_path / "a.json", tmp_path / "b.json"])


def test_a_file_that_is_missing_or_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("nix.jsonl", "nix"):
        with pytest.raises(ConfigError, match=rf"{name}: no such file, expected"):
            read_traces([tmp_path / name])
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: is a directory, expected"):
        read_traces([tmp_path / "folder.json"])


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(ONE.replace("0,", '0, "note": "a\u2028b",').replace("\n", "\r\n") * 2)
    assert len(read_traces([tmp_path / "t.jsonl"])[0].requests) == 2
