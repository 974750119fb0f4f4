"""Computes the identity of a model, and checks that pages were computed with the model's current weights.

K/V depend on more than parameters and buffers. Quantized modules keep packed weights in their own objects,
adapters (PEFT) are switched on and off by plain attributes, and a module may have tensors, hooks or a
``forward`` that its class does not define. ``inventory`` finds and describes all of them. The description
omits everything that a newly built model with the same configuration has too, so a plain model is described
by its parameters and buffers alone.
"""

# torch leaves some functions untyped:
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
    """State of a model's weights at one time. While the state is the same, equal tokens have equal K/V."""

    generation: int
    """How many times ``look`` has found a change to anything except the adapters."""
    adapters: str
    """Digest of the active adapters. Empty if there are none."""
    beyond: tuple[str, ...]
    """Descriptions of all differences from a newly built model with the same configuration.

    The contents of ordinary parameters and buffers are not among them.
    """
    unknown: str | None
    """The location and type of the first object that cannot be described, or None."""
    at_random: str | None = None
    """The location of a module in training mode whose results are not reproducible, or None."""


class Weights:
    """Tracks the weights of one model, but keeps no reference to the model. Thread-safe."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The digest of the weights, for each identity that the model has had."""
        self.first: dict[str, int] = {}
        """The generation at the first request to each store whose model name a user chose, by store fingerprint."""
        self._lock = RLock()
        self._walk: Walk | None = None
        self._state: State | None = None
        self._contents = Contents()
        self._built: Walk | None = None
        self._config = ""
        self._base = ""

    def look(self, model: PreTrainedModel) -> State:
        """Return the current state of the weights.

        Takes about a millisecond if nothing has changed. Changes are detected if they are made through
        tensors, modules or attributes (``copy_``, ``load_state_dict``, an optimizer, another ``Parameter``,
        another adapter). A write through ``.data`` or NumPy is always detected if it changes a whole
        tensor. A smaller one is detected only if it changes a sampled byte.
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
        """Return whether the weights are still in the state ``state``.

        Called in every forward pass, so it is fast: if no parameter, buffer or adapter has changed, nothing
        else is examined.
        """
        walk = self._walk
        if walk is not None and self._state == state and not walk.weights_changed():
            return True
        return self.look(model) == state

    def digest(self, model: PreTrainedModel, seen: State | None = None) -> str:
        """Return a digest of everything that affects K/V.

        If the caller has just called ``look``, it can pass the result as ``seen`` to avoid a second ``look``.
        A tensor is hashed again only if it has changed.
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
        """Pass the class, configuration and tensors of the model, without adapters, to ``feed`` in a fixed order."""
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
    """Return the ``Weights`` of this model, which all caches of the model share. Thread-safe."""
    with _lock:
        if model not in _of_model:
            _of_model[model] = Weights()
        return _of_model[model]


def plain_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model, or the model itself.

    Raises:
        ValueError: ``model`` is a compiled wrapper or not a transformers model, or it is a PEFT model whose K/V
            depend on more than the preceding tokens, because it has learned prompts, or adapters that depend on
            the whole input.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise ValueError(
                "the PEFT model learns its prompts (prefix or prompt tuning), so its K and V depend on more than the "
                "tokens, and pages cannot be reused: serve the model without TierStore"
            )
        moving = [name for name, config in model.peft_config.items() if _follows_input(config)]
        if moving:
            kind = type(model.peft_config[moving[0]]).__name__
            raise ValueError(
                f"the effect of adapter {moving[0]!r} of the PEFT model ({kind}) depends on the whole input (X-LoRA, "
                "aLoRA), so K/V of a token would depend on later tokens and pages cannot be reused: serve the "
                "model without TierStore, or delete this adapter"
            )
        return plain_model(model.get_base_model())
    if isinstance(model, PreTrainedModel):
        return model
    inner = ": pass the model that was compiled" if type(model).__name__ == "OptimizedModule" else ""
    raise ValueError(
        "model must be a PreTrainedModel of transformers, or a PeftModel around one, got a "
        f"{type(model).__module__}.{type(model).__qualname__}{inner}"
    )


def _follows_input(config: Any) -> bool:
    """Return whether the effect of an adapter with this PEFT configuration depends on the whole input."""
    named = str(getattr(config.peft_type, "value", config.peft_type))
    return named == "XLORA" or bool(getattr(config, "alora_invocation_tokens", None))


def require_in_memory(model: PreTrainedModel) -> None:
    """Raise ValueError if weights of the model are on the meta device: offloaded, or never loaded."""
    gone = [
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_meta
    ]
    if gone:
        more = f" and {len(gone) - 1} more weights are" if gone[1:] else " is"
        raise ValueError(
            f"{gone[0]}{more} on the meta device: offloaded (disk_offload, cpu_offload, or a device_map with "
            '"disk" or "cpu"), or never loaded. TierStore must read the weights to tell their pages apart from pages '
            "of other weights: load the whole model onto one device, without offloading"
        )


