"""``vllm-check``: what the vLLM that is installed offers to our connector and our tier.

The checks read its source and import nothing of it. So a build for cards can be looked at where there is no card, and
a build that does not start too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.doctor import Check, tell
from tierstore.cli.output import Json, refusals
from tierstore.errors import ConfigError


def vllm_check(
    source: Annotated[
        Path | None,
        typer.Option(help="A folder that holds the package vllm, unpacked; default: what is installed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what the installed vLLM supports, without starting it. Exit code 1 if the connector would not work."""
    with refusals(as_json):
        package = _package(source)
        checks = list(every_check(package))
    tell(checks, as_json, package=str(package))


def _package(source: Path | None) -> Path:
    if source is not None:
        folder = source.expanduser().absolute()
        for package in (folder, folder / "vllm"):
            if package.name == "vllm" and package.is_dir():
                return package
        raise ConfigError(f"--source {source}: holds no folder vllm; allowed: one that does")
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("vLLM is not installed here; allowed: a Python that has it, or --source FOLDER")
    return Path(found.submodule_search_locations[0])


Method = ast.FunctionDef | ast.AsyncFunctionDef

_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_OURS = Path(__file__).parents[1] / "adapters"


def every_check(package: Path) -> Iterator[Check]:
    """All checks of the vLLM in ``package`` (the folder ``vllm`` itself), in the order they are shown."""
    yield version(package)
    connector = _classes(package / _CONNECTOR)
    ours = _classes(_OURS / "vllm" / "connector.py")["TierStoreConnector"]
    yield from hooks("connector", connector.get("KVConnectorBase_V1"), ours, _CONNECTOR)
    yield from groups(connector, ours)
    yield from settings(package)
    yield layouts(package, connector.get("KVConnectorBase_V1", {}))
    yield hit_sources(package)
    yield from secondary_tier(package)


def version(package: Path) -> Check:
    """Whether it is one of those that were tested."""
    from tierstore.adapters.vllm.compat import NEWEST, OLDEST

    found = _version(package)
    tested = f"tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}"
    numbers = found.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return Check("vLLM", found or "unknown", "note", tested)
    at = (int(numbers[0]), int(numbers[1]))
    if at < OLDEST:
        return Check("vLLM", found, "fail", tested)
    return Check("vLLM", found, "ok" if at <= NEWEST else "note", "" if at <= NEWEST else tested)


def hooks(
    name: str, theirs: dict[str, Method] | None, ours: dict[str, Method], where: str
) -> Iterator[Check]:
    """Whether what vLLM calls is there with us, and takes what vLLM passes."""
    if theirs is None:
        yield Check(f"{name}'s hooks", "not found", "fail", f"vllm/{where} does not define them")
        return
    missing = sorted(hook for hook, method in theirs.items() if _is_abstract(method) and hook not in ours)
    if missing:
        yield Check(
            f"{name}'s hooks", ", ".join(missing), "fail", "this vLLM needs them, and they are not ours"
        )
    shared = [hook for hook in ours if hook in theirs and (not hook.startswith("_") or hook == "__init__")]
    wrong = [f"{hook}: {why}" for hook in shared if (why := _refuses(ours[hook], theirs[hook]))]
    if wrong:
        yield Check(f"{name}'s signatures", "; ".join(wrong), "fail", "this vLLM calls them otherwise")
    if not missing and not wrong:
        yield Check(f"{name}'s hooks", f"{len(shared)} of ours, each as this vLLM calls it")


def groups(connector: dict[str, dict[str, Method]], ours: dict[str, Method]) -> Iterator[Check]:
    """Whether layers with windows keep groups of their own."""
    name, theirs = "hybrid KV cache manager", connector.get("SupportsHMA")
    if theirs is None:
        why = f"vllm/{_CONNECTOR} names the connector's interface"
        yield Check(name, "no SupportsHMA", "fail", why)
    elif "KVConnectorTransferResults" not in connector:
        why = "full attention and windows share a group: a failed load of several cannot be told"
        yield Check(name, "off with TierStore", "note", why)
    else:
        yield Check(name, "groups of their own for windows")
        yield from hooks("SupportsHMA", theirs, ours, _CONNECTOR)


