"""TierStore as the cache of Hugging Face transformers: ``generate`` with K/V in the store's pages.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tierstore")
    with TierStore.open(config, page_specs(model, 64)) as store:
        with TierStoreCache(store, input_ids, attention_mask, model=model) as cache:
            model.generate(input_ids, attention_mask=attention_mask, **{cache_argument(model): cache})

Importing this package registers the attention function "tierstore" with transformers. It serves models with K and V per
head (MHA, GQA, MQA), full attention and sliding windows: batches, several answers to a prompt, beams and assisted
decoding.

The modules, bottom up: ``identity`` (whether pages belong to a model; ``inventory`` finds everything that decides it),
``request`` (options, prompts, pages), ``prefix`` (the stored prefix of a prompt), ``sequence`` (one row), ``batch``
(all rows), ``attention`` (reads the rows' pages), ``model_spec`` (the geometry of a model's pages), ``forward_args``
(what a model is fed), ``hooks`` (what is attached to a user's model while a cache is open), ``cache`` (what
transformers sees) and ``session`` (chats).
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
