"""The server: answers over long prompts and documents, over HTTP, with K/V in the store's tiers.

Bottom up, the engine: ``request`` holds the plain values that go to it and come from it, ``model`` the model and its
tokenizer, ``sampling`` chooses the next token and spells it, ``metrics`` counts, ``engine`` is the thread that
computes. Then HTTP: ``documents`` keeps texts and reads them into the store, ``auth`` checks who asks, ``schemas`` are
the requests, ``errors`` the refusals, ``stream`` the answers, ``routes`` the endpoints, ``app`` is all of it.
"""
