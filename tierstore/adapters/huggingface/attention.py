"""Attention that reads K and V directly from the store's pages.

On a GPU, the kernels in ``tierstore.gpu.attention`` compute it (``Plans``), and on every device if pages stream from
host memory, because they do not fit into HBM. Elsewhere, K and V of about
``KEYS_AT_ONCE`` tokens at a time are copied out of the pages, and an online softmax merges the partial
results, so memory use is bounded for any context length. A prompt without a reused prefix uses plain SDPA
over its own K and V, unless the kernels are faster.
"""

# torch leaves some functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from tierstore.adapters.huggingface.batch import Span
from tierstore.errors import CapacityError
from tierstore.gpu.attention.backends import Backend
from tierstore.gpu.attention.page_stream import RING_NBYTES, PageStream
from tierstore.gpu.attention.page_table import DTYPES
from tierstore.gpu.attention.paged import PagedDecode, PagedPrefill
from tierstore.gpu.attention.streamed import StreamedDecode, StreamedPrefill
from tierstore.host.arena import HostArena

ATTENTION = "tierstore"
"""The value of ``attn_implementation`` for this package."""

HANDLE = "tierstore_layer"
"""The keyword under which ``TierStoreLayer.update`` passes its layer to the attention function."""

KEYS_AT_ONCE = 1024
"""Number of tokens whose K and V ``attend_pages`` copies at a time. At least one page is copied."""
QUERIES_AT_ONCE = 256
"""Maximum number of tokens for which ``attend_pages`` computes attention at a time."""

_WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "is_causal",  # compared with the mask
        "labels",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",  # SDPA and eager attention obey the mask, which is compared with the window
        "use_cache",
    }
)
"""Keywords of an attention call that do not affect its result. Attention over pages rejects all others."""

