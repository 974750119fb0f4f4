"""What the engine itself holds of a request: vLLM's prefix cache, looked into before the request is scheduled."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.kv_groups import Groups


class Pool(Protocol):
    """What is read of vLLM's block pool."""

    def get_cached_block(self, block_hash: bytes, group_ids: list[int]) -> object | None:
        """The blocks with this hash, one a group; None: not all of the groups have one."""
        ...


def local_tokens(pool: Pool, groups: Groups, block_hashes: Sequence[bytes]) -> int:
    """Tokens of the request that the engine holds now, as the first group of full attention has it.

    vLLM reuses a prompt's last blocks first, so its end is looked for by halves: where a block before it is gone all
    the same, pages behind that one come up only when they are asked for. Windows alone count as nothing.
    """
    group = groups.spine
    if group is None:
        return 0
    hashes = block_hashes[group.stride - 1 :: group.stride]

    def gone(block_hash: bytes) -> bool:
        return not pool.get_cached_block(block_hash, [group.number])

    return bisect_left(hashes, True, key=gone) * group.block_size
