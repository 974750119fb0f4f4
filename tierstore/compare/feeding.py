"""What a model really computes, counted where its tokens come in.

Equal tokens alone prove little: a prompt fed twice into one cache doubles its keys, which hardly moves a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(slots=True)
class Fed:
    """The forward passes of a model: of each, the columns in its cache before it, its rows and its columns."""

    passes: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows times columns, padding among them."""
        return sum(rows * width for _, rows, width in self.passes)

    def taken_back(self, columns: int) -> list[int]:
        """Columns of each pass that were removed again (rejected drafts, a rollback). ``columns``: there at last."""
        begins = [before for before, _, _ in self.passes[1:]] + [columns]
        return [before + width - begin for (before, _, width), begin in zip(self.passes, begins, strict=True)]


@contextmanager
def count_fed(model: PreTrainedModel, columns: Callable[[], int]) -> Iterator[Fed]:
    """Count while this is open; ``columns`` says how many are in the model's cache."""
    fed = Fed()

    def note(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        rows, width = args[0].shape
        fed.passes.append((columns(), rows, width))

    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Module)
    hook = embeddings.register_forward_pre_hook(note)
    try:
        yield fed
    finally:
        hook.remove()
