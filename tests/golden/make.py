"""``python -m tests.golden.make [NAME ...]``: freeze what the code in this checkout makes, all of it or what is named.

Run it only when a format, a key, a name or a signature is changed on purpose, or an addition is meant to stay, and say
so in the commit: these files are what the next version is held to. Without names everything is made anew, directories
and archives included; those of an older version are then no longer tested.
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
"""What is compared with the present code, by name; each is given an empty folder."""


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
