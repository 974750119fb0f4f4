"""Reads the interfaces of an engine's source code without importing it, and compares them with TierStore's classes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.cli.doctor import Check
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from griffe import Alias, Class, Function, Module, Object, Parameter


def package_of(name: str, title: str, source: Path | None) -> Path:
    """Return the folder of the package ``name``: the installed one, or the one in the folder ``source``.

    ``title`` is the engine's name for people.

    Raises:
        ConfigError: There is no such package.
    """
    if source is not None:
        folder = source.expanduser().absolute()
        for package in (folder, folder / name):
            if package.name == name and package.is_dir():
                return package
        raise ConfigError(
            f"--source {source}: the folder does not contain the {name} package; give the folder that contains it"
        )
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"{title} is not installed in this Python: install it, or pass an unpacked copy with --source FOLDER"
        )
    return Path(found.submodule_search_locations[0])


def hooks(engine: str, name: str, theirs: Class | None, ours: Class, where: str) -> Iterator[Check]:
    """Check that TierStore's class ``ours`` has the methods that the engine calls, with parameters that fit.

    Args:
        engine: The engine's name for people.
        name: What the class implements, for the output.
        theirs: The engine's base class, or None if this version does not have it.
        ours: TierStore's class.
        where: The file of the engine's base class, with the package's name.
    """
    if theirs is None:
        yield Check(f"{name}'s hooks", "not found", "fail", f"{where} does not define them")
        return
    needed = (hook for hook, member in theirs.members.items() if "abstractmethod" in member.labels)
    missing = sorted(hook for hook in needed if hook not in ours.members)
    if missing:
        yield Check(
            f"{name}'s hooks",
            ", ".join(missing),
            "fail",
            f"this {engine} requires them, but TierStore does not define them",
        )
    wrong = [f"{hook}: {why}" for hook, why in sorted(_mismatches(engine, theirs, ours).items())]
    if wrong:
        yield Check(
            f"{name}'s signatures", "; ".join(wrong), "fail", f"this {engine} calls them with other arguments"
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
        yield Check(f"{name}'s hooks", f"{number}, called by this {engine} as TierStore expects")


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


def _mismatches(engine: str, theirs: Class, ours: Class) -> dict[str, str]:
    """Return the methods of ``ours`` that do not accept all calls that ``theirs`` accepts, each with the reason.

    griffe compares two versions of the same class. Here, ``theirs`` is the old version and ``ours`` the new one.
    """
    import griffe

    found: dict[str, str] = {}
    for breakage in griffe.find_breaking_changes(theirs, ours):
        name, old, new = breakage.obj.name, breakage.old_value, breakage.new_value
        if breakage.kind is griffe.BreakageKind.OBJECT_CHANGED_KIND:
            found[name] = (
                f"{_kind(theirs.members[name])} in {engine}, {_kind(ours.members[name])} in TierStore"
            )
        elif breakage.kind.name in _MISMATCHES and not _is_harmless(old, new, ours.functions[name]):
            found.setdefault(name, _MISMATCHES[breakage.kind.name].format((old or new).name))
    for name in theirs.functions.keys() & ours.functions.keys():
        kinds = _kind(theirs.functions[name]), _kind(ours.functions[name])
        if kinds[0] != kinds[1]:
            found[name] = f"{kinds[0]} in {engine}, {kinds[1]} in TierStore"
    return found


def _is_harmless(theirs: Parameter | None, ours: Parameter | None, method: Function) -> bool:
    """Return whether no call by the engine fails because of this difference between two parameters.

    ``theirs`` is None if only TierStore's method has the parameter, and ``ours`` is None if only the engine's has it.
    """
    if theirs is None:  # a keyword-only parameter of ours gets its value from the configuration
        return ours is not None and ours.kind is not None and ours.kind.name == "keyword_only"
    variadic = theirs.kind is not None and theirs.kind.name in ("var_positional", "var_keyword")
    return variadic and any(parameter.kind is theirs.kind for parameter in method.parameters)


def _kind(member: Object | Alias) -> str:
    kinds = ("property", "classmethod", "staticmethod")
    return next((f"a {kind}" for kind in kinds if kind in member.labels), "a method")


def module(path: Path) -> Module:
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


def names(path: Path, name: str) -> set[str]:
    """Return the names of the attributes of class ``name`` in the file ``path``, except properties.

    Return an empty set if there is no such file or class.
    """
    found = module(path).classes.get(name)
    attributes = {} if found is None else found.attributes
    return {name for name, attribute in attributes.items() if "property" not in attribute.labels}


def version_of(package: Path) -> str:
    """Return the version in the package's ``_version.py``, or "" if there is none."""
    found = module(package / "_version.py").attributes.get("__version__")
    return str(found.value).strip("'\"") if found is not None and found.value is not None else ""
