"""Wrong use that would give wrong answers in silence: each ends in one ValueError that says what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.identity import KvShape, is_foreign, kv_shape
from tierstore.adapters.huggingface.pages import PageGroups
from tierstore.store import TierStore


def checked_shape(model: PreTrainedModel) -> KvShape:
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != ATTENTION:
        raise ValueError(
            f'the model uses attention "{config._attn_implementation}": '
            f'load it with attn_implementation="{ATTENTION}"'
        )
    return kv_shape(model.config)


def check_pages(pages: PageGroups, shapes: Sequence[KvShape]) -> None:
    """Raise ValueError unless the store's KV groups are those of these models."""
    wanted = [
        (sum(place.group == group for place in shape.places), shape.num_kv_heads, shape.head_dim)
        for shape in shapes
        for group in range(len(shape.windows))
    ]
    found = [(group.shape[1], group.shape[4], group.shape[5]) for group in pages.groups]
    if wanted != found:
        raise ValueError(
            f"the store's KV groups have (layers, heads, head_dim) {found}, the model needs {wanted}: open the store "
            "with page_specs of this very model, and with draft= in both places or in neither"
        )


def check_model(store: TierStore, models: Sequence[PreTrainedModel], page_size: int) -> None:
    """Raise ValueError if the store is known to keep the pages of other models of the same geometry."""
    if is_foreign(str(store.stats()["fingerprint"]), models, page_size):
        raise ValueError(
            "the store keeps the pages of another model of the same geometry, or of this one in another dtype: open "
            "it with page_specs of this very model (and draft model), after the last edit of its weights"
        )


def common_window(shapes: Sequence[KvShape]) -> int | None:
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if len(windows) == len(shapes) else None


def check_positions(positions: torch.Tensor, paddings: Sequence[int], columns: int) -> None:
    """Positions ``[rows or 1, width]`` of the tokens fed after ``columns``: each is that of its token, K depends on it.

    They also tell padding, and a warm cache fed the whole prompt again, which generate() would not notice.
    """
    width = positions.shape[1]
    wanted = torch.arange(columns, columns + width)[None] - torch.tensor(paddings)[:, None]
    # Padding has no position.
    if bool(((positions.cpu() != wanted) & (wanted >= 0)).any()):
        raise ValueError(
            f"a cache of {columns} columns was fed {width} tokens at positions that are not their own; the last are at "
            f"{positions[:, -1].tolist()}, wanted: {wanted[:, -1].tolist()}. One TierStoreCache serves one generate. "
            f"If a prompt is padded ({list(paddings)} columns here) or holds the pad token, give TierStoreCache and "
            "generate the same attention_mask of ones and zeros"
        )


def check_mask(mask: torch.Tensor | None, paddings: Sequence[int]) -> None:
    """Raise ValueError for a mask that hides anything but the padding: pages hold none, and no holes."""
    visible = not any(paddings)
    if mask is not None:
        seen = mask != 0
        hidden = [min(pad, mask.shape[-1]) for pad in paddings]
        visible = mask.ndim == 2 and (~seen).sum(-1).tolist() == hidden
        visible = visible and not bool((seen[:, :-1] & ~seen[:, 1:]).any())
    if not visible:
        raise ValueError(
            f"the attention mask does not fit the padding this cache was made for, {list(paddings)} columns on the "
            "left: give TierStoreCache and generate the same attention_mask, with nothing hidden but padding"
        )
