"""A model on the CPU, in bfloat16, that returns the K and V of a text or continues from given K and V."""

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
    """A model and its tokenizer, loaded from a folder in bfloat16. Nothing is downloaded. Not thread-safe.

    Raises:
        OSError: The folder does not contain a model, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        logging.disable_progress_bar()
        self.name = folder.name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16)
        self._model = model.eval()
        self._cache = cache_argument(self._model)

    def tokens(self, text: str, most: int) -> torch.Tensor:
        """Return the IDs of the first ``most`` tokens of ``text``, int64 ``[1, tokens]``."""
        ids: torch.Tensor = self.tokenizer(
            text, return_tensors="pt", truncation=True, max_length=most
        ).input_ids
        return ids

    def read(self, ids: torch.Tensor, step: int | None = None) -> torch.Tensor:
        """Run the model on ``ids`` and return K and V of all layers, ``[layers, 2, heads, tokens, head_dim]``.

        The model reads ``step`` tokens at a time, or all at once if ``step`` is None. Sliding-window layers also
        return K and V of all tokens.
        """
        cache = DynamicCache()
        with torch.inference_mode():
            for part in ids.split(step or ids.shape[1], dim=1):
                self._model(part, **{self._cache: cache}, use_cache=True, logits_to_keep=1)
            return torch.stack([torch.stack(kv) for kv in _of_layers(cache)])

    def go_on(self, kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Run the model on ``ids``, which follow the tokens whose K and V are in ``kv``.

        Return the log-probabilities of the next token after each of ``ids``, float32 ``[tokens, vocabulary]``.
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
