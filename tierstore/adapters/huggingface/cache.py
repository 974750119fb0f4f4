"""The cache that a user makes. Its K and V are in the store's pages and nowhere else."""

# transformers leaves its own base classes untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedModel

from tierstore.adapters.huggingface.batch import PagedBatch
from tierstore.adapters.huggingface.draft import DraftModel
from tierstore.adapters.huggingface.forward_args import (
    check_pages,
    check_tokens,
    checked_shape,
    common_window,
)
from tierstore.adapters.huggingface.identity import weights_now
from tierstore.adapters.huggingface.paged_cache import PagedCache
from tierstore.adapters.huggingface.prefix import Tail, given_back
from tierstore.adapters.huggingface.request import PageGroups, Storing, Terms, root_of, unpadded
from tierstore.adapters.huggingface.weights import plain_model
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Tier


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which ``model.forward`` and ``model.generate`` take a cache in this version of transformers."""
    parameters = inspect.signature(plain_model(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


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
        wait_for_room_s: float = 1.0,
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
        allocation waits up to ``timeout_s`` for room. Where HBM is full of pages that are being saved, stored pages
        wait up to ``wait_for_room_s`` (at most ``timeout_s``) for their room before they are computed. Raises
        ValueError for a model or prompts it cannot serve.
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
                raise ValueError(f"a tail goes on one prompt, not {len(prompts)}")
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
        # A copy: the caller may go on to use its tensor.
        self._prompt = torch.as_tensor(input_ids).clone()
        batch = PagedBatch(terms, prompts, width, tail)
        super().__init__(batch, models[0], number=0, first_group=0)
        self._draft: DraftModel | None = None
        if draft is not None:
            paged = PagedCache(batch, models[1], number=1, first_group=len(shapes[0].windows))
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

    def _is_prompt(self, input_ids: torch.Tensor) -> bool:
        same = self._prompt.shape == input_ids.shape and self._prompt.dtype == input_ids.dtype
        return same and self._prompt.device == input_ids.device and torch.equal(self._prompt, input_ids)

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
