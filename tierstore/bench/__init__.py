"""Benchmarks: each prints what it measured against a goal or against a ceiling measured in the same process."""

from __future__ import annotations
