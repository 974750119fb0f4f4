"""The blocks of the simulated engine: one pool for all KV groups, their block tables, and a prefix cache by hash.

A block belongs to one group at a time and is reused as soon as it is free, in random order. Block 0 is the null block.
In block tables, it replaces blocks that a sliding window has released, and states that were not kept.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from tests.adapters import vllm_stub as stub

BLOCK = 2
"""Tokens per hash."""
Tables = list[list[int]]


def hashes_of(tokens: Sequence[int], adapter: tuple[str, str] | None = None) -> list[bytes]:
    """Return a hash for each block of ``BLOCK`` tokens.

    The hash covers all tokens up to the end of the block, and the name and path of a LoRA adapter.
    """
    hashes, parent = [], b"root" if adapter is None else repr(adapter).encode()
    for i in range(BLOCK, len(tokens) + 1, BLOCK):
        parent = sha256(parent + repr(list(tokens[i - BLOCK : i])).encode()).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True)
class Kind:
    """A KV group.

    Attributes:
        size: Tokens per block, on all ranks together.
        window: Number of tokens that a token sees, including itself.
        chunk: Tokens per chunk. A token sees only its own chunk.
        state: Whether a block holds the state after its last computed token.
        ring: Whether each request has a single block.
        ranks: Number of ranks over which the tokens of a block are distributed. Only with full attention.
        mla: Whether the KV is the same on all tensor-parallel ranks, if this is true of all groups.
    """

    size: int = BLOCK
    window: int | None = None
    chunk: int | None = None
    state: bool = False
    ring: bool = False
    ranks: int = 1
    mla: bool = False

    @property
    def cells(self) -> int:
        """Number of tokens of a block on each rank."""
        return self.size // self.ranks

    def place(self, token: int, interleave: int) -> tuple[int, int, int]:
        """Return the number of a token's block, the rank that has the token, and the token's place in the block.

        Pieces of ``interleave`` tokens are distributed over the ranks in turn.
        """
        block, at = divmod(token, self.size)
        piece, left = divmod(at, interleave)
        return block, piece % self.ranks, piece // self.ranks * interleave + left

    @property
    def spec(self) -> stub.Spec:
        """vLLM's spec for this group."""
        if self.window is not None:
            spec = stub.SlidingWindowMLASpec if self.mla else stub.SlidingWindowSpec
            return spec(self.size, self.window)
        if self.chunk is not None:
            return stub.ChunkedLocalAttentionSpec(self.size, self.chunk)
        if self.state:
            return stub.MambaSpec(self.size)
        if self.ring:
            return stub.CircularBufferSpec(self.size)
        full = stub.MLAAttentionSpec if self.mla else stub.FullAttentionSpec
        return full(self.cells, dcp_sharded=self.ranks > 1)

    def lacks(self, table: Sequence[int], tokens: int) -> int:
        """Return how many blocks a table lacks for ``tokens`` tokens."""
        if self.ring:
            return 1 - len(table)
        lacking = max(0, -(-tokens // self.size) - len(table))
        return min(1, lacking) if self.state else lacking

    def seen_from(self, token: int) -> int:
        """Return the first token that ``token`` sees."""
        if self.window is not None:
            return max(0, token + 1 - self.window)
        if self.state:
            return max(0, token - 1)
        return 0 if self.chunk is None else token // self.chunk * self.chunk


FULL = (Kind(),)


def over_ranks(kinds: Sequence[Kind], ranks: int) -> tuple[Kind, ...]:
    """Return these groups with decode context parallelism: each rank keeps its blocks, but they cover more tokens."""
    return tuple(
        kind if kind.state or kind.ring else replace(kind, size=kind.size * ranks, ranks=ranks)
        for kind in kinds
    )


class Pool:
    """A pool of ``number`` blocks and the null block."""

    def __init__(self, number: int, kinds: Sequence[Kind], dice: random.Random) -> None:
        self.kinds = tuple(kinds)
        self.unit = math.lcm(*(kind.size for kind in kinds if not kind.ring))
        self.free = list(range(1, number + 1))
        self.taken: list[int] = []
        """Blocks that were free and have been taken. The engine empties this list in every step."""
        self._owners = [0] * (number + 1)
        self._by_hash: dict[tuple[int, bytes], int] = {}
        self._hash_of: dict[int, tuple[int, bytes]] = {}
        self._dice = dice

    @property
    def blocks(self) -> range:
        """Return the block numbers, in place of the list of blocks in vLLM's pool."""
        return range(len(self._owners))

    def touch(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block, as vLLM's pool does."""
        self.hold([list(blocks)])

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each block, as vLLM's pool does."""
        self.release([list(blocks)])

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[int] | None:
        """Return the cached block of each group, or None if a group has none, as vLLM's pool does."""
        found = [self._by_hash.get((group, block_hash)) for group in groups]
        return None if None in found else [block for block in found if block is not None]

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._by_hash.clear()
        self._hash_of.clear()

    def local(self, hashes: Sequence[bytes], tokens: int) -> tuple[int, Tables]:
        """Return the longest prefix for which every group has all the blocks that it needs.

        Returns:
            The length of the prefix in tokens, at most ``tokens``, and these blocks.
        """
        for end in range(tokens // self.unit * self.unit, 0, -self.unit):
            tables = [self._found(number, hashes, end) for number in range(len(self.kinds))]
            if None not in tables:
                return end, [table for table in tables if table is not None]
        return 0, [[] for _ in self.kinds]

    def nulls(self, tables: Tables, tokens: int) -> Tables:
        """Put null blocks in place of blocks that are not needed after ``tokens`` tokens. Return the tables."""
        for kind, table in zip(self.kinds, tables, strict=True):
            gone = kind.seen_from(tokens) // kind.size
            table[:gone] = [0] * gone
        return tables

    def need(self, tables: Tables, tokens: int) -> int:
        """Return the number of blocks still needed to hold ``tokens`` tokens."""
        return sum(kind.lacks(table, tokens) for kind, table in zip(self.kinds, tables, strict=True))

    def grow(self, tables: Tables, tokens: int) -> Tables:
        """Give the tables the blocks that they lack, and return the new blocks of each table."""
        fresh = []
        for kind, table in zip(self.kinds, tables, strict=True):
            lacking = kind.lacks(table, tokens)
            nulls = -(-tokens // kind.size) - len(table) - lacking if kind.state else 0
            fresh.append([*[0] * nulls, *self._take(lacking)])
        for table, blocks in zip(tables, fresh, strict=True):
            table += blocks
        return fresh

    def give_back(self, tables: Tables, tokens: int) -> None:
        """Free the blocks that are not needed after ``tokens`` tokens."""
        for kind, table in zip(self.kinds, tables, strict=True):
            for i in range(min(kind.seen_from(tokens) // kind.size, len(table))):
                block, table[i] = table[i], 0
                self.release([[block]])

    def hold(self, tables: Tables) -> None:
        """Add an owner to each block."""
        for block in (block for table in tables for block in table if block):
            if not self._owners[block]:
                self.free.remove(block)
            self._owners[block] += 1

    def release(self, tables: Tables) -> None:
        """Remove an owner from each block. A block without owners becomes free."""
        for block in (block for table in tables for block in table if block):
            self._owners[block] -= 1
            if not self._owners[block]:
                self.free.append(block)

    def cache(self, hashes: Sequence[bytes], tables: Tables, tokens: int) -> None:
        """Add full blocks to the prefix cache."""
        for number, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            full = 0 if kind.ring else tokens // kind.size
            if kind.state and tokens % kind.size:
                continue
            for i, block in list(enumerate(table[:full]))[-1 if kind.state else 0 :]:
                name = (number, self._hash(number, hashes, i))
                if block and name not in self._by_hash and block not in self._hash_of:
                    self._by_hash[name] = block
                    self._hash_of[block] = name

    def _found(self, number: int, hashes: Sequence[bytes], end: int) -> list[int] | None:
        kind = self.kinds[number]
        if kind.ring:
            return []
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
            self.taken.append(block)
            taken.append(block)
        return taken
