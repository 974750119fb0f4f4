"""The names that TierStore uses from its top-level package ``prefetch``.

TierStore's modules import them only from here. In some programs, the user's own ``prefetch.py`` or another
distribution's package of this name comes first on ``sys.path``. This module then raises an error that names
the other file, before any code of that file runs.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from tierstore.errors import ConfigError


class ShadowedError(ConfigError, ImportError):
    """``import prefetch`` would import another module instead of TierStore's package."""


def _require_ours() -> None:
    """Raise ShadowedError unless ``import prefetch`` finds the package next to ``tierstore``."""
    try:
        spec = find_spec("prefetch")
    except ValueError:  # a module without a spec was added to sys.modules by hand
        return
    if spec is None or spec.origin is None:
        return  # the import below raises an error
    ours = os.path.join(
        os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "prefetch", "__init__.py"
    )
    if os.path.realpath(spec.origin) != ours:
        raise ShadowedError(
            f"TierStore needs its own package prefetch ({os.path.dirname(ours)}), but {spec.origin} has the same name "
            "and is found first; rename that file, remove its folder from sys.path or PYTHONPATH, or start Python in "
            "another folder"
        )


_require_ours()

from prefetch import Compute, Prefetcher, Sessions, Waiting, ahead  # noqa: E402  checked first
from prefetch.planner import PIECE_PAGES, plan  # noqa: E402
from prefetch.promotions import PromotionQueue  # noqa: E402
from prefetch.sources import OVERDUE_S, Pauses  # noqa: E402
from prefetch.types import Machine, Want  # noqa: E402

__all__ = [
    "OVERDUE_S",
    "PIECE_PAGES",
    "Compute",
    "Machine",
    "Pauses",
    "Prefetcher",
    "PromotionQueue",
    "Sessions",
    "Waiting",
    "Want",
    "ahead",
    "plan",
]
