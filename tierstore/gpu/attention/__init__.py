"""Attention over pages in place: planned once for each step, run for every layer. See docs/attention.md."""

from __future__ import annotations
