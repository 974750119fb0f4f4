"""An engine's own KV tensors as the slots of the HBM tier: their layout, and reads and writes in place."""

from __future__ import annotations

from dataclasses import dataclass
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
    """An engine's own KV tensors of one KV group, and their layout.

    Attributes:
        tensors: One tensor if ``layout`` has an L, else one tensor for each layer, in layer order. Any
            strides.
        layout: A letter for each dimension. B: slot (the engine's block). L: layer. K: key/value plane; left
            out if a page has only one plane. N: token in the page. H: head. D: head_dim. C: K and D merged,
            all of K first.
            Examples: "BLKNHD" is the store's own page-major layout, "KBNHD" and "BKNHD" are layer-major, "BHNC" is
            vLLM's view of any physical order.
    """

    tensors: Sequence[torch.Tensor]
    layout: str


class EnginePool:
    """The slots of an engine: reads and writes its tensors in place, and keeps them alive."""

    def __init__(self, layout: PageLayout, pages: Sequence[EnginePages]) -> None:
        """Make slots of an engine's tensors.

        Args:
            layout: The layout of a page, with one spec for each KV group.
            pages: The tensors, in the order of the KV groups.

        Raises:
            ConfigError: Shapes, dtypes or layouts do not fit the specs.
        """
        if len(pages) != len(layout.specs):
            raise ConfigError(
                f"expected one EnginePages for each of {len(layout.specs)} KV groups, got {len(pages)}"
            )
        self.layers: list[list[torch.Tensor]] = [
            [_canonical(t, i, p.layout, spec) for i, t in enumerate(_per_layer(p, spec))]
            for p, spec in zip(pages, layout.specs, strict=True)
        ]
        """One view for each layer, ``[slots, planes, tokens, heads, dim]``; one list for each KV group."""
        sizes = {len(layer) for group in self.layers for layer in group}
        if len(sizes) != 1:
            raise ConfigError(
                f"all tensors of an engine must have the same number of slots, got {sorted(sizes)}"
            )
        self.num_slots = sizes.pop()
        self._layout = layout

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Gather the slot's page into ``out``, flat uint8 ``[blob_nbytes]``."""
        with torch.inference_mode():
            for page, layers in self._blobs(out):
                for i, layer in enumerate(layers):
                    page[i].copy_(layer[slot])

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Scatter ``page``, flat uint8 ``[blob_nbytes]``, into the engine's tensors."""
        # Engines create their tensors in inference mode, and torch refuses to write to them outside of it.
        with torch.inference_mode():
            for blob, layers in self._blobs(page):
                for i, layer in enumerate(layers):
                    layer[slot].copy_(blob[i])

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Scatter the layers ``part`` of ``page`` into the engine's tensors."""
        spec = self._layout.specs[part.spec]
        nbytes = (part.end - part.first) * spec.layer_nbytes
        raw = torch.from_numpy(page[part.offset : part.offset + nbytes])
        with torch.inference_mode():
            blob = raw.view(torch_dtype(spec)).view(-1, *spec.shape[1:])
            for i, layer in enumerate(self.layers[part.spec][part.first : part.end]):
                layer[slot].copy_(blob[i])

    def _blobs(self, page: NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        layout = self._layout
        for spec, offset, layers in zip(layout.specs, layout.offsets, self.layers, strict=True):
            raw = torch.from_numpy(page[offset : offset + spec.page_nbytes])
            yield raw.view(torch_dtype(spec)).view(spec.shape), layers


def _per_layer(pages: EnginePages, spec: PageSpec) -> list[torch.Tensor]:
    letters = pages.layout
    if "L" in letters:
        if len(pages.tensors) != 1:
            raise ConfigError(f"layout {letters!r} has an L and needs one tensor, got {len(pages.tensors)}")
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
            f"slots or elements of the tensor of layer {layer} share memory (stride 0): each needs its own"
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
            f"EnginePages.layout must have B, N and H once, K and D (or C for both), and may have L, got {layout!r}"
        )
    view = tensor.permute([letters.index(x) for x in "BKNHD"])
    if tuple(view.shape[1:]) != spec.shape[1:] or view.dtype != torch_dtype(spec):
        raise ConfigError(
            f"tensor of layer {layer} holds pages of {tuple(view.shape[1:])} {view.dtype}, "
            f"expected {spec.shape[1:]} {torch_dtype(spec)}"
        )
    return view
