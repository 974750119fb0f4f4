"""Kinds of damage to a closed directory, whose files are held in memory. Each strike damages one place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.campaign.regions import BLOCK, Span

Files = dict[str, bytearray]
Strike = Callable[[Files, Sequence[Span], random.Random], None]


def _flip(files: Files, spans: Sequence[Span], chance: random.Random) -> None:
    """Flip one bit, or change one byte, at a random place in one of ``spans``."""
    span = chance.choice(spans)
    raw = files[span.name]
    at = span.offset + chance.choice([chance.randrange(span.length), chance.randrange(min(span.length, 64))])
    if at < len(raw):
        raw[at] ^= chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])


def _piece(files: Files, spans: Sequence[Span], chance: random.Random) -> tuple[bytearray, int, int]:
    """Choose a piece to damage: in a random span, either up to one block or a sector of 512 bytes.

    Returns the bytes of the file, and the offset and the length of the piece.
    """
    span = chance.choice(spans)
    first, length = span.offset, min(span.length, BLOCK)
    if span.length > BLOCK:
        first += BLOCK * chance.randrange(span.length // BLOCK)
    if chance.random() < 0.5 and length >= 512:
        first, length = first + 512 * chance.randrange(length // 512), 512
    return files[span.name], first, length


def _zero(files: Files, spans: Sequence[Span], chance: random.Random) -> None:
    _put(*_piece(files, spans, chance), bytes(BLOCK))


def _noise(files: Files, spans: Sequence[Span], chance: random.Random) -> None:
    raw, first, length = _piece(files, spans, chance)
    _put(raw, first, length, chance.randbytes(length))


def _copy(files: Files, spans: Sequence[Span], chance: random.Random) -> None:
    """Copy bytes from one place to another, as a misdirected write does."""
    source, begin, length = _piece(files, spans, chance)
    raw, first, room = _piece(files, spans, chance)
    _put(raw, first, room, bytes(source[begin : begin + min(length, room)]))


def _swap(files: Files, spans: Sequence[Span], chance: random.Random) -> None:
    one, other = chance.choice(spans), chance.choice(spans)
    length = min(one.length, other.length)
    a, b = files[one.name], files[other.name]
    old = bytes(a[one.offset : one.offset + length])
    _put(a, one.offset, length, bytes(b[other.offset : other.offset + length]))
    _put(b, other.offset, length, old)


def _put(raw: bytearray, first: int, length: int, new: bytes) -> None:
    """Overwrite up to ``length`` bytes, and never make the file longer."""
    new = new[: max(0, min(length, len(raw) - first))]
    raw[first : first + len(new)] = new


STRIKES: dict[str, Strike] = {
    "flip": _flip,
    "zero": _zero,
    "noise": _noise,
    "copy": _copy,
    "swap": _swap,
}


def cut(files: Files, names: Sequence[str], chance: random.Random) -> None:
    """Truncate a random file, to a random length or by 5 %."""
    raw = files[chance.choice(names)]
    del raw[chance.choice([chance.randrange(len(raw) + 1), len(raw) - len(raw) // 20]) :]
