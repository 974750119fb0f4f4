"""The HBM tier: stores pages in device memory and copies them to and from host memory.

``device`` is the entry point: it opens the pool and the copy engine. The pool is either the store's own
(``pool``) or an engine's tensors (``engine_pages``).

On a GPU, ``cuda_copy_engine`` copies pages. It can load them one layer group at a time (``layer_groups``), in
an order that ``copy_queue`` decides. ``copy_routes`` selects how the bytes are transferred: by DMA
(``driver``), by ``copy_kernel``, or through ``slabs``. On a CPU, ``cpu_copy_engine`` copies on threads.

``addresses`` computes the addresses and strides of pages. ``quant`` encodes and decodes pages on the GPU.
``attention`` computes attention over pages in place.
"""
