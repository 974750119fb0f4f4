"""What the engines are asked: texts that are the same in every run, and whose answers need what stands in them."""

from __future__ import annotations

import random
from collections.abc import Sequence

_KINDS = ("old", "red", "slow", "tall", "quiet", "green", "narrow", "bright", "wooden", "empty")
_THINGS = (
    "bridge",
    "tower",
    "garden",
    "market",
    "harbour",
    "library",
    "station",
    "castle",
    "mill",
    "theatre",
)
_CITIES = ("Lima", "Oslo", "Cairo", "Delhi", "Paris", "Quito", "Rome", "Tunis", "Vienna", "Seoul", "Dakar")


def document(number: int, facts: int) -> str:
    """A text of ``facts`` sentences of about 16 tokens, and the beginning of one of them again: a model that has read
    it goes on with the rest of that sentence, which no other document has.
    """
    dice = random.Random(f"document {number}")
    sentences = [
        f"Fact {fact}: the {dice.choice(_KINDS)} {dice.choice(_THINGS)} of {dice.choice(_CITIES)} has "
        f"{dice.randrange(2, 100)} rooms."
        for fact in range(facts)
    ]
    return f"Document {number}. {' '.join(sentences)} Once more, fact {dice.randrange(facts // 2)}: the"


def documents(count: int, facts: int) -> list[str]:
    """The first ``count`` documents."""
    return [document(number, facts) for number in range(count)]


def tile(prompts: Sequence[str], rounds: int) -> list[str]:
    """Every prompt once, then every prompt again: the order that an LRU pool smaller than all of them never hits."""
    return [prompt for _ in range(rounds) for prompt in prompts]
