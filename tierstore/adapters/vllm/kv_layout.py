"""Maps vLLM's KV tensors to pages. A page contains all bytes that the layers keep for a block, each byte once.

Layers may differ in size and dtype, and several layers may use the same bytes. Without a lossy codec, the store does
not interpret the contents of a page, so a page consists of as few pieces of memory as the layout allows: a single
piece if the bytes of a block are adjacent. With a lossy codec, a page consists of the layers' heads. The layout is
part of the page's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch

from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.page import DTYPE_NBYTES, PageSpec
from tierstore.types import exact_size

if TYPE_CHECKING:
    from tierstore.adapters.vllm.kv_groups import Heads

_MOST_PADDING = 8
"""A block is stored as one piece with its padding if at most 1/``_MOST_PADDING`` of the piece is padding."""


@dataclass(frozen=True)
class KVLayout:
    """The geometry of a rank's pages, and the tensors that contain them."""

    spec: PageSpec
    pages: EnginePages


@dataclass(frozen=True)
class _Blocks:
    """One of vLLM's tensors, viewed as ``[blocks, pieces, elements]``.

    ``order`` lists the other dimensions of the original tensor as (index, size), by decreasing stride.
    """

    view: torch.Tensor
    order: tuple[tuple[int, int], ...]

    @property
    def storage(self) -> int:
        """Address of the tensor's storage."""
        return self.view.untyped_storage().data_ptr()

    @property
    def piece_nbytes(self) -> int:
        """Size of a piece in bytes."""
        return self.view.shape[2] * self.view.element_size()

    @property
    def apart(self) -> int:
        """Distance between the starts of consecutive blocks, in bytes."""
        return self.view.stride(0) * self.view.element_size()

    @property
    def starts(self) -> list[int]:
        """Offset of each piece of block 0 from the start of the storage, in bytes."""
        size, pieces = self.view.element_size(), self.view.shape[1]
        return [(int(self.view.storage_offset()) + i * self.view.stride(1)) * size for i in range(pieces)]


@dataclass(frozen=True, order=True)
class _Run:
    """Adjacent bytes of each block.

    For block 0, these are bytes ``[start, end)`` of a storage. For each following block, they are ``apart`` bytes
    further on. ``storage`` is the number of the storage, in the order of vLLM's tensors.
    """

    storage: int
    start: int
    end: int
    apart: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start

    def end_of(self, num_blocks: int) -> int:
        """Return the offset at which the last of ``num_blocks`` blocks ends."""
        return self.end + (num_blocks - 1) * self.apart


def kv_layout(
    tensors: Sequence[torch.Tensor],
    *,
    num_blocks: int,
    block_size: int,
    identity: str,
    shard: int,
    heads: Heads | None = None,
) -> KVLayout:
    """Return the page layout for all KV groups.

    Groups share the same bytes, so a block is the same page whichever group owns it. A page contains every byte that
    the block has in any tensor, exactly once. Padding between these bytes is stored too if this makes a page a single
    piece of which at most an eighth is padding. Padding at the end of a block is left out. Restoring a page writes all
    of its bytes, padding included, and no others.

    Args:
        tensors: One per layer, or one for all layers. Layers may share a tensor, or bytes. One dimension of
            each tensor is the block dimension.
        num_blocks: Number of blocks. The size of the block dimension is a multiple of it.
        block_size: Tokens per block.
        identity: Identity of the model.
        shard: Rank of the worker.
        heads: The heads of the layers if a lossy codec encodes the pages. The tensors must then have equal shapes.

    Raises:
        ConfigError: A byte belongs to two blocks; the blocks of a tensor are scattered, because their rows are not
            contiguous or not at equal distances; or ``heads`` do not describe the pages.
    """
    unique = list({(t.data_ptr(), t.shape, t.stride()): t for t in tensors}.values())
    if not unique:
        raise ConfigError("vLLM has registered no KV tensors: no layer has a KV cache; remove the connector")
    views = [_blocks(tensor, num_blocks) for tensor in unique]
    dtypes = {v.view.dtype for v in views}
    dtype = _named(dtypes.pop()) if len(dtypes) == 1 else "uint8"
    if dtype not in DTYPE_NBYTES:
        raise ConfigError(
            f"the dtype of KV tensors must be one of {', '.join(sorted(DTYPE_NBYTES))}, got {dtype}"
        )
    runs = _runs(views, num_blocks)
    layers = _alike(views, runs)
    if heads is not None:
        return _of_heads(layers, heads, block_size, _model(views, identity), shard)
    unnamed = bool(layers)
    if not layers and (layers := _equal(views, runs, num_blocks)):
        unnamed = _in_order(views, runs)
    if layers:
        _, pieces, elements = layers[0].shape
        pages = EnginePages([layer.unsqueeze(1) for layer in layers], "BNHD")
    else:
        runs = _with_padding(runs)
        tensors = [_view(run, views, num_blocks).view(getattr(torch, dtype)) for run in runs]
        pieces, elements = 1, sum(tensor.shape[1] for tensor in tensors)
        pages = EnginePages(tensors, "BX")
    # Layouts that were supported before layers could differ keep their old identity, without offsets of layers.
    places = "" if unnamed else repr(_places(views, runs))
    spec = PageSpec(
        kind="state",
        num_layers=len(layers) or 1,
        page_size=block_size,
        num_kv_heads=pieces,
        head_dim=elements,
        dtype=dtype,
        shard=shard,
        model=_model(views, identity, places),
    )
    return KVLayout(spec, pages)


