"""Folders from which transformers loads models."""

# Some functions of transformers have no types:
# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def save_with_byte_tokenizer(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model with a tokenizer that has one token per byte. Returns ``folder``.

    The model's vocabulary must have at least 256 tokens.
    """
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
