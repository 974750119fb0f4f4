"""What one request asks of the store: its prompts, its options, and the pages that it reads and writes.

``Terms`` are the options that all sequences of a request share. ``PageGroups`` are the store's pages as tensors, one
per KV group. ``unpadded`` removes the padding from prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tierstore.adapters.huggingface.identity import State
from tierstore.gpu.pool import GroupedPages
from tierstore.keys import Extra
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, require_flag, require_seconds, require_time, seconds_at_most


class PageGroups:
    """The store's pages.

    ``groups[g]``: ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]`` of group ``g``.
    """

    def __init__(self, store: TierStore) -> None:
        """Use the pages of ``store``. ValueError unless every group has K and V per head."""
        pages = store.pages
        self.groups = pages.groups if isinstance(pages, GroupedPages) else (pages,)
        if any(group.ndim != 6 or group.shape[2] != 2 for group in self.groups):
            raise ValueError(
                "every KV group of the store must have K and V per head (PageSpecs of kind 'mha')"
            )

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return int(self.groups[0].shape[3])

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.groups[0].device

    @property
    def num_layers(self) -> int:
        """Number of layers in all groups."""
        return sum(int(group.shape[1]) for group in self.groups)

    def reach(self, lease: Lease, timeout_s: float) -> LeaseState:
        """Wait up to ``timeout_s`` until work launched from now on may read the pages of ``lease``.

        On a GPU the host waits for copies only; the caller's current stream waits for pages that are still being
        written, for example by an earlier request that has just sealed them.
        """
        if self.device.type != "cuda":
            return lease.wait(timeout_s)
        state = lease.wait(timeout_s, written=False)
        event = None if state is LeaseState.PENDING else lease.ready(0)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]
        return state

    def copy(self, src: int, dst: int) -> None:
        """Copy a page, with all its groups, into another slot."""
        for group in self.groups:
            group[dst].copy_(group[src])

    def copy_layer(self, group: int, index: int, src: int, dst: int) -> None:
        """Copy layer ``index`` of KV group ``group`` of a page into another slot."""
        pages = self.groups[group]
        pages[dst, index].copy_(pages[src, index])


Storing = Literal["all", "memory-only", "read-only", "no-store"]
"""What happens to a request's pages.

    all          kept, in every tier
    memory-only  kept, never written to disk
    read-only    stored pages are reused, nothing is kept
    no-store     nothing is looked up and nothing is kept
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """Options that all sequences of a request share."""

    store: TierStore
    pages: PageGroups
    num_models: int
    """Number of models that write into the pages: one, or two with a draft model."""
    weights: tuple[State, ...]
    """State of each model's weights when its K/V were looked up. All pages of the request belong to it."""
    window: int | None
    """Tokens that any layer of any model looks back; None: to the first."""
    root: bytes
    """Separates salts and extras in the index of prefixes (``root_of``)."""
    salt: bytes = b""
    extra: tuple[Extra, ...] = ()
    deadline_s: float | None = None
    timeout_s: float = 10.0
    wait_for_room_s: float = 1.0
    """Longest wait of a prompt for space in HBM while pages are being saved, in seconds; at most ``timeout_s``."""
    storing: Storing = "all"
    exact: bool = False
    """Compute pages again that went through a lossy codec, or were computed over such pages."""

    def __post_init__(self) -> None:
        check_storing(self.storing)
        require_flag("exact", self.exact)
        require_seconds("timeout_s", self.timeout_s)
        seconds_at_most("wait_for_room_s", self.wait_for_room_s)
        if self.deadline_s is not None:
            require_time("deadline_s", self.deadline_s)

    @property
    def looks_up(self) -> bool:
        """Whether pages of earlier requests may be reused."""
        return self.storing != "no-store"

    @property
    def keeps(self) -> bool:
        """Whether later requests may find pages of this one."""
        return self.storing in ("all", "memory-only")

    @property
    def by_layers(self) -> bool:
        """Whether the first layers may be computed while the last ones of the stored prefix are in flight.

        A page that fails to arrive is then computed from the tokens alone, which is wrong if an extra with a position
        says that tokens stand for something else. Draft models, windows and deadlines need to know what is there before
        they begin.
        """
        return (
            self.num_models == 1
            and self.window is None
            and self.deadline_s is None
            and self.plain_tokens is None
        )

    @property
    def plain_tokens(self) -> int | None:
        """Tokens before the first placed extra, beyond which equal tokens may have other K/V; None without a limit."""
        return min((item[0] for item in self.extra if isinstance(item, tuple)), default=None)


def root_of(store: TierStore, page_size: int, salt: bytes, extra: Iterable[Extra]) -> bytes:
    """Return a root that is equal for requests whose equal tokens have equal keys. Placed extras do not count.

    It is the key of one fixed page, so whatever separates keys separates roots.
    """
    shared = [item for item in extra if not isinstance(item, tuple)]
    return store.keys([0] * page_size, salt=salt, extra=shared)[0]


def check_storing(storing: str) -> None:
    """Raise ValueError unless ``storing`` is a ``Storing``."""
    if storing not in get_args(Storing):
        raise ValueError(f"storing must be one of {', '.join(get_args(Storing))}, got {storing!r}")


def unpadded(
    input_ids: torch.Tensor | Sequence[int], attention_mask: torch.Tensor | None
) -> tuple[list[list[int]], int]:
    """Return the tokens of each row without its padding, and the width of the batch.

    Raises:
        ValueError: A batch or row is empty, the shape is wrong, or the mask hides anything but columns on the left.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(f"the prompt is empty or not of shape [T] or [B, T], got shape {tuple(ids.shape)}")
    if attention_mask is None:
        return ids.long().tolist(), ids.shape[1]
    mask = torch.as_tensor(attention_mask)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, the prompts {tuple(ids.shape)}")
    seen = mask != 0
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not bool(seen[:, -1].all()):
        raise ValueError("attention_mask hides more than padding on the left: pad on the left")
    rows = zip(ids.long().tolist(), seen.sum(-1).tolist(), strict=True)
    return [row[len(row) - count :] for row, count in rows], ids.shape[1]
