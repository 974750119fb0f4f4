"""TierStore as the cache of Hugging Face transformers: ``generate`` with K/V in the store's pages.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tierstore")
    with TierStore.open(config, page_specs(model, 64)) as store:
        with TierStoreCache(store, input_ids, attention_mask, model=model) as cache:
            model.generate(input_ids, attention_mask=attention_mask, **{cache_argument(model): cache})

Importing this package registers the attention function "tierstore" with transformers. For models with K and V per head
(MHA, GQA, MQA), full attention and sliding windows: batches, several answers to a prompt, beams, assisted decoding.

Bottom up: ``identity`` (whose pages they are; ``inventory`` finds all that decides it), ``request`` (options, prompts,
pages), ``prefix`` (the stored prefix of a prompt), ``sequence`` (one row), ``batch`` (all rows), ``attention`` (reads
them), ``model_spec`` (what the pages of a model look like), ``forward_args`` (what a model is fed), ``hooks`` (what
is on a user's model while a cache is open), ``cache`` (what transformers sees), ``session`` (chats).
"""

from __future__ import annotations

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.cache import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.identity import model_identity
from tierstore.adapters.huggingface.model_spec import page_spec, page_specs
from tierstore.adapters.huggingface.session import PrefixCache, Session, Turn

__all__ = [
    "ATTENTION",
    "PrefixCache",
    "Session",
    "TierStoreCache",
    "Turn",
    "cache_argument",
    "model_identity",
    "page_spec",
    "page_specs",
]
