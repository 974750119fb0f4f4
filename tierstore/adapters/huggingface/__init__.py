"""A KV cache for Hugging Face transformers that keeps K and V in the store's pages.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tierstore")
    with TierStore.open(config, page_specs(model, 64)) as store:
        with TierStoreCache(store, input_ids, attention_mask, model=model) as cache:
            model.generate(input_ids, attention_mask=attention_mask, **{cache_argument(model): cache})

Importing this package registers the attention function "tierstore" with transformers. The package supports
models that have separate K and V per head (MHA, GQA, MQA) and use full attention, sliding windows or both.
Batches, several answers per prompt, beam search and assisted decoding are supported, too.

The modules, from lowest to highest level: ``identity`` (whether pages belong to a model; uses ``inventory``,
which describes everything that affects K/V), ``request`` (options, prompts, pages), ``prefix`` (the stored
prefix of a prompt), ``sequence`` (one row), ``batch`` (all rows), ``attention`` (reads the rows' pages),
``model_spec`` (the geometry of a model's pages), ``forward_args`` (the inputs of a forward pass), ``hooks``
(that an open cache adds to the user's model), ``cache`` (the cache that transformers uses) and ``session``
(chats).
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
