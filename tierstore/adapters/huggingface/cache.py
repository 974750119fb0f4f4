"""The caches that transformers sees. Their K and V are in the store's pages and nowhere else."""

# transformers leaves its own base classes untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.batch import PagedBatch, Places, Span
from tierstore.adapters.huggingface.checks import (
    check_mask,
    check_model,
    check_pages,
    check_positions,
    checked_shape,
    common_window,
)
from tierstore.adapters.huggingface.draft import DraftModel
from tierstore.adapters.huggingface.feeding import fed_again, fed_tokens, from_column
from tierstore.adapters.huggingface.identity import kv_shape
from tierstore.adapters.huggingface.layer import TierStoreLayer
from tierstore.adapters.huggingface.opening import Tail, given_back
from tierstore.adapters.huggingface.pages import PageGroups
from tierstore.adapters.huggingface.prefixes import prefixes_of
from tierstore.adapters.huggingface.prompts import unpadded
from tierstore.adapters.huggingface.terms import Storing, Terms, root_of
from tierstore.adapters.huggingface.whole_prompt import show_prompts
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Tier


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which ``model.forward`` and ``model.generate`` take a cache in this version of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class PagedCache(Cache):
    """What one model sees of a batch of sequences in the store's pages. For one thread at a time."""

    def __init__(self, batch: PagedBatch, model: PreTrainedModel, number: int, first_group: int) -> None:
        """``number``: which of the models that share the pages; ``first_group``: the first of its KV groups."""
        shape = kv_shape(model.config)
        self.batch = batch
        self.spans: Sequence[Span] = ()
        self.unread = False
        self._number = number
        self._next_layer = 0
        self._width = 0
        self._fed: list[list[int]] | None = None
        self._places: Places | None = None
        self._closed = False
        self._seen = False
        groups = batch.terms.pages.groups[first_group:]
        layers: list[Any] = [
            TierStoreLayer(self, i, groups[place.group], place.index, shape.windows[place.group])
            for i, place in enumerate(shape.places)
        ]
        super().__init__(layers=layers)
        show_prompts(model)
        self._hook = model.base_model.register_forward_pre_hook(self._see_tokens, with_kwargs=True)

    @property
    def columns(self) -> int:
        """Columns fed so far: tokens, and the padding before them."""
        return self.batch.columns[self._number]

    def write(
        self, layer: TierStoreLayer, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Called by the layers in order: place new K/V. Layer 0 makes room first, the last one seals full pages."""
        if layer.position == 0:
            self._begin(layer, keys, values, positions)
        elif layer.position != self._next_layer or self.unread:
            raise ValueError(
                f'load the model with attn_implementation="{ATTENTION}": its pages were written, not read'
            )
        to = self._places
        assert to is not None
        pages = layer.layer_pages
        pages[to.slots, 0, to.offsets] = keys[to.rows, :, to.columns]
        pages[to.slots, 1, to.offsets] = values[to.rows, :, to.columns]
        self.unread = True
        self._next_layer = layer.position + 1
        if self._next_layer == len(self.layers):
            self.batch.finish(self._number, self._width, self._fed)
            self._fed = None

    def check_padding(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides anything but the padding this cache was made for."""
        check_mask(mask, self.batch.paddings)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; transformers passes a count that is zero or negative."""
        count = int(tokens_to_remove)
        if count > 0:
            raise ValueError(f"crop takes the negative count of tokens to remove, not {count}")
        if count:
            self.batch.crop(self._number, -count)

    def reset(self) -> None:
        """Forget every token."""
        if self._number == 0:
            self.batch.reset()
        else:
            self.batch.crop(self._number, self.columns)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` is: pages are shared, none is copied."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row comes ``repeats`` times; pages are shared."""
        self.batch.expand(len(self.batch.rows) * repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, by number or by a mask of booleans. IndexError for a row that there is not."""
        self.batch.select(torch.arange(len(self.batch.rows))[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refused: TypeError."""
        raise TypeError(
            "a TierStoreCache cannot be copied: open another one for the prompt, what is stored is shared"
        )

    def close(self) -> None:
        """Take part in no forward pass any more. Idempotent."""
        self._closed = True
        self._hook.remove()

    def expect_prompt(self, input_ids: torch.Tensor) -> None:
        """Raise ValueError if ``generate`` is given another prompt than this cache was made for."""
        if self.columns:
            self._expect([[int(token) for token in row] for row in input_ids.tolist()], 0)

    def _see_tokens(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before each forward pass of the model that was given this cache: remember the tokens it is fed.

        Assisted decoding feeds a warm cache the whole prompt again: what the cache holds is left out here.
        """
        if not any(each is self for each in (*args, *kwargs.values())):
            return None
        changed, first = None, self.columns
        if fed_again(args, kwargs, self.columns, self.batch.paddings):
            self._expect(fed_tokens(args, kwargs), 0)
            changed = args, kwargs = from_column(args, kwargs, self.columns)
        self._fed = fed_tokens(args, kwargs)
        self._expect(self._fed, first)
        self._seen = True
        return changed

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
        """Refuse what would give wrong answers in silence, then make room for the new columns."""
        if self._closed:
            raise ValueError("this TierStoreCache is closed")
        if not self._seen:
            raise ValueError("this TierStoreCache was made for another model than the one that runs")
        self._seen = False
        if keys.requires_grad or values.requires_grad:
            raise ValueError("pages keep no gradients: run the model under torch.no_grad()")
        pages, width = layer.layer_pages, keys.shape[2]
        for given in (keys, values):
            if given.dtype != pages.dtype or given.device != pages.device:
                raise ValueError(
                    f"the model computes {given.dtype} on {given.device}, the pages hold {pages.dtype} on "
                    f"{pages.device}"
                )
        self.batch.expand(keys.shape[0])
        if positions is not None and positions.ndim == 2:
            check_positions(positions, self.batch.paddings, self.columns)
        if self._fed is not None and [len(row) for row in self._fed] != [width] * keys.shape[0]:
            self._fed = None
        self._width = width
        self.spans, self._places = self.batch.begin(self._number, width, self._fed)
        self.unread, self._next_layer = False, 0


class TierStoreCache(PagedCache):
    """A transformers cache with its K/V in the store's pages, and prefix reuse by itself.

    Construction matches the prompts, brings their stored prefixes into HBM and waits for them: ``get_seq_length()``
    is then the number of columns that ``generate``, given the whole prompts, will not compute again. Pages are sealed
    as they fill, prompt and answer, so that the next request reuses both. The model must have been loaded with
    ``attn_implementation="tierstore"``.

    It holds pages until ``close``: use it as a context manager. For one thread at a time.
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
        storing: Storing = "all",
        exact: bool = False,
        tail: Tail | None = None,
    ) -> None:
        """``input_ids``: whole prompts, ``[B, T]`` padded on the left as ``attention_mask`` says, or one, ``[T]``.

        ``draft``: the model that ``generate`` is given as assistant (see ``draft_model``); its K/V are in the same
        pages, in the KV groups that ``page_specs(model, page_size, draft=draft)`` adds. ``salt``, ``extra``: as in
        ``TierStore.keys``. ``storing``: "all", "memory-only" (never on disk), "read-only" (reuses, keeps nothing) or
        "no-store" (neither). ``exact``: stored pages that went through a lossy codec, or were computed over such, are
        computed anew. ``tail``: a half full page that a session kept.

        Pages that cannot be there by ``deadline_s``, or are not within ``timeout_s``, are computed instead; an
        allocation waits up to ``timeout_s`` for room. Raises ValueError for a model or prompts it cannot serve.
        """
        with given_back(store, tail):
            pages = PageGroups(store)
            models = [model] if draft is None else [model, draft]
            shapes = [checked_shape(each) for each in models]
            check_pages(pages, shapes)
            check_model(store, models, pages.page_size)
            prompts, width = unpadded(input_ids, attention_mask)
            if tail is not None and len(prompts) != 1:
                raise ValueError(f"a tail goes on one prompt, not {len(prompts)}")
            extra = tuple(extra)
            terms = Terms(
                store=store,
                pages=pages,
                prefixes=prefixes_of(store, pages.page_size),
                num_models=len(models),
                window=common_window(shapes) if len(prompts) == 1 else None,
                root=root_of(store, pages.page_size, salt, extra),
                salt=salt,
                extra=extra,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
                storing=storing,
                exact=exact,
            )
        batch = PagedBatch(terms, prompts, width, tail)
        super().__init__(batch, model, number=0, first_group=0)
        self._draft: DraftModel | None = None
        if draft is not None:
            paged = PagedCache(batch, draft, number=1, first_group=len(shapes[0].windows))
            self._draft = DraftModel(draft, paged, cache_argument(draft))

    @property
    def draft_model(self) -> DraftModel:
        """What to give ``generate`` as ``assistant_model``: the draft model, with its K/V in the same pages."""
        if self._draft is None:
            raise ValueError("this cache was made without a draft model")
        return self._draft

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompts that need no computation, of all rows."""
        return sum(self.batch.reused_by_tier.values())

    @property
    def reused_by_tier(self) -> Counter[Tier]:
        """``reused_tokens`` by the tier they were found in."""
        return Counter(self.batch.reused_by_tier)

    @property
    def copied_tokens(self) -> int:
        """Of the reused tokens, those in pages that were copied because a prompt leaves a stored one inside them."""
        return self.batch.copied_tokens

    @property
    def shared_pages(self) -> int:
        """Pages that at least two rows have in common now."""
        return self.batch.shared_pages

    def take_tail(self) -> Tail | None:
        """The half full last page of a single sequence, for ``tail`` of a later cache: the caller's from now on."""
        return self.batch.take_tail()

    def close(self) -> None:
        """Release the leases and free the pages that are not sealed. Sealed pages stay matchable. Idempotent."""
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
