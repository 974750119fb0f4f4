"""The cache that transformers sees. Its K and V are in the store's pages and nowhere else."""

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
from transformers.cache_utils import Cache, CacheLayerMixin

from tierstore.adapters.huggingface.attention import ATTENTION, HANDLE
from tierstore.adapters.huggingface.identity import check_supported
from tierstore.adapters.huggingface.sequence import PagedSequence
from tierstore.keys import Extra
from tierstore.store import TierStore
from tierstore.types import Tier


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which ``model.forward`` and ``model.generate`` take a cache in this version of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class TierStoreLayer(CacheLayerMixin):
    """One model layer's handle on the sequence. ``keys`` and ``values`` stay None for ever."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: TierStoreCache, index: int) -> None:
        super().__init__()
        self._owner = owner
        self.index = index

    @property
    def pages(self) -> torch.Tensor:
        """All pages of the store."""
        return self._owner.sequence.pages

    @property
    def start(self) -> int:
        """Tokens before those of the forward pass under way."""
        return self._owner.start

    @property
    def slots(self) -> torch.Tensor:
        """The block table of the forward pass under way, int64 ``[pages]``."""
        return self._owner.table

    def check_mask(self, mask: torch.Tensor | None) -> None:
        """Raise ValueError for a mask that hides a token: batch 1 needs no padding, and the pages hold none."""
        if self.index == 0 and mask is not None and not (mask.ndim == 2 and bool(mask.all())):
            raise ValueError(
                "TierStoreCache supports neither padding nor custom masks: pass one unpadded prompt"
            )

    def mark_read(self) -> None:
        """The attention function says that it reads this layer from the pages."""
        self._owner.unread = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens, ``[1, num_kv_heads, q, head_dim]`` each, into the pages and return them.

        Puts this handle into the attention call's keywords, so that "tierstore" attention reads the rest itself.
        Raises ValueError for wrong use, CapacityError if HBM has no room; then nothing was written.
        """
        attention: dict[str, Any] | None = kwargs.get("kwargs")
        if attention is None:
            raise ValueError(
                "this model does not hand its attention keywords to the cache: TierStoreCache cannot serve it"
            )
        self._owner.write(self.index, key_states, value_states, attention.get("position_ids"))
        attention[HANDLE] = self
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages exist."""

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._owner.sequence.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of K/V for a mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no maximum of its own; HBM's capacity ends in CapacityError."""
        return -1


