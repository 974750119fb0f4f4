"""Export of one model's pages from a store to a portable file (an archive), and import into another store.

An export reads pages from a ``Source``, and an import stores them in a ``Sink``. Their methods block, so they are
called in threads. docs/archive.md describes the file format, so that other programs can read it.
"""
