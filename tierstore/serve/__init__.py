"""The server: answers over long prompts and documents, over HTTP, with K/V in the store's tiers.

Bottom up: ``asking`` (what is asked and told), ``reader`` (the model and its tokenizer), ``text`` (tokens as text, one
by one), ``sampling`` (the next token), ``running`` (one request under way), ``queue`` (who starts next), ``figures``
(what is counted), ``engine`` (the thread that computes); then what HTTP needs.
"""
