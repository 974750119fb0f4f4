"""A model that reads a text into K and V, and continues from given K and V: bfloat16, on the CPU."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from tierstore.adapters.huggingface import cache_argument


class Reader:
    """The model in a folder, in bfloat16. Not thread-safe. OSError if it cannot be read; downloads nothing."""

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        self.name = folder.name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16)
        self._model = model.eval()
        self._cache = cache_argument(self._model)

    def tokens(self, text: str, most: int) -> torch.Tensor:
        """Return the first ``most`` tokens of ``text``, ``[1, tokens]`` int64."""
        ids: torch.Tensor = self.tokenizer(
            text, return_tensors="pt", truncation=True, max_length=most
        ).input_ids
        return ids

    def read(self, ids: torch.Tensor, step: int | None = None) -> torch.Tensor:
        """Return K and V ``[layers, 2, heads, tokens, head_dim]`` of ``ids``, computed at once or ``step`` tokens at a
        time.

        Layers with a window return all tokens, too.
        """
        cache = DynamicCache()
        with torch.inference_mode():
            for part in ids.split(step or ids.shape[1], dim=1):
                self._model(part, **{self._cache: cache}, use_cache=True, logits_to_keep=1)
            return torch.stack([torch.stack(kv) for kv in _of_layers(cache)])

    def go_on(self, kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities ``[tokens, vocabulary]``, float32, after each of ``ids``, which follow those of
        ``kv``.
        """
        cache = DynamicCache()
        with torch.inference_mode():
            for number, (keys, values) in enumerate(kv):
                cache.update(keys[None], values[None], number)
            logits = self._model(ids, **{self._cache: cache}, use_cache=True).logits[0]
            return torch.log_softmax(logits.float(), dim=-1)


def _of_layers(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for layer in cache.layers:
        assert isinstance(layer, CacheLayerMixin)
        assert layer.keys is not None
        assert layer.values is not None
        found.append((layer.keys[0], layer.values[0]))
    return found