def _model(views: Sequence[_Blocks], identity: str, places: str = "") -> str:
    """Return ``PageSpec.model``: the model's identity, and a digest of the order of bytes in the tensors."""
    orders = repr([v.order for v in views]) + places
    return f"vllm {sha256(orders.encode()).hexdigest()[:16]} {identity}"


def _of_heads(
    layers: Sequence[torch.Tensor], heads: Heads, block_size: int, model: str, shard: int
) -> KVLayout:
    """Return the layout of pages that consist of the elements of heads.

    The names of the dimensions are not exact. A row of ``heads.dim`` adjacent elements belongs to one token or, if the
    attention backend packs keys (vLLM on the CPU), to several tokens of one head. Which of the other dimensions is
    the token and which the head does not matter to a codec that only relates the elements of a row to each other.

    Args:
        layers: Tensors ``[blocks, pieces, elements]`` of equal shape, or an empty list if layers differ.
        heads: The heads of each layer.
        block_size: Tokens per block.
        model: The identity of pages.
        shard: Rank of the worker.
    """
    if not layers:
        raise ConfigError(
            "host.codec must be none with this model under vLLM: the KV tensors of its layers differ in shape or "
            "dtype, or share bytes; set host.codec to none"
        )
    blocks, pieces, elements = layers[0].shape
    rows, left = divmod(elements, heads.planes * heads.dim)
    number, odd = divmod(pieces * rows, block_size)
    order = {number: ("BHN", number, block_size), 1: ("BNH", block_size, number)}.get(pieces)
    dtype = _named(layers[0].dtype)
    if left or odd or order is None or dtype != heads.dtype:
        raise ConfigError(
            f"host.codec must be none with this model under vLLM: expected blocks of {block_size} tokens of heads with "
            f"{heads.planes} x {heads.dim} elements of {heads.dtype}, got KV tensors with {pieces} x {elements} "
            f"elements of {dtype} per block; set host.codec to none"
        )
    letters, *outer = order
    letters, inner = (letters + "KD", (2, heads.dim)) if heads.planes == 2 else (letters + "D", (heads.dim,))
    spec = PageSpec(
        kind="mha" if heads.planes == 2 else "mla",
        num_layers=len(layers),
        page_size=block_size,
        num_kv_heads=number,
        head_dim=heads.dim,
        dtype=dtype,
        shard=shard,
        model=model,
    )
    return KVLayout(spec, EnginePages([layer.view(blocks, *outer, *inner) for layer in layers], letters))


def _runs(views: Sequence[_Blocks], num_blocks: int) -> list[_Run]:
    """Return the bytes of a block in all tensors as runs, sorted by storage and address.

    Overlapping and adjacent runs are merged. Raises ConfigError if a byte belongs to two blocks.
    """
    storages: dict[int, int] = {}
    extents = {
        _Run(storages.setdefault(v.storage, len(storages)), start, start + v.piece_nbytes, v.apart)
        for v in views
        for start in v.starts
    }
    runs: list[_Run] = []
    for extent in sorted(extents, key=lambda e: (e.storage, e.apart, e.start)):
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.storage, last.apart) == (extent.storage, extent.apart)
            and (extent.start <= last.end)
        ):
            runs[-1] = replace(last, end=max(last.end, extent.end))
        else:
            runs.append(extent)
    runs.sort()
    _require_separate(runs, num_blocks)
    return runs


def _require_separate(runs: Sequence[_Run], num_blocks: int) -> None:
    """Raise ConfigError if a byte belongs to two blocks.

    Also raise it if two runs share a part of a storage and the distances between their blocks differ.
    """
    near: list[_Run] = []
    for run in runs:
        if num_blocks > 1 and run.nbytes > run.apart:
            raise _overlapping(run, run)
        near = [
            other for other in near if other.storage == run.storage and run.start < other.end_of(num_blocks)
        ]
        for other in near:
            later = (run.start - other.end) // run.apart + 1 if run.apart else 0
            meet = later < num_blocks and later * run.apart < run.end - other.start
            if other.apart != run.apart or meet:
                raise _overlapping(other, run)
        near.append(run)


