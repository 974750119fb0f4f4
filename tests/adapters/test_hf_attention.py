"""Test that attention over scattered pages equals attention over the same tokens in contiguous memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tierstore.adapters.huggingface import attention


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 40, 61])
@pytest.mark.parametrize("width", [1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_pages_read_in_groups_equal_contiguous_attention(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, width: int, heads: int, kv_heads: int
) -> None:
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", 16)
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 3)
    width = min(width, num_tokens)
    torch.manual_seed(num_tokens)
    page, layer, dim = 8, 1, 16
    pages = torch.full((12, 3, 2, page, kv_heads, dim), torch.nan)
    keys, values = (torch.randn(kv_heads, num_tokens, dim) * 3 for _ in range(2))
    table = torch.randperm(12)[: -(-num_tokens // page)]
    slots = table.clone()
    for token in range(num_tokens):
        place = pages[int(slots[token // page]), layer, :, token % page]
        place[0], place[1] = keys[:, token], values[:, token]
    query = torch.randn(heads, width, dim)
    for window in (None, 1, 5, page, 17, num_tokens):
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        if window is not None:
            mask &= ~mask.tril(-window)
            # Pages before the window are never read, so their slots may be invalid.
            first = max(0, num_tokens - width - window + 1) // page
            slots[:first] = -1
        expected = scaled_dot_product_attention(
            query[None], keys[None], values[None], mask[num_tokens - width :], scale=0.3, enable_gqa=True
        )
        found = attention.attend_pages(query, pages[:, layer], slots.clone(), num_tokens, 0.3, window)
        torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
        slots = table.clone()


def test_half_precision_pages_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    pages = torch.randn(4, 1, 2, 8, 1, 16).bfloat16()
    query, slots = torch.randn(2, 4, 16).bfloat16(), torch.arange(4)
    found = attention.attend_pages(query, pages[:, 0], slots, 32, 0.25)
    exact = attention.attend_pages(query.double(), pages[:, 0].double(), slots, 32, 0.25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0.01, atol=1e-3)
