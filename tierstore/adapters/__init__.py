"""Adapters for inference engines.

An adapter translates an engine's requests into calls to the store. The store alone decides which pages to
keep, and in which tier.
"""
