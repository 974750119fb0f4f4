"""Export pages of one model to a portable file, and import them into another store.

docs/archive.md describes the format for other programs. A ``Source`` gives pages and a ``Sink`` takes them; both are
called in threads, one call at a time.
"""
