"""The demonstration: a real model answers questions over more documents than HBM and host memory hold.

``model`` prepares SmolLM2-135M-Instruct, ``documents`` finds long real texts, ``plan`` chooses questions and sizes,
``answers`` asks the model with and without the store, ``run`` is the demonstration in two processes, ``report``
judges and prints it, ``command`` is its typer command.
"""
