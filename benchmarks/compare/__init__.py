"""Real models answer over the store as they do without it: every case of ``generate``, token by token.

``subject`` is a model in float32 with and without the store, and what it is asked; ``comparison`` asks one request both
ways and counts what the model computes; ``cases`` are all of them; ``verdicts`` judges the answers and shows the table;
``command`` runs them for ``tierstore compare``.
"""
