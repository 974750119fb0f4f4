"""The page keys of a document, computed as the transformers adapter does. Imports torch and transformers."""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tierstore.adapters.huggingface import page_specs
from tierstore.archive.closed_store import ClosedSource, Shard
from tierstore.cli.output import progress
from tierstore.demo.model import ModelError, model_folder
from tierstore.errors import ConfigError
from tierstore.keys import namespace, page_keys
from tierstore.page import DTYPE_NBYTES, PageLayout
from tierstore.types import PageKey

_GOES_ON = ("\n\nWhat", "\n\n1", " and")
"""Texts that may follow a document. Tokens that depend on them are not part of the document's pages."""


class Document:
    """A text file and the model that reads it."""

    def __init__(self, path: Path, model: str, dtype: str) -> None:
        """Load the model. ConfigError if the model or the text cannot be loaded."""
        self.model, self.dtype = model, dtype
        try:
            self._text = _read(path)
            if dtype not in DTYPE_NBYTES:
                raise ConfigError(f"--dtype must be one of {', '.join(sorted(DTYPE_NBYTES))}, got {dtype!r}")
            folder = model_folder(model, progress.print)
            transformers_logging.disable_progress_bar()
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, local_files_only=True
            )
            self._weights: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
        except (ModelError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def shards_among(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return the shards with pages of this model, of any page size."""
        return [
            shard
            for shard in shards
            if self._layout(shard).fingerprint == shard.description.layout.fingerprint
        ]

    def keys(self, source: ClosedSource) -> list[PageKey]:
        """Return the keys of every full page of the document.

        A prompt may begin with the document in several ways (chat roles, special tokens): the way with most pages
        in ``source`` is taken.

        Raises:
            ConfigError: The first page is missing, however it begins: nothing would be exported.
        """
        there = set(source.keys())
        ways = [self._keys(tokens, source) for tokens in self._beginnings()]
        best = max(ways, key=lambda keys: len(list(takewhile(there.__contains__, keys))))
        if not best:
            raise ConfigError("the document is shorter than one page of tokens")
        if best[0] not in there:
            raise ConfigError(
                "no stored page begins with the document, as the first words of a chat or on its own: the model must "
                "have read it without salt or extras; otherwise export its pages with --keys"
            )
        return best

    def _layout(self, shard: Shard) -> PageLayout:
        try:
            return PageLayout.of(page_specs(self._weights, shard.description.layout.page_size))
        except ValueError as error:
            raise ConfigError(f"--model {self.model}: {error}") from error

    def _keys(self, tokens: Sequence[int], source: ClosedSource) -> list[PageKey]:
        layout = source.description.layout
        return page_keys(
            tokens,
            page_size=layout.page_size,
            namespace=namespace(layout.specs, loss_class=source.description.loss_class),
            group=layout.specs[0].group,
            shard=layout.shard,
        )

    def _beginnings(self) -> list[list[int]]:
        """Return what prompts with the document have in common, whatever follows it."""
        ways = []
        if self._tokenizer.chat_template:
            for role in ("user", "system"):
                ways.append(_common([self._chat(role, self._text + more) for more in _GOES_ON]))
        for special in (True, False):
            ways.append(_common([self._tokens(self._text + more, special=special) for more in _GOES_ON]))
        return ways

    def _chat(self, role: str, text: str) -> list[int]:
        chat = [{"role": role, "content": text}]
        prompt = str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        return self._tokens(prompt, special=False)

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--doc {path}: cannot read the text file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--doc {path}: the text is not UTF-8") from error


def _common(ways: Sequence[Sequence[int]]) -> list[int]:
    """Return the common prefix."""
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*ways, strict=False))]
