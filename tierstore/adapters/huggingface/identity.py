"""The identity of a model, and whether its weights are still those that its pages were made with.

Parameters and buffers are only a part of what decides K/V. Quantised modules keep packed weights in their own objects,
adapters (PEFT) are switched on and off by plain attributes, and a module may have tensors, hooks or a ``forward`` that
its class does not have. ``inventory`` finds all of it. What a model newly built from the same configuration also has is
left out, so a plain model is described by its parameters and buffers alone.
"""

# torch leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.inventory import Contents, Walk, config_text, joined
from tierstore.store import TierStore

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
    """State of a model's weights at one time. Equal states compute equal K/V."""

    generation: int
    """Number of changes since the first look, of anything but adapters."""
    adapters: str
    """Digest of the active adapters; empty if there is none."""
    beyond: tuple[str, ...]
    """What the model has besides the parameters and buffers that its configuration implies."""
    unknown: str | None
    """The first place that holds something which cannot be described, and what it is, or None."""
    at_random: str | None = None
    """A module in training mode that computes at random, or None."""


class Weights:
    """The weights of one model. Thread-safe; holds no reference to the model."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Digest of the weights for each identity that the model had."""
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
        """Return the present state of the weights.

        Takes about a millisecond if nothing has changed. A change is detected if it goes through tensors, modules or
        attributes (``copy_``, ``load_state_dict``, an optimiser, another ``Parameter``, another adapter). A write
        through ``.data`` or in NumPy leaves no trace: it is detected only if it changes one of the sampled bytes, so
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
        """Return whether the weights are still those of ``state``, as far as tensors and adapters show.

        Called in every pass.
        """
        walk = self._walk
        if walk is not None and self._state == state and not walk.weights_changed():
            return True
        return self.look(model) == state

    def digest(self, model: PreTrainedModel, seen: State | None = None) -> str:
        """Return a digest of everything that decides K/V now, or that did when ``seen`` was taken, just before.

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
        """Pass class, configuration and all tensors of the plain model, every byte, to ``feed`` in their order."""
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
    """Return the weights object of this model. Thread-safe."""
    with _lock:
        if model not in _of_model:
            _of_model[model] = Weights()
        return _of_model[model]


def plain_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or the model itself.

    Raises:
        ValueError: It is a PEFT model with learned prompts (its K/V do not follow from tokens), a compiled wrapper, or
            not a model of transformers.
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
        f"model is a {type(model).__module__}.{type(model).__qualname__}{inner}, but must be a PreTrainedModel of "
        "transformers, or a PeftModel around one"
    )


def _as_built(model: PreTrainedModel) -> Walk:
    """Return the walk of a model newly built from the same configuration, without weights.

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


# identities of models, by the fingerprint of the pages that were described for them
_given: dict[str, tuple[str, ...]] = {}
_made: set[str] = set()
"""Identities that ``model_identity`` returned, as opposed to names that a user chose."""


def remember(fingerprint: str, identities: tuple[str, ...]) -> None:
    """Record whose pages have this fingerprint, unless a user chose one of the names."""
    if _made.issuperset(identities):
        _given[fingerprint] = identities


def model_identity(model: PreTrainedModel) -> str:
    """Return a SHA-256 over everything that decides a model's K/V: class, configuration, weights and active adapters.

    Every byte of the tensors in memory is read, so weights edited in place, merged adapters or another dtype give
    another identity, whatever the files on disk contain. Quantised weights, tensors that are plain attributes, hooks
    that may change a result, another ``forward``, and the source of classes that are not part of transformers count as
    well. A PEFT model with its adapters off has the identity of the model inside. Takes about a second per gigabyte.

    Not covered: hooks that return nothing and call code that writes into the tensors that they are given.

    Raises:
        ValueError: Weights are not in memory, or an object's content cannot be read. The message names the place.
    """
    plain = plain_model(model)
    weights = weights_of(plain)
    digest = sha256()

    def feed(raw: bytes | memoryview) -> None:
        """Feed the length first, so that different lists of fields never have the same bytes."""
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)

    state = weights.look(plain)
    _require_known(state)
    weights.feed_base(plain, feed)
    for token in (*state.beyond, *([f"adapters {state.adapters}"] if state.adapters else [])):
        feed(token.encode("utf-8", "surrogatepass"))
    identity = digest.hexdigest()
    weights.names[identity] = weights.digest(plain)
    _made.add(identity)
    return identity


def weights_now(
    store: TierStore, models: Sequence[PreTrainedModel], *, told: bool = False
) -> tuple[tuple[State, ...], tuple[str, ...]]:
    """Return the state of the models' weights, and what keys need besides tokens if the store has another name.

    The second value is empty while the weights are those that ``page_specs`` or ``model_identity`` saw; otherwise it is
    one item of ``extra``, the same for the same weights in every process. If the user chose the store's name, that
    stands for the weights at the first request, and active adapters are an item in any case.

    Args:
        told: The user's own ``extra`` distinguishes these weights.

    Raises:
        ValueError: The pages belong to another model, or the weights have changed and cannot be distinguished.
    """
    fingerprint = str(store.stats()["fingerprint"])
    identities = _given.get(fingerprint)
    states, tokens = [], []
    for number, model in enumerate(models):
        weights = weights_of(model)
        state = weights.look(model)
        if state.at_random is not None:
            raise ValueError(
                f"{state.at_random} is in training mode, where it computes at random (dropout, noise, batch "
                "normalisation): pages would hold K and V that no other request has. Call model.eval()"
            )
        states.append(state)
        if identities is None:
            tokens.append(_since_first(weights, model, state, fingerprint, told))
        else:
            tokens.append(_unless(weights, model, state, identities[number]))
    return tuple(states), (f"tierstore weights {' '.join(tokens)}",) if any(tokens) else ()


def _unless(weights: Weights, model: PreTrainedModel, state: State, identity: str) -> str:
    """Return the digest of a model's weights, or "" if they are those of this identity."""
    if identity not in weights.names and model_identity(model) != identity:
        raise ValueError(
            "the store keeps the pages of another model of the same geometry, or of this one in another dtype: open "
            "it with page_specs of this very model (and draft model), after the last edit of its weights"
        )
    _require_known(state)
    digest = weights.digest(model, state)
    return "" if digest == weights.names[identity] else digest


def _since_first(weights: Weights, model: PreTrainedModel, state: State, fingerprint: str, told: bool) -> str:
    """Return the active adapters, and the digest of all weights if they have changed since the first request."""
    first = weights.first.setdefault(fingerprint, state.generation)
    if state.generation == first:
        return state.adapters
    if state.unknown is not None and told:
        return state.adapters
    _require_known(state)
    return weights.digest(model, state)


def _require_known(state: State) -> None:
    if state.unknown is not None:
        raise ValueError(
            f"{state.unknown}: what it holds cannot be read, so pages of these weights could not be told from pages of "
            "others. Name them with page_specs(model, page_size, model_id=...), another name for other weights"
        )


def check_weights(model: PreTrainedModel, state: State) -> None:
    """Raise ValueError if the model's weights or adapters are not those that a cache was made for."""
    if not weights_of(model).same(model, state):
        raise ValueError(
            "the model's weights or adapters have changed since this TierStoreCache was made: its pages hold K/V of "
            "the weights before. Make another TierStoreCache after the change"
        )
