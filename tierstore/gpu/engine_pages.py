"""An engine's own KV tensors as the slots of the HBM tier: their layout, and access in place."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.errors import ConfigError
from tierstore.gpu.pool import torch_dtype
from tierstore.page import PageSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.layer_groups import Part
    from tierstore.page import PageLayout


@dataclass(frozen=True)
class EnginePages:
    """An engine's own tensors for one KV group, and their layout.

    Attributes:
        tensors: One tensor if ``layout`` has an L, else one tensor per layer, in layer order. With "BX", one
            tensor per run (see below). Strides are arbitrary, but no two slots or elements may share memory.
        layout: One letter per dimension. B: slot (the engine's block). L: layer. K: key/value plane; omitted
            if pages have only one plane. N: token within the page. H: head. D: head_dim. C: K and D merged,
            first all elements of the key, then all elements of the value. Examples: "BLKNHD" is the store's
            own page-major layout, "KBNHD" and "BKNHD" are layer-major, and "BHNC" is vLLM's view for any
            physical order. "BX" is for pages of kind "state" with one layer and one head. Each tensor then
            contains one run of each page's elements, with X elements. A page consists of the runs of all tensors,
            one after another.
    """

    tensors: Sequence[torch.Tensor]
    layout: str


class EnginePool:
    """A pool whose slots are an engine's tensors. It accesses the tensors in place and keeps them alive."""

    def __init__(self, layout: PageLayout, pages: Sequence[EnginePages]) -> None:
        """Create the slots.

        Args:
            layout: The layout of a page, with one spec per KV group.
            pages: The tensors of each KV group, in order.

        Raises:
            ConfigError: Shapes, dtypes or layouts do not match the specs.
        """
        if len(pages) != len(layout.specs):
            raise ConfigError(
                f"expected one EnginePages for each of {len(layout.specs)} KV groups, got {len(pages)}"
            )
        self.layers: list[list[torch.Tensor]] = [
            _runs(p, spec)
            if p.layout == _RUNS
            else [_canonical(t, i, p.layout, spec) for i, t in enumerate(_per_layer(p, spec))]
            for p, spec in zip(pages, layout.specs, strict=True)
        ]
        """One list per KV group, with a view ``[slots, planes, tokens, heads, dim]`` of each layer.

        With layout "BX", the list has a view of each run instead, and ``dim`` is the length of the run.
        """
        sizes = {len(layer) for group in self.layers for layer in group}
        if len(sizes) != 1:
            raise ConfigError(
                "all tensors of an engine must have the same number of slots, got "
                + ", ".join(map(str, sorted(sizes)))
            )
        self.num_slots = sizes.pop()
        self._layout = layout

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Gather the slot's page into ``out``, flat uint8 ``[blob_nbytes]``."""
        with torch.inference_mode():
            for part, layer in self._parts(out):
                part.copy_(layer[slot])

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Scatter ``page``, flat uint8 ``[blob_nbytes]``, into the engine's tensors."""
        # Engines create their tensors in inference mode, and torch only allows writes to them in that mode.
        with torch.inference_mode():
            for part, layer in self._parts(page):
                layer[slot].copy_(part)

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Scatter the layers in ``part`` from ``page`` into the engine's tensors."""
        layers, spec = self.layers[part.spec], self._layout.specs[part.spec]
        wanted = layers[part.first : part.end] if len(layers) == spec.num_layers else layers
        with torch.inference_mode():
            for blob, layer in zip(_split(page, part.offset, spec, wanted), wanted, strict=True):
                layer[slot].copy_(blob)

    def _parts(self, page: NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, for each layer (with layout "BX", each run), its part of the page and its view of all slots."""
        layout = self._layout
        for spec, offset, layers in zip(layout.specs, layout.offsets, self.layers, strict=True):
            yield from zip(_split(page, offset, spec, layers), layers, strict=True)


def _split(
    page: NDArray[np.uint8], offset: int, spec: PageSpec, layers: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return one view of ``page`` per layer. The first layer starts at byte ``offset``; the others follow."""
    sizes = [prod(layer.shape[1:]) for layer in layers]
    dtype = torch_dtype(spec)
    raw = torch.from_numpy(page[offset : offset + sum(sizes) * dtype.itemsize]).view(dtype)
    return [part.view(layer.shape[1:]) for part, layer in zip(torch.split(raw, sizes), layers, strict=True)]


_RUNS = "BX"


def _runs(pages: EnginePages, spec: PageSpec) -> list[torch.Tensor]:
    """Return the runs of a page as views ``[slots, 1, 1, 1, elements]``."""
    if spec.kind != "state" or spec.num_layers != 1 or spec.num_kv_heads != 1:
        raise ConfigError(
            f"layout {_RUNS!r} is for pages of kind 'state' with one layer and one head, got kind {spec.kind!r}, "
            f"{spec.num_layers} layers and {spec.num_kv_heads} heads"
        )
    for tensor in pages.tensors:
        if (tensor.ndim, tensor.dtype) != (2, torch_dtype(spec)):
            raise ConfigError(
                f"layout {_RUNS!r} needs tensors [slots, elements] of {torch_dtype(spec)}, got a tensor of shape "
                f"{tuple(tensor.shape)} and dtype {tensor.dtype}"
            )
        if 0 in tensor.stride():
            raise ConfigError(
                f"each slot of an engine's tensor needs its own memory, got strides {tensor.stride()}; pass "
                "tensors that were not expanded"
            )
    elements = sum(tensor.shape[1] for tensor in pages.tensors)
    if elements != spec.head_dim:
        raise ConfigError(f"the runs of a page must have {spec.head_dim} elements in total, got {elements}")
    return [tensor[:, None, None, None, :] for tensor in pages.tensors]


def _per_layer(pages: EnginePages, spec: PageSpec) -> list[torch.Tensor]:
    letters = pages.layout
    if "L" in letters:
        if len(pages.tensors) != 1:
            raise ConfigError(
                f"layout {letters!r} has an L, so it needs exactly one tensor, got {len(pages.tensors)}"
            )
        layers = list(pages.tensors[0].movedim(letters.index("L"), 0))
    else:
        layers = list(pages.tensors)
    if len(layers) != spec.num_layers:
        raise ConfigError(f"the engine's tensors must hold {spec.num_layers} layers, got {len(layers)}")
    return layers


def _canonical(tensor: torch.Tensor, layer: int, layout: str, spec: PageSpec) -> torch.Tensor:
    """Return one layer as a view ``[slots, planes, tokens, heads, dim]``."""
    planes = spec.shape[1]
    letters = layout.replace("L", "")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigError(
            f"slots and elements of the tensor of layer {layer} must not share memory, got strides {tensor.stride()}; "
            "pass tensors that were not expanded"
        )
    if tensor.ndim != len(letters):
        raise ConfigError(
            f"tensor of layer {layer} must have {len(letters)} dimensions for layout {layout!r}, got {tensor.ndim}"
        )
    if "C" in letters:
        at = letters.index("C")
        if tensor.shape[at] % planes:
            raise ConfigError(
                f"tensor of layer {layer}: dimension C must be {planes} x head_dim, got {tensor.shape[at]}"
            )
        shape = tensor.shape
        tensor = tensor.view(*shape[:at], planes, shape[at] // planes, *shape[at + 1 :])
        letters = letters.replace("C", "KD")
    if "K" not in letters and planes == 1:
        tensor, letters = tensor.unsqueeze(0), "K" + letters
    if sorted(letters) != sorted("BKNHD"):
        raise ConfigError(
            "EnginePages.layout must contain B, K, N, H and D once each (C may replace K and D, L may be added, and K "
            f"may be left out if pages have one plane), got {layout!r}"
        )
    view = tensor.permute([letters.index(x) for x in "BKNHD"])
    if tuple(view.shape[1:]) != spec.shape[1:] or view.dtype != torch_dtype(spec):
        raise ConfigError(
            f"tensor of layer {layer} must hold pages of shape {spec.shape[1:]} and dtype {torch_dtype(spec)}, "
            f"got shape {tuple(view.shape[1:])} and dtype {view.dtype}"
        )
    return view
