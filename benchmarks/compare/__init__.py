"""``tierstore compare``: checks that real models give the same answers with and without the store, token by token.

All modes of ``generate`` are compared. ``subject`` runs a model in float32 with and without the store, and defines the
requests. ``comparison`` makes one request both ways and counts the tokens that the model computes. ``cases`` contains
all cases. ``verdicts`` compares the answers and prints the table. ``command`` runs everything.
"""
