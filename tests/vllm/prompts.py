"""Prompts for the engines: generated texts that are the same in every run. The answers depend on what the texts say."""

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
    """Return a text of ``facts`` sentences of about 16 tokens, followed by the beginning of one of them.

    A model that has read the text continues with the rest of that sentence, which is in no other document.
    """
    dice = random.Random(f"document {number}")
    sentences = [
        f"Fact {fact}: the {dice.choice(_KINDS)} {dice.choice(_THINGS)} of {dice.choice(_CITIES)} has "
        f"{dice.randrange(2, 100)} rooms."
        for fact in range(facts)
    ]
    return f"Document {number}. {' '.join(sentences)} Once more, fact {dice.randrange(facts // 2)}: the"


def documents(count: int, facts: int) -> list[str]:
    """Return the first ``count`` documents."""
    return [document(number, facts) for number in range(count)]


def tile(prompts: Sequence[str], rounds: int) -> list[str]:
    """Repeat the list of prompts ``rounds`` times. An LRU pool that cannot hold all of them never has a hit."""
    return [prompt for _ in range(rounds) for prompt in prompts]