NEW_FROM = 4096
"""Length in tokens of the shortest prompt without a reused prefix that the kernels may compute. Not tuned."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of layer. Layers for which all these attributes are equal share one plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    dtype: torch.dtype
    group: int = 0
    """Index of the KV group if pages stream from host memory, else 0."""


@dataclass(slots=True)
class _Planned:
    """The decode and prefill kernels for one kind of layer.

    ``now`` is the kernel that is planned for the current forward pass, or None.
    """

    decode: PagedDecode
    prefill: PagedPrefill
    now: PagedDecode | PagedPrefill | StreamedDecode | StreamedPrefill | None = None
    streamed: tuple[StreamedDecode, StreamedPrefill] | None = None
    """The kernels for pages that stream from host memory. None until there are such pages."""


@dataclass(slots=True)
class Plans:
    """The attention kernels of one cache, and their plans. Not thread-safe."""

    device: torch.device
    backend: Backend = "auto"
    """Always "auto", except in tests without a GPU."""
    host: HostArena | None = None
    """The host memory from which pages stream. None if all pages are in HBM."""
    _kinds: dict[_Kind, _Planned] = field(default_factory=dict)
    _streams: dict[int, PageStream] = field(default_factory=dict)
    """The open streams, by KV group."""

    def renew(self) -> None:
        """Discard all plans. Call this at the start of each forward pass."""
        for planned in self._kinds.values():
            planned.now = None

    def close(self) -> None:
        """End all streams, and wait until no copy reads host memory any more. Idempotent."""
        streams, self._streams = self._streams, {}
        self._kinds.clear()
        for stream in streams.values():
            stream.close()

    def suits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels support this dtype on this device."""
        return (self.device.type == "cuda" or self.backend != "auto") and dtype in DTYPES

    def takes_new(self, query: torch.Tensor, window: int | None) -> bool:
        """Return whether the kernels, not torch's SDPA, should compute the attention of a prompt that reuses no prefix.

        The kernels are at least as fast for long prompts with a 16-bit dtype and no window, because SDPA by default
        chooses the slower of torch's two kernels on Hopper.

        Args:
            query: The queries of the prompt, ``[num_heads, q, head_dim]``.
            window: Number of tokens that a query sees, including its own. None for all.
        """
        half = query.dtype in (torch.bfloat16, torch.float16)
        wide = query.shape[1] >= NEW_FROM and query.shape[2] <= 128
        return half and wide and window is None and self.suits(query.dtype)

    def attend(
        self,
        queries: Sequence[torch.Tensor],
        spans: Sequence[Span],
        pages: torch.Tensor,
        scale: float,
        window: int | None,
        place: tuple[int, int],
    ) -> list[torch.Tensor]:
        """Return causal attention of each row's new tokens over its pages.

        Args:
            queries: ``[num_heads, q, head_dim]`` for each row, with q at least 1.
            spans: The tokens and block tables of the rows. In one forward pass, all layers of the same kind
                (shape, window, scale and dtype) must pass the same spans, because they share a plan.
            pages: All pages of one layer, ``[num_slots, 2, page_size, num_kv_heads, head_dim]``.
            scale: Factor applied to the scores.
            window: Number of tokens that a query sees, including its own. None for all.
            place: The index of the layer's KV group, and the layer's index in that group.

        Returns:
            ``[q, num_heads, head_dim]`` for each row.
        """
        first = queries[0]
        streams = any(span.hosted for span in spans)
        group = place[0] if streams else 0  # each KV group has a stream of its own
        kind = _Kind(first.shape[0], pages.shape[3], first.shape[2], window, scale, first.dtype, group)
        planned = self._kinds.get(kind)
        if planned is None:
            planned = _Planned(
                PagedDecode(self.device, backend=self.backend),
                PagedPrefill(self.device, backend=self.backend),
            )
            self._kinds[kind] = planned
        if planned.now is None:
            if streams and planned.streamed is None:
                stream = self._stream(group)
                planned.streamed = (
                    StreamedDecode(stream, backend=self.backend),
                    StreamedPrefill(stream, backend=self.backend),
                )
            planned.now = _plan(planned, spans, kind, pages.shape[2])
        rows = [query.transpose(0, 1) for query in queries]
        query = rows[0] if len(rows) == 1 else torch.cat(rows)
        if isinstance(planned.now, StreamedDecode | StreamedPrefill):
            found = planned.now.run(query, pages, place[1])
        else:
            found = planned.now.run(query, pages)
        assert isinstance(found, torch.Tensor)
        return list(found.split([len(row) for row in rows]))

    def _stream(self, group: int) -> PageStream:
        """Return the stream of a KV group. Opens it if necessary, which allocates its ring on the device.

        Raises:
            CapacityError: Host memory could not be pinned, which the GPU needs in order to read it.
        """
        found = self._streams.get(group)
        if found is None:
            host = self.host
            assert host is not None
            if self.device.type == "cuda" and not host.wait_pinned(host.num_slots, _PINNED_S):
                raise CapacityError(
                    f"the request does not fit into HBM, and cannot stream pages from host memory, because it is not "
                    f"pinned ({host.refused or 'host.pin'}): pin it, or raise hbm.capacity"
                )
            # More slabs than all pages fill would never be used.
            layer = host.held.layout.specs[group].layer_nbytes
            ring_nbytes = min(RING_NBYTES, 4 * host.num_slots * layer)
            found = PageStream.open(host, self.device, ring_nbytes=ring_nbytes, group=group)
            self._streams[group] = found
        return found


_PINNED_S = 60.0
"""Maximum time to wait until host memory is pinned, in seconds."""


