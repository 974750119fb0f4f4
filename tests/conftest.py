"""Every run of the tests draws the same examples: a red run is red again. `make soak` is for what is new each time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same-every-time", derandomize=True)
settings.load_profile("same-every-time")
