"""Describes everything a model contains, and detects cheaply whether it has changed.

Models with equal descriptions compute equal K/V. A single walk visits all modules. It covers parameters,
buffers, all other attributes, hooks, adapters, and the code of classes that no known package defines.
"""

# torch leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import ctypes
import dis
import functools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from re import Pattern
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

_NOT_IDENTITY = (
    "_name_or_path",
    "_attn_implementation",
    "attn_implementation",
    "architectures",
    "transformers_version",
    "dtype",
)
"""Configuration entries that say how a model is stored or run. Class and dtype are hashed separately."""

PREPARE_INPUTS = "prepare_inputs_for_generation"
"""Name of the method that ``generate`` calls on the model before each forward pass."""
ROPE_STATE = "rope_deltas"
"""Name of the attribute in which models for images and text keep a position shift between calls."""
_OF_REQUESTS = (PREPARE_INPUTS, ROPE_STATE)
"""Attributes that are set for each request (see ``hooks``). They do not affect K/V of given tokens."""
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes of all modules: parameters, buffers, children and hooks. They are examined separately."""
_IGNORED = frozenset(
    (
        *_OF_TORCH,
        *_OF_REQUESTS,
        "_compiled_call",
        "_compiled_call_impl",
        "_gradient_checkpointing_func",
        "_hf_peft_config_loaded",
        "_hotswap_enabled",
        "_is_hf_initialized",
        "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_last_compile_config",
        "_loss_function",
        "_prepare_peft_hotswap_kwargs",
        "_previous_max_cache_length",
        "_require_grads_hook",
        "_require_grads_hooks",
        "_use_kernels",
        "_weight_conversions",
        "generation_config",
        "gradient_checkpointing",
        "hf_device_map",
        "hf_quantizer",
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "is_quantized",
        "name_or_path",
        "peft_config",
        "quantization_method",
        "warnings_issued",
    )
)
"""Attributes that the description of a module leaves out.

Those that are listed here by name say how a model was loaded or how ``generate`` uses it, and do not affect its
results.
"""
_OF_TUNERS = frozenset(
    ("_disable_adapters", "_active_adapter", "merged_adapters", "_caches", "kwargs", "_adapters")
)
"""Attributes of an adapter layer that name the active adapters. They are examined separately."""
_KNOWN_CODE = frozenset(
    ("accelerate", "bitsandbytes", "peft", "tierstore", "torch", "torchao", "transformers")
)
"""Packages whose classes and functions are identified by name. All others are identified by their code."""
_HARMLESS = frozenset(("accelerate", "tierstore", "torch", "transformers"))
"""Packages whose hooks are ignored: they only move weights, or derive them from examined parameters."""
_OF_ALL: dict[str, Any] = {
    "_forward_pre_hooks": torch.nn.modules.module._global_forward_pre_hooks,
    "_forward_hooks": torch.nn.modules.module._global_forward_hooks,
}
"""Hooks that apply to every module of every model."""
_CONTAINERS = (Mapping, list, tuple, AbstractSet, deque)
_SAMPLE_NBYTES = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_DATA = (*_LEAVES, *_CONTAINERS, torch.Tensor, np.ndarray)


def joined(fields: Iterable[str]) -> str:
    digest = sha256()
    for text in fields:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def config_text(config: PreTrainedConfig) -> str:
    found = {key: value for key, value in config.to_dict().items() if key not in _NOT_IDENTITY}
    return json.dumps(found, sort_keys=True, default=str)


class Contents:
    """Computes digests of tensors, and caches each digest while its tensor is unchanged."""

    def __init__(self) -> None:
        self.whole = True
        """Whether equal addresses and write counts mean equal contents.

        False after ``clear``, because contents have changed although addresses and write counts have not.
        """
        self._known: dict[int, tuple[ReferenceType[torch.Tensor], tuple[int, int], str]] = {}

    def clear(self) -> None:
        self._known.clear()
        self.whole = False

    def of(self, tensor: torch.Tensor, more: Callable[[bytes | memoryview], None] | None = None) -> str:
        """Return dtype, shape and a digest of the tensor's bytes. If ``more`` is given, also pass the bytes to it."""
        mark, known = _mark(tensor), self._known.get(id(tensor))
        if more is None and known is not None and known[0]() is tensor and known[1] == mark:
            return known[2]
        digest = xxhash.xxh3_128()

        def feed(raw: bytes | memoryview) -> None:
            digest.update(raw)
            if more is not None:
                more(raw)

        self.feed(tensor, feed)
        text = f"{tensor.dtype} {tuple(tensor.shape)} {digest.hexdigest()}"
        if not tensor.is_meta:
            self._known[id(tensor)] = (ref(tensor), mark, text)
        return text

    def feed(self, tensor: torch.Tensor, feed: Callable[[bytes | memoryview], None]) -> None:
        """Pass the bytes of a tensor, or of its component tensors, to ``feed``.

        Raises:
            ValueError: The bytes are not in memory.
        """
        tensor = _bare(tensor)
        if tensor.is_meta:
            raise ValueError(
                f"a weight of shape {tuple(tensor.shape)} is on the meta device: it was offloaded, or never loaded. "
                "Load the whole model onto one device, without offloading"
            )
        parts = _parts(tensor)
        if parts is not None:
            feed(parts[0].encode())
            for each in parts[1]:
                feed(f"{each.dtype} {tuple(each.shape)}".encode())
                self.feed(each, feed)
            return
        raw = (
            tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        )
        feed(raw.numpy().data)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor without the behaviour of its subclass. Bytes and write count are shared.

    Plain tensors, and wrappers of several tensors, are returned unchanged.
    """
    if type(tensor) in _PLAIN or is_traceable_wrapper_subclass(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _parts(tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]] | None:
    """Return the format and the component tensors of a tensor. None if the tensor is a plain array."""
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return f"{type(tensor).__qualname__} {names} {context}", [getattr(tensor, name) for name in names]
    if tensor.is_quantized:
        scheme = tensor.qscheme()
        if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return f"{scheme} {tensor.q_scale()!r} {tensor.q_zero_point()}", [tensor.int_repr()]
        scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.int_repr()]
        return f"{scheme} {tensor.q_per_channel_axis()}", scales
    if tensor.is_mkldnn:
        return "mkldnn", [tensor.to_dense()]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return "sparse", [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return str(tensor.layout), [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return str(tensor.layout), [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's bytes and its write count. Each is 0 if torch does not provide it.

    For a wrapper of several tensors, return a hash of their addresses and write counts, and 0.
    """
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [_mark(getattr(tensor, name)) for name in names]
        return hash(tuple(inner)), 0
    tensor = _bare(tensor)
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.data_ptr() if plain else 0, 0 if tensor.is_inference() else tensor._version


