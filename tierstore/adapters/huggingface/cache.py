"""The cache that transformers uses. Its K and V are only in the store's pages.

Users make a ``TierStoreCache``. ``PagedCache`` is the cache of one model for a batch, ``TierStoreLayer`` that
of one layer, and ``DraftModel`` gives assisted decoding a second model whose K and V are in the same pages.
"""

# transformers leaves its own base classes untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self
from weakref import proxy

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

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
    last_columns,
    with_tokens_before,
)
from tierstore.adapters.huggingface.hooks import attach
from tierstore.adapters.huggingface.identity import check_weights, plain_model, weights_now
from tierstore.adapters.huggingface.model_spec import check_pages, checked_shape, common_window, kv_shape
from tierstore.adapters.huggingface.prefix import Tail, given_back
from tierstore.adapters.huggingface.request import PageGroups, Storing, Terms, root_of, unpadded
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Tier


class LayerOwner(Protocol):
    """The cache that a layer belongs to."""

    spans: Sequence[Span]
    plans: Plans
    unread: bool
    handed: tuple[int, Handed] | None
    """Position of the layer that was written last, and the K and V that its ``update`` returned."""

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Write new K and V."""
        ...

    def check_padding(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError if the mask hides anything but the batch's padding."""
        ...

    @property
    def columns(self) -> int:
        """Number of columns fed so far."""
        ...


class TierStoreLayer(CacheLayerMixin):
    """One model layer's handle on the pages. ``keys`` and ``values`` always stay None."""

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
        """Make a handle.

        Args:
            owner: The cache, which must outlive this handle's use.
            position: Index of the layer in the model.
            pages: All pages of the layer's KV group, ``[num_slots, layers, 2, page_size, num_kv_heads,
                head_dim]``.
            place: The layer's KV group, and its index in that group.
            window: Tokens that a query sees, its own included; None for all.
        """
        super().__init__()
        self.position = position
        self.place = place
        self.window = window
        # weak, so that a cache dropped without close() is deleted at once, not when cycles are collected
        self._owner: LayerOwner = proxy(owner)
        self._pages = pages

    @property
    def layer_pages(self) -> torch.Tensor:
        """This layer of all pages: ``[num_slots, 2, page_size, num_kv_heads, head_dim]``."""
        return self._pages[:, self.place[1]]

    @property
    def spans(self) -> Sequence[Span]:
        """What the current forward pass computes, row by row."""
        return self._owner.spans

    @property
    def plans(self) -> Plans:
        """The attention kernels planned for the current forward pass."""
        return self._owner.plans

    @property
    def handed(self) -> Handed | None:
        """The K and V that this layer's last ``update`` returned; None once another layer was written."""
        last = self._owner.handed
        return None if last is None or last[0] != self.position else last[1]

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides anything but the padding."""
        self._owner.check_padding(mask)

    def mark_read(self) -> None:
        """Note that the attention function reads this layer from the pages."""
        self._owner.unread = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens, ``[rows, num_kv_heads, q, head_dim]`` each, into the pages; return them.

        Adds this handle to the keywords of the attention call, through which "tierstore" attention reads the
        pages. Because it reads pages, that attention refuses K and V other than the objects returned here
        (``handed``).

        Raises:
            ValueError: The cache is used in a way that pages cannot express. Nothing was written.
            CapacityError: HBM has no space. Nothing was written.
        """
        attention: dict[str, Any] | None = kwargs.get("kwargs")
        if attention is None:
            raise ValueError(
                "this model does not hand its attention keywords to the cache: TierStoreCache cannot serve it"
            )
        self._owner.write(self, key_states, value_states, attention.get("position_ids"))
        attention[HANDLE] = self
        handed = Handed.of(key_states, value_states)
        self._owner.handed = self.position, handed
        return handed.keys, handed.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages exist."""

    def get_seq_length(self) -> int:
        """Return the number of columns in the cache: tokens, and the padding before them."""
        return self._owner.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of K and V for a mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum. If HBM is too small, ``update`` raises CapacityError."""
        return -1


