"""The ``vllm-check`` command, which checks whether TierStore's connector and tier work with the installed vLLM.

The checks read vLLM's source code without importing it. They therefore also work for a CUDA build on a machine
without a GPU, and for an installation that cannot be imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli.doctor import Check, tell
from tierstore.cli.output import Json, refusals
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from griffe import Alias, Class, Function, Module, Object, Parameter


def vllm_check(
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with an unpacked vllm package. Default: the installed one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the installed vLLM supports, without starting it.

    Exit code 1 if the connector would not work.
    """
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
        raise ConfigError(
            f"--source {source}: the folder does not contain the vllm package; give the folder that contains it"
        )
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "vLLM is not installed in this Python: install it, or pass an unpacked copy with --source FOLDER"
        )
    return Path(found.submodule_search_locations[0])


_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_OURS = Path(__file__).parents[1] / "adapters"


def every_check(package: Path) -> Iterator[Check]:
    """Yield all checks in display order. ``package`` is the folder of the package ``vllm``."""
    yield version(package)
    connector = _module(package / _CONNECTOR).classes
    ours = _module(_OURS / "vllm" / "connector.py").classes["TierStoreConnector"]
    yield from hooks("connector", connector.get("KVConnectorBase_V1"), ours, _CONNECTOR)
    yield from groups(connector, ours)
    yield from settings(package)
    yield layouts(package, connector.get("KVConnectorBase_V1"))
    yield hit_sources(package)
    yield from secondary_tier(package)


def version(package: Path) -> Check:
    """Check whether TierStore has been tested with this version of vLLM."""
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


def hooks(name: str, theirs: Class | None, ours: Class, where: str) -> Iterator[Check]:
    """Check that TierStore's class ``ours`` has the methods that vLLM calls, with parameters that fit.

    Args:
        name: What the class implements, for the output.
        theirs: vLLM's base class, or None if this vLLM does not have it.
        ours: TierStore's class.
        where: The file of vLLM's base class, relative to the package.
    """
    if theirs is None:
        yield Check(f"{name}'s hooks", "not found", "fail", f"vllm/{where} does not define them")
        return
    needed = (hook for hook, member in theirs.members.items() if "abstractmethod" in member.labels)
    missing = sorted(hook for hook in needed if hook not in ours.members)
    if missing:
        yield Check(
            f"{name}'s hooks",
            ", ".join(missing),
            "fail",
            "this vLLM requires them, but TierStore does not define them",
        )
    wrong = [f"{hook}: {why}" for hook, why in sorted(_mismatches(theirs, ours).items())]
    if wrong:
        yield Check(
            f"{name}'s signatures", "; ".join(wrong), "fail", "this vLLM calls them with other arguments"
        )
    if not missing and not wrong:
        shared = [
            hook
            for hook, member in ours.members.items()
            if hook in theirs.members
            and member.is_public
            and (member.is_function or "property" in member.labels)
        ]
        number = "1 hook" if len(shared) == 1 else f"{len(shared)} hooks"
        yield Check(f"{name}'s hooks", f"{number}, called by this vLLM as TierStore expects")


def groups(connector: Mapping[str, Class], ours: Class) -> Iterator[Check]:
    """Check whether this vLLM can put layers with sliding windows into separate KV cache groups."""
    name, theirs = "hybrid KV cache manager", connector.get("SupportsHMA")
    if theirs is None:
        why = f"vllm/{_CONNECTOR} does not define the connector's interface"
        yield Check(name, "no SupportsHMA", "fail", why)
    elif "KVConnectorTransferResults" not in connector:
        why = (
            "layers with full attention and with windows share a group, because this vLLM cannot report for "
            "which group a load failed"
        )
        yield Check(name, "off with TierStore", "note", why)
    else:
        yield Check(name, "windows have separate groups")
        yield from hooks("SupportsHMA", theirs, ours, _CONNECTOR)


def settings(package: Path) -> Iterator[Check]:
    """Check that vLLM has the settings that the connector needs."""
    fields = _names(package / "config" / "kv_transfer.py", "KVTransferConfig")
    for field, use in (
        ("kv_connector_module_path", "the connector cannot be chosen"),
        ("kv_load_failure_policy", "a request ends with an error if one of its pages cannot be loaded"),
    ):
        yield Check(field, "present") if field in fields else Check(field, "missing", "fail", use)


def layouts(package: Path, connector: Class | None) -> Check:
    """Check whether vLLM can place all layers of a block next to each other, so that one copy moves a block."""
    names = _names(package / "v1" / "kv_cache_layout.py", "KVCacheLayout")
    if "BLHNC" in names:
        return Check("KV layouts", ", ".join(sorted(names)))
    if connector is not None and "prefer_cross_layer_blocks" in connector.members:
        return Check("KV layouts", "all layers of a block in one tensor, if the attention backend allows it")
    why = "a block is copied layer by layer"
    return Check("KV layouts", ", ".join(sorted(names)) or "a tensor per layer", "note", why)


