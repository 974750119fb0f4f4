"""The whole prompt, seen before ``generate`` cuts off what a warm cache holds.

A forward pass is fed only the rest: that the prompt's beginning is the one the cache was made for shows nowhere else.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel


@runtime_checkable
class KnowsPrompt(Protocol):
    """A cache that was made for a prompt."""

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError unless these are its prompts, ``[rows, T]``, padding included."""
        ...


def show_prompts(model: PreTrainedModel) -> None:
    """From now on ``model.generate`` shows each whole prompt to the cache it is given, if that knows its own.

    Once for each model; a copy of the model has it too. Prompts computed in chunks, and those of which only the rest is
    passed, are not seen.
    """
    prepare = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
    if "prepare_inputs_for_generation" in vars(model):
        return

    @wraps(prepare)
    def shown(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        whole = kwargs.get("next_sequence_length") is not None and kwargs.get("is_first_iteration", False)
        if whole and isinstance(cache, KnowsPrompt):
            cache.expect_prompt(input_ids)
        return prepare(self, input_ids, *args, **kwargs)

    # A bound method, so that a deep copy of the model binds it to the copy.
    model.prepare_inputs_for_generation = MethodType(shown, model)  # type: ignore[assignment]