class PagedCache(Cache):
    """The cache of one model for a batch of sequences in the store's pages. Not thread-safe."""

    def __init__(self, batch: PagedBatch, model: PreTrainedModel, number: int, first_group: int) -> None:
        """Make the cache of one of the models that share the pages.

        Args:
            batch: The sequences, shared by the caches of all models.
            model: The model; hooks on it remain until ``close``.
            number: Index of the model among those that share the pages.
            first_group: Index of the model's first KV group.
        """
        shape = kv_shape(model.config)
        self.batch = batch
        self.spans: Sequence[Span] = ()
        self.plans = Plans(batch.terms.pages.device)
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
        """Position tensors of the current pass that have been checked, like the masks in ``_masks``."""
        self._asked = 0
        """Number of columns whose output the caller of the current pass expects; the pass may be fed more."""
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
        """Number of columns fed so far: tokens, and the padding before them."""
        return self.batch.columns[self._number]

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Wait for the layer's pages and write new K and V.

        Called for each layer in order; layer 0 allocates space first.
        """
        if layer.position == 0:
            self._begin(layer, keys, values, positions)
        else:
            self._check_read()
        if layer.position != self._next_layer:
            raise ValueError(
                f"layer {layer.position} wrote K and V when layer {self._next_layer} was due: TierStoreCache serves "
                "models that run each of their layers once, in order"
            )
        heads, dim = layer.layer_pages.shape[3:]
        for name, given in (("K", keys), ("V", values)):
            if (given.shape[1], given.shape[3]) != (heads, dim):
                raise ValueError(
                    f"layer {layer.position} computes {name} in {given.shape[1]} heads of {given.shape[3]}, "
                    f"but the model's configuration, and so its pages, have {heads} heads of {dim}: "
                    "TierStoreCache cannot serve it"
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
        """Raise ValueError if the mask hides anything but the padding that this cache was made for."""
        version = 0 if mask is None else version_of(mask)
        if any(mask is each and version == then for each, then in self._masks):
            return
        check_mask(mask, self.batch.paddings)
        self._masks.append((mask, version))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens. transformers passes a count that is zero or negative."""
        count = int(tokens_to_remove)
        if count > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {count}")
        if count:
            self.batch.crop(self._number, -count)

    def reset(self) -> None:
        """Forget all tokens."""
        if self._number == 0:
            self.batch.reset()
        else:
            self.batch.crop(self._number, self.columns)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``i`` by the present row ``beam_idx[i]``. Pages are shared, not copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times. Pages are shared."""
        self.batch.expand(len(self.batch.rows) * repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, given by number or by a boolean mask. IndexError for a row that does not exist."""
        self.batch.select(torch.arange(len(self.batch.rows))[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Raise TypeError: the cache cannot be copied."""
        raise TypeError(
            "a TierStoreCache cannot be copied: open another one for the prompt, which reuses the stored pages"
        )

    def close(self) -> None:
        """Stop taking part in forward passes, and remove the hooks from the model. Calling it again has no effect."""
        self._closed = True
        self._detach()

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError if ``generate`` is given a prompt other than the one this cache was made for."""
        if self.columns and not self._is_prompt(input_ids):
            self._expect(input_ids.tolist(), 0)
        self.batch.terms.store.poll()

    def _is_prompt(self, input_ids: torch.Tensor) -> bool:
        """Return True if ``input_ids`` are known to be the prompts; False if tokens must be compared."""
        return False

    def _see_tokens(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remember the tokens of a forward pass. Runs before each pass of the model that has this cache.

        Assisted decoding feeds the whole prompt again to a warm cache; the columns that the cache holds are
        removed here. Tokens whose pages failed to arrive are put in front of the others.
        """
        kwargs = checked_inputs(module, args, kwargs)
        self._masks, self._positions = [], []
        first = self.columns
        if fed_again(args, kwargs, self.columns, self.batch.paddings):
            self._expect(fed_tokens(args, kwargs), 0)
            args, kwargs = from_column(args, kwargs, self.columns)
        self._fed = fed_tokens(args, kwargs)
        if self._fed is not None:
            self._hooks.forget_positions()
        # Where rows diverge, pages are copied before the first layer is computed.
        alone = self._fed is not None and len(self._fed) == len(self.batch.rows)
        if not (alone and self.batch.comes()):
            self.batch.settle()
        self._asked = 0
        if self.batch.behind:
            args, kwargs = self._feed_owed(module, args, kwargs)
            self._fed, first = fed_tokens(args, kwargs), self.columns
        self._expect(self._fed, first)
        self._seen = True
        return args, kwargs

    def _end_pass(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """After each forward pass, repeat it if pages that it read did not arrive; then seal full pages."""
        self._check_read()
        self.handed = None
        if self._next_layer != len(self.layers):
            raise ValueError(
                f"{type(module).__name__} wrote K and V of {self._next_layer} layers, its configuration says "
                f"{len(self.layers)}: TierStoreCache cannot serve it"
            )
        # Before pages are sealed, because this pass must have used the weights that their keys name.
        check_weights(self._model, self.batch.terms.weights[self._number])
        asked = self._asked
        if self.batch.settle():
            return module(*args, **kwargs)
        self.batch.finish(self._number, self._width, self._fed)
        self._fed, self._next_layer = None, 0
        return last_columns(output, asked, self._width) if asked else None

    def _check_inputs(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before each call of the whole model, refuse inputs other than tokens that would affect K and V."""
        return args, checked_inputs(module, args, kwargs)

    def _see_positions(self, positions: torch.Tensor) -> None:
        """Raise ValueError if positions are not those of the tokens. Runs before the model or its text model.

        Each tensor is checked once per pass, because a comparison waits for the GPU.
        """
        if any(positions is each for each in self._positions):
            return
        rows = positions.shape[-2] if positions.ndim > 1 else 1
        times, odd = divmod(rows, len(self.batch.paddings))
        paddings = self.batch.paddings
        if times > 1 and not odd:
            # Rows that will be repeated (``PagedBatch.expand``).
            paddings = [padding for padding in paddings for _ in range(times)]
        try:
            check_positions(positions, paddings, self.columns)
        except ValueError as error:
            if not self._hooks.stateful:
                raise
            name = type(self._hooks.stateful[0]).__name__
            raise ValueError(
                f"{error}. {name} keeps the positions of its last request with images: "
                "open a TierStoreCache after that request, not before"
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
        """Put the tokens whose pages failed to arrive in front of those given, which alone get an output."""
        rows, self._asked = fed_shape(args, kwargs)
        device = self.batch.terms.pages.device
        tokens, positions = (torch.tensor(each, device=device) for each in self.batch.owed(rows))
        assert isinstance(module, PreTrainedModel)
        return with_tokens_before(args, kwargs, tokens, positions, module.get_input_embeddings())

    def _expect(self, tokens: list[list[int]] | None, first_column: int) -> None:
        if tokens and not tokens[0]:
            raise ValueError(
                f"the cache holds {self.columns} columns already, all that it is given: crop or reset it"
            )
        if tokens:
            self.batch.expect(tokens, first_column)

    def _begin(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Raise ValueError for use that would silently give wrong output, then allocate the new columns."""
        if self._closed:
            raise ValueError("this TierStoreCache is closed")
        if not self._seen:
            raise ValueError("this TierStoreCache was made for another model than the one that runs")
        self._seen = False
        if keys.requires_grad or values.requires_grad:
            raise ValueError("pages keep no gradients: run the model under torch.no_grad()")
        if self._model.training and not self._trains:
            raise ValueError(
                "the model was switched to training mode since this TierStoreCache was made: call model.eval()"
            )
        pages, width = layer.layer_pages, keys.shape[2]
        for given in (keys, values):
            if given.dtype != pages.dtype or given.device != pages.device:
                raise ValueError(
                    f"the model computes {given.dtype} on {given.device}, the pages hold {pages.dtype} on "
                    f"{pages.device}"
                )
        device = pages.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != pages.dtype:
            raise ValueError(
                f"the model runs under torch.autocast in {torch.get_autocast_dtype(device)}, the pages hold K and V "
                f"computed in {pages.dtype}: run it without autocast"
            )
        self.batch.expand(keys.shape[0])
        if positions is not None and positions.ndim > 1:
            self._see_positions(positions)
        elif not self._positions and any(self.batch.paddings):
            # Without positions a model counts columns, padding included; K in the pages counts tokens only.
            raise ValueError(
                f"a padded batch ({list(self.batch.paddings)} columns on the left) was fed without position_ids, and "
                f"{type(self._model).__name__} shows none to its attention: give position_ids, as generate does"
            )
        if self._fed is not None and [len(row) for row in self._fed] != [width] * keys.shape[0]:
            self._fed = None
        self._width = width
        self.spans, self._places = self.batch.begin(self._number, width, self._fed)
        self.plans.renew()
        self.unread, self._next_layer = False, 0


class DraftModel:
    """A draft model to pass as ``assistant_model``. All attributes but ``generate`` are the model's."""

    def __init__(self, model: PreTrainedModel, cache: Cache, argument: str) -> None:
        """Wrap ``model``, which takes ``cache`` under the name ``argument``."""
        self.cache: Any = cache
        self._model: Any = model
        self._argument = argument

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``generate`` with ``cache`` in place of the one it would make.

        Also passes a mask that hides the padding only, since transformers does not pass on the main model's
        mask: a pad token within the text is text.
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
    """Return the name under which the model's ``forward`` and ``generate`` take a cache in this transformers
    version.
    """
    parameters = inspect.signature(plain_model(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class TierStoreCache(PagedCache):
    """A transformers cache with its K/V in the store's pages and automatic prefix reuse.

    Construction matches the prompts and loads their stored prefixes into HBM. ``get_seq_length()`` is then
    the number of columns that ``generate``, given the whole prompts, will not compute again. Pages of prompt
    and answer are sealed as they fill, so the next request reuses both. The model must have been loaded with
    ``attn_implementation="tierstore"``.

    The cache holds pages until ``close``, so use it as a context manager. ``close`` also removes the hooks
    that the cache puts on the model. Not thread-safe.
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
        timeout_s: float = 10.0,
        wait_for_room_s: float = 1.0,
        storing: Storing = "all",
        exact: bool = False,
        tail: Tail | None = None,
    ) -> None:
        """Match the prompts and load their stored prefixes.

        Pages that cannot arrive by ``deadline_s``, or do not arrive within ``timeout_s``, are computed instead.

        Args:
            store: The store, opened with ``page_specs(model, ...)``.
            input_ids: Whole prompts, ``[B, T]``, padded on the left as ``attention_mask`` says, or one prompt, ``[T]``.
            attention_mask: ``[B, T]``; None if there is no padding.
            model: The model, loaded with ``attn_implementation="tierstore"``.
            draft: The draft model for assisted decoding; pass ``draft_model`` to ``generate``. Its K/V are in
                the same pages, in the KV groups that ``page_specs(model, page_size, draft=draft)`` adds.
            salt: Separates the keys of tenants; see ``TierStore.keys``.
            extra: Everything else that K/V depend on besides tokens; see ``TierStore.keys``.
            storing: "all", "memory-only" (never on disk), "read-only" (reuse pages, keep none) or "no-store" (neither).
            exact: Do not reuse pages that went through a lossy codec or were computed over such pages.
            deadline_s: Seconds until the pages are needed; None for no deadline.
            timeout_s: Longest wait for pages, and for space in HBM.
            wait_for_room_s: Longest wait for HBM space (at most ``timeout_s``) while HBM is full of pages
                that are being saved. After it, stored pages are computed instead of loaded.
            tail: A half-full page that a session kept.

        Raises:
            ValueError: The adapter cannot serve this model or these prompts.
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
                raise ValueError(f"tail continues a single prompt, got {len(prompts)} prompts")
            extra = tuple(extra)
            weights, changed = weights_now(
                store, models, told=any(not isinstance(item, tuple) for item in extra)
            )
            extra = (*extra, *changed)
            terms = Terms(
                store=store,
                pages=pages,
                num_models=len(models),
                weights=weights,
                window=common_window(shapes) if len(prompts) == 1 else None,
                root=root_of(store, pages.page_size, salt, extra),
                salt=salt,
                extra=extra,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                wait_for_room_s=wait_for_room_s,
                storing=storing,
                exact=exact,
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
        """The ``assistant_model`` for ``generate``: the draft model, with its K/V in the same pages."""
        if self._draft is None:
            raise ValueError("this cache was made without a draft model")
        return self._draft

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens, over all rows, that need not be computed."""
        return sum(self.batch.reused_by_tier.values())

    @property
    def reused_by_tier(self) -> Counter[Tier]:
        """``reused_tokens`` by the tier in which they were found."""
        return Counter(self.batch.reused_by_tier)

    @property
    def copied_tokens(self) -> int:
        """Number of reused tokens in pages that were copied because a prompt matches only their beginning."""
        return self.batch.copied_tokens

    @property
    def shared_pages(self) -> int:
        """Number of pages that at least two rows share now."""
        return self.batch.shared_pages

    def _is_prompt(self, input_ids: torch.Tensor) -> bool:
        same = self._prompt.shape == input_ids.shape and self._prompt.dtype == input_ids.dtype
        return same and self._prompt.device == input_ids.device and torch.equal(self._prompt, input_ids)

    def take_tail(self) -> Tail | None:
        """Return the half-full last page of a single sequence, for a later ``tail``. The caller owns it."""
        return self.batch.take_tail()

    def close(self) -> None:
        """Release the leases and free unsealed pages. Sealed pages can still be matched.

        Calling it again has no effect.
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
