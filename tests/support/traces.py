"""Small traces of requests, and settings to replay them with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from tierstore.replay.simulation import Setting
from tierstore.replay.traces import Request, Trace, read_traces
from tierstore.types import PageKey, Tier


def mooncake(file: Path, rows: Sequence[tuple[int, list[int]]]) -> Path:
    """Write a trace in Mooncake's format, with requests one second apart. Each row is (number of tokens, blocks)."""
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": tokens, "output_length": 1, "hash_ids": blocks})
        for i, (tokens, blocks) in enumerate(rows)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def chats(number: int, turns: int) -> list[tuple[int, list[int]]]:
    """Return rows for several chats that take turns, with one-off prompts in between.

    All chats share their first block. Each turn of a chat is two blocks longer than the previous one.
    """
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


def requests_of(*sequences: str) -> list[Request]:
    """Return one request per word, with one block per letter. Words share the blocks of a common prefix."""
    made = []
    for i, word in enumerate(sequences):
        keys = tuple(PageKey(word[: n + 1].encode()) for n in range(len(word)))
        made.append(Request(float(i), len(word), keys))
    return made
