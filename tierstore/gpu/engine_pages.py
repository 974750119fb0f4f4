"""An engine's own KV tensors as the slots of the HBM tier: how they are laid out, and reads and writes in place."""

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
    """An engine's own KV tensors of one KV group, and how they are laid out.

    ``layout`` names each dimension by a letter: B slot (the engine's block), L layer, K key/value plane, N token in
    the page, H head, D head_dim; C stands for K and D merged, all of K first. With L there is one tensor, without it
    one tensor a layer, in layer order. K is left out where a page has one plane. Any strides. Examples: "BLKNHD" our
    own page-major layout, "KBNHD" and "BKNHD" the layer-major ones, "BHNC" vLLM's view of any physical order.
    """

    tensors: Sequence[torch.Tensor]
    layout: str


class EnginePool:
    """Slots that belong to an engine: reads and writes its tensors in place, keeps them alive."""

    def __init__(self, layout: PageLayout, pages: Sequence[EnginePages]) -> None:
        """ConfigError naming the tensor and what is allowed unless shapes, dtypes and layout fit the specs.

        ``layers``: one view a layer, ``[slots, planes, tokens, heads, dim]``, one list a KV group.
        """
        if len(pages) != len(layout.specs):
            raise ConfigError(
                f"{len(pages)} EnginePages for {len(layout.specs)} KV groups; allowed: one a group"
            )
        self.layers = [
            [_canonical(t, i, p.layout, spec) for i, t in enumerate(_per_layer(p, spec))]
            for p, spec in zip(pages, layout.specs, strict=True)
        ]
        sizes = {len(layer) for group in self.layers for layer in group}
        if len(sizes) != 1:
            raise ConfigError(
                f"engine tensors have {sorted(sizes)} slots; allowed: the same number in all of them"
            )
        self.num_slots = sizes.pop()
        self._layout = layout

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Gathers the slot's page into ``out``."""
        with torch.inference_mode():
            for page, layers in self._blobs(out):
                for i, layer in enumerate(layers):
                    page[i].copy_(layer[slot])

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Scatters ``page`` into the engine's tensors."""
        # Engines make theirs in inference mode: elsewhere torch refuses to write to such tensors.
        with torch.inference_mode():
            for blob, layers in self._blobs(page):
                for i, layer in enumerate(layers):
                    layer[slot].copy_(blob[i])

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Scatters these layers of ``page`` into the engine's tensors."""
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
            raise ConfigError(f"layout {letters!r} with {len(pages.tensors)} tensors; allowed: one tensor")
        layers = list(pages.tensors[0].movedim(letters.index("L"), 0))
    else:
        layers = list(pages.tensors)
    if len(layers) != spec.num_layers:
        raise ConfigError(f"engine tensors hold {len(layers)} layers; allowed: {spec.num_layers}")
    return layers


def _canonical(tensor: torch.Tensor, layer: int, layout: str, spec: PageSpec) -> torch.Tensor:
    """One layer as a view ``[slots, planes, tokens, heads, dim]``."""
    planes = spec.shape[1]
    letters = layout.replace("L", "")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ConfigError(
            f"slots or elements of the tensor of layer {layer} share memory; allowed: each with its own"
        )
    if tensor.ndim != len(letters):
        raise ConfigError(
            f"tensor of layer {layer} has {tensor.ndim} dimensions; allowed by layout {layout!r}: {len(letters)}"
        )
    if "C" in letters:
        at = letters.index("C")
        if tensor.shape[at] % planes:
            raise ConfigError(
                f"tensor of layer {layer}: dimension C is {tensor.shape[at]}; allowed: {planes} x head_dim"
            )
        shape = tensor.shape
        tensor = tensor.view(*shape[:at], planes, shape[at] // planes, *shape[at + 1 :])
        letters = letters.replace("C", "KD")
    if "K" not in letters and planes == 1:
        tensor, letters = tensor.unsqueeze(0), "K" + letters
    if sorted(letters) != sorted("BKNHD"):
        raise ConfigError(
            f"EnginePages.layout is {layout!r}; allowed: each of B, N, H once, K and D or C, L at will"
        )
    view = tensor.permute([letters.index(x) for x in "BKNHD"])
    if tuple(view.shape[1:]) != spec.shape[1:] or view.dtype != torch_dtype(spec):
        raise ConfigError(
            f"tensor of layer {layer} holds pages of {tuple(view.shape[1:])} {view.dtype}; "
            f"allowed: {spec.shape[1:]} {torch_dtype(spec)}"
        )
    return view