def _as_built(model: PreTrainedModel) -> Walk:
    """Build a model with the same configuration but without weights, and return a walk through it.

    If the class cannot be built in this way, the walk is empty, so everything in ``model`` counts as a
    difference.
    """
    try:
        with torch.device("meta"):
            built = type(model)(deepcopy(model.config))
    except _BUILT_WITH:
        return Walk(Contents())
    walk = Walk(Contents())
    walk.visit(built)
    return walk


# For each fingerprint of pages: the identities of the models that computed the pages.
_given: dict[str, tuple[str, ...]] = {}
_made: set[str] = set()
"""Identities returned by ``model_identity``, as opposed to names chosen by a user."""


def remember(fingerprint: str, identities: tuple[str, ...]) -> None:
    """Record the identities of the models whose pages have this fingerprint.

    Does nothing if a user chose one of them, because only identities from ``model_identity`` describe the weights.
    """
    if _made.issuperset(identities):
        _given[fingerprint] = identities


def model_identity(model: PreTrainedModel) -> str:
    """Return a SHA-256 digest of everything that affects a model's K/V.

    It covers class, configuration, weights and active adapters. All bytes of the tensors in memory are read,
    so weights edited in place, merged adapters or another dtype change the identity, regardless of the files
    on disk. Quantized weights, tensors in plain attributes, hooks that may change a result, a replaced
    ``forward``, and the source of classes outside transformers are covered as well. A PEFT model with
    disabled adapters has the identity of the model inside. Takes about a second per gigabyte.

    Not covered: a hook that returns nothing, but passes its tensors to code that writes to them. Only Python
    functions that a hook calls by name are checked for writes.

    Raises:
        ValueError: Weights are not in memory, or the contents of an object cannot be read. The message names
            the location.
    """
    plain = plain_model(model)
    require_in_memory(plain)
    weights = weights_of(plain)
    digest = sha256()

    def feed(raw: bytes | memoryview) -> None:
        """Hash a field after its length, so that different lists of fields never produce the same bytes."""
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
    """Return the states of the models' weights, and the item of ``extra`` that distinguishes these weights.

    There is no item while the weights are those that ``page_specs`` or ``model_identity`` read. After a
    change, there is one. Equal weights have the same item in every process. If a user chose the model name of
    the store's pages, the name stands for the weights at the first request, and there is always an item if
    adapters are active.

    Args:
        store: The store.
        models: The model, and the draft model if there is one.
        told: Whether the user's own ``extra`` distinguishes these weights. If the user also chose the model
            name, objects that cannot be described are then allowed.

    Returns:
        The state of each model's weights, and a tuple of the item for ``extra``, which is empty without one.

    Raises:
        ValueError: The pages belong to another model, a module in training mode has results that are not
            reproducible, or the weights have changed and cannot be distinguished.
    """
    fingerprint = str(store.stats()["fingerprint"])
    identities = _given.get(fingerprint)
    states, tokens = [], []
    for number, model in enumerate(models):
        weights = weights_of(model)
        state = weights.look(model)
        if state.at_random is not None:
            raise ValueError(
                f"{state.at_random} is in training mode, so its results are not reproducible (dropout, noise, "
                "batch normalisation), and other requests must not reuse its K and V. Call model.eval()"
            )
        states.append(state)
        if identities is None:
            tokens.append(_since_first(weights, model, state, fingerprint, told))
        else:
            tokens.append(_unless(weights, model, state, identities[number]))
    return tuple(states), (f"tierstore weights {' '.join(tokens)}",) if any(tokens) else ()


def _unless(weights: Weights, model: PreTrainedModel, state: State, identity: str) -> str:
    """Return the digest of a model's weights, or "" if these are the weights of ``identity``."""
    if identity not in weights.names and model_identity(model) != identity:
        raise ValueError(
            "the store was opened for another model of the same geometry, or for this model in another dtype: call "
            "page_specs for this model (and its draft model) after the last change of the weights, and open the store "
            "with the result"
        )
    _require_known(state)
    digest = weights.digest(model, state)
    return "" if digest == weights.names[identity] else digest


def _since_first(weights: Weights, model: PreTrainedModel, state: State, fingerprint: str, told: bool) -> str:
    """Return the digest of the active adapters, or of all weights if they changed after the first request."""
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
            f"{state.unknown}: its contents cannot be read, so pages of these weights could not be told apart from "
            "pages of other weights. Name the weights with page_specs(model, page_size, model_id=...), and change the "
            "name whenever the weights change"
        )


def check_weights(model: PreTrainedModel, state: State) -> None:
    """Raise ValueError if the model's weights or adapters have changed since ``state``."""
    if not weights_of(model).same(model, state):
        raise ValueError(
            "the model's weights or adapters have changed since this TierStoreCache was created: its pages hold K "
            "and V of the earlier weights. Create another TierStoreCache after the change; choose adapters of a PEFT "
            "model with set_adapter, not with adapter_names="
        )