class _Seen(NamedTuple):
    """The state of a module when it was visited.

    ``own``, ``children`` and ``hooks`` are the IDs of the module's attributes, children and hooks. ``inner``
    lists the contents of the module's containers.
    """

    module: ReferenceType[torch.nn.Module]
    own: tuple[int, ...]
    children: tuple[int, ...]
    inner: tuple[tuple[str, tuple[object, ...]], ...]
    hooks: tuple[int, ...]
    kept: tuple[object, ...]
    """The numbers, strings and similar attribute values, kept alive so that their IDs are not reused."""

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Seen:
        own = module.__dict__
        inner = tuple(
            (name, _content_ids(value))
            for name, value in own.items()
            if name not in _OF_TORCH and isinstance(value, Mapping | list | tuple | AbstractSet | np.ndarray)
        )
        children = tuple(map(id, own["_modules"].values()))
        kept = tuple(value for value in own.values() if isinstance(value, _LEAVES))
        return cls(ref(module), _ids_of_attributes(own), children, inner, _hook_ids(own), kept)


class _Placed(NamedTuple):
    """The name, address and write count of a module's parameter or buffer when it was visited."""

    module: ReferenceType[torch.nn.Module]
    kind: str
    name: str
    tensor: ReferenceType[torch.Tensor]
    address: int
    version: int


def _any_changed(seen: Iterable[_Seen]) -> bool:
    """Return whether an attribute, child or hook of a module was added, removed or replaced since the walk.

    Called for every request, so it is a single loop for speed.
    """
    for one, ids, children, inner, hooks, _ in seen:
        module = one()
        if module is None:
            return True
        own = module.__dict__
        if tuple(map(id, own.values())) != ids and _ids_of_attributes(own) != ids:
            return True
        if (children or own["_modules"]) and tuple(map(id, own["_modules"].values())) != children:
            return True
        if inner:
            for name, found in inner:
                if _content_ids(own[name]) != found:
                    return True
        if (own["_forward_hooks"] or own["_forward_pre_hooks"] or hooks) and _hook_ids(own) != hooks:
            return True
    return False


def _ids_of_attributes(own: dict[str, Any]) -> tuple[int, ...]:
    return tuple([id(value) for name, value in own.items() if name not in _OF_REQUESTS])


