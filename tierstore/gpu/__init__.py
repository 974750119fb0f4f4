"""HBM: pages on a device, and their copies to and from host memory.

``device`` opens the ``pool`` and a copy engine. ``cuda_engine`` copies by DMA and kernels over ``routes``, in the order
of ``schedule``; ``cpu_engine`` copies on threads. ``quant`` encodes and decodes pages on the card. ``attention``
computes attention over the pages.
"""