def settings(package: Path) -> Iterator[Check]:
    """The settings of the line that turns TierStore on."""
    fields = _fields(package / "config" / "kv_transfer.py", "KVTransferConfig")
    for field, use in (
        ("kv_connector_module_path", "the connector cannot be named"),
        ("kv_load_failure_policy", "a page that cannot be loaded ends its request with an error"),
    ):
        yield Check(field, "there") if field in fields else Check(field, "missing", "fail", use)


def layouts(package: Path, connector: dict[str, Method]) -> Check:
    """How the layers of a block may lie; all of them side by side is one copy a block."""
    names = _fields(package / "v1" / "kv_cache_layout.py", "KVCacheLayout")
    if "BLHNC" in names:
        return Check("KV layouts", ", ".join(sorted(names)))
    if "prefer_cross_layer_blocks" in connector:
        return Check("KV layouts", "all layers of a block in one tensor, where attention allows")
    why = "a block is copied layer by layer"
    return Check("KV layouts", ", ".join(sorted(names)) or "a tensor for each layer", "note", why)


def hit_sources(package: Path) -> Check:
    """Whether vLLM's metrics tell hits in memory from hits on disk."""
    names = _fields(package / "v1" / "metrics" / "cache_hit_source.py", "CacheHitSource")
    if {"HOST", "DISK"} <= names:
        return Check("hit sources", ", ".join(sorted(names)))
    return Check("hit sources", "none", "note", "vLLM's metrics count all hits outside HBM as one")


def secondary_tier(package: Path) -> Iterator[Check]:
    """Whether our tier fits below vLLM's own CPU tier."""
    where = "v1/kv_offload/tiering/base.py"
    factory = _functions(package / "v1" / "kv_offload" / "tiering" / "factory.py")
    if "module_path" not in ast.dump(factory.get("get_tier_class", ast.Module([], []))):
        yield Check("tier below vLLM's", "none", "note", "this vLLM knows no tiers of others; 0.32 does")
        return
    theirs = _classes(package / where).get("SecondaryTierManager")
    yield from hooks("tier", theirs, _classes(_OURS / "vllm_tier.py")["TierStoreTier"], where)


def _refuses(ours: Method, theirs: Method) -> str:
    """Why a call that fits ``theirs`` may not fit ``ours``; empty if it always does."""
    kinds = _kind(ours), _kind(theirs)
    if kinds[0] != kinds[1]:
        return f"a {kinds[1]} there, a {kinds[0]} with us"
    mine, needed = _positional(ours), _positional(theirs)
    by_name = {*mine, *(arg.arg for arg in ours.args.kwonlyargs)}
    for place, name in enumerate(needed):
        if place < len(mine) and mine[place] == name:
            continue
        if ours.args.vararg is None or ours.args.kwarg is None:
            return f"parameter {name}"
    named = [arg.arg for arg in theirs.args.kwonlyargs]
    lost = [name for name in named if name not in by_name and ours.args.kwarg is None]
    if lost:
        return f"parameter {lost[0]}"
    required = mine[: len(mine) - len(ours.args.defaults)]
    if len(required) > len(needed):
        return f"we need {required[len(needed)]}"
    return "**kwargs" if theirs.args.kwarg is not None and ours.args.kwarg is None else ""


def _positional(method: Method) -> list[str]:
    names = [arg.arg for arg in (*method.args.posonlyargs, *method.args.args)]
    return names if _kind(method) == "staticmethod" else names[1:]


def _kind(method: Method) -> str:
    names = {node.id for node in method.decorator_list if isinstance(node, ast.Name)}
    return next((kind for kind in ("property", "classmethod", "staticmethod") if kind in names), "method")


def _is_abstract(method: Method) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "abstractmethod" for node in method.decorator_list)


def _classes(path: Path) -> dict[str, dict[str, Method]]:
    """Methods by class, as the source has them; nothing where there is no such file."""
    return {
        node.name: {item.name: item for item in node.body if isinstance(item, Method)}
        for node in _tree(path).body
        if isinstance(node, ast.ClassDef)
    }


def _functions(path: Path) -> dict[str, Method]:
    return {node.name: node for node in ast.walk(_tree(path)) if isinstance(node, Method)}


def _fields(path: Path, name: str) -> set[str]:
    """Names that the body of a class gives a value or a type."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for item in node.body:
                targets = item.targets if isinstance(item, ast.Assign) else []
                targets += [item.target] if isinstance(item, ast.AnnAssign) else []
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _version(package: Path) -> str:
    for node in _tree(package / "_version.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__version__" in names or "version" in names:
                return str(node.value.value)
    return ""


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
