"""A demonstration: a real model answers questions about more documents than fit into HBM and host memory.

Modules: ``model`` downloads and converts models, ``documents`` finds long real texts, ``plan`` chooses questions
and tier sizes, ``answers`` asks the model with and without the store, ``run`` runs the demonstration in two
processes, ``report`` evaluates and prints the results, and ``command`` defines the command.
"""
