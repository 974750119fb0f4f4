"""The pages of the HBM tier: page-major slots of the store's own, or an engine's tensors in whatever layout they have.

``CudaPool`` holds the slots in one allocation of a card, ``CpuPool`` in ordinary memory (``device: cpu``).
``EnginePool`` reads and writes the tensors of an engine in place; ``EnginePages`` says how those are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.errors import ConfigError
from tierstore.gpu import addresses
from tierstore.page import ALIGNMENT, DTYPE_NBYTES, PageSpec, buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.addresses import LayerGroups, Part, Segments
    from tierstore.page import PageLayout


class HbmBytes(Protocol):
    """Page slots whose bytes can be copied out and in."""

    num_slots: int

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copies the slot's page into ``out``, flat uint8 ``[blob_nbytes]``."""
        ...

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copies ``page``, flat uint8 ``[blob_nbytes]``, into the slot."""
        ...

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copies these layers of ``page`` into the slot."""
        ...


class OwnPool(HbmBytes, Protocol):
    """Slots of the store's own."""

    nbytes: int

    @property
    def pages(self) -> torch.Tensor | GroupedPages:
        """The slots in place, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``."""
        ...


class GroupedPages:
    """The slots of a store with several KV groups: ``pages[slot]`` is a tuple of one tensor a group."""

    def __init__(self, groups: tuple[torch.Tensor, ...]) -> None:
        self.groups = groups
        """One tensor a group, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``."""

    def __getitem__(self, slot: int) -> tuple[torch.Tensor, ...]:
        return tuple(group[slot] for group in self.groups)

    def __len__(self) -> int:
        return len(self.groups[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return (self[slot] for slot in range(len(self)))


class CpuPool:
    """Page-major slots in host memory, page aligned: ``[num_slots, num_layers, planes, page_size, heads, dim]``."""

    def __init__(self, layout: PageLayout, num_slots: int) -> None:
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        self._stride = layout.slot_nbytes
        self._length = layout.blob_nbytes
        self._bytes = buffer(self.nbytes)
        # Ordinary tensors, whatever mode the store is opened in: others cannot be written outside inference mode.
        with torch.inference_mode(False):
            flat = torch.from_numpy(self._bytes)
            groups = tuple(
                slots_view(flat, spec, offset, num_slots, layout.slot_nbytes)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            )
        self.pages: torch.Tensor | GroupedPages = groups[0] if len(groups) == 1 else GroupedPages(groups)

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The slot's bytes in place: flat uint8 ``[blob_nbytes]``, writable."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot {slot}; allowed: 0 to {self.num_slots - 1}")
        start = slot * self._stride
        return self._bytes[start : start + self._length]

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copies the slot's page into ``out``."""
        np.copyto(out, self.view(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copies ``page`` into the slot."""
        np.copyto(self.view(slot), page)

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copies these layers of ``page`` into the slot."""
        where = slice(part.offset, part.offset + part.nbytes)
        np.copyto(self.view(slot)[where], page[where])


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
            blob = raw.view(_dtype(spec)).view(-1, *spec.shape[1:])
            for i, layer in enumerate(self.layers[part.spec][part.first : part.end]):
                layer[slot].copy_(blob[i])

    def _blobs(self, page: NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        layout = self._layout
        for spec, offset, layers in zip(layout.specs, layout.offsets, self.layers, strict=True):
            raw = torch.from_numpy(page[offset : offset + spec.page_nbytes])
            yield raw.view(_dtype(spec)).view(spec.shape), layers


def _dtype(spec: PageSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def slots_view(flat: torch.Tensor, spec: PageSpec, offset: int, num_slots: int, stride: int) -> torch.Tensor:
    """One KV group's pages ``[num_slots, *spec.shape]`` inside slots ``stride`` bytes apart in flat uint8 memory."""
    itemsize = DTYPE_NBYTES[spec.dtype]
    rows = flat.view(num_slots, stride)[:, offset : offset + spec.page_nbytes]
    typed = rows.view(_dtype(spec))
    assert typed.stride(0) == stride // itemsize
    return typed.view(num_slots, *spec.shape)


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
    if tuple(view.shape[1:]) != spec.shape[1:] or view.dtype != _dtype(spec):
        raise ConfigError(
            f"tensor of layer {layer} holds pages of {tuple(view.shape[1:])} {view.dtype}; "
            f"allowed: {spec.shape[1:]} {_dtype(spec)}"
        )
    return view


class CudaPool:
    """Page aligned slots on a card: ``[num_slots, num_layers, planes, page_size, heads, dim]``, as ``CpuPool``."""

    def __init__(self, layout: PageLayout, num_slots: int, device: torch.device) -> None:
        """torch.OutOfMemoryError where the device has no room."""
        self.num_slots = num_slots
        self.nbytes = num_slots * layout.slot_nbytes
        block = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -block.data_ptr() % ALIGNMENT
        self.bytes = block[start : start + self.nbytes]
        groups = tuple(
            slots_view(self.bytes, spec, offset, num_slots, layout.slot_nbytes)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        )
        self.pages: torch.Tensor | GroupedPages = groups[0] if len(groups) == 1 else GroupedPages(groups)
        self._rows = self.bytes.view(num_slots, layout.slot_nbytes)[:, : layout.blob_nbytes]
        self._layout = layout
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def segments(self) -> Segments:
        """Where a page's bytes are: one piece."""
        return addresses.pool_segments(self.bytes.data_ptr(), self._layout)

    def groups(self, layers: LayerGroups) -> list[Segments]:
        """The same by layer groups."""
        return addresses.pool_group_segments(self.bytes.data_ptr(), self._layout, layers)

    def read(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copies the slot's page into ``out``, ordinary memory; blocks until it is there."""
        with torch.cuda.stream(self._out):
            torch.from_numpy(out).copy_(self._row(slot))

    def write(self, slot: int, page: NDArray[np.uint8]) -> None:
        """Copies ``page``, ordinary memory, into the slot; blocks until it is there."""
        with torch.cuda.stream(self._in):
            self._row(slot).copy_(torch.from_numpy(page))

    def write_part(self, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        """Copies these layers of ``page``, ordinary memory, into the slot; blocks until they are there."""
        where = slice(part.offset, part.offset + part.nbytes)
        with torch.cuda.stream(self._in):
            self._row(slot)[where].copy_(torch.from_numpy(page[where]))

    def _row(self, slot: int) -> torch.Tensor:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"HBM slot {slot}; allowed: 0 to {self.num_slots - 1}")
        return self._rows[slot]
