"""Test a real model in float32 on a GPU, with more documents than HBM and host memory hold.

Its answers must equal those without the store.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.adapters.tiny import generate, plain
from tests.support.pages import PATIENCE_S
from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, page_specs
from tierstore.config import load_config
from tierstore.demo.model import SMOLLM2, is_prepared, prepared_folder
from tierstore.store import TierStore
from tierstore.types import Tier

FOLDER = prepared_folder(SMOLLM2)
PAGE, DOCUMENTS, TOKENS, NEW = 64, 6, 7000, 8
TEXTS = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_prepared(FOLDER), reason="SmolLM2 is not prepared: tierstore demo does it"),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
    )
    model.generation_config.eos_token_id = None
    torch.nn.Module.to(model, "cuda:0")
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def documents() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    texts = [*sorted(TEXTS.glob("*.md")), *sorted((TEXTS / "docs").rglob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in texts)
    ids: list[int] = tokenizer(text).input_ids
    step = len(ids) // DOCUMENTS
    assert step >= TOKENS
    return [ids[i * step : i * step + TOKENS] for i in range(DOCUMENTS)]


def test_six_documents_over_a_pool_for_two_answer_like_plain_transformers(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    found, tokenizer = documents(), AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    questions = [tokenizer(f"\n\n{word} is this text about?").input_ids for word in ("What", "Who")]
    specs = page_specs(model, PAGE)
    document = (TOKENS // PAGE + 3) * sum(spec.page_nbytes for spec in specs)
    config: dict[str, Any] = {
        "hbm": {"capacity": 2 * document, "device": "cuda:0"},
        "host": {"capacity": 3 * document},
        "nvme": {"path": str(tmp_path), "capacity": 12 * document},
    }
    seen: Counter[Tier] = Counter()
    with TierStore.open(load_config(config), specs) as store:
        # The last documents are still in HBM, earlier ones are in host memory, and the first ones are only on disk.
        for index, question in [(i, 0) for i in range(DOCUMENTS)] + [(i, 1) for i in (5, 3, 0, 0, 1, 4, 2)]:
            prompt = found[index] + questions[question]
            expected = plain(model, prompt, max_new_tokens=NEW)
            with TierStoreCache(store, prompt, model=model, timeout_s=PATIENCE_S) as cache:
                assert generate(model, prompt, cache, max_new_tokens=NEW) == expected
                assert cache.reused_tokens >= (TOKENS // PAGE * PAGE if question else 0)
                seen += cache.reused_by_tier
            store.drain(PATIENCE_S)
        store.check()
    assert min(seen[Tier.HBM], seen[Tier.HOST], seen[Tier.NVME]) >= TOKENS // 2, seen
