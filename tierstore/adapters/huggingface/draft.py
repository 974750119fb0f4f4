"""The draft model of assisted decoding, with its K/V in the pages of the model that it drafts for."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class DraftModel:
    """What ``generate`` takes as ``assistant_model``; everything but ``generate`` is the draft model's own."""

    def __init__(self, model: PreTrainedModel, cache: Cache, argument: str) -> None:
        """``argument``: the name under which ``model`` takes ``cache``."""
        self.cache: Any = cache
        self._model: Any = model
        self._argument = argument

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``generate``, with the cache that it would otherwise make for itself.

        And with the mask of the model it drafts for, which does not hand it on: a pad token within the text is text.
        """
        given = {"cache", "past_key_values"} & set(kwargs)
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = self._mask(ids)
        return self._model.generate(*args, **kwargs, **({} if given else {self._argument: self.cache}))

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        for row, padding in zip(mask, self.cache.batch.paddings, strict=True):
            row[:padding] = 0
        return mask