class TierStoreCache(Cache):
    """A transformers cache for one sequence, with its K/V in the store's pages and prefix reuse by itself.

    Construction matches the prompt, brings the stored prefix into HBM and waits for it: ``get_seq_length()`` is then
    the number of tokens that ``generate``, given the whole prompt, will not compute again. Pages are sealed as they
    fill, prompt and answer, so that the next request reuses both. The model must have been loaded with
    ``attn_implementation="tierstore"``.

    It holds pages until ``close``: use it as a context manager. For one thread at a time.
    """

    def __init__(
        self,
        store: TierStore,
        input_ids: torch.Tensor | Sequence[int],
        *,
        model: PreTrainedModel,
        salt: bytes = b"",
        extra: Iterable[Extra] = (),
        deadline_s: float | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """``input_ids``: the whole prompt, ``[1, T]`` or ``[T]``. ``salt``, ``extra``: as in ``TierStore.keys``.

        Pages that cannot be there by ``deadline_s``, or are not within ``timeout_s``, are computed instead; an
        allocation waits up to ``timeout_s`` for room. Raises ValueError for a model or a prompt it cannot serve.
        """
        _check_model(model, store)
        self.sequence = PagedSequence(
            store, _one_prompt(input_ids), salt=salt, extra=extra, deadline_s=deadline_s, timeout_s=timeout_s
        )
        num_layers = self.sequence.pages.shape[1]
        super().__init__(layers=[TierStoreLayer(self, index) for index in range(num_layers)])
        self.start = self.sequence.num_tokens
        self.table = torch.empty(0, dtype=torch.long)
        self.unread = False
        self._next_layer = 0
        self._fed: list[int] | None = None
        self._places = (self.table, self.table)
        self._closed = False
        self._hook = model.base_model.register_forward_pre_hook(self._see_tokens, with_kwargs=True)

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that came from the store."""
        return self.sequence.reused_tokens

    @property
    def reused_by_tier(self) -> Counter[Tier]:
        """``reused_tokens`` by the tier their pages were found in."""
        return Counter(self.sequence.reused_by_tier)

    def write(
        self, index: int, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Called by the layers in order: place new K/V. Layer 0 makes room first, the last one seals full pages."""
        width = keys.shape[2]
        if index == 0:
            self._begin(keys, width, positions)
        elif index != self._next_layer or self.unread:
            raise ValueError(
                f'load the model with attn_implementation="{ATTENTION}": its pages were written, not read'
            )
        slots, offsets = self._places
        pages = self.sequence.pages
        pages[slots, index, 0, offsets] = keys[0].transpose(0, 1)
        pages[slots, index, 1, offsets] = values[0].transpose(0, 1)
        self.unread = True
        self._next_layer = index + 1
        if self._next_layer == len(self.layers):
            self.sequence.advance(width, self._fed)
            self._fed = None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; transformers passes a count that is zero or negative."""
        if tokens_to_remove == 0:
            return
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative count of tokens to remove, not {tokens_to_remove}")
        self.sequence.truncate(max(0, self.sequence.num_tokens + int(tokens_to_remove)))

    def reset(self) -> None:
        """Forget every token."""
        self.sequence.truncate(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: one sequence has no beams."""
        raise ValueError("TierStoreCache holds one sequence: beam search is not supported")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused unless it changes nothing."""
        if repeats != 1:
            raise ValueError("TierStoreCache holds one sequence: batches are not supported")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused."""
        raise ValueError("TierStoreCache holds one sequence: batches are not supported")

    def close(self) -> None:
        """Release the lease and free the pages that are not sealed. Sealed pages stay matchable. Idempotent."""
        self._closed = True
        self._hook.remove()
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _see_tokens(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass of the model that was given this cache: remember the tokens it is fed."""
        if self is not kwargs.get("cache", kwargs.get("past_key_values")):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._fed = None
        if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[0] == 1:
            self.sequence.expect(fed := ids[0].tolist())
            self._fed = fed

    def _begin(self, keys: torch.Tensor, width: int, positions: torch.Tensor | None) -> None:
        """Refuse what would give wrong answers in silence, then make room for ``width`` tokens."""
        if self._closed:
            raise ValueError("this TierStoreCache is closed")
        if keys.shape[0] != 1:
            raise ValueError(f"TierStoreCache holds one sequence, the model runs a batch of {keys.shape[0]}")
        pages, start = self.sequence.pages, self.sequence.num_tokens
        if keys.dtype != pages.dtype or keys.device != pages.device:
            raise ValueError(
                f"the model computes {keys.dtype} on {keys.device}, the pages hold {pages.dtype} on {pages.device}"
            )
        if positions is not None and positions.ndim == 2:
            _check_positions(int(positions[0, -1]), start, width)
        if self._fed is not None and len(self._fed) != width:
            self._fed = None
        self.table = self.sequence.extend(width)
        self._places = self.sequence.places(width)
        self.start, self.unread, self._next_layer = start, False, 0


def _check_model(model: PreTrainedModel, store: TierStore) -> None:
    config = model.config.get_text_config(decoder=True)
    check_supported(config.to_dict())
    chosen = config._attn_implementation
    if chosen != ATTENTION:
        raise ValueError(
            f'the model uses attention "{chosen}": load it with attn_implementation="{ATTENTION}"'
        )
    pages = store.pages
    if isinstance(pages, torch.Tensor) and pages.ndim == 6 and pages.shape[1] != config.num_hidden_layers:
        raise ValueError(
            f"the store's pages have {pages.shape[1]} layers, the model {config.num_hidden_layers}"
        )


def _check_positions(last: int, start: int, width: int) -> None:
    """Positions tell padding, and a warm cache fed the whole prompt again, which generate() would not notice."""
    if last != start + width - 1:
        raise ValueError(
            f"the last token fed has position {last}, but a cache of {start} tokens was fed {width} more. There may "
            "be no padding (if the prompt holds the pad token, give generate an attention_mask of ones), and with "
            "assisted decoding a warm cache takes only the tokens it lacks, with a mask for the whole prompt"
        )


def _one_prompt(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(
            f"TierStoreCache takes one prompt, [1, T] or [T], not a batch of shape {tuple(ids.shape)}"
        )
    return [int(token) for token in ids.tolist()]
