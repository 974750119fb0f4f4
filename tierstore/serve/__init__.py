"""HTTP server: answers questions about long prompts and documents, with K/V kept in the store's tiers.

Engine modules: ``request`` defines the plain data types of requests and events, ``model`` loads the model and
its tokenizer, ``sampling`` chooses and decodes tokens, ``metrics`` defines the Prometheus metrics, and
``engine`` contains the thread that runs the model. HTTP modules: ``documents`` stores texts and lets the engine
read them, ``auth`` checks keys and host names, ``schemas`` validates requests, ``errors`` converts exceptions
to responses, ``stream`` sends answers, ``routes`` defines the endpoints, and ``app`` builds the application.
"""