def _content_ids(value: object) -> tuple[object, ...]:
    """Return the contents of a value for comparison.

    Numbers, strings and similar values are compared by value, because their IDs may be reused. Arrays are
    compared by digest, and other objects by ID.
    """
    if isinstance(value, Mapping):
        return tuple((key, _content_ids(each)) for key, each in value.items())
    if isinstance(value, list | tuple | AbstractSet):
        return tuple(_content_ids(each) for each in value)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, xxhash.xxh3_128_digest(np.ascontiguousarray(value).data))
    return (type(value), value if isinstance(value, _LEAVES) else id(value))


def _hooks_of(own: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return the hooks that may change the module's results."""
    found = [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]
    return [hook for hook in found if not (_package(hook) in _HARMLESS or _only_looks(hook))]


def _hook_ids(own: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(id, _hooks_of(own)))


def _package(found: Any) -> str:
    """Return the top-level package that defines a function or class, or the class of any other object."""
    while isinstance(found, functools.partial):
        found = found.func
    if isinstance(found, MethodType):
        found = found.__func__
    if isinstance(found, FunctionType):
        # not ``__module__``, which functools.wraps copies from the wrapped function
        return str(found.__globals__.get("__name__") or "builtins").partition(".")[0]
    if not isinstance(found, type | BuiltinFunctionType):
        found = type(found)
    return str(found.__module__ or "builtins").partition(".")[0]


def _only_looks(hook: Any) -> bool:
    """Return whether a hook always returns None and writes nothing.

    This is determined from its bytecode, and from that of the Python functions that it calls by name.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    if not isinstance(function, FunctionType) or _writes(
        function, type(getattr(hook, "__self__", None)), set()
    ):
        return False
    last = None
    for step in dis.get_instructions(function.__code__):
        returns = step.opname in ("RETURN_CONST", "RETURN_VALUE") and step.argval is not None
        if step.opname == "RETURN_VALUE":
            constant = last is not None and "CONST" in last.opname and last.argval is None
            returns = step.is_jump_target or not constant
        if returns or step.opname == "YIELD_VALUE":
            return False
        last = step
    return True


def _writes(function: FunctionType, owner: type, seen: set[CodeType]) -> bool:
    """Return whether a function, or a Python function that it calls by name, may write to its arguments."""
    code = function.__code__
    if code in seen or _package(function) in _HARMLESS:
        return False
    seen.add(code)
    if any((name.endswith("_") and not name.endswith("__")) or name == "data" for name in code.co_names):
        return True
    if any(isinstance(names, tuple) and "out" in names for names in code.co_consts):
        return True
    for step in dis.get_instructions(code):
        if step.opname == "STORE_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")):
            return True
    called = [function.__globals__.get(name) for name in code.co_names]
    called += [getattr(owner, name, None) for name in code.co_names]
    called += [*_cells(function), *(function.__defaults__ or ())]
    return any(_writes(each, owner, seen) for each in called if isinstance(each, FunctionType))


class Walk:
    """The description that a walk through a model yields, and the data with which changes are detected."""

    def __init__(self, contents: Contents) -> None:
        self.items: dict[str, str] = {}
        """Descriptions of the modules' classes, attributes and hooks, by location."""
        self.adapters: list[str] = []
        """Descriptions of the active adapters."""
        self.code: set[str] = set()
        """Descriptions of classes and functions that no known package defines, with digests of their code."""
        self.at_random: str | None = None
        """Location of a module in training mode whose results are random or depend on other tokens."""
        self.unknown: dict[str, str] = {}
        """The objects that cannot be described, by location. The value is a phrase with the location and the type."""
        self.base_marks: list[tuple[str, int, tuple[int, int]]] = []
        """Tensors of the model without adapters: name, ID, and the address and write count from ``_mark``."""
        self._contents = contents
        self._parameters: list[tuple[str, ReferenceType[torch.Tensor]]] = []
        self._buffers: list[tuple[str, ReferenceType[torch.Tensor]]] = []
        self._modules: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._seen: list[_Seen] = []
        self._tuners: list[_Seen] = []
        """Adapter layers, which may be switched between two passes of a request."""
        self._placed: list[_Placed] = []
        self._loose: list[tuple[ReferenceType[torch.Tensor], int, int]] = []
        self._odd: list[tuple[ReferenceType[torch.Tensor], tuple[int, int]]] = []
        self._alive: list[ReferenceType[Any]] = []
        self._classes: dict[type, tuple[int, ...]] = {}
        self._class_data: list[tuple[type, str, tuple[object, ...]]] = []
        self._called: list[tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]] = []
        """For functions of known packages: globals, names that they call, and IDs of the objects with these names."""
        self._hooks_of_all = _hook_ids(_OF_ALL)
        self._cells: list[tuple[ReferenceType[FunctionType], tuple[object, ...]]] = []
        self._objects: list[tuple[Callable[[], Any], tuple[object, ...]]] = []
        self._open: set[int] = set()
        self._told: dict[int, tuple[object, str]] = {}
        """Each object that was described, and its description, by ID.

        Keeping the objects alive prevents their IDs from being reused during the walk.
        """
        self._samples: list[tuple[ReferenceType[torch.Tensor], int, tuple[int, ...], int, bytes]] = []
        self._samples_on_card: list[tuple[list[tuple[ReferenceType[torch.Tensor], int]], bytes]] = []

    def visit(self, model: torch.nn.Module) -> None:
        """Walk through ``model`` and record its description. Call this once."""
        self._module("", model)
        for number, hook in enumerate(_hooks_of(_OF_ALL)):
            self.items[f"hook of all modules {number}"] = self._token(hook, f"hook of all modules {number}")
        self._told.clear()
        for name, one in (*self._parameters, *self._buffers):
            tensor = one()
            assert tensor is not None
            self.base_marks.append((name, id(tensor), _mark(tensor)))
        self._take_samples()

    def tensors_of_base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and then the buffers of the model without adapters, each tensor once.

        Raises:
            ValueError: A tensor no longer exists.
        """
        for name, one in (*self._parameters, *self._buffers):
            tensor = one()
            if tensor is None:
                raise ValueError(f"the weight {name} was replaced while it was being read: try again")
            yield name, tensor

    # -- changes since the walk ---------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Return whether anything was replaced, or any tensor was written to, since the walk.

        Covers modules, attributes, tensors, hooks, classes and functions.
        """
        return (
            self.weights_changed()
            or _any_changed(self._seen)
            or any(one() is None for one in self._alive)
            or any((t := one()) is None or _mark(t) != mark for one, mark in self._odd)
            or any(_ids_of_class(kind) != ids for kind, ids in self._classes.items())
            or any(_content_ids(vars(kind).get(name)) != ids for kind, name, ids in self._class_data)
            or any(_ids_of_called(found, names) != ids for found, names, ids in self._called)
            or _hook_ids(_OF_ALL) != self._hooks_of_all
            or any((f := one()) is None or _cell_ids(f) != ids for one, ids in self._cells)
            or any((o := one()) is None or _content_ids(_held_by(o)) != ids for one, ids in self._objects)
        )

    def weights_changed(self) -> bool:
        """Return whether a weight was replaced or written, or an adapter switched. Cheaper than ``changed``."""
        for owner, kind, name, one, address, version in self._placed:
            module, tensor = owner(), one()
            if (
                module is None
                or tensor is None
                or module.__dict__[kind].get(name) is not tensor
                or tensor.data_ptr() != address
                or tensor._version != version
            ):
                return True
        for one, address, version in self._loose:
            tensor = one()
            if tensor is None or tensor.data_ptr() != address or tensor._version != version:
                return True
        return _any_changed(self._tuners)

    def samples_differ(self) -> bool:
        """Return whether sampled bytes have changed since the walk. Tensors that have moved are skipped."""
        for one, address, places, size, raw in self._samples:
            tensor = one()
            if tensor is None or _bare(tensor).data_ptr() != address:
                continue
            if b"".join([ctypes.string_at(at, size) for at in places]) != raw:
                return True
        return any(_sample_on_card(tensors) != raw for tensors, raw in self._samples_on_card)

    def _take_samples(self) -> None:
        """Sample a few bytes of each tensor.

        They are taken from the start, middle and end of a tensor on the CPU, and from the middle of a tensor on a GPU.
        """
        cards: dict[torch.device, list[tuple[ReferenceType[torch.Tensor], int]]] = {}
        for one in [
            *(p.tensor for p in self._placed),
            *(o for o, _, _ in self._loose),
            *(o for o, _ in self._odd),
        ]:
            tensor = one()
            if tensor is None or not _has_address(tensor) or not tensor.numel():
                continue
            tensor = _bare(tensor)
            address = tensor.data_ptr()
            if tensor.device.type != "cpu":
                cards.setdefault(tensor.device, []).append((one, address))
                continue
            # The range from the first to the last byte. It is also right for transposed and strided tensors.
            extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            nbytes = extent * tensor.element_size()
            size = min(_SAMPLE_NBYTES, nbytes)
            places = sorted({address, address + (nbytes - size) // 2, address + nbytes - size})
            raw = b"".join(ctypes.string_at(at, size) for at in places)
            self._samples.append((one, address, tuple(places), size, raw))
        self._samples_on_card = [(found, _sample_on_card(found)) for found in cards.values()]

    # -- the walk -----------------------------------------------------------------------------------------------

    def _module(self, place: str, module: torch.nn.Module) -> None:
        known = self._modules.get(id(module))
        if known is not None:
            self.items[f"{place}!"] = f"is {known}"
            return
        self._modules[id(module)] = place
        self._alive.append(ref(module))
        tuner = _tuner(module)
        if tuner is not None:
            self._adapter(place, module, tuner)
            return
        self._watch(module)
        if _is_random(module):
            self.at_random = self.at_random or place or type(module).__name__
        self.items[f"{place}!"] = self._class(type(module))
        if isinstance(module, torch.jit.ScriptModule):
            self._unknown(place, module)
            return
        for kind, into in ((module._parameters, self._parameters), (module._buffers, self._buffers)):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                where = _at(place, name)
                first = self._places.setdefault(id(tensor), where)
                if first != where:
                    self.items[where] = f"is {first}"
                    continue
                self._mark(tensor, module, name)
                into.append((where, ref(tensor)))
        for name, token in self._attributes(place, module):
            self.items[_at(place, name)] = token
        for name, child in module._modules.items():
            if child is not None:
                self._module(_at(place, name), child)

    def _attributes(self, place: str, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
        """Yield the name and a description of everything that a module has, except parameters, buffers and children."""
        own = module.__dict__
        moved = "_hf_hook" in own and _package(own["_hf_hook"]) == "accelerate"
        for name, value in own.items():
            if name in _IGNORED or (moved and name in ("_hf_hook", "_old_forward", "forward")):
                continue
            yield name, self._token(value, _at(place, name))
        for number, hook in enumerate(_hooks_of(own)):
            yield f"hook {number}", self._token(hook, _at(place, f"hook {number}"))
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield "extra state", self._token(module.get_extra_state(), _at(place, "extra state"))

    def _adapter(self, place: str, module: torch.nn.Module, tuner: _Tuner) -> None:
        """Describe an adapter layer: the layer that it wraps, and the active adapters."""
        for each in module.modules():
            if each is not tuner.base and (each is module or id(each) not in self._modules):
                self._watch(each)
                self._tuners.append(self._seen[-1])
                for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                    if tensor is not None:
                        self._mark(tensor, each, name)
        if tuner.base is not None:
            self._module(place, tuner.base)
        if tuner.active:
            if any(_is_random(each) for each in module.modules()):
                self.at_random = self.at_random or place
            self.adapters.append(f"{place} {self._class(type(module))} {list(tuner.active)}")
            for name, token in self._attributes_of_tuner(place, module, tuner):
                self.adapters.append(f"{place} {name} {token}")

    def _attributes_of_tuner(
        self, place: str, module: torch.nn.Module, tuner: _Tuner
    ) -> Iterator[tuple[str, str]]:
        own: dict[str, Any] = {**module.__dict__, **module._parameters, **module._buffers, **module._modules}
        for name, value in sorted(own.items()):
            if name in _IGNORED or name in _OF_TUNERS or value is tuner.base:
                continue
            found = value
            if isinstance(value, Mapping | torch.nn.ModuleDict | torch.nn.ParameterDict) or _is_buffers(
                value
            ):
                found = {key: each for key, each in value.items() if key not in tuner.others}
            yield name, self._token(found, _at(place, name))
        for number, hook in enumerate(_hooks_of(module.__dict__)):
            yield f"hook {number}", self._token(hook, _at(place, f"hook {number}"))

    def _watch(self, module: torch.nn.Module) -> None:
        for value in module.__dict__.values():
            if not isinstance(value, (*_LEAVES, dict, list, tuple, set)):
                self._keep(value)
        self._seen.append(_Seen.of(module))

    def _keep(self, value: object) -> None:
        """Make ``changed`` detect the deletion of an object, because its ID may be reused afterwards."""
        try:
            self._alive.append(ref(value))
        except TypeError:
            return

    def _mark(self, tensor: torch.Tensor, owner: torch.nn.Module | None = None, name: str = "") -> None:
        odd = type(tensor) not in _PLAIN or tensor.is_inference()
        if odd or tensor.is_meta or tensor.layout is not torch.strided:
            self._odd.append((ref(tensor), _mark(tensor)))
        elif owner is None:
            self._loose.append((ref(tensor), tensor.data_ptr(), tensor._version))
        else:
            kind = "_parameters" if name in owner._parameters else "_buffers"
            found = _Placed(ref(owner), kind, name, ref(tensor), tensor.data_ptr(), tensor._version)
            self._placed.append(found)

    # -- descriptions -------------------------------------------------------------------------------------------

    def _token(self, value: Any, place: str) -> str:
        """Return a description that is the same for equal values in every process."""
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, _LEAVES):
            return f"{type(value).__name__} {value!r}"
        told = self._told.get(id(value))
        if told is not None:
            return told[1]
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        try:
            token = self._described(value, place)
        finally:
            self._open.discard(id(value))
        self._told[id(value)] = (value, token)
        return token

    def _described(self, value: Any, place: str) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, torch.nn.Module):
            return self._loose_module(value, place)
        if isinstance(value, PreTrainedConfig):
            self._object(value)
            return f"config {joined([config_text(value)])}"
        if isinstance(value, Mapping):
            pairs = [(self._token(k, place), self._token(v, f"{place}[{k!r}]")) for k, v in value.items()]
            return f"mapping {joined(text for pair in sorted(pairs) for text in pair)}"
        if isinstance(value, list | tuple | deque):
            return f"sequence {joined(self._token(v, f'{place}[{i}]') for i, v in enumerate(value))}"
        if isinstance(value, AbstractSet):
            return f"set {joined(sorted(self._token(v, place) for v in value))}"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            raw = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)
            return f"array {value.dtype} {value.shape} {raw}"
        if isinstance(
            value, np.generic | slice | range | Path | torch.layout | torch.memory_format | Pattern
        ):
            return f"{type(value).__qualname__} {value!r}"
        if isinstance(value, BytesIO):
            return f"bytes {joined([value.getvalue().hex()])}"
        if isinstance(value, type):
            return self._class(value)
        if callable(value) and not isinstance(value, torch.ScriptObject):
            token = self._callable(value, place)
            if token is not None:
                return token
        if isinstance(value, ReferenceType):
            there = value()
            return "gone" if there is None else f"reference {self._token(there, place)}"
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        return self._instance(value, place)

    def _tensor(self, value: torch.Tensor, place: str) -> str:
        if value.is_meta:
            self.unknown[place] = f"{place} is a tensor without content (on the meta device)"
            return f"meta {tuple(value.shape)}"
        self._mark(value)
        more = ""
        if type(value) not in _PLAIN:
            more = self._token({k: v for k, v in vars(value).items() if k not in _IGNORED}, place)
        return f"tensor {type(value).__name__} {self._contents.of(value)} {more}"

    def _loose_module(self, module: torch.nn.Module, place: str) -> str:
        """Describe a module to which an attribute or an adapter refers."""
        known = self._modules.get(id(module))
        if known is not None:
            return f"module {known}"
        if isinstance(module, torch.jit.ScriptModule):
            return self._unknown(place, module)
        self._watch(module)
        held = {**module._parameters, **module._buffers, **module._modules}
        own = [self._class(type(module)), *(f"{n} {t}" for n, t in self._attributes(place, module))]
        own += [f"{name} {self._token(each, _at(place, name))}" for name, each in held.items()]
        return f"module {joined(own)}"

    def _class(self, kind: type) -> str:
        """Return the name of a class. If no known package defines it, record its source and data in ``code``."""
        for each in kind.__mro__:
            own = _package(each) not in _KNOWN_CODE
            if each in self._classes or _package(each) in sys.stdlib_module_names:
                continue
            if each is PreTrainedModel or not (own or issubclass(each, torch.nn.Module)):
                continue  # only about how models are loaded, saved and queried
            self._classes[each] = _ids_of_class(each)
            if own:
                self.code.add(f"{each.__qualname__} {_source_of(each)}")
            for name, found in sorted(vars(each).items()):
                place = f"{each.__qualname__}.{name}"
                if isinstance(found, staticmethod | classmethod):
                    found = found.__func__
                if isinstance(found, property):
                    found = found.fget
                if isinstance(found, FunctionType):
                    self._function_of_class(found, place)
                elif own and isinstance(found, _DATA) and not name.startswith("__"):
                    self.code.add(f"{place} {self._token(found, place)}")
                    self._class_data.append((each, name, _content_ids(found)))
        known = _package(kind) in _KNOWN_CODE
        return f"{kind.__module__}.{kind.__qualname__}" if known else kind.__qualname__

    def _function_of_class(self, function: FunctionType, place: str) -> None:
        """Record a function of a class, and all functions that it wraps, in ``code``.

        A function that no known package defines is recorded with its code. For a function of a transformers model,
        only the functions and classes that it calls are recorded, and only if a user has replaced them.
        """
        found: Any = function
        while isinstance(found, FunctionType):
            if _package(found) not in _KNOWN_CODE:
                self.code.add(f"{place} {self._token(found, place)}")
            elif found.__module__.startswith("transformers.models."):
                names = _names_called(found)
                self._called.append((found.__globals__, names, _ids_of_called(found.__globals__, names)))
                for name in names:
                    called = found.__globals__[name]
                    if _is_strange(called):
                        self.code.add(f"{place} calls {name} {self._token(called, name)}")
            found = vars(found).get("__wrapped__")

    def _callable(self, value: Any, place: str) -> str | None:
        """Describe a function by its name, its code and its bound values. Return None for other objects."""
        if isinstance(value, functools.partial):
            bound = [self._token(each, place) for each in (value.func, value.args, value.keywords)]
            return f"partial {joined(bound)}"
        if isinstance(value, MethodType):
            return f"method {self._token(value.__func__, place)} of {self._token(value.__self__, place)}"
        if isinstance(value, FunctionType):
            name = f"{value.__module__}.{value.__qualname__}" if _package(value) in _KNOWN_CODE else ""
            code = name or f"{value.__qualname__} {_code_text(value.__code__)}"
            with_it = [value.__defaults__, value.__kwdefaults__, *_cells(value)]
            if not name:
                with_it.append(_globals_of(value))
            self._cells.append((ref(value), _cell_ids(value)))
            return f"function {code} {joined(self._token(each, place) for each in with_it)}"
        if isinstance(value, BuiltinFunctionType) or type(value).__module__.startswith(
            ("torch._ops", "torch._C")
        ):
            return f"function {getattr(value, '__qualname__', value)}"
        return None

    def _instance(self, value: Any, place: str) -> str:
        """Describe an object by its class and attributes, or by its pickle state."""
        if isinstance(value, torch.ScriptObject):
            try:
                return f"script {value._type()} {self._token(value.__getstate__(), place)}"
            except RuntimeError:
                return self._unknown(place, value)
        own = _held_by(value)
        if not own and not _is_empty(value):
            return self._unknown(place, value)
        self._object(value)
        return f"{self._class(type(value))} {self._token(own, place)}"

    def _object(self, value: Any) -> None:
        held = _held_by(value)
        if held:
            try:
                self._objects.append((ref(value), _content_ids(held)))
            except TypeError:  # no weak reference is possible, so keep the object alive
                self._objects.append((lambda: value, _content_ids(held)))

    def _unknown(self, place: str, value: object) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.unknown[place] = f"{place or 'the model'} is a {kind}"
        return f"unknown {kind}"


