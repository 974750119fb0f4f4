"""Pages of one model as one portable file: its format, export and intake, and a closed store at either end.

The format is described for other programs in docs/archive.md. Whatever gives pages is a ``Source``, whatever takes
them a ``Sink``; both are called in threads, one call at a time.
"""
