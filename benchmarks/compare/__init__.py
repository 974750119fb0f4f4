"""Real models answer over the store as they do without it: every case of ``generate``, token by token.

``subject`` is a model in float32 with and without the store, ``prompts`` cuts real texts, ``request`` is what is asked,
``feeding`` counts what a model computes, ``judging`` holds answers and counts against each other, ``running`` asks one
request both ways, ``cases`` are all of them, ``report`` shows what came out.
"""