def _is_random(module: torch.nn.Module) -> bool:
    """Return whether a module is in training mode and therefore uses dropout or noise, or normalizes over the batch."""
    if not module.training:
        return False
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return True
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    own = dict(module.__dict__)
    if isinstance(own.get("config"), PreTrainedConfig) and isinstance(module, PreTrainedModel):
        own |= {name: value for name, value in vars(own["config"]).items() if "classifier" not in name}
    named = [value for name, value in own.items() if "drop" in name or "jitter" in name]
    return any(
        isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in named
    )


@dataclass(frozen=True, slots=True)
class _Tuner:
    """An adapter layer: the layer that it wraps, and the names of the active and of all other adapters."""

    base: torch.nn.Module | None
    active: tuple[str, ...]
    others: frozenset[str]


def _tuner(module: torch.nn.Module) -> _Tuner | None:
    """Return the state that a PEFT layer reports, or None if the module is not a PEFT layer.

    After a merge, no adapter counts as active, because the weights of the wrapped layer then include the effect of
    the adapters.
    """
    utils = sys.modules.get("peft.tuners.tuners_utils")
    other = sys.modules.get("peft.utils.other")
    if utils is not None and isinstance(module, utils.BaseTunerLayer):
        base = module._modules.get("base_layer")
    elif other is not None and isinstance(module, other.AuxiliaryTrainingWrapper):
        base = module._modules.get("original_module")
    else:
        return None
    layer: Any = module
    given = layer._active_adapter
    named = [given] if isinstance(given, str) else list(given)
    off = layer._disable_adapters or layer.merged_adapters
    names: set[str] = set()
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        held: Any = getattr(layer, name, None)
        if isinstance(held, Mapping | torch.nn.ModuleDict | torch.nn.ParameterDict) or _is_buffers(held):
            names |= set(held.keys())
    names |= set(getattr(layer, "_adapters", ()))
    active = () if off else tuple(name for name in named if name in names)
    return _Tuner(base, active, frozenset(names - set(active)))


