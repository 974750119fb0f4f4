"""The HTTP server: answers over long prompts and documents, with K/V in the store's tiers.

The engine: ``request`` has the plain values of requests and events, ``model`` the model and its tokenizer, ``sampling``
chooses and decodes tokens, ``metrics`` counts, ``engine`` is the thread that computes. HTTP: ``documents`` stores texts
and has them read into the store, ``auth`` checks keys and hosts, ``schemas`` defines requests, ``errors`` maps errors
to responses, ``stream`` sends answers, ``routes`` has the endpoints, ``app`` puts everything together.
"""