def hit_sources(package: Path) -> Check:
    """Check whether vLLM's metrics distinguish cache hits in host memory from cache hits on disk."""
    names = _names(package / "v1" / "metrics" / "cache_hit_source.py", "CacheHitSource")
    if {"HOST", "DISK"} <= names:
        return Check("hit sources", ", ".join(sorted(names)))
    return Check("hit sources", "none", "note", "vLLM's metrics count all hits outside HBM as one source")


def secondary_tier(package: Path) -> Iterator[Check]:
    """Check whether this vLLM can use TierStore as a tier below its own CPU tier."""
    where = "v1/kv_offload/tiering/base.py"
    factories = _module(package / "v1" / "kv_offload" / "tiering" / "factory.py").classes.values()
    getters = [found for factory in factories if (found := factory.functions.get("get_tier_class"))]
    if not any("module_path" in getter.source for getter in getters):
        yield Check(
            "tier below vLLM's",
            "none",
            "note",
            "this vLLM does not load tiers from other packages; vLLM 0.32 does",
        )
        return
    theirs = _module(package / where).classes.get("SecondaryTierManager")
    yield from hooks("tier", theirs, _module(_OURS / "vllm_tier.py").classes["TierStoreTier"], where)


_MISMATCHES = {
    "PARAMETER_REMOVED": "TierStore does not accept {}",
    "PARAMETER_MOVED": "{} is at another position",
    "PARAMETER_CHANGED_KIND": "{} is passed in another way",
    "PARAMETER_CHANGED_REQUIRED": "TierStore requires {}",
    "PARAMETER_ADDED_REQUIRED": "TierStore requires {}",
}
"""Messages for the differences that make a call fail, by griffe's name for the kind of difference.

Different defaults and annotations are not listed, because they do not make a call fail.
"""


def _mismatches(theirs: Class, ours: Class) -> dict[str, str]:
    """Return the methods of ``ours`` that do not accept all calls that ``theirs`` accepts, each with the reason.

    griffe compares two versions of the same class. Here, ``theirs`` is the old version and ``ours`` the new one.
    """
    import griffe

    found: dict[str, str] = {}
    for breakage in griffe.find_breaking_changes(theirs, ours):
        name, old, new = breakage.obj.name, breakage.old_value, breakage.new_value
        if breakage.kind is griffe.BreakageKind.OBJECT_CHANGED_KIND:
            found[name] = f"{_kind(theirs.members[name])} in vLLM, {_kind(ours.members[name])} in TierStore"
        elif breakage.kind.name in _MISMATCHES and not _is_harmless(old, new, ours.functions[name]):
            found.setdefault(name, _MISMATCHES[breakage.kind.name].format((old or new).name))
    for name in theirs.functions.keys() & ours.functions.keys():
        kinds = _kind(theirs.functions[name]), _kind(ours.functions[name])
        if kinds[0] != kinds[1]:
            found[name] = f"{kinds[0]} in vLLM, {kinds[1]} in TierStore"
    return found


def _is_harmless(theirs: Parameter | None, ours: Parameter | None, method: Function) -> bool:
    """Return whether no call by vLLM fails because of this difference between two parameters.

    ``theirs`` is None if only TierStore's method has the parameter, and ``ours`` is None if only vLLM's has it.
    """
    if theirs is None:  # a keyword-only parameter of ours gets its value from the configuration
        return ours is not None and ours.kind is not None and ours.kind.name == "keyword_only"
    variadic = theirs.kind is not None and theirs.kind.name in ("var_positional", "var_keyword")
    return variadic and any(parameter.kind is theirs.kind for parameter in method.parameters)


def _kind(member: Object | Alias) -> str:
    kinds = ("property", "classmethod", "staticmethod")
    return next((f"a {kind}" for kind in kinds if kind in member.labels), "a method")


def _module(path: Path) -> Module:
    """Parse a Python file without importing it.

    Return an empty module if the file cannot be read or parsed.
    """
    import griffe

    try:
        text = path.read_text(encoding="utf-8")
        lines = griffe.LinesCollection()
        lines[path] = text.splitlines()
        return griffe.visit(path.stem, filepath=path, code=text, lines_collection=lines)
    except (OSError, SyntaxError, ValueError):
        return griffe.Module(path.stem, filepath=path)


def _names(path: Path, name: str) -> set[str]:
    """Return the names of the attributes of class ``name`` in the file ``path``, except properties.

    Return an empty set if there is no such file or class.
    """
    found = _module(path).classes.get(name)
    attributes = {} if found is None else found.attributes
    return {name for name, attribute in attributes.items() if "property" not in attribute.labels}


def _version(package: Path) -> str:
    found = _module(package / "_version.py").attributes.get("__version__")
    return str(found.value).strip("'\"") if found is not None and found.value is not None else ""


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
