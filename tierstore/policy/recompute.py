"""What a page costs to compute again, by its depth: every token costs the layers, and attention over all before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.page import PageSpec

_QUERY_HEADS = 4
"""Query heads a KV head, where nothing tells: Llama 3 has 4."""


def doubling_depth(spec: PageSpec) -> float:
    """Pages before one that costs twice what the first costs.

    A token costs about ``24 L d^2`` operations in the layers and ``4 L d t`` in attention over ``t`` tokens, ``d`` the
    width of the model: equal at ``t = 6 d``. The width is taken as that of the queries.
    """
    width = spec.num_kv_heads * spec.head_dim * (_QUERY_HEADS if spec.kind == "mha" else 1)
    return 6 * width / spec.page_size
