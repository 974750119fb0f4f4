"""Collects the names that users write: the API with its signatures, the configuration, the command line, loggers."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.utils import get_params_from_function

import prefetch
import tierstore
from tests.adapters.vllm_stub import load_connector
from tests.golden.command import told
from tests.golden.trees import Tree
from tierstore.cli.app import app

_OURS = ("tierstore", "prefetch")
_MADE_BY_CALLS = ("Lease", "Session", "StoreConfig", "TierStore", "Watch")
"""Classes that users get from a call and never construct. The parameters of their constructors are not frozen."""

_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
_QUALIFIED = re.compile(
    r"\b(?:tierstore|prefetch|torch|collections|typing|pathlib|os|types)(?:\.\w+)*\.(\w+)"
)


def public_names(module: ModuleType) -> Tree:
    """Return a description of every name in ``__all__``."""
    return {name: _described(getattr(module, name)) for name in module.__all__}


def api() -> Tree:
    """Return a description of everything that ``tierstore`` and ``prefetch`` export."""
    return {"tierstore": public_names(tierstore), "prefetch": public_names(prefetch)}


def adapters() -> Tree:
    """Return a description of what users of engines and kernels import or name in their JSON files."""
    vllm = importlib.import_module("tierstore.adapters.vllm")
    load_connector()  # with stubs, because vLLM is in another environment
    attention = importlib.import_module("tierstore.gpu.attention.paged")
    kernels = ("PagedDecode", "PagedPrefill", "merge_states")
    return {
        "tierstore.adapters.vllm": public_names(vllm),
        "tierstore.adapters.vllm_tier": _classes_in("tierstore.adapters.vllm_tier"),
        "tierstore.adapters.sglang": _classes_in("tierstore.adapters.sglang.storage"),
        "tierstore.adapters.huggingface": public_names(
            importlib.import_module("tierstore.adapters.huggingface")
        ),
        "tierstore.gpu.attention.paged": {name: _described(getattr(attention, name)) for name in kernels},
    }


def _classes_in(module: str) -> Tree:
    """Return the public classes and methods of a module that only vLLM can import, as found in its source."""
    found: dict[str, Tree] = {}
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found[node.name] = {
                each.name: f"({ast.unparse(each.args)})"
                for each in methods
                if each.name == "__init__" or not each.name.startswith("_")
            }
    return found


def _described(value: object) -> Tree:
    if inspect.isclass(value):
        return _class(value)
    if callable(value) and inspect.isfunction(value):
        return _signature(value)
    supertype = getattr(value, "__supertype__", None)
    if supertype is not None:
        return f"NewType of {supertype.__name__}"
    return f"{type(value).__name__}: {value!r}"


def _class(value: type) -> Tree:
    """Return the public bases, members and signatures of a class, without members inherited from other libraries."""
    found: dict[str, Tree] = {"<bases>": ", ".join(_public_bases(value))}
    if issubclass(value, enum.Enum):
        return {**found, **{name: member.value for name, member in value.__members__.items()}}
    if value.__name__ not in _MADE_BY_CALLS and (
        not issubclass(value, BaseException) or "__init__" in vars(value)
    ):
        found["<call>"] = _signature(value)
    if dataclasses.is_dataclass(value):
        found["<fields>"] = {each.name: _plain(each.type) for each in dataclasses.fields(value)}
    for name, member in _members(value):
        if isinstance(member, property):
            found[name] = "property" + _signature(member.fget).removeprefix("(self)")
        elif isinstance(member, classmethod | staticmethod):
            found[name] = f"{type(member).__name__} {_signature(member.__func__)}"
        elif inspect.isfunction(member):
            found[name] = ("async " if inspect.iscoroutinefunction(member) else "") + _signature(member)
    return found


def _public_bases(value: type) -> Iterator[str]:
    for base in value.__mro__[1:]:
        ours = base.__module__.split(".")[0] in _OURS
        if base is not object and (not ours or base.__name__ in tierstore.__all__):
            yield base.__name__


def _members(value: type) -> Iterator[tuple[str, object]]:
    """Yield the public members of a class, and the methods that ``with`` calls."""
    seen = set()
    for base in value.__mro__:
        if base.__module__.split(".")[0] not in _OURS:
            continue
        for name, member in vars(base).items():
            if name not in seen and (not name.startswith("_") or name in ("__enter__", "__exit__")):
                seen.add(name)
                yield name, member


def _signature(value: Any) -> str:
    """Return the parameters with annotations and defaults, and the return type, as text."""
    signature = inspect.signature(value)
    parts = []
    before: object = None
    for each in signature.parameters.values():
        if each.kind == each.KEYWORD_ONLY and before not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parts.append("*")
        before = each.kind
        stars = _STARS.get(each.kind.name, "")
        annotation = "" if each.annotation is each.empty else f": {_plain(each.annotation)}"
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        parts.append(f"{stars}{each.name}{annotation}{default}")
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {_plain(returned)}"
    return f"({', '.join(parts)}){arrow}"


def _default(value: object) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def _plain(annotation: object) -> str:
    """Return an annotation without module names, because a class may move to another module."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return _QUALIFIED.sub(r"\1", text)


