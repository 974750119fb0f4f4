"""Who may ask: tenants and their keys, of which only digests are kept.

A file of them is YAML, ``tenants: {name: [SHA-256 of a key in hex, ...]}``. A tenant's name is part of every key of its
pages, so that nobody's prompts can be told from how fast somebody else's are answered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

import yaml

from tierstore.errors import ConfigError

ALONE = ""
"""The one tenant of a server without keys."""

_ALLOWED = "tenants: {name: [the SHA-256 of a key, 64 hex digits, ...], ...}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Tenants:
    """Immutable; any thread. Without tenants, everybody is one."""

    def __init__(self, tenants: Mapping[str, list[str]] | None = None) -> None:
        """``tenants``: digests of keys by name; None: no keys are asked for. ConfigError for what is not such."""
        self._names = {} if tenants is None else _names(tenants)
        self.open = tenants is None

    @classmethod
    def load(cls, file: Path) -> Tenants:
        """Those of a file. ConfigError names what is wrong, and never shows a digest."""
        try:
            tree = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"--keys {file}: {error.strerror}; allowed: a readable YAML file") from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"--keys {file}: is not YAML with each key once; allowed: {_ALLOWED}"
            ) from error
        found = tree.get("tenants") if isinstance(tree, dict) and len(tree) == 1 else None
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"--keys {file}: names no tenants; allowed: {_ALLOWED}")
        try:
            return cls(found)
        except ConfigError as error:
            raise ConfigError(f"--keys {file}: {error}") from error

    def of(self, authorization: str | None) -> str | None:
        """The tenant whose key an ``Authorization`` header bears; None: nobody's."""
        if self.open:
            return ALONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, found = sha256(key.strip().encode()).hexdigest(), None
        for digest, name in self._names.items():  # all of them: time tells nothing of which it was
            if compare_digest(digest, given):
                found = name
        return found


class _Loader(yaml.BaseLoader):
    """Every scalar stays text, a digest of nothing but digits too; no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(names) > len(set(names)):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _names(tenants: Mapping[str, list[str]]) -> dict[str, str]:
    """Tenants by the digest of a key."""
    names: dict[str, str] = {}
    for name, digests in tenants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r:.80} is no tenant's name; allowed: 1 to 64 of A-Z a-z 0-9 . _ -")
        if not isinstance(digests, list) or not digests:
            raise ConfigError(f"tenant {name} has no list of keys; allowed: {_ALLOWED}")
        for digest in digests:
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
                raise ConfigError(f"tenant {name} has what is no SHA-256 in hex; allowed: {_ALLOWED}")
            if digest.lower() in names:
                raise ConfigError(
                    f"tenant {name} has a key that {names[digest.lower()]} has; allowed: each once"
                )
            names[digest.lower()] = name
    return names
