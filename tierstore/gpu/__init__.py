"""HBM: pages on a device, and their copies to and from host memory.

``device`` opens the pool (``pool`` for the store's own pages, ``engine_pages`` for an engine's) and a copy
engine. ``cuda_copy_engine`` copies in the order of ``copy_queue``, layer group by layer group
(``layer_groups``), over ``copy_routes``: by DMA (``driver``), by ``copy_kernel``, or through ``slabs``.
``cpu_copy_engine`` copies on threads. ``addresses`` has the addresses and strides of pages. ``quant`` encodes
and decodes pages on the card. ``attention`` computes attention over the pages.
"""
