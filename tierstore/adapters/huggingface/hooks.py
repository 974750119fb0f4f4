"""What open caches attach to a user's model and remove again: hooks of forward passes, and a view of whole prompts.

All caches that are open on a model share one ``ModelHooks``. The first cache installs it. When the last one is closed
or garbage-collected, the model is as it was, without any added hook or attribute, and with all values unchanged.
"""

# torch leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, Never, Protocol
from weakref import ReferenceType, finalize, ref

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.forward_args import is_text_alone
from tierstore.adapters.huggingface.inventory import PREPARE_INPUTS, ROPE_STATE

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class HookedCache(Protocol):
    """A cache that takes part in the forward passes it is given to."""

    def _check_inputs(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Called before the whole model runs. Returns the arguments for the call."""
        ...

    def _see_tokens(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Called before the model below the head runs. Returns the arguments for the call."""
        ...

    def _see_positions(self, positions: torch.Tensor) -> None:
        """Called before the model below the head, or a text model in it, runs at these positions."""
        ...

    def _end_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Called after the model below the head ran. Returns another output, or None to keep it."""
        ...

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError unless these are the prompts of the cache, ``[rows, T]``, padding included."""
        ...


_lock = RLock()
"""Held while hooks are added or removed.

A finalizer may remove some meanwhile, but then the model has an open cache.
"""


def attach(model: PreTrainedModel, cache: HookedCache) -> tuple[ModelHooks, Callable[[], object]]:
    """Let ``cache`` take part in the passes of ``model``. Thread-safe.

    Returns:
        The model's hooks, and a function that detaches the cache. Call it in ``close``; it is called automatically when
            the cache is garbage-collected.
    """
    with _lock:
        hooks = _hooks_on(model) or ModelHooks(model)
        # Before anything is added to the model: from here on no other cache's finalizer removes the hooks.
        hooks._open[id(cache)] = ref(cache)
        detach = finalize(cache, hooks._leave, id(cache))
        detach.atexit = False
        try:
            hooks._install()
        except BaseException:
            detach()
            raise
    return hooks, detach


def _hooks_on(model: PreTrainedModel) -> ModelHooks | None:
    owners = [getattr(hook, "__self__", None) for hook in list(model._forward_pre_hooks.values())]
    return next((each for each in owners if isinstance(each, ModelHooks)), None)


class ModelHooks:
    """What is attached to one model while caches are open. Passes each forward call to the cache given to it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Attach nothing to the model yet; use ``attach``."""
        base = model.base_model
        # Models of images and text compute positions on the way down; those that arrive are checked.
        parts = [base] if is_text_alone(model.config) else list(base.modules())
        self.stateful = [each for each in parts if ROPE_STATE in vars(each)]
        """Modules that keep positions between calls: an image shifts all later positions of its request."""
        self._model = model
        self._parts = [each for each in parts if isinstance(each, PreTrainedModel)]
        self._open: dict[int, ReferenceType[HookedCache]] = {}
        self._handles: list[RemovableHandle] = []
        self._own_positions: list[Any] = []
        """What ``stateful`` kept of the user's last request without one of these caches."""
        self._shown: Callable[..., Any] | None = None
        self._own_prepare: Callable[..., Any] | None = None
        """The attribute of this name that the user had set on the model."""

    def __reduce_ex__(self, protocol: object) -> Never:
        """Refuse to be copied or pickled, and thereby the model: a copy would keep the hooks forever."""
        raise TypeError(
            "a TierStoreCache is open on this model: close it before you copy or pickle the model"
        )

    def forget_positions(self) -> None:
        """Drop the positions that a model of images and text keeps from the previous request.

        Qwen2.5-VL and its relatives keep ``rope_deltas``, by which an image shifts all later positions, and add them to
        the positions of any request that begins with a warm cache.
        """
        for module in self.stateful:
            setattr(module, ROPE_STATE, None)

    def _install(self) -> None:
        if self._handles:
            return
        model, base = self._model, self._model.base_model
        self._own_positions = [getattr(each, ROPE_STATE) for each in self.stateful]
        put = self._handles.append
        put(model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        put(base.register_forward_pre_hook(self._before_pass, with_kwargs=True))
        put(base.register_forward_hook(self._after_pass, with_kwargs=True))
        for each in self._parts:
            put(each.register_forward_pre_hook(self._before_part, with_kwargs=True))
        if self.stateful:
            put(base.register_forward_hook(self._after_own_pass, with_kwargs=True, always_call=True))
        self._show_prompts()

    def _show_prompts(self) -> None:
        """Make ``model.generate`` show each whole prompt to the cache it is given.

        A forward pass is fed only what a warm cache does not hold, so nothing else shows whether the beginning of the
        prompt is the one that the cache was made for. Prompts computed in chunks, and prompts of which only the rest is
        passed, are not seen.
        """
        prepare = getattr(self._model, PREPARE_INPUTS, None)
        if prepare is None:
            return

        @wraps(prepare)
        def shown(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = self._given(args, kwargs)
            whole = kwargs.get("next_sequence_length") is not None and kwargs.get("is_first_iteration", False)
            if whole and cache is not None:
                cache.expect_prompt(input_ids)
            return prepare(input_ids, *args, **kwargs)

        self._own_prepare = vars(self._model).get(PREPARE_INPUTS)
        self._shown = shown
        setattr(self._model, PREPARE_INPUTS, shown)

    def _leave(self, key: int) -> None:
        with _lock:
            self._open.pop(key, None)
            if not self._open:
                self._uninstall()

    def _uninstall(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        shown, self._shown = self._shown, None
        # An attribute that the user set meanwhile is theirs. It keeps calling ``shown``, which finds no open cache.
        if shown is not None and vars(self._model).get(PREPARE_INPUTS) is shown:
            if self._own_prepare is None:
                delattr(self._model, PREPARE_INPUTS)
            else:
                setattr(self._model, PREPARE_INPUTS, self._own_prepare)
        for module, positions in zip(self.stateful, self._own_positions, strict=False):
            setattr(module, ROPE_STATE, positions)
        self._own_positions = []

    # -- hooks --------------------------------------------------------------------------------------------------

    def _given(self, args: Args, kwargs: Kwargs) -> HookedCache | None:
        """Return the open cache among the arguments of a call, or None."""
        for each in (*args, *kwargs.values()):
            known = self._open.get(id(each))
            cache = None if known is None else known()
            if cache is not None and cache is each:
                return cache
        return None

    def _before_model(
        self, module: torch.nn.Module, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs] | None:
        cache = self._given(args, kwargs)
        return None if cache is None else cache._check_inputs(module, args, kwargs)

    def _before_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        cache = self._given(args, kwargs)
        return None if cache is None else cache._see_tokens(module, args, kwargs)

    def _before_part(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, torch.Tensor) and (cache := self._given(args, kwargs)) is not None:
            cache._see_positions(positions)

    def _after_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        cache = self._given(args, kwargs)
        return None if cache is None else cache._end_pass(module, args, kwargs, output)

    def _after_own_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Record the positions that a pass without one of these caches left on the model."""
        if self._given(args, kwargs) is None:
            found = [getattr(each, ROPE_STATE) for each in self.stateful]
            self._own_positions = [
                old if new is None else new for old, new in zip(self._own_positions, found, strict=True)
            ]
