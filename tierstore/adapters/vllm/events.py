"""Events for routers: pages that became readable in host memory or on disk, or were removed from there.

Only pages that this process has stored are reported, because events contain the tokens of a page. The tokens of pages
that an earlier process left on disk are unknown.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.kv_groups import Group
    from tierstore.types import PageChange, PageKey, Tier

_MOST_COMING = 1 << 16
_MOST_EVENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Block:
    """A block, with the attributes that vLLM uses to identify it."""

    block_hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    lora_name: str | None
    group: int = 0
    """Index of the block's KV cache group."""


@dataclass(frozen=True, slots=True)
class Change:
    """A block that became readable in a tier, or was removed from it."""

    block: Block
    tier: Tier
    stored: bool


class Events:
    """Collects the changes since the last ``take``, in order.

    If a page moves to a lower tier, its arrival there is reported before its removal from the upper tier.
    """

    def __init__(self) -> None:
        self._coming: OrderedDict[PageKey, Block] = OrderedDict()
        self._held: dict[PageKey, tuple[Block, set[Tier]]] = {}
        self._changes: list[Change] = []
        self.lost = 0
        """Number of changes that were dropped because they were not taken in time."""

    def learn(self, request: Any, keys: Sequence[PageKey], first: int, group: Group) -> None:
        """Record the hashes and tokens of blocks that are about to be stored.

        ``keys`` are the keys of consecutive blocks of the request in ``group``. The first of these blocks has the
        number ``first``.
        """
        hashes, size, stride = request.block_hashes, group.block_size, group.stride
        lora = getattr(request, "lora_request", None)
        # This includes pages that the store already has, because their removal may not have been reported yet.
        for i, key in enumerate(keys, first):
            parent = hashes[i * stride - 1] if i else None
            tokens = tuple(request.all_token_ids[i * size : (i + 1) * size])
            name = None if lora is None else lora.lora_name
            self._coming[key] = Block(hashes[(i + 1) * stride - 1], parent, tokens, name, group.number)
        while len(self._coming) > _MOST_COMING:
            self._coming.popitem(last=False)

    def note(self, change: PageChange) -> None:
        """Record that a tier gained or lost a page."""
        if change.came:
            self._came(change.key, change.tier)
        else:
            self._left(change.key, change.tier)

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    # -- inside -------------------------------------------------------------------------------------------------

    def _came(self, key: PageKey, tier: Tier) -> None:
        block = self._coming.pop(key, None)
        if block is not None:
            self._held.setdefault(key, (block, set()))
        held = self._held.get(key)
        if held is not None and tier not in held[1]:
            held[1].add(tier)
            self._tell(Change(held[0], tier, stored=True))

    def _left(self, key: PageKey, tier: Tier) -> None:
        held = self._held.get(key)
        if held is None or tier not in held[1]:
            return
        held[1].discard(tier)
        self._tell(Change(held[0], tier, stored=False))
        if not held[1]:
            del self._held[key]

    def _tell(self, change: Change) -> None:
        if len(self._changes) >= _MOST_EVENTS:
            self.lost += 1
            return
        self._changes.append(change)
