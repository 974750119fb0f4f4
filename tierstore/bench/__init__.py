"""Benchmarks that compare measured values with a goal, or with a ceiling measured in the same process."""

from __future__ import annotations
