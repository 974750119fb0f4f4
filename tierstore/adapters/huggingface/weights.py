"""A model's weights as they are now: everything that decides its K/V, and whether any of it has changed.

Parameters and buffers are only a part of that. Quantised modules keep packed weights in objects of their own, adapters
(PEFT) are switched on and off by plain attributes, and a module may carry tensors, hooks or a ``forward`` that its
class does not have. ``inventory`` finds all of it. What a model newly built from the same configuration has as well is
left out, so a plain model is described by its parameters and buffers alone.
"""

# torch leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.inventory import Contents, Walk, config_text, joined

_BUILT_WITH = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    ImportError,
    NotImplementedError,
)


@dataclass(frozen=True, slots=True)
class State:
    """What a model's weights were at one look. Equal states compute equal K/V."""

    generation: int
    """Counts changes of anything but adapters since the first look."""
    adapters: str
    """Digest of the adapters in force; empty if none is."""
    beyond: tuple[str, ...]
    """What the model has besides the parameters and buffers that its configuration says."""
    unknown: str | None
    """The first place that holds something which cannot be described, and what; None: there is no such place."""
    at_random: str | None = None
    """A module in training mode that computes at random; None: there is none."""


class Weights:
    """One model's weights. Any thread; holds no reference to the model."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Of each identity that the model had: the digest of its weights then."""
        self.first: dict[str, int] = {}
        """By the fingerprint of a store whose pages the user named: the generation that its first request saw."""
        self._lock = RLock()
        self._walk: Walk | None = None
        self._state: State | None = None
        self._contents = Contents()
        self._built: Walk | None = None
        self._config = ""
        self._base = ""

    def look(self, model: PreTrainedModel) -> State:
        """Return the state of the weights now.

        Costs about a millisecond where nothing has changed. A change is seen if it goes through the tensors, modules or
        attributes (``copy_``, ``load_state_dict``, an optimiser, another ``Parameter``, another adapter). Writing
        through ``.data`` or in NumPy leaves no trace: it is seen where it reaches the bytes that are sampled, so
        reliably if it changes a whole tensor.
        """
        with self._lock:
            walk = self._walk
            if walk is not None and self._state is not None:
                changed = walk.changed()
                if walk.samples_differ():
                    self._contents.clear()
                elif not changed:
                    return self._state
            return self._look_anew(model)

    def same(self, model: PreTrainedModel, state: State) -> bool:
        """Whether the weights are still those of ``state``, as far as tensors and adapters show. For every pass."""
        walk = self._walk
        if walk is not None and self._state == state and not walk.weights_changed():
            return True
        return self.look(model) == state

    def digest(self, model: PreTrainedModel, seen: State | None = None) -> str:
        """Return a digest of all that decides K/V now, or did when ``seen`` was looked at, just before.

        The content of each tensor is hashed once, until it changes.
        """
        with self._lock:
            state = self.look(model) if seen is None or seen is not self._state else seen
            assert self._walk is not None
            if not self._base:
                each = (
                    f"{name} {self._contents.of(tensor)}" for name, tensor in self._walk.tensors_of_base()
                )
                self._base = joined((type(model).__name__, config_text(model.config), *each))
            return joined((self._base, state.adapters, *state.beyond))

    def feed_base(self, model: PreTrainedModel, feed: Callable[[bytes | memoryview], None]) -> None:
        """Hand the class, configuration and tensors of the plain model to ``feed``, in their order, every byte."""
        with self._lock:
            self.look(model)
            assert self._walk is not None
            feed(type(model).__name__.encode())
            feed(config_text(model.config).encode())
            for name, tensor in self._walk.tensors_of_base():
                feed(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                self._contents.of(tensor, feed)

    def _look_anew(self, model: PreTrainedModel) -> State:
        config = config_text(model.config)
        if self._built is None or config != self._config:
            self._built, self._config = _as_built(model), config
        walk = Walk(self._contents)
        walk.visit(model)
        built = dict(self._built.items)
        beyond = [
            f"{place} {token}" for place, token in walk.items.items() if built.pop(place, None) != token
        ]
        beyond += [f"{place} is missing" for place in built]
        unknown = next((place for place in walk.unknown if place not in self._built.unknown), None)
        adapters = joined(walk.adapters) if walk.adapters else ""
        found = tuple(sorted(beyond)) + tuple(sorted(walk.code))
        before, known = self._walk, self._state
        generation = 0
        if before is not None and known is not None:
            same = walk.base_marks == before.base_marks and found == known.beyond and self._contents.whole
            generation = known.generation + (0 if same else 1)
        if before is None or walk.base_marks != before.base_marks or not self._contents.whole:
            self._base = ""
        self._contents.whole = True
        self._walk = walk
        self._state = State(
            generation,
            adapters,
            found,
            None if unknown is None else walk.unknown[unknown],
            walk.at_random,
        )
        return self._state


_of_model: WeakKeyDictionary[PreTrainedModel, Weights] = WeakKeyDictionary()
_lock = RLock()


def weights_of(model: PreTrainedModel) -> Weights:
    """Return what is known of this model's weights. Any thread."""
    with _lock:
        if model not in _of_model:
            _of_model[model] = Weights()
        return _of_model[model]


def plain_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or the model itself.

    ValueError for a PEFT model whose prompts are learned (its K/V do not follow from tokens), for a compiled wrapper,
    and for anything that is not a model of transformers.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise ValueError(
                "the PEFT model learns its prompts (prefix or prompt tuning): its K/V do not follow from the tokens "
                "alone, so pages cannot be reused; serve it without TierStore"
            )
        return plain_model(model.get_base_model())
    if isinstance(model, PreTrainedModel):
        return model
    inner = " (pass the model that was compiled)" if type(model).__name__ == "OptimizedModule" else ""
    raise ValueError(
        f"model is a {type(model).__module__}.{type(model).__qualname__}{inner}; allowed: a PreTrainedModel of "
        "transformers, or a PeftModel around one"
    )


def _as_built(model: PreTrainedModel) -> Walk:
    """What the walk finds in a model newly built from the same configuration, without weights.

    Empty if the class cannot be built so; then everything that the model has is described.
    """
    try:
        with torch.device("meta"):
            built = type(model)(deepcopy(model.config))
    except _BUILT_WITH:
        return Walk(Contents())
    walk = Walk(Contents())
    walk.visit(built)
    return walk