def _overlapping(one: _Run, other: _Run) -> ConfigError:
    described = " and ".join(
        f"bytes {r.start} to {r.end} (repeated every {exact_size(r.apart)})" for r in (one, other)
    )
    return ConfigError(f"different blocks of the KV tensors must not share memory, got blocks at {described}")


def _alike(views: Sequence[_Blocks], runs: Sequence[_Run]) -> list[torch.Tensor]:
    """Return the distinct tensors if they have the same shape and dtype and do not overlap.

    Otherwise, return an empty list.
    """
    unique = list({(v.data_ptr(), v.shape, v.stride(), v.dtype): v for v in (b.view for b in views)}.values())
    alike = len({(v.shape, v.dtype) for v in unique}) == 1
    return unique if alike and sum(v[0].nbytes for v in unique) == sum(run.nbytes for run in runs) else []


def _equal(views: Sequence[_Blocks], runs: Sequence[_Run], num_blocks: int) -> list[torch.Tensor]:
    """Return each run as a tensor ``[blocks, 1, elements]``.

    Return an empty list unless all runs have the same length and are in one storage, and each block of a tensor
    is a single piece.
    """
    places = {(v.storage, v.apart, v.view.shape[1]) for v in views}
    if len(places) > 1 or views[0].view.shape[1] > 1 or len({run.nbytes for run in runs}) > 1:
        return []
    dtypes = {v.view.dtype for v in views}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    return [_view(run, views, num_blocks).view(dtype).unsqueeze(1) for run in runs]


def _in_order(views: Sequence[_Blocks], runs: Sequence[_Run]) -> bool:
    """Return whether each tensor starts, within a page, at offset 0 or where the previous tensor ends."""
    end = 0
    for view, (_, [start]) in zip(views, _places(views, runs), strict=True):
        if start not in (0, end):
            return False
        end = start + view.piece_nbytes
    return True


def _with_padding(runs: Sequence[_Run]) -> list[_Run]:
    """Merge the runs of each storage into one run if there is only a little padding between them."""
    found: list[_Run] = []
    for _, group in groupby(runs, key=lambda run: run.storage):
        here = list(group)
        whole = replace(here[0], end=here[-1].end)
        padding = whole.nbytes - sum(run.nbytes for run in here)
        if whole.nbytes <= whole.apart and padding * _MOST_PADDING <= whole.nbytes:
            found.append(whole)
        else:
            found += here
    return found


def _places(views: Sequence[_Blocks], runs: Sequence[_Run]) -> list[tuple[str, list[int]]]:
    """Return the dtype of each tensor, and the offset of each of its pieces in the page."""
    storages = {storage: i for i, storage in enumerate(dict.fromkeys(v.storage for v in views))}
    offsets = dict(zip(runs, accumulate((run.nbytes for run in runs), initial=0), strict=False))
    found = []
    for v in views:
        mine = [run for run in runs if (run.storage, run.apart) == (storages[v.storage], v.apart)]
        at = [
            offsets[run] + start - run.start
            for start in v.starts
            for run in mine
            if run.start <= start < run.end
        ]
        found.append((_named(v.view.dtype), at))
    return found


def _view(run: _Run, views: Sequence[_Blocks], num_blocks: int) -> torch.Tensor:
    """Return the run's bytes as uint8 ``[num_blocks, nbytes]``."""
    storages = dict.fromkeys(v.storage for v in views)
    first = next(v.view for v in views if v.storage == list(storages)[run.storage])
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    return whole.as_strided((num_blocks, run.nbytes), (run.apart, 1), run.start)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blocks(tensor: torch.Tensor, num_blocks: int) -> _Blocks:
    at = next((d for d, size in enumerate(tensor.shape) if size and size % num_blocks == 0), None)
    if at is None:
        raise ConfigError(
            f"a KV tensor needs a dimension of {num_blocks} blocks or a multiple of it, got shape {tuple(tensor.shape)}"
        )
    if tensor.shape[at] != num_blocks:
        sizes = (num_blocks, tensor.shape[at] // num_blocks)
        tensor = tensor.unflatten(at, sizes)  # type: ignore[no-untyped-call]
    others = [d for d in range(tensor.ndim) if d != at]
    strides = tensor.stride()
    others.sort(key=lambda d: -strides[d])
    order = tuple((d, tensor.shape[d]) for d in others)
    return _Blocks(_collapsed(tensor.permute(at, *others)), order)


def _collapsed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view ``[blocks, pieces, elements]`` of a tensor with decreasing strides."""
    sizes, strides = [1], [1]
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size == 1:
            continue
        if stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2 or strides[0] != 1:
        raise ConfigError(
            f"a KV tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} has scattered blocks: "
            "each block must consist of contiguous rows at equal distances"
        )
    pieces, apart = (1, sizes[0]) if len(sizes) == 1 else (sizes[1], strides[1])
    return tensor.as_strided(
        (tensor.shape[0], pieces, sizes[0]), (tensor.stride(0), apart, 1), tensor.storage_offset()
    )