def config() -> Tree:
    """Return the configuration's schema without descriptions, and the effective values of a small configuration."""
    small = tierstore.load_config(
        {
            "page_size": "16",
            "hbm": {"capacity": "1GiB", "device": "cpu"},
            "host": {"capacity": "2GB"},
            "nvme": {"path": "/golden", "capacity": "1e9", "flush": "200ms", "timeout": 3, "readers": "4"},
            "prefetch": {},
        }
    )
    schema = told("config-schema")
    definitions = schema.pop("$defs")
    return {"schema": _without_prose(schema, definitions), "effective": small.effective()}


def _without_prose(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_without_prose(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _without_prose(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    prose = ("title", "description", "$schema")
    kept = {name: part for name, part in schema.items() if name not in prose or isinstance(part, dict)}
    found = {name: _without_prose(part, definitions) for name, part in kept.items()}
    return {**found, "enum": dict.fromkeys(found["enum"], "allowed")} if "enum" in found else found


def commands() -> Tree:
    """Return commands and subcommands with their arguments and options, without help texts."""
    return _group(typer.main.get_command(app))


def _group(command: Any) -> Tree:
    found: dict[str, Tree] = {"<options>": _options(command)}
    for name, sub in sorted(getattr(command, "commands", {}).items()):
        found[name] = _group(sub) if getattr(sub, "commands", None) else _options(sub)
    return found


def _options(command: Any) -> Tree:
    kinds = {} if command.callback is None else get_params_from_function(command.callback)
    found: dict[str, Tree] = {}
    for option in command.params:
        kind = kinds.get(option.name)
        limits = {
            limit: getattr(kind.default, limit)
            for limit in ("min", "max")
            if kind is not None and getattr(kind.default, limit, None) is not None
        }
        default = option.default
        found[" ".join([*option.opts, *option.secondary_opts])] = {
            "type": ""
            if kind is None
            else _plain(str(kind.annotation).removeprefix("<class '").removesuffix("'>")),
            "default": str(default) if isinstance(default, Path) else default,
            "required": option.required,
            "multiple": getattr(option, "multiple", False),
            "nargs": option.nargs,
            "metavar": option.metavar or "",
            **limits,
        }
    return found


def loggers() -> Tree:
    """Return the names of all loggers, as found in the sources.

    The modules are not imported, because some of them need a GPU or vLLM.
    """
    found: dict[str, Tree] = {}
    for package in (tierstore, prefetch):
        (root,) = map(Path, package.__path__)
        for path in sorted(root.rglob("*.py")):
            module = ".".join([package.__name__, *path.relative_to(root).with_suffix("").parts])
            for name in _loggers_of(path, module.removesuffix(".__init__")):
                found[name] = "logger"
    return found


def _loggers_of(path: Path, module: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "getLogger" not in text:  # parsing every module takes a second
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "getLogger":
            (argument,) = node.args
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            yield "".join(_text_of(part, module) for part in parts)


def _text_of(part: ast.expr, module: str) -> str:
    match part:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id="__name__") | ast.FormattedValue(value=ast.Name(id="__name__")):
            return module
    raise ValueError(f"{module}: cannot tell the logger's name from {ast.unparse(part)}")
