"""The cache classes for transformers. K and V are stored only in the store's pages.

Users create a ``TierStoreCache``. ``PagedCache`` is the cache of one model for a batch. ``TierStoreLayer`` is
the cache of one layer. ``DraftModel`` wraps the second model for assisted decoding, whose K and V are in the
same pages.
"""

# transformers leaves its own base classes untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary, proxy

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.huggingface.attention import ATTENTION, HANDLE, Handed, Plans, version_of
from tierstore.adapters.huggingface.batch import PagedBatch, Places, Span
from tierstore.adapters.huggingface.forward_args import (
    check_mask,
    check_positions,
    check_tokens,
    checked_inputs,
    fed_again,
    fed_shape,
    fed_tokens,
    from_column,
    joined_columns,
    last_columns,
    up_to_column,
    with_tokens_before,
)
from tierstore.adapters.huggingface.hooks import attach
from tierstore.adapters.huggingface.identity import check_weights, plain_model, weights_now
from tierstore.adapters.huggingface.model_spec import check_pages, checked_shape, common_window, kv_shape
from tierstore.adapters.huggingface.prefix import Tail, given_back
from tierstore.adapters.huggingface.request import (
    HostPages,
    PageGroups,
    Storing,
    Terms,
    root_of,
    unpadded,
)
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Tier, require_flag


class LayerOwner(Protocol):
    """The cache that a layer belongs to."""

    spans: Sequence[Span]
    plans: Plans
    unread: bool
    """Whether K and V of a layer were written, but the attention function has not read them yet."""
    handed: tuple[int, Handed] | None
    """Index of the layer that was written last, and the K and V that its ``update`` returned."""

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Write K and V of the new tokens into the pages of ``layer``."""
        ...

    def check_padding(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError unless the mask hides exactly the batch's padding."""
        ...

    @property
    def columns(self) -> int:
        """Return the number of columns in the cache: tokens, and the padding before them."""
        ...


class TierStoreLayer(CacheLayerMixin):
    """The transformers cache of one layer. K and V are in the pages, so ``keys`` and ``values`` stay None."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(
        self,
        owner: LayerOwner,
        position: int,
        pages: torch.Tensor,
        place: tuple[int, int],
        window: int | None,
    ) -> None:
        """Create the layer's cache.

        Args:
            owner: The cache that the layer belongs to. The layer keeps only a weak reference to it, so keep it alive.
            position: Index of the layer in the model.
            pages: All pages of the layer's KV group, ``[num_slots, layers, 2, page_size, num_kv_heads,
                head_dim]``.
            place: The index of the layer's KV group, and the layer's index in that group.
            window: Number of tokens that a query sees, including its own. None for all.
        """
        super().__init__()
        self.position = position
        self.place = place
        self.window = window
        # weak, so that a cache dropped without close() is deleted at once, not by the cycle collector
        self._owner: LayerOwner = proxy(owner)
        self._pages = pages

    @property
    def layer_pages(self) -> torch.Tensor:
        """Return this layer's part of all pages, ``[num_slots, 2, page_size, num_kv_heads, head_dim]``."""
        return self._pages[:, self.place[1]]

    @property
    def spans(self) -> Sequence[Span]:
        """Return each row's part of the current forward pass."""
        return self._owner.spans

    @property
    def plans(self) -> Plans:
        """Return the attention kernels with their plans for the current forward pass."""
        return self._owner.plans

    @property
    def handed(self) -> Handed | None:
        """Return what this layer's ``update`` returned in the current pass.

        The result is None once another layer has been updated or the pass has ended.
        """
        last = self._owner.handed
        return None if last is None or last[0] != self.position else last[1]

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError unless the mask hides exactly the padding."""
        self._owner.check_padding(mask)

    def mark_read(self) -> None:
        """Record that the attention function reads this layer from the pages."""
        self._owner.unread = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens into the pages, and return aliases of both for the attention call.

        Also adds this layer to the keyword arguments of that call, so that "tierstore" attention can read the
        pages. That attention accepts no K and V except the aliases (``handed``).

        Args:
            key_states: K of the new tokens, ``[rows, num_kv_heads, q, head_dim]``.
            value_states: V of the new tokens, in the same shape.
            args: Ignored.
            kwargs: Must contain ``kwargs``, the keyword arguments of the attention call.

        Raises:
            ValueError: The cache is used in a way that pages cannot represent. This layer was not written.
            CapacityError: HBM did not have enough space in time. Nothing was written.
        """
        attention: dict[str, Any] | None = kwargs.get("kwargs")
        if attention is None:
            raise ValueError(
                "this model does not pass the keyword arguments of its attention calls to the cache, so "
                "TierStoreCache cannot serve it: run it without TierStoreCache"
            )
        self._owner.write(self, key_states, value_states, attention.get("position_ids"))
        attention[HANDLE] = self
        handed = Handed.of(key_states, value_states)
        self._owner.handed = self.position, handed
        return handed.keys, handed.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages already exist."""

    def get_seq_length(self) -> int:
        """Return the number of columns in the cache: tokens, and the padding before them."""
        return self._owner.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask for ``query_length`` queries covers, and the index of the first key: 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, because there is no maximum. If HBM is too small, ``update`` raises CapacityError."""
        return -1


