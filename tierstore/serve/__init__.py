"""The server: answers over long prompts and documents, over HTTP, with K/V in the store's tiers.

Bottom up: ``asking`` (what is asked and told), ``reader`` (the model and its tokenizer), ``text`` (tokens as text, one
by one), ``sampling`` (the next token), ``running`` (one request under way), ``queue`` (who starts next), ``figures``
(what is counted), ``engine`` (the thread that computes). Then what HTTP needs: ``library``
(documents' texts), ``reading`` (their way into the store), ``tenants`` (who asks), ``schemas`` (what may be asked),
``faults`` (what goes wrong), ``listening`` (an engine's events in an event loop), ``shapes`` and ``answers`` (what is
answered), ``completions`` and ``questions`` (endpoints), ``gate`` (what every request passes), ``app`` (all of it).
"""
