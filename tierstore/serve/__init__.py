"""The server: answers over long prompts and documents, over HTTP, with K/V in the store's tiers.

Bottom up: ``asking`` (what is asked and told), ``reader`` (the model and its tokenizer), ``text`` (tokens as text, piece by
piece), ``sampling``, ``running`` (one request under way), ``engine`` (the thread that computes), ``library`` (documents),
``tenants``, ``schemas`` and ``app`` (HTTP).
"""
