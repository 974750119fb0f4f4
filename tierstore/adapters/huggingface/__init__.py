"""TierStore as the cache of Hugging Face transformers: ``generate`` with K/V in the store's pages.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tierstore")
    spec = page_spec(model.config, 64, model.dtype, model_identity(model))
    with TierStore.open(config, spec) as store:
        with TierStoreCache(store, input_ids, model=model) as cache:
            model.generate(input_ids, **{cache_argument(model): cache})

Importing this package registers the attention function "tierstore" with transformers. For models of full attention
with K and V per head (MHA, GQA, MQA: the Llama family), batch 1.

``sequence`` keeps a sequence's block table on the store, ``attention`` reads it, ``cache`` is what transformers
sees, ``identity`` derives the geometry and the identity of a model.
"""

from __future__ import annotations

from tierstore.adapters.huggingface.attention import ATTENTION
from tierstore.adapters.huggingface.cache import TierStoreCache, cache_argument
from tierstore.adapters.huggingface.identity import model_identity, page_spec

__all__ = ["ATTENTION", "TierStoreCache", "cache_argument", "model_identity", "page_spec"]
