"""The simulated engine's blocks: one pool for all KV groups, their tables, and what is found by its hash.

A block belongs to one group at a time and is reused as soon as it is free, at random. Block 0 stands in tables for
those that a window has given back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from tests.adapters import vllm_stub as stub

BLOCK = 2
"""Tokens of one hash."""
Tables = list[list[int]]


def hashes_of(tokens: Sequence[int], adapter: tuple[str, str] | None = None) -> list[bytes]:
    """One for each ``BLOCK`` tokens, of all tokens up to its end, and of the name and path of a LoRA adapter."""
    hashes, parent = [], b"root" if adapter is None else repr(adapter).encode()
    for i in range(BLOCK, len(tokens) + 1, BLOCK):
        parent = sha256(parent + repr(list(tokens[i - BLOCK : i])).encode()).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True)
class Kind:
    """A group: tokens of a block, and how many tokens a token sees, itself included, or the chunk whose it sees."""

    size: int = BLOCK
    window: int | None = None
    chunk: int | None = None

    @property
    def spec(self) -> stub.Spec:
        """The same as vLLM has it."""
        if self.window is not None:
            return stub.SlidingWindowSpec(self.size, self.window)
        if self.chunk is not None:
            return stub.ChunkedLocalAttentionSpec(self.size, self.chunk)
        return stub.FullAttentionSpec(self.size)

    def seen_from(self, token: int) -> int:
        """The first token that this one sees."""
        if self.window is not None:
            return max(0, token + 1 - self.window)
        return 0 if self.chunk is None else token // self.chunk * self.chunk


FULL = (Kind(),)


class Pool:
    """``number`` blocks besides the null block."""

    def __init__(self, number: int, kinds: Sequence[Kind], dice: random.Random) -> None:
        self.kinds = tuple(kinds)
        self.unit = math.lcm(*(kind.size for kind in kinds))
        self.free = list(range(1, number + 1))
        self._owners = [0] * (number + 1)
        self._by_hash: dict[tuple[int, bytes], int] = {}
        self._hash_of: dict[int, tuple[int, bytes]] = {}
        self._dice = dice

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[int] | None:
        """As vLLM's pool."""
        found = [self._by_hash.get((group, block_hash)) for group in groups]
        return None if None in found else [block for block in found if block is not None]

    def forget(self) -> None:
        """Nothing is found any more."""
        self._by_hash.clear()
        self._hash_of.clear()

    def local(self, hashes: Sequence[bytes], tokens: int) -> tuple[int, Tables]:
        """The longest prefix, of at most so many tokens, of which each group has what it needs; and its blocks."""
        for end in range(tokens // self.unit * self.unit, 0, -self.unit):
            tables = [self._found(number, hashes, end) for number in range(len(self.kinds))]
            if None not in tables:
                return end, [table for table in tables if table is not None]
        return 0, [[] for _ in self.kinds]

    def nulls(self, tables: Tables, tokens: int) -> Tables:
        """The tables, as long as what is not needed after so many tokens, with null blocks there."""
        for kind, table in zip(self.kinds, tables, strict=True):
            gone = kind.seen_from(tokens) // kind.size
            table[:gone] = [0] * gone
        return tables

    def need(self, tables: Tables, tokens: int) -> int:
        """Blocks that are lacking for so many tokens."""
        return sum(
            max(0, -(-tokens // kind.size) - len(table))
            for kind, table in zip(self.kinds, tables, strict=True)
        )

    def grow(self, tables: Tables, tokens: int) -> Tables:
        """Gives the tables what they lack; the blocks that are new in each."""
        fresh = [
            self._take(-(-tokens // kind.size) - len(table))
            for kind, table in zip(self.kinds, tables, strict=True)
        ]
        for table, blocks in zip(tables, fresh, strict=True):
            table += blocks
        return fresh

    def give_back(self, tables: Tables, tokens: int) -> None:
        """Frees what is not needed after so many tokens."""
        for kind, table in zip(self.kinds, tables, strict=True):
            for i in range(min(kind.seen_from(tokens) // kind.size, len(table))):
                block, table[i] = table[i], 0
                self.release([[block]])

    def hold(self, tables: Tables) -> None:
        """One more owner of each block."""
        for block in (block for table in tables for block in table if block):
            if not self._owners[block]:
                self.free.remove(block)
            self._owners[block] += 1

    def release(self, tables: Tables) -> None:
        """One owner less."""
        for block in (block for table in tables for block in table if block):
            self._owners[block] -= 1
            if not self._owners[block]:
                self.free.append(block)

    def cache(self, hashes: Sequence[bytes], tables: Tables, tokens: int) -> None:
        """Full blocks are found by their hashes from now on."""
        for number, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            for i, block in enumerate(table[: tokens // kind.size]):
                name = (number, self._hash(number, hashes, i))
                if block and name not in self._by_hash and block not in self._hash_of:
                    self._by_hash[name] = block
                    self._hash_of[block] = name

    def _found(self, number: int, hashes: Sequence[bytes], end: int) -> list[int] | None:
        kind = self.kinds[number]
        gone = kind.seen_from(end) // kind.size
        found = [
            self._by_hash.get((number, self._hash(number, hashes, i))) for i in range(gone, end // kind.size)
        ]
        return None if None in found else [0] * gone + [block for block in found if block is not None]

    def _hash(self, number: int, hashes: Sequence[bytes], block: int) -> bytes:
        return hashes[(block + 1) * self.kinds[number].size // BLOCK - 1]

    def _take(self, number: int) -> list[int]:
        taken = []
        for _ in range(max(0, number)):
            block = self.free.pop(self._dice.randrange(len(self.free)))
            if block in self._hash_of:
                del self._by_hash[self._hash_of.pop(block)]
            self._owners[block] = 1
            taken.append(block)
        return taken
