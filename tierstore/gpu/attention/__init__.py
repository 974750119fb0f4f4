"""Attention over pages in place: planned once per step, run once per layer. See docs/attention.md."""

from __future__ import annotations