def _is_buffers(value: object) -> bool:
    """Return whether this is PEFT's dictionary of buffers, which is a module but not a mapping."""
    return isinstance(value, torch.nn.Module) and type(value).__name__ == "BufferDict"


def _held_by(value: object) -> dict[str, Any]:
    """Return an object's attributes, including attributes in ``__slots__``."""
    own = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if isinstance(name, str) and name not in ("__dict__", "__weakref__"):
                own[name] = getattr(value, name, None)
    return own


def _is_empty(value: object) -> bool:
    """Return whether the class of an object is written in Python and adds no C fields, which could hide state."""
    return type(value).__flags__ & (1 << 9) != 0 and type(value).__basicsize__ <= object.__basicsize__ + 16


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _cells(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            found.append(None)
    return found


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function's code refers to by name.

    Includes data, torch modules and functions. Also includes classes that no known package defines, and their
    instances. Leaves out everything else.
    """
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    kinds = (*_DATA, torch.nn.Module, FunctionType)
    return {name: value for name, value in found.items() if isinstance(value, kinds) or _is_own(value)}


def _is_own(value: Any) -> bool:
    """Return whether a class, or an object's class, is neither from a known package nor from Python itself."""
    package = _package(value if isinstance(value, type) else type(value))
    return not isinstance(value, ModuleType) and not (
        package in _KNOWN_CODE or package in sys.stdlib_module_names or package == "builtins"
    )


def _is_strange(called: FunctionType | type) -> bool:
    """Return whether a user has replaced a known function or class with this one.

    This is assumed if ``called`` belongs neither to a known package nor to the standard library.
    """
    return _package(called) not in _KNOWN_CODE and _package(called) not in sys.stdlib_module_names


def _names_called(function: FunctionType) -> tuple[str, ...]:
    """Return the names of the functions and classes in a function's module that its code refers to."""
    found = function.__globals__
    names = sorted(name for name in {*function.__code__.co_names} if name in found)
    return tuple(name for name in names if isinstance(found[name], FunctionType | type))


def _ids_of_called(found: dict[str, Any], names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple([id(found.get(name)) for name in names])


def _ids_of_class(kind: type) -> tuple[int, ...]:
    """Return the IDs of a class's attributes."""
    return tuple(map(id, vars(kind).values()))


def _cell_ids(function: FunctionType) -> tuple[object, ...]:
    with_it = [*_cells(function), function.__defaults__]
    if _package(function) not in _KNOWN_CODE:
        with_it.append(_globals_of(function))
    return (id(function.__code__), *map(_content_ids, with_it))


def _code_text(code: CodeType) -> str:
    """Return a digest of a function's code that is equal in every process with the same Python version."""
    constants = [_code_text(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return joined((code.co_code.hex(), *constants, *code.co_names, *code.co_freevars))


@functools.lru_cache(maxsize=1024)
def _source_of(kind: type) -> str:
    """Return a digest of the file that defines a class, or of the class's functions if there is no file."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    if path is not None and Path(path).is_file():
        return sha256(Path(path).read_bytes()).hexdigest()
    functions = [(name, each) for name, each in vars(kind).items() if isinstance(each, FunctionType)]
    return joined(text for name, each in sorted(functions) for text in (name, _code_text(each.__code__)))


def _has_address(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in a single block of memory."""
    return not tensor.is_meta and tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def _sample_on_card(tensors: list[tuple[ReferenceType[torch.Tensor], int]]) -> bytes:
    """Return a few bytes from the middle of each tensor whose address is unchanged.

    All these bytes are fetched from the GPU in a single copy.
    """
    parts = []
    for one, address in tensors:
        tensor = one()
        if tensor is None or (tensor := _bare(tensor)).data_ptr() != address:
            continue
        flat = tensor.detach()
        if flat.is_contiguous():
            flat = flat.view(-1)
        else:
            extent = 1 + sum((n - 1) * step for n, step in zip(flat.shape, flat.stride(), strict=True))
            flat = flat.as_strided((extent,), (1,))
        count = min(flat.numel(), max(1, _SAMPLE_NBYTES // tensor.element_size()))
        at = (flat.numel() - count) // 2
        parts.append(flat[at : at + count].view(torch.uint8))
    return bytes(torch.cat(parts).cpu().numpy()) if parts else b""
