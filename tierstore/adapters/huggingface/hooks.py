"""Hooks that open caches add to a user's model, to see its forward passes and the prompts of ``generate``.

All caches that are open on a model share one ``ModelHooks``, installed by the first cache. When the last of
these caches is closed or garbage-collected, all added hooks and attributes are removed, and the model's own
attributes are restored.
"""

# torch leaves some functions untyped:
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
    """A cache whose methods run in each forward pass that receives it as an argument."""

    def _check_inputs(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Check the arguments of a call to the whole model before it runs. Return the arguments to use instead."""
        ...

    def _see_tokens(self, module: torch.nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Check the arguments of the base model (without the head) before it runs. Return those to use instead."""
        ...

    def _see_positions(self, positions: torch.Tensor) -> None:
        """Check the positions with which the base model, or a text model in it, is about to run."""
        ...

    def _end_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Finish a pass of the base model. Return a new output, or None to keep ``output``."""
        ...

    def _leave_pass(self) -> None:
        """Undo the changes made by a base model's pass that raised an exception. Also called after other passes."""
        ...

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError unless ``input_ids``, ``[rows, T]`` with padding, are the prompts of the cache."""
        ...


_lock = RLock()
"""Held while hooks are added or removed.

It is reentrant, because a cache's finalizer may run on the thread that holds the lock. The finalizer removes no
hooks while the model has an open cache.
"""


def attach(model: PreTrainedModel, cache: HookedCache) -> tuple[ModelHooks, Callable[[], object]]:
    """Connect ``cache`` to the forward passes of ``model``, and install the hooks if needed. Thread-safe.

    Returns:
        The model's hooks, and a function that detaches the cache. Call the function in ``close``. It also
        runs when the cache is garbage-collected.
    """
    with _lock:
        hooks = _hooks_on(model) or ModelHooks(model)
        # Register the cache before the model is changed, so that no other cache's finalizer removes the
        # hooks.
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
    """The hooks on one model while caches are open on it.

    They pass each forward call to the open cache among its arguments, and ignore calls without one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare the hooks without changing the model. Callers use ``attach`` instead."""
        base = model.base_model
        # In a model for images and text, an outer module computes the positions for the text model inside.
        # The positions of all these modules are checked.
        parts = [base] if is_text_alone(model.config) else list(base.modules())
        self.stateful = [each for each in parts if ROPE_STATE in vars(each)]
        """Modules that keep a position shift between calls, because an image shifts all later positions."""
        self._model = model
        self._parts = [each for each in parts if isinstance(each, PreTrainedModel)]
        self._open: dict[int, ReferenceType[HookedCache]] = {}
        self._handles: list[RemovableHandle] = []
        self._own_positions: list[Any] = []
        """The shifts that ``stateful`` modules had after the user's last pass without a TierStoreCache.

        They are restored when the hooks are removed.
        """
        self._shown: Callable[..., Any] | None = None
        self._own_prepare: Callable[..., Any] | None = None
        """The user's own attribute ``PREPARE_INPUTS`` on the model object. None if the class provides it."""

    def __reduce_ex__(self, protocol: object) -> Never:
        """Raise TypeError to prevent copying or pickling the model, because the copy would keep the hooks."""
        raise TypeError(
            "a TierStoreCache is open on this model: close it before you copy or pickle the model"
        )

    def forget_positions(self) -> None:
        """Clear the position shift that a model for images and text keeps from the previous request.

        Qwen2.5-VL and related models keep ``rope_deltas``, the shift that an image causes in later positions.
        They add it to the positions of every request that starts with a warm cache, even without images.
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
        put(base.register_forward_hook(self._after_any_pass, with_kwargs=True, always_call=True))
        for each in self._parts:
            put(each.register_forward_pre_hook(self._before_part, with_kwargs=True))
        if self.stateful:
            put(base.register_forward_hook(self._after_own_pass, with_kwargs=True, always_call=True))
        self._show_prompts()

    def _show_prompts(self) -> None:
        """Make ``model.generate`` pass each whole prompt to ``expect_prompt`` of the cache that it was given.

        A forward pass only gets the tokens that are not cached, so it cannot check that the prompt begins
        with the cached tokens. A prompt is not checked if it is computed in chunks, or if the caller passes
        only the part that is not cached.
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
        # If the user has replaced the attribute since, keep theirs. If it calls ``shown``, no open cache is
        # found there, so nothing is checked.
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

    def _after_any_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        cache = self._given(args, kwargs)
        if cache is not None:
            cache._leave_pass()

    def _after_own_pass(self, module: torch.nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Record the position shifts that a pass without a TierStoreCache left on the model."""
        if self._given(args, kwargs) is None:
            found = [getattr(each, ROPE_STATE) for each in self.stateful]
            self._own_positions = [
                old if new is None else new for old, new in zip(self._own_positions, found, strict=True)
            ]
