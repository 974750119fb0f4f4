"""What each model of a sequence has written of it, and how much of that is the same sequence for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.adapters.huggingface.prefix import common_prefix


@dataclass(slots=True)
class Written:
    """What one model has written: K/V of the first ``held`` tokens, of which the first ``len(tokens)`` are known."""

    held: int = 0
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    """Where its last forward pass ended."""

    def cut(self, num_tokens: int) -> None:
        """Only the first ``num_tokens`` count."""
        self.held, self.fed = min(self.held, num_tokens), min(self.fed, num_tokens)
        del self.tokens[num_tokens:]


def agreed(models: Sequence[Written]) -> int:
    """Tokens from the first that are known, and whose K/V every model has written."""
    known = models[0].tokens
    stop = min(min(each.held, len(each.tokens)) for each in models)
    if all(each.tokens[:stop] == known[:stop] for each in models[1:]):
        return stop
    return min(stop, *(common_prefix(each.tokens, known) for each in models[1:]))