def _plan(
    planned: _Planned, spans: Sequence[Span], kind: _Kind, page_size: int
) -> PagedDecode | PagedPrefill | StreamedDecode | StreamedPrefill:
    tables = [span.pages[: -(-span.stop // page_size)] for span in spans]
    indptr = np.cumsum([0, *map(len, tables)])
    last = np.array([(span.stop - 1) % page_size + 1 for span in spans])
    shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, page_size)
    left, widths = -1 if kind.window is None else kind.window - 1, [span.stop - span.start for span in spans]
    indices = np.concatenate(tables)
    if any(span.hosted for span in spans):
        assert planned.streamed is not None
        decode, prefill = planned.streamed
        in_host = np.concatenate([np.arange(len(t)) < s.hosted for t, s in zip(tables, spans, strict=True)])
        if max(widths) == 1:
            decode.plan(
                indptr, indices, last, *shape,
                in_host=in_host, window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
            )  # fmt: skip
            return decode
        prefill.plan(
            np.cumsum([0, *widths]), indptr, indices, last, *shape,
            in_host=in_host, window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
        )  # fmt: skip
        return prefill
    if max(widths) == 1:
        planned.decode.plan(
            indptr, indices, last, *shape,
            window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
        )  # fmt: skip
        return planned.decode
    planned.prefill.plan(
        np.cumsum([0, *widths]), indptr, indices, last, *shape,
        causal=True, window_left=left, sm_scale=kind.scale, q_data_type=kind.dtype,
    )  # fmt: skip
    return planned.prefill


class SlidingMask(torch.Tensor):
    """Placeholder for the mask of a causal sliding window, ``[rows, keys]``.

    Only "tierstore" attention understands it, because it contains no mask values. A model that derives
    another mask from it gets a ValueError instead of wrong results.
    """

    window: int
    padding: torch.Tensor | None
    """The 2D padding mask that was passed to the model. None if it was called without one."""

    @classmethod
    def of(cls, seen: torch.Tensor, window: int, padding: torch.Tensor | None) -> SlidingMask:
        """Return a placeholder with the shape, dtype and device of ``seen``."""
        mask = seen.as_subclass(cls)
        mask.window, mask.padding = window, padding
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow operations that return no new tensor, such as reading shape, dtype and device.

        ``contiguous``, ``to``, ``clone`` and ``detach`` return the placeholder itself.

        Raises:
            ValueError: The operation would return another mask.
        """
        if func in _COPIES:
            return args[0]
        found: Any = NotImplemented
        with suppress(IndexError, RuntimeError, TypeError):
            found = super().__torch_function__(func, types, args, kwargs or {})
        if found is NotImplemented or (isinstance(found, torch.Tensor) and found is not args[0]):
            raise ValueError(
                f'the model computes with its sliding-window mask, but attention "{ATTENTION}" gives it only a '
                "placeholder: load the model with another attn_implementation"
            )
        return found


_COPIES = frozenset({torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.clone, torch.Tensor.detach})
"""Calls that transformers uses to prepare a mask without changing its meaning."""


class OpaqueTensor(torch.Tensor):
    """K or V of the new tokens, as returned by ``TierStoreLayer.update``.

    Only "tierstore" attention can read it. Other caches return K and V of all tokens. A model that computed with
    K and V of the new tokens alone, or wrote to them, would get wrong results. So all such operations raise
    ValueError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow reading shape, dtype and device, and calls that return this tensor itself.

        Raises:
            ValueError: The operation is not one of these.
        """
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _UNCHANGED and isinstance(args[0], OpaqueTensor):
            with torch._C.DisableTorchFunctionSubclass():
                if func(*args, **(kwargs or {})) is args[0]:
                    return args[0]
        name = getattr(func, "__self__", func) if getattr(func, "__name__", "") == "__get__" else func
        raise ValueError(
            f"the model applies {getattr(name, '__name__', name)} to the K or V that the cache returned, so it attends "
            "to values that the pages do not contain. Load the model with "
            f'attn_implementation="{ATTENTION}". If you already did, run the model without TierStoreCache'
        )


_QUESTIONS = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "is_cuda", "is_meta", "layout", "ndim", "requires_grad", "shape")
        ),
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_inference,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.Tensor.stride,
    }
)
_UNCHANGED = frozenset({torch.Tensor.contiguous, torch.Tensor.to})
"""Calls that return the tensor itself if it needs no conversion."""


@dataclass(frozen=True, slots=True)
class Handed:
    """The K and V that ``TierStoreLayer.update`` returned.

    Used to verify that the attention function gets the same objects, and that nothing has written to them.
    """

    keys: OpaqueTensor
    values: OpaqueTensor
    plain: tuple[torch.Tensor, torch.Tensor]
    """The same K and V as plain tensors, with which the attention function computes."""
    versions: tuple[int, int]
    """The write counts (``version_of``) of K and V when ``update`` returned them."""

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> Handed:
        """Create aliases of K and V by which the attention function recognizes the tensors from ``update``."""
        keys, values = key_states.as_subclass(OpaqueTensor), value_states.as_subclass(OpaqueTensor)
        versions = version_of(key_states), version_of(value_states)
        return cls(keys, values, (key_states, value_states), versions)

    def is_whole(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether these are the objects that ``update`` returned, and nothing has written to them since."""
        same = keys is self.keys and values is self.values
        key_states, value_states = self.plain
        return same and (version_of(key_states), version_of(value_states)) == self.versions


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to a tensor. 0 for inference tensors, whose writes torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


class PagedLayer(Protocol):
    """One model layer's access to the pages of a request."""

    @property
    def layer_pages(self) -> torch.Tensor:
        """Return this layer's part of all pages, ``[num_slots, 2, page_size, num_kv_heads, head_dim]``."""
        ...

    @property
    def window(self) -> int | None:
        """Return the number of tokens that a query sees, including its own. None for all earlier tokens."""
        ...

    @property
    def place(self) -> tuple[int, int]:
        """Return the index of the layer's KV group, and the layer's index in that group."""
        ...

    @property
    def spans(self) -> Sequence[Span]:
        """Return each row's span: the tokens that the current forward pass computes, and the block table."""
        ...

    @property
    def plans(self) -> Plans:
        """Return the attention kernels with their plans for the current forward pass."""
        ...

    @property
    def handed(self) -> Handed | None:
        """Return what this layer's ``update`` returned in the current pass.

        The result is None once another layer has been updated or the pass has ended.
        """
        ...

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError unless the mask hides exactly the padding that the request was opened with."""
        ...

    def mark_read(self) -> None:
        """Record that the attention function reads this layer from the pages."""
        ...


def attend_pages(
    query: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    num_tokens: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return causal attention of the last ``q`` tokens of one sequence over all tokens that they see.

    Has no side effects.

    Args:
        query: The queries of these tokens, ``[num_heads, q, head_dim]``.
        pages: All pages of one layer, ``[num_slots, 2, page_size, num_kv_heads, head_dim]``.
        slots: The sequence's block table, int64 ``[ceil(num_tokens / page_size)]`` or longer.
        num_tokens: Number of tokens in the sequence.
        scale: Factor applied to the scores.
        window: Number of tokens that a query sees, including its own. None for all. Pages that lie before the
            windows of all queries are not read.

    Returns:
        ``[q, num_heads, head_dim]`` in the dtype of ``query``, computed in float32 or wider.
    """
    width = query.shape[1]
    blocks = []
    for first in range(0, width, QUERIES_AT_ONCE):
        rows = query[:, first : first + QUERIES_AT_ONCE]
        blocks.append(_attend_block(rows, pages, slots, num_tokens - width + first, scale, window))
    return torch.cat(blocks, dim=1).transpose(0, 1).to(query.dtype)


def _attend_block(
    query: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention for ``query``, ``[num_heads, w, head_dim]``, in the same shape.

    The first of the ``w`` tokens is at ``position`` in the sequence.
    """
    page_size, num_kv_heads = pages.shape[2], pages.shape[3]
    heads, width, dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = (query.to(wide) * scale).reshape(num_kv_heads, -1, dim)
    top = rows.new_full((*rows.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(rows)
    step = max(1, KEYS_AT_ONCE // page_size)
    seen = 0 if window is None else max(0, position - window + 1) // page_size * page_size
    for start in range(seen, position + width, step * page_size):
        stop = min(start + step * page_size, position + width)
        group = slots[start // page_size : -(-stop // page_size)]
        keys, values = (_gather(pages, group, plane, stop - start).to(wide) for plane in (0, 1))
        scores = rows @ keys.transpose(1, 2)
        hidden = _hidden(position, width, start, stop, window, scores)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # While a query has seen no key, because its window starts in a later group of pages, its maximum is
        # -inf.
        floor = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights, decay = scores.sub_(floor).exp_(), (top - floor).exp_()
        total = total * decay + weights.sum(-1, keepdim=True)
        mixed = mixed * decay + weights @ values
        top = new_top
    return (mixed / total).reshape(heads, width, dim)


def _gather(pages: torch.Tensor, slots: torch.Tensor, plane: int, num_tokens: int) -> torch.Tensor:
    """Return K (``plane`` 0) or V (1) of the first ``num_tokens`` tokens in the pages in ``slots``.

    The result is ``[num_kv_heads, num_tokens, head_dim]``, a view of a copy.
    """
    rows = pages[:, plane].index_select(0, slots)
    return rows.flatten(0, 1)[:num_tokens].transpose(0, 1)


def _hidden(
    position: int, width: int, start: int, stop: int, window: int | None, scores: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask that is True where a query does not see a key, or None if every query sees every key.

    The ``width`` queries start at ``position``. The keys are those of tokens ``[start, stop)``. The two axes of
    the mask are the last two of ``scores``: the queries, repeated for each query head of a K/V head, and the keys.
    """
    oldest = 0 if window is None else position + width - window
    if stop <= position + 1 and start >= oldest:
        return None
    queries = torch.arange(position, position + width, device=scores.device)[:, None]
    keys = torch.arange(start, stop, device=scores.device)[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return hidden.repeat(scores.shape[1] // width, 1)


def tierstore_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention. This is the function registered with transformers as "tierstore".

    With a TierStoreCache, ``key`` and ``value`` contain only the new tokens. K and V of all earlier tokens
    are read from the pages. With another cache, or none, this is plain SDPA.

    Returns:
        The output, ``[rows, q, num_heads, head_dim]``, and None instead of attention weights.

    Raises:
        ValueError: The call requires something that pages cannot represent.
    """
    layer: PagedLayer | None = kwargs.pop(HANDLE, None)
    if layer is None:
        if isinstance(key, OpaqueTensor) or isinstance(value, OpaqueTensor):
            raise ValueError(
                f"{type(module).__name__} attends to another layer's K and V, which TierStoreCache does not support: "
                "run this model without TierStoreCache"
            )
        mask = _sdpa_mask(query, key, attention_mask)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    key, value = _checked_call(module, layer, query, key, value)
    present = sorted(
        name
        for name, given in kwargs.items()
        if name not in _WITHOUT_EFFECT and given is not None and given is not False
    )
    if present or dropout:
        raise ValueError(
            f"TierStoreCache does not support {', '.join(present) or 'dropout'}, which {type(module).__name__} passes "
            f"to attention: {'run this model without TierStoreCache' if present else 'call model.eval()'}"
        )
    _check_mask(module, layer, query, attention_mask, kwargs.get("is_causal"))
    layer.mark_read()
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    over_pages: list[tuple[int, Span]] = []
    for row, span in enumerate(layer.spans):
        count = span.stop - span.start
        new = slice(query.shape[2] - count, None)
        plain = span.start == 0 and (layer.window is None or count <= layer.window)
        if count and plain and not layer.plans.takes_new(query[row, :, new], layer.window):
            out[row, new] = _attend_new(
                module, query[row, :, new], key[row, :, new], value[row, :, new], scale
            )
        elif count:
            over_pages.append((row, span))
    if over_pages:
        _attend_old(query, layer, over_pages, scale, out)
    return out, None


def _attend_old(
    query: torch.Tensor,
    layer: PagedLayer,
    rows: Sequence[tuple[int, Span]],
    scale: float,
    out: torch.Tensor,
) -> None:
    """Compute attention over pages for ``rows`` and write it into ``out``, with GPU kernels if possible.

    ``rows`` contains the index and the span of each row.
    """
    spans = [span for _, span in rows]
    news = [slice(query.shape[2] - (span.stop - span.start), None) for span in spans]
    queries = [query[row, :, new] for (row, _), new in zip(rows, news, strict=True)]
    if any(span.hosted for span in spans) or layer.plans.suits(query.dtype):
        found = layer.plans.attend(queries, spans, layer.layer_pages, scale, layer.window, layer.place)
    else:
        found = [
            attend_pages(q, layer.layer_pages, span.slots, span.stop, scale, layer.window)
            for q, span in zip(queries, spans, strict=True)
        ]
    for (row, _), new, each in zip(rows, news, found, strict=True):
        out[row, new] = each


def _attend_new(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute the attention of a prompt that reuses no prefix, by plain causal SDPA over its own K and V.

    All tensors are ``[heads, q, dim]``.
    """
    out, _ = sdpa_attention_forward(module, query[None], key[None], value[None], None, scaling=scale)
    return out[0]


def _checked_call(
    module: torch.nn.Module,
    layer: PagedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the new tokens.

    Raises:
        ValueError: The call is not attention over the K and V that the pages contain.
    """
    handed, name = layer.handed, type(module).__name__
    if handed is None or not handed.is_whole(key, value):
        raise ValueError(
            f"{name} attends to other K and V than those that the cache returned, so the pages do not contain them: "
            "run this model without TierStoreCache"
        )
    key, value = handed.plain
    rows, kv_heads, width, dim = key.shape
    found = (query.shape[0], query.shape[2], query.shape[3])
    if found != (rows, width, dim) or query.shape[1] % kv_heads:
        raise ValueError(
            f"{name} uses queries of shape {tuple(query.shape)} with new K of shape {tuple(key.shape)} (rows, heads, "
            "tokens, head_dim), but TierStoreCache needs one query for each new token, and a whole number of query "
            "heads for each K/V head: run this model without TierStoreCache"
        )
    return key, value


def _check_mask(
    module: torch.nn.Module,
    layer: PagedLayer,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
) -> None:
    """Raise ValueError unless the mask hides exactly later tokens, padding, and tokens before the window."""
    name = type(module).__name__
    window, padding = None, mask
    if isinstance(mask, SlidingMask):
        window, padding = mask.window, mask.padding
    elif mask is not None and mask.ndim != 2:
        raise ValueError(
            f"{name} uses a custom attention mask of shape {tuple(mask.shape)}, but TierStoreCache supports only "
            "causal attention, sliding windows, and left padding. Run this model or request without TierStoreCache"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and not causal and query.shape[2] > 1:
        raise ValueError(
            f"{name} is bidirectional, but TierStoreCache supports only causal attention: run this model "
            "without TierStoreCache"
        )
    if window != layer.window:
        raise ValueError(
            f"{name} uses sliding_window={window}, but the model's configuration says sliding_window={layer.window}: "
            "run this model without TierStoreCache"
        )
    layer.check_mask(padding)


def _sdpa_mask(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the 4D mask for plain SDPA, or None if SDPA needs none.

    It needs none for plain causal attention, and for a single query that sees all keys.
    """
    width, length = query.shape[2], key.shape[2]
    window: int | None = None
    # A sliding cache passes only the last keys, but the mask covers all tokens.
    before = 0 if mask is None else mask.shape[-1] - length
    if mask is not None and mask.ndim == 4:
        return mask
    if isinstance(mask, SlidingMask):
        window, mask = mask.window, mask.padding
    if mask is None and width in (1, length) and (window is None or length <= window):
        return None
    more: dict[str, Any] = {}
    if window is not None:
        more = {"mask_function": sliding_window_causal_mask_function(window), "local_size": window}
    built = sdpa_mask(
        query.shape[0],
        width,
        length,
        before + length - width,
        before,
        attention_mask=mask,
        device=query.device,
        **more,
    )
    assert built is None or isinstance(built, torch.Tensor)
    return built


def tierstore_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """Create the mask for attention. This is the function registered with transformers as "tierstore".

    Attention over pages derives causality, windows and lengths from the block table. So a causal mask becomes
    just the 2D padding mask, or None, and the mask of a sliding window becomes a 2D placeholder
    (``SlidingMask``). All other patterns become a 4D mask, which SDPA accepts and attention over pages rejects.
    Such patterns come from images, bidirectional prefixes, and a static cache that is longer than its content.
    """
    if isinstance(attention_mask, SlidingMask) and attention_mask.window == local_size:
        # With a static cache, ``generate`` creates masks in advance and passes them to the model as 2D masks.
        attention_mask = attention_mask.padding
    whole = not isinstance(q_offset, torch.Tensor) and kv_offset + kv_length == q_offset + q_length
    if whole and mask_function is causal_mask_function:
        return attention_mask
    if whole and local_size is not None and _slides(mask_function, local_size):
        seen = attention_mask
        if seen is None:
            seen = torch.ones((1, 1), dtype=torch.bool, device=device).expand(batch_size, kv_length)
        return SlidingMask.of(seen, local_size, attention_mask)
    more = kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    built = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # type: ignore[arg-type]
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        device=device,
        **more,
    )
    assert isinstance(built, torch.Tensor)
    return built


def _slides(mask_function: Callable[..., Any], window: int) -> bool:
    """Return whether a mask function is exactly transformers' causal sliding window of this length.

    transformers creates a new function for each call, so its code and the values in its closure are compared.
    If in doubt, the result is False.
    """
    known = sliding_window_causal_mask_function(window)
    return bool(_shape_of(mask_function) == _shape_of(known))


def _shape_of(function: Any) -> Any:
    """Return a function's code and the values in its closure, for comparison with another function.

    Functions among these values are represented in the same way.
    """
    if isinstance(function, tuple):
        return tuple(_shape_of(each) for each in function)
    if not isinstance(function, FunctionType):
        return function if isinstance(function, int) else id(function)
    return function.__code__, tuple(_shape_of(cell.cell_contents) for cell in function.__closure__ or ())


AttentionInterface.register(ATTENTION, tierstore_attention)
AttentionMaskInterface.register(ATTENTION, tierstore_mask)
