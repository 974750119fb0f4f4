"""Freezes what the code in this checkout produces: ``python -m tests.golden.make [NAME ...]``.

Run it only if you have changed a format, a key, a name or a signature on purpose, or added one that will stay. Say so
in the commit message, because the next version is compared with these files. Without names, the program makes
everything again, including directories and archives; those of an older version are then no longer tested.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.golden import directories, figures, identity, names, outputs
from tests.golden.trees import Tree, save

TREES: dict[str, Callable[[Path], Tree]] = {
    "adapters": lambda _: names.adapters(),
    "api": lambda _: names.api(),
    "commands": lambda _: names.commands(),
    "config": lambda _: names.config(),
    "exit-codes": outputs.exit_codes,
    "fingerprints": lambda _: identity.fingerprints(),
    "keys": lambda _: identity.keys(),
    "loggers": lambda _: names.loggers(),
    "loss-classes": identity.loss_classes,
    "metrics": figures.metrics,
    "outputs": outputs.outputs,
    "results": figures.results,
    "server": lambda _: figures.server(),
    "stats": figures.stats,
    **{f"bench-{name}": partial(outputs.bench, name) for name in outputs.BENCH},
}
"""Functions that produce a tree to compare with the frozen one, by name. Each gets an empty folder."""


def main(wanted: list[str]) -> None:
    cases = {case.name: case for case in directories.CASES}
    strange = set(wanted) - TREES.keys() - cases.keys()
    if strange:
        sys.exit(f"unknown: {', '.join(sorted(strange))}; known: {', '.join([*TREES, *cases])}")
    for name in wanted or [*TREES, *cases]:
        with tempfile.TemporaryDirectory() as scratch:
            make = TREES.get(name)
            save(name, directories.make(cases[name], Path(scratch)) if make is None else make(Path(scratch)))


if __name__ == "__main__":
    main(sys.argv[1:])
