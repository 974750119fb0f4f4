"""The demonstration: a real model answers questions over more documents than HBM and host memory hold.

``model`` prepares SmolLM2-135M-Instruct, ``documents`` finds long real texts, ``session`` asks questions with and
without the store, ``run`` is the play in two acts (the second in a new process), ``report`` shows and judges it,
``command`` is its typer command.
"""
