"""KV pages to compress: of a real model where one is prepared, else synthetic ones, and words for which they are."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tierstore.types import PageSpec

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sample:
    """Pages of one spec, flat uint8 each. ``source``: what they are."""

    spec: PageSpec
    pages: list[NDArray[np.uint8]]
    source: str


def synthetic(tokens: int, page_size: int) -> Sample:
    """bfloat16 pages of SmolLM2-135M's shape: normal numbers of a scale that each channel has. The same every time."""
    spec = PageSpec(
        num_layers=30, page_size=page_size, num_kv_heads=3, head_dim=64, dtype="bfloat16", model="synthetic"
    )
    chance = np.random.default_rng(0)
    scales = np.exp2(chance.normal(size=(30, 2, 1, 3, 64))).astype(np.float32)
    pages = []
    for _ in range(max(1, tokens // page_size)):
        drawn = chance.standard_normal(spec.shape, dtype=np.float32) * scales
        pages.append((drawn.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8))
    return Sample(spec, pages, "synthetic bfloat16: normal numbers, a scale a channel")


def of_model(folder: Path, text: Path, tokens: int, page_size: int) -> Sample:
    """K and V that the model in ``folder`` computes in bfloat16 for the first ``tokens`` tokens of ``text``.

    Full-attention decoder models only. OSError if a file cannot be read; nothing is downloaded.
    """
    import torch  # a second or more, and not for synthetic pages
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16).eval()
    words = text.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(words, return_tensors="pt", truncation=True, max_length=tokens).input_ids
    with torch.inference_mode():
        layers = model(ids, use_cache=True, logits_to_keep=1)["past_key_values"].layers
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers])
    numbers = (
        kv.transpose(2, 3).contiguous().view(torch.int16).numpy()
    )  # [layers, 2, tokens, heads, head_dim]
    spec = PageSpec(
        num_layers=numbers.shape[0],
        page_size=page_size,
        num_kv_heads=numbers.shape[3],
        head_dim=numbers.shape[4],
        dtype="bfloat16",
        model=folder.name,
    )
    pages = [
        np.ascontiguousarray(numbers[:, :, start : start + page_size]).reshape(-1).view(np.uint8)
        for start in range(0, numbers.shape[2] - page_size + 1, page_size)
    ]
    if not pages:
        raise OSError(f"{text} has {numbers.shape[2]} tokens; a page takes {page_size}")
    return Sample(spec, pages, f"{folder.name}, {text.name}, {len(pages) * page_size} tokens")
