"""Long random walks over the rules of the adapter's state machine, to reach states that short cases do not reach."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.adapters.machine import AdapterMachine
from tests.adapters.store_machine import BASE
from tests.adapters.tiny import PAGE, random_prompt

WEIGHTS = {
    "open_cache": 6,
    "feed": 14,
    "generate": 3,
    "crop": 3,
    "reset": 1,
    "choose": 5,
    "feed_draft": 10,
    "crop_draft": 2,
    "close": 2,
    "say": 3,
    "answer": 3,
    "turn_by_hand": 2,
    "fork": 2,
    "end": 1,
    "move": 3,
    "look": 5,
    "let_go": 2,
    "reopen": 1,
}


def walk(kind: type[AdapterMachine], seed: int, steps: int) -> None:
    """Run ``steps`` random rules. The same seed gives the same rules. Raises what the machine raises."""
    random = Random(seed)
    machine = kind()
    try:
        for _ in range(steps):
            (name,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            getattr(machine, name)(**_arguments(name, random))
            machine.what_is_leased_is_not_written()
    finally:
        machine.teardown()


def _prompt(random: Random) -> list[int]:
    shared = random.choice([0, 3, PAGE, PAGE + 5, 2 * PAGE, 2 * PAGE + 3, 4 * PAGE + 1])
    more = random.choice([1, 2, PAGE - 1, PAGE, PAGE + 2])
    return BASE[:shared] + random_prompt(more, seed=random.randrange(3))


def _arguments(name: str, random: Random) -> dict[str, Any]:
    at, chat = random.randrange(6), random.choice("ab")
    drawn: dict[str, dict[str, Any]] = {
        "open_cache": {
            "rows": [_prompt(random) for _ in range(random.choice([1, 1, 2, 3]))],
            "storing": random.choice(["all", "all", "all", "memory-only", "read-only", "no-store"]),
            "first": random.choice([0, 5, 99]),
        },
        "feed": {
            "at": at,
            "widths": [random.randint(1, PAGE + 3) for _ in range(random.randint(1, 3))],
            "seed": random.randrange(4),
        },
        "generate": {"at": at},
        "crop": {"at": at, "count": random.randint(0, 2 * PAGE), "again": random.random() < 0.6},
        "reset": {"at": at, "really": random.randrange(2)},
        "choose": {
            "at": at,
            "picks": [random.randrange(12) for _ in range(random.randint(1, 4))],
            "how": random.choice(["repeat", "reorder", "select"]),
        },
        "feed_draft": {"at": at, "width": random.choice([1, 5, PAGE, 40]), "right": random.random() < 0.7},
        "crop_draft": {"at": at, "count": random.randint(1, PAGE)},
        "close": {"at": at, "really": True},
        "say": {"name": chat, "tokens": _prompt(random)},
        "answer": {"name": random.choice("abc")},
        "turn_by_hand": {"name": chat, "fed": _prompt(random), "said": random.random() < 0.5},
        "fork": {"name": chat, "at": random.random()},
        "end": {"name": random.choice("abc"), "how": random.choice(["retain", "drop", "time"])},
        "move": {
            "tokens": _prompt(random),
            "how": random.choice(["host", "disk", "evict", "evict later", "flush"]),
        },
        "look": {"tokens": _prompt(random), "keep": random.random() < 0.5},
        "let_go": {},
        "reopen": {"really": random.randrange(3)},
    }
    return drawn[name]