class _Part(NamedTuple):
    """The only row of a forward pass. Implements ``compute_rate.Computed``."""

    computed: int
    scheduled: int


_LEAST_TOKENS = 64
"""Forward passes of fewer tokens are not measured: they say little about the time for a whole prompt."""
_rates: WeakKeyDictionary[PreTrainedModel, ComputeRate] = WeakKeyDictionary()


def _rate_of(model: PreTrainedModel) -> ComputeRate:
    """Return the compute rate of ``model``. It stays unknown on a GPU, where passes are not measured."""
    return _rates.setdefault(model, ComputeRate(_LEAST_TOKENS))


class PagedCache(Cache):
    """One model's KV cache for a batch of sequences, kept in the store's pages. Not thread-safe."""

    def __init__(self, batch: PagedBatch, model: PreTrainedModel, number: int, first_group: int) -> None:
        """Create the cache of one of the models that share the pages.

        Args:
            batch: The sequences, shared by the caches of all models.
            model: The model. It has hooks until ``close``.
            number: Index of the model among those that share the pages.
            first_group: Index of the model's first KV group.
        """
        shape = kv_shape(model.config)
        self.batch = batch
        self.spans: Sequence[Span] = ()
        terms = batch.terms
        self.plans = Plans(terms.pages.device, host=None if terms.host is None else terms.store.host_memory)
        self.unread = False
        self.handed: tuple[int, Handed] | None = None
        self._number = number
        self._model = model
        self._trains = model.training
        self._next_layer = 0
        self._width = 0
        self._fed: list[list[int]] | None = None
        self._places: Places | None = None
        self._closed = False
        self._seen = False
        self._masks: list[tuple[torch.Tensor | None, int]] = []
        self._positions: list[torch.Tensor] = []
        """The position tensors that passed the check in the current pass. ``_masks`` contains such mask tensors."""
        self._rate: ComputeRate | None = None
        """The compute rate that measures the current pass. None if the pass is not measured."""
        self._asked = 0
        """Number of columns that the caller fed to the current pass, if others were prepended; else 0."""
        self._before: list[tuple[Any, int]] = []
        """The outputs of the passes that fed earlier columns of the current call, each with its number of columns."""
        groups = batch.terms.pages.groups[first_group:]
        layers: list[Any] = [
            TierStoreLayer(
                self,
                i,
                groups[place.group],
                (first_group + place.group, place.index),
                shape.windows[place.group],
            )
            for i, place in enumerate(shape.places)
        ]
        super().__init__(layers=layers)
        self._hooks, self._detach = attach(model, self)
        self._hooks.forget_positions()

    @property
    def columns(self) -> int:
        """Return the number of columns in the cache: tokens, and the padding before them."""
        return self.batch.columns[self._number]

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Wait for the layer's stored pages, then write K and V of the new tokens.

        Called for each layer in order. Layer 0 allocates the slots for all layers.

        Raises:
            ValueError: The cache is used in a way that pages cannot represent.
            CapacityError: HBM did not have enough space in time.
        """
        if layer.position == 0:
            self._begin(layer, keys, values, positions)
        else:
            self._check_read()
        if layer.position != self._next_layer:
            raise ValueError(
                f"layer {layer.position} wrote K and V when layer {self._next_layer} was due: TierStoreCache serves "
                "only models that run each layer once, in order. Run this model without TierStoreCache"
            )
        heads, dim = layer.layer_pages.shape[3:]
        for name, given in (("K", keys), ("V", values)):
            if (given.shape[1], given.shape[3]) != (heads, dim):
                raise ValueError(
                    f"layer {layer.position} computes {name} with {given.shape[1]} heads of dimension "
                    f"{given.shape[3]}, but the model's configuration says {heads} heads of dimension {dim}: run "
                    "this model without TierStoreCache"
                )
        self.batch.await_layer(*layer.place)
        to = self._places
        assert to is not None
        pages = layer.layer_pages
        pages[to.slots, 0, to.offsets] = keys[to.rows, :, to.columns]
        pages[to.slots, 1, to.offsets] = values[to.rows, :, to.columns]
        self.unread = True
        self._next_layer = layer.position + 1

    def check_padding(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError unless the mask hides exactly the padding that this cache was created for.

        Each mask is checked only once per pass, because the check waits for the GPU.
        """
        version = 0 if mask is None else version_of(mask)
        if any(mask is each and version == then for each, then in self._masks):
            return
        check_mask(mask, self.batch.paddings)
        self._masks.append((mask, version))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns.

        Raises:
            ValueError: ``tokens_to_remove`` is positive. transformers passes zero or a negative number.
        """
        count = int(tokens_to_remove)
        if count > 0:
            raise ValueError(
                f"crop must be given the number of tokens to remove as a negative number, got {count}"
            )
        if count:
            self.batch.crop(self._number, -count)

    def reset(self) -> None:
        """Remove all tokens of all models. The cache of a draft model removes only that model's tokens."""
        if self._number == 0:
            self.plans.close()
            self.batch.reset()
        else:
            self.batch.crop(self._number, self.columns)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``i`` by the current row ``beam_idx[i]``. Pages are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times. Pages are shared."""
        self.batch.expand(len(self.batch.rows) * repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows selected by ``indices``, which are row numbers or a boolean mask.

        Raises:
            IndexError: A row does not exist.
        """
        self.batch.select(torch.arange(len(self.batch.rows))[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Raise TypeError, because the cache cannot be copied."""
        raise TypeError(
            "a TierStoreCache cannot be copied: open another one for the prompt, which reuses the stored pages"
        )

    def close(self) -> None:
        """Stop taking part in forward passes. The last open cache of a model removes the hooks. Idempotent."""
        self._closed = True
        self._detach()
        self.plans.close()

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError if the prompts that ``generate`` got are not those that this cache was created for.

        Also lets the store continue its transfers.
        """
        if self.columns and not self._is_prompt(input_ids):
            self._expect(input_ids.tolist(), 0)
        self.batch.terms.store.poll()

    def _is_prompt(self, input_ids: torch.Tensor) -> bool:
        """Return True if ``input_ids`` are known to equal the prompts. Otherwise, the caller must compare them."""
        return False

    def _see_tokens(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the tokens of a forward pass, and return the arguments to use instead.

        Runs before each pass of the model that uses this cache. In assisted decoding, a warm cache is fed the
        whole prompt again: columns that are already in the cache are removed from the arguments. Tokens whose
        stored pages could not be loaded are prepended.
        """
        kwargs = checked_inputs(module, args, kwargs)
        self._masks, self._positions = [], []
        self.batch.begin_pass()
        first = self.columns
        if fed_again(args, kwargs, self.columns, self.batch.paddings):
            self._expect(fed_tokens(args, kwargs), 0)
            args, kwargs = from_column(args, kwargs, self.columns)
        args, kwargs, before = self._feed_in_parts(module, args, kwargs)
        self._before, first = before, self.columns
        self._masks, self._positions = [], []
        self._fed = fed_tokens(args, kwargs)
        if self._fed is not None:
            self._hooks.forget_positions()
        elif self.batch.shortened and kwargs.get("position_ids") is None:
            raise ValueError(
                "embeddings without position_ids were fed after a forward pass was interrupted, for example by Ctrl-C: "
                f"the cache now holds {self.columns} columns; feed the embeddings after these columns, with "
                "position_ids, or reset the cache"
            )
        # Pages can only arrive layer by layer during the pass if the tokens are known and no row will be
        # repeated: repeated rows copy pages before the first layer is computed.
        alone = self._fed is not None and len(self._fed) == len(self.batch.rows)
        # Pages that move to host memory to make room must have arrived.
        if self.batch.arriving:
            alone = alone and not self.batch.tight(fed_shape(args, kwargs)[1])
        if not (alone and self.batch.comes()):
            self.batch.settle()
        self._asked = 0
        if self.batch.behind:
            args, kwargs = self._feed_owed(module, args, kwargs)
            self._fed, first = fed_tokens(args, kwargs), self.columns
        self._expect(self._fed, first)
        self._seen = True
        self._measure(first)
        return args, kwargs

    def _end_pass(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Seal full pages after a forward pass, or repeat the pass if pages that it read were not loaded."""
        self._check_read()
        self.handed = None
        if self._next_layer != len(self.layers):
            raise ValueError(
                f"{type(module).__name__} wrote K and V of {self._next_layer} layers, but its configuration says "
                f"{len(self.layers)} layers: run this model without TierStoreCache"
            )
        # Check before pages are sealed: this pass must have used the weights that their keys refer to.
        check_weights(self._model, self.batch.terms.weights[self._number])
        if self._rate is not None:
            self._rate.ended(id(self), monotonic())
        asked = self._asked
        if self.batch.settle():
            return module(*args, **kwargs)
        self.batch.finish(self._number, self._width, self._fed)
        self._fed, self._next_layer = None, 0
        if asked:
            output = last_columns(output, asked, self._width)
        before, self._before = self._before, []
        if before:
            outputs, widths = zip(*before, strict=True)
            output = joined_columns([*outputs, output], [*widths, asked or self._width])
        return output if asked or before else None

    def _leave_pass(self) -> None:
        """After a failed pass, let the next pass prepend the same columns again."""
        self.batch.not_fed()

    def _feed_in_parts(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[tuple[Any, int]]]:
        """If HBM cannot hold all pages that a pass writes, feed its first columns in passes of their own.

        Between these passes, pages can move to host memory.

        Returns:
            The arguments for the last columns, and the output and the number of columns of each earlier pass.
        """
        before: list[tuple[Any, int]] = []
        while (width := fed_shape(args, kwargs)[1]) and self.batch.too_wide(width):
            stop = self.batch.most_columns
            part = up_to_column(args, kwargs, self.columns, stop)
            self.batch.in_parts = True
            try:
                before.append((module(*part[0], **part[1]), stop))
            finally:
                self.batch.in_parts = False
            args, kwargs = from_column(args, kwargs, stop)
        return args, kwargs, before

    def _measure(self, first: int) -> None:
        """Start to measure the pass if it runs on the CPU, has a single row and does not wait for pages."""
        self._rate = None
        fed = self._fed
        if fed is None or len(fed) != 1 or self.batch.arriving or self.batch.terms.pages.device.type != "cpu":
            return
        rate = _rate_of(self._model)
        if rate.ordered(id(self), [_Part(first, len(fed[0]))], monotonic()):
            self._rate = rate

    def _check_inputs(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reject all inputs, other than tokens, that would affect K and V.

        Runs before each call of the whole model.
        """
        return args, checked_inputs(module, args, kwargs)

    def _see_positions(self, positions: torch.Tensor) -> None:
        """Raise ValueError if the positions do not match the tokens.

        Called before the base model (or a text model in it) runs, and again in its first layer. Each tensor
        is checked only once per pass, because a comparison waits for the GPU.
        """
        if any(positions is each for each in self._positions):
            return
        rows = positions.shape[-2] if positions.ndim > 1 else 1
        times, odd = divmod(rows, len(self.batch.paddings))
        paddings = self.batch.paddings
        if times > 1 and not odd:
            # Each row will be repeated, and its copies will be adjacent (``PagedBatch.expand``).
            paddings = [padding for padding in paddings for _ in range(times)]
        try:
            check_positions(positions, paddings, self.columns)
        except ValueError as error:
            if not self._hooks.stateful:
                raise
            name = type(self._hooks.stateful[0]).__name__
            raise ValueError(
                f"{error}. {name} still uses the positions of its last request with images, which ran after this "
                "TierStoreCache was opened: open another TierStoreCache for this request"
            ) from None
        self._positions.append(positions)

    def _check_read(self) -> None:
        if self.unread:
            raise ValueError(
                "the model wrote K and V into pages but did not read them: load it with "
                f'attn_implementation="{ATTENTION}". If you did, the model bypasses that attention function, '
                "and TierStoreCache cannot serve it"
            )

    def _feed_owed(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepend the tokens whose pages could not be loaded. The caller gets no output for them."""
        rows, self._asked = fed_shape(args, kwargs)
        device = self.batch.terms.pages.device
        tokens, positions = (torch.tensor(each, device=device) for each in self.batch.owed(rows))
        assert isinstance(module, PreTrainedModel)
        return with_tokens_before(args, kwargs, tokens, positions, module.get_input_embeddings())

    def _expect(self, tokens: list[list[int]] | None, first_column: int) -> None:
        if tokens and not tokens[0]:
            raise ValueError(
                f"the cache already holds all {self.columns} columns of the input: crop or reset it"
            )
        if tokens:
            self.batch.expect(tokens, first_column)

    def _begin(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Check the call, then allocate slots for the new columns.

        Raises:
            ValueError: The pass would silently produce wrong output.
            CapacityError: HBM did not have enough space in time.
        """
        if self._closed:
            raise ValueError("this TierStoreCache is closed: create another one for the next request")
        if not self._seen:
            raise ValueError(
                "this TierStoreCache was created for another model: create one with model= set to the model that runs"
            )
        self._seen = False
        if keys.requires_grad or values.requires_grad:
            raise ValueError("pages keep no gradients: run the model under torch.no_grad()")
        if self._model.training and not self._trains:
            raise ValueError(
                "the model was switched to training mode after this TierStoreCache was created: call model.eval()"
            )
        pages, width = layer.layer_pages, keys.shape[2]
        for given in (keys, values):
            if given.dtype != pages.dtype or given.device != pages.device:
                raise ValueError(
                    f"the model computes in {given.dtype} on {given.device}, but the pages hold {pages.dtype} on "
                    f"{pages.device}: open the store with page_specs of this model, on the model's device"
                )
        device = pages.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != pages.dtype:
            raise ValueError(
                f"the model runs under torch.autocast in {torch.get_autocast_dtype(device)}, but the pages hold K and "
                f"V computed in {pages.dtype}: run it without autocast"
            )
        self.batch.expand(keys.shape[0])
        if positions is not None and positions.ndim > 1:
            self._see_positions(positions)
        elif not self._positions and any(self.batch.paddings):
            # Without positions, a model counts all columns. But K in the pages belongs to positions that do
            # not count padding.
            raise ValueError(
                f"a padded batch ({', '.join(map(str, self.batch.paddings))} columns on the left) was given without "
                f"position_ids, and {type(self._model).__name__} passes none to its attention: pass position_ids, as "
                "generate does"
            )
        if self._fed is not None and [len(row) for row in self._fed] != [width] * keys.shape[0]:
            self._fed = None
        self._width = width
        self.spans, self._places = self.batch.begin(self._number, width, self._fed)
        self.plans.renew()
        self.unread, self._next_layer = False, 0


class DraftModel:
    """A draft model to pass as ``assistant_model``. All attributes except ``generate`` are the model's."""

    def __init__(self, model: PreTrainedModel, cache: Cache, argument: str) -> None:
        """Wrap ``model``, which accepts ``cache`` as the keyword ``argument``."""
        self.cache: Any = cache
        self._model: Any = model
        self._argument = argument

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``generate`` with ``cache`` instead of a new cache.

        Also passes a mask that hides only the padding, not pad tokens within the text, because transformers
        does not pass on the main model's mask.
        """
        given = {"cache", "past_key_values"} & set(kwargs)
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = self._mask(ids)
        return self._model.generate(*args, **kwargs, **({} if given else {self._argument: self.cache}))

    def _mask(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        for row, padding in zip(mask, self.cache.batch.paddings, strict=True):
            row[:padding] = 0
        return mask


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the keyword under which the model's ``forward`` and ``generate`` accept a cache.

    The name depends on the version of transformers.
    """
    parameters = inspect.signature(plain_model(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class TierStoreCache(PagedCache):
    """A transformers cache that keeps its K/V in the store's pages and reuses stored prefixes automatically.

    The constructor looks up the prompts and loads their stored prefixes into HBM. After that,
    ``get_seq_length()`` is the number of columns that ``generate``, called with the whole prompts, will not
    compute again. Pages of the prompt and the answer are sealed when they are full, so later requests can reuse both.
    The model must have been loaded with ``attn_implementation="tierstore"``.

    The cache pins pages, and adds hooks to the model, until ``close``. So use it as a context manager. Not
    thread-safe.
    """

    def __init__(
        self,
        store: TierStore,
        input_ids: torch.Tensor | Sequence[int],
        attention_mask: torch.Tensor | None = None,
        *,
        model: PreTrainedModel,
        draft: PreTrainedModel | None = None,
        salt: bytes = b"",
        extra: Iterable[Extra] = (),
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        wait_for_room_s: float | None = None,
        storing: Storing = "all",
        exact: bool = False,
        streaming: bool = True,
        tail: Tail | None = None,
    ) -> None:
        """Look up the prompts and load their stored prefixes.

        Pages that cannot be loaded before ``deadline_s``, or are not loaded within ``timeout_s``, are
        computed instead.

        Args:
            store: The store, opened with ``page_specs(model, ...)``.
            input_ids: Whole prompts, ``[B, T]``, left-padded according to ``attention_mask``, or a single
                prompt, ``[T]``.
            attention_mask: ``[B, T]``. None if there is no padding.
            model: The model, loaded with ``attn_implementation="tierstore"``.
            draft: The draft model for assisted decoding. Pass ``draft_model`` to ``generate``. Its K/V are
                stored in the same pages, in the KV groups that ``page_specs(model, page_size, draft=draft)``
                adds.
            salt: Separates the keys of tenants. See ``TierStore.keys``.
            extra: Everything that K/V depend on in addition to the tokens. See ``TierStore.keys``.
            deadline_s: Seconds until the pages are needed. None for no deadline.
            timeout_s: Maximum time in seconds to wait until stored pages are loaded, and until slots are
                free. None means 10 s for slots. For stored pages, None means the time to compute them instead,
                but at least 10 s and at most 60 s. On a GPU, where that time is not measured, None means 10 s.
            wait_for_room_s: Maximum time in seconds to wait for space for stored pages while other pages in
                HBM are being saved. After that, the stored pages are computed instead of loaded. None means
                the time to compute them, but at least 1 s and at most 60 s; 1 s if it is unknown, as on a
                GPU. The time never exceeds ``timeout_s``.
            storing: "all", "memory-only" (never on disk), "read-only" (reuse pages, store none) or "no-store"
                (neither reuse nor store pages).
            exact: Whether to ignore pages that went through a lossy codec or were computed from such pages.
            streaming: Whether pages that do not fit into HBM may stream from host memory in every forward pass.
                Otherwise such a request fails with CapacityError. Requests with a draft model, requests that store no
                pages ("read-only", "no-store") and stores with ``host.codec`` never stream.
            tail: A partially filled page that ``take_tail`` returned. The cache takes ownership of it, even
                if an exception is raised.

        Raises:
            ValueError: The adapter does not support this model or these prompts, or the store was opened for
                another model.
        """
        with given_back(store, tail):
            pages = PageGroups(store)
            models = [plain_model(each) for each in ((model,) if draft is None else (model, draft))]
            shapes = [checked_shape(each) for each in models]
            check_pages(pages, shapes)
            prompts, width = unpadded(input_ids, attention_mask)
            for each in models:
                check_tokens(each, prompts)
            if tail is not None and len(prompts) != 1:
                raise ValueError(f"tail needs a single prompt, got {len(prompts)} prompts")
            extra = tuple(extra)
            weights, changed = weights_now(
                store, models, told=any(not isinstance(item, tuple) for item in extra)
            )
            extra = (*extra, *changed)
            require_flag("streaming", streaming)
            window = common_window(shapes)
            streams = streaming and draft is None and window is None and storing in ("all", "memory-only")
            terms = Terms(
                store=store,
                pages=pages,
                num_models=len(models),
                weights=weights,
                window=window if len(prompts) == 1 else None,
                root=root_of(store, pages.page_size, salt, extra),
                salt=salt,
                extra=extra,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                wait_for_room_s=wait_for_room_s,
                compute_s=partial(_rate_of(models[0]).seconds, 0),
                storing=storing,
                exact=exact,
                host=HostPages.of(store) if streams else None,
            )
        # a copy, because the caller may reuse its tensor
        self._prompt = torch.as_tensor(input_ids).clone()
        batch = PagedBatch(terms, prompts, width, tail)
        self._draft: DraftModel | None = None
        with ExitStack() as undo:
            undo.callback(batch.close)
            super().__init__(batch, models[0], number=0, first_group=0)
            undo.callback(super().close)
            if draft is not None:
                argument = cache_argument(draft)
                paged = PagedCache(batch, models[1], number=1, first_group=len(shapes[0].windows))
                self._draft = DraftModel(draft, paged, argument)
            undo.pop_all()

    @property
    def draft_model(self) -> DraftModel:
        """Return the ``assistant_model`` for ``generate``: the draft model, with its K/V in the same pages."""
        if self._draft is None:
            raise ValueError(
                "this cache was created without a draft model: pass draft= to create one with it"
            )
        return self._draft

    @property
    def reused_tokens(self) -> int:
        """Return the number of prompt tokens, over all rows, that need not be computed."""
        return sum(self.batch.reused_by_tier.values())

    @property
    def reused_by_tier(self) -> Counter[Tier]:
        """Return ``reused_tokens``, split by the tier in which the tokens were found."""
        return Counter(self.batch.reused_by_tier)

    @property
    def missing_because(self) -> str | None:
        """Return why stored pages of a prompt are computed instead of reused, or None if all are reused.

        The reasons are those of ``Lease.missing_because``, such as "no_room", "deadline" or "failed", and
        "late": the pages were not loaded before the request stopped waiting for them. Pages that no tier has
        ("not_found") do not count. With several prompts, the result is the reason of the first prompt that has one.
        """
        reasons = (row.missed for row in self.batch.rows)
        return next((why for why in reasons if why not in (None, "not_found")), None)

    @property
    def copied_tokens(self) -> int:
        """Return the number of reused tokens in pages that were copied.

        A page is copied if a prompt matches only its start.
        """
        return self.batch.copied_tokens

    @property
    def shared_pages(self) -> int:
        """Return how many pages are currently used by at least two rows."""
        return self.batch.shared_pages

    def _is_prompt(self, input_ids: torch.Tensor) -> bool:
        same = self._prompt.shape == input_ids.shape and self._prompt.dtype == input_ids.dtype
        return same and self._prompt.device == input_ids.device and torch.equal(self._prompt, input_ids)

    def take_tail(self) -> Tail | None:
        """Remove the partially filled last page from the only row, and return it for the ``tail`` of a later cache.

        The caller owns the page's slot. Return None if there are several rows, or if the row has no such page
        or shares it.
        """
        return self.batch.take_tail()

    def close(self) -> None:
        """Seal full pages, free all other pages, and release the leases and hooks. Idempotent.

        Later requests can still find the sealed pages.
        """
        super().close()
        if self._draft is not None:
            self._draft.cache.close()
        self.batch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
